"""Attention among the ranks of cp, in the three ways of `costs.divided`.

* `_attend_by_heads` (Ulysses) exchanges tokens for heads, and runs the packed attention as it is on whole sequences.
* `_attend_gathered` gathers the keys and values of the sequences that are cut, and runs each of this rank's pieces as a
  sequence with a prefix. Nothing that was gathered is kept: the backward gathers again.
* `Ring` passes them from neighbour to neighbour instead.

Promise: no position sees a token of another document, and what is kept for the backward is of this rank's tokens alone.

Shapes: t tokens of this rank's row, S of keys that its pieces see, H query heads, K key/value heads, D head dim.

Attention of the pieces of a row to keys of their own each, forward and backward apart: what runs between two exchanges.

A piece is some tokens of a sequence, and its keys are those of the sequence from its first token to the last of the piece.
Which kernel runs says `kernel_of`; all have one meaning (`parallel.attention`).

Shapes: t tokens of the row, S of the keys of its pieces, H query heads, K key/value heads, D head dim.

Attention whose keys and values go around a ring of ranks, the next block on its way while the one at hand is used.

Each rank's queries meet the blocks of all ranks one after the other, and partial results are merged by the logarithms of
their sums; the backward takes each block's gradients from the merged result, and they travel on with the block until they
are home (Liu et al., 2023, "Ring Attention"). Sequences are cut so that all ranks have equal work in each step
(`packing.context_cuts`). Only tokens of sequences that are cut go around.

Shapes: t tokens of this rank's row, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.costs.divided import RING, ULYSSES, head_repeats
from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.packing.cuts import Piece, Shares
from hf_hotspa.parallel.attention import (
    AttendsDivided,
    AttentionCall,
    PackedSequences,
    Prefix,
    Scores,
    attend,
    attend_explicitly,
    explicit_gradients,
    varlen,
    varlen_takes,
)
from hf_hotspa.parallel.collectives import CLOCK
from hf_hotspa.parallel.context import (
    ContextParallel,
    Division,
    gathered,
    heads_to_tokens,
    scattered_sum,
    tokens_to_heads,
)
from hf_hotspa.parallel.dropout import DropoutMasks
from hf_hotspa.parallel.fused_attention import (
    FusedAttention,
    Inputs,
    SequenceLengths,
    attend_to_block,
    gradients_of_block,
    kernel_takes,
    merged,
)


class Kernel(Protocol):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[1, H, t, D], and what the backward needs beside it: [1, H, t] sums, or nothing."""

    def backward(self, of_out: Tensor, inputs: Inputs, out: Tensor, total: Tensor | None) -> Inputs:
        """The gradients of queries, keys, values and sinks."""


class Explicit:
    """Whatever becomes of the scores, on any device."""

    def __init__(self, lengths: SequenceLengths, scores: Scores) -> None:
        self._lengths, self._scores = lengths, scores

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return attend_explicitly(query[0], key[0], value[0], sinks, self._lengths, self._scores)[None], None

    def backward(self, of_out: Tensor, inputs: Inputs, out: Tensor, total: Tensor | None) -> Inputs:
        query, key, value, sinks = inputs
        *gradients, of_sinks = explicit_gradients(
            of_out[0], query[0], key[0], value[0], sinks, self._lengths, self._scores
        )
        of_query, of_key, of_value = (x[None] for x in gradients)
        return of_query, of_key, of_value, of_sinks


class Varlen:
    """On CUDA in 16-bit: the variable-length kernel, which runs once more in the backward for what it keeps."""

    def __init__(self, pack: PackedSequences, call: AttentionCall) -> None:
        self._pack, self._call = pack, call

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        call = replace(self._call, sinks=sinks)
        return varlen(query, key, value, self._pack, call).transpose(1, 2), None

    def backward(self, of_out: Tensor, inputs: Inputs, out: Tensor, total: Tensor | None) -> Inputs:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs if x is not None]
            again = self.forward(leaves[0], leaves[1], leaves[2], leaves[3] if len(leaves) > 3 else None)[0]
            gradients = torch.autograd.grad(again, leaves, of_out)
        return gradients[0], gradients[1], gradients[2], gradients[3] if len(gradients) > 3 else None


