"""Attention among the ranks of cp, in the three ways of `costs.context`.

* `_attend_by_heads` (Ulysses) exchanges tokens for heads, and runs the packed attention as it is on whole sequences.
* `_attend_gathered` gathers the keys and values of the sequences that are cut, and runs each of this rank's pieces as a
  sequence with a prefix. Nothing that was gathered is kept: the backward gathers again.
* `ring_attention.Ring` passes them from neighbour to neighbour instead.

Promise: no position sees a token of another document, and what is kept for the backward is of this rank's tokens alone.

Shapes: t tokens of this rank's row, S of keys that its pieces see, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_hotspa.costs.context import RING, ULYSSES, head_repeats
from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import ModelError
from hf_hotspa.packing.context_cuts import Piece, Shares
from hf_hotspa.parallel.attention import AttendsDivided, AttentionCall, PackedSequences, Prefix, attend
from hf_hotspa.parallel.context import (
    ContextParallel,
    Division,
    gathered,
    heads_to_tokens,
    scattered_sum,
    tokens_to_heads,
)
from hf_hotspa.parallel.context_kernels import Kernel, kernel_of
from hf_hotspa.parallel.dropout import DropoutMasks
from hf_hotspa.parallel.explicit_attention import SequenceLengths
from hf_hotspa.parallel.ring_attention import Ring
from hf_hotspa.parallel.waiting import CLOCK


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
    return row, PackedSequences(row.lengths, row.cu_seqlens, divided=attends, gathered_keys=keys)


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
