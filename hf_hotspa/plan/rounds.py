"""Rounds: one rank's part of a plan, cut so that every round fits in bounded staging buffers.

Segments move in *groups*, in the order in which a computation needs them (a load) or has them ready (a gradient
return); neighbours are fused until a group is worth a message. In one round a rank exchanges at most one *window* of
bytes each way with each of at most `PEERS_PER_ROUND` peers, in one message per wire dtype. Every rank has the same
rounds in the same order (some empty): both ends of every message agree without communication.

* A load sends long stretches that need no conversion as separate messages, from buffer to buffer. Others join the
  stream of their route (source, destination), which is cut every `window` bytes.
* A gradient return cuts the destination rank's buffers (its segments end to end) every `window` bytes: all
  contributions to an element meet in one window, and are summed in one order, whatever the window.
* The first hop of the next group comes between a group's hops, which keeps both kinds of links busy.

Plain data, a pure function of the plan; no torch. Offsets into buffers are in elements, into staging in bytes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_hotspa.errors import HotspaConfigError, PlanError
from hf_hotspa.layout.placement import Numbers
from hf_hotspa.plan.switch_plan import (
    DST,
    DST_OFFSET,
    DST_STORE,
    LENGTH,
    RELAY_SLOTS,
    SRC,
    SRC_OFFSET,
    SRC_STORE,
    WINDOW_ALIGNMENT,
    Local,
    Message,
    Round,
    Schedule,
    Slice,
    SwitchPlan,
    Wire,
)

PEERS_PER_ROUND = 32
"""The most peers that a rank sends to, or receives from, in one round: keeps batches of operations small."""

MOST_OPERATIONS = 64  # the most operations of a rank in one round, if a route has several messages
DIRECT_BYTES = 1 << 17  # the least bytes of a separate message: packing then costs more than one more operation
DIRECT_LIMIT = 1 << 24  # the most bytes of one such message


def cut_rounds(
    plan: SwitchPlan,
    rank: int,
    wires: Sequence[Wire | None],  # how each segment travels; None only for segments that the plan does not move
    # the most bytes that a rank packs, or unpacks, in one round. The window is this divided by the most peers of any rank
    round_bytes: int,
    # segments are fused until the busiest rank sends or receives more in a group; None: one group
    group_bytes: int | None = None,
    native: Collection[int] = (),  # the source stores of a load with the wire's dtype on every rank, as in the target
) -> Schedule:
    """Cuts one rank's part of a plan into rounds. Raises `PlanError`: no wire dtype is given for a segment that the plan
    moves. Raises `HotspaConfigError`: a round is too small for its peers."""
    return _Cutter(plan, rank, wires, round_bytes, native).cut(group_bytes)


class _Cutter:
    def __init__(
        self, plan: SwitchPlan, rank: int, wires: Sequence[Wire | None], round_bytes: int, native: Collection[int]
    ) -> None:
        self._plan, self._rank, self._round_bytes = plan, rank, round_bytes
        self._native = () if plan.accumulate else tuple(sorted(native))
        self._wires: dict[int, Wire] = {}
        for segment, kind in enumerate(plan.kind_of):
            if kind >= 0:
                wire = wires[segment] if segment < len(wires) else None
                if wire is None:
                    raise PlanError(f"plan {plan.name!r} moves segment {segment}, and no wire dtype is given for it")
                self._wires[segment] = wire
        self._channels = {wire: channel for channel, wire in enumerate(sorted(set(self._wires.values())))}
        # at most two joined messages per peer and wire dtype in a round: one out, one in
        self._peers = max(1, PEERS_PER_ROUND // max(1, len(set(self._wires.values()))))
        self._present = [[self._blocks_in(table) for table in kind.hops] for kind in plan.kinds]
        self._own = [[table[(table[:, SRC] == rank) | (table[:, DST] == rank)] for table in k.hops] for k in plan.kinds]
        self._counted: dict[tuple[object, ...], _Windows] = {}

    def _blocks_in(self, table: Numbers) -> set[int]:
        """The blocks of rank distances over which anything moves; a hop inside nodes has few."""
        distance = (table[:, DST] - table[:, SRC]) % self._plan.world_size
        return set(np.unique(np.maximum(distance - 1, 0) // self._peers).tolist())

    def cut(self, group_bytes: int | None) -> Schedule:
        groups = self._groups(group_bytes)
        num_hops = len(self._plan.links)
        turns = sorted((group + hop, hop, group) for group in range(len(groups)) for hop in range(num_hops))
        rounds: list[Round] = []
        last: dict[tuple[int, int], int] = {}  # the last round of (group, hop)
        windows = {(g, h): self._windows(groups[g], h) for g in range(len(groups)) for h in range(num_hops)}
        hops_of = {g: [h for h in range(num_hops) if windows[g, h].number] for g in range(len(groups))}
        for _, hop, group in turns:
            if not windows[group, hop].number:
                continue
            # what this hop forwards must have arrived; relay buffers of an earlier group are reused
            before = [last[group, h] for h in hops_of[group] if h < hop]
            before += [last[group - RELAY_SLOTS, h] for h in hops_of.get(group - RELAY_SLOTS, []) if num_hops > 1]
            blocks = set().union(*(self._present[self._plan.kind_of[s]][hop] for s in groups[group]))
            drafts = self._drafts(groups[group], hop, windows[group, hop], sorted(blocks))
            for index, draft in enumerate(drafts):
                opens = hop == hops_of[group][0] and index == 0
                closes = hop == hops_of[group][-1] and index == len(drafts) - 1
                rounds.append(self._round(draft, group, hop, max(before, default=-1), opens, closes))
            last[group, hop] = len(rounds) - 1
        return Schedule(tuple(rounds), tuple(groups), self._extents())

    def _groups(self, group_bytes: int | None) -> list[tuple[int, ...]]:
        busiest = [self._busiest(kind) for kind in range(len(self._plan.kinds))]
        groups: list[list[int]] = []
        filled = 0
        for segment in sorted(self._wires, reverse=self._plan.accumulate):
            size = busiest[self._plan.kind_of[segment]] * self._wires[segment].itemsize
            if not groups or (group_bytes is not None and filled + size > group_bytes):
                groups.append([])
                filled = 0
            groups[-1].append(segment)
            filled += size
        return [tuple(group) for group in groups]

    def _busiest(self, kind: int) -> int:
        moves = (table[table[:, SRC] != table[:, DST]] for table in self._plan.kinds[kind].hops)
        ends = ((table[:, end], table[:, LENGTH]) for table in moves if len(table) for end in (SRC, DST))
        return max((int(np.bincount(rank, weights=length).max()) for rank, length in ends), default=0)

    def _windows(self, group: tuple[int, ...], hop: int) -> "_Windows":
        """The windows of a group and hop: as many as the fullest route (load) or destination (return) has."""
        key = (hop, *((self._plan.kind_of[s], self._wires[s]) for s in group))
        if key not in self._counted:
            self._counted[key] = self._count_windows(group, hop)
        return self._counted[key]

    def _count_windows(self, group: tuple[int, ...], hop: int) -> "_Windows":
        tables = [self._plan.kinds[self._plan.kind_of[segment]].hops[hop] for segment in group]
        if not any(len(table) for table in tables):
            return _Windows(0, 0, 0)
        peers = self._most_peers(tables)
        window = self._round_bytes // max(1, peers) // WINDOW_ALIGNMENT * WINDOW_ALIGNMENT
        if window == 0:
            raise HotspaConfigError(
                f"switch {self._plan.name!r}: a round of {self._round_bytes} bytes is too small for {peers} peers",
                fix=f"use staging buffers of at least {2 * peers * WINDOW_ALIGNMENT} bytes; a few MiB are fast",
            )
        if self._plan.accumulate:
            ends = self._bases(group, hop)[1]
            return _Windows(max(1, -(-int(ends.max()) // window)), window, 0)
        joined: list[tuple[Numbers, Numbers]] = []  # routes, and their sizes
        direct: list[tuple[Numbers, Numbers]] = []
        for segment, table in zip(group, tables, strict=True):
            itemsize = self._wires[segment].itemsize
            moves = table[table[:, SRC] != table[:, DST]]
            long = np.isin(moves[:, SRC_STORE], self._native) & (moves[:, LENGTH] * itemsize >= DIRECT_BYTES)
            routes = moves[:, SRC] * self._plan.world_size + moves[:, DST]
            if not long.all():
                route, inverse = np.unique(routes[~long], return_inverse=True)
                length = np.bincount(inverse, weights=moves[~long, LENGTH]).astype(np.int64)
                joined.append((route, _align(length * itemsize)))
            if long.any():
                direct.append((routes[long], -(-moves[long, LENGTH] * itemsize // DIRECT_LIMIT)))
        # direct messages of a route in a round, limited by the operations of a rank
        per_round = max(1, MOST_OPERATIONS // (2 * max(1, peers)) - len(self._channels))
        count = max(-(-_fullest(joined) // window), -(-_fullest(direct) // per_round), 1)
        return _Windows(count, window, per_round)

    def _most_peers(self, tables: Sequence[Numbers]) -> int:
        """The most peers of any rank in one direction and round. The same on every rank."""
        world_size = self._plan.world_size
        ends = np.unique(np.concatenate([table[:, [SRC, DST]] for table in tables]), axis=0)
        ends = ends[ends[:, 0] != ends[:, 1]]
        block = ((ends[:, 1] - ends[:, 0]) % world_size - 1) // self._peers
        most = [np.unique(ends[:, side] + block * world_size, return_counts=True)[1] for side in (0, 1)]
        return max((int(counts.max()) for counts in most if len(counts)), default=0)

    def _bases(self, group: tuple[int, ...], hop: int) -> tuple[dict[tuple[int, int], Numbers], Numbers]:
        """Of a return: where each (store, segment) begins when a destination's buffers lie end to end, in bytes, and
        where the last one ends, for every destination rank."""
        bases: dict[tuple[int, int], Numbers] = {}
        end = np.zeros(self._plan.world_size, np.int64)
        for segment in group:
            table = self._plan.kinds[self._plan.kind_of[segment]].hops[hop]
            for store in np.unique(table[:, DST_STORE]).tolist():
                rows = table[table[:, DST_STORE] == store]
                extent = np.zeros(self._plan.world_size, np.int64)
                np.maximum.at(extent, rows[:, DST], rows[:, DST_OFFSET] + rows[:, LENGTH])
                bases[store, segment] = end
                end = end + _align(extent * self._wires[segment].itemsize)
        return bases, end

    def _drafts(self, group: tuple[int, ...], hop: int, windows: "_Windows", blocks: Sequence[int]) -> list["_Draft"]:
        """The rounds of a group and hop: by window, then by block of distances."""
        drafts = [_Draft({}, {}, [], {}) for _ in range(windows.number * len(blocks))]
        position_of = {block: index for index, block in enumerate(blocks)}
        bases = self._bases(group, hop)[0] if self._plan.accumulate else {}
        filled: dict[tuple[int, int], int] = {}
        sent: dict[tuple[int, int], int] = {}  # messages from buffer to buffer, by route
        window = windows.num_bytes
        for segment in group:
            wire = self._wires[segment]
            filled = {route: -(-end // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT for route, end in filled.items()}
            rows = self._own[self._plan.kind_of[segment]][hop]
            for src_store, src, src_offset, dst_store, dst, dst_offset, _, length in rows.tolist():
                source = Slice(src_store, segment, src_offset, length)
                target = Slice(dst_store, segment, dst_offset, length)
                size = length * wire.itemsize
                if self._plan.accumulate:
                    position = int(bases[dst_store, segment][dst]) + dst_offset * wire.itemsize
                elif src == dst:
                    drafts[0].local.append(Local(source, target))  # needs no window
                    continue
                block = ((dst - src) % self._plan.world_size - 1) // self._peers if src != dst else 0
                if not self._plan.accumulate and src_store in self._native and size >= DIRECT_BYTES:
                    step = DIRECT_LIMIT // wire.itemsize
                    for first in range(0, length, step):
                        index = sent.get((src, dst), 0)
                        sent[src, dst] = index + 1
                        draft = drafts[index // windows.direct * len(blocks) + position_of[block]]
                        last = min(first + step, length)
                        parts = _part(source, first, last), _part(target, first, last)
                        draft.add_direct(self._rank, src, dst, wire, *parts, index % windows.direct)
                    continue
                if not self._plan.accumulate:
                    position = filled.get((src, dst), 0)
                    filled[src, dst] = position + size
                for index in range(position // window, -(-(position + size) // window)):
                    first = (max(position, index * window) - position) // wire.itemsize
                    last = (min(position + size, (index + 1) * window) - position) // wire.itemsize
                    draft = drafts[index * len(blocks) + position_of[block]]
                    draft.add(self._rank, src, dst, wire, _part(source, first, last), _part(target, first, last))
        return drafts

    def _round(self, draft: "_Draft", group: int, hop: int, needs: int, opens: bool, closes: bool) -> Round:
        world_size, rank = self._plan.world_size, self._rank
        channels = self._channels
        sends, send_bytes = _messages(draft.sends, channels)
        receives, receive_bytes = _messages(draft.receives, channels, shared=False)
        for (peer, channel, is_send), (wire, piece) in draft.direct.items():
            message = Message(peer, wire, (piece,), piece.length, -1, len(channels) + channel)
            (sends if is_send else receives).append(message)
        sends.sort(key=lambda message: ((message.peer - rank) % world_size, message.channel))
        receives.sort(key=lambda message: ((rank - message.peer) % world_size, message.channel))
        moves = tuple(sends), tuple(receives), tuple(draft.local)
        return Round(group, hop, *moves, send_bytes, receive_bytes, needs, opens, closes)

    def _extents(self) -> dict[tuple[int, int], int]:
        """The least size of this rank's buffers; a relay buffer covers its segment."""
        extents: dict[tuple[int, int], int] = {}
        for kind, hops in enumerate(self._own):
            highest: dict[int, int] = {}
            for table in hops:
                for end, at, store in ((SRC, SRC_OFFSET, SRC_STORE), (DST, DST_OFFSET, DST_STORE)):
                    rows = table[table[:, end] == self._rank]
                    for which in np.unique(rows[:, store]).tolist():
                        chosen = rows[rows[:, store] == which]
                        highest[which] = max(highest.get(which, 0), int((chosen[:, at] + chosen[:, LENGTH]).max()))
            for segment, its_kind in enumerate(self._plan.kind_of):
                if its_kind == kind:
                    extents.update({(store, segment): extent for store, extent in highest.items()})
        return extents


