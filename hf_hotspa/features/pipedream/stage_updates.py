"""PipeDream on one rank: a stage that updates its weights after every backward pass, and keeps versions of them.

`PipeDream.pack_versions` decides which pack uses which version. Here `StageUpdates` makes the next version in the
master store (each stage has its own part, `MasterStore.by_stage`). `PipeDreamRunner` keeps the versions that packs in
flight need, and runs our 1F1B with them.

* Forward and backward of a pack use the same weight buffers on a stage, which nothing writes to in between.
* Replicas add up the gradients of their k-th packs before update k, in rank order, as for any mini-batch; a replica
  without a k-th pack adds nothing.
* Unused versions are not made; at most `PipeDream.most_versions` buffers exist.
* A non-finite gradient is not applied, nor is any later one of the mini-batch on this stage.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.engine.executor import SwitchJob
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.engine.phase import PhaseRunner
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.features.pipedream.mode import PipeDream
from hf_hotspa.packing.bucketing import PhasePlan
from hf_hotspa.packing.pipeline_order import Passes, choose_passes
from hf_hotspa.parallel.mesh import ProcessGroups
from hf_hotspa.parallel.pipeline import OneForwardOneBackward, Pack
from hf_hotspa.seam import Runner
from hf_hotspa.strategy import Strategy


class StageUpdates:
    """The optimizer steps of this rank's part of its stage. `master`: with each stage's part on its ranks. `mode`:
    which version each pack uses, and to which norm a stage clips. `stage`: the ranks of the stage; None for this rank
    alone."""

    def __init__(self, master: MasterStore, mode: PipeDream, stage: dist.ProcessGroup | None) -> None:
        self._master, self._stage, self.mode = master, stage, mode
        # an optimizer step on this rank's shares (`optimizer.step`); set by the engine's caller
        self.step: Callable[[], Any] | None = None
        self._squares, self._num, self._is_finite = 0.0, 0, True

    def begin(self) -> None:
        """Starts a mini-batch. Raises `HotspaConfigError`: no optimizer is set."""
        if self.step is None:
            raise HotspaConfigError(
                "stages update after every pack, and the engine has no optimizer",
                fix="set engine.updates.step = optimizer.step before the first mini-batch",
            )
        self._squares, self._num, self._is_finite = 0.0, 0, True

    def update(self, reached: Collection[str]) -> None:
        """Makes one step with the master store's gradients. Collective in the stage. `reached`: parameters with a
        gradient from this rank; the stage's parameters without any are not stepped."""
        assert self.step is not None
        own, trained = self._master.squared_norm(), self._master.trained
        # other stages' parameters are empty here; they count as stepped, or this rank would lack their state
        is_here = [float(self._master.parameters[name].numel() > 0) for name in trained]
        sums = [own, *is_here, *(float(name in reached) for name in trained)]
        if self._stage is not None:
            total = torch.tensor(sums, dtype=torch.float64, device=self._master.compute_device)
            dist.all_reduce(total, group=self._stage)
            sums = total.tolist()
        square, of_stage, counts = sums[0], sums[1 : len(trained) + 1], sums[len(trained) + 1 :]
        self._squares, self._num = self._squares + own, self._num + 1
        self._is_finite = self._is_finite and square < float("inf")
        if not self._is_finite:
            return
        most = self.mode.max_norm
        if most is not None and (factor := most / (square**0.5 + 1e-6)) < 1.0:
            self._master.scale_gradients(factor)
        steps = zip(trained, of_stage, counts, strict=True)
        self._master.bind_gradients({name for name, is_own, count in steps if count or not is_own})
        self.step()

    def refuse_clipping(self) -> NoReturn:
        raise HotspaConfigError(
            "gradients cannot be clipped by their global norm, because stages update by themselves",
            why="the gradients of all stages never exist at the same time",
            fix="clip on each stage: EngineOptions(features=(PipeDream(max_norm=...),))",
        )

    def refuse_recut(self) -> NoReturn:
        raise HotspaConfigError(
            "stages that update by themselves cannot be partitioned anew", fix="use hotspa_stragglers=watch"
        )

    def end(self) -> None:
        """Ends the mini-batch: an optimizer step of the caller's loop then changes nothing."""
        self._master.bind_gradients(())

    @property
    def squared_norm(self) -> float:
        """Mean over the mini-batch's updates, of this rank's shares before clipping. All ranks add up to the complete
        model's mean squared norm."""
        return self._squares / max(self._num, 1)


class StageRunner(Runner):
    """Runs the phases of the one strategy whose stages update by themselves."""

    is_alone = by_stage = True

    def __init__(self, mode: PipeDream) -> None:
        self._mode = mode

    def weight_copies(self, strategy: Strategy, rank: int) -> int:
        return self._mode.most_versions(strategy.pp, strategy.coord(rank).pp)

    def updates(self, strategy: Strategy, groups: ProcessGroups, master: MasterStore) -> StageUpdates:
        """The updates of this rank's stage. Collective."""
        size, mine = strategy.stage_size, strategy.coord(groups.rank).pp
        of_stages = [groups.group(range(first, first + size)) for first in range(0, strategy.world_size, size)]
        return StageUpdates(master, self._mode, of_stages[mine])

    def phase_runner(self, *shared: Any, updates: StageUpdates) -> PhaseRunner:
        return PipeDreamRunner(*shared, updates=updates)


