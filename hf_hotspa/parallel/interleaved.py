"""One run of a pipeline whose ranks have several stages each (`+v2`): interleaved 1F1B for packs of any sizes.

The order of passes, and so of messages, is one for all ranks (`packing.interleaved_order`). A rank goes through it: its own
passes it runs, and sends on what they made; of others' passes it posts a receive where what they make is for one of its
stages. So both ends post their messages in the same order, whatever is between two ranks (with two of them, all messages
are between one pair); a receive is waited for by the pass that needs it, and sends stay pending until the end.

Gradients reach a weight in the order of its stage's backward passes, which is the same in every run.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.packing.interleaved_order import Turn
from hf_hotspa.parallel.token_chunks import Chunk, Stage, loss_of_packs
from hf_hotspa.parallel.waiting import CLOCK


class InterleavedRun:
    """One run on one rank.

    Args:
        stages: This rank's, in the order of the pipeline.
        group: The ranks of the pipeline; this one's place there is `index`.
        chunks: For each of its stages the chunks (or whole packs) of the replica; the same on every rank.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        group: dist.ProcessGroup,
        index: int,
        chunks: Sequence[Sequence[Chunk]],
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
        """Runs all passes.

        Args:
            order: See `interleaved_order`; of forward passes alone without gradients.

        Returns:
            fp64 scalar: the sum of the scaled losses where the pipeline ends, 0 elsewhere.
        """
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

    def _chunk(self, turn: Turn) -> Chunk:
        return self._chunks[turn.stage // self._num_ranks][turn.unit]

    def _room(self, turn: Turn, target: int) -> Tensor:
        """What another rank's pass makes for a stage of this one is received here."""
        if turn.is_backward:  # the gradient of what the stage has made
            return torch.empty_like(self._outs[target, turn.unit], memory_format=torch.contiguous_format)
        stage = self._stage(target)
        shape = stage.hidden_shape(self._chunks[0][turn.unit].micro_batch)
        return torch.empty(shape, dtype=stage.compute_dtype, device=stage.device)

    def _post(self, kind: Any, tensor: Tensor, turn: Turn, stage: int) -> Any:
        """Sends to, or receives from, the rank of a stage. Tags keep messages apart on gloo; NCCL goes by their order."""
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
        """What a pass of another rank has made."""
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
