"""Layouts: which intervals of the parameter vector each rank holds, and where in its buffers.

* `strategy_layout`: the weights under one strategy,
* `gradient_layout`: which gradient elements each rank contributes to,
* `master_layout`: the master store, where every element has exactly one owner.

Planners see only layouts, not degrees, so they support any placement that intervals can express. Segments with equal
placements (such as the layers of a stage) share one `Placement` object: a hundred layers cost a planner as much as one.
Pure functions; numpy int64; sizes are in elements.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from hf_hotspa.errors import PlanError
from hf_hotspa.layout.shares import is_uneven, stored_rows
from hf_hotspa.layout.vector import BESIDE, EMBEDDING, HEAD, ParameterSpec, ParameterVector, Segment
from hf_hotspa.strategy import Strategy

# -- the intervals of one segment on all ranks, as arrays --------------------------------------------------------------

Numbers = NDArray[np.int64]


@dataclass(frozen=True, order=True)
class Interval:
    """Elements `[start, stop)` of the vector, held at `offset` of a rank's buffer for `segment`."""

    start: int
    stop: int
    segment: int
    offset: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Placement:
    """The intervals of one segment on all ranks: sorted by rank and start, adjacent ones joined (see `place`)."""

    ranks: Numbers
    starts: Numbers  # first element of each interval, relative to the segment
    stops: Numbers  # one past its last element
    offsets: Numbers  # its position in the rank's buffer
    sizes: Numbers  # elements of each rank's buffer, [world size]

    @cached_property
    def key(self) -> bytes:
        """SHA-256 digest; equal for equal placements."""
        arrays = (self.ranks, self.starts, self.stops, self.offsets, self.sizes)
        return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def is_complete(self, numel: int) -> bool:
        """Whether every rank holds all `numel` elements of the segment in their order."""
        whole = len(self.ranks) == len(self.sizes) and not self.starts.any() and not self.offsets.any()
        return whole and bool((self.stops == numel).all() and (self.sizes == numel).all())

    def rows(self, low: int = 0, high: int | None = None) -> Iterator[tuple[int, int, int, int]]:
        """Yields `(rank, start, stop, offset)` of intervals `[low, high)`."""
        columns = (self.ranks, self.starts, self.stops, self.offsets)
        return zip(*(column[low:high].tolist() for column in columns), strict=True)

    def check(self, name: str, segment: int, base: int = 0) -> None:
        """Checks that no rank holds an element twice, and that intervals neither overlap in a buffer nor exceed it.
        `base`: start of the segment in the vector. Raises `PlanError`: naming the layout, the rank and the interval."""

        def interval(i: int) -> Interval:
            row = [int(column[i]) for column in (self.starts, self.stops, self.offsets)]
            return Interval(base + row[0], base + row[1], segment, row[2])

        same = self.ranks[1:] == self.ranks[:-1]
        twice = np.flatnonzero(same & (self.starts[1:] < self.stops[:-1]))
        if len(twice):
            i = int(twice[0]) + 1
            raise PlanError(
                f"layout {name!r} holds element {base + int(self.starts[i])} twice",
                where=f"rank {self.ranks[i]}, {interval(i)}",
            )
        order = np.lexsort((self.offsets, self.ranks))
        ranks, offsets, lengths = self.ranks[order], self.offsets[order], (self.stops - self.starts)[order]
        overlaps = np.flatnonzero((ranks[1:] == ranks[:-1]) & (offsets[:-1] + lengths[:-1] > offsets[1:]))
        if len(overlaps):
            a, b = (int(order[overlaps[0] + i]) for i in (0, 1))
            raise PlanError(
                f"layout {name!r}: {interval(a)} and {interval(b)} overlap in the buffer", where=f"rank {self.ranks[a]}"
            )
        leaves = np.flatnonzero((offsets < 0) | (offsets + lengths > self.sizes[ranks]))
        if len(leaves):
            i = int(order[leaves[0]])
            size = int(self.sizes[self.ranks[i]])
            raise PlanError(
                f"layout {name!r}: {interval(i)} leaves its buffer of {size} elements", where=f"rank {self.ranks[i]}"
            )


