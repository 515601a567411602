"""Stages that are cut by measured seconds: as exact as by count, one cut on all ranks, and nothing that a checkpoint sees."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_hotspa.errors import HotspaConfigError, PlanMismatchError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model.pass_through import PassThrough
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

FAMILY = "qwen3_qk_norm_tied"
HEAVY = {
    "first": StageCosts((9, 1, 1, 1), sends=(1, 1, 1)),
    "last": StageCosts((1, 1, 1, 9)),
    "head": StageCosts((2, 2, 2, 2), head=4),
}
CUTS = {"first": [1, 3], "last": [3, 1], "head": [3, 1]}
"""Layers of the stages of pp2."""


def with_costs(rank: int, world_size: int, buckets: str) -> list[tuple[str, float, list[int], list[torch.Tensor]]]:
    """For each kind of costs, and by count: the worst error, layers of this rank's stages, and its masters' gradients."""
    model = tiny_model(FAMILY, torch.float64)
    rows = random_rows(11, model.config.vocab_size, longest=40)
    loss, gradients = shared_reference(model, rows)
    found = []
    for name, costs in {**HEAVY, "by count": None}.items():
        engine = make_engine(model, buckets, stage_costs=costs)
        error, _ = worst_error(engine, make_mini_batch(engine, rows), loss, gradients)
        layers = [
            sum(not isinstance(layer, PassThrough) for layer in phase.replica.layers)
            for phase in engine.phases.values()
        ]
        shares = [g.clone() for g in engine.master.gradients if g is not None]
        found.append((name, error, layers, shares))
        engine.close()
    return found


@pytest.mark.parametrize("buckets", ["pp2:40@44", "dp2:8@24,pp2:40@20"])
def test_every_cut_is_exact_and_masters_are_divided_alike(buckets: str) -> None:
    ranks = run_ranks(2, with_costs, buckets)
    for at, (name, *_) in enumerate(ranks[0]):
        stages = [found[at][2][-1] for found in ranks]
        assert stages == CUTS.get(name, stages)
        assert sum(stages) == 4
        for found in ranks:
            assert found[at][1] <= 1e-11, name
            for share, by_count in zip(found[at][3], found[-1][3], strict=True):
                assert share.shape == by_count.shape  # what a checkpoint holds lies where it lay
                assert torch.allclose(share, by_count, rtol=1e-9, atol=1e-12)


def refused(rank: int, world_size: int) -> list[Any]:
    """What is raised where ranks disagree, and where the costs are of another model."""
    model = tiny_model(FAMILY)
    other = HEAVY["first"] if rank else HEAVY["last"]
    messages = []
    with pytest.raises(PlanMismatchError) as caught:
        make_engine(model, "pp2:40", stage_costs=other)
    messages.append(str(caught.value))
    with pytest.raises(HotspaConfigError) as wrong:
        make_engine(model, "pp2:40", stage_costs=replace(other, layers=(1, 2, 3), sends=()))
    messages.append(str(wrong.value))
    return messages


def test_costs_that_differ_between_ranks_or_are_of_another_model_are_refused() -> None:
    for differs, wrong in run_ranks(2, refused):
        assert "stage_costs" in differs
        assert "costs of 3 layers for a model of 4" in wrong
