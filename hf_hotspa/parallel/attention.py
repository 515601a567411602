"""Attention over packed rows: every sequence of a pack sees only itself, at the cost of the sum of squared lengths.

A position sees the tokens before it; in a module that is not causal (`is_causal`, encoders) also those after it.

Transformers calls it from a family's own attention module by its registered name `ATTENTION`. The sequences of the pack arrive
as the keyword argument `hotspa_pack`, which every family passes through unchanged; no mask of a whole pack is ever built. A
sequence may continue one that began outside the row: its queries then also see the keys of its `Prefix`, and the mask is aligned
at the last query and the last key. Four kernels compute the same function:

* a variable-length kernel (`torch.nn.attention.varlen`) on CUDA in 16-bit without a soft cap, for supported heads, with
  windows and sinks,
* torch's kernel for CPU, block by block, for windows, sinks and prefixes (`parallel.fused_attention`),
* `scaled_dot_product_attention` per sequence everywhere else,
* `ExplicitAttention` for what no fused kernel of torch supports: capped scores (Gemma 2; with flash-attn installed, its kernel
  computes them), dropout of attention probabilities, whose masks must not depend on the layout, and sinks in 32-bit on CUDA.

Shapes: T packed tokens, S keys and values (more than T with prefixes; the queries are then the last tokens), H query heads,
K key/value heads, D and E head dims of keys and of values; queries are [1, H, T, D].
"""

import dis
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import accumulate, zip_longest
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from hf_hotspa.errors import ModelError
from hf_hotspa.parallel.collectives import Context
from hf_hotspa.parallel.fused_attention import (
    AttentionKernel,
    FusedAttention,
    Inputs,
    SequenceLengths,
    TakesGradients,
    attend_by,
    attend_with_prefix,
    gradient_of_sinks,
    hidden_pairs,
    kernel_takes,
    seen_keys,
    with_sinks,
)

BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 23}  # the most probabilities (heads x queries x keys) at a time
_MASKED_QUERIES = 512  # queries in a mask for `scaled_dot_product_attention`


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of the probabilities of one call of an attention module."""

    p: float  # the probability to be dropped
    # from a sequence's index in the pack, its queries `[first, last)`, counted from its first one in the row, and its
    # keys `[low, high)`, counted from its first key: which probabilities stay, bool, broadcast to [H, queries, keys]
    keep: Callable[[int, tuple[int, int], tuple[int, int]], Tensor]


@dataclass(frozen=True)
class Scores:
    """How the products of queries and keys become scores and probabilities."""

    scaling: float  # factor on the products
    sliding_window: int | None = None  # tokens that a position sees on one side, itself included; all when None
    softcap: float | None = None  # scores become `softcap * tanh(scores / softcap)` when given
    dropout: AttentionDropout | None = None  # dropout of the probabilities; None for none
    both_ways: bool = False  # whether positions also see later tokens


@dataclass(frozen=True)
class _Block:
    """Queries `[first, last)` of sequence `index`, counted from its first one in the row, and its keys `[low, high)`.

    In the row, the sequence's queries begin at `query_start` and its keys at `key_start`, `before` of which precede its first
    query.
    """

    index: int
    query_start: int
    key_start: int
    before: int
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

    def hidden(self, scores: Scores, device: torch.device) -> Tensor:
        """bool [queries, keys]: the keys that a query may not see."""
        places = slice(self.before + self.first, self.before + self.last)
        return hidden_pairs(places, slice(self.low, self.high), scores.sliding_window, scores.both_ways, device)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[K * groups, n, D] as [K, groups * n, D]: the query heads of each key/value head, one after the other."""
    return x.reshape(x.shape[0] // groups, groups * x.shape[1], x.shape[2])


def _probabilities(
    query: Tensor, key: Tensor, sinks: Tensor | None, block: _Block, scores: Scores
) -> tuple[Tensor, Tensor | None, Tensor]:
    """A block's probabilities [H, queries, keys] in at least fp32, the sinks' [H, queries, 1], and the scores."""
    heads, groups = query.shape[0], query.shape[0] // max(key.shape[0], 1)
    products = _grouped(query[:, block.queries], groups) @ key[:, block.keys].transpose(1, 2) * scores.scaling
    logits = products.view(heads, block.last - block.first, block.high - block.low)
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(block.hidden(scores, query.device), torch.finfo(logits.dtype).min)
    # stock eager attention computes the softmax in fp32; a wider dtype is kept
    wide = torch.promote_types(logits.dtype, torch.float32)
    if sinks is None:
        return functional.softmax(logits, dim=-1, dtype=wide), None, logits
    beside = sinks.to(logits.dtype)[:, None, None].expand(-1, logits.shape[1], 1)
    both = functional.softmax(torch.cat([logits, beside], dim=-1), dim=-1, dtype=wide)
    return both[..., :-1], both[..., -1:], logits


def _dropped(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _factor(block: _Block, dropout: AttentionDropout | None, dtype: torch.dtype) -> Tensor | None:
    """The factor on a block's probabilities: 0 for dropped ones, else 1 / (1 - p)."""
    if dropout is None:
        return None
    if dropout.p >= 1.0:
        return torch.zeros((), dtype=dtype)
    keep = dropout.keep(block.index, (block.first, block.last), (block.low, block.high))
    return keep.to(dtype).mul_(1.0 / (1.0 - dropout.p))


@dataclass(frozen=True)
class ExplicitAttention(AttentionKernel):
    """Attention inside each sequence of a packed row, by any scores, on any device.

    Handles one sequence after the other, in blocks of queries with only the keys that they may see; the backward recomputes
    scores and masks. So memory grows with the length of a pack, as with fused kernels, not with its square: beside queries,
    keys and values it holds one block's intermediates, a few times `BLOCK_ELEMENTS` numbers.
    """

    lengths: SequenceLengths
    scores: Scores

    def _blocks(self, query: Tensor) -> Iterator[_Block]:
        if not (heads := query.shape[1]):
            return
        most = BLOCK_ELEMENTS.get(query.device.type, BLOCK_ELEMENTS["cuda"])
        query_start = key_start = 0
        for index, (length, key_length) in enumerate(self.lengths):
            rows = max(1, most // (heads * key_length)) if length else 1
            before = key_length - length
            for first in range(0, length, rows):
                last = min(first + rows, length)
                places = slice(before + first, before + last)
                seen = seen_keys(places, key_length, self.scores.sliding_window, self.scores.both_ways)
                yield _Block(index, query_start, key_start, before, first, last, seen.start, seen.stop)
            query_start += length
            key_start += key_length

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, None]:
        (_, heads, length, _), groups, scores = query.shape, query.shape[1] // max(key.shape[1], 1), self.scores
        out = query.new_zeros(1, heads, length, value.shape[3])
        for block in self._blocks(query):
            weights, _, _ = _probabilities(query[0], key[0], sinks, block, scores)
            weights = _dropped(weights.to(query.dtype), _factor(block, scores.dropout, query.dtype))
            attended = _grouped(weights, groups) @ value[0, :, block.keys]
            out[0, :, block.queries] = attended.view(heads, -1, value.shape[3])
        return out, None

    def backward(self, d_out: Tensor, inputs: Inputs, out: Tensor | None, total: Tensor | None) -> Inputs:
        (query, key, value), sinks = (x[0] for x in inputs[:3]), inputs[3]
        scores, heads, groups = self.scores, query.shape[0], query.shape[0] // max(key.shape[0], 1)
        wide = torch.promote_types(query.dtype, torch.float32)
        d_query = torch.zeros_like(query)
        d_key, d_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)  # sums over blocks
        d_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
        for block in self._blocks(query[None]):
            weights, beside, logits = _probabilities(query, key, sinks, block, scores)
            own = _grouped(d_out[0, :, block.queries], groups)
            factor = _factor(block, scores.dropout, query.dtype)
            used = _dropped(weights.to(query.dtype), factor)
            d_value[:, block.keys] += _grouped(used, groups).transpose(1, 2) @ own
            d_weights = (own @ value[:, block.keys].transpose(1, 2)).view(weights.shape)
            d_weights = _dropped(d_weights, factor).to(wide)
            # the softmax: d scores = P * (dP - sum of P dP), where a sink has dP = 0
            mean = (d_weights * weights).sum(-1, keepdim=True)
            d_scores = weights * (d_weights - mean)
            if beside is not None and d_sinks is not None:
                d_sinks -= (beside * mean).sum((1, 2))
            if scores.softcap is not None:
                d_scores = d_scores * (1.0 - (logits.to(wide) / scores.softcap).square()).clamp_min(0.0)
            d_products = _grouped((d_scores * scores.scaling).to(query.dtype), groups)
            d_query[:, block.queries] = (d_products @ key[:, block.keys]).view(heads, -1, query.shape[2])
            d_key[:, block.keys] += d_products.transpose(1, 2) @ _grouped(query[:, block.queries], groups)
        if d_sinks is not None and sinks is not None:
            d_sinks = d_sinks.to(sinks.dtype)
        return d_query[None], d_key.to(key.dtype)[None], d_value.to(value.dtype)[None], d_sinks


ATTENTION = "hotspa_packed"  # the `attn_implementation` of every replica
_HARMLESS = {"position_ids", "cache_position", "input_ids"}  # tensors from families that do not affect the scores


class Prefix(Protocol):
    """The tokens before a row: source of their keys and values, and destination of the gradients.

    Attributes:
        lengths: Tokens before each sequence of the row, 0 if it begins there; may omit zeros at the end. If the ranks
            of cp share these tokens, only this rank's.
    """

    lengths: tuple[int, ...]
    chunks: tuple[int, ...]  # the tokens of each earlier chunk of the first sequence, on all ranks of cp together
    in_host: bool  # whether their keys and values are in host memory; the backward then fetches them again

    def before(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all prefixes, [1, K, P, D] each, for the row's own [1, K, T, D]. Called once in each call of
        an attention."""

    def fetched(self, module: nn.Module, before: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """The result of `before` for an attention, copied from host memory to a device."""

    def takes_gradients(self, module: nn.Module) -> TakesGradients | None:
        """Takes the gradients of an attention's last `before` from a kernel that computes them block by block; None if
        autograd must pass them."""


class ChunkPrefix(Prefix, Protocol):
    """What a chunk needs of earlier chunks of the row's first sequence.

    Attributes:
        more_roots: Each returns further tensors in the chunk's graph, with their gradients; called when the chunk runs
            backward, after later chunks.
    """

    continues: bool  # whether the sequence continues behind the row
    more_roots: list[Callable[[], list[tuple[Tensor, Tensor]]]]

    def left_by(self, owner: object) -> dict[int, Any]:
        """What an owner leaves of each chunk of the sequence for the others, by chunk."""


@dataclass(frozen=True)
class AttentionCall:
    """A family's arguments beside queries, keys and values; see `packed_attention`."""

    scaling: float | None  # factor on the scores; 1 / sqrt(D) when None
    sliding_window: int | None  # tokens that a position sees on one side, itself included; all when None
    softcap: float | None  # scores become `softcap * tanh(scores / softcap)` when given
    sinks: Tensor | None  # [H] further scores, which take part in the softmax and add no value
    dropout: float  # the probability of dropping attention probabilities; 0 if the module is not trained
    both_ways: bool = False  # whether positions also see later tokens

    @property
    def is_fusable(self) -> bool:
        """Whether fused kernels compute the scores, if they support the heads and, with sinks, return log sums."""
        return self.softcap is None and not self.dropout

    @property
    def is_plain(self) -> bool:
        """Whether `scaled_dot_product_attention` computes it."""
        return self.softcap is None and self.sinks is None and not self.dropout

    def slides(self, length: int) -> bool:
        """Whether the window hides some of `length` tokens."""
        return self.sliding_window is not None and self.sliding_window < length

    def scores(self, module: nn.Module, query: Tensor, pack: "PackedSequences") -> Scores:
        scaling = query.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        dropped = _dropout_of(module, self.dropout, pack, query.shape[1]) if self.dropout else None
        return Scores(scaling, self.sliding_window, self.softcap, dropped, self.both_ways)


DropsAttention = Callable[[nn.Module, float, int, "PackedSequences"], AttentionDropout]
"""Returns which attention probabilities stay in the next call of a module, for the probability of
dropping, its heads here, and the row."""

AttendsDivided = Callable[[nn.Module, Tensor, Tensor, Tensor, AttentionCall, "PackedSequences"], Tensor]
"""How a rank attends to a pack of which it has some tokens (`parallel.context`): [1, t, H, D] for queries [1, H, t, D], keys
and values of its row. Collective among the ranks that share the pack."""


@dataclass
class PackedSequences:
    """The sequences of one pack, as the attention kernels need them."""

    lengths: tuple[int, ...]  # tokens of each sequence, in the order of the row
    cu_seqlens: Tensor  # int32 [number of sequences + 1], the running sum of the lengths, on the device of the row
    # the tokens before the row, if a sequence began elsewhere; else None
    prefix: Prefix | None = field(default=None, compare=False)
    # how to attend if the row is a part of a pack, or in another way than `attend`; else None
    divided: AttendsDivided | None = field(default=None, compare=False)
    # with `divided`, the keys of each piece of a sequence, if they are gathered
    gathered_keys: tuple[int, ...] | None = field(default=None, compare=False)
    # how often a layer attended to this pack, to check that a family really calls this attention
    num_calls: int = field(default=0, compare=False)
    # the keys of dropout's draws; None without dropout
    token_keys: tuple[Tensor, Tensor] | None = field(default=None, compare=False)
    # how often each dropout module has drawn for the tokens that it saw
    calls: dict[tuple[str, tuple[int, int] | None], int] = field(default_factory=dict, compare=False)
    # the tokens of the row that the running layer sees, `(first, last + 1)`; None for all
    visible: tuple[int, int] | None = field(default=None, compare=False)
    # decides which attention probabilities stay; None without such dropout
    attention_dropout: DropsAttention | None = field(default=None, compare=False)
    # the place of each sequence's first token in its row, for that
    first_tokens: tuple[int, ...] = field(default=(), compare=False)
    # linear attention's states before and behind the row; None for whole sequences
    carried: Any = field(default=None, compare=False)
    beside: object = field(default=None, compare=False)  # what an attachment knows of it
    division: Any = field(default=None, compare=False)  # how the pack is divided if the row is a part of it
    # cached plans of linear-attention layers, by the width of their convolution
    plans: dict[int, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        """Keys of each sequence: its prefix and its own tokens."""
        if self.gathered_keys is not None:
            return self.gathered_keys
        before = self.prefix.lengths if self.prefix is not None else ()
        return tuple(own + more for own, more in zip_longest(self.lengths, before, fillvalue=0))

    @cached_property
    def cu_keys(self) -> Tensor:
        """The running sum of `key_lengths`, like `cu_seqlens`."""
        if self.key_lengths == self.lengths:
            return self.cu_seqlens
        sums = torch.tensor((0, *accumulate(self.key_lengths)), dtype=torch.int32)
        return sums.to(self.cu_seqlens.device, non_blocking=True)

    def prefixes(self, before: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor] | None]:
        """Each sequence's part of `Prefix.before`; None if it has none."""
        assert self.prefix is not None
        parts = zip(*(x.split(self.prefix.lengths, dim=2) for x in before), strict=True)
        pairs = [(k, v) if k.shape[2] else None for k, v in parts]
        return [*pairs, *[None] * (len(self.lengths) - len(pairs))]

    def joined(
        self, before: tuple[Tensor, Tensor] | None, key: Tensor, value: Tensor, most_before: int | None = None
    ) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Keys and values [1, K, S, D] (each sequence's prefix, then its own), and the keys of each sequence.
        `most_before`: the most tokens of a prefix to use, its last ones; None for all."""
        if before is None:
            return key, value, self.lengths
        prefixes, rows, counts = self.prefixes(before), [], list(self.lengths)
        for index, x in enumerate((key, value)):
            parts = []
            for place, (p, own) in enumerate(zip(prefixes, x.split(self.lengths, dim=2), strict=True)):
                if p is not None:
                    seen = (
                        p[index] if most_before is None else p[index][:, :, max(p[index].shape[2] - most_before, 0) :]
                    )
                    parts.append(seen)
                    counts[place] = seen.shape[2] + own.shape[2]
                parts.append(own)
            rows.append(torch.cat(parts, 2))
        return rows[0], rows[1], tuple(counts)


def code_of_forward(module: nn.Module) -> CodeType | None:
    """The code of a module's own forward, inside of decorators; None if it is not Python."""
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def calls_attention(module: nn.Module) -> bool:
    """Whether a module's own forward uses the attention interface of transformers, and so this attention."""
    return "ALL_ATTENTION_FUNCTIONS" in names_in_forward(module)


def num_attends(module: nn.Module) -> int:
    """How often the forward of a module that `calls_attention` uses, and so calls, the interface's function; 1 if that
    cannot be seen."""
    code = code_of_forward(module)
    loads = [] if code is None else [i for i in dis.get_instructions(code) if i.opname.startswith("LOAD_FAST")]
    return max(sum(i.argval == "attention_interface" for i in loads), 1)


def names_in_forward(module: nn.Module) -> frozenset[str]:
    """The names that a module's own forward uses: globals, attributes, and keywords of calls."""
    code = code_of_forward(module)
    if code is None:
        return frozenset()
    keywords = (name for const in code.co_consts if isinstance(const, tuple) for name in const if isinstance(name, str))
    return frozenset((*code.co_names, *keywords))


def window_of(module: nn.Module) -> int | None:
    """The window that a module gives the interface; None for none."""
    if "sliding_window" not in names_in_forward(module):
        return None
    # some forwards read it from the config at each call
    owner: object = module if hasattr(module, "sliding_window") else module.config
    return getattr(owner, "sliding_window", None)


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]; H is a multiple of K
    value: Tensor,  # [1, K, T, D]
    attention_mask: Tensor | None,  # must be None: a mask could join or cut sequences
    *,
    hotspa_pack: PackedSequences | None = None,
    dropout: float = 0.0,  # the probability of dropping attention probabilities in training
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention inside each sequence of a packed row. Returns [1, T, H, D] and None (no attention weights).
    Raises `ModelError`: the family passes something that this attention does not support, or does not pass the pack on.
    `given`: the fields of `AttentionCall`, sinks as `s_aux`, and further arguments of a family (position ids, flags); an
    unknown tensor is an error."""
    if hotspa_pack is None or attention_mask is not None or query.shape[0] != 1:
        raise ModelError(
            f"{type(module).__name__} calls attention with "
            f"{'no pack' if hotspa_pack is None else f'mask={attention_mask is not None}'}, batch {query.shape[0]}",
            why="the sequences of a pack would attend to each other",
            fix="this family cannot be trained packed; report its model_type",
        )
    call = AttentionCall(
        given.pop("scaling", None),
        given.pop("sliding_window", None),
        given.pop("softcap", None),
        given.pop("s_aux", None),
        dropout if module.training else 0.0,
        not getattr(module, "is_causal", True),
    )
    unsupported = []
    for name, argument in given.items():
        if isinstance(argument, Tensor) and name not in _HARMLESS:
            unsupported.append(name)
    if unsupported:
        raise ModelError(f"{type(module).__name__} needs {unsupported}, which is not supported")
    hotspa_pack.num_calls += 1
    attends = attend if hotspa_pack.divided is None else hotspa_pack.divided
    return attends(module, query, key, value, call, hotspa_pack), None


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, pack: PackedSequences
) -> Tensor:
    """[1, T, H, D] for whole sequences, or sequences with a prefix; see `packed_attention`."""
    before, takes, prefix = None, None, pack.prefix
    if prefix is not None:
        before, takes = prefix.before(module, key, value), prefix.takes_gradients(module)
    is_fused = call.is_plain or (call.is_fusable and (kernel_takes(query, value) or varlen_takes(query, value)))
    if not is_fused and call.softcap is not None and call.sinks is None and not call.dropout:  # nothing but a cap
        is_fused = varlen_takes(query, value) and capping_kernel() is not None
    kernel = _Attention(module, pack, call, None if is_fused else call.scores(module, query, pack), takes)
    if before is not None and before[0].shape[2] and prefix is not None and prefix.in_host and torch.is_grad_enabled():
        in_blocks = call.is_plain and kernel_takes(query, value)
        if not in_blocks or call.slides(max(pack.key_lengths)):
            out = checkpoint(kernel, query, key, value, before, use_reentrant=False, preserve_rng_state=False)
            assert isinstance(out, Tensor)
            return out
    return kernel(query, key, value, before)


class _Attention(NamedTuple):
    """One call of a module's attention. With `scores`, by `ExplicitAttention`, else by a fused kernel."""

    module: nn.Module
    pack: PackedSequences
    call: AttentionCall
    scores: Scores | None
    takes: TakesGradients | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, before: tuple[Tensor, Tensor] | None) -> Tensor:
        """[1, T, H, D]; see `attend`."""
        module, pack, call, scores, takes = self
        if before is not None and before[0].shape[2] and pack.prefix is not None and pack.prefix.in_host:
            before = pack.prefix.fetched(module, before, query.device)
        if scores is not None:
            key, value, key_lengths = pack.joined(before, key, value)
            explicit = ExplicitAttention(tuple(zip(pack.lengths, key_lengths, strict=True)), scores)
            return attend_by(query, key, value, call.sinks, explicit).transpose(1, 2)
        if call.softcap is not None or (query.is_cuda and varlen_takes(query, value)):  # the only kernel that caps
            key, value, _ = pack.joined(before, key, value)
            return varlen(query, key, value, pack, call)
        is_windowed = call.sliding_window is not None and call.slides(max(pack.key_lengths))
        if (call.sinks is not None or is_windowed) and kernel_takes(query, value):
            # the first query sees window - 1 tokens before it
            most_before = None if call.sliding_window is None else call.sliding_window - 1
            key, value, key_lengths = pack.joined(before, key, value, most_before)
            pairs = tuple(zip(pack.lengths, key_lengths, strict=True))
            row = FusedAttention(pairs, call.scaling, call.sliding_window, call.both_ways)
            return attend_by(query, key, value, call.sinks, row).transpose(1, 2).contiguous()
        lengths, outs = pack.lengths, []
        parts = query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2)
        prefixes = [None] * len(lengths) if before is None else pack.prefixes(before)
        for q, k, v, prefix in zip(*parts, prefixes, strict=True):
            outs.append(_one_sequence(q, k, v, prefix, call, takes).transpose(1, 2))
        return torch.cat(outs, dim=1)


