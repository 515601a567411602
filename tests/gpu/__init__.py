"""The tests of `make test-gpu`. Like pytest (pyproject.toml), they see the modules of benchmarks/ by their names."""

import sys
from pathlib import Path

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.insert(0, BENCHMARKS)
