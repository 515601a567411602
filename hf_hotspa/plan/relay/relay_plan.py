"""Relay plans: what a node lacks crosses its NICs once and is forwarded inside the node.

HotSPa's Algorithm 1 sends a piece to every needer from wherever it is: if k devices of a node need the same bytes, the
node's NICs carry them k times. Here each byte enters a node once, spread over its devices' NICs, and is forwarded over
the fast links inside the node. There are two hops, sometimes three:

* *feed*, inside nodes: if the owners' NICs would be the bottleneck, they send a share to neighbours with idle NICs,
  into relay buffers;
* *cross*, between nodes: to the device where a share lands, in a needer's target buffer or in a relay buffer;
* *forward*, inside nodes: from there to the other needers, and everything that the node already had.

`routing` decides shares for sets of ranks; this file applies them to the pieces of each kind of segment. A gradient
return is the adjoint: contributions are summed inside the node before the sum crosses. A set of several needers then
always lands in a relay buffer: sums have one fixed order, and gradients are not overwritten.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.intervals import Numbers
from hf_hotspa.plan.direct import Pieces
from hf_hotspa.plan.ports import PortLoads
from hf_hotspa.plan.relay.balancing import Shares
from hf_hotspa.plan.relay.routing import Demand, Pull, landing_shares, pulling_shares, sender_shares
from hf_hotspa.plan.switch_plan import RELAY, TARGET, SegmentPlan, canonical

SHARE_ALIGNMENT = 64
"""Shares of a stream of pieces begin on multiples of this many elements."""

_Landings = dict[tuple[int, tuple[int, ...]], int]
"""The number of each `(node, its needers)`, by first appearance."""


def split_streams(
    lengths: Numbers, streams: Numbers, shares: Sequence[Shares]
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Divides streams of pieces between ranks: each stream is laid end to end and cut in consecutive shares.

    Args:
        lengths: Elements of each row.
        streams: The stream of each row, ascending.
        shares: Of each stream.

    Returns:
        `(row, offset in the row, length, rank)` of each part, by row and offset.
    """
    ends = np.cumsum(lengths)
    begins = ends - lengths
    present, first_row = np.unique(streams, return_index=True)
    bases = begins[first_row].tolist()
    totals = np.add.reduceat(lengths, first_row).tolist() if len(lengths) else []
    cuts, ranks = [], []
    for stream, base, total in zip(present.tolist(), bases, totals, strict=True):
        done = 0.0
        for rank, fraction in shares[stream]:
            if fraction > 0:
                cuts.append(base + round(done * total / SHARE_ALIGNMENT) * SHARE_ALIGNMENT if done else base)
                ranks.append(rank)
                done += fraction
    cut_at = np.array(cuts, np.int64)
    # rounding may move a cut of a short stream into the next
    limit = np.array([base + total for base, total in zip(bases, totals, strict=True)], np.int64)
    counts = [sum(fraction > 0 for _, fraction in shares[stream]) for stream in present.tolist()]
    cut_at = np.minimum(cut_at, np.repeat(limit, counts))
    points = np.union1d(begins, cut_at[cut_at < (ends[-1] if len(ends) else 0)])
    row = np.searchsorted(begins, points, side="right") - 1
    length = np.diff(np.append(points, ends[-1] if len(ends) else 0))
    rank = np.array(ranks, np.int64)[_last_of_stream(cut_at, points, limit, counts)]
    return row, points - begins[row], length, rank


def _last_of_stream(cut_at: Numbers, points: Numbers, limits: Numbers, counts: Sequence[int]) -> Numbers:
    """The share of each point: the last one that begins at or before it, in its own stream."""
    stream_of_cut = np.repeat(np.arange(len(limits)), counts)
    stream_of_point = np.searchsorted(limits, points, side="right")
    # a cut at the end of a stream is an empty share: after all points of its stream, before the next
    keys = cut_at * (len(limits) + 1) + stream_of_cut
    return np.searchsorted(keys, points * (len(limits) + 1) + stream_of_point, side="right") - 1


