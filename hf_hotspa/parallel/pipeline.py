"""Pipeline schedules: one stage interface for the package's 1F1B and torch's schedules.

`PipelineRunner` runs the micro-batches of one replica through its stages, forward and backward, and returns the loss.
`packing.pipeline_order` chooses the schedule, the order and the padding; every rank of a pipeline sees the same
micro-batches, and so makes the same choice.

* `OneForwardOneBackward`, the package's 1F1B, takes micro-batches of different shapes, fewer than stages, or none: the plan
  gives every shape, so nothing is negotiated. Packs that are cut into parts run in it part by part (Li et al., 2021,
  "TeraPipe"; Sun et al., 2024, "Seq1F1B"), so one long sequence fills a pipeline, too.
* `InterleavedRun` does the same for ranks with several stages each (`+v2`).
* `torch.distributed.pipelining` (GPipe, 1F1B, interleaved 1F1B) serves micro-batches that share one shape, after padding. A
  schedule object is bound to its first shape (another one aborts the process on gloo) and holds a receive buffer for every
  micro-batch, so it is made for one run. That costs nothing more: the shapes are given, so torch need not infer them.

Without stages, packs run one after the other (`PackRunner`). Gradients reach a weight in the order of its stage's backward
passes, which is the same in every run.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.packing.pipeline_order import (
    SCHEDULES,
    InterleavedPasses,
    Operation,
    Passes,
    Turn,
    check_runs,
    choose_interleaved,
    choose_passes,
    interleaved_order,
)
from hf_hotspa.parallel.attention import ChunkPrefix
from hf_hotspa.parallel.collectives import CLOCK
from hf_hotspa.parallel.mesh import StrategyMesh

logger = logging.getLogger(__name__)


class Stage(Protocol):
    """One pipeline stage on this rank, or the whole model."""

    is_first: bool
    is_last: bool
    device: torch.device
    compute_dtype: torch.dtype
    losses: list[Tensor]

    begin_pass: Callable[[], None] | None
    """Called before a forward or a backward pass."""
    end_pass: Callable[[], None] | None
    """Called after it; the next step may wait for another stage."""

    def tokens_kept(self, num_tokens: int) -> int:
        """How many tokens of a sequence's chunk have keys and values kept here."""

    def forward(
        self,
        micro_batch: MicroBatch,
        hidden: Tensor | None,
        scale: float,
        prefix: ChunkPrefix | None = None,
        with_loss: bool = True,
    ) -> Tensor:
        """The next stage's hidden state, or on the last stage the scaled loss (fp64 scalar) if `with_loss`."""

    def hidden_shape(self, micro_batch: MicroBatch) -> tuple[int, ...]:
        """The shape of the hidden state between stages."""


