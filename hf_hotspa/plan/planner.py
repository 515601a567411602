"""The planner: from layouts to a validated switch plan.

Loads are planned by `relay` (the default), `algorithm1`, `round_robin` or `first_owner`; see `relay` and `direct`. On a
single node the relay plan is Algorithm 1's. A gradient return is planned as the adjoint of the load of its
contributions from the master store.

A planner sees layouts, never degrees. It plans one segment of each kind, for all with equal placements: time grows with
the ranks, not with the layers. Everything is a deterministic pure function of plain data: every rank computes the same
plan.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_hotspa.cluster import Cluster
from hf_hotspa.errors import PlanError, check_choice
from hf_hotspa.layout.intervals import Placement, place
from hf_hotspa.layout.placement import Layout
from hf_hotspa.plan.direct import Pieces, cut_pieces, plan_direct
from hf_hotspa.plan.relay.relay_plan import plan_relay
from hf_hotspa.plan.relay.routing import relay_pays
from hf_hotspa.plan.switch_plan import ANY, INTER, INTRA, SwitchPlan, prove

PLANNERS = ("relay", "algorithm1", "round_robin", "first_owner")
"""The planners, the default first."""


def plan_load(
    source: Layout | Sequence[Layout],
    target: Layout,
    cluster: Cluster,
    element_sizes: Sequence[int],
    planner: str = "relay",
) -> SwitchPlan:
    """Plans a load of everything that the target layout holds, from ranks that hold it in a source layout.

    Args:
        source: One layout, or two: master store, and weights of the last strategy.
        target: Where the parameters are needed. It may leave out elements.
        element_sizes: Bytes of one element of each segment on the wire, for balancing the links.
        planner: One of `PLANNERS`.

    Raises:
        PlanError: the sources do not hold all that the target needs.
        HotspaConfigError: there is no such planner.
    """
    sources = [source] if isinstance(source, Layout) else list(source)
    plan = _plan(sources, target, cluster, element_sizes, planner, False)
    prove(plan, sources, target)
    return plan


def plan_return(
    contributions: Layout,
    master: Layout,
    cluster: Cluster | None = None,
    element_sizes: Sequence[int] | None = None,
    planner: str = "relay",
) -> SwitchPlan:
    """Plans a gradient return: every contribution of every rank, to the one owner of its element.

    Args:
        contributions: Which elements each rank adds to.
        master: Where each element is owned, exactly once.
        cluster: As for `plan_load`; one node when None.
        element_sizes: As for `plan_load`; equal when None.

    Raises:
        PlanError: an element with contributions has no owner, or more than one.
        HotspaConfigError: there is no such planner.
    """
    cluster = cluster or Cluster(contributions.world_size, contributions.world_size)
    num_segments = max(len(contributions.placements), len(master.placements))
    load = _plan([master], contributions, cluster, element_sizes or [1] * num_segments, planner, True)
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
    sizes = [*element_sizes, *[1] * (len(kind_of) - len(element_sizes))]
    bases = [0] * len(kind_of)
    for layout in sources:
        bases[: len(layout.bases)] = layout.bases
    bases[: len(target.bases)] = target.bases
    relays = planner == "relay" and cluster.num_nodes > 1 and relay_pays(cluster)
    if relays:
        plans, plan_of = plan_relay(kinds, kind_of, sizes, cluster, sums), list(kind_of)
        links = (INTRA, INTER, INTRA)[-max((len(plan.hops) for plan in plans), default=2) :]
    else:
        plans, plan_of = plan_direct(kinds, kind_of, sizes, cluster, "algorithm1" if planner == "relay" else planner)
        links = (ANY,)
    name = f"load {' + '.join(source.name for source in sources)} -> {target.name}"
    return SwitchPlan(name, cluster.world_size, tuple(bases), tuple(plans), tuple(plan_of), links, False)


def segment_kinds(sources: Sequence[Layout], target: Layout, sums: bool = False) -> tuple[list[Pieces], list[int]]:
    """Returns the pieces of each kind of segment, and each segment's kind; -1 if the target holds nothing of it.

    Args:
        sums: The target's holders contribute to what exactly one source rank owns.

    Raises:
        PlanError: a piece that is needed is held nowhere; or, with `sums`, does not have exactly one owner.
    """
    kinds: list[Pieces] = []
    known: dict[tuple[object, ...], int] = {}
    kind_of = []
    world_size = target.world_size
    for segment in range(max(len(layout.placements) for layout in (*sources, target))):
        needed = _placement(target, segment)
        if needed is None or not len(needed[0].ranks):
            kind_of.append(-1)
            continue
        base = needed[1]
        placements = [_placement(source, segment) or (place([], [0] * world_size), base) for source in sources]
        sides = [(placement, where - base) for placement, where in placements]
        key = (needed[0].key, *((placement.key, shift) for placement, shift in sides))
        if key not in known:
            for layout, placement, where in (
                *((s, *f) for s, f in zip(sources, placements, strict=True)),
                (target, *needed),
            ):
                placement.check(layout.name, segment, where)
            pieces = cut_pieces(sides, (needed[0], 0), world_size)
            _check_owners(pieces, base, sources, target, sums)
            known[key] = len(kinds)
            kinds.append(pieces)
        kind_of.append(known[key])
    return kinds, kind_of


def _placement(layout: Layout, segment: int) -> tuple[Placement, int] | None:
    if segment >= len(layout.placements):
        return None
    return layout.placements[segment], layout.bases[segment]


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
