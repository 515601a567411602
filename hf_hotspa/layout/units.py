"""Units: the embedding, each layer and the head, as fully sharded strategies (`+z2`, `+z3`) load and return them.

Defines which segments are *streamed* (present for one unit at a time), the order of a stage's units, and which units
share memory. All units of a stage lie in one buffer, as large as the largest two consecutive units. In forward order,
even units begin at its start and odd units end at its end. So a unit's place never changes, *neighbours* never share
memory, and the next unit can load while one computes. All other pairs count as sharing memory.

Weights that several units use (tied embeddings) stay for the complete phase: they are *resident*.
ZeRO stages 2 and 3: Rajbhandari et al. (SC'20, section 5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from hf_hotspa.layout.placement import stage_of_unit
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, ParameterVector
from hf_hotspa.strategy import Strategy

Room = int
"""Position of a unit in forward order. The segments of a unit lie one after the other."""

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
        return tuple(s.index for s in self.vector.segments if any(map(_is_shared, self.vector.specs_of(s))))

    @cached_property
    def segments(self) -> dict[int, tuple[int, ...]]:
        """Streamed segments by unit, for units that have any."""
        by_unit: dict[int, tuple[int, ...]] = {}
        for segment in self.vector.segments:
            if segment.index not in self.resident:
                by_unit[segment.unit] = (*by_unit.get(segment.unit, ()), segment.index)
        return by_unit

    @cached_property
    def trained(self) -> dict[int, tuple[int, ...]]:
        """Trained streamed segments by unit, for units that have any."""
        trained = {
            unit: tuple(s for s in segments if self.vector.segments[s].trainable)
            for unit, segments in self.segments.items()
        }
        return {unit: segments for unit, segments in trained.items() if segments}

    def room(self, unit: int) -> Room:
        """Position of a unit in a forward pass."""
        return {EMBEDDING: 0, HEAD: len(self.vector.layer_costs) + 1}.get(unit, unit + 1)

    def share(self, one: int, other: int) -> bool:
        """Whether two units share memory: all pairs except neighbours."""
        return abs(self.room(one) - self.room(other)) != 1

    def of_stage(self, strategy: Strategy, stage: int) -> tuple[int, ...]:
        """The units of a stage in forward order."""
        layers = range(len(self.vector.layer_costs))
        order = [EMBEDDING, *layers, HEAD]
        return tuple(u for u in order if u in self.segments and stage_of_unit(self.vector, strategy, u) == stage)

    def backward_of_stage(self, strategy: Strategy, stage: int) -> tuple[int, ...]:
        """The units of a stage that its backward pass visits, in order.

        Later stages visit all units: the previous stage needs the gradient of their input. Stage 0 stops at its first
        unit, in forward order, with a trained parameter.
        """
        units = self.of_stage(strategy, stage)
        if stage == 0:
            trained = {segment.unit for segment in self.vector.segments if segment.trainable}
            order = (EMBEDDING, *units) if EMBEDDING not in units else units
            first = next((i for i, unit in enumerate(order) if unit in trained), len(order))
            units = tuple(unit for unit in order[first:] if unit in units)
        return units[::-1]

    def rooms(self, strategy: Strategy) -> "Rooms":
        """The shared memory of a strategy's weights and gradients."""
        none: tuple[Room | None, ...] = (None,) * len(self.vector.segments)
        shared = tuple(
            None if segment.index in self.resident else self.room(segment.unit) for segment in self.vector.segments
        )
        return Rooms(shared if strategy.z == 3 else none, shared if strategy.z else none)


def _is_shared(spec: ParameterSpec) -> bool:
    return spec.in_head or bool(spec.tied_names)


@dataclass(frozen=True)
class Rooms:
    """For each segment the room of its unit; None for a segment with separate memory."""

    weights: Sequence[Room | None]
    gradients: Sequence[Room | None]