def place(rows: Numbers | Sequence[tuple[int, int, int, int]], sizes: Numbers | Sequence[int]) -> Placement:
    """Builds a placement from `(rank, start, stop, offset)` rows in any order. Drops empty intervals."""
    table = np.asarray(rows, dtype=np.int64).reshape(-1, 4)
    table = table[table[:, 2] > table[:, 1]]
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    if len(table) > 1:
        before, after = table[:-1], table[1:]
        continues = (
            (before[:, 0] == after[:, 0])
            & (before[:, 2] == after[:, 1])
            & (before[:, 3] + before[:, 2] - before[:, 1] == after[:, 3])
        )
        first = np.flatnonzero(np.concatenate(([True], ~continues)))
        last = np.append(first[1:], len(table)) - 1
        table = np.column_stack((table[first, 0], table[first, 1], table[last, 2], table[first, 3]))
    ranks, starts, stops, offsets = (np.ascontiguousarray(table[:, i]) for i in range(4))
    return Placement(ranks, starts, stops, offsets, np.asarray(sizes, dtype=np.int64))


# -- layouts -----------------------------------------------------------------------------------------------------------

MASTER_ALIGNMENT = 256
"""The master store is cut at multiples of this many elements of a parameter, or between parameters. So no 256-element
(or 128-element) scale block of quantized optimizer state spans two ranks, whatever the world size."""


@dataclass(frozen=True)
class Run:
    """`count` stretches of `length` elements of the parameter vector, `stride` apart; usually one."""

    start: int
    length: int
    stride: int = 0
    count: int = 1

    def stretches(self) -> Iterable[tuple[int, int]]:
        """`(start, stop)` of each stretch."""
        return ((self.start + i * self.stride, self.start + i * self.stride + self.length) for i in range(self.count))


@dataclass(frozen=True)
class Slot:
    """One parameter, or its shard, on one rank."""

    spec: ParameterSpec
    segment: int
    offset: int  # start in the rank's buffer for that segment
    shape: tuple[int, ...]  # local shape in the Hugging Face order of dims
    dim: int | None  # the dim of `shape` that is outermost in storage (`ParameterSpec.storage_dim`)
    runs: tuple[Run, ...]  # its elements of the parameter vector, in local storage order (`shard_dim` outermost)

    @property
    def numel(self) -> int:
        return sum(run.length * run.count for run in self.runs)

    def intervals(self) -> list[Interval]:
        """The slot as intervals, in local storage order."""
        result, offset = [], self.offset
        for run in self.runs:
            for start, stop in run.stretches():
                if stop > start:
                    result.append(Interval(start, stop, self.segment, offset))
                    offset += stop - start
        return result


@dataclass(frozen=True)
class Layout:
    """The intervals that each rank holds."""

    name: str  # for messages and the names of plans
    world_size: int
    bases: tuple[int, ...]  # start of each segment in the parameter vector
    placements: tuple[Placement, ...]  # the placement of each segment, relative to its base

    @cached_property
    def holdings(self) -> tuple[tuple[Interval, ...], ...]:
        """`holdings[rank]` in vector order, written out; for small layouts and tests."""
        by_rank: list[list[Interval]] = [[] for _ in range(self.world_size)]
        for segment, (base, placement) in enumerate(zip(self.bases, self.placements, strict=True)):
            for rank, start, stop, offset in placement.rows():
                by_rank[rank].append(Interval(base + start, base + stop, segment, offset))
        return tuple(tuple(sorted(intervals)) for intervals in by_rank)

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """`sizes[rank][segment]`: elements of each buffer, written out."""
        return tuple(tuple(self.rank_sizes(rank)) for rank in range(self.world_size))

    def rank_sizes(self, rank: int) -> list[int]:
        """Elements of a rank's buffers, by segment."""
        return [int(placement.sizes[rank]) for placement in self.placements]


def stage_of_unit(vector: ParameterVector, strategy: Strategy, unit: int) -> int:
    """Returns the pipeline stage of a unit, out of pp * v: of `BESIDE` the one that its outputs enter. Stage s is on the
    ranks with pp coordinate s mod pp."""
    if unit in (EMBEDDING, BESIDE):
        return 0
    if unit == HEAD:
        return strategy.num_stages - 1
    stages = vector.stage_costs.stages(strategy.num_stages)
    return next(stage for stage, layers in enumerate(stages) if unit in layers)


