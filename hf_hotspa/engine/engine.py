"""Runs a mini-batch: for each phase loads the weights, runs the packs and returns the gradients.

`HotSPaEngine` is the public entry below the Trainer; any loop can drive it:

    engine = HotSPaEngine(model, parse_buckets("dp4:1024@4096,tp4:8192"))
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1), lr=1e-3)
    for mini_batch in loader:
        report = engine.forward_backward(mini_batch)      # gradients are now in the master store
        engine.clip_grad_norm_(1.0)
        optimizer.step()
    engine.write_back(model)

Loss and gradients match the plain model on the complete mini-batch, for all strategies. Only the optimizer step changes
the weights. All ranks raise an error that one finds before a phase, before a byte moves.
"""

import itertools
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_hotspa.data.collator import MiniBatch, PhaseBatch
from hf_hotspa.engine.beside import Beside
from hf_hotspa.engine.evaluation import Evaluation
from hf_hotspa.engine.executor import Buffers
from hf_hotspa.engine.faults import PhaseFailures, raise_non_finite
from hf_hotspa.engine.loading import fill_from_model, load_below_adapter, load_weights, write_to_model
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.engine.optimizer_states import states_of
from hf_hotspa.engine.phase import MiniBatchRun, Observer, PhaseRunner, peak_memory
from hf_hotspa.engine.set_up import RunnerMaker, changed, describe, plan_switches, take_cut, with_step_times
from hf_hotspa.errors import DataError, HotspaConfigError
from hf_hotspa.layout.placement import Layout
from hf_hotspa.layout.vector import ParameterSpec
from hf_hotspa.model.model_check import check_same_build
from hf_hotspa.model.options import EngineOptions, default_device
from hf_hotspa.model.replica import Attachment, Replica
from hf_hotspa.model.specs import ModelDescription
from hf_hotspa.parallel.agreement import Agreement, Mailbox, any_flag, check_mini_batch, hotspa_cause, packed_flags
from hf_hotspa.parallel.mesh import ProcessGroups
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.report import PhaseMeasure, PhaseReport, RankMeasures, StepReport
from hf_hotspa.strategy import Bucket, Strategy, check_launch


class InitialWeights(NamedTuple):
    """What an engine was made with."""

    digest: str | None = None  # `weights_digest` of the model, if it was read
    were_equal: bool = True  # whether all ranks' models had the same weights; else the engine has rank 0's
    base_digest: str | None = None  # `frozen_digest` of a base that was read by slices below an adapter


class Stop(Protocol):
    @property
    def requested(self) -> bool: ...


class Updates(Protocol):
    """The optimizer steps of a stage that updates by itself."""

    step: Callable[[], object] | None

    @property
    def squared_norm(self) -> float:
        """Of this rank's gradients, the mean over the updates of a mini-batch."""

    def refuse_clipping(self) -> NoReturn: ...
    def refuse_recut(self) -> NoReturn: ...