@dataclass(eq=False)
class Pack:
    """A pack, or a part of one, on this rank's stage: its forward, and the backward through that."""

    micro_batch: MicroBatch
    pack: int  # the index of the pack

    def forward(
        self,
        stage: Stage,
        hidden: Tensor | None,
        scale: float,
        with_loss: bool = True,
        prefix: ChunkPrefix | None = None,
    ) -> Tensor:
        """Runs the stage; with a graph if gradients are enabled. Arguments as for `Stage.forward`."""
        if stage.begin_pass is not None:
            stage.begin_pass()
        out = stage.forward(self.micro_batch, hidden, scale, prefix, with_loss)
        if stage.end_pass is not None:
            stage.end_pass()
        return out

    def backward(
        self, stage: Stage, out: Tensor, gradient: Tensor | None, more: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """Runs backward from the last forward's result, and from more tensors of its graph with their gradients. `gradient`
        is the loss's gradient to the result; None if the result is the loss."""
        roots: list[tuple[Tensor, Tensor | None]] = [(out, gradient)] if out.requires_grad else []  # else all is frozen
        roots += more
        if stage.begin_pass is not None:
            stage.begin_pass()
        if roots:
            torch.autograd.backward(*zip(*roots, strict=True))
        if stage.end_pass is not None:
            stage.end_pass()

    def forget(self) -> None:
        """Drops what a forward without gradients left."""


def loss_of_packs(parts: Sequence[Pack], losses: list[Tensor]) -> None:
    """Sums the stage's last losses, one for each part, to one for each pack."""
    if not losses:
        return
    of_parts = losses[len(losses) - len(parts) :]
    del losses[len(losses) - len(parts) :]
    packs: dict[int, Tensor] = {}
    for part, loss in zip(parts, of_parts, strict=True):
        packs[part.pack] = packs[part.pack] + loss if part.pack in packs else loss
    losses += packs.values()


class PackRunner:
    """Runs a replica's micro-batches on a stage that has all layers, pack by pack."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    @property
    def host_bytes(self) -> int:
        """The most bytes of host memory that packs have needed so far."""
        return 0

    def num_backwards(self, micro_batches: Sequence[MicroBatch]) -> int:
        """How many backward passes `run` makes through a stage."""
        return len(micro_batches)

    def chains(self, micro_batches: Sequence[MicroBatch]) -> Sequence[Sequence[Pack]]:
        """The packs in order, each as a chain of parts that run forward one after the other, and backward in reverse."""
        chains = list[list[Pack]]()
        for pack, micro_batch in enumerate(micro_batches):
            chains.append([Pack(micro_batch, pack)])
        return chains

    def run(
        self,
        micro_batches: Sequence[MicroBatch],  # this replica's micro-batches; the same on every stage. May be empty.
        scale: float,  # 1 / (label tokens of the mini-batch)
        most_tokens: int | None = None,  # the most tokens in flight on a stage of a pipeline; None for no limit
        # this stage's operations in order, if stages of all replicas run in lockstep; else None
        joint: Sequence[Operation] | None = None,
    ) -> Tensor:
        """Forward and backward of all micro-batches; adds gradients to the parameters' `.grad`. Returns an fp64 scalar:
        the sum of the scaled losses on the last stage, 0 elsewhere."""
        total = torch.zeros((), dtype=torch.float64, device=self._stage.device)
        for (pack,) in self.chains(micro_batches):
            out = pack.forward(self._stage, None, scale)
            total += out.detach()
            pack.backward(self._stage, out, None)
        return total

    @torch.no_grad()
    def run_forward(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Forward only, in the package's own order whatever the schedule; arguments and result as for `run`."""
        total, ran = (
            torch.zeros((), dtype=torch.float64, device=self._stage.device),
            _joined(self.chains(micro_batches)),
        )
        for part in ran:
            total += part.forward(self._stage, None, scale)
            part.forget()
        loss_of_packs(ran, self._stage.losses)
        return total


class InterleavedRun:
    """One run of interleaved 1F1B on one rank, for packs of any sizes.

    All ranks have one order of passes, and so of messages. A rank runs its own passes, and sends on their results; for
    another rank's pass it posts a receive if the result is for one of its stages. So both ends post their messages in the same
    order, whatever two ranks exchange. The pass that needs a message waits for it, and sends stay pending until the end.
    """

    def __init__(
        self,
        stages: Sequence[Stage],  # this rank's stages, in the order of the pipeline
        group: dist.ProcessGroup,  # the ranks of the pipeline; `index` is this rank's place there
        index: int,
        # the replica's chunks (or whole packs), for each of the rank's stages; the same on every rank
        chunks: Sequence[Sequence[Pack]],
        scale: float,
    ) -> None:
        self._stages, self._group, self._index, self._chunks, self._scale = stages, group, index, chunks, scale
        self._num_ranks = dist.get_world_size(group)
        self._num_stages, self._num_units = len(stages) * self._num_ranks, len(chunks[0])
        self._received: dict[Turn, tuple[Tensor, Any]] = {}  # by the pass that made it
        self._pending: list[tuple[Any, Tensor]] = []
        self._inputs: dict[tuple[int, int], Tensor] = {}  # by (stage, unit)
        self._outs: dict[tuple[int, int], Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=stages[0].device)

    def run(self, order: Sequence[Turn]) -> Tensor:
        """Runs an `interleaved_order`; returns the fp64 sum of scaled losses on the rank of the last stage, else 0."""
        for turn in order:
            target = turn.stage + (-1 if turn.is_backward else 1)
            if turn.stage % self._num_ranks == self._index:
                made = self._backward(turn) if turn.is_backward else self._forward(turn)
                if made is not None:
                    self._post(dist.isend, made, turn, target)
            elif 0 <= target < self._num_stages and target % self._num_ranks == self._index:
                room = self._room(turn, target)
                self._received[turn] = room, self._post(dist.irecv, room, turn, turn.stage)
        CLOCK.wait(*(work for work, _ in self._pending))
        loss_of_packs(self._chunks[-1], self._stages[-1].losses)
        return self._loss

    def _stage(self, stage: int) -> Stage:
        return self._stages[stage // self._num_ranks]

    def _chunk(self, turn: Turn) -> Pack:
        return self._chunks[turn.stage // self._num_ranks][turn.unit]

    def _room(self, turn: Turn, target: int) -> Tensor:
        if turn.is_backward:  # the gradient of the stage's output
            return torch.empty_like(self._outs[target, turn.unit], memory_format=torch.contiguous_format)
        stage = self._stage(target)
        shape = stage.hidden_shape(self._chunks[0][turn.unit].micro_batch)
        return torch.empty(shape, dtype=stage.compute_dtype, device=stage.device)

    def _post(self, kind: Callable[..., object], tensor: Tensor, turn: Turn, stage: int) -> Any:
        """Sends to, or receives from, the rank of a stage. Tags match messages on gloo; NCCL matches them by order."""
        tag = 2 * (turn.stage * self._num_units + turn.unit) + turn.is_backward
        peer = stage % self._num_ranks
        with CLOCK.waiting:
            (work,) = dist.batch_isend_irecv([dist.P2POp(kind, tensor, group=self._group, tag=tag, group_peer=peer)])
        if kind is dist.isend:
            self._pending.append((work, tensor))
            while self._pending and self._pending[0][0].is_completed():
                self._pending.pop(0)[0].wait()
        return work

    def _take(self, turn: Turn) -> Tensor:
        tensor, work = self._received.pop(turn)
        CLOCK.wait(work)
        return tensor

    def _forward(self, turn: Turn) -> Tensor | None:
        stage, chunk, key = self._stage(turn.stage), self._chunk(turn), (turn.stage, turn.unit)
        hidden, is_trained = None, torch.is_grad_enabled()
        if not stage.is_first:
            hidden = self._take(Turn(turn.stage - 1, turn.unit, False)).requires_grad_(is_trained)
        out = chunk.forward(stage, hidden, self._scale)
        if stage.is_last:
            self._loss += out.detach()
        if is_trained:
            self._outs[key] = out
            if hidden is not None:
                self._inputs[key] = hidden
        else:
            chunk.forget()
        return None if stage.is_last else out.detach().contiguous()

    def _backward(self, turn: Turn) -> Tensor | None:
        stage, key = self._stage(turn.stage), (turn.stage, turn.unit)
        gradient = None if stage.is_last else self._take(Turn(turn.stage + 1, turn.unit, True))
        self._chunk(turn).backward(stage, self._outs.pop(key), gradient)
        hidden = self._inputs.pop(key, None)
        if hidden is None:
            return None
        assert hidden.grad is not None
        return hidden.grad.contiguous()


# an older torch lacks this argument (and would pass it on to the stage), and always keeps the outputs
_STEPS = Schedule1F1B.step, ScheduleInterleaved1F1B.step
_NO_OUTPUTS = {"return_outputs": False} if all("return_outputs" in signature(s).parameters for s in _STEPS) else {}


class PipelineRunner(PackRunner):
    """Runs a replica's micro-batches through the stages of a pipeline. Raises `StrategyError`: one of torch's schedules
    in a pipeline of chunks, or its GPipe with several stages on a rank."""

    def __init__(
        self,
        stages: Sequence[Stage],  # this rank's stage, or several (`+v2`) in the order of the pipeline
        mesh: StrategyMesh,
        packs: PackRunner,  # what makes chains of packs
        schedule: str = "auto",  # one of `SCHEDULES`
        pad_token_id: int = 0,  # the token of padding, for schedules with one shape
    ) -> None:
        assert schedule in SCHEDULES, schedule
        check_runs(schedule, mesh.strategy)
        super().__init__(stages[-1])
        self.chains, self.num_backwards = packs.chains, packs.num_backwards  # type: ignore[method-assign]
        self._stages, self._rounds = stages, mesh.strategy.v
        self._schedule, self._pad_token_id = schedule, pad_token_id
        self._group, self._index, self._num_stages = mesh.pipeline, mesh.coord.pp, mesh.strategy.pp
        self._torch = _TorchSchedules(stages, mesh)
        self._name, self._speaks = str(mesh.strategy), mesh.coord.pp == mesh.coord.tp == 0

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        scale: float,
        most_tokens: int | None = None,
        joint: Sequence[Operation] | None = None,
    ) -> Tensor:
        chains = self.chains(micro_batches)
        chunks = _joined(chains)
        tokens = [chunk.micro_batch.num_tokens for chunk in chunks]
        sizes = [len(chain) for chain in chains] if len(chunks) > len(micro_batches) else []
        if self._rounds > 1:
            turns = choose_interleaved(self._schedule, tokens, self._num_stages, self._rounds, most_tokens, sizes)
            if turns.kind == "own":
                self._say_once(turns, most_tokens)
                return self._interleaved(micro_batches, scale).run(turns.order)
            padded = [m.padded_to(n, self._pad_token_id) for m, n in zip(micro_batches, turns.tokens, strict=True)]
            loss = self._torch.run(turns.kind, padded, scale)
            assert loss is not None  # it has enough packs
            return loss
        if joint is not None:
            return self._own(chunks, scale, joint)
        passes = choose_passes(self._schedule, tokens, self._num_stages, most_tokens, sizes)
        if passes.kind == "own":
            self._say_once(passes, most_tokens)
            return self._own(chunks, scale, passes.operations(self._index))
        loss = torch.zeros((), dtype=torch.float64, device=self._stage.device)
        padded = [m.padded_to(n, self._pad_token_id) for m, n in zip(micro_batches, passes.tokens, strict=True)]
        for first, end in passes.groups:
            of_passes = self._torch.run(passes.kind, padded[first:end], scale)
            if of_passes is None:  # the package's schedule holds as much with fewer packs than stages
                order = choose_passes("own", passes.tokens[first:end], self._num_stages).operations(self._index)
                of_passes = self._own(_joined(self.chains(padded[first:end])), scale, order)
            loss += of_passes
        return loss

    @torch.no_grad()
    def run_forward(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        chains = self.chains(micro_batches)
        chunks = _joined(chains)
        if self._rounds > 1:
            tokens, sizes = [chunk.micro_batch.num_tokens for chunk in chunks], list(map(len, chains))
            order = interleaved_order(tokens, self._num_stages, self._rounds, None, sizes, is_trained=False)
            return self._interleaved(micro_batches, scale).run(order)
        return self._own(chunks, scale, [(i, False) for i in range(len(chunks))])

    def _own(self, chunks: Sequence[Pack], scale: float, order: Sequence[Operation]) -> Tensor:
        assert self._group is not None
        return OneForwardOneBackward(self._stage, self._group, self._index).run(chunks, scale, order)

    def _interleaved(self, micro_batches: Sequence[MicroBatch], scale: float) -> InterleavedRun:
        assert self._group is not None
        of_stages = [_joined(self.chains(micro_batches)) for _ in self._stages]
        return InterleavedRun(self._stages, self._group, self._index, of_stages, scale)

    def _say_once(self, passes: Passes | InterleavedPasses, most_tokens: int | None) -> None:
        if passes.replaced and self._speaks:
            self._speaks = False
            logger.warning(
                "%s: padded packs in flight under the schedule %s would be more than %s tokens on a stage; in those cases own"
                " (1F1B without padding) runs instead",
                self._name,
                self._schedule,
                most_tokens,
            )


def _joined(chains: Sequence[Sequence[Pack]]) -> list[Pack]:
    return [chunk for chain in chains for chunk in chain]


_Message = tuple[Tensor, int, int]
"""Tensor, neighbour, tag; tags distinguish forward and backward of each chunk on gloo."""


class OneForwardOneBackward:
    """One run of the package's non-interleaved schedule.

    A stage posts its send to a neighbour and its next receive from the same neighbour as one batch: two blocking operations
    on a pair's NCCL communicator could wait for each other. Sends stay pending until the end, so that a stage never waits for
    its receiver. Without gradients nothing is kept for a backward.
    """

    def __init__(self, stage: Stage, group: dist.ProcessGroup, index: int) -> None:
        self._stage, self._group, self._index = stage, group, index
        self._pending: list[tuple[Any, Tensor | None]] = []
        self._in_flight: dict[int, tuple[Tensor | None, Tensor]] = {}  # input and output of a forward
        self._loss = torch.zeros((), dtype=torch.float64, device=stage.device)

    def run(self, chunks: Sequence[Pack], scale: float, order: Sequence[Operation]) -> Tensor:
        message: _Message | None = None
        for i, is_backward in order:
            wanted = self._wanted_gradient(i) if is_backward else self._wanted_hidden(chunks, i)
            received = self._hand_over(message, wanted)
            if is_backward:
                message = self._backward(chunks[i], i, received)
            else:
                out = self._forward(chunks, i, received, scale)
                message = None if self._stage.is_last else (out.detach().contiguous(), self._index + 1, 2 * i)
        self._exchange(message, None)
        CLOCK.wait(*(work for work, _ in self._pending))
        loss_of_packs(chunks, self._stage.losses)
        return self._loss

    def _hand_over(self, message: _Message | None, wanted: _Message | None) -> Tensor | None:
        """Sends the last operation's result, and receives the next one's input: together if it is one neighbour; otherwise
        the send goes first."""
        if message is None or wanted is None or message[1] == wanted[1]:
            return self._exchange(message, wanted)
        self._exchange(message, None)
        return self._exchange(None, wanted)

    def _wanted_hidden(self, chunks: Sequence[Pack], i: int) -> _Message | None:
        if self._stage.is_first:
            return None
        shape = self._stage.hidden_shape(chunks[i].micro_batch)
        return torch.empty(shape, dtype=self._stage.compute_dtype, device=self._stage.device), self._index - 1, 2 * i

    def _wanted_gradient(self, i: int) -> _Message | None:
        if self._stage.is_last:
            return None
        gradient = torch.empty_like(self._in_flight[i][1], memory_format=torch.contiguous_format)
        return gradient, self._index + 1, 2 * i + 1

    def _forward(self, chunks: Sequence[Pack], i: int, hidden: Tensor | None, scale: float) -> Tensor:
        if hidden is not None:
            hidden.requires_grad_()
        out = chunks[i].forward(self._stage, hidden, scale)
        if torch.is_grad_enabled():
            self._in_flight[i] = hidden, out
        else:
            chunks[i].forget()
        if self._stage.is_last:
            self._loss += out.detach()
        return out

    def _backward(self, chunk: Pack, i: int, grad: Tensor | None) -> _Message | None:
        hidden, out = self._in_flight.pop(i)
        chunk.backward(self._stage, out, grad)
        if hidden is None:
            return None
        assert hidden.grad is not None
        return hidden.grad.contiguous(), self._index - 1, 2 * i + 1

    def _exchange(self, send: _Message | None, receive: _Message | None) -> Tensor | None:
        """Posts a send and a receive together; returns the received tensor."""
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
    """Times a stage's computation, apart from the schedule around it, which waits for other stages."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with CLOCK.computing:
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with CLOCK.computing:
            return super().backward_one_chunk(*args, **kwargs)


class _TorchSchedules:
    def __init__(self, stages: Sequence[Stage], mesh: StrategyMesh) -> None:
        self._stages, self._mesh = stages, mesh
        self._modules = [_StageModule(stage) for stage in stages]

    def run(self, kind: str, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor | None:
        """The loss; None, without having run, if an older torch does not support GPipe with fewer packs than stages."""
        try:
            schedule = self._make(kind, micro_batches)
        except ValueError:
            if len(micro_batches) >= self._mesh.strategy.pp:
                raise
            return None
        for module in self._modules:
            module.micro_batches, module.scale = micro_batches, scale
        is_first, is_last = self._stages[0].is_first, self._stages[-1].is_last
        indices = torch.arange(len(micro_batches))
        losses: list[Tensor] = []
        first = (indices,) if is_first else ()
        last: dict[str, Any] = {"target": indices, "losses": losses} if is_last else {}
        with CLOCK.waiting:
            schedule.step(*first, index=indices, **_NO_OUTPUTS, **last)
        for module in self._modules:
            module.micro_batches = ()
        total = torch.zeros((), dtype=torch.float64, device=self._stages[-1].device)
        return total + sum(loss.detach() for loss in losses)

    def _make(self, kind: str, micro_batches: Sequence[MicroBatch]) -> Any:
        pipes = [self._pipe(index, micro_batches[0]) for index in range(len(self._stages))]
        options: dict[str, Any] = {"loss_fn": lambda out, _: out.sum(), "scale_grads": False}
        if len(pipes) > 1:
            return ScheduleInterleaved1F1B(pipes, len(micro_batches), **options)
        schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[kind]
        return schedule(pipes[0], len(micro_batches), **options)

    def _pipe(self, at: int, micro_batch: MicroBatch) -> PipelineStage:
        stage, strategy = self._stages[at], self._mesh.strategy
        # shapes and dtypes given here spare torch an inference pass over a real micro-batch
        hidden = torch.empty(
            stage.hidden_shape(micro_batch), dtype=stage.compute_dtype, device="meta", requires_grad=True
        )
        loss = torch.empty(1, dtype=torch.float64, device="meta", requires_grad=True)
        index = torch.empty(1, dtype=torch.int64, device="meta")
        return _TimedStage(
            self._modules[at],
            at * strategy.pp + self._mesh.coord.pp,
            strategy.num_stages,
            stage.device,
            input_args=index if stage.is_first else hidden,
            output_args=loss if stage.is_last else hidden,
            group=self._mesh.pipeline,
        )