def kernel_of(
    module: nn.Module,
    query: Tensor,
    value: Tensor,
    call: AttentionCall,
    pack: PackedSequences,
    lengths: SequenceLengths,
) -> Kernel:
    """The kernel for a call of an attention module.

    Args:
        query: [1, H, t, D].
        value: [1, K, t, D].
        lengths: Queries and keys of the row's pieces.
    """
    if call.is_fusable and varlen_takes(query, value):
        return Varlen(pack, call)
    if call.is_fusable and kernel_takes(query, value):
        return FusedAttention(lengths, call.scaling, call.sliding_window)
    return Explicit(lengths, call.scores(module, query, pack))


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


def divided_pack(
    context: ContextParallel,
    division: Division,
    whole: MicroBatch,
    prefix: Prefix | None = None,
    dropout: DropoutMasks | None = None,
) -> tuple[MicroBatch, PackedSequences]:
    """This rank's row of a pack, and the row as attention sees it.

    Args:
        whole: The pack.
        prefix: What comes before its first sequence.
        dropout: Learns of the whole pack, where attention will see it.
    """
    row = context.row_of(whole)
    attends: AttendsDivided
    keys = None
    if context.way == ULYSSES:
        for pad in division.pads:
            whole = whole.padded_to(whole.num_tokens + pad, 0)
        sequences = PackedSequences(whole.lengths, whole.cu_seqlens, prefix)
        if dropout is not None:
            dropout.let_attend(sequences, whole, context.context.index)
        attends = partial(_attend_by_heads, division, sequences)
    elif context.way == RING:
        attends = Ring(division).attend
    else:
        tokens = _CutTokens(division, [context.shares((n,)) for n in prefix.chunks] if prefix is not None else [])
        keys = tuple(seen for _, seen in tokens.lengths)
        attends = partial(_attend_gathered, tokens, prefix)
    own = PackedSequences(row.lengths, row.cu_seqlens, divided=attends, gathered_keys=keys)
    own.carried, own.division = prefix, division
    return row, own


def _attend_by_heads(
    division: Division,
    whole: PackedSequences,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    pack: PackedSequences,
) -> Tensor:
    """Ulysses: heads in the place of tokens while a layer attends to the `whole` pack, padding at the end."""
    context, heads = division.context, query.shape[1]
    if heads % context.size:
        raise ModelError(
            f"{type(module).__name__} has {heads} heads on this rank, no multiple of cp{context.size}",
            why="heads are divided over the ranks of cp (ulysses)",
            fix="use context_parallel='allgather' (hotspa_context_parallel), or another cp",
        )
    repeats = head_repeats(heads, key.shape[1], context.size)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    if call.sinks is not None:
        call = replace(call, sinks=call.sinks.chunk(context.size)[context.index])
    query, key, value = tokens_to_heads(division, query, key, value)
    out = attend(module, query, key, value, call, whole)
    return heads_to_tokens(division, out.transpose(1, 2))[0].transpose(1, 2).contiguous()


# -- keys and values gathered -------------------------------------------------------------------------------------------


