"""Switch plans: which rank sends which elements to whom, as frozen plain data that proves itself.

A plan is a table of transfers for each *kind* of segment and *hop*. Segments that are placed alike on both sides share
a table, so that a plan of a hundred equal layers is as large as one of a single layer. The hops of a segment follow
one another: what the first one lands in a relay buffer (or in a target) the second one may forward. A plan knows no
transport and no dtype. It is one of two kinds:

* a *load* copies: every element that a rank of the target layout holds is delivered to it exactly once;
* a *gradient return* adds: every contribution (source rank, element) reaches its owner exactly once. It is the adjoint
  of a load: hops run backwards, copies become sums.

`proof.prove` proves this against the layouts, and the planner calls it on everything it builds. No torch.
"""

import hashlib
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hf_hotspa.cluster import Cluster
from hf_hotspa.plan.ports import PortLoads
from hf_hotspa.plan.table import DST, LENGTH, RELAY, SRC, SegmentPlan, adjoint

# -- the schedule -----------------------------------------------------------------------------------------------------

# Schedules: what one rank does round by round, as frozen plain data. Cut from plans by `rounds`, run by the executor.
#
# No torch; offsets into buffers are in elements, offsets into staging in bytes.


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


# -- the plan ---------------------------------------------------------------------------------------------------------


INTRA, INTER, ANY = "intra", "inter", "any"
"""Links of a hop: inside nodes only, between nodes only, or both."""

_INVERSE = "inverse of "


@dataclass(frozen=True, eq=False)
class SwitchPlan:
    """All transfers between two layouts, of all ranks. Made by the planner, which proves it.

    Args:
        name: What moves where, for messages and logs; part of the digest.
        bases: Where each segment begins in the parameter vector.
        kind_of: For each segment the index of its kind; -1 where the plan moves nothing of it.
        links: For each hop which links it uses: `INTRA`, `INTER` or `ANY`.
        accumulate: False copies (a load), True adds (a gradient return).
    """

    name: str
    world_size: int
    bases: tuple[int, ...]
    kinds: tuple[SegmentPlan, ...]
    kind_of: tuple[int, ...]
    links: tuple[str, ...]
    accumulate: bool

    def digest(self) -> str:
        """SHA-256 of the whole plan: equal on two ranks exactly when they would move the same bytes the same way."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        head = [self.world_size, self.accumulate, len(self.bases), *self.bases, *self.kind_of]
        text = f"{self.name}\0{self.links}\0{head}\0{[[len(hop) for hop in kind.hops] for kind in self.kinds]}\0"
        digest = hashlib.sha256(text.encode())
        for kind in self.kinds:
            for table in (*kind.hops, kind.relay_sizes):
                little = table.byteswap() if sys.byteorder == "big" else table
                digest.update(np.ascontiguousarray(little).tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SwitchPlan) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def inverse(self) -> "SwitchPlan":
        """The adjoint: sources and destinations change places, hops run backwards, a copy becomes a sum and vice versa.

        The inverse of the inverse is the plan.
        """
        name = self.name.removeprefix(_INVERSE) if self.name.startswith(_INVERSE) else _INVERSE + self.name
        kinds = tuple(
            SegmentPlan(tuple(adjoint(table) for table in kind.hops[::-1]), kind.relay_sizes) for kind in self.kinds
        )
        return replace(self, name=name, kinds=kinds, links=self.links[::-1], accumulate=not self.accumulate)

    def only(self, segments: Collection[int], what: str) -> "SwitchPlan":
        """The part of the plan that moves these segments; `what` they are goes into its name.

        What was proved of the plan holds for the part: a transfer concerns one segment.
        """
        kinds = sorted({self.kind_of[s] for s in segments if self.kind_of[s] >= 0})
        kind_of = tuple(
            kinds.index(kind) if segment in segments and kind >= 0 else -1 for segment, kind in enumerate(self.kind_of)
        )
        return replace(self, name=f"{self.name}, {what}", kinds=tuple(self.kinds[k] for k in kinds), kind_of=kind_of)

    def loads(self, cluster: Cluster, element_sizes: Sequence[int]) -> list[PortLoads]:
        """The bytes through every port, for each hop; `element_sizes[segment]` is one element's bytes on the wire."""
        totals = [PortLoads.zero(cluster) for _ in self.links]
        for kind, size in self._weights(element_sizes):
            for loads, table in zip(totals, self.kinds[kind].hops, strict=True):
                loads.add(table[:, SRC], table[:, DST], table[:, LENGTH] * size)
        return totals

    def wire_bytes(self, element_sizes: Sequence[int]) -> int:
        """Bytes that leave a rank; `element_sizes[segment]` is one element's bytes on the wire."""
        return sum(
            size * int(table[table[:, SRC] != table[:, DST], LENGTH].sum())
            for kind, size in self._weights(element_sizes)
            for table in self.kinds[kind].hops
        )

    def _weights(self, element_sizes: Sequence[int]) -> Iterable[tuple[int, int]]:
        """`(kind, bytes of one element summed over the segments of the kind)`."""
        weights = [0] * len(self.kinds)
        for segment, kind in enumerate(self.kind_of):
            if kind >= 0:
                weights[kind] += element_sizes[segment]
        return enumerate(weights)
