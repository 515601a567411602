"""The dynamic programme over sorted lengths: contiguous ranges, each with a different strategy.

Given the cost of every (strategy, range of lengths), it finds the cheapest way to cut all lengths into at most
`max_phases` ranges with different strategies. Exact for these costs, for any order of strategies, up to `EXACT_RANGES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
EXACT_RANGES, _MOST_CHOICES = 3, 500


@dataclass(frozen=True, order=True)
class Partition:
    """A way to cut the lengths: `(strategy, low edge, high edge)` of each range by length, as indices; total cost."""

    seconds: float
    ranges: tuple[tuple[int, int, int], ...]


def best_partitions(costs: Array, max_phases: int, keep: int = 4) -> list[Partition]:
    """Returns the cheapest partitions with 1, 2, ... ranges, for up to `keep` choices of strategies of each number.

    `f(s_1 .. s_k, j) = min over i < j of f(s_1 .. s_{k-1}, i) + cost(s_k, i, j)`, over all ordered choices of
    different strategies; memory and time grow with the number of strategies to the power `max_phases`, up to
    `EXACT_RANGES`. Beyond, only the choices nearest to the best at any edge are extended: a heuristic.

    `costs`: [strategies, edges, edges], seconds of running the lengths between two edges; infinite if impossible. Ties
    go in the order of strategies and edges. The first is the overall best; the others use only strategies that the
    first might have used (`_useful`).
    """
    useful = _useful(costs, max_phases)
    partitions = _best(costs[useful], max_phases, keep)
    return [Partition(p.seconds, tuple((int(useful[s]), i, j) for s, i, j in p.ranges)) for p in partitions]


def _useful(costs: Array, max_phases: int) -> npt.NDArray[np.intp]:
    """The strategies that a best partition may need: not those with `max_phases` others as cheap for every range, one
    of which would be free to replace them. Of equal strategies the first count as cheaper."""
    low, high = np.triu_indices(costs.shape[1], 1)
    ranges = costs[:, low, high]  # below the diagonal all are infinite
    dearer = np.stack([(own >= ranges).all(axis=1) for own in ranges])  # [strategy, other]
    order = np.arange(len(costs))
    dearer &= ~(dearer.T & (order[:, None] <= order[None]))
    return np.flatnonzero(dearer.sum(axis=1) < max_phases)


def _best(costs: Array, max_phases: int, keep: int) -> list[Partition]:
    num_strategies, num_edges = costs.shape[:2]
    last = num_edges - 1
    chosen = np.arange(num_strategies)[:, None]
    reached = costs[:, 0, :]
    partitions: list[Partition] = []
    for phases in range(1, min(max_phases, num_strategies, last) + 1):
        if phases > 1:
            if phases > EXACT_RANGES:
                chosen, reached = _nearest(chosen, reached)
            ends = range(1, num_edges)
            if phases == max_phases:
                ends = range(last, num_edges)
                chosen, reached = _hopeful(costs, chosen, reached, keep)
            chosen, reached = _extend(costs, chosen, reached, ends)
        totals = reached[:, last]
        for index in np.argsort(totals, kind="stable")[:keep].tolist():
            if np.isfinite(totals[index]):
                partitions.append(_traced(costs, chosen[index].tolist()))
    return sorted(partitions)


def _nearest(chosen: npt.NDArray[np.int64], reached: Array) -> tuple[npt.NDArray[np.int64], Array]:
    """The choices that cost least beyond the best one, at their best edge; no more than `_MOST_CHOICES`."""
    best = reached.min(axis=0)
    beyond = (reached[:, np.isfinite(best)] - best[np.isfinite(best)]).min(axis=1, initial=np.inf)
    kept = np.sort(np.argsort(beyond, kind="stable")[:_MOST_CHOICES])
    return chosen[kept], reached[kept]


def _hopeful(
    costs: Array, chosen: npt.NDArray[np.int64], reached: Array, keep: int
) -> tuple[npt.NDArray[np.int64], Array]:
    """The choices that one more range, the last one, can make one of the `keep` cheapest: with the cheapest last range
    of all strategies they cost no more than the `keep` best of a sample."""
    least = (reached[:, :-1] + costs[:, :-1, -1].min(axis=0)).min(axis=1)
    first = np.argsort(least, kind="stable")[:keep]
    last = costs.shape[1] - 1
    _, some = _extend(costs, chosen[first], reached[first], range(last, last + 1))
    if len(some) < keep:
        return chosen, reached
    hopeful = least <= np.sort(some[:, last])[keep - 1]
    return chosen[hopeful], reached[hopeful]


def _extend(
    costs: Array, chosen: npt.NDArray[np.int64], reached: Array, ends: Sequence[int]
) -> tuple[npt.NDArray[np.int64], Array]:
    """Adds one more range behind every choice that reaches some edge."""
    num_strategies, num_edges = costs.shape[:2]
    alive = np.isfinite(reached).any(axis=1)
    chosen, reached = chosen[alive], reached[alive]
    fresh = ~(chosen[:, :, None] == np.arange(num_strategies)).any(axis=1)  # [choice, strategy]
    before, added = np.nonzero(fresh)
    result = np.full((len(before), num_edges), np.inf)
    for end in ends:
        least = np.full(fresh.shape, np.inf)
        for start in range(end):
            np.minimum(least, np.add.outer(reached[:, start], costs[:, start, end]), out=least)
        result[:, end] = least[fresh]
    return np.column_stack((chosen[before], added)), result


def _traced(costs: Array, strategies: Sequence[int]) -> Partition:
    """The best cuts for given strategies, in order of length."""
    num_edges = costs.shape[1]
    best = [costs[strategies[0], 0, :]]
    for strategy in strategies[1:]:
        best.append((best[-1][:, None] + costs[strategy]).min(axis=0))
    end, ranges = num_edges - 1, []
    total = float(best[-1][end])
    for index in range(len(strategies) - 1, 0, -1):
        start = int((best[index - 1] + costs[strategies[index], :, end]).argmin())
        ranges.append((strategies[index], start, end))
        end = start
    ranges.append((strategies[0], 0, end))
    return Partition(total, tuple(reversed(ranges)))
