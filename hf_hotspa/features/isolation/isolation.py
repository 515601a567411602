"""Layers that mix the tokens of a row in other ways than packed attention.

Packed attention separates the sequences of a row. State-space and linear-attention layers and short convolutions would carry
something from one sequence into the next; attention with a custom mask (an index of keys, chunks, scores that depend on the
position in the row) would not know where a sequence begins. Such a layer runs one sequence of the pack at a time, with that
sequence's slice of every argument, so nothing passes between sequences. All other parts of a decoder layer work token by token,
so the results are the same.

Gated delta nets run whole packs, with a state and a short convolution for each document. A gated delta net (Yang et al.,
2024, "Gated Delta Networks", arXiv 2412.06464) reads tokens one after the other into a state [K, V] of each head. The families
of transformers (qwen3_next, qwen3_5, olmo_hybrid, ...) mix tokens only in `causal_conv1d_fn` and
`torch_chunk_gated_delta_rule`: a layer runs the family's own forward with `_Mixer.convolve` and `_Mixer.recur` instead. The pack
provides what these need of tokens outside the row:

* other documents: nothing. As many rows of zeros as the convolution looks back stand before each, and its state starts at 0;
* the previous chunk (`+ck`): the state, and the last tokens before the convolution (`PackedSequences.carried`);
* other ranks of cp: the last tokens of each piece before the convolution, gathered; for the recurrence, all tokens of some
  heads in exchange for some tokens of all heads (`parallel.context`), with heads of zeros if they do not divide.

If fla is installed, its kernel runs the recurrence, with the family's own arguments; else `delta_rule`, in torch.

Shapes: T tokens of a pack, t of this rank's row, C channels of the convolution, w its width, G heads of queries and keys,
H heads of values (a multiple of G), K and V widths of these heads.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from inspect import unwrap
from itertools import accumulate
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.model.model_kind import CONVOLUTION, RECURRENCE, LayerKind, is_linear_attention, projections
from hf_hotspa.parallel.attention import PackedSequences, calls_attention
from hf_hotspa.parallel.collectives import CLOCK, with_gradient
from hf_hotspa.parallel.context import ContextGroup, Division, gathered, heads_to_tokens, scattered_sum, tokens_to_heads


class _PerSequence(tuple[Any, ...]):
    """What a layer returns beside its hidden state, for each sequence of the pack."""


class PackLender:
    """Makes layers use the current pack, for models that do not pass it on."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._holder: list[PackedSequences] = []
        for layer in layers:
            layer.forward = partial(_with_pack, forward=layer.forward, holder=self._holder)
            layer.hotspa_recompute = partial(_recompute_with_pack, holder=self._holder)

    def begin(self, pack: PackedSequences, *_: object) -> None:
        self._holder[:] = [pack]


def take_packs(layer: nn.Module, kind: LayerKind) -> None:
    """Makes a layer treat the sequences of a pack by its kind."""
    if kind.alone:
        run_alone(layer, kind)
    elif kind.hands_on:
        hand_pack_on(layer)
    elif kind.is_linear:
        for module in filter(is_linear_attention, layer.modules()):
            mix_packed(module)


def run_alone(layer: nn.Module, kind: LayerKind) -> None:
    """Makes a layer run each sequence of its pack alone, with the family's own attention."""
    for module in layer.modules():
        if calls_attention(module):
            module.config = copy.copy(module.config)
            module.config._attn_implementation = "eager"
    layer.forward = partial(_each_sequence, forward=layer.forward, kind=kind)


def hand_pack_on(layer: nn.Module) -> None:
    """Passes the pack, which a layer gets and does not pass on, to its attentions."""
    holder: list[PackedSequences] = []
    for module in layer.modules():
        if calls_attention(module):
            module.forward = partial(_with_pack, forward=module.forward, holder=holder)
    layer.forward = partial(_holding_pack, forward=layer.forward, holder=holder)
    layer.hotspa_recompute = partial(_recompute_with_pack, holder=holder)


def _holding_pack(
    *args: object,
    forward: Callable[..., Any],
    holder: list[PackedSequences],
    hotspa_pack: PackedSequences,
    **kwargs: object,
) -> Any:
    holder.append(hotspa_pack)
    try:
        return forward(*args, **kwargs)
    finally:
        holder.pop()


