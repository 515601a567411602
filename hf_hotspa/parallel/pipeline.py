"""Pipeline schedules: one stage interface, our own 1F1B and torch's schedules behind it.

`PipelineRunner` runs the micro-batches of one replica through its stages, forward and backward, and returns the loss.
Which schedule runs, in which order and with which padding, is said by `packing.pipeline_order`.

* Our own non-interleaved 1F1B (PipeDream-Flush; Narayanan et al., SC'21, section 2.2) takes micro-batches of different
  shapes, fewer of them than stages, and none: every shape is known from the plan, so nothing is negotiated. It limits
  the tokens in flight, so that a long micro-batch has few beside it.
* `torch.distributed.pipelining` (GPipe, 1F1B) serves micro-batches that share one shape, after padding. A schedule object
  is bound to its first shape (another one aborts the process on gloo) and holds a receive buffer for every micro-batch,
  so it is made for one run. It costs no more: shapes are given, nothing runs to find them.

Where there are no stages, packs run one after the other, whole or in chunks of tokens (`parallel.token_chunks`).

Every rank of a pipeline sees the same micro-batches and therefore makes the same choice.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.packing.pipeline_order import SCHEDULES, Passes, choose_passes
from hf_hotspa.parallel.attention import Prefix
from hf_hotspa.parallel.mesh import StrategyMesh
from hf_hotspa.parallel.token_chunks import ChunkRunner
from hf_hotspa.parallel.waiting import CLOCK

logger = logging.getLogger(__name__)


class Stage(Protocol):
    """One pipeline stage on this rank."""

    is_first: bool
    is_last: bool
    device: torch.device
    compute_dtype: torch.dtype
    losses: list[Tensor]

    def begin_pass(self) -> None:
        """A forward or a backward pass begins."""

    def forward(
        self,
        micro_batch: MicroBatch,
        hidden: Tensor | None,
        scale: float,
        prefix: Prefix | None = None,
        with_loss: bool = True,
    ) -> Tensor:
        """The next stage's hidden state, or on the last stage the scaled loss (fp64 scalar)."""

    def hidden_shape(self, micro_batch: MicroBatch) -> tuple[int, ...]:
        """The shape of what travels between stages."""


