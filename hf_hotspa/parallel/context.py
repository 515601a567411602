"""Context parallelism: the tokens of each pack are divided over the ranks of cp, and only attention sees them all.

This file divides packs (`ContextParallel.divide`), exchanges tokens between ranks, with gradients, and runs attention on top,
in the three methods of `costs.divided`:

* `_attend_by_heads` (Ulysses) exchanges tokens for heads, and runs the usual packed attention on whole sequences.
* `_attend_gathered` gathers the keys and values of cut sequences, and runs each of this rank's pieces as a sequence with a
  prefix. The backward gathers again.
* `Ring` passes them from neighbour to neighbour, the next block while the current one is used, and merges partial results by
  the logarithms of their sums. The backward computes each block's gradients from the merged result, and they travel with the
  block until it is back (Liu et al., 2023, "Ring Attention"). Sequences are cut so that all ranks have equal work in each step
  (`packing.cuts`).

All other parts of a model work token by token, unchanged. Positions, targets, and the inputs of dropout and noise are as in
whole sequences; each rank's loss is the sum over its own tokens. A piece is some tokens of a sequence; its keys are all tokens
from the sequence's first to the piece's last. `kernel_of` chooses the kernel.

Promise: no position sees a token of another document, and only this rank's tokens are kept for the backward.

Shapes: T tokens of the pack, t of this rank's row, S keys that its pieces see, P ranks, H query heads, K key/value heads, D
head dim.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.costs.divided import RING, ULYSSES, choose_way, head_repeats
from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.cuts import Piece, Shares, cut_for, share_by_cost, share_by_tokens
from hf_hotspa.parallel.attention import (
    AttendsDivided,
    AttentionCall,
    ExplicitAttention,
    PackedSequences,
    Prefix,
    attend,
    varlen,
    varlen_takes,
)
from hf_hotspa.parallel.collectives import CLOCK, Context, gather_rows, start_gather, with_gradient
from hf_hotspa.parallel.fused_attention import (
    AttentionKernel,
    FusedAttention,
    Inputs,
    SequenceLengths,
    attend_by,
    attend_to_block,
    gradients_of_block,
    kernel_takes,
    merged,
)
from hf_hotspa.parallel.mesh import StrategyMesh


@dataclass
class ContextGroup:
    """The ranks of cp that share a pack."""

    group: dist.ProcessGroup
    size: int  # P
    index: int  # this rank's place among them
    sent_bytes: int = 0  # bytes sent to the others so far; each exchange adds to it when it begins

    def count(self, x: Tensor, elements: int) -> None:
        """Counts sent elements of a tensor, once for each receiving rank."""
        self.sent_bytes += elements * x.element_size()


class Division:
    """Where the tokens of one divided pack and of this rank's row are. Equal on all ranks but for `index`."""

    def __init__(self, shares: Shares, context: ContextGroup, device: torch.device) -> None:
        self.shares, self.context, self.device = shares, context, device

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack in this rank's row."""
        return self.shares.rows[self.context.index] - self.shares.pads[self.context.index]

    @property
    def pads(self) -> tuple[int, ...]:
        """The lengths of the padding of all ranks that have any."""
        return tuple(pad for pad in self.shares.pads if pad)

    @cached_property
    def _order(self) -> list[int]:
        """For each token of the pack, then of all padding, its place in the concatenated rows of all ranks."""
        shares, starts = self.shares, [0, *accumulate(self.shares.rows)]
        order = [0] * sum(shares.lengths)
        for rank, tokens, place in _pieces(shares):
            order[tokens] = range(starts[rank] + place.start, starts[rank] + place.stop)
        return order + [at for end, pad in zip(starts[1:], shares.pads, strict=True) for at in range(end - pad, end)]

    @cached_property
    def to_pack(self) -> Tensor | None:
        """int64 [T + padding]: see `_order`; None if the concatenated rows are the pack."""
        if self._order == list(range(len(self._order))):
            return None
        return torch.tensor(self._order).to(self.device, non_blocking=True)

    @cached_property
    def to_rows(self) -> Tensor | None:
        """The inverse of `to_pack`."""
        return None if self.to_pack is None else torch.argsort(self.to_pack)


