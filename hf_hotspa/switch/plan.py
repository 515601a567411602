"""Switch plans: which rank sends which elements to whom, as frozen plain data that proves itself.

A plan knows no transport and no dtype. It is one of two kinds:

* a *load* copies: every element that a rank of the target layout holds is delivered to it exactly once;
* a *gradient return* adds: every contribution (source rank, element) is delivered exactly once.

`SwitchPlan.validate` proves this against the two layouts, and the planner calls it on everything it builds. No torch.
"""

import hashlib
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter, itemgetter
from typing import NamedTuple

from hf_hotspa.cluster import Cluster
from hf_hotspa.errors import PlanError
from hf_hotspa.layout.placement import Interval, Layout

_INVERSE = "inverse of "


class Transfer(NamedTuple):
    """A stretch of one segment that moves from one rank's buffer to another's, or inside a rank (`src == dst`).

    Args:
        segment: Index of the segment.
        length: Elements.
        src: Sending rank.
        src_offset: First element in the sender's buffer of the segment.
        dst: Receiving rank.
        dst_offset: First element in the receiver's buffer of the segment.
        start: Position of the first element in the parameter vector.
    """

    segment: int
    length: int
    src: int
    src_offset: int
    dst: int
    dst_offset: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    def inverse(self) -> "Transfer":
        """The same stretch on its way back."""
        return Transfer(self.segment, self.length, self.dst, self.dst_offset, self.src, self.src_offset, self.start)


_route = itemgetter(2, 4, 6)  # (src, dst, start): the canonical order; both ends of a route see its transfers by start


