"""Units: the embedding, each layer and the head, as fully sharded strategies (`+z2`, `+z3`) load and return them.

Owns which segments of a strategy are *streamed*, that is, are there for one unit at a time, in which unit each of them
is, in which order a stage runs its units, and which units share memory. A stage has three *slots*: the embedding and
the head take turns in one, layers of even and of odd index in the others. So the place of a unit never changes, two
units that follow one another never share memory, and what comes next can be loaded while a unit computes.

Weights that a unit shares with another one (tied embeddings) stay for the whole phase: they are *resident*. Plain data,
no torch; ZeRO's stages 2 and 3 are those of Rajbhandari et al. (SC'20, section 5).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_hotspa.layout.placement import stage_of_unit
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, ParameterVector
from hf_hotspa.strategy import Strategy

Room = tuple[int, int]
"""`(slot, unit)`: segments of a unit lie one after the other in its slot, each unit from the start of the slot."""


def slot_of(unit: int) -> int:
    """The slot of a unit."""
    return 0 if unit in (EMBEDDING, HEAD) else 1 + unit % 2


def name_of_unit(unit: int) -> str:
    """What messages call a unit."""
    return {EMBEDDING: "embedding", HEAD: "head"}.get(unit, f"layer {unit}")


@dataclass(frozen=True)
class Units:
    """The units of a model.

    Args:
        vector: All parameters.
    """

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
            None if segment.index in self.resident else (slot_of(segment.unit), segment.unit)
            for segment in self.vector.segments
        )
        return Rooms(shared if strategy.z == 3 else none, shared if strategy.z else none)


def _is_shared(spec: ParameterSpec) -> bool:
    return spec.in_head or bool(spec.tied_names)


@dataclass(frozen=True)
class Rooms:
    """Which segments share memory, by segment: those of one slot do, where they are of different units; None for a
    segment with memory of its own.

    Args:
        weights: For weights.
        gradients: For gradients.
    """

    weights: Sequence[Room | None]
    gradients: Sequence[Room | None]
