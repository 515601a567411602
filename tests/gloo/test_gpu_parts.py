"""The parts of `make test-gpu` in their short form, on CPU processes: what goes to a GPU is right code."""

from pathlib import Path

import pytest

from tests.gpu_parts import PARTS, Stage

pytestmark = pytest.mark.gloo

TWO = ("pipelines", "loop")
"""Parts for which two ranks show what four would."""


OTHERS = ("exact", "faults", "checkpoints", "curve", "auto", "switches", "overlap")
"""Parts that are much as test_exact.py, test_faults.py, test_checkpoint.py, test_trainer.py, test_auto.py,
test_switch_gloo.py and test_overlap.py: the slow test below runs them."""


@pytest.mark.parametrize("name", [name for name in PARTS if name not in OTHERS])
def test_part(name: str, tmp_path: Path) -> None:
    figures = PARTS[name].run(Stage("cpu", 2 if name in TWO else 4, True, tmp_path))
    assert figures


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PARTS)
def test_whole_part(name: str, ranks: int, tmp_path: Path) -> None:
    assert PARTS[name].run(Stage("cpu", ranks, False, tmp_path))