class HotSPaEngine:
    """Trains one model with hot-switched strategies. The constructor and all methods are collective unless noted.

    Args:
        model: A transformers causal language model with weights, or a `PeftModel` with a LoRA adapter around one. If
            the ranks differ, all use rank 0's weights.
        buckets: Length ranges and their strategies, shortest first (`parse_buckets`).
        options: The same on all ranks.
        weights: Folder from which each rank reads its share of the weights, for a model of `open_model`.
        device: Where this rank computes; by default its CUDA device or else the CPU.

    Attributes:
        observer: Called at the begin and end of each phase, if set.
        stop: Its `requested` is read at the end of each mini-batch: whether this rank wants to stop. None for never.
        failures: Explains failed phases; knows of a lack of memory on this rank.
        initial: The weights that the engine was made with.
        beside: What is trained beside the strategies: modules of the model that the caller runs.
        updates: The optimizer steps of this rank's stage, if a feature updates stages by themselves:
            set its `step`. None if the caller steps once per mini-batch.
        grad_norm: Global 2-norm of the last mini-batch's gradient, before clipping; if stages update by themselves, the
            root mean square over the updates.
        stop_ranks: The ranks that wanted to stop after the last mini-batch; the same on all ranks.

    Raises:
        HotspaError: on every rank, naming what does not fit (launch, strategy, model, differing ranks).
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        options: EngineOptions | None = None,
        *,
        weights: Path | None = None,
        device: torch.device | None = None,
    ) -> None:
        started = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
        self.rank, self.world_size = rank, world_size
        self.buckets, self.options = tuple(buckets), options or EngineOptions()
        options, device = self.options, device or default_device()
        check_launch(self.buckets, world_size)  # every rank sees the same two numbers, so every rank raises
        streams = any(bucket.strategy.z for bucket in self.buckets)
        self._groups = ProcessGroups(rank, world_size, device, *options.timeouts(device, streams))
        self.failures = PhaseFailures(rank, Mailbox(rank, world_size))
        self.agreement = Agreement(self._groups.agreement, rank, self.failures.mailbox)
        self.description = describe(model, self.buckets, options, weights, self._groups, self.agreement)
        self._switching = plan_switches(
            self.description.vector, self.buckets, options, self._groups, self.agreement, self.failures
        )
        strategies, runner = self._switching.pool.strategies, options.runner
        by_stage = strategies[0] if runner is not None and runner.by_stage else None
        home = options.master_device(device)
        in_place = self._switching.pool.in_place
        self.master = MasterStore(self.description.vector, rank, world_size, home, device, by_stage, in_place=in_place)
        self.initial = InitialWeights()
        if weights is not None and self.description.added is not None:
            self.initial = InitialWeights(base_digest=load_below_adapter(weights, model, self.master, self.agreement))
        elif weights is not None:
            load_weights(weights, model, self.master, self.agreement)
        else:
            self.initial = InitialWeights(*fill_from_model(model, self.master, self.agreement, self._groups.switch))
            if self.initial.were_equal:
                self.master.note_frozen_in(model)
        self.beside = Beside(model, self.master, self._groups.switch, self.agreement)
        adopt_before_steps(self.master)
        self.updates: Updates | None = None
        if runner is not None:
            self.updates = runner.updates(strategies[0], self._groups, self.master)
        buffers = dict(bare_model(model)[0].named_buffers())
        self._make = RunnerMaker(self._switching, self.master, buffers, options, runner, self.updates)
        self.phases = {strategy: self._make(self.description, self._groups.mesh(strategy)) for strategy in strategies}
        self.agreement.barrier()  # build times differ by rank, and the switch groups have a shorter timeout
        self._groups.warm_up()
        self._switching.prepare()
        self.observer: Observer | None = None
        self.stop: Stop | None = None
        self.stop_ranks: tuple[int, ...] = ()
        self._steps, self.grad_norm = 0, 0.0

    # -- set-up -------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._groups.device

    def recut(
        self,
        step_times: Iterable[tuple[int, ...]],
        fits: Callable[[ModelDescription], None] = lambda _: None,
        rank_times: Iterable[int] = (),
    ) -> bool:
        """Between two mini-batches, changes the stage partition and the MLP shares by relative step times.

        The next load fills the new stages and shards; master store and checkpoints do not change. Collective if
        something changes.

        Args:
            step_times: Of pipeline stages (`StageCosts.step_times`), the same on all ranks; empty for the original ones.
            rank_times: Of each rank (`ParameterVector.step_times`), for tensor-parallel MLPs; the same on all ranks;
                empty for even shares.
            fits: Raises on a rank that cannot hold the model in this partition.

        Returns:
            Whether anything changed.

        Raises:
            DeviceMemoryError: on every rank, if one of them cannot hold it; the partition does not change.
            HotspaConfigError: stages update by themselves: the master store has their partition.
        """
        if self.updates is not None:
            self.updates.refuse_recut()
        description = with_step_times(self.description, step_times, self.options.stage_costs, rank_times)
        meshes = {s: self.phases[s].mesh for s in changed(self.description, description, self.phases)}
        if meshes:
            where, shared = f"cut by speed before mini-batch {self._steps + 1}", (self._switching, self.agreement)
            self.phases |= take_cut(description, meshes, *shared, self._make, fits, where)
        self.description = description
        return bool(meshes)

    def mesh(self, strategy: Strategy) -> DeviceMesh | None:
        """The torch mesh of one of this engine's strategies, over all ranks. Collective.

        Has the axes among `pp`, `dp`, `cp` and `tp` with a degree above 1; None without any. The strategy runs on its
        `tp`, `cp` and `pp` groups. The first call creates the `dp` groups: the engine sums gradients over replicas in
        the master store, and needs none.

        Raises:
            HotspaConfigError: the engine has no such strategy.
        """
        if strategy not in self.phases:
            raise HotspaConfigError(
                f"{strategy} is not one of the engine's strategies",
                fix=f"ask for one of {', '.join(map(str, self.phases))}",
            )
        return self._groups.device_mesh(strategy)

    @property
    def layouts(self) -> dict[Strategy, Layout]:
        """Where each strategy's weights lie."""
        return {strategy: self._switching.pool.layout(strategy) for strategy in self.phases}

    @property
    def part_models(self) -> list[nn.Module]:
        """The models of all replicas on this rank, and of their stages."""
        return [part.model for runner in self.phases.values() for part in runner.parts]

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Collective."""
        return bool(self.agreement.gather([float(flag)]).any())

    def explain(self, error: Exception, where: str) -> Exception:
        """What to raise for an error that ends training on this rank; leaves it for the other ranks (`Mailbox`)."""
        return self.failures.mailbox.tell(error, where)

    # -- optimizer side -----------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's 1-D fp32 share of every trained parameter, by Hugging Face name. Not collective."""
        for name, parameter in self.master.parameters.items():
            if parameter.requires_grad:
                yield name, parameter

    def parameter_groups(
        self, weight_decay: float = 0.0, decayed: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Two groups for a torch optimizer: with and without weight decay. Not collective.

        Args:
            decayed: Names for the first group; by default all parameters with at least two dims (no biases, no norms).
        """
        if decayed is None:
            decayed = {spec.name for spec in self.description.vector.specs if len(spec.shape) > 1}
        named = list(self.named_parameters())
        return [
            {"params": [p for name, p in named if name in decayed], "weight_decay": weight_decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales the gradients so that their global 2-norm is at most `max_norm`; returns the previous norm.

        The factor is torch's: `max_norm / (norm + 1e-6)`, at most 1. No communication.

        Raises:
            HotspaConfigError: stages update by themselves, and have already updated.
        """
        if self.updates is not None:
            self.updates.refuse_clipping()
        factor = max_norm / (self.grad_norm + 1e-6)
        if factor < 1.0:
            self.master.scale_gradients(factor)
        return self.grad_norm

    # -- a mini-batch -------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        mini_batch: MiniBatch,
        step: int | None = None,
        facts: Mapping[str, str] | None = None,
        *,
        add: bool = False,
        needs_labels: bool = True,
        training: bool = True,
        scored: Evaluation | None = None,
    ) -> StepReport:
        """Runs every phase of a mini-batch; afterwards the master store holds its gradients.

        Args:
            step: Mini-batches before this one in the run (a resumed run counts on); counted by the engine by default.
            facts: What else must be the same on all ranks, by name, such as learning rates.
            add: Add to the existing gradients; `grad_norm` then covers the sum.
            needs_labels: Whether no label is an error; False if a tape replaces the loss.
            training: Whether the model is in training mode, with dropout.
            scored: An evaluation pass over rows of this mini-batch; the phase whose weights it has loaded runs first.

        Raises:
            HotspaError: on every rank; the weights are unchanged. Before the first transfer: an error from reading
                rows, a mini-batch that differs between ranks or has no label. After the last: `NonFiniteError`.
        """
        begin, self._steps = time.perf_counter(), self._steps if step is None else step
        where = f"mini-batch {self._steps + 1}"
        error = mini_batch.error
        if error is None and needs_labels and mini_batch.plan.num_labels == 0:
            error = DataError(
                f"none of the {mini_batch.plan.num_rows} rows of the mini-batch has a label token",
                where=where,
                why="the loss is a mean over label tokens",
                fix="use a larger hotspa_mini_batch_size or drop rows without labels",
            )
        if error is not None or self.world_size > 1:
            check_mini_batch(self.agreement, mini_batch, self._switching.load_facts, error, where, facts)
        agreed = time.perf_counter()  # about the same moment on all ranks
        if not add:
            self.master.zero_gradients()
        self.master.bind_gradients()
        loaded = (
            scored.hand_over([phase.bucket.strategy for phase in mini_batch.phases]) if scored is not None else None
        )
        order = self._order(mini_batch, loaded) if len(mini_batch.phases) > 1 else [*range(len(mini_batch.phases))]
        scale = 1.0 / max(mini_batch.plan.num_labels, 1)
        together = MiniBatchRun(self._steps, scale, agreed, training, self.agreement.barrier)
        loss, measures = self._run_phases(mini_batch, order, loaded, together, where)
        self._steps += 1
        return self._finish(mini_batch, order, loss, measures, (begin, agreed), where)

    def _run_phases(
        self,
        mini_batch: MiniBatch,
        order: Sequence[int],
        loaded: PhaseRunner | None,
        together: MiniBatchRun,
        where: str,
    ) -> tuple[float, list[PhaseMeasure]]:
        """Returns this rank's part of the loss and its measurements per phase; `loaded` already has its weights."""
        measures: list[PhaseMeasure] = []
        loss, previous, runners = 0.0, None, list[PhaseRunner]()
        for index in order:
            runners.append(self.phases[mini_batch.phases[index].bucket.strategy])
        for index, runner, following in zip(order, runners, [*runners[1:], None], strict=True):
            phase = mini_batch.phases[index]
            if self._switching.worker is not None:  # its thread explains failures, too
                self.failures.phase_begins(phase, runner, self._steps + 1, where)
            if self.observer is not None:
                self.observer.phase_begins(self._steps + 1, mini_batch.plan, order, len(measures))
            try:
                is_loaded = runner is loaded and not measures
                plan = mini_batch.plan.phases[index]
                phase_loss, measured = runner.run(phase, plan, together, previous, following, is_loaded)
            except BaseException as failure:
                self._end_all(phase, where, failure)
            loss += phase_loss
            if self.observer is not None:
                self.observer.phase_ended(self._steps + 1, mini_batch.plan, order, len(measures), measured)
            measures.append(measured)
            previous = runner
        return loss, measures

    def _order(self, mini_batch: MiniBatch, loaded: PhaseRunner | None = None) -> list[int]:
        strategies = [phase.bucket.strategy for phase in mini_batch.phases]
        order = [strategies.index(strategy) for strategy in self._switching.pool.order(strategies, self._steps)]
        return sorted(order, key=lambda index: loaded is None or strategies[index] != loaded.mesh.strategy)

    def _end_all(self, phase: PhaseBatch, where: str, failure: BaseException) -> NoReturn:
        runner, explained = self.phases[phase.bucket.strategy], failure
        if isinstance(failure, Exception):
            self.failures.phase_begins(phase, runner, self._steps + 1, where)
            explained = self.failures.explain(failure)
        if self._switching.worker is not None:
            place = f"{where}, strategy {phase.bucket.strategy}"
            self._switching.worker.cancel(f"{place}: {type(failure).__name__}: {failure}")
        self._groups.abort()
        runner.release()
        self._switching.arenas.forget()
        if explained is failure:
            raise failure
        # raised bare, it keeps its own cause; from the wrapper it would be a circle
        raise explained from (explained.__cause__ if explained is hotspa_cause(failure) else failure)

    def _finish(
        self, mini_batch: MiniBatch, order: Sequence[int], loss: float, measures: list[PhaseMeasure],
        moments: tuple[float, float], where: str,
    ) -> StepReport:  # fmt: skip
        begin, agreed = moments  # of the call, and of the agreement of all ranks
        stops = self.stop is not None and self.stop.requested
        updates, trained, here = self.updates, self.master.trained, set[str]()
        square = updates.squared_norm if updates is not None else self.master.squared_norm()
        numbers = [loss, square, agreed - begin, float(peak_memory(self._groups.device)), float(stops)]
        for index, measured in zip(order, measures, strict=True):
            runner = self.phases[mini_batch.phases[index].bucket.strategy]
            for part in runner.parts:
                for parameter, slot in part.parameters:
                    if parameter in part.reached:
                        here.add(slot.spec.name)
            numbers += measured.values()
        if self.world_size > 1:
            reached = packed_flags(map(here.__contains__, trained))
            rows, flags = self.agreement.gather(numbers + reached).tensor_split([len(numbers)], 1)
            here = set(itertools.compress(trained, any_flag(flags, len(trained))))
        else:
            rows = torch.tensor([numbers], dtype=torch.float64)
        total_loss, squared_norm = rows[:, 0].sum().item(), rows[:, 1].sum().item()
        self.grad_norm = squared_norm**0.5
        self.stop_ranks = tuple(rows[:, 4].nonzero().flatten().tolist())
        if not (torch.isfinite(rows[:, :2]).all()):
            raise_non_finite(
                mini_batch.plan, self.phases, self.master, self.agreement, total_loss, where, updates is None
            )
        if updates is None:
            self.master.reached |= here
            self.master.bind_gradients(self.master.reached)
        plan, reports = mini_batch.plan, list[PhaseReport]()
        of_phases = rows[:, 5:].view(self.world_size, len(order), -1)
        for index, measured in zip(order, of_phases.unbind(1), strict=True):
            reports.append(self.phases[mini_batch.phases[index].bucket.strategy].report(plan.phases[index], measured))
        return StepReport(
            step=self._steps,
            loss=total_loss,
            grad_norm=self.grad_norm,
            num_labels=plan.num_labels,
            num_rows=plan.num_rows,
            num_truncated=plan.num_truncated,
            num_split=plan.num_split,
            num_dropped=plan.num_dropped,
            num_empty=plan.num_empty,
            phases=tuple(reports),
            total_s=time.perf_counter() - begin,
            ranks=RankMeasures(rows[:, 2].tolist(), rows[:, 3].long().tolist(), of_phases.tolist()),
        )

    def evaluation(self, store: MasterStore | None = None, training: bool = False, step: int = 0) -> Evaluation:
        """A pass over an evaluation set: `with engine.evaluation() as evaluation: evaluation.run(mini_batch)`.

        Args:
            store: Replaces the weights by a second model's (`frozen_weights`).
            training: Whether the model is in training mode, with the dropout of mini-batch `step` (counted from 0).
        """
        shared = self.phases, self.agreement, self._groups, self._end_all, self._switching.load_facts
        return Evaluation(*shared, store, training, step)

    def frozen_weights(self, model: nn.Module) -> MasterStore:
        """A second model's weights, for `evaluation`: sharded like the engine's, never trained. Collective.

        Raises:
            ModelError: on every rank: the model is not built like the engine's.
        """
        agreement, vector = self.agreement, self.description.vector
        agreement.run("set-up of a second model", lambda: check_same_build(model, self.description, self._make.buffers))
        home = self.options.master_device(self.device)
        in_place = self._switching.pool.in_place
        store = MasterStore(vector, self.rank, self.world_size, home, self.device, trained=False, in_place=in_place)
        fill_from_model(model, store, agreement, self._groups.switch)
        return store

    def attach(self, make: Callable[[Replica], Attachment]) -> None:
        """Attaches the result of `make` to every replica on this rank, also after later `recut`s. Not collective."""
        self._make.attach(make, self.phases.values())

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the existing gradients, and their norm. Not collective: the same on all ranks."""
        self.master.scale_gradients(factor)
        self.grad_norm *= abs(factor)

    def drop_gradients(self) -> None:
        """Sets the gradients to 0. Not collective: on all ranks."""
        self.master.zero_gradients()
        self.master.bind_gradients()
        self.grad_norm = 0.0

    def complete(self, left_out: Collection[str]) -> None:
        """Adds the gradients of `beside`, and drops the gradients of some parameters; the norm is of the rest. Collective.

        Raises:
            NonFiniteError: on every rank; naming a parameter beside the strategies.
        """
        if not self.beside.reduce() and not left_out:
            return
        self.master.drop_gradients_of(left_out)
        self.grad_norm = float(self.agreement.gather([self.master.squared_norm()]).sum()) ** 0.5
        if not math.isfinite(self.grad_norm):
            self.beside.check_finite(f"mini-batch {self._steps}")

    # -- afterwards ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def write_back(self, model: nn.Module) -> None:
        """Copies the weights into a model of the same structure, one segment at a time. Collective.

        Skips frozen weights that the model already has: the engine was made from it, or wrote to it last."""
        write_to_model(model, self.weights(frozen=not self.master.is_frozen_in(model)))
        self.master.note_frozen_in(model)

    def weights(self, frozen: bool = True, buffers: Buffers | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every complete weight, or only trained ones, or other `buffers`, as `MasterStore.gather`. Collective: all
        ranks consume it to the end."""
        # barriers have a longer timeout than the switch group: a rank may be late from writing to a slow disk
        self.agreement.barrier()
        return self.master.gather(self._groups.switch, frozen, self.agreement.barrier, buffers)

    def stream(
        self, dtype_of: Callable[[ParameterSpec], torch.dtype], to: int | None = None
    ) -> Iterator[tuple[ParameterSpec, torch.Tensor]]:
        """Every complete weight, as `MasterStore.stream`, on one rank or on all. Collective: consume it to the end."""
        self.agreement.barrier()
        return self.master.stream(self._groups.switch, dtype_of, to, self.agreement.barrier)

    @torch.no_grad()
    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The last mini-batch's complete gradient by Hugging Face name, on every rank, for inspection. Collective."""
        self.agreement.barrier()
        gathered = self.master.gather(self._groups.switch, frozen=False, buffers=self.master.gradients)
        return {name: whole.clone() for name, whole in gathered}

    def free_weights(self) -> None:
        """Frees the memory of the strategies' weights until the next load. Not collective; between mini-batches."""
        for runner in self.phases.values():
            runner.weights = []
        self._switching.executor.forget()
        self._switching.arenas.clear()

    def close(self) -> None:
        """Ends the switch thread, frees memory and destroys the process groups. Collective and final."""
        self._switching.close()
        self.agreement.barrier()
        self._switching.arenas.clear()
        self._groups.close()


def adopt_before_steps(master: MasterStore) -> None:
    """Adopts the optimizers that need it (`engine.optimizer_states`) and have shares of the master store before their
    first step, which raises the errors of `adopt`, as long as the store exists."""
    store, own, others = weakref.ref(master), {id(share) for share in master.parameters.values()}, set[type]()

    def before(optimizer: Optimizer, *_: object) -> None:
        to, kind = store(), type(optimizer)
        if to is None or kind in others:
            return
        if not states_of(kind).needs_adopting(kind):
            others.add(kind)
        elif any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            states_of(kind).adopt(optimizer, to)

    weakref.finalize(master, register_optimizer_step_pre_hook(before).remove).atexit = False