def _dropout_of(module: nn.Module, p: float, pack: PackedSequences, heads: int) -> AttentionDropout:
    if pack.attention_dropout is None:
        raise ModelError(
            f"{type(module).__name__} drops attention probabilities ({p}), which its config does not set",
            why="the masks would differ between layouts",
            fix="set the probability in the model's config, and do not set it on the module",
        )
    return pack.attention_dropout(module, p, heads, pack)


def varlen_takes(query: Tensor, value: Tensor) -> bool:
    """Whether the variable-length kernel, FlashAttention-2, supports these heads (its README, "Installation and features")."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and "window_size" in _varlen_options()
        and query.dtype in (torch.float16, torch.bfloat16)
        and width == value.shape[-1]  # families that compress keys and values have narrower values
        and width % 8 == 0
        and width <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


@cache
def _varlen_options() -> frozenset[str]:
    """The argument names of the installed torch's variable-length kernel; empty if torch has none. torch 2.11 has windows
    but no grouped queries (`enable_gqa`)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


@cache
def capping_kernel() -> Callable[..., Tensor] | None:
    """flash-attn's variable-length kernel, if it is installed and caps scores; it groups queries itself."""
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ImportError:
        return None
    kernel: Callable[..., Tensor] = flash_attn_varlen_func
    return kernel if "softcap" in inspect.signature(kernel).parameters else None


