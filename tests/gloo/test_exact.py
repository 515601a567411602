"""Exactness: loss and gradients of every strategy equal the plain Hugging Face model's on the unpacked sequences."""

from itertools import cycle, product
from typing import Any

import pytest
import torch

from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import strategies_of
from tests.families import FAMILIES, tiny_model
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows, relative_error
from tests.worlds import make_engine, make_mini_batch, shared_reference

pytestmark = pytest.mark.gloo

TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.float64: (1e-12, 1e-11)}
"""Largest relative error of the loss, and of each gradient tensor."""

AWKWARD = "qwen3_qk_norm_tied"

SWITCHES = [
    {"planner": planner, "overlap_load": overlap, "overlap_return": overlap, "devices_per_node": 2}
    for planner, overlap in product(("relay", "algorithm1"), (False, True))
]
"""Every way to plan and to run switches, on emulated nodes of two ranks."""


def errors_of(
    family: str, dtype: torch.dtype, bucket_lists: list[str], switches: list[dict[str, Any]]
) -> list[tuple[str, float, float, str]]:
    """`(buckets, loss error, worst gradient error, its parameter)` of each bucket list, in one world.

    Args:
        family: The model.
        dtype: Its dtype.
        bucket_lists: In the user's grammar.
        switches: Options of the engines, used in turn.
    """
    model = tiny_model(family, dtype)
    rows = random_rows(11, model.config.vocab_size, longest=40)
    loss, gradients = shared_reference(model, rows)
    found = []
    for buckets, options in zip(bucket_lists, cycle(switches)):
        engine = make_engine(model, buckets, **options)
        with exact_in_double(dtype):
            report = engine.forward_backward(make_mini_batch(engine, rows))
        got = engine.full_gradients()
        assert got.keys() == gradients.keys()
        errors = {name: relative_error(got[name], gradients[name]) for name in gradients}
        worst = max(errors, key=lambda name: errors[name])
        found.append((buckets, abs(report.loss - loss) / abs(loss), errors[worst], worst))
        engine.close()
    return found


def rank_errors(rank: int, world_size: int, *case: Any) -> list[tuple[str, float, float, str]]:
    return errors_of(*case)


def legal_buckets(world_size: int, family: str) -> list[str]:
    shape = describe_model(tiny_model(family)).shape
    return [f"{s}:40@64" for s in strategies_of(world_size) if s.unsupported_reason(shape) is None]


def check(per_rank: list[list[tuple[str, float, float, str]]], dtype: torch.dtype) -> None:
    loss_tolerance, gradient_tolerance = TOLERANCE[dtype]
    for results in per_rank:
        for buckets, loss_error, gradient_error, name in results:
            assert loss_error <= loss_tolerance, f"{buckets}: loss off by {loss_error:.1e}"
            assert gradient_error <= gradient_tolerance, f"{buckets}: gradient of {name} off by {gradient_error:.1e}"


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f == AWKWARD else pytest.mark.slow) for f in FAMILIES])
def test_every_strategy_of_four_ranks(family):
    """In fp32, with its own kernels and tolerances: in fp64, which finds more, mixes are drawn (test_fuzz.py)."""
    buckets = legal_buckets(4, family)
    assert len(buckets) == 6
    check(run_ranks(4, rank_errors, family, torch.float32, buckets, [{}]), torch.float32)


# 8 ranks on two cores are slow: in every run some, in fp64, which finds more, of one awkward family; the other on four ranks
@pytest.mark.parametrize(
    ("family", "dtype", "some"),
    [
        pytest.param(AWKWARD, torch.float64, slice(1, None, 4), id="some"),  # dp4tp2, dp2tp2pp2, tp2pp4
        *(
            pytest.param(family, dtype, slice(None), marks=pytest.mark.slow, id=f"{family}-{name}")
            for family in FAMILIES
            for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64))
        ),
    ],
)
def test_every_strategy_of_eight_ranks(family, dtype, some):
    buckets = legal_buckets(8, family)
    # 4 layers: no pp8; llama_uneven has 6 key/value heads: no tp8
    assert len(buckets) == (8 if family == "llama_uneven" else 9)
    check(run_ranks(8, rank_errors, family, dtype, buckets[some], [{}], timeout=300), dtype)
