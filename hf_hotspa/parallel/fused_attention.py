"""Attention by torch's fused CPU kernel in several calls: for prefixes, sliding windows, and sinks.

Queries attend to one block of keys after the other, and partial results are merged by the logarithms of their sums
(Milakov and Gimelshein, 2018; Liu et al., 2023, "Ring Attention"). The backward computes each block's gradients from the
merged result and its sums: beside the inputs, only these are kept. No scores and no mask grow with the square of a sequence.

* Prefix (`attend_with_prefix`): its blocks, then the row's own tokens; its gradients are handed on block by block.
* Sliding window: blocks of queries, each with the keys of its windows and one mask.
* Sinks s, learned scores that join the softmax and add no value: with the sums `lse` of a head without them,
  `lse' = logaddexp(lse, s)` and `out' = out * exp(lse - lse')`. The kernel's backward uses the sums that it is given, so
  `out'` and `lse'` give exact gradients of queries, keys and values, and `ds = -sum(exp(s - lse') * (d_out . out'))`.

Shapes: T queries, S keys, P prefix tokens, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hf_hotspa.parallel.collectives import Context

BLOCK_TOKENS = 4096  # tokens of a prefix whose keys and values are repeated for all query heads at a time

_QUERIES = 64, 512
"""The least and most queries of a block with a sliding window; in between, as many as the window is long."""

TakesGradients = Callable[[slice, Tensor, Tensor], None]
"""Called with the gradients of keys and values [1, K, s, D] of some tokens of a prefix: `(tokens, of keys, of values)`."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def kernel_takes(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel supports these heads."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def attend_with_prefix(
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]; H is a multiple of K
    value: Tensor,  # [1, K, T, D]
    before: tuple[Tensor, Tensor],  # keys and values of the prefix, [1, K, P, D] each
    scaling: float | None,  # factor on the scores; 1 / sqrt(D) when None
    # gets the prefix's gradients block by block in the backward, if both keys and values require them; autograd then
    # gets none. If None, autograd gets them.
    takes: TakesGradients | None = None,
) -> Tensor:
    """Causal attention of the last tokens of a sequence. Returns [1, H, T, D]."""
    out: Tensor = _WithPrefix.apply(query, key, value, *before, scaling, takes)
    return out


def blocks_of_tokens(num_tokens: int) -> Iterator[slice]:
    """Blocks of `BLOCK_TOKENS` tokens; the last one may reach beyond the end."""
    for begin in range(0, num_tokens, BLOCK_TOKENS):
        yield slice(begin, begin + BLOCK_TOKENS)


