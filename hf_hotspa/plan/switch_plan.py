"""Switch plans: which rank sends which elements to whom, as frozen plain data that proves itself.

A plan has a table of transfers for each *kind* of segment and *hop*. Segments with equal placements on both sides share
a table: a plan of a hundred equal layers is as large as a plan of one. The second hop of a segment may forward what the
first lands in a relay buffer (or in a target). A plan knows no transport and no dtype. It is one of two kinds:

* a *load* copies: every element of the target layout is delivered to its rank exactly once;
* a *gradient return* adds: every contribution (source rank, element) reaches its owner exactly once. It is the adjoint
  of a load: hops run backwards, copies become sums.

The planner calls `prove` on every plan. No torch; numpy int64 throughout.
"""

import hashlib
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_hotspa.cluster import Cluster
from hf_hotspa.errors import PlanError
from hf_hotspa.layout.placement import Layout, Numbers, Placement, place

TARGET, RELAY, SOURCE, SECOND = range(4)
"""Stores, where elements of a transfer lie: buffers of the target layout, relay buffers of the switch, buffers of the
(first) source layout, and of a second one."""

SRC_STORE, SRC, SRC_OFFSET, DST_STORE, DST, DST_OFFSET, START, LENGTH = range(8)
"""The columns of a table; `START` counts from the beginning of the segment."""

COLUMNS = 8


class Transfer(NamedTuple):
    """A stretch of one segment that moves between two ranks' buffers, or inside a rank (`src == dst`)."""

    segment: int
    length: int
    src: int
    src_offset: int  # first element in the sender's buffer of the segment
    dst: int
    dst_offset: int  # first element in the receiver's buffer of the segment
    start: int  # first element in the parameter vector
    hop: int = 0
    src_store: int = SOURCE  # of the sender's buffers: `SOURCE`, `SECOND`, `RELAY` or `TARGET`
    dst_store: int = TARGET  # of the receiver's

    @property
    def stop(self) -> int:
        return self.start + self.length


def canonical(table: Numbers) -> Numbers:
    """Sorts a table canonically (source rank, destination rank, start), and joins contiguous transfers."""
    if len(table) == 0:
        return np.empty((0, COLUMNS), np.int64)
    table = table[np.lexsort((table[:, START], table[:, DST], table[:, SRC]))]
    before, after = table[:-1], table[1:]
    length = before[:, LENGTH]
    continues = (before[:, [SRC, DST, SRC_STORE, DST_STORE]] == after[:, [SRC, DST, SRC_STORE, DST_STORE]]).all(1)
    for column in (START, SRC_OFFSET, DST_OFFSET):
        continues &= before[:, column] + length == after[:, column]
    first = np.flatnonzero(np.concatenate(([True], ~continues)))
    merged = table[first]
    merged[:, LENGTH] = np.add.reduceat(table[:, LENGTH], first)
    return np.ascontiguousarray(merged)


class SegmentPlan(NamedTuple):
    """The transfers of one kind of segment."""

    hops: tuple[Numbers, ...]  # a table for each hop, [transfers, 8] int64, in canonical order
    relay_sizes: Numbers  # elements in each rank's relay buffer for one such segment, [world size]


def adjoint(table: Numbers) -> Numbers:
    """Reverses a table, in canonical order: ends and stores swapped."""
    swapped = table[:, [DST_STORE, DST, DST_OFFSET, SRC_STORE, SRC, SRC_OFFSET, START, LENGTH]]
    for column in (SRC_STORE, DST_STORE):
        stores = swapped[:, column]
        swapped[:, column] = np.where(stores == TARGET, SOURCE, np.where(stores == SOURCE, TARGET, stores))
    return np.ascontiguousarray(swapped[np.lexsort((swapped[:, START], swapped[:, DST], swapped[:, SRC]))])


# -- the schedule -----------------------------------------------------------------------------------------------------

# Schedules: one rank's work round by round, as frozen plain data. Made by `rounds`, run by the executor.
#
# Offsets into buffers are in elements, offsets into staging in bytes.


WINDOW_ALIGNMENT = 16  # windows and segments start on multiples of this many bytes: no element spans two windows
RELAY_SLOTS = 3  # groups that may use relay buffers at one time: one landing, one forwarded, one between


class Wire(NamedTuple):
    """The dtype of a segment's elements on the wire, and its bytes."""

    dtype: str
    itemsize: int


