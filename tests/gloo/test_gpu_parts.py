"""The parts of `make test-gpu` on CPU processes: what goes to a GPU is right code.

Most are much as tests of this folder, so that `make test` has the loop alone, with fewer steps.
"""

from pathlib import Path

import pytest

from tests.gpu_parts import PARTS, Stage, loop

pytestmark = pytest.mark.gloo


def test_the_loop_leaves_nothing(tmp_path: Path) -> None:
    assert loop(Stage("cpu", 2, tmp_path), steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PARTS)
def test_whole_part(name: str, ranks: int, tmp_path: Path) -> None:
    assert PARTS[name].run(Stage("cpu", ranks, tmp_path))
