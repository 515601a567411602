"""Which pipeline stage holds which layer: the one function that layouts, replicas and checkpoints all call.

A cut by count weighs a layer by its parameters; where seconds of the model were measured it weighs those (`StageCosts`).
Where devices are slow (`stragglers.stage_cuts`), the stages that have them are weighed with their pace.
`partition` is the whole of PipeDream's programme, with stages that are replicated unequally. Layouts have one dp for all
stages, so nothing can run what it finds then: it says how much is lost by that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from hf_hotspa.errors import HotspaConfigError, StrategyError

USUAL_PACE = 100
"""The pace of a stage whose devices are not slow; a stage of 300 takes three times as long for the same layers."""


@dataclass(frozen=True)
class StageCosts:
    """What decides a cut, in one unit for all, such as nanoseconds. Integers: all ranks make the same cut of them.

    Args:
        layers: Cost of each layer.
        head: Of the head, which the last stage has.
        embedding: Of the embedding, which the first stage has; a table look-up is nearly free.
        sends: `sends[i]`: passing the hidden state on behind layer i, one way; empty where it costs nothing.
        paces: Of the stages of pipelines with slow devices, one tuple for each depth, as long as the pipeline has stages:
            how long a stage takes, see `USUAL_PACE`. A depth without one has no slow stage.
    """

    layers: tuple[int, ...]
    head: int = 0
    embedding: int = 0
    sends: tuple[int, ...] = ()
    paces: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if min((pace for paces in self.paces for pace in paces), default=1) < 1:
            raise HotspaConfigError("a pace of a stage is not positive", fix="give paces relative to 100")
        if self.sends and len(self.sends) < len(self.layers) - 1:
            raise HotspaConfigError(f"{len(self.sends)} sends between {len(self.layers)} layers")
        if min(self.head, self.embedding, *self.layers, *self.sends, 0) < 0:
            raise HotspaConfigError("a cost of a stage is negative", fix="measure again")

    def stages(self, num_stages: int) -> tuple[range, ...]:
        """Cuts the layers in consecutive stages so that the slowest stage is as fast as it can be.

        The dynamic programme of PipeDream (Narayanan et al., SOSP'19, section 3.1) for stages of one rank each: `A(j, m) =
        min over i of max(A(i, m - 1), 2 C_i, cost of layers i..j)` over the first j layers and m stages, C_i being what
        passing on the hidden state behind layer i costs; among equally fast cuts, the one with the smallest sum of squared
        stage costs, then the earliest cut points. Each stage gets a layer. Its cost is multiplied by its pace.

        Raises:
            StrategyError: more stages than layers.
        """
        if not 1 <= num_stages <= len(self.layers):
            raise StrategyError(
                f"{num_stages} pipeline stages cannot share {len(self.layers)} layers",
                fix=f"use pp between 1 and {len(self.layers)}",
            )
        return _cut(self, num_stages)

    def paces_of(self, num_stages: int) -> tuple[int, ...] | None:
        """The paces of the stages of a pipeline; None where none is slow."""
        return next((paces for paces in self.paces if len(paces) == num_stages), None)

    def with_paces(self, paces: Iterable[tuple[int, ...]]) -> "StageCosts":
        """The same costs where stages have these paces."""
        return replace(self, paces=tuple(sorted(paces)))

    def ranks(self, pp: int, v: int = 1) -> tuple[tuple[int, ...], ...]:
        """The layers of each rank of a pipeline, ascending: stage s of pp * v is on rank s mod pp.

        Raises:
            StrategyError: more stages than layers.
        """
        stages = self.stages(pp * v)
        return tuple(tuple(layer for stage in stages[rank::pp] for layer in stage) for rank in range(pp))

    def of_ranks(self, pp: int, v: int = 1) -> list[int]:
        """What each rank of a pipeline costs at the usual pace, passing on left out."""
        costs = self.of_stages(self.stages(pp * v))
        return [sum(costs[rank::pp]) for rank in range(pp)]

    def of_stages(self, stages: Sequence[range]) -> list[int]:
        """What each stage of a cut costs at the usual pace, passing on left out."""
        sums = [sum(self.layers[stage.start : stage.stop]) for stage in stages]
        sums[0] += self.embedding
        sums[-1] += self.head
        return sums

    def slowest(self, stages: Sequence[range]) -> int:
        """What the slowest stage of a cut costs at the usual pace, or the slowest pass between two, there and back."""
        return max(*self.of_stages(stages), *self.passes(stages), 0)

    def passes(self, stages: Sequence[range]) -> list[int]:
        """What passing on between the stages of a cut costs, there and back; empty where it costs nothing."""
        return [2 * self.sends[stage.start - 1] for stage in stages[1:] if self.sends]


@lru_cache(maxsize=64)
def _cut(costs: StageCosts, num_stages: int) -> tuple[range, ...]:
    num_layers, prefix = len(costs.layers), [0, *accumulate(costs.layers)]
    paces = costs.paces_of(num_stages) or (USUAL_PACE,) * num_stages
    # best[j]: (slowest stage or pass, sum of squares, cut points) of the first j layers in the stages placed so far
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(num_stages):
        extra = (costs.head if stage == num_stages - 1 else 0) + (costs.embedding if stage == 0 else 0)
        sends = [2 * send * USUAL_PACE for send in costs.sends] if stage else []
        best = {
            j: min(
                (max(slowest, cost, sends[i - 1] if sends else 0), squares + cost * cost, (*cuts, j))
                for i, (slowest, squares, cuts) in best.items()
                if i < j
                for cost in [(prefix[j] - prefix[i] + extra) * paces[stage]]
            )
            for j in range(stage + 1, num_layers - (num_stages - stage - 1) + 1)
        }
    cuts = best[num_layers][2]
    return tuple(range(start, stop) for start, stop in zip((0, *cuts[:-1]), cuts, strict=True))


@dataclass(frozen=True)
class Partition:
    """Stages of consecutive layers, each replicated by itself.

    Args:
        seconds: Of a micro-batch in the steady state: the slowest stage, or pass between two.
        stages: Layers and replicas of each.
    """

    seconds: float
    stages: tuple[tuple[range, int], ...]


_Found = tuple[float, int, tuple[tuple[int, int], ...]]
"""Seconds, stages, and (last layer + 1, replicas) of each."""


def partition(
    layers: Sequence[float], machines: int, sends: Sequence[float] = (), syncs: Sequence[Sequence[float]] = ()
) -> Partition:
    """The best partition over all cuts and all replications: PipeDream's programme (SOSP'19, section 3.1).

        T(i -> j, m) = max(sum of layers i..j, sum of their syncs) / m
        A(j, m) = min of T(1 -> j, m) and min over i, m' of max(A(i, m - m'), 2 C_i, T(i + 1 -> j, m'))

    Every machine is used. Among equally fast partitions the one with the fewest stages, then the earliest cuts.

    Args:
        layers: Seconds of each layer, T_l.
        machines: To be divided among the stages.
        sends: C_l, seconds of passing the hidden state on behind each layer; none when empty.
        syncs: `syncs[l][m - 1]`: W_l^m, seconds of summing the gradients of a layer over m replicas; none when empty.

    Raises:
        HotspaConfigError: there is no layer or no machine.
    """
    count = len(layers)
    if not count or machines < 1:
        raise HotspaConfigError(f"{count} layers on {machines} machines are no pipeline")
    prefix = [0.0, *accumulate(layers)]
    synced = [[0.0, *accumulate(sync[m] for sync in syncs)] if syncs else [0.0] * (count + 1) for m in range(machines)]

    def stage(start: int, stop: int, m: int) -> float:
        return max(prefix[stop] - prefix[start], synced[m - 1][stop] - synced[m - 1][start]) / m

    best: dict[tuple[int, int], _Found] = {}
    for j in range(1, count + 1):
        for m in range(1, machines + 1):
            candidate: _Found = (stage(0, j, m), 1, ((j, m),))
            for i in range(1, j):
                passing = 2 * sends[i - 1] if sends else 0.0
                for own in range(1, m):
                    before = best[i, m - own]
                    slowest = max(before[0], passing, stage(i, j, own))
                    if slowest <= candidate[0]:
                        candidate = min(candidate, (slowest, before[1] + 1, (*before[2], (j, own))))
            best[j, m] = candidate
    seconds, _, ends = best[count, machines]
    starts = [0, *(stop for stop, _ in ends[:-1])]
    return Partition(seconds, tuple((range(start, stop), m) for start, (stop, m) in zip(starts, ends, strict=True)))
