"""Families: what docs/families.md says of them is so. Two in every run; all of them is the slow test."""

import json

import pytest

from tests.family_page import outcome
from tests.family_sweep import NUM_ROWS, RESULTS, sweep_on_rank
from tests.harness import run_ranks
from tests.tiny_families import planned_families

pytestmark = pytest.mark.gloo

# latent attention and experts that are cut, gathered projections; layers that run one sequence of a pack at a time
SAMPLE = ("deepseek_v2", "qwen3_5_text")


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in SAMPLE else pytest.mark.slow) for f in planned_families()]
)
def test_a_family_is_as_its_row_says(family):
    row = json.loads(RESULTS.read_text())["families"][family]
    found = run_ranks(4, sweep_on_rank, family, list(NUM_ROWS), timeout=300)[0]
    assert {name: outcome(result) for name, result in found.items()} == {
        name: outcome(result) for name, result in row["strategies"].items()
    }
    assert "wrong" not in map(outcome, found.values())
