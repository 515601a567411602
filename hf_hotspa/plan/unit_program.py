"""The transfers of a phase that streams its units, in the one order in which every rank takes part.

Turns the passes of a phase (`packing.joint_passes`) into each stage's *visits*: a unit in a pass. A loaded unit is not loaded
again: the last two units of a forward pass serve the following backward pass, and the first two the next pack. A load
starts when its memory is free, at most two visits ahead; a return follows the visit that made the gradient.

The order cannot deadlock: it comes from one run in which all that a visit or transfer waits for precedes it. Plain
data, a pure function of the passes; no torch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_hotspa.layout.units import Units
from hf_hotspa.packing.joint_passes import Beat
from hf_hotspa.strategy import Strategy

_AHEAD = 2
"""A unit may be loaded after the visit two before its own."""


class UnitTransfer(NamedTuple):
    """A load or a return of one unit, on all ranks."""

    unit: int
    is_load: bool


class Visit(NamedTuple):
    """One unit in one pass of a stage.

    Attributes:
        load: The transfer that brings its weights, perhaps for an earlier visit of other replicas; -1 if they stay.
        opens: The transfers that may start after it: loads into its memory, and the return of its gradient.
        after: The return that must precede the next use of its gradient buffer; -1 for none.
    """

    unit: int
    load: int
    opens: tuple[int, ...]
    after: int


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

    def digest(self) -> str:
        """SHA-256 of everything; must be the same on all ranks."""
        return hashlib.sha256(repr((self.transfers, self.stages)).encode()).hexdigest()

    def count(self, unit: int, is_load: bool) -> int:
        """How often a unit is loaded, or returned."""
        return self.transfers.count(UnitTransfer(unit, is_load))


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
    stages = [
        _Stage(
            units, strategy, stage, [(p.is_backward, p.replicas) for beat in beats for p in beat if p.stage == stage]
        )
        for stage in range(strategy.pp)
    ]
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