class _Arrivals:
    """The (piece, node) pairs of one kind where the node needs a piece that none of its devices holds."""

    def __init__(self, pieces: Pieces, cluster: Cluster, landings: _Landings) -> None:
        size = cluster.devices_per_node
        self.pieces = pieces
        self.has_owner = np.zeros((len(pieces.starts), cluster.num_nodes), bool)
        self.has_owner[pieces.holders.piece, pieces.holders.rank // size] = True
        group_of, sets = pieces.needed.groups
        order = np.argsort(group_of, kind="stable")
        bounds = np.searchsorted(group_of[order], np.arange(len(sets) + 1))
        blocks = [np.empty((0, 3), np.int64)]
        for group, ranks in enumerate(sets):
            by_node: dict[int, list[int]] = {}
            for rank in ranks:
                by_node.setdefault(rank // size, []).append(rank)
            members = order[bounds[group] : bounds[group + 1]]
            nodes = list(by_node)
            landing = [landings.setdefault((node, tuple(by_node[node])), len(landings)) for node in nodes]
            blocks.append(
                np.column_stack(
                    (np.repeat(members, len(nodes)), np.tile(nodes, len(members)), np.tile(landing, len(members)))
                )
            )
        rows = np.concatenate(blocks)
        rows = rows[~self.has_owner[rows[:, 0], rows[:, 1]]]
        rows = rows[np.lexsort((rows[:, 0], rows[:, 2]))]
        self.piece, self.node, self.landing = rows[:, 0], rows[:, 1], rows[:, 2]
        self._size = size

    def count_pulls(self, pulls: dict[tuple[tuple[int, ...], int], float], weight: int) -> None:
        """Adds the bytes that needers get from owners in their node, by these owners."""
        holders, needed = self.pieces.holders, self.pieces.needed
        near = self.has_owner[needed.piece, needed.rank // self._size] & (holders.find(needed.piece, needed.rank) < 0)
        group_of, sets = holders.groups
        world_size = holders.world_size
        keys = group_of[needed.piece[near]] * world_size + needed.rank[near]
        present, inverse = np.unique(keys, return_inverse=True)
        num_bytes = np.zeros(len(present), np.int64)
        np.add.at(num_bytes, inverse, self.pieces.lengths[needed.piece[near]] * weight)
        for key, total in zip(present.tolist(), num_bytes.tolist(), strict=True):
            needer = key % world_size
            owners = tuple(rank for rank in sets[key // world_size] if rank // self._size == needer // self._size)
            pulls[owners, needer] = pulls.get((owners, needer), 0.0) + total


class _Decided(NamedTuple):
    """The decisions for sets of ranks, over all kinds: each landing key's needers and landing shares; who sends, by
    owners (empty: each rank sends what it alone holds, uncut); who serves its own node, by owners there."""

    needers: list[tuple[int, ...]]
    landing: list[Shares]
    sending: dict[tuple[int, ...], Shares]
    pulling: dict[tuple[int, ...], Shares]


def plan_relay(
    kinds: Sequence[Pieces], kind_of: Sequence[int], element_sizes: Sequence[int], cluster: Cluster, sums: bool = False
) -> list[SegmentPlan]:
    """Plans all kinds of segments (-1: none), balanced by bytes of an element on the wire, with two hops (cross,
    forward) or three (feed, cross, forward); with `sums` for the adjoint, a gradient return."""
    weights = [0] * len(kinds)
    for kind, size in zip(kind_of, element_sizes, strict=True):
        if kind >= 0:
            weights[kind] += size
    landings: _Landings = {}
    arrivals = [_Arrivals(pieces, cluster, landings) for pieces in kinds]
    shares = _decide(arrivals, weights, landings, cluster)
    plans = [_Materialised(c, shares, cluster, sums) for c in arrivals]
    if any(len(plan.feed) for plan in plans):
        return [SegmentPlan((plan.feed, plan.cross, plan.forward), plan.relay_sizes) for plan in plans]
    return [SegmentPlan((plan.cross, plan.forward), plan.relay_sizes) for plan in plans]


def _decide(arrivals: Sequence[_Arrivals], weights: Sequence[int], landings: _Landings, cluster: Cluster) -> _Decided:
    num_bytes = np.zeros(len(landings), np.int64)
    pulls: dict[tuple[tuple[int, ...], int], float] = {}
    for arrival, weight in zip(arrivals, weights, strict=True):
        np.add.at(num_bytes, arrival.landing, arrival.pieces.lengths[arrival.piece] * weight)
        arrival.count_pulls(pulls, weight)
    pulled = [Pull(owners, needer, total) for (owners, needer), total in pulls.items()]
    demands = [Demand((), *key, float(total)) for key, total in zip(landings, num_bytes.tolist(), strict=True) if total]
    landers = landing_shares(demands, cluster, pulled)
    moves = [
        (lander, rank, demand.num_bytes * fraction)
        for demand in demands
        for lander, fraction in landers[demand.node, demand.needers]
        for rank in demand.needers
        if rank != lander
    ]
    inside = PortLoads.zero(cluster)
    _add(inside, moves)
    pulling = pulling_shares(pulled, dict(enumerate(inside.sent_intra.tolist())))
    pulls_from = [(server, to, total * part) for near, to, total in pulled for server, part in pulling[near]]
    _add(inside, pulls_from)
    sending = _sending_shares(arrivals, weights, cluster, inside)
    landing = [landers.get(key, ()) for key in landings]
    return _Decided([needers for _, needers in landings], landing, sending, pulling)


def _add(loads: PortLoads, moves: Sequence[tuple[int, int, float]]) -> None:
    if moves:
        loads.add(*(np.array(column) for column in zip(*moves, strict=True)))


def _sending_shares(
    arrivals: Sequence[_Arrivals], weights: Sequence[int], cluster: Cluster, inside: PortLoads
) -> dict[tuple[int, ...], Shares]:
    amounts: dict[tuple[int, ...], float] = {}
    entering = np.zeros(cluster.num_nodes)
    for arrival, weight in zip(arrivals, weights, strict=True):
        group_of, sets = arrival.pieces.holders.groups
        num_bytes = arrival.pieces.lengths[arrival.piece] * weight
        np.add.at(entering, arrival.node, num_bytes)
        totals = np.zeros(len(sets), np.int64)
        np.add.at(totals, group_of[arrival.piece], num_bytes)
        for group in np.flatnonzero(totals).tolist():
            amounts[sets[group]] = amounts.get(sets[group], 0.0) + float(totals[group])
    sending = sender_shares(amounts, entering.tolist(), cluster, inside)
    # a master store where no owner's NIC exceeds the unavoidable load
    sole = all(share == ((owners[0], 1.0),) and len(owners) == 1 for owners, share in sending.items())
    return {} if sole else sending


class _Materialised:
    """The tables of one kind of segment."""

    def __init__(self, arrival: _Arrivals, shares: _Decided, cluster: Cluster, sums: bool) -> None:
        self._arrivals, self._shares, self._cluster = arrival, shares, cluster
        pieces = arrival.pieces
        holders, needed, starts = pieces.holders, pieces.needed, pieces.starts
        row, offset, length, land = split_streams(pieces.lengths[arrival.piece], arrival.landing, shares.landing)
        row, offset, length, land, sender = self._assign_senders(row, offset, length, land)
        piece, landing_of = arrival.piece[row], arrival.landing[row]
        source, wanted = holders.find(piece, sender), needed.find(piece, land)
        set_sizes = np.array([len(ranks) for ranks in shares.needers], np.int64)
        in_target = (wanted >= 0) & ((set_sizes[landing_of] == 1) | (not sums))
        # relay buffers: landed parts first, then fed parts
        nothing = np.zeros(cluster.world_size, np.int64)
        relay_offset, landed = _relay_offsets(land, np.where(in_target, 0, length), nothing)
        fed = source < 0
        fed_offset, self.relay_sizes, feed = self._fed(piece[fed], offset[fed], length[fed], sender[fed], landed)
        sent_offset = holders.offset[source] + offset
        sent_offset[fed] = fed_offset
        store = np.where(in_target, TARGET, RELAY)
        landed_at = np.where(in_target, needed.offset[wanted] + offset, relay_offset)
        start = starts[piece] + offset
        sent_from = np.where(fed, RELAY, holders.store[source])
        self.cross = canonical(_table(sent_from, sender, sent_offset, store, land, landed_at, start, length))
        self.feed = canonical(feed)
        # forwarding: each landed part to the node's needers on which it did not land
        counts = set_sizes[landing_of]
        part = np.repeat(np.arange(len(row)), counts)
        flat = np.array([rank for ranks in shares.needers for rank in ranks], np.int64)
        begins = (np.cumsum(set_sizes) - set_sizes)[landing_of]
        to = flat[np.repeat(begins, counts) + np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts)]
        keep = ~(in_target[part] & (to == land[part]))
        part, to = part[keep], to[keep]
        into = needed.offset[needed.find(piece[part], to)] + offset[part]
        forward = _table(
            store[part], land[part], landed_at[part], np.full(len(part), TARGET), to, into, start[part], length[part]
        )
        self.forward = canonical(np.concatenate((forward, self._inside())))

    def _assign_senders(
        self, row: Numbers, offset: Numbers, length: Numbers, land: Numbers
    ) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        """Assigns a sender to each part; cuts parts further if several ranks send.

        What goes to each node from the same owners lies along one line, and the senders take consecutive stretches: to
        different nodes if possible, which keeps messages few.
        """
        holders, sending = self._arrivals.pieces.holders, self._shares.sending
        piece, node = self._arrivals.piece[row], self._arrivals.node[row]
        if not sending:
            return row, offset, length, land, holders.rank[holders.first[piece]]
        group_of, sets = holders.groups
        stream = group_of[piece]
        order = np.lexsort((node, stream))
        shares = [sending.get(owners, ()) for owners in sets]
        sub, sub_offset, sub_length, rank = split_streams(length[order], stream[order], shares)
        parts = order[sub]
        return row[parts], offset[parts] + sub_offset, sub_length, land[parts], rank

    def _fed(
        self, piece: Numbers, offset: Numbers, length: Numbers, sender: Numbers, filled: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Plans what senders without a piece receive beforehand, once, in equal shares from the owners in their node.
        Returns each part's place in its sender's relay buffer, the buffer sizes, and the table."""
        holders, size = self._arrivals.pieces.holders, self._cluster.devices_per_node
        span = int(self._arrivals.pieces.lengths.max(initial=0)) + 1
        at = (sender * len(self._arrivals.pieces.lengths) + piece) * span + offset
        order = np.argsort(at, kind="stable")
        reach = np.maximum.accumulate((at + length)[order]) if len(at) else at
        new = np.concatenate(([True], at[order][1:] > reach[:-1])) if len(at) else np.empty(0, bool)
        first = np.flatnonzero(new)
        stretch = np.empty(len(at), np.int64)
        stretch[order] = np.cumsum(new) - 1
        begin, who, which = at[order][first], sender[order][first], piece[order][first]
        extent = np.maximum.reduceat(reach, first) - begin if len(at) else at
        places, sizes = _relay_offsets(who, extent, filled)
        low, high = holders.between(which, who // size * size, (who // size + 1) * size)
        sub, sub_offset, sub_length, rank = self._share_out(low, high, who, extent, None)
        row = holders.find(which[sub], rank)
        shift = begin[sub] % span + sub_offset
        start = self._arrivals.pieces.starts[which[sub]] + shift
        relay = np.full(len(row), RELAY)
        into = places[sub] + sub_offset
        table = _table(holders.store[row], rank, holders.offset[row] + shift, relay, who[sub], into, start, sub_length)
        return places[stretch] + at - begin[stretch], sizes, table

    def _inside(self) -> Numbers:
        pieces, size = self._arrivals.pieces, self._cluster.devices_per_node
        holders, needed = pieces.holders, pieces.needed
        near = self._arrivals.has_owner[needed.piece, needed.rank // size]
        piece, rank, offset = needed.piece[near], needed.rank[near], needed.offset[near]
        own = holders.find(piece, rank)
        low, high = holders.between(piece, rank // size * size, (rank // size + 1) * size)
        simple = (own >= 0) | (high - low == 1)
        several = np.flatnonzero(~simple)
        sub, part_offset, part_length, part_rank = self._share_out(
            low[several], high[several], rank[several], pieces.lengths[piece[several]], self._shares.pulling
        )
        chosen = np.concatenate((np.flatnonzero(simple), several[sub]))
        shift = np.concatenate((np.zeros(int(simple.sum()), np.int64), part_offset))
        length = np.concatenate((pieces.lengths[piece[simple]], part_length))
        row = np.concatenate((np.where(own >= 0, own, low)[simple], holders.find(piece[several[sub]], part_rank)))
        target = np.full(len(row), TARGET)
        start = pieces.starts[piece[chosen]] + shift
        return _table(
            holders.store[row],
            holders.rank[row],
            holders.offset[row] + shift,
            target,
            rank[chosen],
            offset[chosen] + shift,
            start,
            length,
        )

    def _share_out(
        self, low: Numbers, high: Numbers, to: Numbers, length: Numbers, shares_of: dict[tuple[int, ...], Shares] | None
    ) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Divides each row between the holders in rows `low` to `high`; equally without `shares_of`. Each receiver
        begins with another holder, which keeps all holders busy."""
        ranks_of_rows = self._arrivals.pieces.holders.rank.tolist()
        rows = zip(low.tolist(), high.tolist(), to.tolist(), strict=True)
        keys = [(tuple(ranks_of_rows[a:b]), rank) for a, b, rank in rows]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        stream = np.array([numbers[key] for key in keys], np.int64)
        order = np.argsort(stream, kind="stable")
        shares = []
        for ranks, rank in numbers:
            share = shares_of[ranks] if shares_of is not None else tuple((r, 1 / len(ranks)) for r in ranks)
            first = rank % len(share)
            shares.append(share[first:] + share[:first])
        sub, sub_offset, sub_length, chosen = split_streams(length[order], stream[order], shares)
        return order[sub], sub_offset, sub_length, chosen


def _table(*columns: Numbers) -> Numbers:
    return np.column_stack(columns).astype(np.int64, copy=False)


def _relay_offsets(holder: Numbers, relayed: Numbers, filled: Numbers) -> tuple[Numbers, Numbers]:
    """Returns each part's place in its holder's relay buffer, behind the `filled` elements, and the new `filled`."""
    sizes = np.zeros(len(filled), np.int64)
    np.add.at(sizes, holder, relayed)
    order = np.argsort(holder, kind="stable")
    ends = np.cumsum(relayed[order])
    before = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    offsets = np.empty(len(holder), np.int64)
    offsets[order] = ends - relayed[order] - before[holder[order]] + filled[holder[order]]
    return offsets, filled + sizes
