"""Every part of `tests/gpu_parts.py` in full, on what this machine has (`tests/gpu_machine.py`)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu_machine import CPU, Machine, best_setup
from tests.gpu_parts import PARTS, Stage

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PARTS)
def test_part(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    setup = best_setup(Machine.found())
    stage = Stage("cpu" if setup.kind == CPU else "cuda", setup.ranks, tmp_path)
    for key, value in PARTS[name].run(stage).items():
        record_property(key, value)
