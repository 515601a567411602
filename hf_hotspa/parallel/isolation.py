"""Layers that mix the tokens of a row in another way than packed attention: they run one sequence of a pack at a time.

Packed attention keeps the sequences of a row apart by itself. State-space and linear-attention layers and short
convolutions would carry something from one sequence into the next; attention that makes its own mask (an index of keys,
chunks, scores that depend on the position in the row) would not know where a sequence begins. Such a layer is called
once for each sequence of the pack, with that sequence's slice of everything that it is given, so that nothing can pass
whatever it computes. All else in a decoder layer works token by token, so the results are the same.
"""

import copy
import dis
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_hotspa.parallel.attention import PackedSequences, calls_attention, code_of_forward, names_in_forward
from hf_hotspa.parallel.linear_attention import mix_packed, mixes_packed

_PACKABLE = {"full_attention", "sliding_attention", "attention", "dense", "sparse"}
_SLIDING = {"sliding_attention", "hybrid_sliding"}


@dataclass(frozen=True)
class LayerKind:
    """How one decoder layer treats the sequences of a pack.

    Args:
        num_attentions: How many of its modules attend through the interface of transformers.
        alone: Whether it runs one sequence at a time. Its attention is then the family's own (eager), with a mask.
        window: Tokens that the mask lets a position see, itself included; all before it when None.
        chunk: Length of the stretches that the mask keeps apart; none when None.
        hands_on: Whether its attention must be given the pack past the layer, which keeps what it has no name for (StableLM).
        is_linear: Whether it is linear attention that runs whole packs (`parallel.linear_attention`).
    """

    num_attentions: int
    alone: bool = False
    window: int | None = None
    chunk: int | None = None
    hands_on: bool = False
    is_linear: bool = False

    def mask(self, length: int, like: Tensor) -> Tensor:
        """[1, 1, length, length] in the dtype of `like`: 0 where a position may look, else the smallest number."""
        position = torch.arange(length, device=like.device)
        distance = position[:, None] - position[None, :]
        allowed = distance >= 0
        if self.window is not None:
            allowed &= distance < self.window
        if self.chunk is not None:
            allowed &= position[:, None] // self.chunk == position[None, :] // self.chunk
        mask = torch.zeros(length, length, dtype=like.dtype, device=like.device)
        return mask.masked_fill(~allowed, torch.finfo(like.dtype).min)[None, None]


class _PerSequence(tuple[Any, ...]):
    """What a layer hands on beside its hidden state, for each sequence of the pack."""


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of every layer as the config names it; empty where it names none."""
    text = config.get_text_config()
    return list(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


def layer_kinds(base: nn.Module, layers: Sequence[nn.Module], config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """What each decoder layer needs."""
    text, types = config.get_text_config(), layer_types(config)
    uniform = "create_sliding_window_causal_mask" in names_in_forward(base) and not types
    by_position = bool(getattr(text, "attn_temperature_tuning", False))
    kinds = []
    for index, layer in enumerate(layers):
        kind = types[index] if len(types) == len(layers) else "full_attention"
        attentions = [module for module in layer.modules() if calls_attention(module)]
        if not attentions and _passes_arguments_on(layer) and any(map(mixes_packed, layer.modules())):
            kinds.append(LayerKind(0, is_linear=True))
            continue
        slides = uniform or kind in _SLIDING
        tells = all("sliding_window" in names_in_forward(module) for module in attentions)
        own_mask = any(hasattr(m, "prepare_dynamic_mask") or hasattr(m, "indexer") for m in attentions)
        convolves = any(isinstance(module, nn.Conv1d) for module in layer.modules())
        keeps = not _passes_arguments_on(layer)  # its attention would not learn of the pack
        alone = (
            not all(_passes_arguments_on(module) for module in (attentions if keeps else ()))
            or not attentions
            or kind not in _PACKABLE
            or (slides and not tells)
            or own_mask
            or convolves
            or by_position
        )
        windows = [getattr(module, "sliding_window", None) for module in attentions]
        window = next((w for w in windows if w is not None), getattr(text, "sliding_window", None) if slides else None)
        chunk = text.attention_chunk_size if kind == "chunked_attention" else None
        kinds.append(LayerKind(len(attentions), alone, window if alone else None, chunk, keeps and not alone))
    return tuple(kinds)


def _passes_arguments_on(layer: nn.Module) -> bool:
    """Whether a layer's forward uses the keyword arguments that it has no name for."""
    code = code_of_forward(layer)
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    return any(i.opname.startswith("LOAD") and i.argval == name for i in dis.get_instructions(code))


def take_packs(layer: nn.Module, kind: LayerKind) -> None:
    """Makes a layer treat the sequences of a pack as its kind says."""
    if kind.alone:
        run_alone(layer, kind)
    elif kind.hands_on:
        hand_pack_on(layer)
    elif kind.is_linear:
        for module in filter(mixes_packed, layer.modules()):
            mix_packed(module)


def run_alone(layer: nn.Module, kind: LayerKind) -> None:
    """Makes a layer run each sequence of its pack on its own, with the family's own attention."""
    for module in layer.modules():
        if calls_attention(module):
            module.config = copy.copy(module.config)
            module.config._attn_implementation = "eager"
    layer.forward = partial(_each_sequence, forward=layer.forward, kind=kind)


def hand_pack_on(layer: nn.Module) -> None:
    """Gives the attentions of a layer the pack that the layer is called with and does not pass on."""
    holder: list[PackedSequences] = []
    for module in layer.modules():
        if calls_attention(module):
            module.forward = partial(_with_pack, forward=module.forward, holder=holder)
    layer.forward = partial(_holding_pack, forward=layer.forward, holder=holder)


def _holding_pack(
    *args: Any, forward: Callable[..., Any], holder: list[PackedSequences], hotspa_pack: PackedSequences, **kwargs: Any
) -> Any:
    holder.append(hotspa_pack)
    try:
        return forward(*args, **kwargs)
    finally:
        holder.pop()


def keep_pack(layer: nn.Module, recompute: Callable[..., Any]) -> Callable[..., Any]:
    """What recomputes a layer with the pack that it had when it was computed first; `recompute` itself for most layers."""
    forward = layer.forward
    if not isinstance(forward, partial) or forward.func is not _holding_pack:
        return recompute
    return partial(_recompute_with_pack, recompute=recompute, holder=forward.keywords["holder"])


def _recompute_with_pack(
    function: Callable[..., Any],
    *args: Any,
    recompute: Callable[..., Any],
    holder: list[PackedSequences],
    **kwargs: Any,
) -> Any:
    if not holder:  # the layer is called inside the recomputation, with its pack (transformers before 5.23)
        return recompute(function, *args, **kwargs)
    pack = holder[-1]

    def with_pack(*inputs: Any, **named: Any) -> Any:
        holder.append(pack)
        try:
            return function(*inputs, **named)
        finally:
            holder.pop()

    return recompute(with_pack, *args, **kwargs)


def _with_pack(*args: Any, forward: Callable[..., Any], holder: list[PackedSequences], **kwargs: Any) -> Any:
    return forward(*args, **kwargs, hotspa_pack=holder[-1])


def _slice(value: Any, start: int, stop: int, total: int, index: int) -> Any:
    """The part of an argument that belongs to sequence `index`, the tokens `[start, stop)` of a row of `total`."""
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
    *args: Any,
    forward: Callable[..., Any],
    kind: LayerKind,
    hotspa_pack: PackedSequences,
    **kwargs: Any,
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
