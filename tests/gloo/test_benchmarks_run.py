"""The switch benchmarks run, print a table and write what they found. Nothing here looks at a time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).resolve().parents[2]


def run_quick(script: str, path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a benchmark prints, and what it writes."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", "--json", str(path), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["machine"]["ranks"] == found["options"]["ranks"]
    assert "| " in done.stdout
    return done.stdout, found


def test_switch(tmp_path: Path) -> None:
    text, found = run_quick("switch.py", tmp_path / "out" / "switch.json")
    load, returned = found["rows"]
    assert load["pair"] in text
    assert returned["pair"] in text
    assert {"ours", "raw whole", "pack and unpack", "local copies"} < set(returned["seconds"])
    assert {"per slice", "all-gather"} < set(load["seconds"])
    for row in found["rows"]:
        assert row["wire_bytes"] > 0
        assert all(len(values) == found["options"]["rounds"] for values in row["all_seconds"].values())
        assert row["memory"]["reserved_bytes"] > 0
        assert 0 < row["ratios"]["raw / ours"] <= row["ratios"]["raw plus copies / ours"]


@pytest.mark.parametrize("nics", [(), ("--nics-per-node", "1")])
def test_slow_link(tmp_path: Path, nics: tuple[str, ...]) -> None:
    text, found = run_quick("slow_link.py", tmp_path / "slow_link.json", *nics)
    (row,) = found["rows"]
    assert row["pair"] in text
    direct, relay = row["algorithm1"], row["relay"]
    # two nodes of two: every node lacks half of what each of its ranks needs
    assert direct["inter_bytes"] == 2 * relay["inter_bytes"] > 0
    assert relay["intra_bytes"] > direct["intra_bytes"]
    for side in (direct, relay):
        assert len(side["all_seconds"]) == found["options"]["rounds"]
        assert side["predicted"]["groups"] >= side["predicted"]["ports"] > 0


@pytest.mark.slow
def test_cost_model(tmp_path: Path) -> None:
    text, found = run_quick("cost_model.py", tmp_path / "cost_model.json", "--cache", str(tmp_path / "cache"))
    (model,) = found["models"]
    assert len(list((tmp_path / "cache").glob("*.json"))) == 1
    cases = {row["case"] for row in model["rows"]}
    assert cases == {"32", "64", "mixed"}
    assert {row["strategy"] for row in model["rows"]} == {"dp2", "tp2", "pp2"}
    for row in model["rows"]:
        assert len(row["all_seconds"]) == found["options"]["rounds"]
        assert row["predicted_s"] == row["predicted_compute_s"] + row["predicted_switch_s"]
        assert row["measured_s"] >= row["measured_compute_s"] > 0
        assert row["predicted_cpu_s"] > 0
        assert row["measured_cpu_s"] > 0
    assert -1 <= model["summary"]["all"]["tau"] <= 1
    assert model["summary"]["all"]["worst_regret"] >= 0
    assert "over all: tau" in text


@pytest.mark.slow
def test_auto_over_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOTSPA_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "auto.json"
    names = ["all equal", "commoncrawl"]
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--quick", "--json", str(path)]
    done = subprocess.run([*command, "--distributions", *names], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert [row["distribution"] for row in found["rows"]] == names
    for row in found["rows"]:
        assert {"auto", "static again"} < set(row["seconds"])
        assert all(
            len(values) == found["options"]["rounds"] == len(row["phases"]) for values in row["seconds"].values()
        )
        assert row["wall"]["noise"] >= 0
        assert row["distribution"] in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_peers(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--quick", "--json", str(path)]
    command += ["--logs", str(tmp_path / "logs"), "--cache", str(tmp_path / "cache"), "--lengths", "commoncrawl"]
    sides = ["--sides", "DDP, padded", "accelerate", "plain loop", "ours, dp4", "ours, tp4", "ours, auto"]
    done = subprocess.run([*command, *sides], cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = json.loads(path.read_text())["cells"].values()
    found = cell["sides"]
    assert "distributed type MULTI_CPU" in found["FSDP2 of accelerate, flattened"]["reason"]
    assert "reason" in found["ours, dp4 (limit)"]
    ran = {name: each for name, each in found.items() if "loss" in each}
    assert {"Trainer + DDP, padded", "tp4 of transformers, plain loop, packed", "ours, dp4", "ours, tp4"} <= ran.keys()
    assert {"ours, auto", "ours, auto (limit)"} <= ran.keys()
    losses = [each["loss"] for each in ran.values()]
    assert max(losses) - min(losses) < 1e-4
    for name, each in ran.items():
        assert [len(seconds) for seconds in each["seconds"]] == [4]
        assert each["tokens"] == sum(cell["lengths"]), name
        assert each["slots"] >= each["tokens"]
        assert each["peak_bytes"] > 0
    assert "losses of the exact sides agree to" in done.stdout
