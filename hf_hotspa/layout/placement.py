"""Layouts: which intervals of the parameter vector each rank holds, and where in its buffers.

Three layouts are computed here, each a pure function of plain data:

* `strategy_layout`: the weights of one strategy,
* `gradient_layout`: what each rank of a strategy has to add to the gradient of which element,
* `master_layout`: the master store, in which every element has exactly one owner.

A planner sees nothing but layouts, never degrees, so that any placement that can be written as intervals plans with the
same code. No torch; all sizes are counted in elements.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hf_hotspa.layout.stages import cut_stages
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, ParameterVector
from hf_hotspa.strategy import Strategy

MASTER_ALIGNMENT = 128
"""Cuts of the master store fall on multiples of this many elements (aligned vector loads; fewer tiny pieces)."""


@dataclass(frozen=True)
class Run:
    """`count` stretches of `length` elements of the parameter vector, `stride` apart. One stretch is the common case."""

    start: int
    length: int
    stride: int = 0
    count: int = 1

    def stretches(self) -> Iterable[tuple[int, int]]:
        """`(start, stop)` of each stretch."""
        return ((self.start + i * self.stride, self.start + i * self.stride + self.length) for i in range(self.count))


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


@dataclass(frozen=True)
class Slot:
    """One parameter as one rank holds it: its local shape and where it lies.

    Args:
        spec: The parameter.
        segment: Index of its segment.
        offset: Start in the rank's buffer for that segment.
        shape: Local shape in the Hugging Face order of dims.
        runs: What of the parameter vector it holds, in local storage order (`shard_dim` outermost).
    """

    spec: ParameterSpec
    segment: int
    offset: int
    shape: tuple[int, ...]
    runs: tuple[Run, ...]

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
    """What each rank holds: `holdings[rank]` sorted by `start`; `sizes[rank][segment]` elements of each buffer."""

    name: str
    holdings: tuple[tuple[Interval, ...], ...]
    sizes: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.holdings)


def stage_of_unit(vector: ParameterVector, strategy: Strategy, unit: int) -> int:
    """The pipeline stage of a unit under a strategy."""
    if unit == EMBEDDING:
        return 0
    if unit == HEAD:
        return strategy.pp - 1
    stages = cut_stages(vector.layer_costs, vector.head_cost, strategy.pp)
    return next(stage for stage, layers in enumerate(stages) if unit in layers)


def _holds(vector: ParameterVector, strategy: Strategy, spec: ParameterSpec, stage: int) -> bool:
    return stage == stage_of_unit(vector, strategy, spec.unit) or (spec.in_head and stage == strategy.pp - 1)


def rank_slots(vector: ParameterVector, strategy: Strategy, rank: int) -> tuple[Slot, ...]:
    """The parameters that a rank holds under a strategy, in vector order.

    Ranks that differ only in their dp coordinate hold the same slots.
    """
    coord = strategy.coord(rank)
    shard = strategy.shard_index(coord.tp)
    filled = [0] * len(vector.segments)
    slots = []
    for segment in vector.segments:
        for spec in vector.specs:
            if not (segment.start <= spec.offset < segment.stop) or not _holds(vector, strategy, spec, coord.pp):
                continue
            runs: tuple[Run, ...]
            if spec.shard_dim is None or strategy.tp == 1:
                runs, shape = (Run(spec.offset, spec.numel),), spec.shape
            else:
                rows = spec.shard_rows(strategy.tp, shard)
                runs = tuple(Run(spec.offset + a * spec.row_size, (b - a) * spec.row_size) for a, b in rows)
                local = list(spec.shape)
                local[spec.shard_dim] = sum(b - a for a, b in rows)
                shape = tuple(local)
            slot = Slot(spec, segment.index, filled[segment.index], shape, runs)
            slots.append(slot)
            filled[segment.index] += slot.numel
    return tuple(slots)


def _layout(name: str, intervals: list[list[Interval]], sizes: list[list[int]]) -> Layout:
    return Layout(name, tuple(tuple(sorted(held)) for held in intervals), tuple(map(tuple, sizes)))


def _sizes(vector: ParameterVector, slots: tuple[Slot, ...]) -> list[int]:
    sizes = [0] * len(vector.segments)
    for slot in slots:
        sizes[slot.segment] += slot.numel
    return sizes


def strategy_layout(vector: ParameterVector, strategy: Strategy) -> Layout:
    """The layout of the weights under a strategy."""
    held, sizes = [], []
    for rank in range(strategy.world_size):
        slots = rank_slots(vector, strategy, rank)
        held.append([interval for slot in slots for interval in slot.intervals()])
        sizes.append(_sizes(vector, slots))
    return _layout(str(strategy), held, sizes)


def gradient_layout(vector: ParameterVector, strategy: Strategy) -> Layout:
    """What each rank adds to the gradient, as intervals of its gradient buffers (shaped like its weight buffers).

    A sharded parameter, and one with partial gradients, is added by every holder (replicated key/value heads hold
    different parts of the sum). A parameter that all tp coordinates hold with identical gradients is added in disjoint
    1/tp stretches, so that nothing is counted twice and every coordinate sends an equal share. Frozen ones add nothing.
    """
    held, sizes = [], []
    for rank in range(strategy.world_size):
        slots, tp, coord = rank_slots(vector, strategy, rank), strategy.tp, strategy.coord(rank)
        intervals = []
        for slot in slots:
            if not slot.spec.trainable:
                continue
            if slot.spec.shard_dim is not None or slot.spec.partial_gradient or tp == 1:
                intervals += slot.intervals()
                continue
            low, high = slot.numel * coord.tp // tp, slot.numel * (coord.tp + 1) // tp
            if high > low:
                start = slot.spec.offset
                intervals.append(Interval(start + low, start + high, slot.segment, slot.offset + low))
        held.append(intervals)
        sizes.append(_sizes(vector, slots))
    return _layout(f"gradients of {strategy}", held, sizes)


def master_layout(vector: ParameterVector, world_size: int) -> Layout:
    """The layout of the master store: every segment cut evenly over all ranks, so that loading a layer draws on all."""
    held: list[list[Interval]] = [[] for _ in range(world_size)]
    sizes = [[0] * len(vector.segments) for _ in range(world_size)]
    for segment in vector.segments:
        blocks = -(-segment.numel // MASTER_ALIGNMENT)
        for rank in range(world_size):
            low = min(blocks * rank // world_size * MASTER_ALIGNMENT, segment.numel)
            high = min(blocks * (rank + 1) // world_size * MASTER_ALIGNMENT, segment.numel)
            if high > low:
                held[rank].append(Interval(segment.start + low, segment.start + high, segment.index, 0))
                sizes[rank][segment.index] = high - low
    return _layout("master store", held, sizes)