class Slice(NamedTuple):
    """`length` elements at `offset` of a rank's buffer of `segment` in `store`."""

    store: int
    segment: int
    offset: int
    length: int


class Local(NamedTuple):
    """A move inside a rank."""

    source: Slice
    target: Slice


@dataclass(frozen=True, slots=True)
class Message:
    """Data to or from one peer in one round, in one dtype."""

    peer: int
    wire: Wire
    slices: tuple[Slice, ...]  # its places in this rank's buffers, in the order on the wire
    length: int
    # its place in the staging buffer, in bytes; messages to several peers with the same content share it. -1 for a
    # message from buffer to buffer
    staging_offset: int
    channel: int = 0  # separates the messages of a pair and round; the same at both ends

    @property
    def num_bytes(self) -> int:
        return self.length * self.wire.itemsize


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's work in one round."""

    group: int  # index of the group of segments
    hop: int
    sends: tuple[Message, ...]  # in posting order: to rank + 1, rank + 2, ...; no two ranks start with the same peer
    receives: tuple[Message, ...]  # in posting order: from rank - 1, rank - 2, ...
    local: tuple[Local, ...]  # transfers inside the rank. A load has all of a group and hop in its first round
    send_bytes: int  # staging for the sends, if none can be sent in place
    receive_bytes: int  # staging for the receives, if none can be received in place
    needs: int  # the round to complete before this one reads or overwrites buffers; -1 for none
    opens: bool  # it is the first round of the group
    closes: bool  # it completes the group

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no work in the round, and nobody to notify."""
        return not (self.sends or self.receives or self.local or self.opens or self.closes)


@dataclass(frozen=True)
class Schedule:
    """All rounds of one rank, the segments of each group, and the least elements of each `(store, segment)`. Every rank
    has the same number of rounds; some may be empty."""

    rounds: tuple[Round, ...]
    groups: tuple[tuple[int, ...], ...]
    extents: dict[tuple[int, int], int]

    def relay_extents(self, group: int) -> dict[int, int]:
        """The elements of each segment's relay buffer."""
        return {s: self.extents[RELAY, s] for s in self.groups[group] if (RELAY, s) in self.extents}


# -- the bytes through the ports of devices ----------------------------------------------------------------------------

# The fluid port model. Every device has a full-duplex port to the devices of its node; traffic between nodes passes the
# device's share of its node's network interfaces (NICs), or, if there are fewer NICs than devices, the node's shared
# interfaces. A set of transfers takes the time of its busiest port: no latency, no protocol, perfect overlap.

Bytes = npt.NDArray[np.float64]


@dataclass
class PortLoads:
    """Bytes through every port: four float64 arrays with one entry per rank."""

    devices_per_node: int  # ranks of a full node
    sent_intra: Bytes  # bytes sent to ranks of the same node
    received_intra: Bytes  # bytes received from ranks of the same node
    sent_inter: Bytes  # bytes sent to other nodes
    received_inter: Bytes  # bytes received from other nodes

    @classmethod
    def zero(cls, cluster: Cluster) -> "PortLoads":
        sent_intra, received_intra, sent_inter, received_inter = np.zeros((4, cluster.world_size))
        return cls(cluster.devices_per_node, sent_intra, received_intra, sent_inter, received_inter)

    def add(self, src: npt.ArrayLike, dst: npt.ArrayLike, num_bytes: npt.ArrayLike) -> None:
        """Adds transfers, as arrays of equal length or scalars; `src == dst` loads no port."""
        sources, targets, sizes = np.broadcast_arrays(
            np.atleast_1d(np.asarray(src, np.int64)),
            np.atleast_1d(np.asarray(dst, np.int64)),
            np.asarray(num_bytes, np.float64),
        )
        inter = sources // self.devices_per_node != targets // self.devices_per_node
        for chosen, sent, received in (
            (~inter & (sources != targets), self.sent_intra, self.received_intra),
            (inter, self.sent_inter, self.received_inter),
        ):
            sent += np.bincount(sources[chosen], sizes[chosen], len(sent))
            received += np.bincount(targets[chosen], sizes[chosen], len(received))

    def __add__(self, other: "PortLoads") -> "PortLoads":
        return PortLoads(
            self.devices_per_node,
            self.sent_intra + other.sent_intra,
            self.received_intra + other.received_intra,
            self.sent_inter + other.sent_inter,
            self.received_inter + other.received_inter,
        )

    def seconds(self, cluster: Cluster) -> float:
        """The time of the busiest port."""
        nic, sent, received = nic_bandwidth(cluster), self.sent_inter, self.received_inter
        if cluster.shares_nics:
            nic, firsts = cluster.node_bandwidth, np.arange(0, cluster.world_size, cluster.devices_per_node)
            sent, received = np.add.reduceat(sent, firsts), np.add.reduceat(received, firsts)
        device = max(self.sent_intra.max(), self.received_intra.max()) / cluster.intra_bandwidth
        return float(max(device, sent.max() / nic, received.max() / nic))


