"""The quick form of the benchmark for one GPU runs, with every side that its page names."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_one_gpu(tmp_path: Path) -> None:
    from benchmarks import one_gpu  # type: ignore[import-not-found]

    path = tmp_path / "one_gpu.json"
    one_gpu.main(["--quick", "--json", str(path)])
    found = json.loads(path.read_text())["sides"]
    assert set(found) == {
        "ours, auto",
        "ours, dp1 in packs of 2048",
        "Trainer, flattened, micro-batches of 4",
        "Trainer, padded, micro-batches of 1",
    }
    for name, (run,) in found.items():
        assert not run["failed"], name
        assert len(run["seconds"]) == 3
        assert run["peak_bytes"] > 0
