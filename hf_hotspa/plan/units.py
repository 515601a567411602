"""Units: the embedding, each layer and the head, as fully sharded strategies (`+z2`, `+z3`) load and return them.

Defines which segments are *streamed* (present for one unit at a time), the order of a stage's units, and which units
share memory. All units of a stage lie in one buffer, as large as the largest two consecutive units. In forward order,
even units begin at its start and odd units end at its end. So a unit's place never changes, *neighbours* never share
memory, and the next unit can load while one computes. All other pairs count as sharing memory. Weights that several
units use (tied embeddings) stay for the complete phase: they are *resident*.

`make_program` puts the transfers of a phase in the one order in which every rank takes part, and turns the passes of
each stage (`packing.pipeline_order.beats`) into *visits*: a unit in a pass. A loaded unit is not loaded again where it is
still there: when a pass turns round. A load starts when its memory is free, at most two visits ahead; a return follows the
visit that made the gradient. The order cannot deadlock: it comes from one run in which all that a visit or transfer waits
for precedes it.

ZeRO stages 2 and 3: Rajbhandari et al. (SC'20, section 5). Plain data; no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeVar

from hf_hotspa.layout.placement import stage_of_unit
from hf_hotspa.layout.vector import BESIDE, EMBEDDING, HEAD, ParameterVector
from hf_hotspa.packing.pipeline_order import Beat
from hf_hotspa.strategy import Strategy

Room = int  # position of a unit in forward order. The segments of a unit lie one after the other
N = TypeVar("N")


def sizes_of_neighbours(sizes: Mapping[Room, N]) -> list[N]:
    """Returns the size of each unit plus its successor; the largest is the size of the buffer for all."""
    return [own + sizes[room + 1] if room + 1 in sizes else own for room, own in sizes.items()]  # type: ignore[operator]


def name_of_unit(unit: int) -> str:
    """The unit's name in messages."""
    return {EMBEDDING: "embedding", HEAD: "head"}.get(unit, f"layer {unit}")


@dataclass(frozen=True)
class Units:
    vector: ParameterVector

    @cached_property
    def resident(self) -> tuple[int, ...]:
        """Segments with a weight that several units use."""
        vector = self.vector
        return tuple(s.index for s in vector.segments if any(p.in_head or p.tied_names for p in vector.specs_of(s)))

    @cached_property
    def segments(self) -> dict[int, tuple[int, ...]]:
        """Streamed segments by unit, for units that have any."""
        by_unit: dict[int, tuple[int, ...]] = {}
        for segment in self.vector.segments:
            if segment.index not in self.resident and segment.unit != BESIDE:
                by_unit[segment.unit] = (*by_unit.get(segment.unit, ()), segment.index)
        return by_unit

    @cached_property
    def trained(self) -> dict[int, tuple[int, ...]]:
        """Trained streamed segments by unit, for units that have any."""
        of_vector = self.vector.segments
        trained = {unit: tuple(s for s in own if of_vector[s].trainable) for unit, own in self.segments.items()}
        return {unit: segments for unit, segments in trained.items() if segments}

    def room(self, unit: int) -> Room:
        """Position of a unit in a forward pass."""
        return {EMBEDDING: 0, HEAD: len(self.vector.layer_costs) + 1}.get(unit, unit + 1)

    def share(self, one: int, other: int) -> bool:
        """Whether two units share memory: all pairs except neighbours."""
        return abs(self.room(one) - self.room(other)) != 1

    def of_stage(self, strategy: Strategy, stage: int) -> tuple[int, ...]:
        """The units of a stage in forward order."""
        order = [EMBEDDING, *range(len(self.vector.layer_costs)), HEAD]
        return tuple(u for u in order if u in self.segments and stage_of_unit(self.vector, strategy, u) == stage)

    def backward_of_stage(self, strategy: Strategy, stage: int) -> tuple[int, ...]:
        """The units of a stage that its backward pass visits, in order.

        Later stages visit all units: the previous stage needs the gradient of their input. Stage 0 stops at its first
        unit, in forward order, with a trained parameter; with trained modules beside the strategies, whose outputs enter behind
        the embedding, at its first layer.
        """
        units = self.of_stage(strategy, stage)
        if stage == 0:
            trained = {segment.unit for segment in self.vector.segments if segment.trainable}
            order = (EMBEDDING, *units) if EMBEDDING not in units else units
            if BESIDE in trained:
                trained.update(order[1:2])
            first = next((i for i, unit in enumerate(order) if unit in trained), len(order))
            units = tuple(unit for unit in order[first:] if unit in units)
        return units[::-1]

    def rooms(self, strategy: Strategy) -> "Rooms":
        """The shared memory of a strategy's weights and gradients."""
        none: tuple[Room | None, ...] = (None,) * len(self.vector.segments)
        shared = tuple(None if s.index in self.resident else self.room(s.unit) for s in self.vector.segments)
        return Rooms(shared if strategy.z == 3 else none, shared if strategy.z else none)


@dataclass(frozen=True)
class Rooms:
    """For each segment the room of its unit; None for a segment with separate memory."""

    weights: Sequence[Room | None]
    gradients: Sequence[Room | None]