def overlapped_seconds(hops: Iterable[PortLoads], cluster: Cluster) -> float:
    """The time of several hops that overlap in many small chunks: of their summed loads."""
    return sum(hops, PortLoads.zero(cluster)).seconds(cluster)


def nic_bandwidth(cluster: Cluster) -> float:
    """A device's even share of the NICs of a full node, in bytes per second and direction."""
    return cluster.node_bandwidth / cluster.devices_per_node


def node_bandwidths(cluster: Cluster) -> list[float]:
    """Each node's bytes per second to (and from) other nodes; a short last node has fewer own NICs."""
    if cluster.shares_nics:
        return [cluster.node_bandwidth] * cluster.num_nodes
    return [nic_bandwidth(cluster) * len(cluster.ranks(node)) for node in range(cluster.num_nodes)]


# -- the plan ---------------------------------------------------------------------------------------------------------


INTRA, INTER, ANY = "intra", "inter", "any"  # links of a hop: inside nodes, between nodes, or both
_INVERSE = "inverse of "


@dataclass(frozen=True, eq=False)
class SwitchPlan:
    """All ranks' transfers between two layouts. Made and proved by the planner."""

    name: str  # for messages and logs; part of the digest
    world_size: int
    bases: tuple[int, ...]  # where each segment begins in the parameter vector
    kinds: tuple[SegmentPlan, ...]
    kind_of: tuple[int, ...]  # each segment's kind; -1 if nothing moves
    links: tuple[str, ...]  # each hop's links: `INTRA`, `INTER` or `ANY`
    accumulate: bool  # False copies (a load), True adds (a gradient return)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan: equal on two ranks exactly if they would move the same bytes the same way."""
        head = [self.world_size, self.accumulate, len(self.bases), *self.bases, *self.kind_of]
        text = f"{self.name}\0{self.links}\0{head}\0{[[len(hop) for hop in kind.hops] for kind in self.kinds]}\0"
        digest = hashlib.sha256(text.encode())
        for kind in self.kinds:
            for table in (*kind.hops, kind.relay_sizes):
                little = table.byteswap() if sys.byteorder == "big" else table
                digest.update(np.ascontiguousarray(little).tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SwitchPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def inverse(self) -> "SwitchPlan":
        """Returns the adjoint: sources and destinations swap, hops run backwards, copies become sums and vice versa.
        The inverse of the inverse is the plan."""
        name = self.name.removeprefix(_INVERSE) if self.name.startswith(_INVERSE) else _INVERSE + self.name
        kinds = tuple(
            SegmentPlan(tuple(adjoint(table) for table in kind.hops[::-1]), kind.relay_sizes) for kind in self.kinds
        )
        return replace(self, name=name, kinds=kinds, links=self.links[::-1], accumulate=not self.accumulate)

    def only(self, segments: Collection[int], what: str) -> "SwitchPlan":
        """Returns the part that moves these segments; `what` describes them in its name. The proof still holds: a
        transfer concerns one segment."""
        kinds = sorted({self.kind_of[s] for s in segments if self.kind_of[s] >= 0})
        kind_of = tuple(
            kinds.index(kind) if segment in segments and kind >= 0 else -1 for segment, kind in enumerate(self.kind_of)
        )
        return replace(self, name=f"{self.name}, {what}", kinds=tuple(self.kinds[k] for k in kinds), kind_of=kind_of)

    def loads(self, cluster: Cluster, element_sizes: Sequence[int]) -> list[PortLoads]:
        """The bytes through every port, per hop; `element_sizes[segment]`: one element's bytes on the wire."""
        totals = [PortLoads.zero(cluster) for _ in self.links]
        for kind, size in self._weights(element_sizes):
            for loads, table in zip(totals, self.kinds[kind].hops, strict=True):
                loads.add(table[:, SRC], table[:, DST], table[:, LENGTH] * size)
        return totals

    def wire_bytes(self, element_sizes: Sequence[int]) -> int:
        """The bytes that leave a rank; `element_sizes[segment]`: one element's bytes on the wire."""
        return sum(
            size * int(table[table[:, SRC] != table[:, DST], LENGTH].sum())
            for kind, size in self._weights(element_sizes)
            for table in self.kinds[kind].hops
        )

    def _weights(self, element_sizes: Sequence[int]) -> Iterable[tuple[int, int]]:
        """`(kind, bytes of one element, summed over its segments)`."""
        weights = [0] * len(self.kinds)
        for segment, kind in enumerate(self.kind_of):
            if kind >= 0:
                weights[kind] += element_sizes[segment]
        return enumerate(weights)


def prove(plan: SwitchPlan, source: Layout | Sequence[Layout], target: Layout) -> None:
    """Proves a plan against its layouts, hop by hop; a gradient return as the load whose adjoint it is.

    Every rank has what it sends at that offset when the hop begins; every destination has it at the offset of its
    receive; and each needed element (load) or contribution (gradient return) is delivered exactly once. Raises
    `PlanError`: naming the first transfer, rank or interval that is wrong.
    """
    sources = [source] if isinstance(source, Layout) else list(source)
    worlds = [plan.world_size, *(source.world_size for source in sources), target.world_size]
    if len(set(worlds)) > 1:
        sizes = ", ".join(map(str, worlds))
        raise PlanError(f"plan {plan.name!r}: plan, source and target are of different worlds: {sizes}")
    layouts = [*sources, target]
    if plan.accumulate:
        layouts.reverse()
    proved = set()
    for segment in range(max(len(plan.kind_of), *(len(layout.placements) for layout in layouts))):
        base = plan.bases[segment] if segment < len(plan.bases) else 0
        placements, shifts = zip(*(_placement(layout, segment, base) for layout in layouts), strict=True)
        kind = plan.kind_of[segment] if segment < len(plan.kind_of) else -1
        key = (kind, shifts, tuple(p.key for p in placements))
        if key in proved:
            continue
        proved.add(key)
        for layout, placement, shift in zip(layouts, placements, shifts, strict=True):
            placement.check(layout.name, segment, base + shift)
        own = plan.kinds[kind] if kind >= 0 else SegmentPlan((), np.zeros(plan.world_size, np.int64))
        tables = tuple(adjoint(table) for table in reversed(own.hops)) if plan.accumulate else own.hops
        for given in own.hops:
            _check_rows(plan, given, segment, base)
        proof = _Proof(plan, segment, base)
        proof.follow(tables, own.relay_sizes, [_shifted(p, s) for p, s in zip(placements, shifts, strict=True)])


def _placement(layout: Layout, segment: int, base: int) -> tuple[Placement, int]:
    if segment >= len(layout.placements):
        return place([], [0] * layout.world_size), 0
    return layout.placements[segment], layout.bases[segment] - base


def _shifted(placement: Placement, shift: int) -> Placement:
    return replace(placement, starts=placement.starts + shift, stops=placement.stops + shift)


def _text(row: Numbers, segment: int, base: int, hop: int = 0) -> str:
    src_store, src, src_offset, dst_store, dst, dst_offset, start, length = (int(value) for value in row)
    return str(Transfer(segment, length, src, src_offset, dst, dst_offset, base + start, hop, src_store, dst_store))


def _check_rows(plan: SwitchPlan, table: Numbers, segment: int, base: int) -> None:
    ends = table[:, [SRC, DST]]
    bad = ((ends < 0) | (ends >= plan.world_size)).any(1) | (table[:, LENGTH] < 1)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        what = "names a rank that does not exist or moves nothing"
        raise PlanError(f"plan {plan.name!r}: transfer {i} {what}", where=_text(table[i], segment, base))
    step = np.diff(table[:, [SRC, DST, START]], axis=0)
    rises = step[np.arange(len(step)), (step != 0).argmax(1)] > 0  # where two rows differ first
    if not rises.all():
        i = int(np.flatnonzero(~rises)[0]) + 1
        what = "is out of the canonical order"
        raise PlanError(f"plan {plan.name!r}: transfer {i} {what}", where=_text(table[i], segment, base))


class _Proof:
    """Follows the tables of one segment."""

    def __init__(self, plan: SwitchPlan, segment: int, base: int) -> None:
        self._name, self._world_size, self._segment, self._base = plan.name, plan.world_size, segment, base
        self._sends, self._gets = ("delivers", "sends") if plan.accumulate else ("sends", "delivers")
        self._receives = "sends" if plan.accumulate else "receives"

    def follow(self, hops: Sequence[Numbers], relay_sizes: Numbers, placements: Sequence[Placement]) -> None:
        *sources, target = placements
        stores = {SOURCE: sources[0]}
        if len(sources) > 1:
            stores[SECOND] = sources[1]
        arrived: dict[int, list[Numbers]] = {RELAY: [], TARGET: []}
        for hop, table in enumerate(hops):
            for store in np.unique(table[:, SRC_STORE]).tolist():
                rows = table[table[:, SRC_STORE] == store]
                placement = stores.get(store) or place([], [0] * self._world_size)
                self._check_placed(placement, rows, SRC, SRC_OFFSET, hop, self._sends)
            for store, into in arrived.items():
                rows = table[table[:, DST_STORE] == store]
                if store == TARGET:
                    self._check_placed(target, rows, DST, DST_OFFSET, hop, self._gets)
                into.append(rows)
            for row in table[~np.isin(table[:, DST_STORE], (RELAY, TARGET))]:
                raise self._error(row, hop, "writes into a source buffer")
            for store, into in arrived.items():
                rows = np.concatenate(into)
                self._check_single(rows, hop)
                runs = np.column_stack((rows[:, DST], rows[:, START], rows[:, START] + rows[:, LENGTH]))
                sizes = relay_sizes if store == RELAY else target.sizes
                stores[store] = place(np.column_stack((runs, rows[:, DST_OFFSET])), sizes)
                if store == RELAY:
                    stores[store].check(f"transfers into relay buffers of {self._name}", self._segment, self._base)
        self._check_complete(stores.get(TARGET) or place([], [0] * self._world_size), target)

    def _check_placed(self, placement: Placement, rows: Numbers, end: int, at: int, hop: int, verb: str) -> None:
        """Checks that each row lies in one interval of its rank, at the matching offset."""
        if len(rows) == 0:
            return
        starts, stops = rows[:, START], rows[:, START] + rows[:, LENGTH]
        lowest = min(0, int(starts.min()), int(placement.starts.min(initial=0)))
        span = 1 + max(int(stops.max()), int(placement.stops.max(initial=0))) - lowest
        present, asked = placement.ranks * span + placement.starts, rows[:, end] * span + starts
        index = np.searchsorted(present - lowest, asked - lowest, side="right") - 1
        fits = index >= 0
        index = np.maximum(index, 0)
        if len(placement.ranks):
            fits &= (placement.ranks[index] == rows[:, end]) & (stops <= placement.stops[index])
            fits &= rows[:, at] - placement.offsets[index] == starts - placement.starts[index]
        for row in rows[~fits]:
            raise self._error(row, hop, f"{verb} what rank {row[end]} does not hold there")

    def _check_single(self, rows: Numbers, hop: int) -> None:
        rows = rows[np.lexsort((rows[:, START], rows[:, DST]))]
        twice = (rows[1:, DST] == rows[:-1, DST]) & (rows[1:, START] < rows[:-1, START] + rows[:-1, LENGTH])
        if twice.any():
            row = rows[1:][twice][0]
            element = self._base + int(row[START])
            raise self._error(row, hop, f"{self._receives} element {element} a second time at rank {row[DST]}")

    def _check_complete(self, arrivals: Placement, target: Placement) -> None:
        """Compares sums per rank: all arrivals lie in the target and none came twice, so equal sums mean complete."""
        missing = np.zeros(self._world_size, np.int64)
        np.add.at(missing, target.ranks, target.stops - target.starts)
        np.subtract.at(missing, arrivals.ranks, arrivals.stops - arrivals.starts)
        if not missing.any():
            return
        rank = int(np.flatnonzero(missing)[0])
        arrived = [(start, stop) for r, start, stop, _ in arrivals.rows() if r == rank]
        for r, start, stop, _ in target.rows():
            position = start
            for low, high in arrived:
                if r == rank and low <= position < high:
                    position = high
            if r == rank and position < stop:
                end = min([low for low, _ in arrived if low > position] + [stop])
                raise PlanError(
                    f"plan {self._name!r}: no transfer {self._receives} elements "
                    f"[{self._base + position}, {self._base + end})",
                    where=f"rank {rank}, segment {self._segment}",
                )

    def _error(self, row: Numbers, hop: int, what: str) -> PlanError:
        where = _text(row, self._segment, self._base, hop)
        return PlanError(f"plan {self._name!r}: a transfer {what}", where=where)