class _CutTokens:
    """Where the tokens of cut sequences are, on this rank and among those of all ranks.

    Args:
        before: The chunks before the pack of its first sequence, divided.
    """

    def __init__(self, division: Division, before: Sequence[Shares] = ()) -> None:
        shares, context = division.shares, division.context
        self.context, kept = context, [list[Piece]() for _ in range(context.size)]
        start = 0  # tokens of the first sequence before the pack
        for chunk in before:
            for rank, pieces in enumerate(chunk.pieces):
                kept[rank] += ((0, start + first, start + stop) for _, first, stop in pieces)
            start += chunk.lengths[0]
        cut = shares.cut | ({0} if start else set())
        for rank, of_pack in enumerate(shares.pieces):
            kept[rank] += (_later(piece, start) for piece in of_pack if piece[0] in cut)
        counts = [sum(stop - first for _, first, stop in pieces) for pieces in kept]
        self.most = max(counts)
        places: dict[int, list[int]] = {i: [0] * (shares.lengths[i] + (0 if i else start)) for i in cut}
        for rank, held in enumerate(kept):
            at = rank * self.most
            for i, first, stop in held:
                places[i][first:stop] = range(at, at + stop - first)
                at += stop - first
        own = shares.pieces[context.index]
        self.num_before = counts[context.index] - sum(stop - first for i, first, stop in own if i in cut)
        self.row = self.num_before + shares.rows[context.index]
        mine, keys, lengths, begin = list(range(self.num_before)), list[int](), [], self.num_before
        for i, first, stop in (_later(piece, start) for piece in own):
            end = begin + stop - first
            if i in cut:
                mine += range(begin, end)
                keys += (self.row + place for place in places[i][:first])
            keys += range(begin, end)
            lengths.append((stop - first, stop))
            begin = end
        if begin < self.row:  # padding
            keys += range(begin, self.row)
            lengths.append((self.row - begin, self.row - begin))
        self.lengths: SequenceLengths = tuple(lengths)
        self.mine, self.keys = (torch.tensor(x, dtype=torch.int64).to(division.device) for x in (mine, keys))

    def gathered(self, *tensors: Tensor) -> list[Tensor]:
        """[1, K, S, D] of what this rank's pieces see, one after the other, of [1, K, before + t, D] each."""
        if not self.most:  # no sequence is cut
            return [x.index_select(2, self.keys) for x in tensors]
        started = [gathered(x[0].transpose(0, 1).index_select(0, self.mine), self.most, self.context) for x in tensors]
        all_tokens = []
        for x in tensors:
            work, whole = started.pop(0)  # is let go of as soon as it was used
            CLOCK.wait(work)
            rows = torch.cat([x[0].transpose(0, 1), whole.flatten(0, 1)])
            del work, whole
            all_tokens.append(rows.index_select(0, self.keys).transpose(0, 1)[None])
            del rows
        return all_tokens

    def returned(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients [1, K, before + t, D] of this rank's keys, summed over all that saw them, of [1, K, S, D] each.

        What is given is taken out of the list, and let go of as soon as it was used: it is as large as the pack.
        """
        if not self.most:
            return [torch.zeros_like(x[:, :, : self.row]).index_add_(2, self.keys, x) for x in gradients]
        started, dtype = [], gradients[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        while gradients:
            x = gradients.pop(0)[0].transpose(0, 1).to(wide)
            rows = x.new_zeros(self.row + self.context.size * self.most, *x.shape[1:]).index_add_(0, self.keys, x)
            others = rows[self.row :].view(self.context.size, self.most, *x.shape[1:]).to(dtype)
            own = rows[: self.row].clone()
            del x, rows
            started.append((*scattered_sum(others, self.context), others, own))
            del others
        own_gradients = []
        while started:
            work, parts, _, own = started.pop(0)
            CLOCK.wait(work)
            total = parts.sum(0, dtype=wide)[: len(self.mine)]
            own_gradients.append(own.index_add_(0, self.mine, total).transpose(0, 1)[None].to(dtype))
        return own_gradients


def _later(piece: Piece, start: int) -> Piece:
    """A piece whose tokens are counted from the first one of its sequence, which may be before the pack."""
    return piece if piece[0] else (0, piece[1] + start, piece[2] + start)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, tokens: _CutTokens, kernel: Kernel
    ) -> Tensor:
        keys, values = tokens.gathered(key, value)
        out, total = kernel.forward(query, keys, values, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, total)
        ctx.tokens, ctx.kernel = tokens, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, total = ctx.saved_tensors
        tokens: _CutTokens = ctx.tokens
        keys, values = tokens.gathered(key, value)
        inputs = query, keys, values, sinks
        of_query, of_keys, of_values, of_sinks = ctx.kernel.backward(gradients[0], inputs, out, total)
        given = [of_keys, of_values]
        del keys, values, inputs, of_keys, of_values
        return of_query, *tokens.returned(given), of_sinks, None, None


def _attend_gathered(
    tokens: _CutTokens,
    prefix: Prefix | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    pack: PackedSequences,
) -> Tensor:
    """With keys and values of cut sequences from all ranks; `prefix` has what this rank keeps of those of earlier chunks."""
    kernel = kernel_of(module, query, value, call, pack, tokens.lengths)
    if prefix is not None:
        kept = prefix.before(module, key, value)
        key, value = (torch.cat([part, x], 2) for part, x in zip(kept, (key, value), strict=True))
    out: Tensor = _Gathered.apply(query, key, value, call.sinks, tokens, kernel)
    return out.transpose(1, 2).contiguous()  # families take views of it
