"""Rows with images through a `SwitchedModel`, against the plain model one row at a time in one process."""

import pytest

from tests.harness import run_ranks
from tests.images import image_errors
from tests.vision_models import VISION_FAMILIES

pytestmark = pytest.mark.gloo

# family, what is frozen, buckets, engine options
TWO = (
    ("qwen3_vl", "none", ("dp2:24,tp2+sp:200", "cp2+ck9+rc:200"), {}),
    ("gemma3", "tower", ("cp2:24,pp2:200",), {"context_parallel": "ulysses"}),
)
SHORT = ("dp2:24,tp2:200", "tp2+sp+rc:200", "cp2:200", "dp2+z3:200")
WIDE_2 = tuple(
    (family, "none", SHORT + (() if family.startswith("qwen3_vl") else ("pp2+z2:24,dp2:200",)), {})
    for family in VISION_FAMILIES
)
WIDE_4 = tuple(
    (family, "none", ("dp4:24,dp2tp2:60,cp2tp2+sp:200", "cp4+z3:200", "dp2cp2+rc:200"), {})
    for family in ("qwen3_vl", "gemma3", "mistral3")
)


def errors(rank, world, cases):
    found = {}
    for family, frozen, buckets, options in cases:
        found |= {
            f"{family} {name}": numbers
            for name, numbers in image_errors(rank, world, family, buckets, frozen, options).items()
        }
    return found


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, TWO)]
    + [pytest.param(2, (case,), marks=pytest.mark.slow) for case in WIDE_2]
    + [pytest.param(4, (case,), marks=pytest.mark.slow) for case in WIDE_4],
)
def test_losses_and_gradients_are_those_of_the_plain_model(world_size, cases):
    for of_rank in run_ranks(world_size, errors, cases, timeout=400):
        assert len(of_rank) == sum(len(case[2]) for case in cases)
        for name, numbers in of_rank.items():
            assert max(numbers) < 1e-11, (name, numbers)