def merge_transfers(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """The transfers in canonical order, those that continue each other on both sides joined."""
    merged: list[Transfer] = []
    for transfer in sorted(transfers, key=_route):
        if merged and _continues(merged[-1], transfer):
            last = merged[-1]
            merged[-1] = last._replace(length=last.length + transfer.length)
        else:
            merged.append(transfer)
    return tuple(merged)


def _continues(a: Transfer, b: Transfer) -> bool:
    return (a.start + a.length, a.src_offset + a.length, a.dst_offset + a.length, a.src, a.dst, a.segment) == (
        b.start,
        b.src_offset,
        b.dst_offset,
        b.src,
        b.dst,
        b.segment,
    )


def held_runs(layout: Layout) -> list[list[Interval]]:
    """What each rank holds, by start, intervals that continue each other in vector and buffer joined.

    Raises:
        PlanError: a rank holds an element twice, or its intervals overlap in a buffer or reach beyond it.
    """
    return [_runs(layout, rank) for rank in range(layout.world_size)]


def _runs(layout: Layout, rank: int) -> list[Interval]:
    runs: list[Interval] = []
    for interval in sorted(layout.holdings[rank]):
        last = runs[-1] if runs else None
        if last and interval.start < last.stop:
            raise PlanError(
                f"layout {layout.name!r} holds element {interval.start} twice", where=f"rank {rank}, {interval}"
            )
        if last and (last.stop, last.offset + last.length, last.segment) == (
            interval.start,
            interval.offset,
            interval.segment,
        ):
            runs[-1] = Interval(last.start, interval.stop, last.segment, last.offset)
        elif interval.stop > interval.start:
            runs.append(interval)
    in_buffer = sorted(runs, key=attrgetter("segment", "offset"))
    for a, b in pairwise(in_buffer):
        if a.segment == b.segment and a.offset + a.length > b.offset:
            raise PlanError(f"layout {layout.name!r}: {a} and {b} overlap in the buffer", where=f"rank {rank}")
    for run in in_buffer:
        if run.offset < 0 or run.offset + run.length > layout.sizes[rank][run.segment]:
            size = layout.sizes[rank][run.segment]
            raise PlanError(f"layout {layout.name!r}: {run} leaves its buffer of {size} elements", where=f"rank {rank}")
    return runs


@dataclass(frozen=True)
class RankView:
    """One rank's part of a plan. Both ends of a route list its transfers in the same order.

    Args:
        rank: The rank.
        local: Transfers inside the rank.
        outgoing: What it sends, by receiving rank.
        incoming: What it receives, by sending rank.
    """

    rank: int
    local: tuple[Transfer, ...]
    outgoing: Mapping[int, tuple[Transfer, ...]]
    incoming: Mapping[int, tuple[Transfer, ...]]


@dataclass(frozen=True)
class Traffic:
    """Bytes that a plan moves, by kind of link, and those of the busiest ranks (bytes inside a rank not counted there)."""

    local_bytes: int
    intra_node_bytes: int
    inter_node_bytes: int
    max_sent_bytes: int
    max_received_bytes: int

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave a rank."""
        return self.intra_node_bytes + self.inter_node_bytes


@dataclass(frozen=True)
class SwitchPlan:
    """All transfers between two layouts, of all ranks. Made by the planner, which validates it.

    Args:
        name: What moves where, for messages and logs; part of the digest.
        world_size: Ranks.
        transfers: In canonical order: by source, destination, position in the vector.
        accumulate: False copies (a load), True adds (a gradient return).
    """

    name: str
    world_size: int
    transfers: tuple[Transfer, ...]
    accumulate: bool

    def validate(self, source: Layout, target: Layout) -> None:
        """Proves the plan against its layouts.

        Every source holds what it sends at the offset it sends from, every destination holds it at the offset it
        receives at, and each needed element (load) or each contribution (gradient return) is delivered exactly once.

        Raises:
            PlanError: naming the first transfer, rank or interval that is wrong.
        """
        if not self.world_size == source.world_size == target.world_size:
            sizes = f"{self.world_size}, {source.world_size}, {target.world_size}"
            raise PlanError(f"plan {self.name!r}: plan, source and target are of different worlds: {sizes}")
        held, received = held_runs(source), held_runs(target)
        starts = [[run.start for run in runs] for runs in held], [[run.start for run in runs] for runs in received]
        previous: Transfer | None = None
        for index, transfer in enumerate(self.transfers):
            ranks_exist = 0 <= transfer.src < self.world_size and 0 <= transfer.dst < self.world_size
            if not ranks_exist or transfer.length < 1:
                raise self._error(index, "names a rank that does not exist or moves nothing")
            if previous is not None and _route(previous) >= _route(transfer):
                raise self._error(index, "is out of the canonical order")
            if not _is_held(held[transfer.src], starts[0][transfer.src], transfer, transfer.src_offset):
                raise self._error(index, f"sends what rank {transfer.src} does not hold there")
            if not _is_held(received[transfer.dst], starts[1][transfer.dst], transfer, transfer.dst_offset):
                raise self._error(index, f"delivers what rank {transfer.dst} does not hold there")
            previous = transfer
        self._check_once(held if self.accumulate else received)

    def _check_once(self, runs_of: Sequence[Sequence[Interval]]) -> None:
        """Each rank's runs must be tiled by its transfers; every transfer is known to lie inside one run."""
        verb, end = ("sends", 2) if self.accumulate else ("receives", 4)
        moved: list[list[tuple[int, int, int]]] = [[] for _ in range(self.world_size)]
        for index, transfer in enumerate(self.transfers):
            moved[transfer[end]].append((transfer.start, transfer.stop, index))
        for rank, runs in enumerate(runs_of):
            stretches = iter(sorted(moved[rank]))
            stretch = next(stretches, None)
            for run in runs:
                position = run.start
                while position < run.stop:
                    if stretch is None or stretch[0] > position:
                        missing_stop = run.stop if stretch is None else min(run.stop, stretch[0])
                        raise PlanError(
                            f"plan {self.name!r}: no transfer {verb} elements [{position}, {missing_stop})",
                            where=f"rank {rank}, {run}",
                        )
                    if stretch[0] < position:
                        raise self._error(stretch[2], f"{verb} element {stretch[0]} a second time at rank {rank}")
                    position, stretch = stretch[1], next(stretches, None)
            if stretch is not None:
                raise self._error(stretch[2], f"{verb} element {stretch[0]} a second time at rank {rank}")

    def _error(self, index: int, what: str) -> PlanError:
        transfer = self.transfers[index]
        return PlanError(f"plan {self.name!r}: transfer {index} {what}", where=str(transfer))

    def digest(self) -> str:
        """SHA-256 of the whole plan: equal on two ranks exactly when they would move the same bytes the same way."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        numbers = array("q", chain([self.world_size, self.accumulate, len(self.transfers)], *self.transfers))
        if sys.byteorder == "big":
            numbers.byteswap()
        return hashlib.sha256(self.name.encode() + b"\0" + numbers.tobytes()).hexdigest()

    def inverse(self) -> "SwitchPlan":
        """The adjoint: sources and destinations change places, a copy becomes a sum and a sum a copy.

        The inverse of the inverse is the plan.
        """
        name = self.name.removeprefix(_INVERSE) if self.name.startswith(_INVERSE) else _INVERSE + self.name
        transfers = tuple(sorted((t.inverse() for t in self.transfers), key=_route))
        return SwitchPlan(name, self.world_size, transfers, not self.accumulate)

    def rank_view(self, rank: int) -> RankView:
        """What one rank has to do."""
        outgoing: dict[int, list[Transfer]] = {}
        incoming: dict[int, list[Transfer]] = {}
        local: list[Transfer] = []
        for transfer in self.transfers:
            if transfer.src == rank == transfer.dst:
                local.append(transfer)
            elif transfer.src == rank:
                outgoing.setdefault(transfer.dst, []).append(transfer)
            elif transfer.dst == rank:
                incoming.setdefault(transfer.src, []).append(transfer)
        return RankView(
            rank,
            tuple(local),
            {peer: tuple(outgoing[peer]) for peer in sorted(outgoing)},
            {peer: tuple(incoming[peer]) for peer in sorted(incoming)},
        )

    def traffic(self, cluster: Cluster, element_sizes: Sequence[int]) -> Traffic:
        """The bytes the plan moves on a cluster; `element_sizes[segment]` is the bytes of one element on the wire."""
        sent, received = [0] * self.world_size, [0] * self.world_size
        local = intra = inter = 0
        for transfer in self.transfers:
            size = transfer.length * element_sizes[transfer.segment]
            if transfer.src == transfer.dst:
                local += size
                continue
            sent[transfer.src] += size
            received[transfer.dst] += size
            if cluster.node(transfer.src) == cluster.node(transfer.dst):
                intra += size
            else:
                inter += size
        return Traffic(local, intra, inter, max(sent), max(received))


def _is_held(runs: Sequence[Interval], starts: Sequence[int], transfer: Transfer, offset: int) -> bool:
    index = bisect_right(starts, transfer.start) - 1
    if index < 0:
        return False
    run = runs[index]
    return (
        transfer.stop <= run.stop
        and transfer.segment == run.segment
        and offset - run.offset == transfer.start - run.start
    )
