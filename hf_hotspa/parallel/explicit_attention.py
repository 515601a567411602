"""Attention whose scores and probabilities are computed one by one: for what no fused kernel takes.

That is a cap on the scores (Gemma 2), sinks (learned scores that take part in the softmax and then are dropped), and
dropout of the probabilities with given masks. Works on one sequence after the other, and inside of it on blocks of
queries, of which only the keys that they may see are looked at. A sequence may have more keys than queries: these are its
last tokens then. The backward computes scores and masks again, so that
memory grows with the length of a pack, as with fused kernels, and not with its square: beside queries, keys and values
only what one block needs exists at a time, about `BLOCK_ELEMENTS` numbers a few times over.

Shapes: T packed tokens, S of keys and values (T, where no sequence has a prefix), H query heads, K key/value heads, D and E head dims of keys and of values.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Probabilities (heads x queries x keys) that exist at a time."""


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of the probabilities of one call of an attention module.

    Args:
        p: The probability to be dropped.
        keep: For the index of a sequence in the pack, its queries `[first, last)`, counted from its first one in the row,
            and keys `[low, high)`, counted from its first key: which probabilities stay, bool, broadcast to
            [H, queries, keys].
    """

    p: float
    keep: Callable[[int, tuple[int, int], tuple[int, int]], Tensor]


@dataclass(frozen=True)
class Scores:
    """What becomes of the products of queries and keys.

    Args:
        scaling: Factor on them.
        sliding_window: Tokens that a position sees, itself included; all before it when None.
        softcap: Scores become `softcap * tanh(scores / softcap)` when given.
        dropout: Of the probabilities; None for none.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    dropout: AttentionDropout | None = None


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    lengths: Sequence[int],
    scores: Scores,
    key_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Causal attention inside each sequence of a packed row.

    Args:
        query: [H, T, D].
        key: [K, S, D]; H is a multiple of K.
        value: [K, S, E].
        sinks: [H] further scores of each head, which take part in the softmax and add no value; None for none.
        lengths: Queries of each sequence.
        key_lengths: Keys of each sequence, whose queries are its last tokens; as many as queries when None.

    Returns:
        [H, T, E].
    """
    out: Tensor = _ExplicitAttention.apply(
        query, key, value, sinks, tuple(zip(lengths, key_lengths or lengths, strict=True)), scores
    )
    return out


@dataclass(frozen=True)
class _Block:
    """Queries `[first, last)` of sequence `index`, counted from its first one in the row, and its keys `[low, high)`.

    Its queries in the row begin at `query_start`, and its keys at `key_start`; the last query sees the last key.
    """

    index: int
    query_start: int
    key_start: int
    first: int
    last: int
    low: int
    high: int

    @property
    def queries(self) -> slice:
        return slice(self.query_start + self.first, self.query_start + self.last)

    @property
    def keys(self) -> slice:
        return slice(self.key_start + self.low, self.key_start + self.high)

    def hidden(self, window: int | None, device: torch.device) -> Tensor:
        """bool [queries, keys]: which keys a query may not see."""
        own = torch.arange(self.high - (self.last - self.first), self.high, device=device)
        distance = own[:, None] - torch.arange(self.low, self.high, device=device)
        return distance < 0 if window is None else (distance < 0) | (distance >= window)


SequenceLengths = tuple[tuple[int, int], ...]
"""Queries and keys of each sequence."""


def _blocks(lengths: SequenceLengths, heads: int, window: int | None, device: torch.device) -> Iterator[_Block]:
    most = BLOCK_ELEMENTS.get(device.type, BLOCK_ELEMENTS["cuda"])
    query_start = key_start = 0
    for index, (length, key_length) in enumerate(lengths):
        rows = max(1, most // (max(heads, 1) * key_length)) if length else 1
        before = key_length - length
        for first in range(0, length, rows):
            last = min(first + rows, length)
            low = 0 if window is None else max(0, before + first - window + 1)
            yield _Block(index, query_start, key_start, first, last, low, before + last)
        query_start += length
        key_start += key_length


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[K * groups, n, D] as [K, groups * n, D]: the query heads that share a key/value head, one after the other."""
    return x.reshape(x.shape[0] // groups, groups * x.shape[1], x.shape[2])


def _probabilities(
    query: Tensor, key: Tensor, sinks: Tensor | None, block: _Block, scores: Scores
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Of a block: probabilities [H, queries, keys] in at least fp32, those of the sinks [H, queries, 1], and the scores."""
    heads, groups = query.shape[0], query.shape[0] // max(key.shape[0], 1)
    products = _grouped(query[:, block.queries], groups) @ key[:, block.keys].transpose(1, 2) * scores.scaling
    logits = products.view(heads, block.last - block.first, block.high - block.low)
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(block.hidden(scores.sliding_window, query.device), torch.finfo(logits.dtype).min)
    # stock eager attention takes the softmax in fp32; a wider dtype stays as it is
    wide = torch.promote_types(logits.dtype, torch.float32)
    if sinks is None:
        return functional.softmax(logits, dim=-1, dtype=wide), None, logits
    beside = sinks.to(logits.dtype)[:, None, None].expand(-1, logits.shape[1], 1)
    both = functional.softmax(torch.cat([logits, beside], dim=-1), dim=-1, dtype=wide)
    return both[..., :-1], both[..., -1:], logits


def _dropped(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _factor(block: _Block, dropout: AttentionDropout | None, dtype: torch.dtype) -> Tensor | None:
    """What the probabilities of a block are multiplied by: 0 where they are dropped, else 1 / (1 - p)."""
    if dropout is None:
        return None
    if dropout.p >= 1.0:
        return torch.zeros((), dtype=dtype)
    keep = dropout.keep(block.index, (block.first, block.last), (block.low, block.high))
    return keep.to(dtype).mul_(1.0 / (1.0 - dropout.p))


def attend_explicitly(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, lengths: SequenceLengths, scores: Scores
) -> Tensor:
    """`explicit_attention` without a graph, whose arguments these are.

    Args:
        lengths: Queries and keys of each sequence.
    """
    heads, groups = query.shape[0], query.shape[0] // max(key.shape[0], 1)
    out = query.new_zeros(heads, query.shape[1], value.shape[2])
    for block in _blocks(lengths, heads, scores.sliding_window, query.device) if heads else ():
        weights, _, _ = _probabilities(query, key, sinks, block, scores)
        weights = _dropped(weights.to(query.dtype), _factor(block, scores.dropout, query.dtype))
        of_block = _grouped(weights, groups) @ value[:, block.keys]
        out[:, block.queries] = of_block.view(heads, -1, value.shape[2])
    return out


def explicit_gradients(
    of_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    lengths: SequenceLengths,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of queries, keys, values and sinks, of the dtype of each; arguments as for `attend_explicitly`.

    Args:
        of_out: [H, T, E], that of the result.
    """
    heads, groups = query.shape[0], query.shape[0] // max(key.shape[0], 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    of_query = torch.zeros_like(query)
    of_key, of_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)  # sums over blocks
    of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
    for block in _blocks(lengths, heads, scores.sliding_window, query.device) if heads else ():
        weights, beside, logits = _probabilities(query, key, sinks, block, scores)
        own = _grouped(of_out[:, block.queries], groups)
        factor = _factor(block, scores.dropout, query.dtype)
        used = _dropped(weights.to(query.dtype), factor)
        of_value[:, block.keys] += _grouped(used, groups).transpose(1, 2) @ own
        of_weights = (own @ value[:, block.keys].transpose(1, 2)).view(weights.shape)
        of_weights = _dropped(of_weights, factor).to(wide)
        # the softmax: d scores = P * (dP - sum of P dP), where a sink has dP = 0
        mean = (of_weights * weights).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - mean)
        if beside is not None and of_sinks is not None:
            of_sinks -= (beside * mean).sum((1, 2))
        if scores.softcap is not None:
            of_scores = of_scores * (1.0 - (logits.to(wide) / scores.softcap).square()).clamp_min(0.0)
        of_products = _grouped((of_scores * scores.scaling).to(query.dtype), groups)
        of_query[:, block.queries] = (of_products @ key[:, block.keys]).view(heads, -1, query.shape[2])
        of_key[:, block.keys] += of_products.transpose(1, 2) @ _grouped(query[:, block.queries], groups)
    if of_sinks is not None and sinks is not None:
        of_sinks = of_sinks.to(sinks.dtype)
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_sinks


class _ExplicitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        lengths: SequenceLengths,
        scores: Scores,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.lengths, ctx.scores = lengths, scores
        return attend_explicitly(query, key, value, sinks, lengths, scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks = ctx.saved_tensors
        return *explicit_gradients(gradients[0], query, key, value, sinks, ctx.lengths, ctx.scores), None, None
