"""One strategy on this rank: its replica, its buffers, its schedule. Runs one phase at a time.

A phase (`run`) has three acts: `load` (weights from the master store, or also from the previous phase, into this
strategy's layout), `compute` (forward and backward of the micro-batches), `return_gradients` (gradients summed into the
master store). Between phases the strategy keeps only an empty model, and its weights if the next phase may draw on
them. Consecutive phases of equal layout (`Strategy.layout`) share these acts: the first loads, each adds to the same
gradients, the last returns them.

If switches run beside the computation (`Overlap`), `load` only starts one. `compute` starts the return, waits for each
weight and releases each gradient; it ends after the load. `return_gradients` waits for the rest of the return.
"""

import resource
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hf_hotspa.data.collator import MicroBatch, PhaseBatch, idle_micro_batch
from hf_hotspa.engine.executor import Buffers, SegmentGate, SwitchJob
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.engine.overlap import Beside, UnitStream
from hf_hotspa.engine.switching import MemoryForecast, Switching
from hf_hotspa.layout.placement import stage_of_unit
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.model.options import EngineOptions, Overlap
from hf_hotspa.model.replica import Replica
from hf_hotspa.model.specs import ModelDescription
from hf_hotspa.packing.bucketing import MiniBatchPlan, PhasePlan
from hf_hotspa.packing.pipeline_order import Operation, beats, joint_passes, pack_lengths
from hf_hotspa.parallel.collectives import CLOCK
from hf_hotspa.parallel.mesh import StrategyMesh
from hf_hotspa.parallel.pipeline import PackRunner, PipelineRunner
from hf_hotspa.plan.switch_plan import SwitchPlan
from hf_hotspa.plan.units import make_program
from hf_hotspa.report import COUNTED, MEASURES, PhaseMeasure, PhaseReport
from hf_hotspa.strategy import Strategy

# -- measures ---------------------------------------------------------------------------------------------------------

# What a rank measures in a phase, and how all ranks' measurements become reports.


class Observer(Protocol):
    """Receives the begin and end of each phase of a mini-batch. Must not raise or communicate."""

    def phase_begins(self, step: int, plan: MiniBatchPlan, order: Sequence[int], index: int) -> None:
        """Called before phase `order[index]` of mini-batch `step` (counted from 1) loads its weights."""

    def phase_ended(
        self, step: int, plan: MiniBatchPlan, order: Sequence[int], index: int, measured: PhaseMeasure
    ) -> None:
        """Called after its gradients are returned."""


def moment(device: torch.device) -> float:
    """The time when the current stream has caught up; not the device, because a switch may run in another stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """This rank's peak bytes: allocated by torch on an accelerator, resident on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


# -- phases -----------------------------------------------------------------------------------------------------------


class MiniBatchRun(NamedTuple):
    """What the phases of a mini-batch have in common."""

    step: int  # number of earlier mini-batches
    scale: float  # 1 / (label tokens of the mini-batch)
    since: float  # moment from which the starts of phases are counted
    training: bool  # whether the model is in training mode
    wait_for_all: Callable[[], None]  # returns when all ranks are here


class _Loaded(NamedTuple):
    """What a strategy's weight buffers hold."""

    store: MasterStore  # where the weights are from
    # what the arena is to record once they are complete: a later load of the same leaves out the frozen ones
    holder: Hashable = None
    there: frozenset[int] = frozenset()  # the segments that were there before the load
    frozen_bytes: int = 0  # of frozen weights that the load moved between ranks, summed over ranks