def attend_to_block(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float | None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention to some keys alone: the result [1, H, T, D], and the log of the sums of its weights [1, H, T].

    Both are of the dtype of the sums, at least fp32. `query`: [1, H, T, D]. `key`: [1, K, S, D]; H is a multiple of K.
    `value`: [1, K, S, D]. `causal`: whether the keys belong to the queries' own tokens; else all queries see all keys.
    `mask`: [T, S] added to the scores, of the dtype of the queries; each query must see a key."""
    groups = query.shape[1] // key.shape[1]
    repeated = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    part, sums = _forward(query, *repeated, 0.0, causal, attn_mask=mask, scale=scaling)
    return part.to(sums.dtype), sums


def seen_keys(queries: slice, num_keys: int, window: int | None, both_ways: bool) -> slice:
    """The keys that some queries see, by the places of both among a sequence's keys; arguments as for `hidden_pairs`."""
    low = 0 if window is None else max(0, queries.start - window + 1)
    if not both_ways:
        return slice(low, queries.stop)
    return slice(low, num_keys if window is None else min(num_keys, queries.stop + window - 1))


def hidden_pairs(queries: slice, keys: slice, window: int | None, both_ways: bool, device: torch.device) -> Tensor:
    """bool [queries, keys]: the keys that a query may not see, by the places of both in their sequence. `window`: tokens that
    a position sees on one side, itself included; all when None. `both_ways`: whether it also sees later tokens."""
    distance = torch.arange(queries.start, queries.stop, device=device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=device)
    if both_ways:
        distance = distance.abs()
    return distance < 0 if window is None else (distance < 0) | (distance >= window)


def merged(out: Tensor, total: Tensor, part: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys, from the results of `attend_to_block` for each."""
    both = torch.logaddexp(total, sums)
    return out * (total - both).exp()[..., None] + part * (sums - both).exp()[..., None], both


def gradients_of_block(
    d_out: Tensor,  # [1, H, T, D], the gradient of the result
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: tuple[Tensor, Tensor],  # attention to all blocks, in the dtype of the queries, and its sums
    causal: bool,
    scaling: float | None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's part of the gradient of the queries, and the gradients of its keys and values, [1, K, S, D]. Other
    arguments as for `attend_to_block`."""
    groups = query.shape[1] // key.shape[1]
    repeated = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    d_query, *d_pair = _backward(d_out, query, *repeated, *result, 0.0, causal, attn_mask=mask, scale=scaling)
    d_key, d_value = (x.unflatten(1, (-1, groups)).sum(2) for x in d_pair)
    return d_query, d_key, d_value


class _WithPrefix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float | None,
        takes: TakesGradients | None,
    ) -> Tensor:
        out, total = attend_to_block(query, key, value, True, scaling)
        for place in blocks_of_tokens(keys.shape[2]):
            block = attend_to_block(query, keys[:, :, place], values[:, :, place], False, scaling)
            out, total = merged(out, total, *block)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, keys, values, out, total)
        ctx.scaling = scaling
        ctx.takes = takes if all(ctx.needs_input_grad[3:5]) else None
        return out

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = gradients
        query, key, value, keys, values, out, total = ctx.saved_tensors

        def gradients_of(k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            return gradients_of_block(d_out, query, k, v, (out, total), causal, ctx.scaling)

        d_query, d_key, d_value = gradients_of(key, value, True)
        d_query = d_query.to(total.dtype)  # accumulates over blocks
        takes: TakesGradients | None = ctx.takes
        d_keys = d_values = None
        if takes is None:
            d_keys, d_values = torch.empty_like(keys), torch.empty_like(values)
        for place in blocks_of_tokens(keys.shape[2]):
            part, d_k, d_v = gradients_of(keys[:, :, place], values[:, :, place], False)
            d_query += part
            if d_keys is None or d_values is None:
                assert takes is not None
                takes(place, d_k, d_v)
            else:
                d_keys[:, :, place], d_values[:, :, place] = d_k, d_v
        return d_query.to(query.dtype), d_key, d_value, d_keys, d_values, None, None


# -- windows and sinks --------------------------------------------------------------------------------------------------

SequenceLengths = tuple[tuple[int, int], ...]  # queries and keys of each sequence; the queries are its last tokens
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]  # queries, keys, values and sinks, or their gradients


class _Block(NamedTuple):
    """Keys for some queries in one call of the kernel; fields as for `attend_to_block`."""

    keys: slice
    causal: bool
    mask: Tensor | None = None


class AttentionKernel(Protocol):
    """Attention of sequences of a row, with forward and backward as separate calls."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[1, H, T, D], and the log sums [1, H, T] if the backward needs them and this result; from queries [1, H, T, D],
        keys and values [1, K, S, D], sinks [H]."""

    def backward(self, d_out: Tensor, inputs: Inputs, out: Tensor | None, total: Tensor | None) -> Inputs:
        """The gradients of queries, keys, values and sinks, each in its dtype."""


