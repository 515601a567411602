"""Another cut of the stages of pipelines, or of MLPs over tensor-parallel groups, between two mini-batches: plans and models of
the strategies it concerns, made anew.

The master store is divided alike for every cut, so nothing moves here: the next load fills the new stages and shards. All ranks have made
everything, and the memory for it, before one of them uses it; else all stay with the cut before. One collective.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from hf_hotspa.engine.phase import PhaseRunner
from hf_hotspa.engine.switching import Switching
from hf_hotspa.layout.shares import have_same_shards
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model.specs import ModelDescription
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.mesh import StrategyMesh
from hf_hotspa.strategy import Strategy


def with_paces(
    description: ModelDescription,
    paces: Iterable[tuple[int, ...]],
    usual: StageCosts | None,
    of_ranks: Iterable[int] = (),
) -> ModelDescription:
    """The model cut by the paces of its devices: stages by `paces`, MLPs of tensor-parallel groups by those `of_ranks`.

    Args:
        usual: What stages are cut by without paces of theirs; None for by count.
    """
    costs = description.vector.stage_costs.with_paces(paces)
    vector = description.vector.with_measured(costs if costs.paces else usual).with_paces(of_ranks)
    return replace(description, vector=vector)


def changed(before: ModelDescription, after: ModelDescription, strategies: Iterable[Strategy]) -> list[Strategy]:
    """The strategies whose stages hold other layers, or whose ranks hold other shards of them."""
    old, new = before.vector.stage_costs, after.vector.stage_costs
    return [
        s
        for s in strategies
        if old.stages(s.num_stages) != new.stages(s.num_stages) or not have_same_shards(before.vector, after.vector, s)
    ]


def take_cut(
    description: ModelDescription,
    meshes: dict[Strategy, StrategyMesh],
    switching: Switching,
    agreement: Agreement,
    make: Callable[[ModelDescription, StrategyMesh], PhaseRunner],
    fits: Callable[[ModelDescription], None],
    where: str,
) -> dict[Strategy, PhaseRunner]:
    """Makes everything for a cut. Collective.

    Args:
        meshes: Of the strategies that it concerns.
        switching: Has the new plans afterwards.
        make: Makes a runner.
        fits: Raises on a rank that cannot hold the model in this cut.

    Returns:
        The new runners.

    Raises:
        HotspaError: on every rank, what one of them finds wrong; nothing has changed.
    """
    before = switching.pool, switching.forecast

    def made() -> dict[Strategy, PhaseRunner]:
        fits(description)
        switching.take_cut(description.vector)
        # a model that is built may draw random numbers
        device = switching.executor.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return {strategy: make(description, mesh) for strategy, mesh in meshes.items()}

    try:
        runners = agreement.run(
            where,
            made,
            lambda _: {plan.name: plan.digest for plan in switching.pool.plans()},
            facts=lambda _: {
                "paces of stages": repr(description.vector.stage_costs.paces),
                "paces of ranks": repr(description.vector.paces),
            },
        )
    except BaseException:
        switching.pool, switching.forecast = before
        raise
    switching.prepare()
    return runners
