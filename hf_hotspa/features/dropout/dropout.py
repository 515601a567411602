"""Dropout, noise and recomputation that do not depend on the layout.

Dropout masks are functions of the dropped element, not of the order of drawing. A hash of (seed, mini-batch, dataset row,
token in the row) and of (module, feature) decides whether an element of an activation is dropped: counter-based random numbers
(Salmon et al., 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"), with the mixing steps of MurmurHash3 and SplitMix64. So
every strategy, pack, order of micro-batches, tensor-parallel shard, recomputation and resumed run drops the same elements, and
a second call of a module drops others. Only the distribution is the same as with torch's own generator.

`use_keyed_dropout` replaces every `nn.Dropout` of a replica by `KeyedDropout`, between the model's layers and in LoRA layers.
For attention probabilities (`_PairMasks`, if attention uses the interface of transformers), the hash is of the query token as
above and of (module, head in the whole model, key token in the row). Other uses of torch's generator depend on the layout;
`model.model_kind.refuse_dropout` raises an error that names the setting.

NEFTune's noise on embeddings is defined here for packed rows (Jain et al., 2023, "NEFTune: Noisy Embeddings Improve Instruction
Finetuning"): each *sequence* of L tokens and hidden size H gets uniform noise of magnitude `alpha / sqrt(L * H)`, as in an
unpadded batch of that one sequence in transformers. It is drawn from (seed, mini-batch, dataset row, first token), so it is
equal on every tensor-parallel rank, and under any strategy and packing.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import ModelError
from hf_hotspa.layout.shares import shard_rows
from hf_hotspa.layout.vector import ParameterSpec
from hf_hotspa.model.model_kind import attention_dropouts, held_rates
from hf_hotspa.model.replica import Replica
from hf_hotspa.model.specs import ModelDescription
from hf_hotspa.parallel.attention import AttentionDropout, PackedSequences, calls_attention
from hf_hotspa.parallel.mesh import TensorGroup

_GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, as int64: the step of SplitMix64
_MIX_1, _MIX_2 = -4658895280553007687, -7723592293110705685
_MUR_1, _MUR_2 = -2048144789, -1028477387
_AT_A_TIME = 1 << 18  # the most hashes at a time on CPU, where fitting into a cache is several times faster
_LORA, _LORA_A = ".lora_dropout.", ".lora_A."


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifts right with zeros from the left (torch copies the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 for each int64; products wrap around."""
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper 32 bits of each int64, as int32."""
    low = ((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
    return low.to(torch.int32), (x >> 32).to(torch.int32)


def _key(*parts: object) -> int:
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def token_keys(seed: int, step: int, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Two int32 [T, 1] for the tokens of a pack, on its device; independent of the pack. `micro_batch`: the pack.
    Padding, and sequences of a pack without keys, count as row -1."""
    keys = micro_batch.keys or ((-1, 0),) * len(micro_batch.lengths)
    device = micro_batch.position_ids.device
    rows = torch.tensor([_key(seed, step, row) for row, _ in keys], dtype=torch.int64)
    first = torch.tensor([start for _, start in keys], dtype=torch.int64)
    repeats = torch.tensor(micro_batch.lengths)
    of_row = rows.repeat_interleave(repeats).to(device, non_blocking=True)
    begin = first.repeat_interleave(repeats).to(device, non_blocking=True)
    low, high = _halves(_mixed(of_row + (begin + micro_batch.position_ids[0]) * _GOLDEN))
    return low[:, None], high[:, None]