@dataclass(frozen=True)
class FusedAttention(AttentionKernel):
    """By torch's kernel for CPU."""

    lengths: SequenceLengths  # queries and keys of each sequence
    scaling: float | None  # factor on the scores; 1 / sqrt(D) when None
    window: int | None = None  # tokens that a position sees on one side, itself included; None for all
    both_ways: bool = False  # whether positions also see later tokens

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        wide = torch.promote_types(query.dtype, torch.float32)
        out, total = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)
        for queries, blocks in self._rows(query):
            q = query[:, :, queries]
            parts = (
                attend_to_block(q, key[:, :, keys], value[:, :, keys], causal, self.scaling, mask)
                for keys, causal, mask in blocks
            )
            result, sums = next(parts)
            for part in parts:
                result, sums = merged(result, sums, *part)
            if sinks is not None:
                result, sums = with_sinks(result, sums, sinks)
            out[:, :, queries], total[:, :, queries] = result.to(query.dtype), sums
        return out, total

    def backward(self, d_out: Tensor, inputs: Inputs, out: Tensor | None, total: Tensor | None) -> Inputs:
        assert out is not None
        assert total is not None
        query, key, value, sinks = inputs
        d_query = torch.zeros_like(query, dtype=total.dtype)
        # windows overlap, so their gradients are summed in the wide dtype
        wide = None if self.window is None else total.dtype
        d_key, d_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for queries, blocks in self._rows(query):
            result = out[:, :, queries], total[:, :, queries].contiguous()
            given = d_out[:, :, queries].contiguous(), query[:, :, queries]
            for keys, causal, mask in blocks:
                pair = key[:, :, keys], value[:, :, keys]
                own = gradients_of_block(*given, *pair, result, causal, self.scaling, mask)
                d_query[:, :, queries] += own[0]
                d_key[:, :, keys] += own[1]
                d_value[:, :, keys] += own[2]
        d_sinks = None if sinks is None else gradient_of_sinks(d_out, out, total, sinks)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), d_sinks

    def _rows(self, query: Tensor) -> Iterator[tuple[slice, list[_Block]]]:
        """Queries, and the blocks of keys for them."""
        begin = key_begin = 0
        for length, keys in self.lengths:
            before = keys - length
            if self.window is not None and self.window < keys:
                yield from self._windows(begin, key_begin, length, before, self.window, query)
            elif length:  # own tokens, then blocks of the tokens before
                own = _Block(slice(key_begin + before, key_begin + keys), not self.both_ways)
                blocks = (slice(key_begin + b.start, key_begin + min(b.stop, before)) for b in blocks_of_tokens(before))
                yield slice(begin, begin + length), [own, *(_Block(block, False) for block in blocks)]
            begin, key_begin = begin + length, key_begin + keys

    def _windows(
        self, begin: int, key_begin: int, length: int, before: int, window: int, query: Tensor
    ) -> Iterator[tuple[slice, list[_Block]]]:
        """Blocks of the queries of one sequence, with the keys of their windows."""
        least, most = _QUERIES
        rows, mask, made = min(max(window, least), most), None, None
        for first in range(0, length, rows):
            last = min(first + rows, length)
            places = slice(before + first, before + last)
            seen = seen_keys(places, before + length, window, self.both_ways)
            shape = last - first, places.start - seen.start, seen.stop - seen.start
            if mask is None or made != shape:
                hidden = hidden_pairs(places, seen, window, self.both_ways, query.device)
                mask, made = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf), shape
            keys = slice(key_begin + seen.start, key_begin + seen.stop)
            yield slice(begin + first, begin + last), [_Block(keys, False, mask)]


def with_sinks(out: Tensor, total: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds sinks [H] to the softmax of attention [1, H, T, D] with log sums [1, H, T]."""
    both = torch.logaddexp(total, sinks.to(total.dtype)[:, None])
    return out * (total - both).exp()[..., None], both


def gradient_of_sinks(d_out: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """[H], from the result with sinks and its log sums; arguments as for `with_sinks`, and `d_out` [1, H, T, D]."""
    shares = (sinks.to(total.dtype)[:, None] - total).exp()
    products = (d_out.to(total.dtype) * out.to(total.dtype)).sum(-1)
    return -(shares * products).sum((0, 2)).to(sinks.dtype)


def attend_by(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: AttentionKernel) -> Tensor:
    """A kernel as a node of the graph; returns [1, H, T, D]."""
    out: Tensor = _ByKernel.apply(query, key, value, sinks, kernel)
    return out


class _ByKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: AttentionKernel
    ) -> Tensor:
        out, total = kernel.forward(query, key, value, sinks)
        ctx.save_for_backward(query, key, value, sinks, out if total is not None else None, total)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, total = ctx.saved_tensors
        return *ctx.kernel.backward(gradients[0], tuple(inputs), out, total), None