class ContextParallel:
    """A replica's rank in context parallelism. Raises `StrategyError`: the method cannot run the model, see
    `choose_way`. `way`: the method of attention, see `costs.divided`; given, the one in the engine's options.
    `pair_costs`: see the engine's options; chunks are cut by them."""

    def __init__(
        self, mesh: StrategyMesh, shape: ModelShape, way: str, pair_costs: Mapping[int, float], device: torch.device
    ) -> None:
        assert mesh.context is not None
        self._strategy = strategy = mesh.strategy
        self.way, self.device = choose_way(strategy, shape, way), device
        self.context = ContextGroup(mesh.context, strategy.cp, mesh.coord.cp)  # the ranks that share each pack
        # `DropoutMasks.let_attend`, called with the whole pack where attention sees it; None without dropout
        self.let_attend: Callable[[PackedSequences, MicroBatch, int], None] | None = None
        self._quadratic_cost = shape.quadratic_cost
        self._pair_cost = pair_costs.get(strategy.tp, shape.quadratic_cost)
        self._multiple = strategy.tp if strategy.sp else 1

    def bind(self) -> None:
        self.context.sent_bytes = 0

    def measures(self) -> dict[str, float]:
        return {"context_bytes": float(self.context.sent_bytes)}

    def shares(self, lengths: Sequence[int]) -> Shares:
        return _shares(tuple(lengths), self.context.size, self.way, self._quadratic_cost, self._multiple)

    def parts(self, lengths: Sequence[int]) -> list[Shares]:
        """The shares of all ranks in a pack, or in each of its chunks, in their forward order."""
        if not self._strategy.cuts_packs:
            return [self.shares(lengths)]
        ends = list(accumulate(lengths))
        chunks = [chunk for chain in cut_for(self._strategy, lengths, self._pair_cost) for chunk in chain]
        divisions = []
        for first, stop in chunks:
            inside = [min(end, stop) - max(end - own, first) for end, own in zip(ends, lengths, strict=True)]
            divisions.append(self.shares([tokens for tokens in inside if tokens > 0]))
        return divisions

    def divide(self, lengths: Sequence[int]) -> Division:
        return Division(self.shares(lengths), self.context, self.device)

    def row_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of this rank's row of a pack, with padding."""
        return self.shares(lengths).rows[self.context.index]

    def tokens_kept(self, num_tokens: int) -> int:
        """How many tokens of a sequence's chunk have keys and values here: all (of some heads), or this rank's."""
        if self.way == ULYSSES:
            return num_tokens
        return sum(stop - first for _, first, stop in self.shares((num_tokens,)).pieces[self.context.index])

    def row_of(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's row of a pack, with padding."""
        shares = self.shares(micro_batch.lengths)
        own = micro_batch.pieces(shares.pieces[self.context.index])
        return own.padded_to(shares.rows[self.context.index], 0)


@lru_cache(maxsize=256)
def _shares(lengths: tuple[int, ...], size: int, way: str, quadratic_cost: float, multiple: int) -> Shares:
    if way == ULYSSES:
        return share_by_tokens(lengths, size, multiple)
    return share_by_cost(lengths, size, quadratic_cost, multiple)


def in_order(rows: Sequence[Tensor], shares: Shares) -> Tensor:
    """[T, ...] of a pack, from each rank's tokens, without padding."""
    whole = rows[0].new_empty(sum(shares.lengths), *rows[0].shape[1:])
    for rank, tokens, place in _pieces(shares):
        whole[tokens] = rows[rank][place]
    return whole


def _pieces(shares: Shares) -> Iterator[tuple[int, slice, slice]]:
    """Yields each piece's rank, its tokens in the pack, and its place in the rank's row."""
    begins = [0, *accumulate(shares.lengths)]
    for rank, pieces in enumerate(shares.pieces):
        at = 0
        for sequence, first, stop in pieces:
            yield rank, slice(begins[sequence] + first, begins[sequence] + stop), slice(at, at + stop - first)
            at += stop - first


# -- exchanges --------------------------------------------------------------------------------------------------------


def _start(out: Tensor, own: Tensor, received: list[int], sent: list[int], context: ContextGroup) -> Any:
    context.count(own, sum(sent) - sent[context.index])
    return dist.all_to_all_single(out, own, received, sent, group=context.group, async_op=True)


def _to_heads(*tensors: Tensor, division: Division) -> tuple[Tensor, ...]:
    """From [1, h, t, D] of this rank's tokens to [1, h / P, T, D] of its heads, several at once; h may differ."""
    context, rows = division.context, division.shares.rows
    started = []
    for x in tensors:
        heads, width = x.shape[1] // context.size, x.shape[3]
        sizes = [heads * row * width for row in rows]
        out = x.new_empty(sum(sizes))
        own = x.contiguous()
        started.append(
            (_start(out, own.view(-1), sizes, [own.numel() // context.size] * context.size, context), out, own)
        )
    by_heads = []
    for (work, out, _), x in zip(started, tensors, strict=True):
        CLOCK.wait(work)
        heads, width = x.shape[1] // context.size, x.shape[3]
        parts = out.split([heads * row * width for row in rows])
        whole = torch.cat([part.view(heads, row, width) for part, row in zip(parts, rows, strict=True)], 1)
        order = division.to_pack
        by_heads.append((whole if order is None else whole.index_select(1, order))[None])
    return tuple(by_heads)


def _to_tokens(*tensors: Tensor, division: Division) -> tuple[Tensor, ...]:
    """The inverse of `_to_heads`."""
    context, rows = division.context, division.shares.rows
    started = []
    for x in tensors:
        order = division.to_rows
        own = x[0] if order is None else x[0].index_select(1, order)
        sent = torch.cat([part.reshape(-1) for part in own.split(rows, 1)])
        mine = own.shape[0] * rows[context.index] * own.shape[2]
        out = x.new_empty(mine * context.size)
        sizes = [own.shape[0] * row * own.shape[2] for row in rows]
        started.append((_start(out, sent, [mine] * context.size, sizes, context), out, sent))
    by_tokens = []
    for (work, out, _), x in zip(started, tensors, strict=True):
        CLOCK.wait(work)
        by_tokens.append(out.view(1, -1, rows[context.index], x.shape[3]))
    return tuple(by_tokens)


def tokens_to_heads(division: Division, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Exchanges some tokens of all heads for all tokens of some heads, with gradients. Collective in cp. `tensors`: [1,
    h, t, D] each, of this rank's row; h a multiple of P, and may differ. Returns [1, h / P, T + padding, D] each, the
    heads of the rank's place, in the order of the pack, with padding at the end."""
    return with_gradient(partial(_to_heads, division=division), partial(_to_tokens, division=division), *tensors)


def heads_to_tokens(division: Division, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `tokens_to_heads`, with gradients."""
    return with_gradient(partial(_to_tokens, division=division), partial(_to_heads, division=division), *tensors)


def gathered(x: Tensor, most: int, context: ContextGroup) -> tuple[Any, Tensor]:
    """Starts to gather [m, ...] of every rank, m <= `most`; returns the work, and [P, most, ...], valid once it is done."""
    context.count(x, most * x.shape[1:].numel() * (context.size - 1))
    return start_gather(x, most, context.group)


def scattered_sum(x: Tensor, context: ContextGroup) -> tuple[Any, Tensor]:
    """Starts to send each rank its part [most, ...] of [P, most, ...]; returns the work, and the parts from all ranks.

    This rank has to sum the parts, [P, most, ...]. (Not a reduce-scatter: gloo has none for every shape, and the sum is made
    in a wider dtype than the messages.)
    """
    out = torch.empty_like(x)
    context.count(x, x.numel() // context.size * (context.size - 1))
    return dist.all_to_all_single(out, x.contiguous(), group=context.group, async_op=True), out


def all_tokens(x: Tensor, division: Division) -> Tensor:
    """Gathers [t, ...] of this rank's row to [T, ...] of the pack, for a computation that every rank repeats, so that the
    gradient of this rank's own tokens is already complete. Collective in cp."""
    rows, context = division.shares.rows, division.context
    begin = sum(rows[: context.index])

    def in_order_of_pack(x: Tensor) -> Tensor:
        context.count(x, max(rows) * x.shape[1:].numel() * (context.size - 1))
        joined = gather_rows(x, rows, context.group)
        return joined if division.to_pack is None else joined.index_select(0, division.to_pack)

    def own(grad: Tensor) -> Tensor:
        in_rows = grad if division.to_rows is None else grad.index_select(0, division.to_rows)
        return in_rows[begin : begin + rows[context.index]]

    return with_gradient(in_order_of_pack, own, x)[: sum(division.shares.lengths)]


# -- attention ---------------------------------------------------------------------------------------------------------


class Varlen(AttentionKernel):
    """On CUDA in 16-bit: the variable-length kernel; the backward runs it again for the saved tensors."""

    def __init__(self, pack: PackedSequences, call: AttentionCall) -> None:
        self._pack, self._call = pack, call

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        call = replace(self._call, sinks=sinks)
        return varlen(query, key, value, self._pack, call).transpose(1, 2), None

    def backward(self, d_out: Tensor, inputs: Inputs, out: Tensor | None, total: Tensor | None) -> Inputs:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs if x is not None]
            again = self.forward(leaves[0], leaves[1], leaves[2], leaves[3] if len(leaves) > 3 else None)[0]
            gradients = torch.autograd.grad(again, leaves, d_out)
        return gradients[0], gradients[1], gradients[2], gradients[3] if len(gradients) > 3 else None


def kernel_of(
    module: nn.Module,
    query: Tensor,
    value: Tensor,
    call: AttentionCall,
    pack: PackedSequences,
    lengths: SequenceLengths,
) -> AttentionKernel:
    """The kernel for an attention's query [1, H, t, D] and value [1, K, t, D], with `lengths` of the row's pieces."""
    if call.is_fusable and varlen_takes(query, value):
        return Varlen(pack, call)
    if call.is_fusable and kernel_takes(query, value):
        return FusedAttention(lengths, call.scaling, call.sliding_window, call.both_ways)
    return ExplicitAttention(lengths, call.scores(module, query, pack))


class Ring:
    """The blocks of keys and values that travel around, and which queries of this rank see which of their keys."""

    def __init__(self, division: Division) -> None:
        shares, context = division.shares, division.context
        self.context, self.longest = context, max(shares.lengths)
        cut = shares.cut
        self._blocks = [_placed([piece for piece in own if piece[0] in cut]) for own in shares.pieces]
        self.most = max(sum(stop - first for _, first, stop, _ in block) for block in self._blocks)
        self.own = _placed(shares.pieces[context.index])
        mine = [t for i, first, stop, at in self.own if i in cut for t in range(at, at + stop - first)]
        self.mine = torch.tensor(mine, dtype=torch.int64).to(division.device)
        self.steps = context.size if self.most else 1  # without a cut sequence nothing travels
        end = self.own[-1][3] + self.own[-1][2] - self.own[-1][1] if self.own else 0
        row = shares.rows[context.index]
        self.pads = [slice(end, row)] if end < row else []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, pack: PackedSequences
    ) -> Tensor:
        if call.slides(self.longest) or not call.is_plain or not kernel_takes(query, value):
            raise UnsupportedError(
                f"{type(module).__name__} on a ring",
                why="its blocks are full attention with plain scores, by a kernel for CPU and equal widths of keys and values",
                fix="use context_parallel='allgather' (hotspa_context_parallel), or leave it at 'auto'",
            )
        out: Tensor = _RingFunction.apply(query, key, value, self, call.scaling)
        return out.transpose(1, 2).contiguous()  # families take views of it

    def pairs(self, step: int) -> list[tuple[slice, slice, bool]]:
        """Queries of the row, keys of the block `step` ranks back, and whether it is the row itself (step 0)."""
        block = self.own if step == 0 else self._blocks[(self.context.index - step) % self.context.size]
        seen = [
            (slice(at, at + stop - first), slice(there, there + end - begin), (begin, end) == (first, stop))
            for i, first, stop, at in self.own
            for j, begin, end, there in block
            if i == j and begin <= first
        ]
        seen.sort(key=lambda pair: not pair[2])  # own tokens first, so that every query has seen a key
        return seen + [(pad, pad, True) for pad in self.pads if step == 0]

    def block(self, *tensors: Tensor) -> Tensor:
        """[n, K, most, D] of the travelling tokens, from [1, K, t, D] each."""
        rows = torch.stack([x[0].index_select(1, self.mine) for x in tensors])
        return functional.pad(rows, (0, 0, 0, self.most - rows.shape[2])).contiguous()

    def travel(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The steps, with keys and values [1, K, n, D] of the row, then of the block `step` ranks back. While one is used, the
        next is on its way."""
        at_hand = self.block(key, value)
        for step in range(self.steps):
            works, following = ((), at_hand) if step + 1 == self.steps else self.passed(at_hand)
            yield step, key, value
            CLOCK.wait(*works)
            at_hand = following
            key, value = at_hand[0][None], at_hand[1][None]

    def passed(self, block: Tensor) -> tuple[Any, Tensor]:
        """Starts to send a block to the next rank; returns the works, and the buffer for the previous rank's block."""
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
    placed, at = [], 0
    for sequence, first, stop in pieces:
        placed.append((sequence, first, stop, at))
        at += stop - first
    return placed


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, query: Tensor, key: Tensor, value: Tensor, ring: Ring, scaling: float | None) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(*query.shape[:3], value.shape[3], dtype=wide)
        total = torch.full(query.shape[:3], -torch.inf, dtype=wide)
        for step, keys, values in ring.travel(key, value):
            for queries, block, causal in ring.pairs(step):
                part, sums = attend_to_block(
                    query[:, :, queries], keys[:, :, block], values[:, :, block], causal, scaling
                )
                if step == 0 and causal:
                    out[:, :, queries], total[:, :, queries] = part, sums
                else:
                    both = merged(out[:, :, queries], total[:, :, queries], part, sums)
                    out[:, :, queries], total[:, :, queries] = both
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.ring, ctx.scaling = ring, scaling
        return out

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        ring: Ring = ctx.ring
        d_out = gradients[0]
        d_query = torch.zeros_like(query, dtype=total.dtype)
        of_row = torch.zeros(2, *key.shape[1:], dtype=total.dtype)
        returning: tuple[Any, Tensor] | None = None
        for step, keys, values in ring.travel(key, value):
            own = keys.new_zeros(2, *keys.shape[1:], dtype=total.dtype) if step else of_row
            for queries, block, causal in ring.pairs(step):
                part, d_key, d_value = gradients_of_block(
                    d_out[:, :, queries].contiguous(),
                    query[:, :, queries],
                    keys[:, :, block],
                    values[:, :, block],
                    (out[:, :, queries], total[:, :, queries].contiguous()),
                    causal,
                    ctx.scaling,
                )
                d_query[:, :, queries] += part
                own[0][:, block] += d_key[0]
                own[1][:, block] += d_value[0]
            if returning is not None:  # what others have added to this block so far
                CLOCK.wait(*returning[0])
                own += returning[1]
            if step:
                returning = ring.passed(own)
        if returning is not None:
            CLOCK.wait(*returning[0])
            of_row.index_add_(2, ring.mine, returning[1][:, :, : len(ring.mine)])
        d_key, d_value = of_row.to(key.dtype)
        return d_query.to(query.dtype), d_key[None], d_value[None], None, None


def divided_pack(
    context: ContextParallel, division: Division, whole: MicroBatch, prefix: Prefix | None = None
) -> tuple[MicroBatch, PackedSequences]:
    """This rank's row of a pack behind `prefix`, and the row as attention sees it."""
    row = context.row_of(whole)
    attends: AttendsDivided
    keys = None
    if context.way == ULYSSES:
        for pad in division.pads:
            whole = whole.padded_to(whole.num_tokens + pad, 0)
        sequences = PackedSequences(whole.lengths, whole.cu_seqlens, prefix)
        if context.let_attend is not None:
            context.let_attend(sequences, whole, context.context.index)
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
    """Ulysses: exchanges tokens for heads while a layer attends to the `whole` pack, with padding at the end."""
    context, heads = division.context, query.shape[1]
    if heads % context.size:
        raise ModelError(
            f"{type(module).__name__} has {heads} heads on this rank, not a multiple of cp{context.size}",
            why="heads are divided over the ranks of cp (ulysses)",
            fix="use context_parallel='allgather' (hotspa_context_parallel), or another cp",
        )
    repeats = head_repeats(heads, key.shape[1], context.size)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    if call.sinks is not None:
        call = replace(call, sinks=call.sinks.chunk(context.size)[context.index])
    query, key, value = tokens_to_heads(division, query, key, value)
    out = (whole.divided or attend)(module, query, key, value, call, whole)
    return heads_to_tokens(division, out.transpose(1, 2))[0].transpose(1, 2).contiguous()


# -- keys and values gathered -------------------------------------------------------------------------------------------


class _CutTokens:
    """Where the tokens of cut sequences are, on this rank and in the gathered tokens; `before` are the divided chunks before
    the pack of its first sequence."""

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
        for rank, rank_pieces in enumerate(kept):
            at = rank * self.most
            for i, first, stop in rank_pieces:
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
        """[1, K, S, D], the keys of this rank's pieces one after the other, from [1, K, before + t, D] each."""
        if not self.most:  # no sequence is cut
            return [x.index_select(2, self.keys) for x in tensors]
        started = [gathered(x[0].transpose(0, 1).index_select(0, self.mine), self.most, self.context) for x in tensors]
        all_tokens = []
        for x in tensors:
            work, whole = started.pop(0)  # released as soon as it was used
            CLOCK.wait(work)
            rows = torch.cat([x[0].transpose(0, 1), whole.flatten(0, 1)])
            del work, whole
            all_tokens.append(rows.index_select(0, self.keys).transpose(0, 1)[None])
            del rows
        return all_tokens

    def returned(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients [1, K, before + t, D] of this rank's keys, summed over all that saw them, from [1, K, S, D] each.

        Empties the given list, and releases each gradient as soon as it was used: it is as large as the pack.
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
    return piece if piece[0] else (0, piece[1] + start, piece[2] + start)


@dataclass(frozen=True)
class _Gathered(AttentionKernel):
    """A kernel for keys and values of this rank, which are gathered before it runs, and again in the backward."""

    tokens: _CutTokens
    kernel: AttentionKernel

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        keys, values = self.tokens.gathered(key, value)
        return self.kernel.forward(query, keys, values, sinks)

    def backward(self, d_out: Tensor, inputs: Inputs, out: Tensor | None, total: Tensor | None) -> Inputs:
        query, key, value, sinks = inputs
        keys, values = self.tokens.gathered(key, value)
        gathered = query, keys, values, sinks
        del keys, values
        d_query, *given, d_sinks = self.kernel.backward(d_out, gathered, out, total)
        del gathered
        d_key, d_value = self.tokens.returned(given)
        return d_query, d_key, d_value, d_sinks


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
    """With keys and values of cut sequences from all ranks; `prefix` has this rank's part of earlier chunks."""
    kernel = kernel_of(module, query, value, call, pack, tokens.lengths)
    if prefix is not None:
        kept = prefix.before(module, key, value)
        key, value = (torch.cat([part, x], 2) for part, x in zip(kept, (key, value), strict=True))
    out = attend_by(query, key, value, call.sinks, _Gathered(tokens, kernel))
    return out.transpose(1, 2).contiguous()  # families take views of it
