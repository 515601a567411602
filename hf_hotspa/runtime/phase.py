"""Everything of one strategy on this rank: its replica, its buffers, its schedule. Runs one phase at a time.

A phase has three acts: `load` (weights from the master store, or from there and the phase before, into this strategy's
layout), `compute` (forward and
backward of the replica's micro-batches), `return_gradients` (gradients summed into the master store). Between phases
nothing of the strategy is left but an empty model, and its weights where the next phase may draw on them.

Where switches run beside the computation (`Overlap`), `submit_load` and `submit_return` come before `compute`, in this
order on every rank, and `compute` itself waits for each weight and lets each gradient go. It returns only when the load
is over; `return_gradients` then waits for the rest of the return.
"""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.layout.placement import stage_of_unit
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.runtime.master import MasterStore
from hf_hotspa.runtime.memory import MemoryForecast
from hf_hotspa.runtime.mesh import StrategyMesh
from hf_hotspa.runtime.options import EngineOptions
from hf_hotspa.runtime.overlap import GradientWatch, Overlap, WeightGuard
from hf_hotspa.runtime.pipeline import PipelineRunner
from hf_hotspa.runtime.replica import Replica
from hf_hotspa.runtime.specs import ModelDescription
from hf_hotspa.runtime.switching import Switching
from hf_hotspa.strategy import Strategy
from hf_hotspa.switch.executor import Buffers, SwitchStats
from hf_hotspa.switch.plan import SwitchPlan
from hf_hotspa.switch.worker import SegmentGate, SwitchJob