def feature_keys(module: str, features: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 [F] for features of a module, by its name in the whole model and their int64 [F] indices in the whole
    module; or of any other shape."""
    return _halves(_mixed(features * _GOLDEN + _key(module)))


def kept(tokens: tuple[Tensor, Tensor], features: tuple[Tensor, Tensor], p: float) -> Tensor:
    """Which elements stay: bool [T, F], each with probability 1 - p (p below 1), from the `token_keys` of T tokens and the
    `feature_keys` of F features."""
    (low_t, high_t), (low_f, _) = tokens, features
    num_tokens, width = low_t.shape[0], low_f.shape[0]
    mask = torch.empty(num_tokens, width, dtype=torch.bool, device=low_t.device)
    rows = max(1, _AT_A_TIME // max(width, 1)) if low_t.device.type == "cpu" else max(num_tokens, 1)
    for begin in range(0, num_tokens, rows):
        place = slice(begin, begin + rows)
        _keep(p, (low_t[place], high_t[place]), features, mask[place])
    return mask


def _keep(p: float, tokens: tuple[Tensor, Tensor], features: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Whether the hashes of tokens and features, broadcast to the shape of `out`, are above the lowest part p."""
    (low_t, high_t), (low_f, high_f) = tokens, features
    x = low_t ^ low_f
    x *= _MUR_1
    x ^= (x >> 15) & 0x1FFFF
    x += high_t
    x ^= high_f
    x *= _MUR_2
    torch.ge(x, round(p * 2**32) - 2**31, out=out)


class _PairMasks:
    """Which attention probabilities of one (named) call of a module stay, dropped with p below 1. `heads` count in the whole
    model; the pack has token keys."""

    def __init__(self, module: str, p: float, heads: range, pack: PackedSequences) -> None:
        self._module, self._p, self._heads, self._pack = module, p, heads, pack
        self._keys: tuple[int, tuple[Tensor, Tensor]] | None = None

    def __call__(self, index: int, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """bool [H, queries, keys], see `AttentionDropout`."""
        pack, (low, high) = self._pack, keys
        assert pack.token_keys is not None
        start = sum(pack.lengths[:index])
        tokens = [part[start + queries[0] : start + queries[1]] for part in pack.token_keys]
        device = tokens[0].device
        low_k, high_k = (part[:, None, low:high] for part in self._keys_of(index, device))
        mask = torch.empty(len(self._heads), queries[1] - queries[0], high - low, dtype=torch.bool, device=device)
        _keep(self._p, (tokens[0], tokens[1]), (low_k, high_k), mask)
        return mask

    def _keys_of(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Two int32 [H, keys] for the heads and key tokens of a sequence, with its prefix first."""
        if self._keys is None or self._keys[0] != index:
            first = self._pack.first_tokens[index]
            position = torch.arange(first, first + self._pack.key_lengths[index], device=device)
            heads = torch.tensor(list(self._heads), dtype=torch.int64, device=device)
            self._keys = index, feature_keys(self._module, (heads[:, None] << 32) + position)
        return self._keys[1]


class DropoutMasks:
    """The common state of a replica's dropout modules.

    Args:
        sequence_parallel: Whether tensors between blocks hold only this rank's share of the tokens.

    Attributes:
        step: The number of the mini-batch.
    """

    def __init__(self, seed: int, tensor: TensorGroup | None, sequence_parallel: bool) -> None:
        self._seed, self.step = seed, 0
        self.pack: PackedSequences | None = None  # the current pack, with its token keys
        # of each attention module that may drop probabilities, its name and this rank's first head in the whole model
        self.attentions: dict[nn.Module, tuple[str, int]] = {}
        self._sharers, self._place = 1, 0
        if tensor is not None and sequence_parallel:
            self._sharers, self._place = tensor.size, tensor.order[tensor.shard]

    def take(self, replica: Replica, description: ModelDescription) -> bool:
        """Lets the modules of a replica draw from the masks; returns whether any does."""
        mesh, strategy, model = replica.mesh, replica.mesh.strategy, replica.model
        specs = {description.local_name(spec.name): spec for spec in description.vector.specs}
        heads = description.local_heads(strategy.tp, mesh.tensor.shard) if mesh.tensor is not None else {}
        rows_of_shard = partial(shard_rows, description.vector, strategy, rank=mesh.rank)
        hidden_size = description.shape.hidden_size
        dropped = use_keyed_dropout(model, self, specs, rows_of_shard, hidden_size, mesh.tensor)
        dropped |= use_attention_dropout(model, self, {name: first for name, (first, _, _) in heads.items()})
        if dropped and replica.context is not None:
            replica.context.let_attend = self.let_attend
        return dropped

    def begin_step(self, step: int) -> None:
        self.step = step

    def begin(self, pack: PackedSequences, micro_batch: MicroBatch, whole: MicroBatch) -> None:
        self.pack = pack
        self.let_attend(pack, micro_batch)

    def let_attend(self, pack: PackedSequences, micro_batch: MicroBatch, place: int = 0) -> None:
        """Sets the keys of a pack for attention: to some tokens of all heads, or to this place's heads if ranks share it."""
        pack.token_keys = token_keys(self._seed, self.step, micro_batch)
        pack.first_tokens = tuple(start for _, start in micro_batch.keys) or (0,) * len(pack.lengths)
        pack.attention_dropout = partial(self._of_call, place) if self.attentions else None

    def _of_call(self, place: int, module: nn.Module, p: float, heads: int, pack: PackedSequences) -> AttentionDropout:
        name, first = self.attentions[module]
        call, first = self.next_call(f"{name} probabilities"), first + place * heads
        return AttentionDropout(p, _PairMasks(f"{name} probabilities {call}", p, range(first, first + heads), pack))

    def keys_of(self, num_tokens: int) -> tuple[Tensor, Tensor] | None:
        """The keys of the tokens that a module sees; None if their number is unexpected."""
        assert self.pack is not None
        assert self.pack.token_keys is not None
        begin, end = self.pack.visible or (0, self.pack.token_keys[0].shape[0])
        if num_tokens * self._sharers == end - begin:
            begin += self._place * num_tokens
        elif num_tokens != end - begin:
            return None
        low, high = (keys[begin : begin + num_tokens] for keys in self.pack.token_keys)
        return low, high

    def next_call(self, module: str) -> int:
        """How often the module has seen these tokens: each call draws other masks."""
        assert self.pack is not None
        place = module, self.pack.visible
        count = self.pack.calls.get(place, 0)
        self.pack.calls[place] = count + 1
        return count

    def recompute(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """torch's checkpoint of a layer, with the same masks again even if another pack is current by then."""
        pack = self.pack
        assert pack is not None
        visible, calls = pack.visible, dict(pack.calls)  # of the current sequence if the layer runs one at a time

        def with_pack(*inputs: object, **named: object) -> Any:
            now, self.pack = self.pack, pack
            (seen, pack.visible), (counted, pack.calls) = (pack.visible, visible), (pack.calls, dict(calls))
            try:
                return function(*inputs, **named)
            finally:  # torch ends a recomputation early with an exception
                self.pack, pack.visible, pack.calls = now, seen, {**counted, **pack.calls}

        return checkpoint(with_pack, *args, use_reentrant=False, **kwargs)


class KeyedDropout(nn.Module):
    """Replaces an `nn.Dropout`; the identity in eval mode.

    Args:
        name: The module's name in the whole model.
        p: The probability of dropping.
        masks: The common state of the replica's dropout.
        features: int64 [F], the indices of the features that this rank sees; None for all.
        width: How many there are, if known.
    """

    def __init__(
        self, name: str, p: float, masks: DropoutMasks, features: Tensor | None = None, width: int | None = None
    ) -> None:
        super().__init__()
        self.name, self.p = name, p
        self._masks, self._features = masks, features
        self._width = len(features) if features is not None else width
        self._feature_keys: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Drops elements of [..., T, F], and scales the others by 1 / (1 - p). Raises `ModelError`: the input is not
        tokens by features, or not as many as expected."""
        if not self.training:
            return x
        tokens = self._masks.keys_of(x.shape[-2]) if x.dim() in (2, 3) and x.shape[:-2].numel() == 1 else None
        if tokens is None or (self._width is not None and x.shape[-1] != self._width):
            raise ModelError(
                f"the dropout {self.name} got a tensor of the shape {tuple(x.shape)}",
                why="masks are the same under every strategy only if a module sees all features of the tokens of a pack",
                fix=f"set the probability of {self.name} to 0 in the model's config",
            )
        if self.p >= 1.0:
            return x * 0.0
        keep = kept(tokens, self._keys_of(x, self._masks.next_call(self.name)), self.p)
        return torch.where(keep, x, 0.0) * (1.0 / (1.0 - self.p))

    def _keys_of(self, x: Tensor, call: int) -> tuple[Tensor, Tensor]:
        place = call, x.shape[-1]
        if place not in self._feature_keys:
            features = self._features if self._features is not None else torch.arange(x.shape[-1])
            name = f"{self.name} {call}" if call else self.name
            self._feature_keys[place] = feature_keys(name, features.to(x.device))
        return self._feature_keys[place]


def use_keyed_dropout(
    model: nn.Module,
    masks: DropoutMasks,
    # the parameters by their names in the model; A of a LoRA layer gives the layer's features
    specs: Mapping[str, ParameterSpec],
    # this rank's part of a parameter along its cut dim (`layout.shares.shard_rows`)
    rows: Callable[[ParameterSpec], Sequence[tuple[int, int]]],
    hidden_size: int,  # the width of dropout's input between layers
    tensor: TensorGroup | None,
) -> bool:
    """Replaces the dropout modules of a replica; returns whether there are any."""
    dropouts = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    for name, module in dropouts:
        features, width = None, hidden_size if tensor is not None else None
        if _LORA in name:
            spec = specs.get(f"{name.replace(_LORA, _LORA_A)}.weight")  # none of an embedding, which drops nothing
            width = spec.shape[1] if spec is not None else None
            if tensor is not None and spec is not None and spec.shard_dim == 1:
                features = torch.cat([torch.arange(low, high) for low, high in rows(spec)])
        model.set_submodule(name, KeyedDropout(name, module.p, masks, features, width))
    return bool(dropouts)


def use_attention_dropout(model: PreTrainedModel, masks: DropoutMasks, first_heads: Mapping[str, int]) -> bool:
    """Makes a replica's attention modules draw from the masks; returns whether any of them drops. `first_heads`: this
    rank's first head, for modules with only some heads here."""
    attentions = {m: (name, first_heads.get(name, 0)) for name, m in model.named_modules() if calls_attention(m)}
    if not attention_dropouts(model.config) and not any(
        rate > 0 for m in attentions for rate in held_rates(m).values()
    ):
        return False
    masks.attentions = attentions
    return bool(attentions)


class EmbeddingNoise:
    """A forward hook for the embedding module; does nothing in eval mode. `alpha`: `neftune_noise_alpha`."""

    def __init__(self, alpha: float, seed: int) -> None:
        self._alpha, self._seed = alpha, seed
        self.step = 0  # the number of the mini-batch
        self.micro_batch: MicroBatch | None = None  # the pack that is embedded next

    def begin_step(self, step: int) -> None:
        self.step = step

    def begin(self, pack: object, micro_batch: MicroBatch, whole: MicroBatch) -> None:
        self.micro_batch = micro_batch

    def __call__(self, module: nn.Module, args: object, out: Tensor) -> Tensor | None:
        """Adds each sequence's noise to [1, T, H]; None, which keeps the output, in eval mode."""
        if not module.training:
            return None
        assert self.micro_batch is not None
        return out + self.draw(self.micro_batch, out)

    def draw(self, micro_batch: MicroBatch, like: Tensor) -> Tensor:
        """The noise of a pack, [1, T, H] in the dtype and on the device of `like`; drawn in fp32."""
        noise = torch.empty(like.shape, dtype=torch.float32, device=like.device)
        generator = torch.Generator(device=like.device)
        cuts = micro_batch.cuts or [(0, length) for length in micro_batch.lengths]
        keys = micro_batch.keys or ((-1, 0),) * len(micro_batch.lengths)  # padding alone
        begin = 0
        for length, key, (before, whole) in zip(micro_batch.lengths, keys, cuts, strict=True):
            generator.manual_seed(_key(self._seed, self.step, *key) % 2**64 >> 1)
            magnitude = self._alpha / math.sqrt(whole * like.shape[-1])
            place = noise[:, begin : begin + length]
            if length == whole:
                place.uniform_(-magnitude, magnitude, generator=generator)
            else:  # a part gets the numbers of the whole sequence at its place
                drawn = noise.new_empty((1, whole, like.shape[-1]))
                drawn.uniform_(-magnitude, magnitude, generator=generator)
                place.copy_(drawn[:, before : before + length])
            begin += length
        return noise.to(like.dtype)