def varlen(query: Tensor, key: Tensor, value: Tensor, pack: PackedSequences, call: AttentionCall) -> Tensor:
    """[1, T, H, D] by the variable-length kernel; keys and values [1, K, S, D] with their prefixes."""
    row = [x[0].transpose(0, 1) for x in (query, key, value)]
    borders = pack.cu_seqlens, pack.cu_keys, max(pack.lengths), max(pack.key_lengths)
    # a window of n tokens reaches n - 1 to the left; the kernel aligns the last query and the last key
    side = -1 if call.sliding_window is None else call.sliding_window - 1
    window = (side, side if call.both_ways else 0)
    if call.softcap is not None:
        capped = capping_kernel()
        assert capped is not None  # of flash-attn, see `attend`
        out: Tensor = capped(
            *row,
            *borders,
            softmax_scale=call.scaling,
            causal=not call.both_ways,
            window_size=window,
            softcap=call.softcap,
        )
        return out[None]
    from torch.nn.attention.varlen import varlen_attn  # needs a CUDA build

    queries_each = query.shape[1] // key.shape[1]
    grouped: dict[str, bool] = {}
    if queries_each > 1 and "enable_gqa" in _varlen_options():
        grouped = {"enable_gqa": True}
    elif queries_each > 1:
        row[1:] = (x.repeat_interleave(queries_each, 1) for x in row[1:])
    if call.sinks is not None:
        out = _VarlenWithSinks.apply(*row, call.sinks, borders, (call.scaling, list(window)), grouped)
    else:
        out = varlen_attn(*row, *borders, scale=call.scaling, window_size=window, **grouped)
    return out[None]