def _recompute_with_pack(
    function: Callable[..., Any],
    *args: object,
    recompute: Callable[..., Any],
    holder: list[PackedSequences],
    **kwargs: object,
) -> Any:
    if not holder:  # the layer is called inside the recomputation, with its pack (transformers before 5.23)
        return recompute(function, *args, **kwargs)
    with_pack = partial(_holding_pack, forward=function, holder=holder, hotspa_pack=holder[-1])
    return recompute(with_pack, *args, **kwargs)


def _with_pack(*args: object, forward: Callable[..., Any], holder: list[PackedSequences], **kwargs: object) -> Any:
    return forward(*args, **kwargs | {"hotspa_pack": holder[-1]})


def _slice(value: object, start: int, stop: int, total: int, index: int) -> Any:
    """An argument's part for sequence `index`, the tokens `[start, stop)` of a row of `total`."""
    if isinstance(value, _PerSequence):
        return value[index]
    if isinstance(value, Tensor):
        along = value.ndim > 1 and value.shape[0] == 1 and value.shape[1] == total
        return value[:, start:stop] if along else value
    if isinstance(value, tuple | list):
        return type(value)(_slice(item, start, stop, total, index) for item in value)
    if type(value) is dict:
        return {name: _slice(item, start, stop, total, index) for name, item in value.items()}
    return value


def _each_sequence(
    hidden_states: Tensor,
    *args: object,
    forward: Callable[..., Any],
    kind: LayerKind,
    hotspa_pack: PackedSequences,
    **kwargs: object,
) -> Any:
    total, outs, start = hidden_states.shape[1], [], 0
    for index, length in enumerate(hotspa_pack.lengths):
        stop = start + length
        own_args = _slice(args, start, stop, total, index)
        own = _slice(kwargs, start, stop, total, index)
        if kind.num_attentions:
            own["attention_mask"] = kind.mask(length, hidden_states)
        hotspa_pack.visible = start, stop
        try:
            outs.append(forward(hidden_states[:, start:stop], *own_args, **own))
        finally:
            hotspa_pack.visible = None
        start = stop
    if not isinstance(outs[0], tuple):
        return torch.cat(outs, dim=1)
    beside = zip(*(out[1:] for out in outs), strict=True)
    return (torch.cat([out[0] for out in outs], dim=1), *map(_PerSequence, beside))


# -- gated delta nets --------------------------------------------------------------------------------------------------


_CHUNKS = (16, 32, 64)  # possible chunk sizes of `delta_rule` in tokens; the cheapest is used
_STEP = 1e6  # the cost of a step of the scan beside its products, in multiplications of one head


