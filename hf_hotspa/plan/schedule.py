"""Schedules: what one rank does round by round, as frozen plain data. Cut from plans by `rounds`, run by the executor.

No torch; offsets into buffers are in elements, offsets into staging in bytes.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hf_hotspa.plan.table import RELAY

WINDOW_ALIGNMENT = 16
"""Windows and segments start on multiples of this many bytes, so that no element lies across two windows."""

RELAY_SLOTS = 3
"""Groups that may have something in relay buffers at one time: one that lands, one that is forwarded, one between."""


class Wire(NamedTuple):
    """How the elements of a segment travel: the name of their dtype and its bytes."""

    dtype: str
    itemsize: int


class Slice(NamedTuple):
    """`length` elements at `offset` of a rank's buffer of `segment` in `store`."""

    store: int
    segment: int
    offset: int
    length: int


class Local(NamedTuple):
    """What moves inside a rank."""

    source: Slice
    target: Slice


@dataclass(frozen=True, slots=True)
class Message:
    """What goes to or comes from one peer in one round, in one dtype.

    Args:
        wire: The dtype on the wire.
        slices: Where it lies in this rank's buffers, in the order on the wire.
        staging_offset: Where it lies in the staging buffer, in bytes; messages to several peers with the same content
            share a place. -1 for a message that goes from buffer to buffer.
        channel: Keeps the messages of a pair and round apart; the same at both ends.
    """

    peer: int
    wire: Wire
    slices: tuple[Slice, ...]
    length: int
    staging_offset: int
    channel: int = 0

    @property
    def num_bytes(self) -> int:
        return self.length * self.wire.itemsize


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank does in one round.

    Args:
        group: Index of the group of segments that it belongs to.
        sends: In posting order: to rank + 1, rank + 2, ...; no two ranks start with the same peer.
        receives: In posting order: from rank - 1, rank - 2, ...
        local: Transfers inside the rank. A load has all of a group and hop in its first round.
        send_bytes: Staging that the sends need, if none can be sent in place.
        receive_bytes: Staging that the receives need, if none can be received in place.
        needs: The round that must be complete before this one may read or overwrite buffers; -1 for none.
        opens: Nothing of the group was moved before.
        closes: The group is complete after this round.
    """

    group: int
    hop: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    local: tuple[Local, ...]
    send_bytes: int
    receive_bytes: int
    needs: int
    opens: bool
    closes: bool

    @property
    def is_empty(self) -> bool:
        """Whether this rank has nothing to do in it, and nobody to tell."""
        return not (self.sends or self.receives or self.local or self.opens or self.closes)


@dataclass(frozen=True)
class Schedule:
    """All rounds of one rank. The number of rounds is the same on every rank; a rank may have nothing in a round.

    Args:
        groups: The segments of each group.
        extents: Elements that the buffer of each `(store, segment)` must have at least.
    """

    rounds: tuple[Round, ...]
    groups: tuple[tuple[int, ...], ...]
    extents: dict[tuple[int, int], int]

    def relay_extents(self, group: int) -> dict[int, int]:
        """Elements of the relay buffer of each segment of a group."""
        return {s: self.extents[RELAY, s] for s in self.groups[group] if (RELAY, s) in self.extents}
