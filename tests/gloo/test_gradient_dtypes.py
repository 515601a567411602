"""`hotspa_grad_accum_dtype` and `hotspa_grad_wire_dtype`: what they cost in bytes and in error, and that sums stay fp32."""

import pytest
import torch

from hf_hotspa.layout.vector import GradientDtypes
from tests.families import tiny_model
from tests.gradient_errors import EVERY, FAMILY, costs_on_rank
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

ULP = 2.0**-8
"""The spacing of bf16 numbers relative to the smaller one: what is rounded to nearest is off by at most half of it."""


@pytest.mark.slow
def test_what_each_pair_costs_in_bytes_and_error():
    per_rank = run_ranks(4, costs_on_rank, torch.float32, EVERY, 64)
    (all_fp32, rounded_wire, rounded_sums, all_bf16) = per_rank[0]
    assert max(all_fp32.packs, 4) == all_fp32.packs  # else nothing is added up
    # moved once in bf16, every contribution is rounded once
    assert all_fp32.error <= 1e-5 < rounded_wire.error <= ULP / 2
    # added up in bf16, it is rounded with every pack
    assert rounded_wire.error < rounded_sums.error <= all_fp32.packs * ULP / 2
    assert rounded_sums.error <= all_bf16.error * 1.05
    assert len({cost.loss for cost in per_rank[0]}) == 1  # nothing of the forward depends on them
    for exact, wire, sums, both in per_rank:
        assert (exact.return_bytes, exact.arena_bytes) == (sums.return_bytes, wire.arena_bytes)
        assert (2 * wire.return_bytes, 2 * both.return_bytes) == (exact.return_bytes,) * 2
        assert (2 * sums.arena_bytes, 2 * both.arena_bytes) == (exact.arena_bytes,) * 2
        assert all(cost.arena_bytes == cost.forecast_bytes for cost in (exact, wire, sums, both))


def test_a_layer_at_a_time():
    """With `+z2` and `+z3` a pack's gradient of a layer is rounded once, and all further sums are those of the master store."""
    buckets = "dp4+z3:24@32,dp2pp2+z2:60@64"
    for exact, wire, sums, both in run_ranks(4, costs_on_rank, torch.float32, EVERY, 64, buckets):
        assert exact.packs >= 4
        assert exact.error <= 1e-5
        assert all(1e-5 < cost.error <= ULP / 2 for cost in (wire, sums, both))
        assert (2 * wire.return_bytes, 2 * both.return_bytes) == (exact.return_bytes,) * 2
        assert (2 * sums.arena_bytes, 2 * both.arena_bytes) == (exact.arena_bytes,) * 2
        assert all(cost.arena_bytes == cost.forecast_bytes for cost in (exact, wire, sums, both))


def contributions(rank, world_size):
    """Gradients in the master store after a step, and this rank's own contributions before it, of a dp4 phase in bf16."""
    model = tiny_model(FAMILY).bfloat16().float()
    rows = random_rows(32, model.config.vocab_size, longest=20)
    engine = make_engine(model, "dp4:20@32", compute_dtype=torch.bfloat16, gradients=GradientDtypes("bf16", "auto"))
    runner = next(iter(engine.phases.values()))
    kept = []
    return_gradients = runner.return_gradients

    def watched():
        kept.extend(None if g is None else g.clone() for g in runner._gradients)
        return return_gradients()

    runner.return_gradients = watched
    engine.forward_backward(make_mini_batch(engine, rows))
    owned = engine.master.layout.holdings[rank]
    first = [segment.start for segment in engine.description.vector.segments]
    mine = {i.segment: (i.start - first[i.segment], i.stop - first[i.segment]) for i in owned}
    sums = {segment: engine.master.gradients[segment].clone() for segment in mine}
    engine.close()
    return kept, mine, sums


def test_bf16_contributions_are_summed_in_fp32():
    """Every element of the master store is the fp32 sum, in the order of the ranks, of the bf16 numbers that arrived."""
    ranks = run_ranks(4, contributions)
    rounded = 0
    for _, mine, sums in ranks:
        for segment, (start, stop) in mine.items():
            parts = [kept[segment][start:stop] for kept, *_ in ranks]
            assert {part.dtype for part in parts} == {torch.bfloat16}
            total = torch.zeros(stop - start)
            for part in parts:
                total += part.float()
            assert torch.equal(sums[segment], total)
            rounded += int((total.bfloat16().float() != total).sum())
    assert rounded > 0  # sums that bf16 could not have held
