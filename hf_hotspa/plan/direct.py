"""Direct plans: every needer of a piece gets it from one rank that holds it, in one hop.

Rules for the sender, if the needer does not hold the piece itself:

* `algorithm1`: Algorithm 1 of HotSPa (SOSP'24): of the holders on the needer's node if any, else of all, the one with
  the fewest bytes to send so far (inside the node, or between nodes). Loads persist over all pieces and segments. On
  regular layouts no direct plan is faster (the fractional bound is met).
* `round_robin`: holder number (needer mod holders), blind to nodes, as in Megatron-Core's resharding.
* `first_owner`: the lowest rank that holds it.

Planners start from atomic pieces: a segment cut at every boundary of all layouts, so no rank holds or needs a part of a
piece. No torch; numpy int64 throughout; positions count from the beginning of the segment.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.placement import Numbers, Placement
from hf_hotspa.plan.switch_plan import SECOND, SOURCE, TARGET, SegmentPlan, canonical


@dataclass(frozen=True, eq=False)
class Holders:
    """Who has which piece: rows by piece, then rank."""

    piece: Numbers
    rank: Numbers  # a holder
    offset: Numbers  # the piece's place in its buffer
    store: Numbers  # which of its buffers
    first: Numbers  # the rows of piece p are `first[p]` to `first[p + 1]`
    world_size: int

    @cached_property
    def _key(self) -> Numbers:
        return self.piece * self.world_size + self.rank

    def find(self, piece: Numbers, rank: Numbers) -> Numbers:
        """The row of each (piece, rank); -1 if the rank does not have the piece."""
        if len(self._key) == 0:
            return np.full(len(piece), -1, np.int64)
        wanted = piece * self.world_size + rank
        row = np.minimum(np.searchsorted(self._key, wanted), len(self._key) - 1)
        return np.where(self._key[row] == wanted, row, -1)

    def between(self, piece: Numbers, low: Numbers, high: Numbers) -> tuple[Numbers, Numbers]:
        """The first row, and the row after the last, of each piece's holders in ranks `low` to `high` - 1."""
        ends = piece * self.world_size + (low, np.minimum(high, self.world_size))
        first, last = np.searchsorted(self._key, ends)
        return first, last

    @cached_property
    def counts(self) -> Numbers:
        """How many ranks have each piece."""
        return np.diff(self.first)

    def of(self, piece: int) -> list[int]:
        """The ranks that have a piece, ascending."""
        return self.rank[self.first[piece] : self.first[piece + 1]].tolist()

    @cached_property
    def groups(self) -> tuple[Numbers, list[tuple[int, ...]]]:
        """The index of each piece's set of holders, and the sets."""
        known: dict[tuple[int, ...], int] = {}
        index = [known.setdefault(tuple(self.of(piece)), len(known)) for piece in range(len(self.counts))]
        return np.array(index, np.int64), list(known)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The needed pieces of one kind of segment: their first elements, and their holders in a source layout (of two
    copies on a rank, the second source's)."""

    starts: Numbers
    lengths: Numbers
    holders: Holders
    needed: Holders


def cut_pieces(sources: Sequence[Placement], target: Placement) -> Pieces:
    """Cuts a segment: one or two source placements and a target."""
    cuts = np.unique(np.concatenate([column for side in (*sources, target) for column in (side.starts, side.stops)]))
    stores = (SOURCE, SECOND)
    held_rows = np.concatenate([_rows(side, cuts, store) for side, store in zip(sources, stores, strict=False)])
    needed = _rows(target, cuts, 0)
    wanted = np.zeros(max(len(cuts) - 1, 0), bool)
    wanted[needed[:, 0]] = True
    number = np.cumsum(wanted) - 1
    held_rows = held_rows[wanted[held_rows[:, 0]]]
    count = int(wanted.sum())
    holders = (_holders(rows, number, count, len(target.sizes)) for rows in (held_rows, needed))
    return Pieces(cuts[:-1][wanted], np.diff(cuts)[wanted], *holders)


def _rows(placement: Placement, cuts: Numbers, store: int) -> Numbers:
    """`(piece, rank, offset, store)` of all pieces of all intervals."""
    first = np.searchsorted(cuts, placement.starts)
    count = np.searchsorted(cuts, placement.stops) - first
    interval = np.repeat(np.arange(len(first)), count)
    piece = first[interval] + np.arange(len(interval)) - np.repeat(np.cumsum(count) - count, count)
    offset = placement.offsets[interval] + cuts[piece] - placement.starts[interval]
    return np.column_stack((piece, placement.ranks[interval], offset, np.full(len(piece), store, np.int64)))


def _holders(rows: Numbers, number: Numbers, count: int, world_size: int) -> Holders:
    """Sorts rows by piece and rank; of a rank's two copies, keeps the later store's."""
    rows = rows[np.lexsort((-rows[:, 3], rows[:, 1], rows[:, 0]))]
    if len(rows) > 1:
        double = (rows[1:, :2] == rows[:-1, :2]).all(1)
        rows = rows[np.concatenate(([True], ~double))]
    piece = number[rows[:, 0]] if len(rows) else np.empty(0, np.int64)
    first = np.searchsorted(piece, np.arange(count + 1))
    rank, offset, store = (np.ascontiguousarray(rows[:, i]) for i in (1, 2, 3))
    return Holders(piece, rank, offset, store, first, world_size)


@dataclass
class SendLoads:
    """Each rank's bytes to send so far, inside its node and to other nodes."""

    intra_node: list[int]
    inter_node: list[int]

    @classmethod
    def zero(cls, world_size: int) -> "SendLoads":
        return cls([0] * world_size, [0] * world_size)

    def add(self, src: int, dst: int, size: int, cluster: Cluster) -> None:
        """Counts a transfer; inside a rank it is free."""
        if src != dst:
            (self.intra_node if cluster.node(src) == cluster.node(dst) else self.inter_node)[src] += size


def choose_source(holders: Collection[int], dst: int, loads: SendLoads, cluster: Cluster) -> int:
    """Returns the sender of a piece to `dst`: itself, else the least loaded holder on its node, else of all. Ties go to
    the lowest rank. `loads` is read, not changed."""
    if dst in holders:
        return dst
    node = cluster.node(dst)
    near = [rank for rank in holders if cluster.node(rank) == node]
    load = loads.intra_node if near else loads.inter_node
    return min(near or holders, key=lambda rank: (load[rank], rank))


def plan_direct(
    kinds: Sequence[Pieces], kind_of: Sequence[int], element_sizes: Sequence[int], cluster: Cluster, planner: str
) -> tuple[list[SegmentPlan], list[int]]:
    """Plans all segments by `algorithm1`, `round_robin` or `first_owner`; also returns each segment's plan index.
    `kind_of` is -1 for no kind; `element_sizes` are an element's bytes on the wire."""
    if planner != "algorithm1":
        return [_table(pieces, _stateless(pieces, planner), cluster.world_size) for pieces in kinds], list(kind_of)
    loads = SendLoads.zero(cluster.world_size)
    plans: list[SegmentPlan] = []
    known: dict[tuple[int, bytes], int] = {}
    plan_of = []
    forced = [_forced(pieces) for pieces in kinds]
    free = all(rows is not None for rows in forced)  # no choice: loads decide nothing
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
    """Makes the plan in which row `source_rows[i]` of the holders serves need i."""
    needed, holders = pieces.needed, pieces.holders
    sent = holders.store[source_rows], holders.rank[source_rows], holders.offset[source_rows]
    got = np.full(len(source_rows), TARGET, np.int64), needed.rank, needed.offset
    table = np.column_stack((*sent, *got, pieces.starts[needed.piece], pieces.lengths[needed.piece]))
    return SegmentPlan((canonical(table),), np.zeros(world_size, np.int64))


def _stateless(pieces: Pieces, planner: str) -> Numbers:
    needed, holders = pieces.needed, pieces.holders
    own = holders.find(needed.piece, needed.rank)
    chosen = needed.rank % holders.counts[needed.piece] if planner == "round_robin" else 0
    return np.where(own >= 0, own, holders.first[needed.piece] + chosen)


def _forced(pieces: Pieces) -> Numbers | None:
    """Algorithm 1's only choice for every need; None if some need has several."""
    needed, holders = pieces.needed, pieces.holders
    own = holders.find(needed.piece, needed.rank)
    if ((holders.counts[needed.piece] > 1) & (own < 0)).any():
        return None
    return np.where(own >= 0, own, holders.first[needed.piece])


def _algorithm1(pieces: Pieces, size: int, loads: SendLoads, cluster: Cluster) -> Numbers:
    needed, holders = pieces.needed, pieces.holders
    rows, first = [], holders.first.tolist()
    by_piece = [holders.of(piece) for piece in range(len(pieces.starts))]
    num_bytes = (pieces.lengths * size).tolist()
    for piece, dst in zip(needed.piece.tolist(), needed.rank.tolist(), strict=True):
        src = choose_source(by_piece[piece], dst, loads, cluster)
        loads.add(src, dst, num_bytes[piece], cluster)
        rows.append(first[piece] + by_piece[piece].index(src))
    return np.array(rows, np.int64)