class PhaseRunner:
    """One strategy on this rank.

    Args:
        description: The model as plain data.
        mesh: The strategy and its groups.
        switching: The plans of all strategies, and what runs them.
        master: The master store.
        buffers: The model's buffers by name.
        overlap: Which switches will be submitted to a worker.
        options: The engine's options. Its pipeline schedule is replaced by `own` where the first stage is frozen.

    Attributes:
        act: What it does, or did last: `load`, `compute` or `return`.
        frozen_bytes: Bytes of frozen weights that its last load moved between ranks, summed over ranks.
    """

    def __init__(
        self,
        description: ModelDescription,
        mesh: StrategyMesh,
        switching: Switching,
        master: MasterStore,
        buffers: Mapping[str, Tensor],
        overlap: Overlap,
        options: EngineOptions,
    ) -> None:
        self.mesh, self._switching, self._master = mesh, switching, master
        self._sizes = switching.pool.layout(mesh.strategy).rank_sizes(mesh.rank)
        self.weights: list[Tensor | None] = []
        self.replica = Replica(description, mesh, master.compute_device, buffers, options)
        # torch's schedules differentiate the first stage's output
        trains_first = _trains_first_stage(description.vector, mesh.strategy)
        schedule = options.pipeline_schedule if trains_first else "own"
        pad = description.config.get_text_config().pad_token_id
        self._runner = PipelineRunner(self.replica, mesh, schedule, pad if isinstance(pad, int) and pad >= 0 else 0)
        self._gradients: list[Tensor | None] = []
        self._guard: WeightGuard | None = self.replica.guard_weights() if overlap.load else None
        self._watch: GradientWatch | None = self.replica.watch_gradients() if overlap.give_back else None
        self._load_job: SwitchJob | None = None
        self._return_job: SwitchJob | None = None
        self.act = "load"
        self.frozen_bytes = 0
        self._holder: Hashable = None
        self._there: frozenset[int] = frozenset()

    def load(self, previous: "PhaseRunner | None" = None) -> SwitchStats:
        """Fills this strategy's weights and clears its gradients. Collective.

        Args:
            previous: The phase before of the same mini-batch, whose weights serve as a second source if they are kept.
        """
        plan, second = self._take(previous)
        self._take_gradients()
        switching, epoch = self._switching, self._switching.next_epoch()
        stats = switching.executor.run(
            plan, self._master.weights, self.weights, switching.weight_dtypes, epoch, second=second
        )
        switching.arenas.loaded(self._holder)
        self._bind()
        return stats

    def submit_load(self, previous: "PhaseRunner | None" = None) -> SwitchJob:
        """The same beside what follows: `compute` waits for the weights where it needs them. Collective."""
        assert self._guard is not None
        worker = self._switching.worker
        assert worker is not None
        plan, second = self._take(previous)
        self._take_gradients()
        dtypes, epoch = self._switching.weight_dtypes, self._switching.next_epoch()
        job = worker.submit(plan, self._master.weights, self.weights, dtypes, epoch, second=second)
        self._load_job = job
        self._guard.arm(job, self._there)
        self._bind()
        return job

    def load_for_forward(self) -> SwitchStats:
        """Fills this strategy's weights for `compute_forward` alone: no gradient buffer, eval mode. Collective."""
        plan, _ = self._take(None)
        switching, epoch = self._switching, self._switching.next_epoch()
        stats = switching.executor.run(plan, self._master.weights, self.weights, switching.weight_dtypes, epoch)
        switching.arenas.loaded(self._holder)
        self.replica.bind(self.weights, None)
        self.replica.model.eval()
        return stats

    def _take(self, previous: "PhaseRunner | None") -> tuple[SwitchPlan, Buffers | None]:
        """Takes this phase's weights; the plan that fills them, and the second source that it draws on.

        Where the buffers still hold this strategy's weights of an earlier load, the plan leaves out the frozen ones.
        """
        self.act, switching, strategy = "load", self._switching, self.mesh.strategy
        kept = previous if switching.arenas.keeps_last else None
        self._holder = (str(strategy), self._master.frozen_version) if switching.pool.has_frozen else None
        self.weights, again = switching.arenas.take_weights(self._sizes, switching.weight_dtypes, self._holder)
        plan = switching.pool.load(strategy, kept.mesh.strategy if kept else None, trained_only=again)
        self.frozen_bytes = switching.frozen_bytes(plan)
        self._there = switching.frozen_segments if again else frozenset()
        return plan, kept.weights if kept else None

    def _take_gradients(self) -> None:
        switching = self._switching
        self._gradients = switching.arenas.gradients.take(self._sizes, switching.gradient_dtypes)

    def _bind(self) -> None:
        for gradient in self._gradients:
            if gradient is not None:
                gradient.zero_()
        self.replica.bind(self.weights, self._gradients)

    def submit_return(self, num_micro_batches: int) -> SwitchJob:
        """Lets gradients leave as soon as they are final; after the load and before `compute`. Collective.

        Args:
            num_micro_batches: How many `compute` will be given.
        """
        assert self._watch is not None
        switching, worker = self._switching, self._switching.worker
        assert worker is not None
        gate = SegmentGate(self._watch.segments, worker.device)
        self._watch.arm(gate, num_micro_batches)
        plan = switching.pool.give_back(self.mesh.strategy)
        self._return_job = worker.submit(
            plan, self._gradients, self._master.gradients, switching.return_dtypes, switching.next_epoch(), gate
        )
        return self._return_job

    def compute(self, micro_batches: Sequence[MicroBatch], scale: float, most_tokens: int | None = None) -> Tensor:
        """Forward and backward. Returns this rank's part of the loss (fp64 scalar): ranks add up to the phase's loss.

        Args:
            micro_batches: What this rank's replica runs.
            scale: 1 / (label tokens of the mini-batch).
            most_tokens: The most tokens in flight in a pipeline; None for no limit.
        """
        self.act = "compute"
        loss = self._runner.run(micro_batches, scale, most_tokens)
        if self._load_job is not None:  # a replica without micro-batches has waited for nothing yet
            self._load_job.result()
            self._switching.arenas.loaded(self._holder)
        self._disarm()
        if self._watch is not None:
            self._watch.disarm()
        return self._counted(loss)

    def compute_forward(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Forward only, after `load_for_forward`; this rank's part of the loss, as `compute` returns it."""
        self.act = "compute"
        return self._counted(self._runner.run_forward(micro_batches, scale))

    def _counted(self, loss: Tensor) -> Tensor:
        # the coordinates of a tensor-parallel group all hold the same loss: one of them counts
        if self.mesh.coord.tp:
            return torch.zeros_like(loss)
        # the last stage's loss has the balance loss of its routers in it
        return loss if self.replica.is_last else self.replica.balance_loss.to(loss)

    @property
    def forecast(self) -> MemoryForecast:
        """The memory that this rank was found to need before anything was allocated."""
        return self._switching.forecast

    @property
    def overlapped_act(self) -> str:
        """What the switch does that runs, or ran last, beside the computation; `act` where there is none.

        A return begins when the load is over, which may be before the computation begins.
        """
        if self._load_job is not None and not self._load_job.succeeded:
            return "load"
        return "return" if self._return_job is not None else self.act

    def return_gradients(self) -> SwitchStats:
        """Adds this strategy's gradients to the master store and lets go of its storage. Collective."""
        self.act = "return"
        if self._return_job is not None:
            stats = self._return_job.result()
        else:
            switching = self._switching
            plan = switching.pool.give_back(self.mesh.strategy)
            stats = switching.executor.run(
                plan, self._gradients, self._master.gradients, switching.return_dtypes, switching.next_epoch()
            )
        self.release()
        return stats

    def release(self) -> None:
        """Unbinds the storage; also after a failed phase, whose jobs must have been cancelled before."""
        self._disarm()
        if self._watch is not None:
            self._watch.drop()
        self._return_job = None
        self.replica.release()
        self.replica.model.train()
        self._gradients = []

    def _disarm(self) -> None:
        self._load_job = None
        if self._guard is not None:
            self._guard.disarm()


def _trains_first_stage(vector: ParameterVector, strategy: Strategy) -> bool:
    trained = [segment.unit for segment in vector.segments if segment.trainable]
    return any(stage_of_unit(vector, strategy, unit) == 0 for unit in dict.fromkeys(trained))
