"""Which speeds divide the packs of which mini-batch.

Mini-batches may be planned ahead of training (by a loop; the Trainer does not); so speeds that are known after mini-batch n
(counted from 0) hold from mini-batch `n + 1 + delay` on, with `delay` at least as far as anybody plans ahead. Every rank
then divides alike, and so does a run that goes on from `state_dict`. No torch.

Cutting the layers of pipelines by the speed of devices: a stage with a slow device gets fewer layers.

All replicas of a strategy have one cut, and packs are divided over them by speed (`Speeds`). So of a strategy counts
how many mini-batches of one pack all its replicas together are done with in a time: of each, the inverse of its slowest
stage. With one replica that is PipeDream's objective, stages weighed with their relative step time; with several the even cut is often
the better one, as the replicas that are not slow would suffer from another.

Every rank comes to the same cut: relative step times are integers, and sums are of fractions. No torch.

Shares of MLPs by the speed of devices: whether a slow rank of a tensor-parallel group is worth an uneven division.

The division itself is that of `layout.shares`, one for each group: the groups of other replicas stay even, so nobody suffers
from it, and the question is only whether the change is worth a switch. What each rank has to do afterwards is known to the
cut of stages and to the division of packs.

Every rank comes to the same shares: all ranks have the same numbers, and the same order of sums. No torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hf_hotspa.layout.shares import step_times_of_groups, works
from hf_hotspa.layout.stages import USUAL_STEP_TIME, StageCosts
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.strategy import Strategy
from hf_hotspa.typed import Positive, reading_state, typed


@dataclass(frozen=True)
class Speeds:
    """By which packs are divided over replicas.

    Args:
        ranks: The speed of each rank, relative to one another.
        loads: Where the stages of pipelines are cut by speed, too, what each has to do, by the mean of its pipeline: one
            tuple for each depth, as long as the pipeline has stages.
        works: Where tensor-parallel groups divide MLPs by speed, too, what each rank has to do by what it would with an even
            share: one tuple for each degree of tp, behind it.
    """

    ranks: tuple[Positive, ...]
    loads: tuple[tuple[Positive, ...], ...] = ()
    works: tuple[tuple[int, tuple[Positive, ...]], ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks or any(len(own) != len(self.ranks) for _, own in self.works):
            raise ValueError("works of another number of ranks")

    def of_replicas(self, strategy: Strategy) -> tuple[float, ...] | None:
        """The speed of each replica, that of the rank which is done last; None where all are as fast."""
        if strategy.dp == 1:
            return None
        stages, pp = strategy.num_stages, strategy.pp
        loads = next((loads for loads in self.loads if len(loads) == stages), (1.0,) * stages)
        of_ranks = [sum(loads[rank::pp]) / strategy.v for rank in range(pp)]  # stage s is on rank s mod pp
        slowest = [float("inf")] * strategy.dp
        works = dict(self.works).get(strategy.tp, (1.0,) * len(self.ranks))
        for rank, (speed, work) in enumerate(zip(self.ranks, works, strict=True)):
            coord = strategy.coord(rank)
            slowest[coord.dp] = min(slowest[coord.dp], speed / (of_ranks[coord.pp] * work))
        return tuple(slowest) if len(set(slowest)) > 1 else None


class SpeedHistory:
    """The speeds of a run, by mini-batch; see the head of the file for `delay`."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self._in_force: list[tuple[int, Speeds | None]] = [(0, None)]

    def of(self, number: int) -> Speeds | None:
        """Those of a mini-batch; None divides evenly. May be asked in another thread than `trained` runs in."""
        known = self._in_force
        return next((speeds for first, speeds in reversed(known) if first <= number), known[0][1])

    def trained(self, number: int, speeds: Speeds | None) -> int | None:
        """Takes what is known after mini-batch `number`; the mini-batch from which on it holds, where it is new."""
        if speeds == self._in_force[-1][1]:
            return None
        # never in place: another thread may be looking
        needed = max(i for i, entry in enumerate(self._in_force) if i == 0 or entry[0] <= number + 1)
        first = number + 1 + self.delay
        self._in_force = [*self._in_force[needed:], (first, speeds)]
        return first

    def restart(self) -> None:
        """Counts from 0 again; what is known last stays."""
        self._in_force = [(0, self._in_force[-1][1])]

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next divisions depend on, JSON-ready."""
        return {"in_force": [[first, *((None,) if s is None else vars(s).values())] for first, s in self._in_force]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state.

        Raises:
            HotspaConfigError: it is not one.
        """
        with reading_state("the speeds of devices", "packs are divided evenly until slow devices are found anew"):
            history = [(int(first), _read(numbers)) for first, *numbers in state["in_force"]]
            if not history:
                raise ValueError("no speeds")
        self._in_force = history


def _read(numbers: list[Any]) -> Speeds | None:
    """What stands for speeds in a state: their fields, or None; earlier versions had fewer fields."""
    if numbers[0] is None:
        return None
    return typed(dict(zip(Speeds.__match_args__[: len(numbers)], numbers, strict=True)), Speeds)


# -- stages and shares by speed ---------------------------------------------------------------------------------------


LEAST_GAIN = Fraction(5, 100)
"""A cut is left for one that is faster by this share at least: a switch costs seconds, and relative step times are measured."""

StepTimes = tuple[tuple[int, ...], ...]
"""See `StageCosts.step_times`."""


def step_times_of_ranks(speeds: Sequence[float]) -> tuple[int, ...]:
    """How long each rank takes (`USUAL_STEP_TIME`), from speeds that are 1 for ranks that are not slow."""
    return tuple(max(round(USUAL_STEP_TIME / speed), 1) for speed in speeds)


