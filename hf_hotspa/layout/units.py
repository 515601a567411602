"""Units: the embedding, each layer and the head, as fully sharded strategies (`+z2`, `+z3`) load and return them.

Owns which segments of a strategy are *streamed*, that is, are there for one unit at a time, in which unit each of them
is, in which order a stage runs its units, and which units share memory. All units of a stage lie in one buffer, as large
as two that follow one another: in the order of a forward pass, every second one begins at its start, the others end at its
end. So the place of a unit never changes, *neighbours* never share memory, and what comes next can be loaded while a unit
computes. All others are taken to share it.

Weights that a unit shares with another one (tied embeddings) stay for the whole phase: they are *resident*. Plain data,
no torch; ZeRO's stages 2 and 3 are those of Rajbhandari et al. (SC'20, section 5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from hf_hotspa.layout.placement import stage_of_unit
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, ParameterVector
from hf_hotspa.strategy import Strategy

Room = int
"""The number of a unit in the order of a forward pass. Segments of a unit lie one after the other."""

N = TypeVar("N")


def sizes_of_neighbours(sizes: Mapping[Room, N]) -> list[N]:
    """What each unit needs together with the one behind it; the largest of these is the size of a buffer for all."""
    return [own + sizes[room + 1] if room + 1 in sizes else own for room, own in sizes.items()]  # type: ignore[operator]


def name_of_unit(unit: int) -> str:
    """What messages call a unit."""
    return {EMBEDDING: "embedding", HEAD: "head"}.get(unit, f"layer {unit}")


@dataclass(frozen=True)
class Units:
    vector: ParameterVector

    @cached_property
    def resident(self) -> tuple[int, ...]:
        """The segments with a weight that several units use."""
        return tuple(s.index for s in self.vector.segments if any(map(_is_shared, self.vector.specs_of(s))))

    @cached_property
    def segments(self) -> dict[int, tuple[int, ...]]:
        """The streamed segments of each unit that has any."""
        by_unit: dict[int, tuple[int, ...]] = {}
        for segment in self.vector.segments:
            if segment.index not in self.resident:
                by_unit[segment.unit] = (*by_unit.get(segment.unit, ()), segment.index)
        return by_unit

    @cached_property
    def trained(self) -> dict[int, tuple[int, ...]]:
        """Of these, the trained ones."""
        trained = {
            unit: tuple(s for s in segments if self.vector.segments[s].trainable)
            for unit, segments in self.segments.items()
        }
        return {unit: segments for unit, segments in trained.items() if segments}

    def room(self, unit: int) -> Room:
        """Where a unit comes in a forward pass."""
        return {EMBEDDING: 0, HEAD: len(self.vector.layer_costs) + 1}.get(unit, unit + 1)

    def share(self, one: int, other: int) -> bool:
        """Whether two units are not there at a time: a unit and itself, and all but neighbours."""
        return abs(self.room(one) - self.room(other)) != 1

    def of_stage(self, strategy: Strategy, stage: int) -> tuple[int, ...]:
        """The units that a stage runs, in the order of their forward pass."""
        layers = range(len(self.vector.layer_costs))
        order = [EMBEDDING, *layers, HEAD]
        return tuple(u for u in order if u in self.segments and stage_of_unit(self.vector, strategy, u) == stage)

    def backward_of_stage(self, strategy: Strategy, stage: int) -> tuple[int, ...]:
        """The units of a stage that a backward pass goes through, in its order.

        A later stage owes the gradient of its input to the one before. The first one ends at the first unit, in forward
        order, that has something to train.
        """
        units = self.of_stage(strategy, stage)
        if stage == 0:
            trained = {segment.unit for segment in self.vector.segments if segment.trainable}
            order = (EMBEDDING, *units) if EMBEDDING not in units else units
            first = next((i for i, unit in enumerate(order) if unit in trained), len(order))
            units = tuple(unit for unit in order[first:] if unit in units)
        return units[::-1]

    def rooms(self, strategy: Strategy) -> "Rooms":
        """What shares memory under a strategy."""
        none: tuple[Room | None, ...] = (None,) * len(self.vector.segments)
        shared = tuple(
            None if segment.index in self.resident else self.room(segment.unit) for segment in self.vector.segments
        )
        return Rooms(shared if strategy.z == 3 else none, shared if strategy.z else none)


def _is_shared(spec: ParameterSpec) -> bool:
    return spec.in_head or bool(spec.tied_names)


@dataclass(frozen=True)
class Rooms:
    """Which segments share memory, by segment: the room of its unit; None for a segment with memory of its own."""

    weights: Sequence[Room | None]
    gradients: Sequence[Room | None]
