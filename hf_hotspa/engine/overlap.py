"""Couples a replica to the switches that run beside it: when a weight may be used, when a gradient is final.

* `WeightGuard`: before a module first runs in a phase, it waits for the segments of its parameters. A decoder layer
  waits for all of its parameters at once; outside the layers each module waits for its own. A parameter that no module
  announced in the first forward is an error: it may have had the values of another phase.
* `GradientWatch`: a segment's gate opens when the backward of the last micro-batch has added to each of its parameters
  on this rank, at the latest at the end of the computation (unused parameters, no micro-batches).
* `UnitStream`: the same for a strategy whose units come and go one at a time (`+z2`, `+z3`).

Each registers its hooks once. Between phases, and if nothing is pending, a hook is one comparison.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from hf_hotspa.engine.executor import Buffers, SegmentGate, SwitchJob
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.engine.switching import Switching
from hf_hotspa.errors import ModelError
from hf_hotspa.layout.placement import Slot
from hf_hotspa.layout.vector import EMBEDDING, HEAD
from hf_hotspa.model.pass_through import modules_of_units
from hf_hotspa.model.replica import Replica
from hf_hotspa.plan.units import Program, StagePass, Units, Visit, name_of_unit

# -- the weights and gradients of a phase ------------------------------------------------------------------------------


class WeightGuard:
    """Makes the modules of a replica wait for their weights. `model`: the replica's model. Only modules that are called
    (not only their `forward`) can be guarded. `layers`: its decoder layers; layers of other stages own nothing.
    `parameters`: with their slots."""

    def __init__(
        self, model: nn.Module, layers: Iterable[nn.Module], parameters: Sequence[tuple[nn.Parameter, Slot]]
    ) -> None:
        # nothing ever arrives for an empty shard
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
        """Makes modules wait for this load, except for segments that are already there."""
        self._job, self._there = job, frozenset(there)
        self._pending = set(range(len(self._guarded)))
        self._unseen = set(self._slots)

    def disarm(self) -> None:
        """Stops waiting."""
        self._job = None

    def check(self) -> None:
        """Runs at the end of every forward of the replica. Raises `ModelError`: after the first forward, if no module
        waited for a parameter."""
        if self._job is None:
            return
        if self._unseen:
            names = sorted(self._slots[parameter].spec.name for parameter in self._unseen)
            raise ModelError(
                f"no module that owns {names[0]!r} was called in the forward ({len(names)} such parameters)",
                why="while weights are loaded beside the computation, a module waits for its weights when it is called; "
                "used in another way they could still be the weights of another phase",
                fix="turn the overlap of loads off: overlap_load=False, --hotspa_overlap_load off",
            )
        self._job = None

    def _before(self, index: int, module: nn.Module, args: object) -> None:
        if self._job is None or index not in self._pending:
            return
        parameters, segments = self._guarded[index]
        self._job.wait(segments - self._there)
        self._pending.discard(index)
        self._unseen -= parameters


class GradientWatch:
    """Opens the gates of a gradient return."""

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Slot]]) -> None:
        watched = [(parameter, slot) for parameter, slot in parameters if slot.spec.trainable and slot.numel]
        self._watched = [slot for _, slot in watched]
        self._gate: SegmentGate | None = None
        self._expected = 0
        self._counts: list[int] = []
        self._left: dict[int, int] = {}
        for index, (parameter, _) in enumerate(watched):
            # the hook stays with the parameter, whatever its storage
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, index))

    @property
    def segments(self) -> frozenset[int]:
        """Segments with gradients from this rank."""
        return frozenset(slot.segment for slot in self._watched)

    def arm(self, gate: SegmentGate, num_backwards: int) -> None:
        """Counts `num_backwards` for a gate that is closed for `segments`; with 0, all gradients are final."""
        self._gate, self._expected = gate, num_backwards
        self._counts = [0] * len(self._watched)
        self._left = dict.fromkeys(self.segments, 0)
        for slot in self._watched:
            self._left[slot.segment] += 1
        if num_backwards == 0:
            self.disarm()

    def disarm(self) -> None:
        """Opens all closed segments: the computation is over."""
        if self._gate is not None:
            self._gate.open()
            self._gate = None

    def drop(self) -> None:
        """Stops counting and opens nothing: the computation failed."""
        self._gate = None

    def _accumulated(self, index: int, parameter: Tensor) -> None:
        """Called by autograd once per backward and parameter; on CUDA from its own thread and stream."""
        if self._gate is None:
            return
        slot = self._watched[index]
        self._counts[index] += 1
        if self._counts[index] > self._expected:
            raise ModelError(
                f"the gradient of {slot.spec.name!r} was added to {self._counts[index]} times in "
                f"{self._expected} backward passes",
                why="a part of it would be missing in what was already sent",
                fix="turn the overlap of gradient returns off: overlap_return=False, --hotspa_overlap_return off",
            )
        if self._counts[index] == self._expected:
            self._left[slot.segment] -= 1
            if not self._left[slot.segment]:
                self._gate.open((slot.segment,))


class Beside:
    """A phase's switches beside its computation: a load, or a return of gradients, or both."""

    def __init__(self, parts: Sequence[Replica], loads: bool, returns: bool) -> None:
        # of each stage, for loads; none if they are over before the computation begins
        self.guards = [WeightGuard(part.model, part.layers, part.parameters) for part in parts if loads]
        for part, guard in zip(parts, self.guards, strict=False):
            part.check_weights = guard.check
        parameters = [parameter for part in parts for parameter in part.parameters]
        self.watch = GradientWatch(parameters) if returns else None  # for returns; None if they begin after it
        self.load_job: SwitchJob | None = None
        self.return_job: SwitchJob | None = None

    def begin_load(self, job: SwitchJob, there: Collection[int]) -> None:
        """Makes modules wait for a load, except for segments that are already there."""
        self.load_job = job
        for guard in self.guards:
            guard.arm(job, there)

    def disarm(self) -> None:
        """The computation is over, and the load: opens the gates of all gradients."""
        self.load_job = None
        for guard in self.guards:
            guard.disarm()
        if self.watch is not None:
            self.watch.disarm()

    def drop(self) -> None:
        """Forgets the phase; opens nothing, as the computation may have failed."""
        self.load_job = self.return_job = None
        for guard in self.guards:
            guard.disarm()
        if self.watch is not None:
            self.watch.drop()


