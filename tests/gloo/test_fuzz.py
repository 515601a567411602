"""Random mixes of strategies, and random training runs, are exact or refused by name: ten seeds of each, and under `slow` others,
drawn anew on a desk. A draw that fails is shrunk to a line that runs it again."""

import os
import time

import pytest

from tests import strategy_fuzz, trainer_fuzz

pytestmark = pytest.mark.gloo

FUZZERS = {"strategies": (strategy_fuzz.FUZZER, (2, 3, 4)), "trainers": (trainer_fuzz.FUZZER, (1, 2, 4))}
WORLDS = [(name, world) for name, (_, worlds) in FUZZERS.items() for world in worlds]


def check(name, world, seeds):
    fuzzer, _ = FUZZERS[name]
    draws = [draw for draw in map(fuzzer.draw, seeds) if draw.world_size == world]
    assert draws
    wrong = fuzzer.check(draws)
    assert not wrong, f"\n{wrong}"


@pytest.mark.parametrize(("name", "world"), WORLDS)
def test_draws_are_exact_or_refused_by_name(name, world):
    check(name, world, range(10))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "world"), WORLDS)
def test_other_draws_are_exact_or_refused_by_name(name, world):
    first = 10 if os.environ.get("CI") else int(time.time())
    check(name, world, range(first, first + 40))
