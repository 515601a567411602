"""The order of the phases of a mini-batch: the cheapest way through a matrix of switch costs.

Every rank computes it from the same numbers, and ties must fall the same way: orders whose costs differ by less than a
relative 1e-9 count as equal, and the one nearest to the given order wins.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from hf_hotspa.errors import PlanError

EXACT_PHASES = 8
"""The most phases with an optimal order; beyond that, a local optimum."""

_TOLERANCE = 1e-9


def order_phases(first_cost: Sequence[float], switch_cost: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Returns the order that minimises `first_cost[order[0]]` plus the switch costs between neighbours.

    Up to `EXACT_PHASES` phases by Held-Karp dynamic programming; the lexicographically smallest order among equals.
    Beyond that, the best of several starts (the given order, and the nearest neighbour from each phase), each improved
    by moving one phase or reversing a stretch until nothing helps; never worse than the given order.

    Args:
        first_cost: Cost of starting with each phase.
        switch_cost: `switch_cost[a][b]` is the cost of running phase b right after phase a; the diagonal is not read.

    Raises:
        PlanError: the matrix is not square, or a cost is negative or not finite.
    """
    count = len(first_cost)
    if len(switch_cost) != count or any(len(row) != count for row in switch_cost):
        raise PlanError(f"the switch costs of {count} phases are not a {count} x {count} matrix")
    if not all(math.isfinite(cost) and cost >= 0 for row in (first_cost, *switch_cost) for cost in row):
        raise PlanError("a switch cost is negative or not a finite number")
    if count <= EXACT_PHASES:
        return _exact(first_cost, switch_cost)
    return _improved(first_cost, switch_cost)


def _exact(first_cost: Sequence[float], switch_cost: Sequence[Sequence[float]]) -> tuple[int, ...]:
    count = len(first_cost)
    everything = (1 << count) - 1
    # rest[visited][last]: the least cost of the unvisited phases after phase `last`
    rest = [[0.0] * count for _ in range(everything + 1)]
    for visited in range(everything - 1, 0, -1):
        left = [b for b in range(count) if not visited >> b & 1]
        for a in range(count):
            if visited >> a & 1:
                rest[visited][a] = min(switch_cost[a][b] + rest[visited | 1 << b][b] for b in left)
    order: list[int] = []
    visited = 0
    budget = math.inf
    # The first phase that still allows the optimum gives the lexicographically smallest order.
    while len(order) < count:
        step = switch_cost[order[-1]] if order else first_cost
        left = [b for b in range(count) if not visited >> b & 1]
        totals = {b: step[b] + rest[visited | 1 << b][b] for b in left}
        if not order:
            budget = min(totals.values()) * (1 + _TOLERANCE)
        cheapest = min(totals.values())
        chosen = next(b for b in left if totals[b] <= max(budget, cheapest))
        order.append(chosen)
        visited |= 1 << chosen
        budget -= step[chosen]
    return tuple(order)


def _cost(order: Sequence[int], first_cost: Sequence[float], switch_cost: Sequence[Sequence[float]]) -> float:
    return first_cost[order[0]] + sum(switch_cost[a][b] for a, b in pairwise(order))


def _improved(first_cost: Sequence[float], switch_cost: Sequence[Sequence[float]]) -> tuple[int, ...]:
    count = len(first_cost)
    best = list(range(count))
    best_cost = math.inf
    for start in (None, *range(count)):
        order = list(range(count)) if start is None else _nearest_neighbours(start, switch_cost)
        cost = _cost(order, first_cost, switch_cost)
        while True:
            nearest = min(
                ((_cost(near, first_cost, switch_cost), near) for near in _neighbours(order)),
                key=lambda candidate: candidate[0],
            )
            if nearest[0] >= cost * (1 - _TOLERANCE):
                break
            cost, order = nearest
        if cost < best_cost * (1 - _TOLERANCE):
            best_cost, best = cost, order
    return tuple(best)


def _nearest_neighbours(start: int, switch_cost: Sequence[Sequence[float]]) -> list[int]:
    order, left = [start], [b for b in range(len(switch_cost)) if b != start]
    while left:
        order.append(min(left, key=switch_cost[order[-1]].__getitem__))
        left.remove(order[-1])
    return order


def _neighbours(order: list[int]) -> list[list[int]]:
    count = len(order)
    orders = []
    for i in range(count):
        without = order[:i] + order[i + 1 :]
        orders += [[*without[:j], order[i], *without[j:]] for j in range(count) if j != i]
        orders += [order[:i] + order[i : j + 1][::-1] + order[j + 1 :] for j in range(i + 2, count)]
    return orders