class _VarlenWithSinks(torch.autograd.Function):
    """The kernels of `torch.nn.attention.varlen` by their own names, with sinks applied in between (`fused_attention`)."""

    @staticmethod
    def forward(
        ctx: Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        borders: tuple[Tensor, Tensor, int, int],
        options: tuple[float | None, list[int]],  # factor on the scores, and the window
        grouped: dict[str, bool],
    ) -> Tensor:
        causal = options[1] == [-1, 0]
        out, total, state = torch.ops.torch_attn._varlen_attn(query, key, value, *borders, causal, *options, **grouped)
        wide, total = with_sinks(out.transpose(0, 1)[None].to(total.dtype), total[None], sinks)
        out = wide[0].transpose(0, 1).to(query.dtype).contiguous()
        ctx.save_for_backward(query, key, value, sinks, out, total, state, *borders[:2])
        ctx.options = borders[2:], causal, *options
        return out

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, total, state, *borders = ctx.saved_tensors
        most, causal, scaling, window = ctx.options
        d_out = gradients[0].contiguous()
        d_query, d_key, d_value = torch.ops.torch_attn._varlen_attn_backward(
            d_out, query, key, value, out, total[0].contiguous(), *borders, *most, causal, state, scaling, window
        )
        d_sinks = gradient_of_sinks(d_out.transpose(0, 1)[None], out.transpose(0, 1)[None], total, sinks)
        return d_query, d_key, d_value, d_sinks, None, None, None


