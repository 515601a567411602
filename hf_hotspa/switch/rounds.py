"""Rounds: one rank's part of a plan, cut so that every round fits in bounded staging buffers.

In one round a rank exchanges at most one *window* of bytes with each peer, in one message per wire dtype. Plain data, a
pure function of the plan, so that both ends of every message agree without talking:

* A load cuts the stream of each route (source, destination) every `window` bytes: all routes are busy in every round.
* A gradient return cuts the destination rank's buffers (its segments laid end to end) every `window` bytes: all
  contributions to an element meet in one round, and are summed there in the order of the source ranks, whatever the
  window.

No torch; offsets into buffers are in elements, offsets into staging in bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hf_hotspa.errors import PlanError
from hf_hotspa.switch.plan import SwitchPlan, Transfer

_Key = TypeVar("_Key")

WINDOW_ALIGNMENT = 16
"""Windows and segments start on multiples of this many bytes, so that no element lies across two windows."""


class Wire(NamedTuple):
    """How the elements of a segment travel: the name of their dtype and its bytes."""

    dtype: str
    itemsize: int


class Slice(NamedTuple):
    """`length` elements at `offset` of a rank's buffer of `segment`."""

    segment: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Message:
    """What goes to or comes from one peer in one round, in one dtype.

    Args:
        peer: The other rank.
        wire: The dtype on the wire.
        slices: Where it lies in this rank's buffers, in the order on the wire.
        length: Elements.
        staging_offset: Where it lies in the staging buffer, in bytes; messages to several peers with the same content
            share a place.
    """

    peer: int
    wire: Wire
    slices: tuple[Slice, ...]
    length: int
    staging_offset: int

    @property
    def num_bytes(self) -> int:
        return self.length * self.wire.itemsize


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank does in one round.

    Args:
        sends: In posting order: to rank + 1, rank + 2, ...; no two ranks start with the same peer.
        receives: In posting order: from rank - 1, rank - 2, ...
        local: Transfers inside the rank. A load has all of them in its first round.
        send_bytes: Staging that the sends need, if none can be sent in place.
        receive_bytes: Staging that the receives need, if none can be received in place.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    local: tuple[Transfer, ...]
    send_bytes: int
    receive_bytes: int


@dataclass(frozen=True)
class Schedule:
    """All rounds of one rank. The number of rounds is the same on every rank; a rank may have nothing in a round.

    Args:
        rounds: In order.
        channels: A small number for each wire, the same on every rank: keeps messages of a pair and round apart.
        source_extents: Elements that the source buffer of each segment must have at least.
        target_extents: The same for the target buffers.
    """

    rounds: tuple[Round, ...]
    channels: dict[Wire, int]
    source_extents: dict[int, int]
    target_extents: dict[int, int]


