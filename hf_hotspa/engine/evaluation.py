"""Forward passes over an evaluation set, under the strategies of the given mini-batches.

Weights are loaded when the strategy changes, and stay loaded until the end. There are no gradients or gradient buffers,
and the model is in eval mode. The loss is returned as a sum over labels with their number: exact over a complete set.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.data.collator import MiniBatch, PhaseBatch
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.engine.phase import PhaseRunner
from hf_hotspa.errors import ModelError
from hf_hotspa.model.replica import Replica
from hf_hotspa.packing.bucketing import PhasePlan
from hf_hotspa.packing.cuts import share_by_tokens
from hf_hotspa.parallel.agreement import Agreement, check_mini_batch
from hf_hotspa.parallel.context import in_order
from hf_hotspa.parallel.mesh import ProcessGroups
from hf_hotspa.strategy import Coord, Strategy


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one mini-batch, the same on every rank. `logits`: if requested, [length, vocabulary size] of each
    sequence by (dataset row, first token), in fp32 or wider, on the device."""

    loss_sum: float  # of the cross entropies (with the engine's label smoothing) over all label tokens
    num_labels: int  # label tokens; may be 0
    logits: dict[tuple[int, int], Tensor]


class Evaluation(AbstractContextManager["Evaluation"]):
    """One pass over an evaluation set; use it in a `with` statement. All methods are collective unless noted."""

    def __init__(
        self,
        phases: Mapping[Strategy, PhaseRunner],
        agreement: Agreement,
        groups: ProcessGroups,
        # called when a phase fails: ends all ranks' work, and raises
        end_all: Callable[[PhaseBatch, str, BaseException], NoReturn],
        load_facts: Callable[[], dict[str, str]],  # what else the ranks must agree on before weights are loaded
        store: MasterStore | None = None,  # replaces the master store: a second, frozen model of the same shape
        training: bool = False,  # whether the model is in training mode, with the masks of the step
        step: int = 0,  # mini-batches before this one in the run
    ) -> None:
        self._phases, self._agreement, self._groups, self._load_facts = phases, agreement, groups, load_facts
        self._end_all, self._store, self._training, self._step = end_all, store, training, step
        self._loaded: PhaseRunner | None = None
        self._num_mini_batches = 0

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the weights. Not collective."""
        if self._loaded is not None:
            self._loaded.replica.head.logits = None
            self._loaded.release()
            self._loaded = None

    def hand_over(self, strategies: Collection[Strategy]) -> PhaseRunner | None:
        """Returns the loaded runner, for a training pass that begins with it. If its strategy is not one of these,
        unloads it and returns None. Not collective."""
        runner, self._loaded = self._loaded, None
        if runner is None or runner.mesh.strategy in strategies:
            return runner
        runner.release()
        return None

    def run(self, mini_batch: MiniBatch, with_logits: bool = False, keep_graphs: bool = False) -> EvaluationResult:
        """Runs all phases of a mini-batch forward. Raises `HotspaError`: on every rank; the weights are unchanged.
        `mini_batch`: its strategies must be in the engine's pool. It may have no labels. `keep_graphs`: keep the
        autograd graphs of the last phase's packs, up to the tokens of one pack, for a training pass that begins with
        them. `with_logits`: give every rank the logits of all sequences: tokens of the mini-batch x vocabulary size
        x 4 bytes on each rank, and the same over the wire."""
        self._num_mini_batches += 1
        where = f"evaluation mini-batch {self._num_mini_batches}"
        check_mini_batch(self._agreement, mini_batch, self._load_facts, mini_batch.error, where)
        loss_sum, logits = 0.0, dict[tuple[int, int], Tensor]()
        loaded = self._loaded.mesh.strategy if self._loaded is not None else None
        pairs = list(zip(mini_batch.plan.phases, mini_batch.phases, strict=True))
        pairs.sort(key=lambda pair: pair[1].bucket.strategy != loaded)
        for index, (plan, phase) in enumerate(pairs):
            try:
                kept = phase.bucket.pack_tokens if keep_graphs and index == len(pairs) - 1 else 0
                loss_sum += self._run_phase(plan, phase, with_logits, kept)
                if with_logits:
                    logits.update(self._gather_logits(plan))
            except BaseException as failure:
                self._end_all(phase, where, failure)
        total = float(self._agreement.gather([loss_sum]).sum())
        return EvaluationResult(total, mini_batch.num_labels, logits)

    def _run_phase(self, plan: PhasePlan, phase: PhaseBatch, with_logits: bool, kept: int) -> float:
        runner = self._phases[phase.bucket.strategy]
        if runner is not self._loaded:
            self.close()
            self._agreement.barrier()  # waits longer than the switch group for late ranks
            self._loaded = runner
            runner.load_for_forward(self._store, self._training)
        for part in runner.parts:
            part.begin_step(self._step)
        runner.replica.head.logits = [] if with_logits else None
        micro_batches = [m.to(self._groups.device, non_blocking=True) for m in phase.micro_batches]
        return float(runner.compute_forward(micro_batches, 1.0, plan, kept))

    def _gather_logits(self, phase: PhasePlan) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """All sequences' logits on every rank: the owner of each token shard broadcasts it."""
        assert self._loaded is not None
        replica = self._loaded.replica
        strategy = replica.mesh.strategy  # in the engine's shard order; the caller's strategy may have another
        logits, replica.head.logits = replica.head.logits, None

        def logits_here() -> Tensor | None:
            if not replica.is_last or not logits:
                return None
            mine = torch.cat(logits).to(_dtype_of_logits(replica))
            width = replica.head.widths[strategy.shard_index(replica.mesh.coord.tp)]
            if mine.shape[-1] != width:
                raise ModelError(
                    f"the model gives {mine.shape[-1]} logits a token and its head has {width} rows",
                    why="logits are collected by the rows of the vocabulary",
                    fix="evaluate the loss alone: no compute_metrics, prediction_loss_only=True",
                )
            return mine

        # agreed on: a broadcast of another size would end the process
        mine = self._agreement.run("evaluation", logits_here)
        for dp, packs in enumerate(phase.replicas):
            parts = [
                [share_by_tokens(pack.lengths, 1)] if replica.context is None else replica.context.parts(pack.lengths)
                for pack in packs
            ]
            shares = [share for of_pack in parts for share in of_pack]
            rows = []  # by cp coordinate, then by part
            for cp in range(strategy.cp if packs else 0):
                tokens = [sum(stop - first for _, first, stop in share.pieces[cp]) for share in shares]
                of_replica = self._replica_logits(replica, Coord(dp, 0, strategy.pp - 1, cp), sum(tokens), mine)
                rows.append(of_replica.split(tokens))
            ordered = iter([in_order([row[i] for row in rows], share) for i, share in enumerate(shares)])
            for pack, of_pack in zip(packs, parts, strict=True):
                whole, begin = torch.cat([next(ordered) for _ in of_pack]), 0
                for sequence in pack.sequences:
                    yield (sequence.row, sequence.start), whole[begin : begin + sequence.num_tokens]
                    begin += sequence.num_tokens

    def _replica_logits(self, replica: Replica, place: Coord, num_tokens: int, mine: Tensor | None) -> Tensor:
        """[num_tokens, vocabulary size] of the ranks at a place, over all tp coordinates."""
        strategy, widths, dtype = replica.mesh.strategy, replica.head.widths, _dtype_of_logits(replica)
        shards = [torch.empty(num_tokens, width, dtype=dtype, device=self._groups.device) for width in widths]
        for tp in range(strategy.tp if num_tokens else 0):
            owner, shard = strategy.rank(replace(place, tp=tp)), strategy.shard_index(tp)
            if owner == self._groups.rank:
                assert mine is not None
                shards[shard] = mine
            if self._groups.switch is not None and widths[shard]:
                dist.broadcast(shards[shard], src=owner, group=self._groups.switch)
        return torch.cat(shards, -1)


def _dtype_of_logits(replica: Replica) -> torch.dtype:
    return torch.promote_types(replica.compute_dtype, torch.float32)
