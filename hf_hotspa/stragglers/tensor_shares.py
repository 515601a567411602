"""Shares of MLPs by the speed of devices: whether a slow rank of a tensor-parallel group is worth an uneven division.

The division itself is that of `layout.shares`, one for each group: the groups of other replicas stay even, so nobody suffers
from it, and the question is only whether the change is worth a switch. What each rank has to do afterwards is known to the
cut of stages and to the division of packs.

Every rank comes to the same shares: all ranks have the same numbers, and the same order of sums. No torch.
"""

from collections.abc import Iterable, Sequence

from hf_hotspa.layout.shares import paces_of_groups, works
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.stragglers.stage_cuts import LEAST_GAIN, paces_of_ranks
from hf_hotspa.strategy import Strategy


def can_share(vector: ParameterVector) -> bool:
    """Whether there are MLPs that tensor-parallel groups can divide unevenly."""
    return any(costs.by_pace for costs in vector.unit_costs.values())


def _throughput(vector: ParameterVector, strategy: Strategy, ranks: Sequence[int]) -> float:
    """Of all replicas together; one is as fast as the slowest of its groups."""
    slowest = [1] * strategy.dp
    for rank, pace in enumerate(paces_of_groups(vector, strategy, ranks)):
        replica = strategy.coord(rank).dp
        slowest[replica] = max(slowest[replica], pace)
    return sum(1 / pace for pace in slowest)


def shares_by_speed(
    vector: ParameterVector, strategies: Iterable[Strategy], speeds: Sequence[float] | None
) -> tuple[int, ...]:
    """The paces of ranks by which the MLPs of a pool should be divided.

    Args:
        vector: With the paces in force.
        strategies: The pool; of one world size.
        speeds: Of each rank, relative to one that is not slow; None where none is.

    Returns:
        For `ParameterVector.with_paces`. Those in force where no other ones are faster by `LEAST_GAIN`; none where no device is
        slow.
    """
    pool = [strategy for strategy in strategies if strategy.tp > 1]
    if speeds is None or not pool or not can_share(vector):
        return ()
    ranks = paces_of_ranks(speeds)
    even = vector.with_paces(())
    of_even = [_throughput(even, strategy, ranks) for strategy in pool]

    def gain(paces: tuple[int, ...]) -> float:
        """By even shares, summed over the strategies."""
        divided = vector.with_paces(paces)
        return sum(_throughput(divided, s, ranks) / usual for s, usual in zip(pool, of_even, strict=True))

    best = max(((), ranks), key=gain)  # the first of equal ones, so the even one
    return best if gain(best) >= (1 + float(LEAST_GAIN)) * gain(vector.paces) else vector.paces


def works_by_degree(
    vector: ParameterVector, strategies: Iterable[Strategy]
) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Where MLPs are divided unevenly, for each degree of tp what every rank has to do by what it would with even shares."""
    if not vector.paces:
        return ()
    by_degree = {strategy.tp: works(vector, strategy) for strategy in strategies if strategy.tp > 1}
    return tuple((tp, own) for tp, own in sorted(by_degree.items()) if len(set(own)) > 1)
