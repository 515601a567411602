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
