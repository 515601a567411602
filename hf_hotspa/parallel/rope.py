"""Rotary tables that depend on the length of a row, for each sequence of a pack by its own length; and counted positions.

* ``longrope`` (Phi-3.5, Phi-4-mini) has short factors for rows of up to `original_max_position_embeddings` tokens (the border),
  and long factors for longer rows.
* ``dynamic`` stretches its tables for rows beyond `max_position_embeddings`. No bucket takes such rows (`check_buckets`),
  so its tables never change.

transformers decides by the largest position in its input. A rank of cp, or a chunk, has a part of a row, and a pack has rows
on both sides of the border. So the module is called for one side at a time, with one more position at the end that selects it.

RoBERTa and related families count positions from the ids of the tokens that are not padding: the first token is at
`padding_idx + 1`, and a token with the padding id is at `padding_idx` and not counted (fairseq's `make_positions`). In a pack
every token must get the position that it has when its sequence stands alone.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import UnsupportedError

LONGROPE, DYNAMIC = "longrope", "dynamic"


def length_borders(config: object) -> tuple[int, ...]:
    """The row lengths, in tokens, above which other tables apply; empty if tables do not depend on the length."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    borders = {
        rope.get("original_max_position_embeddings") if rope.get("rope_type") == LONGROPE else most
        for most in [getattr(text, "max_position_embeddings", None)]
        for rope in _ropes(text)
        if rope.get("rope_type") in (LONGROPE, DYNAMIC)
    }
    return tuple(sorted(border for border in borders if border))


def refuse_hidden_rope(config: PreTrainedConfig, base: nn.Module, layers: Collection[str]) -> None:
    """Raises an error for length-dependent tables unless a module of transformers computes them once for all layers.
    Raises `UnsupportedError`: naming the rope type. `layers`: the name prefixes of modules in decoder layers of the
    base model."""
    kinds = {str(rope.get("rope_type")) for rope in _ropes(config.get_text_config())} & {LONGROPE, DYNAMIC}
    for kind in sorted(kinds):
        names = [name for name, module in base.named_modules() if kind in _types(module)]
        if not names or (kind == LONGROPE and any(name.startswith(tuple(layers)) for name in names)):
            raise UnsupportedError(
                f"{config.get_text_config().model_type} config has rope_type={kind!r}",
                why="it depends on the length of a row, and is computed inside of the layers"
                if names
                else "it depends on the length of a row, and no module of the model declares that it computes it",
                fix="use a rope type that does not depend on the length (default, linear, yarn, llama3)",
            )


class RopeByRow:
    """Makes a replica's rotary modules use, for each token, the table for the length of its sequence; `is_needed` if there is
    a module whose table depends on the length."""

    def __init__(self, model: nn.Module) -> None:
        self._lengths: tuple[int, ...] = ()
        self._pack: MicroBatch | None = None
        self.is_needed = False
        for module in model.modules():
            if LONGROPE in _types(module):
                self.is_needed = True
                module.forward = partial(self._forward, module, module.forward)

    def begin(self, pack: object, micro_batch: MicroBatch, whole: MicroBatch) -> None:
        self._pack = micro_batch
        self._lengths = tuple(whole for _, whole in micro_batch.cuts) or micro_batch.lengths

    def _forward(self, module: Any, own: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        rope = module.config.rope_parameters
        further: tuple[Any, ...] = ()
        if layer_type is not None:
            rope, further = rope[layer_type], (layer_type,)
        if rope.get("rope_type") != LONGROPE:
            return own(x, position_ids, *further)
        border = rope["original_max_position_embeddings"]
        is_long = [length > border for length in self._lengths]
        if not any(is_long):
            return own(x, position_ids, *further)
        behind = position_ids.new_full((*position_ids.shape[:-1], 1), border)
        tables = own(x, torch.cat([position_ids, behind], -1), *further)
        long = [table[..., :-1, :] for table in _each(tables)]
        if not all(is_long):
            assert self._pack is not None
            device = position_ids.device
            sides = torch.tensor(is_long).to(device, non_blocking=True)
            counts = self._pack.cu_seqlens.diff().to(device)
            mask = torch.repeat_interleave(sides, counts, output_size=position_ids.shape[-1])[:, None]
            short = _each(own(x, position_ids.clamp(max=border - 1), *further))
            long = [torch.where(mask, one, other) for one, other in zip(long, short, strict=True)]
        return long[0] if isinstance(tables, Tensor) else tuple(long)


def _each(tables: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (tables,) if isinstance(tables, Tensor) else tables


def _ropes(text: object) -> list[dict[str, Any]]:
    rope = getattr(text, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _types(module: nn.Module) -> Collection[Any]:
    types = getattr(module, "rope_type", None)
    return types.values() if isinstance(types, dict) else (types,)


_METHOD = "create_position_ids_from_input_ids"


def counting_from(base: nn.Module, family: str) -> int | None:
    """The padding id from which a base model counts positions; None if positions start at 0. Raises `UnsupportedError`:
    it computes positions from the ids in an unknown way."""
    counting = next((module for module in base.modules() if hasattr(module, _METHOD)), None)
    if counting is None:
        return None
    padding = getattr(counting, "padding_idx", None)
    if type(padding) is int:
        ids = torch.tensor([[padding + 1, padding, padding + 2, padding + 1]], device="cpu")
        expected = [[padding + 1, padding, padding + 2, padding + 3]]
        try:
            positions = getattr(counting, _METHOD)(ids, padding).tolist()
        except Exception:  # whatever the family's code raises for this call
            positions = None
        if positions == expected:
            return padding
    raise UnsupportedError(
        f"{type(counting).__name__} of {family} computes the positions of tokens from their ids in a way that is not supported",
        why="the sequences of a pack would get other positions than alone",
    )


def with_counted_positions(micro_batch: MicroBatch, padding: int) -> MicroBatch:
    """The same pack of whole sequences with the positions of its tokens counted from the padding id."""
    counts = micro_batch.input_ids[0] != padding
    upto = counts.long().cumsum(0)
    ends = micro_batch.cu_seqlens.long()
    before = torch.cat([upto.new_zeros(1), upto])[ends[:-1]]
    of_sequence = torch.repeat_interleave(before, ends.diff(), output_size=micro_batch.num_tokens)
    return replace(micro_batch, position_ids=((upto - of_sequence) * counts + padding)[None])
