"""Attention whose keys and values go around a ring of ranks, the next block on its way while the one at hand is used.

Each rank's queries meet the blocks of all ranks one after the other, and partial results are merged by the logarithms of
their sums; the backward takes each block's gradients from the merged result, and they travel on with the block until they
are home (Liu et al., 2023, "Ring Attention"). Sequences are cut so that all ranks have equal work in each step
(`packing.context_cuts`). Only tokens of sequences that are cut go around.

Shapes: t tokens of this rank's row, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.packing.context_cuts import Piece
from hf_hotspa.parallel.attention import AttentionCall, PackedSequences
from hf_hotspa.parallel.context import Division
from hf_hotspa.parallel.prefix_attention import attend_to_block, gradients_of_block, kernel_takes, merged
from hf_hotspa.parallel.waiting import CLOCK


class Ring:
    """The blocks of keys and values of a pack that go around, and which queries of this rank see which of their keys."""

    def __init__(self, division: Division) -> None:
        shares, context = division.shares, division.context
        self.context, self.longest = context, max(shares.lengths)
        cut = shares.cut
        self._blocks = [_placed([piece for piece in own if piece[0] in cut]) for own in shares.pieces]
        self.most = max(sum(stop - first for _, first, stop, _ in block) for block in self._blocks)
        self.own = _placed(shares.pieces[context.index])
        mine = [t for i, first, stop, at in self.own if i in cut for t in range(at, at + stop - first)]
        self.mine = torch.tensor(mine, dtype=torch.int64).to(division.device)
        self.steps = context.size if self.most else 1  # without a cut sequence nothing goes around
        end = self.own[-1][3] + self.own[-1][2] - self.own[-1][1] if self.own else 0
        row = shares.rows[context.index]
        self.pads = [slice(end, row)] if end < row else []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, pack: PackedSequences
    ) -> Tensor:
        """See `attention.AttendsDivided`."""
        if call.slides(self.longest) or not call.is_plain or not kernel_takes(query, value):
            raise UnsupportedError(
                f"{type(module).__name__} on a ring",
                why="its blocks are full attention with plain scores, by a kernel for CPU and equal widths of keys and values",
                fix="use context_parallel='allgather' (hotspa_context_parallel), or leave it at 'auto'",
            )
        out: Tensor = _RingFunction.apply(query, key, value, self, call.scaling)
        return out.transpose(1, 2).contiguous()  # families take views of it

    def pairs(self, step: int) -> list[tuple[slice, slice, bool]]:
        """Queries of the row, keys of the block at hand, and whether these are their own tokens.

        Args:
            step: How many ranks back the block comes from; that of step 0 is the row itself.
        """
        block = self.own if step == 0 else self._blocks[(self.context.index - step) % self.context.size]
        seen = [
            (slice(at, at + stop - first), slice(there, there + end - begin), (begin, end) == (first, stop))
            for i, first, stop, at in self.own
            for j, begin, end, there in block
            if i == j and begin <= first
        ]
        seen.sort(key=lambda pair: not pair[2])  # own tokens first: every query has seen a key then
        return seen + [(pad, pad, True) for pad in self.pads if step == 0]

    def block(self, *tensors: Tensor) -> Tensor:
        """[n, K, most, D] of the tokens that go around, of [1, K, t, D] each."""
        rows = torch.stack([x[0].index_select(1, self.mine) for x in tensors])
        return functional.pad(rows, (0, 0, 0, self.most - rows.shape[2])).contiguous()

    def passed(self, block: Tensor) -> tuple[Any, Tensor]:
        """Starts to give a block to the next rank: what to wait for, and what comes from the one before."""
        size, index, group = self.context.size, self.context.index, self.context.group
        received = torch.empty_like(block)
        self.context.count(block, block.numel())
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, group=group, group_peer=(index - 1) % size),
                dist.P2POp(dist.isend, block, group=group, group_peer=(index + 1) % size),
            ]
        )
        return works, received


def _placed(pieces: Sequence[Piece]) -> list[tuple[int, int, int, int]]:
    """Pieces and where each begins, one after the other."""
    placed, at = [], 0
    for sequence, first, stop in pieces:
        placed.append((sequence, first, stop, at))
        at += stop - first
    return placed


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, scaling: float | None) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(*query.shape[:3], value.shape[3], dtype=wide)
        total = torch.full(query.shape[:3], -torch.inf, dtype=wide)
        at_hand = ring.block(key, value)
        keys, values = key, value
        for step in range(ring.steps):
            last = step + 1 == ring.steps
            works, following = ((), at_hand) if last else ring.passed(at_hand)
            for queries, block, causal in ring.pairs(step):
                part, sums = attend_to_block(
                    query[:, :, queries], keys[:, :, block], values[:, :, block], causal, scaling
                )
                if step == 0 and causal:
                    out[:, :, queries], total[:, :, queries] = part, sums
                else:
                    both = merged(out[:, :, queries], total[:, :, queries], part, sums)
                    out[:, :, queries], total[:, :, queries] = both
            CLOCK.wait(*works)
            at_hand = following
            keys, values = at_hand[0][None], at_hand[1][None]
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.ring, ctx.scaling = ring, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        ring: Ring = ctx.ring
        of_out = gradients[0]
        of_query = torch.zeros_like(query, dtype=total.dtype)
        of_row = torch.zeros(2, *key.shape[1:], dtype=total.dtype)
        at_hand = ring.block(key, value)
        keys, values, own = key, value, of_row
        returning: tuple[Any, Tensor] | None = None
        for step in range(ring.steps):
            last = step + 1 == ring.steps
            works, following = ((), at_hand) if last else ring.passed(at_hand)
            for queries, block, causal in ring.pairs(step):
                part, of_key, of_value = gradients_of_block(
                    of_out[:, :, queries].contiguous(),
                    query[:, :, queries],
                    keys[:, :, block],
                    values[:, :, block],
                    out[:, :, queries],
                    total[:, :, queries].contiguous(),
                    causal,
                    ctx.scaling,
                )
                of_query[:, :, queries] += part
                own[0][:, block] += of_key[0]
                own[1][:, block] += of_value[0]
            if returning is not None:  # what others have added to this block so far
                CLOCK.wait(*returning[0])
                own += returning[1]
            if step:
                returning = ring.passed(own)
            CLOCK.wait(*works)
            at_hand = following
            keys, values = at_hand[0][None], at_hand[1][None]
            own = torch.zeros_like(at_hand, dtype=total.dtype)
        if returning is not None:
            CLOCK.wait(*returning[0])
            of_row.index_add_(2, ring.mine, returning[1][:, :, : len(ring.mine)])
        of_key, of_value = of_row.to(key.dtype)
        return of_query.to(query.dtype), of_key[None], of_value[None], None, None