def _slots(
    vector: ParameterVector, specs: Sequence[ParameterSpec], segment: int, strategy: Strategy, rank: int
) -> list[Slot]:
    """Packs a rank's shards in vector order."""
    ep, expert_shard, filled, slots = strategy.ep, strategy.expert_shard(rank), 0, []
    for spec in specs:
        runs: tuple[Run, ...]
        if ep > 1 and spec.experts:  # whole experts, whatever tp is
            # a stretch for each index of the dim that is outermost in storage: dim 0 holds the experts, unless sharded
            count = spec.shape[spec.storage_dim] if spec.storage_dim else 1
            row, shape = spec.numel // count, (spec.experts // ep, *spec.shape[1:])
            runs = (Run(spec.offset + row // ep * expert_shard, row // ep, row, count),)
        elif (rows := stored_rows(vector, strategy, spec, rank)) is None:
            runs, shape = (Run(spec.offset, spec.numel),), spec.shape
        else:
            assert spec.storage_dim is not None
            runs = tuple(Run(spec.offset + a * spec.row_size, (b - a) * spec.row_size) for a, b in rows)
            local = list(spec.shape)
            local[spec.storage_dim] = sum(b - a for a, b in rows)
            shape = tuple(local)
        slots.append(Slot(spec, segment, filled, shape, spec.storage_dim, runs))
        filled += slots[-1].numel
    return slots


def rank_slots(vector: ParameterVector, strategy: Strategy, rank: int, stage: int | None = None) -> tuple[Slot, ...]:
    """Returns the parameters that a rank holds under a strategy, in vector order; `stage`: on one of its stages only.

    Ranks that differ only in dp hold the same slots, except experts under ep and MLPs divided by relative step times.
    """
    pp = strategy.coord(rank).pp
    return tuple(
        slot
        for segment in vector.segments
        for holder, specs in _holders(vector, strategy, segment)
        if holder == stage or (stage is None and holder % strategy.pp == pp)
        for slot in _slots(vector, specs, segment.index, strategy, rank)
    )


def _holders(
    vector: ParameterVector, strategy: Strategy, segment: Segment
) -> list[tuple[int, tuple[ParameterSpec, ...]]]:
    """Returns `(stage, parameters)` pairs: two when tied embeddings are also on the last stage, none of `BESIDE`."""
    if segment.unit == BESIDE:
        return []
    specs = vector.specs_of(segment)
    stage, last = stage_of_unit(vector, strategy, segment.unit), strategy.num_stages - 1
    holders = [(stage, specs)]
    in_head = tuple(spec for spec in specs if spec.in_head)
    if in_head and stage != last:
        holders.append((last, in_head))
    return holders


_KIND = attrgetter("shape", "shard_dim", "parts", "partial_gradient", "trainable", "experts", "packed")
"""What decides a parameter's placement, beside its offset; equal for the same parameter of two layers."""


def _placed(
    name: str, vector: ParameterVector, strategy: Strategy, intervals: Callable[[Slot, int], list[Interval]]
) -> Layout:
    """Lays out the intervals that slots have on a tp coordinate, once for segments of one kind."""
    known: dict[tuple[object, ...], Placement] = {}
    placements = []
    uneven = is_uneven(vector, strategy)

    def placed(segment: Segment, holders: list[tuple[int, tuple[ParameterSpec, ...]]]) -> Placement:
        blocks, sizes = [np.empty((0, 4), np.int64)], np.zeros(strategy.world_size, dtype=np.int64)
        ep = strategy.ep if any(spec.experts for _, specs in holders for spec in specs) else 1
        # ranks of a stage that are `kinds` apart hold the same, unless shares are uneven
        kinds = strategy.stage_size if uneven else math.lcm(strategy.tp, ep)
        copies = strategy.stage_size // kinds
        for first, specs, kind in ((stage * strategy.stage_size, s, k) for stage, s in holders for k in range(kinds)):
            slots = _slots(vector, specs, segment.index, strategy, first + kind)
            chosen = [interval for slot in slots for interval in intervals(slot, kind % strategy.tp)]
            ranks = np.arange(copies, dtype=np.int64) * kinds + first + kind
            sizes[ranks] = sum(slot.numel for slot in slots)
            if chosen:
                one = np.array([(i.start - segment.start, i.stop - segment.start, i.offset) for i in chosen], np.int64)
                blocks.append(np.column_stack((np.repeat(ranks, len(chosen)), np.tile(one, (copies, 1)))))
        return place(np.concatenate(blocks), sizes)

    for segment in vector.segments:
        holders = [(stage % strategy.pp, specs) for stage, specs in _holders(vector, strategy, segment)]
        kinds = [(stage, spec.offset - segment.start, _KIND(spec)) for stage, specs in holders for spec in specs]
        key = (segment.numel, *kinds, vector.unit_costs.get(segment.unit) if uneven else None)
        if key not in known:
            known[key] = placed(segment, holders)
        placements.append(known[key])
    return Layout(name, strategy.world_size, _bases(vector), tuple(placements))


def _bases(vector: ParameterVector) -> tuple[int, ...]:
    return tuple(segment.start for segment in vector.segments)


def strategy_layout(vector: ParameterVector, strategy: Strategy) -> Layout:
    return _placed(str(strategy), vector, strategy, lambda slot, _: slot.intervals())


def part_of_layout(layout: Layout, segments: Collection[int], what: str) -> Layout:
    """Returns the layout of these segments, which `what` names. The sizes of the other buffers do not change."""
    nothing = np.empty((0, 4), np.int64)
    placements = tuple(
        placement if segment in segments else place(nothing, placement.sizes)
        for segment, placement in enumerate(layout.placements)
    )
    return Layout(f"{what} of {layout.name}", layout.world_size, layout.bases, placements)


def held_in_place(vector: ParameterVector, layouts: Iterable[Layout]) -> frozenset[int]:
    """Returns the frozen segments that every rank holds complete in each of the layouts, in the dtype of the master store:
    one copy on a rank serves the store and all strategies."""
    in_place = {segment for segment in vector.segments if segment.has_one_form}
    for layout in layouts:
        in_place = {segment for segment in in_place if layout.placements[segment.index].is_complete(segment.numel)}
    return frozenset(segment.index for segment in in_place)


def gradient_layout(vector: ParameterVector, strategy: Strategy) -> Layout:
    """Returns what each rank adds to the gradient, as intervals of its gradient buffers, shaped like weight buffers.

    * Sharded parameters, and parameters with partial gradients: every holder adds everything. Replicated key/value
      heads hold different parts of the sum. With sequence parallelism all parameters do, of different tokens.
    * Parameters with identical gradients on all tp coordinates: each adds a disjoint 1/tp stretch, so nothing counts
      twice and all send equal shares.
    * Experts divided by ep: every holder adds them, for different tokens.
    * Frozen parameters are not added.

    Ranks of cp and dp all add: each has the gradient of different tokens.
    """
    tp = strategy.tp

    def added(slot: Slot, tp_coord: int) -> list[Interval]:
        spec = slot.spec
        if not spec.trainable:
            return []
        divided = spec.shard_dim is not None or (spec.experts and strategy.ep > 1)
        if divided or spec.partial_gradient or strategy.sp or tp == 1:
            return slot.intervals()
        low, high = slot.numel * tp_coord // tp, slot.numel * (tp_coord + 1) // tp
        return [Interval(spec.offset + low, spec.offset + high, slot.segment, slot.offset + low)] if high > low else []

    return _placed(f"gradients of {strategy}", vector, strategy, added)


def master_layout(vector: ParameterVector, world_size: int, by_stage: Strategy | None = None) -> Layout:
    """Returns the layout of the master store: segments are cut evenly over all ranks, so all help to load a layer.
    `by_stage`: a pipeline with independently updated stages: cuts each segment over its stage's ranks."""
    known: dict[tuple[range, int, tuple[int, ...]], Placement] = {}
    placements = []
    for segment in vector.segments:
        owners = range(world_size)
        if by_stage is not None and segment.unit != BESIDE:
            first = stage_of_unit(vector, by_stage, segment.unit) * by_stage.stage_size
            owners = range(first, first + by_stage.stage_size)
        starts = tuple(spec.offset - segment.start for spec in vector.specs_of(segment))
        key = owners, segment.numel, starts
        if key not in known:
            cuts, sizes = _master_cuts(starts, segment.numel, len(owners)), np.zeros(world_size, np.int64)
            sizes[owners.start : owners.stop] = np.diff(cuts)
            known[key] = place(np.column_stack((owners, cuts[:-1], cuts[1:], np.zeros_like(owners))), sizes)
        placements.append(known[key])
    return Layout("master store", world_size, _bases(vector), tuple(placements))


def _master_cuts(starts: Sequence[int], numel: int, num: int) -> NDArray[np.int64]:
    """Returns the ends of a segment's shares, starting with 0, as even as `MASTER_ALIGNMENT` and `starts` allow."""
    even = np.arange(num + 1, dtype=np.int64) * numel // num
    ends = np.array([*starts, numel], np.int64)
    at = np.searchsorted(ends, even, side="right") - 1
    low = ends[at] + (even - ends[at]) // MASTER_ALIGNMENT * MASTER_ALIGNMENT
    high = np.minimum(low + MASTER_ALIGNMENT, ends[np.minimum(at + 1, len(ends) - 1)])
    return np.where(even - low <= high - even, low, high)