def _one_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: tuple[Tensor, Tensor] | None,
    call: AttentionCall,
    takes: TakesGradients | None,
) -> Tensor:
    """[1, H, T, D] of one sequence, whose last T tokens are the queries."""
    if prefix is not None:
        if kernel_takes(query, value):
            return attend_with_prefix(query, key, value, prefix, call.scaling, takes)
        key, value = (torch.cat([p, x], 2) for p, x in zip(prefix, (key, value), strict=True))
    length, key_length = query.shape[2], key.shape[2]
    attention = partial(
        functional.scaled_dot_product_attention, scale=call.scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    if length == key_length and (call.sliding_window is None or call.sliding_window >= length):
        return attention(query, key, value, is_causal=not call.both_ways)
    before, parts = key_length - length, []
    for first in range(0, length, _MASKED_QUERIES):  # one mask for all queries would have the square's size
        last = min(first + _MASKED_QUERIES, length)
        places = slice(before + first, before + last)
        keys = seen_keys(places, key_length, call.sliding_window, call.both_ways)
        mask = hidden_pairs(places, keys, call.sliding_window, call.both_ways, query.device).logical_not_()
        parts.append(attention(query[:, :, first:last], key[:, :, keys], value[:, :, keys], attn_mask=mask))
    return torch.cat(parts, 2)


AttentionInterface.register(ATTENTION, packed_attention)
