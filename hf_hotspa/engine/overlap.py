"""Couples a replica to the switches that run beside it: when a weight may be used, when a gradient is final.

* `WeightGuard`: before a module first runs in a phase, it waits for the segments of its parameters. A decoder layer
  waits for all of its parameters at once; outside the layers each module that owns parameters waits for those. A
  parameter that no module announced in the first forward is an error: its values may have been those of another phase.
* `GradientWatch`: a segment's gate opens when the backward of the last micro-batch has added to each of its parameters
  on this rank, and at the end of the computation at the latest (unused parameters, no micro-batches).

Both hang hooks on the replica once; between phases, and where nothing is pending, a hook is one comparison.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_hotspa.engine.executor import SegmentGate, SwitchJob
from hf_hotspa.errors import ModelError
from hf_hotspa.layout.placement import Slot


class WeightGuard:
    """Makes the modules of a replica wait for their weights.

    Args:
        model: The replica's model. Only modules that are called (not their `forward` alone) can be guarded.
        layers: Its decoder layers; those of other stages own nothing.
        parameters: The replica's parameters and where they lie.
    """

    def __init__(
        self, model: nn.Module, layers: Iterable[nn.Module], parameters: Sequence[tuple[nn.Parameter, Slot]]
    ) -> None:
        # a shard may be empty: nothing of it ever arrives
        self._slots = {id(parameter): slot for parameter, slot in parameters if slot.numel}
        self._guarded: list[tuple[frozenset[int], frozenset[int]]] = []
        self._job: SwitchJob | None = None
        self._there: frozenset[int] = frozenset()
        self._pending: set[int] = set()
        self._unseen: set[int] = set()
        inside: set[int] = set()
        for layer in layers:
            inside.update(map(id, layer.modules()))
            self._guard(layer, layer.parameters())
        for module in model.modules():
            if id(module) not in inside:
                self._guard(module, module.parameters(recurse=False))

    def _guard(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        own = frozenset(id(parameter) for parameter in parameters if id(parameter) in self._slots)
        if own:
            module.register_forward_pre_hook(partial(self._before, len(self._guarded)))
            self._guarded.append((own, frozenset(self._slots[parameter].segment for parameter in own)))

    def arm(self, job: SwitchJob, there: Collection[int] = ()) -> None:
        """From now on modules wait for this load, but not for the segments that are there already."""
        self._job, self._there = job, frozenset(there)
        self._pending = set(range(len(self._guarded)))
        self._unseen = set(self._slots)

    def disarm(self) -> None:
        """Nothing is pending any more."""
        self._job = None

    def check(self) -> None:
        """Called at the end of every forward of the replica.

        Raises:
            ModelError: after the first one, where a parameter was not waited for.
        """
        if self._job is None:
            return
        if self._unseen:
            names = sorted(self._slots[parameter].spec.name for parameter in self._unseen)
            raise ModelError(
                f"no module that owns {names[0]!r} was called in the forward ({len(names)} such parameters)",
                why="while weights are loaded beside the computation, a module waits for its own when it is called; "
                "used in another way they could be those of another phase",
                fix="turn the overlap of loads off: overlap_load=False, --hotspa_overlap_load off",
            )
        self._job = None

    def _before(self, index: int, module: nn.Module, args: Any) -> None:
        if self._job is None or index not in self._pending:
            return
        parameters, segments = self._guarded[index]
        self._job.wait(segments - self._there)
        self._pending.discard(index)
        self._unseen -= parameters


class GradientWatch:
    """Opens the gates of a gradient return.

    Args:
        parameters: The replica's parameters and where they lie.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Slot]]) -> None:
        watched = [(parameter, slot) for parameter, slot in parameters if slot.spec.trainable and slot.numel]
        self._watched = [slot for _, slot in watched]
        self._gate: SegmentGate | None = None
        self._expected = 0
        self._counts: list[int] = []
        self._left: dict[int, int] = {}
        for index, (parameter, _) in enumerate(watched):
            # the hook stays with the parameter, whatever storage it is bound to
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, index))

    @property
    def segments(self) -> frozenset[int]:
        """Those of which this rank computes a gradient."""
        return frozenset(slot.segment for slot in self._watched)

    def arm(self, gate: SegmentGate, num_backwards: int) -> None:
        """Starts to count.

        Args:
            gate: Closed for `segments`.
            num_backwards: How many this rank will run; with none, all gradients are final now.
        """
        self._gate, self._expected = gate, num_backwards
        self._counts = [0] * len(self._watched)
        self._left = dict.fromkeys(self.segments, 0)
        for slot in self._watched:
            self._left[slot.segment] += 1
        if num_backwards == 0:
            self.disarm()

    def disarm(self) -> None:
        """The computation is over: opens what is still closed."""
        if self._gate is not None:
            self._gate.open()
            self._gate = None

    def drop(self) -> None:
        """Stops to count and opens nothing: the computation failed."""
        self._gate = None

    def _accumulated(self, index: int, parameter: Tensor) -> None:
        """Called by autograd once a backward for each parameter; on CUDA from autograd's own thread and stream."""
        if self._gate is None:
            return
        slot = self._watched[index]
        self._counts[index] += 1
        if self._counts[index] > self._expected:
            raise ModelError(
                f"the gradient of {slot.spec.name!r} was added to {self._counts[index]} times in "
                f"{self._expected} backward passes",
                why="a part of it would be missing in what was sent already",
                fix="turn the overlap of gradient returns off: overlap_return=False, --hotspa_overlap_return off",
            )
        if self._counts[index] == self._expected:
            self._left[slot.segment] -= 1
            if not self._left[slot.segment]:
                self._gate.open((slot.segment,))
