"""How the layers of a model mix the tokens of a row, which decides how they treat the sequences of a pack.

Packed attention separates the sequences of a row. Other layers run one sequence at a time, or, if they are linear attention of
a known form, whole packs.
"""

import dis
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_hotspa.parallel.attention import calls_attention, code_of_forward, names_in_forward

_PACKABLE = {"full_attention", "sliding_attention", "attention", "dense", "sparse"}
_SLIDING = {"sliding_attention", "hybrid_sliding"}

CONVOLUTION, RECURRENCE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
"""The names by which families' forwards call the two functions that mix tokens."""


@dataclass(frozen=True)
class LayerKind:
    """How one decoder layer treats the sequences of a pack."""

    num_attentions: int  # how many of its modules attend through the interface of transformers
    alone: bool = False  # whether it runs one sequence at a time, with the family's own attention (eager) and a mask
    window: int | None = None  # tokens that the mask lets a position see, itself included; all before it when None
    chunk: int | None = None  # length of the stretches that the mask separates; none when None
    # whether its attention must get the pack past the layer, which drops unknown arguments (StableLM)
    hands_on: bool = False
    is_linear: bool = False  # whether it is linear attention that runs whole packs

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


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of every layer in the config; empty if it names none."""
    text = config.get_text_config()
    return list(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


def layer_kinds(base: nn.Module, layers: Sequence[nn.Module], config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """The kind of each decoder layer."""
    text, types = config.get_text_config(), layer_types(config)
    uniform = "create_sliding_window_causal_mask" in names_in_forward(base) and not types
    by_position = bool(getattr(text, "attn_temperature_tuning", False))
    kinds = []
    for index, layer in enumerate(layers):
        kind = types[index] if len(types) == len(layers) else "full_attention"
        attentions = [module for module in layer.modules() if calls_attention(module)]
        if not attentions and _passes_arguments_on(layer) and any(map(is_linear_attention, layer.modules())):
            kinds.append(LayerKind(0, is_linear=True))
            continue
        slides = uniform or kind in _SLIDING
        tells = all("sliding_window" in names_in_forward(module) for module in attentions)
        own_mask = any(hasattr(m, "prepare_dynamic_mask") or hasattr(m, "indexer") for m in attentions)
        convolves = any(isinstance(module, nn.Conv1d) for module in layer.modules())
        keeps = not _passes_arguments_on(layer)  # its attention would not get the pack
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
    code = code_of_forward(layer)
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    return any(i.opname.startswith("LOAD") and i.argval == name for i in dis.get_instructions(code))


def is_linear_attention(module: nn.Module) -> bool:
    """Whether a module is a gated delta net of transformers whose forward mixes tokens only in the two functions `CONVOLUTION` and `RECURRENCE`."""
    of_library = type(module).__module__.startswith("transformers.models.")
    members = all(hasattr(module, name) for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv1d"))
    return of_library and members and {CONVOLUTION, RECURRENCE} <= names_in_forward(module)


def projections(module: nn.Module) -> tuple[list[str], str, str]:
    """The names of a gated delta net's input projections, output projection, and norm."""
    names = [name for name, child in module.named_children() if list(child.parameters())]
    out, norm = (
        next(name for name in names if name in known) for known in (("out_proj", "o_proj"), ("norm", "o_norm"))
    )
    return [name for name in names if name not in (out, norm, "conv1d")], out, norm
