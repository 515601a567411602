"""The planner: from layouts to a validated switch plan.

Loads are planned by `relay` (the default), `algorithm1`, `round_robin` or `first_owner`; see `relay` and `direct`. On a
single node the relay plan is Algorithm 1's. A gradient return is planned as the adjoint of the load of its
contributions from the master store.

A planner sees layouts, never degrees. It plans one segment of each kind, for all with equal placements: time grows with
the ranks, not with the layers. Everything is a deterministic pure function of plain data: every rank computes the same
plan.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np

from hf_hotspa.cluster import Cluster
from hf_hotspa.errors import PlanError, check_choice
from hf_hotspa.layout.placement import Layout, Placement
from hf_hotspa.plan.direct import Pieces, cut_pieces, plan_direct
from hf_hotspa.plan.relay import plan_relay, relay_pays
from hf_hotspa.plan.switch_plan import ANY, INTER, INTRA, SwitchPlan, prove

PLANNERS = ("relay", "algorithm1", "round_robin", "first_owner")  # the planners, the default first


def plan_load(
    source: Layout | Sequence[Layout],  # one layout, or two: master store, and weights of the last strategy
    target: Layout,  # where the parameters are needed. It may leave out elements
    cluster: Cluster,
    element_sizes: Sequence[int],  # bytes of one element of each segment on the wire, for balancing the links
    planner: str = "relay",  # one of `PLANNERS`
) -> SwitchPlan:
    """Plans a load of everything that the target layout holds, from ranks that hold it in a source layout. Raises
    `PlanError`: the sources do not hold all that the target needs. Raises `HotspaConfigError`: there is no such
    planner."""
    sources = [source] if isinstance(source, Layout) else list(source)
    plan = _plan(sources, target, cluster, element_sizes, planner, False)
    prove(plan, sources, target)
    return plan


def plan_return(
    contributions: Layout,  # which elements each rank adds to
    master: Layout,  # where each element is owned, exactly once
    cluster: Cluster | None = None,  # as for `plan_load`; one node when None
    element_sizes: Sequence[int] | None = None,  # as for `plan_load`; equal when None
    planner: str = "relay",
) -> SwitchPlan:
    """Plans a gradient return: every contribution of every rank, to the one owner of its element. Raises `PlanError`:
    an element with contributions has no owner, or more than one. Raises `HotspaConfigError`: there is no such
    planner."""
    cluster = cluster or Cluster(contributions.world_size, contributions.world_size)
    load = _plan([master], contributions, cluster, element_sizes or [1] * len(master.placements), planner, True)
    plan = replace(load.inverse(), name=f"return {contributions.name} -> {master.name}")
    prove(plan, contributions, master)
    return plan


def _plan(
    sources: list[Layout], target: Layout, cluster: Cluster, element_sizes: Sequence[int], planner: str, sums: bool
) -> SwitchPlan:
    check_choice("the planner", planner, PLANNERS)
    for layout in (*sources, target):
        if layout.world_size != cluster.world_size:
            worlds = f"{[source.world_size for source in sources]}, {target.world_size}, {cluster.world_size}"
            raise PlanError(f"source, target and cluster are of different worlds: {worlds}")
    kinds, kind_of = segment_kinds(sources, target, sums)
    if planner == "relay" and relay_pays(cluster):
        plans, plan_of = plan_relay(kinds, kind_of, element_sizes, cluster, sums), kind_of
        links = (INTRA, INTER, INTRA)[-max((len(plan.hops) for plan in plans), default=2) :]
    else:
        planner = "algorithm1" if planner == "relay" else planner
        plans, plan_of = plan_direct(kinds, kind_of, element_sizes, cluster, planner)
        links = (ANY,)
    name = f"load {' + '.join(source.name for source in sources)} -> {target.name}"
    return SwitchPlan(name, cluster.world_size, target.bases, tuple(plans), tuple(plan_of), links, False)


def segment_kinds(sources: Sequence[Layout], target: Layout, sums: bool = False) -> tuple[list[Pieces], list[int]]:
    """Returns the pieces of each kind of segment, and each segment's kind; -1 if the target holds nothing of it.
    `sums`: the target's holders contribute to what exactly one source rank owns. Raises `PlanError`: a piece that is
    needed is held nowhere; or, with `sums`, does not have exactly one owner."""
    kinds: list[Pieces] = []
    known: dict[tuple[Placement, ...], int] = {}
    kind_of = []
    layouts = [*sources, target]
    for segment, placements in enumerate(zip(*(layout.placements for layout in layouts), strict=True)):
        *holding, needed = placements
        if not len(needed.ranks):
            kind_of.append(-1)
            continue
        if placements not in known:
            base = target.bases[segment]
            for layout, placement in zip(layouts, placements, strict=True):
                placement.check(layout.name, segment, base)
            pieces = cut_pieces(holding, needed)
            _check_owners(pieces, base, sources, target, sums)
            known[placements] = len(kinds)
            kinds.append(pieces)
        kind_of.append(known[placements])
    return kinds, kind_of


def _check_owners(pieces: Pieces, base: int, sources: Sequence[Layout], target: Layout, sums: bool) -> None:
    counts = pieces.holders.counts
    bad = np.flatnonzero(counts != 1 if sums else counts < 1)
    if not len(bad):
        return
    piece = int(bad[0])
    # name the complete stretch with the same error, not only its first piece
    last = piece
    while last + 1 < len(counts) and counts[last + 1] == counts[piece]:
        last += 1
    start, stop = base + int(pieces.starts[piece]), base + int(pieces.starts[last] + pieces.lengths[last])
    where = f"rank {min(pieces.needed.of(piece))} of layout {target.name!r}"
    names = " or ".join(repr(source.name) for source in sources)
    if sums:
        raise PlanError(f"elements [{start}, {stop}) have {counts[piece]} owners in layout {names}", where=where)
    raise PlanError(f"no rank of layout {names} holds elements [{start}, {stop})", where=where)


# -- the order of the phases of a mini-batch ---------------------------------------------------------------------------

# The cheapest way through a matrix of switch costs. Every rank computes it from the same numbers, and ties must fall the
# same way: orders whose costs differ by less than a relative 1e-9 count as equal, and the one nearest to the given order
# wins.

EXACT_PHASES = 8  # the most phases with an optimal order; beyond that, a local optimum
_TOLERANCE = 1e-9


def order_phases(first_cost: Sequence[float], switch_cost: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Returns the order that minimises `first_cost[order[0]]` plus the switch costs between neighbours.

    Up to `EXACT_PHASES` phases of all orders; the lexicographically smallest among equals. Beyond that, the best of several starts (the given order, and the nearest neighbour from each phase), each improved
    by moving one phase or reversing a stretch until nothing helps; never worse than the given order.

    `switch_cost[a][b]` is the cost of running phase b right after phase a; the diagonal is not read. Raises `PlanError`:
    the matrix is not square, or a cost is negative or not finite.
    """
    count = len(first_cost)
    if len(switch_cost) != count or any(len(row) != count for row in switch_cost):
        raise PlanError(f"the switch costs of {count} phases are not a {count} x {count} matrix")
    if not all(math.isfinite(cost) and cost >= 0 for row in (first_cost, *switch_cost) for cost in row):
        raise PlanError("a switch cost is negative or not a finite number")
    if count <= EXACT_PHASES:
        costs = {order: _cost(order, first_cost, switch_cost) for order in permutations(range(count))}
        most = min(costs.values()) * (1 + _TOLERANCE)
        return next(order for order, cost in costs.items() if cost <= most)
    return _improved(first_cost, switch_cost)


def _cost(order: Sequence[int], first_cost: Sequence[float], switch_cost: Sequence[Sequence[float]]) -> float:
    return first_cost[order[0]] + sum(switch_cost[a][b] for a, b in pairwise(order))


def _improved(first_cost: Sequence[float], switch_cost: Sequence[Sequence[float]]) -> tuple[int, ...]:
    given = list(range(len(first_cost)))
    best, best_cost = given, math.inf
    for order in (given, *(_nearest_neighbours(start, switch_cost) for start in given)):
        cost = _cost(order, first_cost, switch_cost)
        while True:
            near = min(_neighbours(order), key=lambda near: _cost(near, first_cost, switch_cost))
            if (near_cost := _cost(near, first_cost, switch_cost)) >= cost * (1 - _TOLERANCE):
                break
            cost, order = near_cost, near
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
