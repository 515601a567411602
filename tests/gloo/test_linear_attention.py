"""Gated delta nets on several ranks: loss and gradients equal the plain model's, however their sequences are cut."""

import pytest
from torch import float64

from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.oracle import random_rows
from tests.tiny_families import tiny_model_of
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo


def error_of(rank, world_size, family, buckets, adapted=False):
    model = tiny_lora(family, float64, r=2) if adapted else tiny_model_of(family)
    rows = random_rows(8, 163, longest=40, seed=3)
    loss, gradients = shared_reference(model, rows)
    trained = {name: g for name, g in gradients.items() if "lora_" in name or not adapted}
    engine = make_engine(model, buckets, context_parallel="allgather")
    error = worst_error(engine, make_mini_batch(engine, rows), loss, trained)[0]
    engine.close()
    return error


def test_three_strategies_in_a_mini_batch():
    buckets = "dp2+ck1:12@16,cp2+ck7:24@30,tp2+sp+ck11+kg2:40@48"
    assert run_ranks(2, error_of, "qwen3_5_text", buckets)[0] <= 1e-11


@pytest.mark.slow
def test_adapters():
    assert run_ranks(2, error_of, "qwen3_next", "dp2+ck6:12@16,tp2+sp:24@40,cp2+rc+ck9:40@60", True)[0] <= 1e-11


def of_few_tokens(rank, world_size):
    """Ranks with fewer tokens than the convolution is wide, and with none; a document over all ranks."""
    model, found = tiny_model_of("qwen3_5_text"), {}
    for lengths in ((5,), (4, 1, 2), (1, 1, 1, 1, 9), (7, 6)):
        rows = [{"input_ids": list(range(1, n + 1)), "labels": list(range(1, n + 1))} for n in lengths]
        for buckets in ("cp4:16@16", "cp4+ck4:16@16"):
            reference = shared_reference(model, rows)
            for way in ("ulysses", "allgather"):
                engine = make_engine(model, buckets, context_parallel=way)
                found[lengths, buckets, way] = worst_error(engine, make_mini_batch(engine, rows), *reference)[0]
                engine.close()
    return found


@pytest.mark.slow
def test_ranks_with_few_tokens_or_none():
    found = run_ranks(4, of_few_tokens)[0]
    assert {case: error for case, error in found.items() if not error <= 1e-11} == {}