def mix_packed(module: nn.Module) -> None:
    """Makes a gated delta net separate the documents of its packs."""
    own = unwrap(type(module).forward)
    assert isinstance(own, FunctionType)
    mixer = _Mixer(module, own.__globals__[CONVOLUTION], own.__globals__[RECURRENCE])
    ours = {CONVOLUTION: mixer.convolve, RECURRENCE: mixer.recur}
    forward = FunctionType(own.__code__, own.__globals__ | ours, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    module.forward = partial(forward, module)
    module.hotspa_set_heads = lambda heads, _: set_heads_of_shard(module, heads)


def set_heads_of_shard(module: nn.Module, num_heads: int) -> None:
    """Sets a gated delta net's number of heads of queries and keys on this rank of tp (may be 0)."""
    values_each, key, value = module.num_v_heads // module.num_k_heads, module.head_k_dim, module.head_v_dim
    module.num_k_heads, module.num_v_heads = num_heads, num_heads * values_each
    module.key_dim, module.value_dim = num_heads * key, num_heads * values_each * value
    module.conv_dim = 2 * module.key_dim + module.value_dim
    if not num_heads:  # families divide by their number
        module.forward = partial(_without_heads, module)


def _without_heads(module: nn.Module, hidden_states: Tensor, **kwargs: object) -> Tensor:
    """The forward of a rank without heads, for the collectives of the projections."""
    into, out, _ = projections(module)
    given: Tensor = module.get_submodule(out)(
        torch.cat([module.get_submodule(name)(hidden_states) for name in into], -1)
    )
    return given


def has_kernel(x: Tensor) -> bool:
    """Whether the family's own function runs the recurrence of packed sequences on a tensor's device."""
    return x.is_cuda and find_spec("fla") is not None


class _Mixer:
    """Replaces a gated delta net's convolution, which looks back from each token of a row, and its recurrence."""

    def __init__(self, module: nn.Module, convolution: Callable[..., Tensor], recurrence: Callable[..., Any]) -> None:
        self._module, self._convolution, self._recurrence = module, convolution, recurrence

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        hotspa_pack: PackedSequences,
        **kwargs: object,
    ) -> Tensor:
        """[1, C, t] of the convolution with [C, w], within each sequence."""
        pack, rows, key = hotspa_pack, x[0].transpose(0, 1), (self._module, CONVOLUTION)
        places = pack.plans.get(weight.shape[-1])
        if places is None:
            places = pack.plans[weight.shape[-1]] = _Places(pack, weight.shape[-1], x.device)
        spread = rows.new_zeros(places.num_rows, rows.shape[1]).index_copy_(0, places.own, rows)
        others = []
        if pack.carried is not None:
            before = pack.carried.state(key, x.requires_grad)
            others.append(rows.new_zeros(weight.shape[-1] - 1, rows.shape[1]) if before is None else before)
        if pack.division is not None and places.most:
            others.append(_tails(rows, places.mine, places.most, pack.division.context))
        if others:
            source = torch.cat(others)
            spread = spread.index_copy(0, places.into, source.index_select(0, places.of))
            if pack.carried is not None and pack.carried.continues:
                last = spread if pack.division is None else source
                pack.carried.leave_state(key, last.index_select(0, places.left))
        out = self._convolution(spread.transpose(0, 1)[None], weight, bias, activation=activation)
        return out.index_select(2, places.own)

    def recur(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        hotspa_pack: PackedSequences,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """[1, t, H, V] of the recurrence, within each sequence; arguments as for the family's function."""
        pack, lengths, heads = hotspa_pack, hotspa_pack.lengths, value.shape[2]
        inputs = query, key, value, g[..., None], beta[..., None]
        if pack.division is not None:
            inputs = _to_heads(pack.division, *inputs)
            lengths = (*pack.division.shares.lengths, *pack.division.pads)
        query, key, value, g, beta = inputs
        named = self._module, RECURRENCE
        takes_gradient = any(x.requires_grad for x in inputs)
        state = None if pack.carried is None else pack.carried.state(named, takes_gradient)
        continues = pack.carried is not None and pack.carried.continues
        run = self._by_kernel if has_kernel(value) else delta_rule
        sequences = Sequences(lengths, state, continues)
        out, last = run(query, key, value, g[..., 0], beta[..., 0], sequences, use_qk_l2norm_in_kernel)
        if continues and pack.carried is not None:
            pack.carried.leave_state(named, last)
        if pack.division is not None:
            out = heads_to_tokens(pack.division, out.transpose(1, 2))[0].transpose(1, 2)[:, :, :heads]
        return out, None

    def _by_kernel(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        sequences: "Sequences",
        normalizes: bool,
    ) -> tuple[Tensor, Tensor]:
        """`delta_rule` by the family's own function, which takes borders and states of packed sequences."""
        lengths, state, continues = sequences
        borders = torch.tensor((0, *accumulate(lengths)), dtype=torch.int64).to(value.device, non_blocking=True)
        states = None
        if state is not None:
            states = torch.cat([state[None], state.new_zeros(len(lengths) - 1, *state.shape)])
        out, last = self._recurrence(
            query, key, value, g=decay, beta=beta, initial_state=states, output_final_state=continues,
            use_qk_l2norm_in_kernel=normalizes, cu_seqlens=borders,
        )  # fmt: skip
        return out, last[0] if continues else last


# -- the convolution ----------------------------------------------------------------------------------------------------


class _Places:
    """The rows of a convolution's input: before each piece of a sequence stand the w - 1 tokens before it, or zeros.

    Attributes:
        num_rows: All input rows.
        own: int64 [t], the positions of the row's own tokens among them.
        into, of: int64 [n] each, the positions of other rows among them, and their indices in the carried and gathered rows.
        left: int64 [w - 1], the last tokens of the first sequence, for the next chunk: input rows, or with cp as `of`.
        mine: int64 [m], the row's tokens that other ranks may read.
        most: The largest m of a rank.
    """

    def __init__(self, pack: PackedSequences, width: int, device: torch.device) -> None:
        division, back_by, is_carried = pack.division, width - 1, pack.carried is not None
        pieces = [(i, 0, n) for i, n in enumerate(pack.lengths)]
        ends, mine, self.most = dict[tuple[int, int], int](), list[int](), 0
        if division is not None:
            ends, mine, self.most = _ends(division, back_by, back_by if is_carried else 0)
            pieces = list(division.shares.pieces[division.context.index])
            pad = sum(pack.lengths) - sum(stop - start for _, start, stop in pieces)
            pieces += [(len(division.shares.lengths), 0, pad)] if pad else []

        def source(sequence: int, token: int) -> int | None:
            if token < 0:
                return back_by + token if sequence == 0 and is_carried else None
            return ends[sequence, token]

        at, own, into, of = 0, list[int](), list[int](), list[int]()
        for sequence, start, stop in pieces:
            for place, token in enumerate(range(start - back_by, start)):
                if (row := source(sequence, token)) is not None:
                    into.append(at + place)
                    of.append(row)
            at += back_by
            own += range(at, at + stop - start)
            at += stop - start
        left = list[int]()
        if is_carried and division is None:
            left += range(pack.lengths[0], pack.lengths[0] + back_by)
        elif is_carried:
            length = division.shares.lengths[0]
            left += (source(0, token) or 0 for token in range(length - back_by, length))
        self.num_rows = at + width  # a convolution of zero rows is an error
        self.own, self.into, self.of, self.left, self.mine = (
            torch.tensor(x, dtype=torch.int64).to(device, non_blocking=True) for x in (own, into, of, left, mine)
        )


def _ends(division: Division, back_by: int, first: int) -> tuple[dict[tuple[int, int], int], list[int], int]:
    """The last tokens of the pieces of all ranks: each one's position once gathered, behind `first` rows; this rank's, as
    tokens of its row; and the most of a rank."""
    of_ranks, mine = [], list[int]()
    for rank, pieces in enumerate(division.shares.pieces):
        ends, at = list[tuple[int, int]](), 0
        for sequence, start, stop in pieces:
            # no other rank reads whole sequences; the first one may continue in the next chunk
            is_read = sequence == 0 or stop - start < division.shares.lengths[sequence]
            low = max(start, stop - back_by) if is_read else stop
            ends += ((sequence, token) for token in range(low, stop))
            if rank == division.context.index:
                mine += range(at + low - start, at + stop - start)
            at += stop - start
        of_ranks.append(ends)
    most = max(map(len, of_ranks))
    places = {end: first + rank * most + i for rank, ends in enumerate(of_ranks) for i, end in enumerate(ends)}
    return places, mine, most


def _tails(rows: Tensor, mine: Tensor, most: int, context: ContextGroup) -> Tensor:
    """[P * most, C]: some tokens of every rank's row [t, C], with gradients. Collective in cp."""
    num_tokens = len(rows)

    def gather(rows: Tensor) -> Tensor:
        work, whole = gathered(rows.index_select(0, mine), most, context)
        CLOCK.wait(work)
        return whole.flatten(0, 1)

    def scatter(grad: Tensor) -> Tensor:
        work, parts = scattered_sum(grad.view(context.size, most, -1), context)
        CLOCK.wait(work)
        own = parts.sum(0)[: len(mine)]
        return own.new_zeros(num_tokens, own.shape[1]).index_add_(0, mine, own)

    out: Tensor = with_gradient(gather, scatter, rows)
    return out


# -- the recurrence -----------------------------------------------------------------------------------------------------


def _to_heads(division: Division, *tensors: Tensor) -> tuple[Tensor, ...]:
    """From [1, t, h, D] of this rank's row to [1, T, h / P, D] of its heads; heads of values go with their keys' heads."""
    size, groups = division.context.size, tensors[0].shape[2]
    more = -groups % size  # heads of zeros
    by_heads = []
    for x in tensors:
        padded = functional.pad(x, (0, 0, 0, more * (x.shape[2] // groups)))
        by_heads.append(padded.transpose(1, 2))
    return tuple(x.transpose(1, 2) for x in tokens_to_heads(division, *by_heads))


@dataclass(frozen=True)
class _Chunks:
    """The places of sequences' tokens in chunks; the first chunks of all sequences come first."""

    places: Tensor  # int64 [T]
    counts: tuple[int, ...]  # chunks of each step of the scan, one for each sequence that is long enough, longest first
    size: int  # tokens of a chunk
    first: int  # the place of the first sequence in each step
    last: int  # the last step with a chunk of the first sequence


def _cheapest_size(lengths: Sequence[int], key: int, value: int) -> int:
    """Tokens of a chunk, by the widths of heads: short chunks waste less on short sequences, long ones need fewer steps."""

    def cost(size: int) -> float:
        padded = sum(-(-n // size) * size for n in lengths)
        return padded * (2 * (key + value) * size + 3 * key * value) + _STEP * max(lengths, default=0) / size

    return min(_CHUNKS, key=cost)


def _chunks_of(lengths: Sequence[int], size: int, device: torch.device) -> _Chunks:
    counts = [-(-n // size) for n in lengths]
    order = sorted(range(len(lengths)), key=lambda i: -counts[i])
    steps = [sum(count > step for count in counts) for step in range(max(counts, default=0))]
    begins = torch.tensor([0, *accumulate(steps)])
    rank = {sequence: place for place, sequence in enumerate(order)}
    places = [torch.empty(0, dtype=torch.int64)]
    for sequence, length in enumerate(lengths):
        token = torch.arange(length)
        places.append((begins[token // size] + rank[sequence]) * size + token % size)
    return _Chunks(torch.cat(places).to(device, non_blocking=True), tuple(steps), size, rank[0], counts[0] - 1)


def _chunked(x: Tensor, heads: tuple[int, int], chunks: _Chunks) -> Tensor:
    """[T, h, D] as [chunks, *heads, tokens, D], with zeros behind the end of a sequence."""
    rows = x.new_zeros(sum(chunks.counts) * chunks.size, *x.shape[1:]).index_copy_(0, chunks.places, x)
    whole = rows.view(-1, chunks.size, *x.shape[1:]).transpose(1, 2).contiguous()
    return whole.view(-1, *heads, chunks.size, x.shape[2])


class Sequences(NamedTuple):
    """The sequences of a row of T tokens."""

    lengths: Sequence[int]  # tokens of each
    state: Tensor | None = None  # [H, K, V] of the first one before its first token; 0 when None
    continues: bool = False  # whether the state of the first one behind its last token is asked for


def delta_rule(
    query: Tensor,  # [1, T, G, K], scaled here by K ** -0.5
    key: Tensor,  # [1, T, G, K]
    value: Tensor,  # [1, T, H, V]; H is a multiple of G
    decay: Tensor,  # [1, T, H], logarithms, at most 0
    beta: Tensor,  # [1, T, H]
    sequences: Sequences,
    normalizes: bool = True,  # whether to divide queries and keys by their norms first
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule within each sequence of a row: `S = exp(decay) S`, `S = S + beta k (v - k S)`, `out = q S`.

    Within chunks it computes all tokens of the row at once, by the WY representation; over chunks it steps through the
    next chunk of every sequence (Yang et al., 2024, section 3.3). In fp32, or the inputs' dtype if wider. Returns [1,
    T, H, V] in the dtype of the queries, and the state [H, K, V] or None.
    """
    lengths, state, continues = sequences
    groups, many = key.shape[2], value.shape[2]
    dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
    query, key, value, decay, beta = (x[0].to(wide) for x in (query, key, value, decay, beta))
    if normalizes:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    size = _cheapest_size(lengths, key.shape[-1], value.shape[-1])
    chunks = _chunks_of(lengths, size, value.device)

    each = (groups, many // max(groups, 1))  # heads of keys, and heads of values for each
    q, k = (_chunked(x, (groups, 1), chunks) for x in (query * query.shape[-1] ** -0.5, key))
    v, b, g = (_chunked(x, each, chunks) for x in (value, beta[..., None], decay[..., None]))
    total = g.cumsum(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=value.device).triu(1)
    between = (total - total.mT).masked_fill(later, -torch.inf).exp()
    within, system, grown = (q @ k.mT) * between, (k @ k.mT) * between * b, total.exp()
    new, seen = (
        torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        for right in (v * b, k * (b * grown))
    )
    end = total[..., -1:, :]
    terms = q * grown, (k * (end - total).exp()).mT, new, seen, within, end.exp()
    steps = zip(*(x.flatten(1, 2).split(chunks.counts) for x in terms), strict=True)
    states = v.new_zeros(len(lengths), many, key.shape[-1], value.shape[-1])
    out, last = _scan(steps, states, chunks, state)
    rows = out.transpose(1, 2).reshape(-1, *value.shape[1:]).index_select(0, chunks.places)
    return rows.to(dtype)[None], last if continues else None


def _scan(
    steps: Iterable[tuple[Tensor, ...]], states: Tensor, chunks: _Chunks, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Runs the steps in order; returns all outputs, and the first sequence's state at its end."""
    if state is not None:
        states = states.index_copy(0, torch.tensor([chunks.first], device=states.device), state.to(states)[None])
    outs, last = list[Tensor](), None
    for step, (query, key, new, seen, within, decay) in enumerate(steps):
        states = states[: len(query)]
        added = new - seen @ states
        outs.append(query @ states + within @ added)
        states = states * decay + key @ added
        if step == chunks.last:
            last = states[chunks.first]
    return torch.cat(outs), last
