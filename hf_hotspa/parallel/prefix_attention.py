"""Attention of one sequence to its prefix and to its own tokens on CPU, which keeps neither joined keys nor a mask.

Queries attend to blocks of the prefix and to their own tokens one after the other, with torch's fused kernel, and partial
results are merged by the logarithms of their sums (Milakov and Gimelshein, 2018; Liu et al., 2023, "Ring Attention"). The
backward takes each block's gradients from the merged result, and hands those of the prefix on a block at a time. So beside
what is given only the result is kept for it, while `scaled_dot_product_attention` would keep keys and values of the prefix
once for each query head, and nothing here is as long as the prefix.

Shapes: T queries, P tokens of the prefix, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_TOKENS = 4096
"""Tokens of the prefix whose keys and values are repeated for all query heads at a time."""

TakesGradients = Callable[[slice, Tensor, Tensor], None]
"""Takes the gradients of keys and values [1, K, s, D] of some tokens of a prefix: `(tokens, of keys, of values)`."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def kernel_takes(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel computes these heads."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def attend_with_prefix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: tuple[Tensor, Tensor],
    scaling: float | None,
    takes: TakesGradients | None = None,
) -> Tensor:
    """Causal attention of the last tokens of a sequence.

    Args:
        query: [1, H, T, D].
        key: [1, K, T, D]; H is a multiple of K.
        value: [1, K, T, D].
        before: Keys and values of the prefix, [1, K, P, D] each.
        scaling: Factor on the scores; 1 / sqrt(D) when None.
        takes: Takes the gradients of the prefix a block at a time, in the backward, where both of it require gradients;
            autograd then brings none. None where autograd brings them.

    Returns:
        [1, H, T, D].
    """
    out: Tensor = _WithPrefix.apply(query, key, value, *before, scaling, takes)
    return out


def blocks_of_tokens(num_tokens: int) -> Iterator[slice]:
    """Blocks of at most `BLOCK_TOKENS` tokens; the last one may reach beyond the end."""
    for begin in range(0, num_tokens, BLOCK_TOKENS):
        yield slice(begin, begin + BLOCK_TOKENS)


def attend_to_block(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Attention to some keys alone: the result [1, H, T, D], and the logarithms of the sums of its weights [1, H, T].

    Both are of the dtype of the sums, at least fp32.

    Args:
        query: [1, H, T, D].
        key: [1, K, S, D]; H is a multiple of K.
        value: [1, K, S, D].
        causal: Whether the keys are those of the queries' own tokens; else all queries see all keys.
    """
    groups = query.shape[1] // key.shape[1]
    part, sums = _forward(
        query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 0.0, causal, scale=scaling
    )
    return part.to(sums.dtype), sums


def merged(out: Tensor, total: Tensor, part: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys, from what `attend_to_block` gives of each."""
    both = torch.logaddexp(total, sums)
    return out * (total - both).exp()[..., None] + part * (sums - both).exp()[..., None], both


def gradients_of_block(
    of_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    causal: bool,
    scaling: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block adds to the gradients of queries, and the gradients of its keys and values, [1, K, S, D].

    Arguments as for `attend_to_block`, and

    Args:
        of_out: [1, H, T, D], the gradient of `out`.
        out: Attention to all blocks, in the dtype of the queries.
        total: Its sums.
    """
    groups = query.shape[1] // key.shape[1]
    repeated = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    of_query, *of_pair = _backward(of_out, query, *repeated, out, total, 0.0, causal, scale=scaling)
    of_key, of_value = (x.unflatten(1, (-1, groups)).sum(2) for x in of_pair)
    return of_query, of_key, of_value


class _WithPrefix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (of_out,) = gradients
        query, key, value, keys, values, out, total = ctx.saved_tensors

        def of_block(k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            return gradients_of_block(of_out, query, k, v, out, total, causal, ctx.scaling)

        of_query, of_key, of_value = of_block(key, value, True)
        of_query = of_query.to(total.dtype)  # a sum over blocks
        takes: TakesGradients | None = ctx.takes
        of_keys = of_values = None
        if takes is None:
            of_keys, of_values = torch.empty_like(keys), torch.empty_like(values)
        for place in blocks_of_tokens(keys.shape[2]):
            part, of_k, of_v = of_block(keys[:, :, place], values[:, :, place], False)
            of_query += part
            if of_keys is None or of_values is None:
                assert takes is not None
                takes(place, of_k, of_v)
            else:
                of_keys[:, :, place], of_values[:, :, place] = of_k, of_v
        return of_query.to(query.dtype), of_key, of_value, of_keys, of_values, None, None
