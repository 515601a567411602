"""Direct plans: every needer of a piece gets it straight from one rank that holds it, in one hop.

Three ways to choose the sender, for a needer that does not hold the piece itself:

* `algorithm1`: Algorithm 1 of HotSPa (SOSP'24): of the holders on the needer's node if there are any, else of all, the
  one with the least bytes to send so far (inside the node, or between nodes). Loads persist over all pieces and
  segments. On regular layouts no direct plan is faster (the fractional bound is met).
* `round_robin`: holder number (needer mod holders), blind to nodes: the way of Megatron-Core's resharding.
* `first_owner`: the lowest rank that holds it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.intervals import Numbers
from hf_hotspa.plan.pieces import Pieces
from hf_hotspa.plan.table import TARGET, SegmentPlan, canonical


@dataclass
class SendLoads:
    """Bytes that each rank has been given to send so far, inside its node and to other nodes."""

    intra_node: list[int]
    inter_node: list[int]

    @classmethod
    def zero(cls, world_size: int) -> "SendLoads":
        return cls([0] * world_size, [0] * world_size)

    def add(self, src: int, dst: int, size: int, cluster: Cluster) -> None:
        """Counts one transfer; one inside a rank is free."""
        if src != dst:
            (self.intra_node if cluster.node(src) == cluster.node(dst) else self.inter_node)[src] += size


def choose_source(holders: Collection[int], dst: int, loads: SendLoads, cluster: Cluster) -> int:
    """Which holder sends a piece to `dst`: itself, else the least loaded on its node, else the least loaded of all.

    Ties go to the lowest rank. `loads` is read, not changed.
    """
    if dst in holders:
        return dst
    node = cluster.node(dst)
    near = [rank for rank in holders if cluster.node(rank) == node]
    load = loads.intra_node if near else loads.inter_node
    return min(near or holders, key=lambda rank: (load[rank], rank))


def plan_direct(
    kinds: Sequence[Pieces],
    kind_of: Sequence[int],
    element_sizes: Sequence[int],
    cluster: Cluster,
    planner: str,
) -> tuple[list[SegmentPlan], list[int]]:
    """Direct plans of all segments, and which segment has which.

    Args:
        kind_of: The kind of each segment; -1 for none.
        element_sizes: Bytes of one element of each segment on the wire.
        planner: `algorithm1`, `round_robin` or `first_owner`.
    """
    if planner != "algorithm1":
        return [_table(pieces, _stateless(pieces, planner), cluster.world_size) for pieces in kinds], list(kind_of)
    loads = SendLoads.zero(cluster.world_size)
    plans: list[SegmentPlan] = []
    known: dict[tuple[int, bytes], int] = {}
    plan_of = []
    forced = [_forced(pieces) for pieces in kinds]
    free = all(rows is not None for rows in forced)  # nobody has a choice: loads decide nothing
    for kind, size in zip(kind_of, element_sizes, strict=True):
        if kind < 0:
            plan_of.append(-1)
            continue
        rows = forced[kind] if free else None
        if rows is None:
            rows = _algorithm1(kinds[kind], size, loads, cluster)
        key = kind, rows.tobytes()
        if key not in known:
            known[key] = len(plans)
            plans.append(_table(kinds[kind], rows, cluster.world_size))
        plan_of.append(known[key])
    return plans, plan_of


def _table(pieces: Pieces, source_rows: Numbers, world_size: int) -> SegmentPlan:
    """The plan in which the i-th need is served by a row of holders."""
    needed, held = pieces.needed, pieces.held
    table = np.column_stack(
        (
            held.store[source_rows],
            held.rank[source_rows],
            held.offset[source_rows],
            np.full(len(source_rows), TARGET, np.int64),
            needed.rank,
            needed.offset,
            pieces.starts[needed.piece],
            pieces.lengths[needed.piece],
        )
    )
    return SegmentPlan((canonical(table),), np.zeros(world_size, np.int64))


def _stateless(pieces: Pieces, planner: str) -> Numbers:
    needed, held = pieces.needed, pieces.held
    own = held.find(needed.piece, needed.rank)
    chosen = needed.rank % held.counts[needed.piece] if planner == "round_robin" else 0
    return np.where(own >= 0, own, held.first[needed.piece] + chosen)


def _forced(pieces: Pieces) -> Numbers | None:
    """The only choice that Algorithm 1 has for every need; None when it has several for some."""
    needed, held = pieces.needed, pieces.held
    own = held.find(needed.piece, needed.rank)
    if ((held.counts[needed.piece] > 1) & (own < 0)).any():
        return None
    return np.where(own >= 0, own, held.first[needed.piece])


def _algorithm1(pieces: Pieces, size: int, loads: SendLoads, cluster: Cluster) -> Numbers:
    needed, held = pieces.needed, pieces.held
    rows, first = [], held.first.tolist()
    holders = [held.of(piece) for piece in range(len(pieces.starts))]
    num_bytes = (pieces.lengths * size).tolist()
    for piece, dst in zip(needed.piece.tolist(), needed.rank.tolist(), strict=True):
        src = choose_source(holders[piece], dst, loads, cluster)
        loads.add(src, dst, num_bytes[piece], cluster)
        rows.append(first[piece] + holders[piece].index(src))
    return np.array(rows, np.int64)