# -- units, one at a time ----------------------------------------------------------------------------------------------

# Streams a replica's units through memory for two of them: weights come just in time, gradients leave once made.
#
# `UnitStream` submits all transfers of a phase's program (`plan.units`) to the switch worker at the start, in the agreed
# order, each with a gate. At the border between two units the computation opens the gates of what waited for the first and
# waits for the weights of the second: where a layer, or a module outside the layers that owns weights, is called; and in the
# backward where the gradient of a layer's output is there (for the embedding: of the first layer's input). Autograd runs
# what was made last first, and adds to leaves at once, so nothing of the following layer is left to do then.
#
# A rank skips other replicas' passes: their gates open once its previous pass is over, and it sends zeros as gradients,
# set by the worker when the transfer's turn comes. So it takes part in every transfer, and these wait for nothing later
# in the agreed order: neither for a message of another stage, nor for its next pass.
#
# Backward sees the right weights although their memory was used in between: a unit has one place, so what autograd
# saved is a view of it, and the unit is loaded again before its backward begins. Views that are filled through the
# arena's buffer keep the version that autograd has seen. Another order than the program's is an error before a wrong
# weight is read.


class _Transfer(NamedTuple):
    """The gate is None if the transfer waits for nothing."""

    job: SwitchJob
    gate: SegmentGate | None
    is_load: bool


