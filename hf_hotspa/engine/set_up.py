"""Checks an engine's model and strategies and makes all plans, before there are weights; and again for another
partition of the model, between two mini-batches.

What does not fit raises one error on every rank, before any allocation. The error names ranks whose models, options or
plans differ.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_hotspa.cluster import Cluster
from hf_hotspa.engine.faults import PhaseFailures
from hf_hotspa.engine.loss_check import check_loss
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.engine.phase import PhaseRunner
from hf_hotspa.engine.switching import Switching
from hf_hotspa.layout.shares import have_same_shards
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.model.model_check import check_model, model_facts
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.replica import Attachment, Replica
from hf_hotspa.model.specs import ModelDescription, auxiliary_layers, describe_model
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.mesh import ProcessGroups, StrategyMesh, nodes_of
from hf_hotspa.parallel.wrapped_model import bare_model, is_wrapped
from hf_hotspa.seam import Runner, by_name
from hf_hotspa.strategy import Bucket, Strategy, check_buckets
from hf_hotspa.versions import library_facts


def describe(
    model: nn.Module,
    buckets: tuple[Bucket, ...],
    options: EngineOptions,
    weights: Path | None,  # where its weights are, if not in the model
    groups: ProcessGroups,
    agreement: Agreement,
) -> ModelDescription:
    """Describes the model for layouts, and checks it and the strategies. Collective. Raises `HotspaError`: on every
    rank: one rank's error, or what differs between ranks."""
    libraries = [
        name for name, used in {"peft": is_wrapped(model), "deepspeed": options.offload_master}.items() if used
    ]
    # first, because another error may be due to another release
    agreement.check({}, None, "set-up", facts=library_facts(*libraries))

    def described() -> ModelDescription:
        description = describe_model(model, options.compute_dtype, options.attention_dropout)
        description = replace(description, vector=description.vector.with_measured(options.stage_costs))
        if options.record_auxiliary:
            description = replace(description, auxiliary_layers=auxiliary_layers(bare_model(model)[0], if_asked=True))
        check_buckets(buckets, groups.world_size, description.shape)
        options.run_options(groups.device.type).check(buckets, description.shape)
        for settings in options.features:
            settings.check_model(description, buckets, options)
        check_model(model, description, weights)
        check_loss(model, description, options, groups.rank, groups.device)
        return description

    facts = {"list of strategies (hotspa_strategies)": ",".join(map(str, buckets))}
    values = {name: value for name, value in vars(options).items() if name != "features"} | by_name(options.features)
    facts |= {f"engine option {name}": repr(value) for name, value in values.items()} | model_facts(model)
    return agreement.run("set-up", described, lambda d: {"model": d.digest()}, facts=lambda _: facts)


def plan_switches(
    vector: ParameterVector,
    buckets: Sequence[Bucket],
    options: EngineOptions,
    groups: ProcessGroups,
    agreement: Agreement,
    failures: PhaseFailures,
) -> Switching:
    """Plans every switch. All ranks must make the same plans, and have the memory. Collective. Raises `HotspaError`: on
    every rank: plans differ, or a device cannot hold them."""
    world_size = groups.world_size
    per_node = options.devices_per_node or nodes_of(agreement).devices_per_node
    strategies = [bucket.strategy for bucket in buckets]
    switching = Switching(vector, strategies, Cluster(world_size, per_node), groups, options, failures.explain)
    digests = {f"plan {plan.name!r}": plan.digest for plan, _ in switching.switches()}
    agreement.run("set-up", switching.check_memory, lambda _: digests)
    return switching


class RunnerMaker:
    """Makes the runners of strategies, also for another partition; their replicas get all that was attached."""

    def __init__(
        self,
        switching: Switching,
        master: MasterStore,
        buffers: Mapping[str, Tensor],  # the model's, by name in its own class
        options: EngineOptions,
        way: Runner | None,  # what makes them in the place of the engine's own runner
        updates: object,
    ) -> None:
        self.buffers, self._way, self._updates = buffers, way, updates
        self._shared = switching, master, buffers, options.overlap(master.compute_device), options
        self._attached: list[Callable[[Replica], Attachment]] = []

    def __call__(self, description: ModelDescription, mesh: StrategyMesh) -> PhaseRunner:
        runner: PhaseRunner
        if self._way is not None:
            runner = self._way.phase_runner(description, mesh, *self._shared, updates=self._updates)
        else:
            runner = PhaseRunner(description, mesh, *self._shared)
        for part in runner.parts:
            part.attach(*(make(part) for make in self._attached))
        return runner

    def attach(self, make: Callable[[Replica], Attachment], runners: Iterable[PhaseRunner]) -> None:
        """Attaches to the replicas of these runners and of later ones."""
        self._attached.append(make)
        for part in (part for runner in runners for part in runner.parts):
            part.attach(make(part))


# -- another partition, between two mini-batches -----------------------------------------------------------------------

# If pipeline stages or tensor-parallel MLPs are divided in another way, the plans and models of the affected strategies
# are made anew. The master store does not depend on the partition, so nothing moves here: the next load fills the new
# stages and shards. All ranks make everything, and its memory, before one uses it; otherwise all keep the previous
# partition. One collective.


def with_step_times(
    description: ModelDescription,
    step_times: Iterable[tuple[int, ...]],
    usual: StageCosts | None,  # costs that divide stages without step times; None to divide by count
    rank_times: Iterable[int] = (),
) -> ModelDescription:
    """Divides the model by relative step times: stages by `step_times`, tensor-parallel MLPs by `rank_times`."""
    costs = description.vector.stage_costs.with_step_times(step_times)
    vector = description.vector.with_measured(costs if costs.step_times else usual).with_step_times(rank_times)
    return replace(description, vector=vector)


def changed(before: ModelDescription, after: ModelDescription, strategies: Iterable[Strategy]) -> list[Strategy]:
    """The strategies whose stages have other layers, or whose ranks have other shards."""
    old, new = before.vector.stage_costs, after.vector.stage_costs
    return [
        s
        for s in strategies
        if old.stages(s.num_stages) != new.stages(s.num_stages) or not have_same_shards(before.vector, after.vector, s)
    ]


def take_cut(
    description: ModelDescription,
    meshes: dict[Strategy, StrategyMesh],  # of the affected strategies
    switching: Switching,  # has the new plans afterwards
    agreement: Agreement,
    make: Callable[[ModelDescription, StrategyMesh], PhaseRunner],
    fits: Callable[[ModelDescription], None],  # raises on a rank that cannot hold the model in this partition
    where: str,
) -> dict[Strategy, PhaseRunner]:
    """Makes everything for another partition. Collective. Raises `HotspaError`: on every rank, one rank's error;
    nothing has changed."""
    before = switching.pool, switching.forecast

    def made() -> dict[Strategy, PhaseRunner]:
        fits(description)
        switching.take_cut(description.vector)
        # building a model may draw random numbers
        device = switching.executor.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return {strategy: make(description, mesh) for strategy, mesh in meshes.items()}

    try:
        runners = agreement.run(
            where,
            made,
            lambda _: {plan.name: plan.digest for plan in switching.pool.plans()},
            facts=lambda _: {
                "relative step times of stages": repr(description.vector.stage_costs.step_times),
                "relative step times of ranks": repr(description.vector.step_times),
            },
        )
    except BaseException:
        switching.pool, switching.forecast = before
        raise
    switching.prepare()
    return runners
