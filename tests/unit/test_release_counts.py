"""The stored counts of a release: bytes of switches and predicted seconds of plans are as this code computes them."""

import json

import pytest
import release_counts  # type: ignore[import-not-found]
from functions_a_step import MOST_FILES, MOST_FUNCTIONS  # type: ignore[import-not-found]

STORED = json.loads(release_counts.FILE.read_text())
FIX = "if the change is meant: python benchmarks/release_counts.py --write"


def test_switches_move_as_many_bytes():
    assert release_counts.switches() == STORED["switch bytes"], FIX


@pytest.mark.parametrize("case", release_counts.PLANS, ids=" ".join)
def test_plans_are_as_good(case):
    [(name, found)] = release_counts.plans([case]).items()
    assert found == pytest.approx(STORED["plans"][name], rel=1e-3), FIX
    assert found["of static"] >= 1 - 1e-9


def test_every_count_is_there():
    assert set(STORED["plans"]) == {" ".join(case) for case in release_counts.PLANS}
    assert STORED["command CPU seconds"].keys() == release_counts.COMMANDS.keys()
    assert STORED["step"]["files"] <= MOST_FILES
    assert STORED["step"]["functions"] <= MOST_FUNCTIONS