class UnitStream:
    """Streams the units of one replica, with hooks on its modules."""

    def __init__(self, replica: Replica, switching: Switching) -> None:
        self._replica, self._switching = replica, switching
        self._units: Units = switching.pool.units
        strategy, stage = replica.mesh.strategy, replica.mesh.coord.pp
        self._strategy, self._stage = strategy, stage
        self._transfers: list[_Transfer] = []
        self._gradients: Buffers = ()
        self._passes: list[StagePass] = []
        self._left: list[Visit] = []
        self._visit: Visit | None = None
        self._is_backward = self._is_running = False
        self._hang_hooks(self._units.of_stage(strategy, stage))

    # -- borders ------------------------------------------------------------------------------------------------------

    def _hang_hooks(self, units: Sequence[int]) -> None:
        segment_unit = {s: unit for unit, segments in self._units.segments.items() for s in segments}
        unit_of = {id(p): segment_unit.get(slot.segment) for p, slot in self._replica.parameters}
        has_embedding, is_first = EMBEDDING in self._units.backward_of_stage(self._strategy, self._stage), True
        for unit, layer in enumerate(self._replica.layers):
            if unit not in units:
                continue
            if is_first and has_embedding:
                layer.register_forward_pre_hook(self._enters_layers, with_kwargs=True)
            is_first = False
            layer.register_forward_pre_hook(partial(self._called, unit))
            layer.register_forward_hook(partial(self._left_layer, unit))
        replica = self._replica
        for unit, module in modules_of_units(replica.model, replica.layers, lambda weight: unit_of[id(weight)]):
            module.register_forward_pre_hook(partial(self._called, unit))

    def _called(self, unit: int, module: nn.Module, args: object) -> None:
        if self._is_running:
            self._enter(unit)

    def _enters_layers(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_running and not self._is_backward:
            self._watch(args[0] if args else kwargs.get("hidden_states"), EMBEDDING)

    def _left_layer(self, unit: int, module: nn.Module, args: object, out: object) -> None:
        if self._is_running and not self._is_backward:  # a backward pass may recompute a layer
            self._watch(out[0] if isinstance(out, tuple | list) else out, unit)

    def _watch(self, hidden: object, unit: int) -> None:
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(partial(self._gradient_came, unit))

    def _gradient_came(self, unit: int, gradient: Tensor) -> None:
        if self._is_running and self._is_backward:
            self._enter(unit)

    # -- a phase ------------------------------------------------------------------------------------------------------

    def begin(self, program: Program, weights: Buffers, gradients: Buffers, master: MasterStore) -> None:
        """Submits all transfers of a phase; the program is the same on all ranks. Collective."""
        device, mine = self._replica.device, program.stages[self._stage]
        waits = {index for one in mine for visit in one.visits for index in visit.opens}
        of_others = {i for one in mine if self._is_foreign(one) for visit in one.visits for i in visit.opens}
        self._gradients, self._passes, self._left = gradients, list(mine), []
        self._visit, self._is_backward, self._is_running = None, False, True
        self._transfers = []
        for index, (unit, is_load) in enumerate(program.transfers):
            segments = (self._units.segments if is_load else self._units.trained)[unit]
            gate = SegmentGate(segments, device) if index in waits else None
            source, target = (master.weights, weights) if is_load else (gradients, master.gradients)
            cleared = segments if not is_load and index in of_others else ()
            plan = self._switching.pool.unit_plan(self._strategy, unit, is_load)
            job = self._switching.start(plan, source, target, None, gate, True, cleared)
            self._transfers.append(_Transfer(job, gate, is_load))
        self._skip_passes()

    def begin_pass(self) -> None:
        """Starts the next pass of this replica."""
        if not self._is_running:
            return
        if not self._passes:
            raise self._disordered("a pass that is not in the program")
        current = self._passes.pop(0)
        self._is_backward, self._left = current.is_backward, list(current.visits)
        if self._is_backward and self._left:
            self._advance()

    def end_pass(self) -> None:
        """Ends the pass, and skips other replicas' following passes: this replica's next pass may wait for another
        stage, which waits for the units released here."""
        if self._is_running:
            self._close_pass()
            self._skip_passes()

    def _skip_passes(self) -> None:
        while self._passes and self._is_foreign(self._passes[0]):
            for visit in self._passes.pop(0).visits:
                self._open(visit)

    def _is_foreign(self, one: StagePass) -> bool:
        return self._replica.mesh.coord.dp not in one.replicas

    def end(self) -> None:
        """Ends the phase: waits for all transfers."""
        if not self._is_running:
            return
        if self._passes:
            raise self._disordered("fewer passes than are in the program")
        for transfer in self._transfers:
            transfer.job.result()
        self._is_running = False

    def measure(self) -> dict[str, float]:
        """Times and bytes of the finished phase's transfers, by the names of `MEASURES`."""
        measured = dict[str, float]()
        for kind, is_load in (("unit_load", True), ("unit_return", False)):
            jobs = [transfer.job for transfer in self._transfers if transfer.is_load == is_load]
            measured[f"{kind}_s"] = sum(job.exposed_s for job in jobs)
            measured[f"{kind}_busy_s"] = sum(job.busy_s for job in jobs)
            measured[f"{kind}_bytes"] = float(sum(job.result().sent_bytes for job in jobs))
        return measured

    def drop(self) -> None:
        """Forgets the phase; after a failure its jobs must be cancelled first."""
        self._is_running = False
        self._transfers, self._passes, self._left = [], [], []
        self._visit, self._gradients = None, ()

    # -- visits -------------------------------------------------------------------------------------------------------

    def _enter(self, unit: int) -> None:
        if self._visit is not None and self._visit.unit == unit:
            return
        if not self._left or self._left[0].unit != unit:
            raise self._disordered(f"the {name_of_unit(unit)}")
        self._advance()

    def _advance(self) -> None:
        self._leave()
        visit = self._left.pop(0)
        if visit.load >= 0:
            self._transfers[visit.load].job.wait(self._units.segments[visit.unit])
        self._clear_gradient(visit)
        self._visit = visit

    def _leave(self) -> None:
        if self._visit is not None:
            self._open(self._visit)
            self._visit = None

    def _open(self, visit: Visit) -> None:
        for index in visit.opens:
            if (gate := self._transfers[index].gate) is not None:
                gate.open()

    def _clear_gradient(self, visit: Visit) -> None:
        if not self._is_backward:
            return
        if visit.after >= 0:
            self._transfers[visit.after].job.result()
        for segment in self._units.trained.get(visit.unit, ()):
            gradient = self._gradients[segment]
            if gradient is not None:
                gradient.zero_()

    def _close_pass(self) -> None:
        left = [visit.unit for visit in self._left]
        # a forward pass only for keys and values may end before the head
        if left and (self._is_backward or left != [HEAD]):
            raise self._disordered(f"a pass that ends before the {name_of_unit(left[0])}")
        self._leave()
        for visit in self._left:
            self._open(visit)
        self._left = []

    def _disordered(self, what: str) -> ModelError:
        at = name_of_unit(self._visit.unit) if self._visit is not None else "beginning"
        expected = name_of_unit(self._left[0].unit) if self._left else "end of the pass"
        return ModelError(
            f"{type(self._replica.model).__name__} under {self._strategy}: {what} instead of the expected {expected}",
            where=f"{'backward' if self._is_backward else 'forward'} pass, after the {at}",
            why="the weights of embedding, layers and head are in memory one after the other, in this order",
            fix=f"leave +z{self._strategy.z} out of this model's strategies, and report the model_type",
        )