# -- the program of a phase --------------------------------------------------------------------------------------------

_AHEAD = 2  # a unit may be loaded after the visit two before its own


class UnitTransfer(NamedTuple):
    """A load or a return of one unit, on all ranks."""

    unit: int
    is_load: bool


class Visit(NamedTuple):
    """One unit in one pass of a stage."""

    unit: int
    load: int  # the transfer that brings its weights, perhaps for an earlier visit of other replicas; -1 if they stay
    # the transfers that may start after it: loads into its memory, and the return of its gradient
    opens: tuple[int, ...]
    after: int  # the return that must precede the next use of its gradient buffer; -1 for none


class StagePass(NamedTuple):
    """One pass of a stage, in which these replicas compute."""

    is_backward: bool
    replicas: tuple[int, ...]
    visits: tuple[Visit, ...]


@dataclass(frozen=True)
class Program:
    """A phase of streamed units: transfers in the order of all ranks, and each stage's passes."""

    transfers: tuple[UnitTransfer, ...]
    stages: tuple[tuple[StagePass, ...], ...]


class _Draft:
    def __init__(self, unit: int, is_backward: bool, index: int) -> None:
        self.unit, self.is_backward, self.index = unit, is_backward, index
        self.free = -1
        self.loads = False
        self.loaded_for = self
        self.load = self.after = -1
        self.opens: list[int] = []


class _Stage:
    """The visits of one stage, and its progress in the order."""

    def __init__(self, units: Units, strategy: Strategy, stage: int, passes: Sequence[tuple[bool, tuple[int, ...]]]):
        forward = units.of_stage(strategy, stage)
        backward = units.backward_of_stage(strategy, stage)
        self.passes = [
            (is_backward, replicas, backward if is_backward else forward) for is_backward, replicas in passes
        ]
        self.drafts: list[_Draft] = []
        self._units = units
        loaded_for: dict[int, _Draft] = {}  # unit -> the visit that it was loaded for
        for is_backward, _, visited in self.passes:
            for unit in visited:
                draft = _Draft(unit, is_backward, len(self.drafts))
                if strategy.z == 3 and unit in loaded_for:
                    draft.loaded_for = loaded_for[unit]
                elif strategy.z == 3:
                    draft.loads = True
                    earlier = (other.index for other in reversed(self.drafts) if units.share(unit, other.unit))
                    draft.free = next(earlier, -1)
                    loaded_for = {other: visit for other, visit in loaded_for.items() if not units.share(unit, other)}
                    loaded_for[unit] = draft
                self.drafts.append(draft)
        self._waiting = [draft for draft in self.drafts if draft.loads]
        self._returned: list[tuple[int, int]] = []

    def load_ahead(self, through: int, transfers: list[UnitTransfer]) -> None:
        """Adds the loads that may start after the visits up to `through`."""
        while self._waiting and max(self._waiting[0].index - _AHEAD, self._waiting[0].free) <= through:
            draft = self._waiting.pop(0)
            draft.load = len(transfers)
            if draft.free >= 0:
                self.drafts[draft.free].opens.append(draft.load)
            transfers.append(UnitTransfer(draft.unit, True))

    def end(self, index: int, transfers: list[UnitTransfer]) -> None:
        draft = self.drafts[index]
        self.load_ahead(index, transfers)
        if draft.is_backward and draft.unit in self._units.trained:
            draft.after = next((i for unit, i in reversed(self._returned) if self._units.share(unit, draft.unit)), -1)
            self._returned.append((draft.unit, len(transfers)))
            draft.opens.append(len(transfers))
            transfers.append(UnitTransfer(draft.unit, False))

    def stage_passes(self) -> tuple[StagePass, ...]:
        passes, begin = [], 0
        for is_backward, replicas, visited in self.passes:
            drafts = self.drafts[begin : begin + len(visited)]
            begin += len(visited)
            visits = tuple(Visit(d.unit, d.loaded_for.load, tuple(d.opens), d.after) for d in drafts)
            passes.append(StagePass(is_backward, replicas, visits))
        return tuple(passes)


def make_program(units: Units, strategy: Strategy, beats: Sequence[Beat]) -> Program:
    """Makes the transfers of a phase with `+z2` (returns gradients) or `+z3` (loads weights, too)."""
    transfers: list[UnitTransfer] = []
    passes: list[list[tuple[bool, tuple[int, ...]]]] = [[] for _ in range(strategy.pp)]
    for each in chain.from_iterable(beats):
        passes[each.stage].append((each.is_backward, each.replicas))
    stages = [_Stage(units, strategy, index, own) for index, own in enumerate(passes)]
    for stage in stages:
        stage.load_ahead(-1, transfers)
    at = [0] * strategy.pp  # finished visits
    number = [0] * strategy.pp  # finished passes
    for beat in beats:
        lengths = {p.stage: len(stages[p.stage].passes[number[p.stage]][2]) for p in beat}
        for step in range(max(lengths.values(), default=0)):
            for index in sorted(lengths):
                if step < lengths[index]:
                    stages[index].end(at[index], transfers)
                    at[index] += 1
        for p in beat:
            number[p.stage] += 1
    return Program(tuple(transfers), tuple(stage.stage_passes() for stage in stages))
