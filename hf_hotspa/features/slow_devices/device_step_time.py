"""How fast each device computes, from the reports of mini-batches: a rank's seconds divided by the cost of what it ran.

Packing gives the cost of packs (`packing.bucketing.sequence_cost`). A rank's part is its stage's (by the costs that
partition layers) times its shard's (by the weights that it holds). No communication: reports have the measurements of
all ranks, and all ranks come to the same result.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.features.slow_devices.giving import Giving, PhaseWork, SlowDevices, SlowEvent
from hf_hotspa.layout.placement import Layout
from hf_hotspa.layout.vector import EMBEDDING, ParameterVector
from hf_hotspa.packing.bucketing import MiniBatchPlan, sequence_cost
from hf_hotspa.report import MEASURES, StepReport
from hf_hotspa.strategy import Strategy

_COMPUTE, _OTHERS, _PRODUCTS, _LEFT_OUT = (
    MEASURES.index(name) for name in ("compute_s", "others_s", "products_s", "left_out")
)


class _Share(NamedTuple):
    """A rank's part of its replica's work; `least` and `most` are bounds where costs were not measured."""

    cost: float
    least: float
    most: float


_GRADIENT_OF_TABLE = 8
"""Summing the gradient of an embedding may take up to 1/8 of what a head of the same size computes."""


def rank_shares(vector: ParameterVector, strategy: Strategy, layout: Layout) -> tuple[_Share, ...]:
    """Each rank's part of its replica's work: its stage's cost times its shard of the stage's weights.

    Parameters are a poor measure of a head, which costs less beside small layers, and none of an embedding."""
    costs = vector.stage_costs.rank_costs(strategy.pp, strategy.v)
    least, most = list(costs), list(costs)
    if vector.measured is None:
        least[-1] = max(least[-1] - vector.head_cost, 1)
        most[0] += sum(s.numel for s in vector.segments if s.unit == EMBEDDING) // _GRADIENT_OF_TABLE
    coords = [strategy.coord(rank) for rank in range(strategy.world_size)]
    # an embedding look-up is nearly free, unless the head multiplies with the same table
    computed = [s.index for s in vector.segments if s.unit != EMBEDDING or any(p.in_head for p in vector.specs_of(s))]
    sizes = [sum(layout.rank_sizes(rank)[index] for index in computed) for rank in range(strategy.world_size)]
    stage_sizes: dict[tuple[int, int], int] = defaultdict(int)
    for coord, size in zip(coords, sizes, strict=True):
        stage_sizes[coord.dp, coord.pp] += size
    parts = [(c.pp, size / stage_sizes[c.dp, c.pp]) for c, size in zip(coords, sizes, strict=True)]
    return tuple(_Share(costs[pp] * part, least[pp] * part, most[pp] * part) for pp, part in parts)


class DeviceStepTime:
    """Watches the devices of a run for slow ones; `gives`, one of `GIVING`, is what these do with columns."""

    def __init__(self, engine: HotSPaEngine, gives: str | None = None) -> None:
        self._engine, self._quadratic_cost = engine, engine.description.shape.quadratic_cost
        self._strategies = {str(s): s for s in engine.phases}
        # what slow ranks do not compute; None if they compute everything
        self.giving = Giving([s for s in engine.phases if s.tp > 1], gives) if gives else None
        self.devices = SlowDevices(engine.world_size)
        self.take_cut()

    def take_cut(self) -> None:
        """Takes another partition of stages or MLPs; keeps what is known of devices, relative to what they run."""
        vector = self._engine.description.vector
        self._shares = {str(s): rank_shares(vector, s, layout) for s, layout in self._engine.layouts.items()}

    def trained(self, plan: MiniBatchPlan, report: StepReport) -> tuple[StepReport, SlowEvent | None]:
        """Takes the report of a mini-batch; returns it with relative step times and slow devices, and what changed."""
        if report.ranks is None:
            return report, None
        step_times, event = self.devices.observe(report.step, self._work(plan, report, report.ranks.phases))
        return replace(report, paces=step_times, slow=tuple(sorted(self.devices.slow))), event

    def _work(self, plan: MiniBatchPlan, report: StepReport, measured: Sequence[Any]) -> list[PhaseWork]:
        planned = {str(phase.bucket.strategy): phase for phase in plan.phases}
        work = []
        for index, ran in enumerate(report.phases):
            strategy, shares = self._strategies[ran.strategy], self._shares[ran.strategy]
            replicas = [
                sum(sequence_cost(n, self._quadratic_cost) for pack in packs for n in pack.lengths)
                for packs in planned[ran.strategy].replicas
            ]
            coords = [strategy.coord(rank) for rank in range(strategy.world_size)]
            seconds = [max(row[index][_COMPUTE] - row[index][_OTHERS], 0.0) for row in measured]
            works = [float(replicas[coord.dp]) for coord in coords]
            if self.giving is not None:
                products, left = ([row[index][i] for row in measured] for i in (_PRODUCTS, _LEFT_OUT))
                tokens = [sum(sum(p.lengths) for p in packs) for packs in planned[ran.strategy].replicas]
                of_ranks = [tokens[coord.dp] for coord in coords]
                times = self.giving.measured(ran.strategy, seconds, products, left, of_ranks)
                works = [done * more for done, more in zip(works, times, strict=True)]
            costs = [[done * part for part in share] for done, share in zip(works, shares, strict=True)]
            cost, least, most = zip(*costs, strict=True)
            peers = tuple(coord.pp for coord in coords)
            work.append(PhaseWork(ran.strategy, tuple(seconds), cost, peers, least, most))
        return work