class _Windows(NamedTuple):
    """How a group and hop is cut: number and bytes of windows, and a route's direct messages per round."""

    number: int
    num_bytes: int
    direct: int


def _fullest(routes_and_sizes: Sequence[tuple[Numbers, Numbers]]) -> int:
    if not routes_and_sizes:
        return 0
    routes, sizes = map(np.concatenate, zip(*routes_and_sizes, strict=True))
    return int(np.bincount(np.unique(routes, return_inverse=True)[1], weights=sizes).max())


def _align(sizes: Numbers) -> Numbers:
    return -(-sizes // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT


def _part(piece: Slice, first: int, last: int) -> Slice:
    return Slice(piece.store, piece.segment, piece.offset + first, last - first)


@dataclass(frozen=True)
class _Draft:
    """A round being built: message slices by peer and wire."""

    sends: dict[tuple[int, Wire], list[Slice]]
    receives: dict[tuple[int, Wire], list[Slice]]
    local: list[Local]
    direct: dict[tuple[int, int, bool], tuple[Wire, Slice]]

    def add_direct(self, rank: int, src: int, dst: int, wire: Wire, source: Slice, target: Slice, channel: int) -> None:
        """Adds a buffer-to-buffer message; `channel` numbers its route's in this round."""
        if src == rank:
            self.direct[dst, channel, True] = (wire, source)
        else:
            self.direct[src, channel, False] = (wire, target)

    def add(self, rank: int, src: int, dst: int, wire: Wire, source: Slice, target: Slice) -> None:
        if src == dst:
            self.local.append(Local(source, target))
        elif src == rank:
            _append(self.sends.setdefault((dst, wire), []), source)
        else:
            _append(self.receives.setdefault((src, wire), []), target)


def _append(slices: list[Slice], new: Slice) -> None:
    """Appends a slice, joined with the last one if it continues it: only this side must be contiguous."""
    last = slices[-1] if slices else None
    if last and (last.store, last.segment, last.offset + last.length) == (new.store, new.segment, new.offset):
        slices[-1] = last._replace(length=last.length + new.length)
    else:
        slices.append(new)


def _messages(
    drafts: dict[tuple[int, Wire], list[Slice]], channels: Mapping[Wire, int], shared: bool = True
) -> tuple[list[Message], int]:
    """Joins one direction's messages, wide elements first for alignment; also returns their staging bytes."""
    places: dict[tuple[object, ...], int] = {}
    messages, end = [], 0
    for (peer, wire), slices in sorted(drafts.items(), key=lambda item: -item[0][1].itemsize):
        length = sum(piece.length for piece in slices)
        key = (wire, *slices, None if shared else peer)
        if key not in places:
            places[key] = end
            end += length * wire.itemsize
        messages.append(Message(peer, wire, tuple(slices), length, places[key], channels[wire]))
    return messages, end
