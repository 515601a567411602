"""Attention of one sequence to its prefix and to its own tokens on CPU, which keeps neither joined keys nor a mask.

Queries attend to blocks of the prefix and to their own tokens one after the other, with torch's fused kernel, and partial
results are merged by the logarithms of their sums (Milakov and Gimelshein, 2018; Liu et al., 2023, "Ring Attention"). The
backward takes each block's gradients from the merged result. So beside what is given only the result is kept for it, while
`scaled_dot_product_attention` would keep keys and values of the prefix once for each query head.

Shapes: T queries, P tokens of the prefix, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_TOKENS = 4096
"""Tokens of the prefix whose keys and values are repeated for all query heads at a time."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def kernel_takes(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel computes these heads."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def attend_with_prefix(
    query: Tensor, key: Tensor, value: Tensor, before: tuple[Tensor, Tensor], scaling: float | None
) -> Tensor:
    """Causal attention of the last tokens of a sequence.

    Args:
        query: [1, H, T, D].
        key: [1, K, T, D]; H is a multiple of K.
        value: [1, K, T, D].
        before: Keys and values of the prefix, [1, K, P, D] each.
        scaling: Factor on the scores; 1 / sqrt(D) when None.

    Returns:
        [1, H, T, D].
    """
    out: Tensor = _WithPrefix.apply(query, key, value, *before, scaling)
    return out


def _blocks(num_tokens: int) -> Iterator[slice]:
    for begin in range(0, num_tokens, BLOCK_TOKENS):
        yield slice(begin, begin + BLOCK_TOKENS)


class _WithPrefix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scaling: float | None
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]

        def attend(k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            part, sums = _forward(
                query, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 0.0, causal, scale=scaling
            )
            return part.to(sums.dtype), sums

        out, total = attend(key, value, True)
        for place in _blocks(keys.shape[2]):
            part, sums = attend(keys[:, :, place], values[:, :, place], False)
            merged = torch.logaddexp(total, sums)
            out = out * (total - merged).exp()[..., None] + part * (sums - merged).exp()[..., None]
            total = merged
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, keys, values, out, total)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (of_out,) = gradients
        query, key, value, keys, values, out, total = ctx.saved_tensors
        groups = query.shape[1] // key.shape[1]

        def gradients_of(k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            repeated = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            of_query, *of_pair = _backward(of_out, query, *repeated, out, total, 0.0, causal, scale=ctx.scaling)
            of_k, of_v = (x.unflatten(1, (-1, groups)).sum(2) for x in of_pair)
            return of_query, of_k, of_v

        of_query, of_key, of_value = gradients_of(key, value, True)
        of_query = of_query.to(total.dtype)  # a sum over blocks
        of_keys, of_values = torch.empty_like(keys), torch.empty_like(values)
        for place in _blocks(keys.shape[2]):
            part, of_keys[:, :, place], of_values[:, :, place] = gradients_of(
                keys[:, :, place], values[:, :, place], False
            )
            of_query += part
        return of_query.to(query.dtype), of_key, of_value, of_keys, of_values, None
