"""Which speeds divide the packs of which mini-batch, and how speeds divide the layers of pipelines and MLPs.

Packs: nothing is planned ahead of training, so speeds known after mini-batch n (counted from 0) apply from the next one on.
Every rank divides the same way, and so does a run that resumes from `state_dict`.

Stages: a stage with a slow device gets fewer layers. All replicas of a strategy share one partition, and packs are
divided over them by speed (`Speeds`). So the best partition has the highest throughput of all replicas together: the
sum of the inverses of their slowest stages. With one replica that is the objective of Narayanan et al. (SOSP'19), with stages weighted by
relative step time. With several, the even partition is often better: others slow the replicas that are not slow.

MLPs: `layout.shares` divides them per tensor-parallel group. Other replicas' groups stay even and lose nothing, so the
only question is whether the change is worth a switch. Stage partition and pack division use each rank's resulting work.

All ranks come to the same result: relative step times are integers, sums are fractions or have a fixed order. No torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from hf_hotspa.layout.shares import step_times_of_groups, works
from hf_hotspa.layout.stages import USUAL_STEP_TIME, StageCosts
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.packing.bucketing import Speeds
from hf_hotspa.strategy import Strategy
from hf_hotspa.typed import reading_state, typed


class SpeedHistory:
    """The speeds of a run, by mini-batch."""

    def __init__(self) -> None:
        self._in_force: list[tuple[int, Speeds | None]] = [(0, None)]

    def of(self, number: int) -> Speeds | None:
        """The speeds of a mini-batch; None divides evenly. May be called in another thread than `trained`."""
        known = self._in_force
        return next((speeds for first, speeds in reversed(known) if first <= number), known[0][1])

    def trained(self, number: int, speeds: Speeds | None) -> int | None:
        """Takes the speeds known after mini-batch `number`; if new, returns the first mini-batch they apply to."""
        if speeds == self._in_force[-1][1]:
            return None
        self._in_force = [
            self._in_force[-1],
            (number + 1, speeds),
        ]  # replaced as a whole: another thread may be reading
        return number + 1

    def restart(self) -> None:
        """Counts from 0 again; the latest speeds stay."""
        self._in_force = [(0, self._in_force[-1][1])]

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next divisions depend on, JSON-ready."""
        return {"in_force": [[first, *((None,) if s is None else vars(s).values())] for first, s in self._in_force]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state. Raises `HotspaConfigError`: the state is invalid."""
        with reading_state("the speeds of devices", "packs are divided evenly until slow devices are found anew"):
            history = [(int(first), _read(numbers)) for first, *numbers in state["in_force"]]
            if not history:
                raise ValueError("no speeds")
        self._in_force = history


def _read(numbers: list[Any]) -> Speeds | None:
    """The speeds in a state: their fields, or None; earlier versions had fewer fields."""
    if numbers[0] is None:
        return None
    return typed(dict(zip(Speeds.__match_args__[: len(numbers)], numbers, strict=True)), Speeds)


# -- stages and shares by speed ---------------------------------------------------------------------------------------


LEAST_GAIN = Fraction(5, 100)
"""A partition is replaced only if another is faster by this share: a switch costs seconds, and step times are measured."""

StepTimes = tuple[tuple[int, ...], ...]  # see `StageCosts.step_times`


def step_times_of_ranks(speeds: Sequence[float]) -> tuple[int, ...]:
    """Each rank's step time (in units of `USUAL_STEP_TIME`), from speeds that are 1 for ranks that are not slow."""
    return tuple(max(round(USUAL_STEP_TIME / speed), 1) for speed in speeds)


def stages_of_replicas(strategy: Strategy, ranks: Sequence[int]) -> list[list[int]]:
    """Per replica the relative step time of each stage, which is its slowest rank's; stage s is on rank s mod pp."""
    slowest = [[0] * strategy.pp for _ in range(strategy.dp)]
    for rank, step_time in enumerate(ranks):
        coord = strategy.coord(rank)
        slowest[coord.dp][coord.pp] = max(slowest[coord.dp][coord.pp], step_time)
    return [step_times * strategy.v for step_times in slowest]


def throughput(
    costs: StageCosts, stages: Sequence[range], replicas: Iterable[Sequence[int]], pp: int | None = None
) -> Fraction:
    """How many packs all replicas (`stages_of_replicas`) together finish under a partition in the time of one unit of
    cost; with as many ranks per pipeline as stages, or `pp`."""
    own, passes, total = costs.partition_costs(stages), costs.passes(stages), Fraction(0)
    pp = pp or len(stages)
    for step_times in replicas:
        taken = [cost * step_time for cost, step_time in zip(own, step_times, strict=True)]
        of_ranks = [sum(taken[rank::pp]) for rank in range(pp)]
        total += Fraction(USUAL_STEP_TIME, max(*of_ranks, *(p * USUAL_STEP_TIME for p in passes), 1))
    return total


def cut_by_speed(
    costs: StageCosts,  # what decides the partition, with the current relative step times
    strategies: Iterable[Strategy],  # the pool, with one world size
    speeds: Sequence[float] | None,  # of each rank, relative to one that is not slow; None if no rank is slow
    # the relative step time of each rank under a strategy, if its work differs from an even shard's (`step_times_of_groups`)
    step_times_of: Callable[[Strategy], Sequence[int]] | None = None,
) -> StepTimes:
    """The relative step times that should partition the stages of a pool, for `StageCosts.with_step_times`: the current ones
    unless others are worth a change; empty if no device is slow."""
    if speeds is None:
        return ()
    ranks, cuts = step_times_of_ranks(speeds), list[tuple[int, ...]]()
    by_depth: dict[int, dict[Strategy, list[list[int]]]] = {}
    for strategy in strategies:
        if strategy.pp > 1:
            step_times = step_times_of(strategy) if step_times_of is not None else ranks
            by_depth.setdefault(strategy.num_stages, {})[strategy] = stages_of_replicas(strategy, step_times)
    for depth, pool in by_depth.items():
        of_stages = _best(costs, depth, [(s.pp, replicas) for s, replicas in pool.items()])
        if of_stages is not None:
            cuts.append(of_stages)
    return tuple(sorted(cuts))


def _best(costs: StageCosts, depth: int, pool: Sequence[tuple[int, list[list[int]]]]) -> tuple[int, ...] | None:
    """The relative step times for pipelines of this depth; None for an even partition, the current ones if no change pays."""
    even = costs.with_step_times(()).stages(depth)
    of_even = [throughput(costs, even, replicas, pp) for pp, replicas in pool]

    def gain(step_times: tuple[int, ...] | None) -> Fraction:
        """Relative to the even partition, summed over the strategies."""
        stages = even if step_times is None else costs.with_step_times((step_times,)).stages(depth)
        gains = (throughput(costs, stages, r, pp) / e for (pp, r), e in zip(pool, of_even, strict=True))
        return sum(gains, Fraction(0))

    now = costs.step_times_of(depth)
    candidates: list[tuple[int, ...] | None] = [None]
    for _, replicas in pool:
        # by the slowest replica of each stage, and by each replica
        candidates += [tuple(max(of_stage) for of_stage in zip(*replicas, strict=True)), *map(tuple, replicas)]
    best = max(candidates, key=gain)  # the first of equal ones: the even one comes first
    return best if gain(best) >= (1 + LEAST_GAIN) * gain(now) else now


def stage_loads(costs: StageCosts) -> tuple[tuple[float, ...], ...]:
    """For each depth that is partitioned by speed, the cost of its stages relative to their mean."""
    loads = []
    for step_times in costs.step_times:
        own = costs.partition_costs(costs.stages(len(step_times)))
        loads.append(tuple(max(cost, 1) * len(own) / max(sum(own), 1) for cost in own))
    return tuple(loads)


def can_share(vector: ParameterVector) -> bool:
    """Whether there are MLPs that tensor-parallel groups can divide unevenly."""
    return any(costs.by_step_time for costs in vector.unit_costs.values())


def _throughput(vector: ParameterVector, strategy: Strategy, ranks: Sequence[int]) -> float:
    """Of all replicas together; a replica is as fast as the slowest of its groups."""
    slowest = [1] * strategy.dp
    for rank, step_time in enumerate(step_times_of_groups(vector, strategy, ranks)):
        replica = strategy.coord(rank).dp
        slowest[replica] = max(slowest[replica], step_time)
    return sum(1 / step_time for step_time in slowest)


def shares_by_speed(
    vector: ParameterVector, strategies: Iterable[Strategy], speeds: Sequence[float] | None
) -> tuple[int, ...]:
    """The relative step times of ranks that should divide the MLPs of a pool, for `ParameterVector.with_step_times`: the
    vector's unless others are faster by `LEAST_GAIN`; empty if no device is slow. Arguments as for `cut_by_speed`."""
    pool = [strategy for strategy in strategies if strategy.tp > 1]
    if speeds is None or not pool or not can_share(vector):
        return ()
    ranks = step_times_of_ranks(speeds)
    even = vector.with_step_times(())
    of_even = [_throughput(even, strategy, ranks) for strategy in pool]

    def gain(step_times: tuple[int, ...]) -> float:
        """Relative to even shares, summed over the strategies."""
        divided = vector.with_step_times(step_times)
        return sum(_throughput(divided, s, ranks) / usual for s, usual in zip(pool, of_even, strict=True))

    best = max(((), ranks), key=gain)  # the first of equal ones: the even one comes first
    return best if gain(best) >= (1 + float(LEAST_GAIN)) * gain(vector.step_times) else vector.step_times


def works_by_degree(
    vector: ParameterVector, strategies: Iterable[Strategy]
) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """If MLPs are divided unevenly, each rank's work relative to even shares, per degree of tp."""
    if not vector.step_times:
        return ()
    by_degree = {strategy.tp: works(vector, strategy) for strategy in strategies if strategy.tp > 1}
    return tuple((tp, own) for tp, own in sorted(by_degree.items()) if len(set(own)) > 1)