def stages_of_replicas(strategy: Strategy, ranks: Sequence[int]) -> list[list[int]]:
    """For each replica the relative step time of each of its stages, that of the slowest rank; stage s is on rank s mod pp of it."""
    slowest = [[0] * strategy.pp for _ in range(strategy.dp)]
    for rank, step_time in enumerate(ranks):
        coord = strategy.coord(rank)
        slowest[coord.dp][coord.pp] = max(slowest[coord.dp][coord.pp], step_time)
    return [step_times * strategy.v for step_times in slowest]


def throughput(
    costs: StageCosts, stages: Sequence[range], replicas: Iterable[Sequence[int]], pp: int | None = None
) -> Fraction:
    """How many packs all replicas (`stages_of_replicas`) are done with under a cut in the time of one unit of cost,
    together; with as many ranks to a pipeline as stages, or `pp`."""
    own, passes, total = costs.of_stages(stages), costs.passes(stages), Fraction(0)
    pp = pp or len(stages)
    for step_times in replicas:
        taken = [cost * step_time for cost, step_time in zip(own, step_times, strict=True)]
        of_ranks = [sum(taken[rank::pp]) for rank in range(pp)]
        total += Fraction(USUAL_STEP_TIME, max(*of_ranks, *(p * USUAL_STEP_TIME for p in passes), 1))
    return total


def cut_by_speed(
    costs: StageCosts,
    strategies: Iterable[Strategy],
    speeds: Sequence[float] | None,
    step_times_of: Callable[[Strategy], Sequence[int]] | None = None,
) -> StepTimes:
    """The relative step times by which the stages of a pool should be cut.

    Args:
        costs: What decides the cut, with the relative step times in force.
        strategies: The pool; of one world size.
        speeds: Of each rank, relative to one that is not slow; None where none is.
        step_times_of: The relative step time of each rank under a strategy, where its work is not that of an even shard
            (`step_times_of_groups`).

    Returns:
        For `StageCosts.with_step_times`. Those in force where no other ones are worth it; none where no device is slow.
    """
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
    """The relative step times for the pipelines of so many stages; None for the even cut. The one in force where no other is worth it."""
    even = costs.with_step_times(()).stages(depth)
    of_even = [throughput(costs, even, replicas, pp) for pp, replicas in pool]

    def gain(step_times: tuple[int, ...] | None) -> Fraction:
        """By the even cut, summed over the strategies."""
        stages = even if step_times is None else costs.with_step_times((step_times,)).stages(depth)
        gains = (throughput(costs, stages, r, pp) / e for (pp, r), e in zip(pool, of_even, strict=True))
        return sum(gains, Fraction(0))

    now = costs.step_times_of(depth)
    candidates: list[tuple[int, ...] | None] = [None]
    for _, replicas in pool:
        # of all replicas together, and of each
        candidates += [tuple(max(of_stage) for of_stage in zip(*replicas, strict=True)), *map(tuple, replicas)]
    best = max(candidates, key=gain)  # the first of equal ones, so the even one before all
    return best if gain(best) >= (1 + LEAST_GAIN) * gain(now) else now


def stage_loads(costs: StageCosts) -> tuple[tuple[float, ...], ...]:
    """For each depth that is cut by speed, the cost of its stages by their mean."""
    loads = []
    for step_times in costs.step_times:
        own = costs.of_stages(costs.stages(len(step_times)))
        loads.append(tuple(max(cost, 1) * len(own) / max(sum(own), 1) for cost in own))
    return tuple(loads)


def can_share(vector: ParameterVector) -> bool:
    """Whether there are MLPs that tensor-parallel groups can divide unevenly."""
    return any(costs.by_step_time for costs in vector.unit_costs.values())


def _throughput(vector: ParameterVector, strategy: Strategy, ranks: Sequence[int]) -> float:
    """Of all replicas together; one is as fast as the slowest of its groups."""
    slowest = [1] * strategy.dp
    for rank, step_time in enumerate(step_times_of_groups(vector, strategy, ranks)):
        replica = strategy.coord(rank).dp
        slowest[replica] = max(slowest[replica], step_time)
    return sum(1 / step_time for step_time in slowest)


def shares_by_speed(
    vector: ParameterVector, strategies: Iterable[Strategy], speeds: Sequence[float] | None
) -> tuple[int, ...]:
    """The relative step times of ranks by which the MLPs of a pool should be divided.

    Args:
        vector: With the relative step times in force.
        strategies: The pool; of one world size.
        speeds: Of each rank, relative to one that is not slow; None where none is.

    Returns:
        For `ParameterVector.with_step_times`. Those in force where no other ones are faster by `LEAST_GAIN`; none where no device is
        slow.
    """
    pool = [strategy for strategy in strategies if strategy.tp > 1]
    if speeds is None or not pool or not can_share(vector):
        return ()
    ranks = step_times_of_ranks(speeds)
    even = vector.with_step_times(())
    of_even = [_throughput(even, strategy, ranks) for strategy in pool]

    def gain(step_times: tuple[int, ...]) -> float:
        """By even shares, summed over the strategies."""
        divided = vector.with_step_times(step_times)
        return sum(_throughput(divided, s, ranks) / usual for s, usual in zip(pool, of_even, strict=True))

    best = max(((), ranks), key=gain)  # the first of equal ones, so the even one
    return best if gain(best) >= (1 + float(LEAST_GAIN)) * gain(vector.step_times) else vector.step_times


def works_by_degree(
    vector: ParameterVector, strategies: Iterable[Strategy]
) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Where MLPs are divided unevenly, for each degree of tp what every rank has to do by what it would with even shares."""
    if not vector.step_times:
        return ()
    by_degree = {strategy.tp: works(vector, strategy) for strategy in strategies if strategy.tp > 1}
    return tuple((tp, own) for tp, own in sorted(by_degree.items()) if len(set(own)) > 1)
