"""Attention of the pieces of a row to keys of their own each, forward and backward apart: what runs between two exchanges.

A piece is some tokens of a sequence, and its keys are those of the sequence from its first token to the last of the piece.
Which kernel runs says `kernel_of`; all have one meaning (`parallel.attention`).

Shapes: t tokens of the row, S of the keys of its pieces, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_hotspa.parallel.attention import AttentionCall, PackedSequences, varlen, varlen_takes
from hf_hotspa.parallel.explicit_attention import Scores, SequenceLengths, attend_explicitly, explicit_gradients
from hf_hotspa.parallel.prefix_attention import (
    attend_to_block,
    blocks_of_tokens,
    gradients_of_block,
    kernel_takes,
    merged,
)

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Queries, keys, values and sinks, or the gradients of these."""


class Kernel(Protocol):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[1, H, t, D], and what the backward needs beside it: [1, H, t] sums, or nothing."""

    def backward(self, of_out: Tensor, inputs: Inputs, out: Tensor, total: Tensor | None) -> Inputs:
        """The gradients of queries, keys, values and sinks."""


class Fused:
    """On CPU: each piece by torch's fused kernel, first its own tokens, then blocks of those before them."""

    def __init__(self, lengths: SequenceLengths, scaling: float | None) -> None:
        self._lengths, self._scaling = lengths, scaling

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        by_piece = []
        for queries, own, blocks in self._pieces():
            q = query[:, :, queries]
            out, total = attend_to_block(q, key[:, :, own], value[:, :, own], True, self._scaling)
            for block in blocks:
                part = attend_to_block(q, key[:, :, block], value[:, :, block], False, self._scaling)
                out, total = merged(out, total, *part)
            by_piece.append((out.to(query.dtype), total))
        return torch.cat([out for out, _ in by_piece], 2), torch.cat([total for _, total in by_piece], 2)

    def backward(self, of_out: Tensor, inputs: Inputs, out: Tensor, total: Tensor | None) -> Inputs:
        assert total is not None
        query, key, value, _ = inputs
        of_query = torch.zeros_like(query, dtype=total.dtype)
        of_key, of_value = torch.empty_like(key), torch.empty_like(value)
        for queries, own, blocks in self._pieces():
            given = of_out[:, :, queries].contiguous(), query[:, :, queries]
            results = out[:, :, queries], total[:, :, queries].contiguous()
            for block, causal in ((own, True), *((block, False) for block in blocks)):
                part, of_key[:, :, block], of_value[:, :, block] = gradients_of_block(
                    *given, key[:, :, block], value[:, :, block], *results, causal, self._scaling
                )
                of_query[:, :, queries] += part
        return of_query.to(query.dtype), of_key, of_value, None

    def _pieces(self) -> Sequence[tuple[slice, slice, list[slice]]]:
        """Of each piece its queries, their own keys, and blocks of those before them."""
        pieces, query, key = [], 0, 0
        for own, keys in self._lengths:
            before = keys - own
            blocks = [slice(key + b.start, key + min(b.stop, before)) for b in blocks_of_tokens(before)]
            pieces.append((slice(query, query + own), slice(key + before, key + keys), blocks))
            query, key = query + own, key + keys
        return pieces


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
        return varlen(query, key, value, self._pack, self._call).transpose(1, 2), None

    def backward(self, of_out: Tensor, inputs: Inputs, out: Tensor, total: Tensor | None) -> Inputs:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs[:3]]
            again = self.forward(leaves[0], leaves[1], leaves[2], None)[0]
            gradients = torch.autograd.grad(again, leaves, of_out)
        return gradients[0], gradients[1], gradients[2], None


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
    if call.is_plain and varlen_takes(query, value):
        return Varlen(pack, call)
    if call.is_plain and kernel_takes(query, value) and not call.slides(max(keys for _, keys in lengths)):
        return Fused(lengths, call.scaling)
    return Explicit(lengths, call.scores(module, query, pack))
