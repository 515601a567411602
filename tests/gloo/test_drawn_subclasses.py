"""Drawn subclasses of a Trainer on two processes: equal to the stock Trainer under DDP, or rejected by name."""

from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.overriding import outcome, wrong_with

pytestmark = pytest.mark.gloo


def run_all(rank, world_size, numbers, stock, folder):
    return [outcome(number, stock, world_size, Path(folder) / f"{number}-{stock}") for number in numbers]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_drawn_subclasses_are_equal_or_rejected_by_name(tmp_path):
    numbers = list(range(41, 81))
    stock = run_ranks(2, run_all, numbers, True, str(tmp_path), timeout=560)
    ours = run_ranks(2, run_all, numbers, False, str(tmp_path), timeout=560)
    wrong = {}
    for number, expected, found in zip(numbers * 2, [*stock[0], *stock[1]], [*ours[0], *ours[1]], strict=True):
        if text := wrong_with(found, expected):
            wrong[number] = text[:4]
    assert not wrong
