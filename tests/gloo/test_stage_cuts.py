"""Stages that are cut by measured seconds: as exact as by count, one cut on all ranks, and nothing that a checkpoint sees."""

from dataclasses import replace

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


BUCKETS = ("pp2:40@44", "dp2:8@24,pp2:40@20")

Found = list[tuple[str, float, list[int], list[torch.Tensor]]]
"""For each kind of costs, and by count: the worst error, layers of this rank's stages, and its masters' gradients."""


def with_costs(rank: int, world_size: int) -> tuple[list[Found], str, str]:
    """What is found under each pool; what is raised where ranks disagree, and where the costs are of another model."""
    model = tiny_model(FAMILY, torch.float64)
    rows = random_rows(11, model.config.vocab_size, longest=40)
    loss, gradients = shared_reference(model, rows)
    of_pools = list[Found]()
    for buckets in BUCKETS:
        of_pools.append([])
        for name, costs in {**HEAVY, "by count": None}.items():
            engine = make_engine(model, buckets, stage_costs=costs)
            error, _ = worst_error(engine, make_mini_batch(engine, rows), loss, gradients)
            replicas = [phase.replica for phase in engine.phases.values()]
            layers = [sum(not isinstance(layer, PassThrough) for layer in replica.layers) for replica in replicas]
            shares = [g.clone() for g in engine.master.gradients if g is not None]
            of_pools[-1].append((name, error, layers, shares))
            engine.close()
    other = HEAVY["first"] if rank else HEAVY["last"]
    with pytest.raises(PlanMismatchError) as differs:
        make_engine(model, "pp2:40", stage_costs=other)
    with pytest.raises(HotspaConfigError) as wrong:
        make_engine(model, "pp2:40", stage_costs=replace(other, layers=(1, 2, 3), sends=()))
    return of_pools, str(differs.value), str(wrong.value)


def test_every_cut_is_exact_masters_are_divided_alike_and_other_costs_are_refused() -> None:
    ranks = run_ranks(2, with_costs)
    for pool in range(len(BUCKETS)):
        of_ranks = [of_pools[pool] for of_pools, _, _ in ranks]
        for at, (name, *_) in enumerate(of_ranks[0]):
            stages = [found[at][2][-1] for found in of_ranks]
            assert stages == CUTS.get(name, stages)
            assert sum(stages) == 4
            for found in of_ranks:
                assert found[at][1] <= 1e-11, name
                for share, by_count in zip(found[at][3], found[-1][3], strict=True):
                    assert share.shape == by_count.shape  # what a checkpoint holds lies where it lay
                    assert torch.allclose(share, by_count, rtol=1e-9, atol=1e-12)
    for _, differs, wrong in ranks:
        assert "stage_costs" in differs
        assert "costs of 3 layers for a model of 4" in wrong
