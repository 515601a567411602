"""The planner benchmark runs and writes its results; and plans do not depend on the hash seed of a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, hash_seed: str = "0") -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_quick_run_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "planner.json"
    text = python("benchmarks/planner.py", "--quick", "--json", str(file))
    result = json.loads(file.read_text())
    assert {"pairs", "irregular", "modelled", "chains", "times"} <= set(result)
    assert result["reached"] == {"regular_max": True, "irregular_mean": True}
    assert {row["kind"] for row in result["pairs"]} >= {"weights", "gradient return"}
    assert "largest ratio" in text


DIGESTS = """
import sys
sys.path.insert(0, "benchmarks")
from planner_cases import cluster_of, gradients, in_order, llama_vector, master, weights
from hf_hotspa.strategy import Strategy
from hf_hotspa.plan.planner import PLANNERS, plan_load, plan_return

cluster = cluster_of(16, 4, "device")
sizes = [2] * len(llama_vector("7B").segments)
a, b, c = in_order([Strategy(1, 8, 2), Strategy(4, 2, 2), Strategy(2, 2, 4)], "7B")
store = master("7B", 16)
for planner in PLANNERS:
    plans = [plan_load(weights("7B", x), weights("7B", y), cluster, sizes, planner) for x, y in ((a, b), (b, c), (c, a))]
    plans.append(plan_load([store, weights("7B", a)], weights("7B", b), cluster, sizes, planner))
    plans.append(plan_return(gradients("7B", c), store, cluster, sizes, planner))
    print(*(plan.digest for plan in plans))
"""


def test_plans_are_equal_whatever_the_hash_seed() -> None:
    first, second = (python("-c", DIGESTS, hash_seed=seed) for seed in ("1", "4321"))
    assert first == second
    assert len(set(first.split())) > 10