class PipelineRunner:
    """Runs a replica's micro-batches under one strategy.

    Args:
        stage: This rank's stage.
        mesh: The strategy and its pipeline group.
        schedule: One of `SCHEDULES`.
        pad_token_id: What padding is made of, where a schedule needs one shape.
    """

    def __init__(self, stage: Stage, mesh: StrategyMesh, schedule: str = "auto", pad_token_id: int = 0) -> None:
        assert schedule in SCHEDULES, schedule
        self._stage, self._schedule, self._pad_token_id = stage, schedule, pad_token_id
        self._group, self._index, self._num_stages = mesh.pipeline, mesh.coord.pp, mesh.strategy.pp
        self._torch = _TorchSchedules(stage, mesh)
        self._chunks = ChunkRunner(stage, mesh.strategy.ck) if mesh.strategy.ck else None
        self._name, self._speaks = str(mesh.strategy), mesh.coord.pp == mesh.coord.tp == 0

    def num_backwards(self, micro_batches: Sequence[MicroBatch]) -> int:
        """How often `run` goes backward through this stage."""
        return len(micro_batches) if self._chunks is None else self._chunks.num_chunks(micro_batches)

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        scale: float,
        most_tokens: int | None = None,
        joint: Passes | None = None,
    ) -> Tensor:
        """Forward and backward of all micro-batches; gradients are added to the parameters' `.grad`.

        Args:
            micro_batches: What this replica runs; the same on every stage. May be empty.
            scale: 1 / (label tokens of the mini-batch).
            most_tokens: The most tokens in flight on a stage; None for no limit.
            joint: The passes that the stages of all replicas keep step with, ours; None where replicas go their own way.

        Returns:
            fp64 scalar: the sum of the scaled losses on the last stage, 0 elsewhere.
        """
        if self._group is None:
            return self._run_alone(micro_batches, scale)
        tokens = [m.num_tokens for m in micro_batches]
        passes = joint or choose_passes(self._schedule, tokens, self._num_stages, most_tokens)
        if passes.kind == "own":
            self._say_once(passes, most_tokens)
            own = _OneForwardOneBackward(self._stage, self._group, self._index)
            return own.run(micro_batches, scale, passes)
        loss = torch.zeros((), dtype=torch.float64, device=self._stage.device)
        padded = [m.padded_to(n, self._pad_token_id) for m, n in zip(micro_batches, passes.tokens, strict=True)]
        for first, end in passes.groups:
            loss += self._torch.run(passes.kind, padded[first:end], scale)
        return loss

    @torch.no_grad()
    def run_forward(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Forward only, in our own order whatever the schedule; arguments and result as for `run`."""
        if self._group is None:
            total = torch.zeros((), dtype=torch.float64, device=self._stage.device)
            forward = self._chunks.run_forward if self._chunks is not None else self._forward_alone
            for micro_batch in micro_batches:
                total += forward(micro_batch, scale)
            return total
        own = _OneForwardOneBackward(self._stage, self._group, self._index)
        return own.run_forward(micro_batches, scale)

    def _say_once(self, passes: Passes, most_tokens: int | None) -> None:
        if passes.replaced and self._speaks:
            self._speaks = False
            logger.warning(
                "%s: padded packs in flight under the schedule %s would be more than %s tokens on a stage; own (1F1B without"
                " padding) runs in its place wherever that is so",
                self._name,
                self._schedule,
                most_tokens,
            )

    def _run_alone(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._stage.device)
        for micro_batch in micro_batches:
            if self._chunks is not None:
                total += self._chunks.run(micro_batch, scale)
                continue
            self._stage.begin_pass()
            loss = self._stage.forward(micro_batch, None, scale)
            self._stage.begin_pass()
            loss.backward()
            total += loss.detach()
        return total

    def _forward_alone(self, micro_batch: MicroBatch, scale: float) -> Tensor:
        self._stage.begin_pass()
        return self._stage.forward(micro_batch, None, scale)


_Message = tuple[Tensor, int, int]
"""Tensor, neighbour, tag; tags keep forward and backward of each micro-batch apart on gloo."""


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward."""

    hidden: Tensor | None
    out: Tensor


class _OneForwardOneBackward:
    """One run of our own schedule.

    What a stage sends to a neighbour and receives from the same neighbour next is posted as one batch: two blocking
    operations on a pair's NCCL communicator could wait for each other. Sends stay pending until the end, so that a
    stage never waits for its receiver.
    """

    def __init__(self, stage: Stage, group: dist.ProcessGroup, index: int) -> None:
        self._stage, self._group, self._index = stage, group, index
        self._pending: list[tuple[Any, Tensor | None]] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=stage.device)

    def run(self, micro_batches: Sequence[MicroBatch], scale: float, passes: Passes) -> Tensor:
        message: _Message | None = None
        for i, is_backward in passes.operations(self._index):
            if i >= len(micro_batches):  # another replica's
                continue
            wanted = self._wanted_gradient(i) if is_backward else self._wanted_hidden(micro_batches, i)
            received = self._hand_over(message, wanted)
            if is_backward:
                message = self._backward(i, received)
            else:
                message = self._forward_message(self._forward(micro_batches, i, received, scale), i)
        self._exchange(message, None)
        with CLOCK.waiting:
            for work, _ in self._pending:
                work.wait()
        return self._loss

    def run_forward(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        for i in range(len(micro_batches)):
            hidden = self._exchange(None, self._wanted_hidden(micro_batches, i))
            out = self._forward(micro_batches, i, hidden, scale)
            del self._in_flight[i]
            self._exchange(self._forward_message(out, i), None)
        for work, _ in self._pending:
            work.wait()
        return self._loss

    def _hand_over(self, message: _Message | None, wanted: _Message | None) -> Tensor | None:
        """Sends what the last operation made, and receives what the next one needs: together where it is one neighbour.

        Otherwise the send goes first, by itself.
        """
        if message is None or wanted is None or message[1] == wanted[1]:
            return self._exchange(message, wanted)
        self._exchange(message, None)
        return self._exchange(None, wanted)

    def _wanted_hidden(self, micro_batches: Sequence[MicroBatch], i: int) -> _Message | None:
        if self._stage.is_first:
            return None
        shape = self._stage.hidden_shape(micro_batches[i])
        return torch.empty(shape, dtype=self._stage.compute_dtype, device=self._stage.device), self._index - 1, 2 * i

    def _wanted_gradient(self, i: int) -> _Message | None:
        if self._stage.is_last:
            return None
        out = self._in_flight[i].out
        return torch.empty(out.shape, dtype=out.dtype, device=out.device), self._index + 1, 2 * i + 1

    def _forward_message(self, out: Tensor, i: int) -> _Message | None:
        return None if self._stage.is_last else (out.detach().contiguous(), self._index + 1, 2 * i)

    def _forward(self, micro_batches: Sequence[MicroBatch], i: int, hidden: Tensor | None, scale: float) -> Tensor:
        if hidden is not None:
            hidden.requires_grad_()
        self._stage.begin_pass()
        out = self._stage.forward(micro_batches[i], hidden, scale)
        self._in_flight[i] = _InFlight(hidden, out)
        if self._stage.is_last:
            self._loss += out.detach()
        return out

    def _backward(self, i: int, grad: Tensor | None) -> _Message | None:
        state = self._in_flight.pop(i)
        self._stage.begin_pass()
        if state.out.requires_grad:  # a first stage may be frozen altogether
            torch.autograd.backward(state.out, grad)
        if state.hidden is None:
            return None
        assert state.hidden.grad is not None
        return state.hidden.grad.contiguous(), self._index - 1, 2 * i + 1

    def _exchange(self, send: _Message | None, receive: _Message | None) -> Tensor | None:
        """Posts a send and a receive together; returns what was received."""
        operations = [
            dist.P2POp(kind, tensor, group=self._group, tag=tag, group_peer=peer)
            for kind, message in ((dist.irecv, receive), (dist.isend, send))
            if message is not None
            for tensor, peer, tag in [message]
        ]
        if not operations:
            return None
        with CLOCK.waiting:
            works = dist.batch_isend_irecv(operations)
            if receive is not None:
                works.pop(0).wait()  # NCCL returns one work for the whole batch; gloo one each, the receive first
        self._pending += [(work, send[0] if send else None) for work in works]
        while self._pending and self._pending[0][0].is_completed():
            self._pending.pop(0)[0].wait()
        return receive[0] if receive is not None else None


class _StageModule(nn.Module):
    """The stage as the module that torch's schedules call: micro-batches are named by index, tensors stay here."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage
        self.micro_batches: Sequence[MicroBatch] = ()
        self.scale = 0.0

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        hidden = None if self._stage.is_first else x
        out = self._stage.forward(self.micro_batches[int(index)], hidden, self.scale)
        return out.view(1) if self._stage.is_last else out


class _TimedStage(PipelineStage):
    """A stage that tells its computation from what the schedule does around it, which is waiting for other stages."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with CLOCK.computing:
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with CLOCK.computing:
            return super().backward_one_chunk(*args, **kwargs)


class _TorchSchedules:
    """Runs torch's schedules."""

    def __init__(self, stage: Stage, mesh: StrategyMesh) -> None:
        self._stage, self._mesh = stage, mesh
        self._module = _StageModule(stage)

    def run(self, kind: str, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        self._module.micro_batches, self._module.scale = micro_batches, scale
        indices = torch.arange(len(micro_batches))
        losses: list[Tensor] = []
        first = (indices,) if self._stage.is_first else ()
        last: dict[str, Any] = {"target": indices, "losses": losses} if self._stage.is_last else {}
        schedule = self._make(kind, micro_batches)
        with CLOCK.waiting:
            schedule.step(*first, index=indices, return_outputs=False, **last)
        self._module.micro_batches = ()
        total = torch.zeros((), dtype=torch.float64, device=self._stage.device)
        return total + sum(loss.detach() for loss in losses)

    def _make(self, kind: str, micro_batches: Sequence[MicroBatch]) -> Schedule1F1B | ScheduleGPipe:
        stage = self._stage
        # shapes and dtypes given here spare torch an inference pass over a real micro-batch
        hidden = torch.empty(
            stage.hidden_shape(micro_batches[0]), dtype=stage.compute_dtype, device="meta", requires_grad=True
        )
        loss = torch.empty(1, dtype=torch.float64, device="meta", requires_grad=True)
        index = torch.empty(1, dtype=torch.int64, device="meta")
        pipe = _TimedStage(
            self._module,
            self._mesh.coord.pp,
            self._mesh.strategy.pp,
            stage.device,
            input_args=index if stage.is_first else hidden,
            output_args=loss if stage.is_last else hidden,
            group=self._mesh.pipeline,
        )
        schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[kind]
        return schedule(pipe, len(micro_batches), loss_fn=lambda out, _: out.sum(), scale_grads=False)