class PhaseRunner:
    """One strategy on this rank.

    Attributes:
        layout: The weight layout; equal layouts use the same buffers, filled in the same way.
        hands_over: Whether the next phase of the mini-batch continues with these weights and gradients.
        act: The current or last act: `load`, `compute` or `return`.
    """

    def __init__(
        self,
        description: ModelDescription,
        mesh: StrategyMesh,
        switching: Switching,
        master: MasterStore,
        buffers: Mapping[str, Tensor],
        overlap: Overlap,  # which switches to submit to a worker
        options: EngineOptions,  # the engine's options. If the first stage is frozen, the pipeline schedule is `own`.
    ) -> None:
        strategy, device = mesh.strategy, master.compute_device
        self.mesh, self.name, self.layout = mesh, str(strategy), strategy.layout
        self._switching, self._master = switching, master
        self._keeps_step, self._has_peers = strategy.keeps_step, strategy.world_size > 1
        self._places = switching.places(strategy)  # of weights, of gradients
        # this rank's stages, one or two with `+v2`, in pipeline order
        self.parts = [Replica(description, mesh, device, buffers, options, part) for part in range(strategy.v)]
        self.replica = self.parts[-1]  # the last of them, which has the loss if the pipeline ends here
        # torch's schedules differentiate the first stage's output
        schedule = options.pipeline_schedule if _trains_first_stage(description.vector, strategy) else "own"
        self._pair_cost = options.pair_costs.get(strategy.tp, description.shape.quadratic_cost)
        pad = description.config.get_text_config().pad_token_id
        pad = pad if isinstance(pad, int) and pad >= 0 else 0
        cut = (runner.packs(self.replica, strategy, self._pair_cost) for runner in options.runners)
        self._runner = self._packs = next((packs for packs in cut if packs is not None), PackRunner(self.replica))
        if mesh.pipeline is not None:
            self._runner = PipelineRunner(self.parts, mesh, self._packs, schedule, pad)
        self._stream: UnitStream | None = None
        if strategy.z:
            self._stream = UnitStream(self.replica, switching)
            self.replica.begin_pass, self.replica.end_pass = self._stream.begin_pass, self._stream.end_pass
        loads, returns = overlap.load and strategy.z != 3, overlap.return_gradients and not strategy.z
        self._beside = Beside(self.parts, loads, returns) if loads or returns else None
        self.act, self.hands_over = "load", False
        self._loaded = _Loaded(master)
        self.weights: list[Tensor | None] = []
        self._gradients: list[Tensor | None] = []

    def run(
        self,
        phase: PhaseBatch,  # what this rank runs
        plan: PhasePlan,  # what all ranks run
        together: MiniBatchRun,
        previous: "PhaseRunner | None",  # the phase before in the mini-batch
        following: "PhaseRunner | None",  # the phase after
        is_loaded: bool = False,  # whether `load_for_forward` has loaded the weights; graphs of packs may exist, too
    ) -> tuple[float, PhaseMeasure]:
        """Runs the complete phase: load, compute, return. Collective. Returns this rank's part of the loss, and its
        measurements."""
        device = self.replica.device
        self.hands_over = following is not None and following is not self and following.layout == self.layout
        for part in self.parts:
            part.begin_step(together.step)
            part.model.train(together.training)
        begin = time.perf_counter()
        if previous is not None and previous.hands_over:
            load = self._take_over(previous)
        else:
            load = self.load(previous, is_loaded)
        loaded = moment(device)
        if self._has_peers:
            CLOCK.restart(device)
        micro_batches: Sequence[MicroBatch] = phase.micro_batches
        if device.type != "cpu":
            micro_batches = [m.to(device, non_blocking=True) for m in micro_batches]
        most_tokens = phase.bucket.most_tokens if self.mesh.strategy.pp > 1 else None
        loss = float(self.compute(micro_batches, together.scale, most_tokens, not self.hands_over, plan))
        computed, units = moment(device), self._stream.measure() if self._stream is not None else {}
        if self._has_peers:  # waiting for the busiest replica does not count as switching
            together.wait_for_all()
        met = moment(device)
        returned = self._hand_over() if self.hands_over else self.return_gradients()
        return loss, self._measure(
            load, returned, units, together.since, (begin, loaded, computed, met, moment(device))
        )

    def _measure(
        self, load: SwitchJob, returned: SwitchJob, units: dict[str, float], since: float, moments: Sequence[float]
    ) -> PhaseMeasure:
        """The measurements of a phase, from the moments that divide its acts, the unit stream's `units`, and attachments."""
        begin, loaded, computed, met, end = moments
        measured = dict.fromkeys(MEASURES, 0.0) | units
        others_s = measured["unit_load_s"] + measured["unit_return_s"]
        for part in self.parts:
            for measures in part.calls["measures"]:
                for name, number in measures().items():
                    measured[name] += number
        return measured | {
            "load_s": loaded - begin + load.exposed_s, "compute_s": computed - loaded - load.exposed_s,
            "wait_s": met - computed, "return_s": end - met,
            "load_busy_s": load.busy_s, "return_busy_s": returned.busy_s,
            "load_bytes": float(load.stats.sent_bytes), "return_bytes": float(returned.stats.sent_bytes),
            "start_s": begin - since,
            "others_s": CLOCK.seconds() + others_s if self._has_peers else others_s,
        }  # fmt: skip

    def _take_over(self, previous: "PhaseRunner") -> SwitchJob:
        self.act, self._loaded = "load", previous._loaded._replace(frozen_bytes=0)
        self.weights, self._gradients = previous.weights, previous._gradients
        previous._gradients = []
        for part in self.parts:
            part.bind(self.weights, self._gradients)
        return SwitchJob(f"weights of {self.mesh.strategy}, which are there")

    def _hand_over(self) -> SwitchJob:
        self.act = "return"
        for part in self.parts:
            part.release()
        return SwitchJob(f"gradients of {self.mesh.strategy}, to which others are added")

    def load(self, previous: "PhaseRunner | None" = None, is_loaded: bool = False) -> SwitchJob:
        """Fills this strategy's weights and clears its gradients. Collective. `previous`: the mini-batch's previous
        phase; its weights are a second source if they are kept. `is_loaded`: whether `load_for_forward` has loaded the
        weights. Returns the load: finished, or running beside the computation; `compute` then waits for weights when it
        needs them."""
        if is_loaded:
            self.act, self._loaded = "load", self._loaded._replace(frozen_bytes=0)
            job = SwitchJob(f"weights of {self.mesh.strategy}, which are there")
        else:
            plan, second = self._take(previous, self._master)
            beside = self._beside if self._beside is not None and self._beside.guards else None
            job = self._switching.start(plan, self._master.weights, self.weights, second, beside=beside is not None)
            if beside is not None:
                beside.begin_load(job, self._loaded.there)
            else:
                self._switching.arenas.last.holder = self._loaded.holder
        self._gradients = self._switching.arenas.gradients.take(self._places[1])
        for gradient in self._gradients:
            if gradient is not None:
                gradient.zero_()
        for part in self.parts:
            part.bind(None if is_loaded else self.weights, self._gradients)
        return job

    def load_for_forward(self, store: MasterStore | None = None, training: bool = False) -> None:
        """Fills the weights from a store (by default the master store) for `compute_forward` only, without a gradient
        buffer, in training or eval mode. Collective."""
        plan, _ = self._take(None, store or self._master)
        self._switching.start(plan, self._loaded.store.weights, self.weights)
        self._switching.arenas.last.holder = self._loaded.holder
        for part in self.parts:
            part.bind(self.weights, None)
            part.model.train(training)

    def _take(self, previous: "PhaseRunner | None", store: MasterStore) -> tuple[SwitchPlan, Buffers | None]:
        """Takes the weight buffers; returns the plan that fills them, and its second source.

        If the buffers still hold these weights from an earlier load, the plan leaves out the frozen ones. Frozen weights
        in place are the store's; after they have changed, all ranks' shares are collected once.
        """
        self.act, switching, strategy = "load", self._switching, self.mesh.strategy
        keeps = switching.arenas.keeps_last and previous is not None and 3 not in (strategy.z, previous.mesh.strategy.z)
        kept = previous if keeps else None
        known = switching.pool.has_frozen and strategy.z != 3 and store is self._master
        holder = (str(self.layout), self._master.frozen_version) if known else None
        self.weights, again = switching.arenas.take_weights(self._places[0], holder)
        for segment, whole in store.in_place.items():
            self.weights[segment] = whole
        if store.in_place and not store.is_complete:
            switching.start(switching.pool.completion, store.weights, self.weights)
            store.completed = store.frozen_version
        plan = switching.pool.load(strategy, kept.mesh.strategy if kept else None, trained_only=again)
        frozen_bytes = switching.frozen_bytes(plan) if switching.frozen_segments else 0
        there = switching.frozen_segments if again else switching.pool.in_place
        self._loaded = _Loaded(store, holder, there, frozen_bytes)
        return plan, kept.weights if kept else None

    def compute(
        self,
        micro_batches: Sequence[MicroBatch],
        scale: float,  # 1 / (label tokens of the mini-batch)
        most_tokens: int | None = None,  # the most tokens in flight in a pipeline; None for no limit
        is_last: bool = True,  # whether gradients are final afterwards
        # what all replicas run; required if units are streamed or replicas run in lockstep
        plan: PhasePlan | None = None,
    ) -> Tensor:
        """Forward and backward. Returns this rank's part of the phase's loss (fp64 scalar); ranks add up to it."""
        beside, watch = self._beside, None
        if beside is not None:
            beside.return_job, watch = None, beside.watch if is_last else None
        num_packs, keeps_step = len(micro_batches), self._keeps_step
        if keeps_step:
            micro_batches = self._in_step(micro_batches, plan)
        if beside is not None and watch is not None:  # gradients leave once they are final, and after the load
            gate = SegmentGate(watch.segments, self.replica.device)
            watch.arm(gate, self._runner.num_backwards(micro_batches))
            returned = self._switching.pool.return_gradients(self.mesh.strategy)
            beside.return_job = self._switching.start(
                returned, self._gradients, self._master.gradients, gate=gate, beside=True
            )
        self.act = "compute"
        if self._stream is not None:
            self._begin_units(self._stream, plan, most_tokens, True)
        joint = self._joint_order(plan, most_tokens) if plan is not None and self.mesh.strategy.pp > 1 else None
        loss = self._runner.run(micro_batches, scale, most_tokens, joint)
        if keeps_step:
            self._forget_idle(num_packs)
        if self._stream is not None:
            self._stream.end()
        if beside is not None:
            if beside.load_job is not None:
                beside.load_job.result()  # a replica without micro-batches has waited for nothing yet
                self._switching.arenas.last.holder = self._loaded.holder
            beside.disarm()
        return self._counted(loss)

    def compute_forward(
        self, micro_batches: Sequence[MicroBatch], scale: float, plan: PhasePlan | None = None, most_kept: int = 0
    ) -> Tensor:
        """Forward only, after `load_for_forward`; returns this rank's part of the loss, like `compute`. `most_kept`:
        token limit of the graphs to keep, of the first packs, for a `run` that begins with them. Ignored unless
        `can_keep`."""
        self.act = "compute"
        if self._stream is not None and self.mesh.strategy.z == 3:
            self._begin_units(self._stream, plan, None, False)
        kept: list[MicroBatch] = []
        while most_kept and self.can_keep and micro_batches:
            if sum(m.num_tokens for m in (*kept, micro_batches[0])) > most_kept:
                break
            kept.append(micro_batches[0])
            micro_batches = micro_batches[1:]
        num_packs = len(micro_batches)
        if self._keeps_step:
            micro_batches = self._in_step(micro_batches, plan)
        loss = self._runner.run_forward(micro_batches, scale)
        self.replica.head.keeps_graphs = True
        for micro_batch in kept:  # last, so that little else is computed while their graphs exist
            loss = loss + self.replica.forward(micro_batch, None, scale).detach()
        self.replica.head.keeps_graphs = False
        if self._keeps_step:
            self._forget_idle(num_packs)
        if self._stream is not None:
            self._stream.end()
        return self._counted(loss)

    @property
    def can_keep(self) -> bool:
        """Whether graphs can outlive a forward: one stage always has all layers, weights, and complete packs."""
        strategy, losses = self.mesh.strategy, self.replica.calls["loss"]
        return not (strategy.num_stages > 1 or strategy.cuts_packs or strategy.z or self._keeps_step or losses)

    def _begin_units(
        self, stream: UnitStream, plan: PhasePlan | None, most_tokens: int | None, is_trained: bool
    ) -> None:
        assert plan is not None, f"{self.mesh.strategy} needs to know what all replicas run"
        passes = beats(self.mesh.strategy, pack_lengths(plan), most_tokens, is_trained, self._pair_cost)
        program = make_program(self._switching.pool.units, self.mesh.strategy, passes)
        stream.begin(program, self.weights, self._gradients, self._loaded.store)

    def _in_step(self, micro_batches: Sequence[MicroBatch], plan: PhasePlan | None) -> Sequence[MicroBatch]:
        assert plan is not None, f"{self.mesh.strategy} needs to know what all replicas run"
        most = max(map(len, plan.replicas), default=0)
        if len(micro_batches) == most:
            return micro_batches
        idle = idle_micro_batch(micro_batches[0].columns if micro_batches else {}).to(self.replica.device)
        return [*micro_batches, *[idle] * (most - len(micro_batches))]

    def _joint_order(self, plan: PhasePlan, most_tokens: int | None) -> list[Operation] | None:
        """This stage's operations if the stages of all replicas run in lockstep; None for independent replicas."""
        strategy, here = self.mesh.strategy, self.mesh.coord
        if not (self._keeps_step or strategy.z):
            return None
        joint = joint_passes(strategy, pack_lengths(plan), most_tokens, self._pair_cost)
        # where tokens are exchanged, idle packs fill up shorter replicas
        return joint.passes.operations(here.pp) if self._keeps_step else joint.operations(here.pp, here.dp)

    def _forget_idle(self, num_packs: int) -> None:
        """Drops losses and logits of idle packs. Parts of packs leave logits each, but there are no idle ones."""
        for kept in (self.replica.losses, self.replica.head.logits):
            if kept is not None:
                del kept[num_packs:]

    def _counted(self, loss: Tensor) -> Tensor:
        # all ranks of a tensor-parallel group hold the same loss: count it once
        if self.mesh.coord.tp:
            return torch.zeros_like(loss)
        for part in self.parts:
            if not part.is_last and part.auxiliary is not None:  # the last stage's loss already includes it
                loss = loss + part.auxiliary.value.to(loss)
        return loss

    def report(self, phase: PhasePlan, measured: Tensor) -> PhaseReport:
        """From fp64 [world size, `MEASURES`] of the last phase."""
        most = dict(zip(MEASURES, measured.amax(0).tolist(), strict=True))
        least = dict(zip(MEASURES, measured.amin(0).tolist(), strict=True))
        total = dict(zip(MEASURES, measured.sum(0).tolist(), strict=True))
        capacity = busiest = longest = squared = 0
        for packs in phase.replicas:
            of_replica = 0
            for pack in packs:
                capacity += max(phase.bucket.pack_tokens, pack.num_tokens)
                of_replica += pack.num_tokens
                for length in pack.lengths:
                    longest, squared = max(longest, length), squared + length**2
            busiest = max(busiest, of_replica)
        counted = dict[str, int]()
        for measure in COUNTED:
            if measure.name:
                counted[measure.name] = int((total if measure.is_total else most)[measure.counted])
        measures = dict[str, Any]()
        for act in ("load", "return", "unit_load", "unit_return"):
            measures[f"{act}_s"] = most[f"{act}_s"]
            measures[f"{act}_bytes"] = int(total[f"{act}_bytes"])
            # a rank's busy seconds include waiting for slower ranks: the shortest are the switch's own
            measures[f"hidden_{act}_s"] = max(0.0, least[f"{act}_busy_s"] - most[f"{act}_s"])
        return PhaseReport(
            strategy=self.name,
            num_packs=phase.num_packs,
            num_sequences=phase.num_sequences,
            num_tokens=phase.num_tokens,
            compute_s=most["compute_s"],
            wait_s=most["wait_s"],
            capacity_tokens=capacity,
            busiest_tokens=busiest,
            longest_tokens=longest,
            squared_tokens=squared,
            frozen_bytes=self._loaded.frozen_bytes,
            context="" if (context := self.replica.tokens.context) is None else context.way,
            context_bytes=int(total["context_bytes"]),
            counted=counted,
            **measures,
        )

    @property
    def host_bytes(self) -> int:
        """Peak host memory in bytes of packs."""
        return self._packs.host_bytes

    @property
    def forecast(self) -> MemoryForecast:
        """This rank's memory needs, computed before any allocation."""
        return self._switching.forecast

    @property
    def overlapped_act(self) -> str:
        """The act of the current or last switch beside the computation; `act` without one.

        A return begins when the load is over, perhaps before the computation begins.
        """
        beside = self._beside
        if beside is None:
            return self.act
        if beside.load_job is not None and not beside.load_job.succeeded:
            return "load"
        return "return" if beside.return_job is not None else self.act

    def return_gradients(self) -> SwitchJob:
        """Adds the gradients to the master store and releases the storage. Returns the finished job. Collective."""
        self.act = "return"
        job = self._beside.return_job if self._beside is not None else None
        if job is not None:
            job.result()
        else:
            plan = self._switching.pool.return_gradients(self.mesh.strategy)
            job = self._switching.start(plan, self._gradients, self._master.gradients)
        self.release()
        return job

    def release(self) -> None:
        """Unbinds the storage; also after a failed phase, whose jobs must be cancelled first."""
        if self._beside is not None:
            self._beside.drop()
        if self._stream is not None:
            self._stream.drop()
        for part in self.parts:
            part.release()
            part.model.train()
        self._gradients = []


def _trains_first_stage(vector: ParameterVector, strategy: Strategy) -> bool:
    trained = [segment.unit for segment in vector.segments if segment.trainable]
    return any(stage_of_unit(vector, strategy, unit) == 0 for unit in dict.fromkeys(trained))