def cut_rounds(plan: SwitchPlan, rank: int, wires: Sequence[Wire | None], window: int) -> Schedule:
    """Cuts one rank's part of a plan in rounds.

    Args:
        plan: The plan.
        rank: The rank.
        wires: How each segment travels; None only for segments that the plan does not move.
        window: The most bytes that travel between two ranks in one direction in one round; a multiple of
            `WINDOW_ALIGNMENT`.
    """
    drafts: list[_Draft] = []
    for transfer, position, wire in _placed(plan, wires):
        free = not plan.accumulate and transfer.src == transfer.dst  # local copies need no window: all in round 0
        stop = position + (1 if free else transfer.length * wire.itemsize)
        drafts += [_Draft({}, {}, []) for _ in range(-(-stop // window) - len(drafts))]
        if free and transfer.src == rank:
            drafts[0].local.append(transfer)
        elif rank in (transfer.src, transfer.dst) and not free:
            for index in range(position // window, -(-stop // window)):
                first = (max(position, index * window) - position) // wire.itemsize
                last = (min(stop, (index + 1) * window) - position) // wire.itemsize
                drafts[index].add(rank, wire, _part(transfer, first, last))
    rounds = []
    for draft in drafts:
        sends, send_bytes = _messages(draft.sends, lambda peer: (peer - rank) % plan.world_size)
        receives, receive_bytes = _messages(draft.receives, lambda peer: (rank - peer) % plan.world_size, shared=False)
        rounds.append(Round(sends, receives, tuple(draft.local), send_bytes, receive_bytes))
    return Schedule(
        tuple(rounds),
        {wire: channel for channel, wire in enumerate(sorted({wire for wire in wires if wire}))},
        _extents((t.segment, t.src_offset + t.length) for t in plan.transfers if t.src == rank),
        _extents((t.segment, t.dst_offset + t.length) for t in plan.transfers if t.dst == rank),
    )


def _placed(plan: SwitchPlan, wires: Sequence[Wire | None]) -> Iterator[tuple[Transfer, int, Wire]]:
    """Each transfer with its first byte on the axis along which its rounds are cut, and its wire."""
    filled: dict[tuple[int, int], int] = {}
    bases = _segment_bases(plan, wires) if plan.accumulate else {}
    for transfer in plan.transfers:
        wire = _wire(plan, wires, transfer.segment)
        if plan.accumulate:
            yield transfer, bases[transfer.dst, transfer.segment] + transfer.dst_offset * wire.itemsize, wire
        elif transfer.src == transfer.dst:
            yield transfer, 0, wire
        else:
            route = transfer.src, transfer.dst
            position = _align(filled.get(route, 0), wire.itemsize)
            filled[route] = position + transfer.length * wire.itemsize
            yield transfer, position, wire


def _segment_bases(plan: SwitchPlan, wires: Sequence[Wire | None]) -> dict[tuple[int, int], int]:
    """The first byte of each (destination, segment) when a destination's segments are laid end to end."""
    bases: dict[tuple[int, int], int] = {}
    ends: dict[int, int] = {}
    extents = _extents(((t.dst, t.segment), t.dst_offset + t.length) for t in plan.transfers)
    for dst, segment in sorted(extents):
        bases[dst, segment] = ends.get(dst, 0)
        size = extents[dst, segment] * _wire(plan, wires, segment).itemsize
        ends[dst] = _align(bases[dst, segment] + size, WINDOW_ALIGNMENT)
    return bases


def _extents(stops: Iterable[tuple[_Key, int]]) -> dict[_Key, int]:
    extents: dict[_Key, int] = {}
    for key, stop in stops:
        extents[key] = max(stop, extents.get(key, 0))
    return extents


def _align(position: int, size: int) -> int:
    return -(-position // size) * size


def _wire(plan: SwitchPlan, wires: Sequence[Wire | None], segment: int) -> Wire:
    wire = wires[segment] if segment < len(wires) else None
    if wire is None:
        raise PlanError(f"plan {plan.name!r} moves segment {segment}, and no wire dtype is given for it")
    return wire


def _part(transfer: Transfer, first: int, last: int) -> Transfer:
    """Elements `[first, last)` of a transfer."""
    return transfer._replace(
        length=last - first,
        src_offset=transfer.src_offset + first,
        dst_offset=transfer.dst_offset + first,
        start=transfer.start + first,
    )


@dataclass(frozen=True)
class _Draft:
    """A round in the making: the slices of each message by peer and wire."""

    sends: dict[tuple[int, Wire], list[Slice]]
    receives: dict[tuple[int, Wire], list[Slice]]
    local: list[Transfer]

    def add(self, rank: int, wire: Wire, part: Transfer) -> None:
        if part.src == part.dst:
            self.local.append(part)
        elif part.src == rank:
            slices = self.sends.setdefault((part.dst, wire), [])
            _append(slices, Slice(part.segment, part.src_offset, part.length))
        else:
            slices = self.receives.setdefault((part.src, wire), [])
            _append(slices, Slice(part.segment, part.dst_offset, part.length))


def _append(slices: list[Slice], new: Slice) -> None:
    """Adds a slice, joined with the last one where it continues it: each side needs its own contiguity only."""
    last = slices[-1] if slices else None
    if last and (last.segment, last.offset + last.length) == (new.segment, new.offset):
        slices[-1] = Slice(last.segment, last.offset, last.length + new.length)
    else:
        slices.append(new)


def _messages(
    drafts: dict[tuple[int, Wire], list[Slice]], distance: Callable[[int], int], shared: bool = True
) -> tuple[tuple[Message, ...], int]:
    """The messages of one direction in posting order, and the staging bytes they need.

    Wide elements are staged first, so that every message is aligned without gaps.
    """
    places: dict[tuple[object, ...], int] = {}
    messages, end = [], 0
    for (peer, wire), slices in sorted(drafts.items(), key=lambda item: (-item[0][1].itemsize, distance(item[0][0]))):
        length = sum(piece.length for piece in slices)
        key = (wire, *slices, None if shared else peer)
        if key not in places:
            places[key] = end
            end += length * wire.itemsize
        messages.append(Message(peer, wire, tuple(slices), length, places[key]))
    messages.sort(key=lambda message: (distance(message.peer), message.wire))
    return tuple(messages), end