class _Run(OneForwardOneBackward):
    def __init__(self, runner: "PipeDreamRunner", labels: Sequence[int], shares: Sequence[float]) -> None:
        group = runner.mesh.pipeline
        assert group is not None
        super().__init__(runner.replica, group, runner.mesh.coord.pp)
        self._runner, self._labels, self._shares = runner, labels, shares

    def _forward(self, chunks: Sequence[Pack], i: int, hidden: Tensor | None, scale: float) -> Tensor:
        self._runner.use_version_of(i)
        before = self._loss.clone()
        out = super()._forward(chunks, i, hidden, 1.0 / self._labels[i] if self._labels[i] else 0.0)
        if self._runner.replica.is_last:  # adds this pack's part of the mini-batch's mean loss
            self._loss = before + out.detach() * self._shares[i]
        return out

    def _backward(self, chunk: Pack, i: int, grad: Tensor | None) -> Any:
        self._runner.use_version_of(i)
        message = super()._backward(chunk, i, grad)
        self._runner.update(i)
        return message


class PipeDreamRunner(PhaseRunner):
    """The one strategy of a run whose stages update by themselves; takes the arguments of `PhaseRunner`, and
    `updates`."""

    def __init__(self, *args: Any, updates: StageUpdates, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._updates, self._mode = updates, updates.mode
        self._by_version: dict[int, list[Tensor | None]] = {}
        self._free: list[list[Tensor | None]] = []
        self._extra: list[list[Tensor | None]] = []  # without version 0
        self._versions: list[int] = []
        self._needed: frozenset[int] = frozenset()
        self._labels: list[int] = []
        self.most_held = 0  # the most versions that this stage has held at a time

    def compute(
        self,
        micro_batches: Sequence[MicroBatch],
        scale: float,
        most_tokens: int | None = None,
        is_last: bool = True,
        plan: PhasePlan | None = None,
    ) -> Tensor:
        """Forward and backward of all packs, and the updates; arguments and result as for `PhaseRunner.compute`.

        The loss is the mini-batch's mean over label tokens, each pack with its weights.
        """
        assert plan is not None, "update k needs the k-th packs of all replicas"
        self.act = "compute"
        self._updates.begin()
        self._plan_versions(plan, most_tokens)
        self._by_version, self._free = {0: self.weights}, list(self._extra)
        own = plan.replicas[self.mesh.coord.dp]
        run = _Run(self, self._labels, [labels / plan.num_labels for labels in self._labels])
        order = self._passes_of(own, most_tokens).operations(self.mesh.coord.pp)
        loss = run.run([Pack(m, i) for i, m in enumerate(micro_batches)], scale, order)
        for k in range(len(own), len(self._labels)):  # packs of other replicas
            self.update(k)
        self._updates.end()
        return self._counted(loss)

    def return_gradients(self) -> SwitchJob:
        """Releases the storage. Not collective."""
        self.act = "return"
        self.release()
        return SwitchJob(f"gradients of {self.mesh.strategy}, which are applied already")

    def release(self) -> None:
        """As `PhaseRunner.release`, but keeps the version buffers for the next mini-batch."""
        self._by_version, self._free = {}, []
        super().release()

    def _passes_of(self, packs: Sequence[Any], most_tokens: int | None) -> Passes:
        return choose_passes("own", [pack.num_tokens for pack in packs], self.mesh.strategy.pp, most_tokens)

    def _plan_versions(self, plan: PhasePlan, most_tokens: int | None) -> None:
        stage, coord = self.mesh.coord.pp, self.mesh.coord.dp
        of_replicas = [self._mode.pack_versions(self._passes_of(r, most_tokens), stage) for r in plan.replicas]
        self._versions, self._needed = of_replicas[coord], frozenset(v for versions in of_replicas for v in versions)
        most = max(map(len, plan.replicas))
        self._labels = [sum(r[k].num_labels for r in plan.replicas if k < len(r)) for k in range(most)]

    def use_version_of(self, pack: int) -> None:
        self.replica.use_weights(self._by_version[self._versions[pack]])

    def update(self, k: int) -> None:
        """Makes update k, and the version after it if a pack needs it. Collective in the stage."""
        if self._labels[k]:
            self._master.zero_gradients()
            plan = self._switching.pool.return_gradients(self.mesh.strategy)
            self._switching.start(plan, self._gradients, self._master.gradients)
            self._updates.update(
                {slot.spec.name for part in self.parts for p, slot in part.parameters if p in part.reached}
            )
        for gradient in self._gradients:
            if gradient is not None:
                gradient.zero_()
        self.replica.reached.clear()
        in_flight = self._versions[k + 1 :]
        for version in [v for v in self._by_version if v not in in_flight]:
            self._free.append(self._by_version.pop(version))
        if k + 1 in self._needed:
            buffers = self._free.pop() if self._free else self._new_buffers()
            plan = self._switching.pool.load(self.mesh.strategy, None, trained_only=self._switching.pool.has_frozen)
            self._switching.start(plan, self._master.weights, buffers)
            if k + 1 in in_flight:
                self._by_version[k + 1] = buffers
            else:  # another replica's packs use it
                self._free.append(buffers)
            self.most_held = max(self.most_held, len(self._by_version))

    def _new_buffers(self) -> list[Tensor | None]:
        """One more version of the trained weights; all versions share the frozen ones."""
        trained = self._switching.gradient_dtypes
        self._extra.append([
            torch.empty_like(own) if own is not None and dtype is not None else own
            for own, dtype in zip(self.weights, trained, strict=True)
        ])  # fmt: skip
        return self._extra[-1]
