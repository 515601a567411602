"""Which models are causal language models that can be trained here, and which half of a multimodal model text trains.

Checked before anything is built, so that the error names the model's kind.

Replicas of a multimodal model lack the other half: the encoders of images and sound, and their projections, are
removed, and the class's inner forward, which would insert their output between the embeddings, goes straight to the
language model. Names stay as in the complete model, which keeps the other half's weights unchanged in host memory; they
are saved with the rest.
"""

import copy
import dis
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_hotspa.costs.terms import packed_forms
from hf_hotspa.errors import HotspaConfigError, ModelError, UnsupportedError
from hf_hotspa.model.packed_layer import packed_layers
from hf_hotspa.parallel.attention import calls_attention, code_of_forward, names_in_forward
from hf_hotspa.parallel.head_loss import BaseOutput
from hf_hotspa.parallel.wrapped_model import bare_model, is_wrapped, replaced_modules, unwrapped_modules
from hf_hotspa.seam import hooks

_FIX = (
    "pass what AutoModelForCausalLM.from_config or from_pretrained returns, or a subclass of such a model, or a model of such a "
    "family whose heads map single tokens (docs/heads.md)"
)


def refuse_other_models(model: nn.Module) -> None:
    """Rejects models other than causal language models, and weights in float16. `model`: the user's model, perhaps in
    PEFT's wrapper; on any device. Raises `ModelError`: it is another kind of model; the message says which. Raises
    `UnsupportedError`: some of its attention is not causal, or parameters are parametrized. Raises `HotspaConfigError`:
    it was loaded in float16; the stock Trainer's steps would end in NaN."""
    bare, _ = bare_model(model)
    if not isinstance(bare, PreTrainedModel):
        chain = "it has parameters outside of one transformers model, or that model has a vocabulary's head"
        raise ModelError(
            f"the model is a {type(bare).__name__}, not a transformers PreTrainedModel",
            why=chain if isinstance(bare, nn.Sequential) else None,
            fix=_FIX,
        )
    if why := _other_kind(bare):
        raise ModelError(f"{type(bare).__name__} is not a causal language model", why=why, fix=_FIX)
    other = next((type(m).__name__ for m in _attentions(bare) if not getattr(m, "is_causal", True)), None)
    if other is not None and not attends_both_ways(bare):
        raise UnsupportedError(
            f"{other} of {type(bare).__name__} is attention that is not causal",
            why="it sees later tokens, or attends to layers instead of tokens, which packs would mix",
            fix=_FIX + "; of an encoder, set is_decoder=True in its config",
        )
    packed = packed_layers(model)
    for name, module in model.named_modules():
        for parameter, ways in module.parametrizations.items() if is_parametrized(module) else ():
            if f"{name}.parametrizations.{parameter}" in packed:
                continue
            raise UnsupportedError(
                f"the parameter {f'{name}.{parameter}'.lstrip('.')!r} has a parametrization ({type(ways[0]).__name__})",
                why="the model is rebuilt from its class and config for every strategy, and the parametrization would be lost",
                fix="fold it into the weight with torch.nn.utils.parametrize.remove_parametrizations; for adapters use PEFT",
            )
    half = next((name for name, p in model.named_parameters() if str(p.dtype) == "torch.float16"), None)
    if half is not None:
        raise HotspaConfigError(
            f"the model was loaded in float16 (parameter {half!r})",
            why="there is no loss scaling, without which small gradients vanish in float16",
            fix="load it with dtype=torch.float32, or dtype=torch.bfloat16 and bf16=True",
        )


def _attentions(model: PreTrainedModel) -> list[nn.Module]:
    return list(filter(calls_attention, _modules_of_text(model)))


def attends_both_ways(model: PreTrainedModel) -> bool:
    """Whether every token of a row sees all others, earlier and later ones: all attention says so, and no next token is predicted."""
    attentions = _attentions(model)
    return bool(attentions) and all(not getattr(m, "is_causal", True) for m in attentions) and bool(readout_of(model))


def _modules_of_text(model: PreTrainedModel) -> list[nn.Module]:
    is_of_text = of_text(model)
    return [module for name, module in model.named_modules() if is_of_text(name)]


def _other_kind(model: PreTrainedModel) -> str | None:
    """Returns why a model is not a causal language model; None if it seems to be."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "it has an encoder and a decoder"
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if text_base(model) is not None:
        names |= set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    own = type(model).__module__.startswith("transformers.")
    if readout_of(model) is not None:
        return None
    if own and not any(kind.__name__ in names for kind in type(model).__mro__):
        return "AutoModelForCausalLM knows no class of that name"
    try:
        ends = model.get_input_embeddings(), model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return "it does not say which module embeds its tokens (get_input_embeddings)"
    if ends[0] is None or ends[1] is None:
        return f"it has no {'input embedding' if ends[0] is None else 'output embedding (language-model head)'}"
    return None


class Readout(Protocol):
    """How a model is read whose head is not a vocabulary's, as plain data: some of its modules make `width` numbers of the last
    hidden state of each token alone, on the last stage, whole on every rank of tp; the rank that has the rows gets them, and
    its own forward makes everything else of them.

    Attributes:
        width: The numbers of a token.
    """

    @property
    def width(self) -> int: ...

    def factors(self, length: int, positions: slice) -> Tensor | None:
        """fp64: the factors of some tokens of a document of so many tokens, whose outputs add up to one output of the
        document; None if each token has its outputs."""

    def reader(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Of a replica's model on a last stage: maps hidden states [1, t, h] to [1, t, width]."""

    def outputs(self, model: nn.Module, numbers: Tensor, given: Mapping[str, Any]) -> Any:
        """What the model's own forward returns for `given`, from the `numbers` [B, L, width] of its tokens ([B, width]
        of its rows, with `factors`). Its base and the
        modules that make these are not called. Raises `UnsupportedError`: it asks the base for more, or changes its
        inputs."""

    def error(self, model: nn.Module, given: Mapping[str, Any]) -> UnsupportedError | None:
        """Returns why `outputs` cannot be had for `given`, or would depend on padding, before anything is computed."""

    def check(self, model: nn.Module) -> None:
        """Compares with the model's own forward of a few tokens. `model`: the user's, which has weights. Raises
        `UnsupportedError`: another result."""


def readout_of(model: nn.Module) -> Readout | None:
    """How a model without a vocabulary's head is read; None for a causal language model, and one of another kind. Raises
    `UnsupportedError`: it cannot be read token by token."""
    return next((own for hook in hooks("describe") if (own := hook(model, None).readout()) is not None), None)


def refuse_own_attention(model: PreTrainedModel) -> None:
    """Rejects a family that never uses the attention interface of transformers (Falcon, BLOOM, GPT-J). Raises
    `UnsupportedError`: naming the module."""
    modules = _modules_of_text(model)
    if any(map(calls_attention, modules)):
        return
    own = next((type(m).__name__ for m in modules if "attention" in type(m).__name__.lower()), None)
    if own is not None:
        raise UnsupportedError(
            f"{own} of {model.config.get_text_config().model_type} does not use the attention interface of transformers",
            why="the sequences of a pack would see each other",
            fix="train a family whose attention does (docs/families.md)",
        )


_POSITIONS_BY_MASK = ("bloom", "mpt", "opt")
"""Families that count positions from the attention mask, or by distance without a config field."""


def has_absolute_positions(config: object) -> bool:
    """Whether tokens after masked padding give other results."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "model_type", None) in _POSITIONS_BY_MASK or getattr(text, "alibi", False):
        return False
    rotary = getattr(text, "rope_parameters", None)
    return not rotary and not any(getattr(text, name, None) for name in ("rope_theta", "rotary_dim", "rotary_pct"))


# -- the language half of a multimodal model ---------------------------------------------------------------------------


_OTHER_KINDS = ("pixel", "image", "video", "audio")
"""Parts of the names of inputs other than text."""


def text_base(model: PreTrainedModel) -> str | None:
    """The dotted name of the language model inside a multimodal model; None for a text model."""
    if model.config.get_text_config() is model.config:
        return None
    embedding = model.get_input_embeddings()
    around = [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, PreTrainedModel) and any(inner is embedding for inner in module.modules())
    ]
    return around[-1] if around and "." in around[-1] else None  # parents come first


def of_text(model: PreTrainedModel) -> Callable[[str], bool]:
    """Returns whether a parameter, buffer or module, by name, is in the language half (true for text models), and is not
    replaced by a trained copy."""
    replaced = replaced_modules(model)
    if (base := text_base(model)) is None:
        return lambda name: not f"{name}.".startswith(replaced)
    outer = f"{base.partition('.')[0]}."
    return lambda name: (
        not f"{name}.".startswith(replaced) and (not name.startswith(outer) or f"{name}.".startswith(f"{base}."))
    )


def other_half(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters that text does not train, by name."""
    is_of_text = of_text(model)
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if not is_of_text(name)}


def keep_text(model: PreTrainedModel) -> None:
    """Removes the other half of a multimodal model, and makes its forward skip it; other models are unchanged."""
    if (base := text_base(model)) is None:
        return
    outer, _, inner = base.rpartition(".")
    around: Any = model.get_submodule(outer)
    for name, child in list(around.named_children()):
        if name != inner and any(True for _ in child.parameters()):
            setattr(around, name, None)
    for name in list(around._parameters):
        setattr(around, name, None)
    around.forward = TextForward(around, inner)


class TextForward:
    """The forward, for text, of the module around language model and encoders."""

    def __init__(self, around: nn.Module, inner: str) -> None:
        self._around, self._inner = around, inner

    def __call__(self, **inputs: object) -> BaseOutput:
        given = {name: value for name, value in inputs.items() if value is not None}
        if unknown := [name for name in given if any(kind in name for kind in _OTHER_KINDS)]:
            raise UnsupportedError(
                f"the inputs {unknown}", why="rows of text are trained here, without images or sound"
            )
        out = getattr(self._around, self._inner)(**given)
        return BaseOutput(last_hidden_state=out.last_hidden_state)


# -- quantized weights --------------------------------------------------------------------------------------------------

_DEQUANTIZE = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config", "compressed-tensors": "CompressedTensorsConfig"}
_PACKED = "packed integers and their scales cannot be cut into shards and moved between layouts like weights"


def _refuse_quantized_modules(model: nn.Module, packed: Collection[str]) -> None:
    """Raises an error for a module with weights that are not plain, unless it is `packed`."""
    for name, module in model.named_modules():
        parameters = [] if name in packed else [*module.parameters(recurse=False)]
        kinds = {type(p) for p in parameters if not issubclass(type(p), nn.Parameter) or p.dtype.itemsize == 1}
        if kinds or "quantized" in type(module).__module__.split("."):
            raise UnsupportedError(
                f"the weights of module {name!r} are quantized ({', '.join(k.__name__ for k in (*kinds, type(module)))})",
                why=_PACKED,
                fix="train the model before it is quantized",
            )


def refuse_quantized(model: nn.Module, adapted: bool) -> None:
    """Raises an error for weights that are not plain floating-point numbers, except packed layers below an adapter.
    `model`: the model without an adapter's wrapper. `adapted`: whether it has one. Raises `UnsupportedError`: naming the
    method."""
    config, packed = getattr(getattr(model, "config", None), "quantization_config", None), packed_layers(model)
    if (config is None and not getattr(model, "is_quantized", False)) or (packed and adapted):
        _refuse_quantized_modules(model, packed if adapted else ())
        return

    def value(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    if value("dequantize") and not any(p.dtype.itemsize == 1 for p in model.parameters()):
        return  # only the files were quantized
    method = str(getattr(value("quant_method"), "value", value("quant_method")) or "an unknown method")
    raise UnsupportedError(
        f"the weights are quantized ({method}{''.join(f', {n} bits' for n in (4, 8) if value(f'load_in_{n}bit'))})",
        why="codes have no gradient, and nothing else would be trained" if packed else _PACKED,
        fix=_instead_of(method, bool(packed)),
    )


def _instead_of(method: str, is_packed: bool) -> str:
    if is_packed:
        return "put a LoRA adapter on it: get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(...))"
    if method in _DEQUANTIZE:
        return f"load it with quantization_config={_DEQUANTIZE[method]}(dequantize=True): its weights are bf16 then"
    forms = " or ".join(forms.load for forms in packed_forms())
    return (
        "load the model from which it was made, without quantization_config: from_pretrained(ORIGINAL, "
        f"dtype=torch.bfloat16); below a LoRA adapter also with quantization_config={forms}"
    )


def quantized_files(folder: Path) -> UnsupportedError:
    """The error for a folder whose weights cannot be read by slices, as they are quantized."""
    return UnsupportedError(
        "the weights are quantized",
        where=str(folder),
        why="reading by slices supports only plain weights",
        fix="give the original weights (hf_hotspa.open_qlora quantizes them below a LoRA adapter); or load the model in "
        "every process: from_pretrained, with dequantize=True for mxfp4 and fp8",
    )


# -- how layers mix the tokens of a row -------------------------------------------------------------------------------

# Packed attention separates the sequences of a row. Other layers run one sequence at a time, or, if they are linear
# attention of a known form, whole packs.

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


# -- dropout -----------------------------------------------------------------------------------------------------------


def held_rates(module: nn.Module) -> dict[str, float]:
    """A module's own dropout probabilities, as numbers or as `nn.Dropout`, by attribute."""
    numbers = {n: float(v) for n, v in vars(module).items() if "drop" in n and isinstance(v, int | float)}
    return numbers | {n: m.p for n, m in module.named_children() if isinstance(getattr(m, "p", None), float)}


def attention_dropouts(config: PreTrainedConfig) -> dict[str, float]:
    """A config's settings above 0 that drop attention probabilities."""
    settings = config.get_text_config().to_dict().items()
    return {key: value for key, value in settings if _drops_attention(key) and _is_positive(value)}


def without_attention_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a config whose model drops no attention probabilities."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for key in attention_dropouts(config):
        setattr(text, key, 0.0)
    return config


def _drops_attention(key: str) -> bool:
    return _is_dropout(key) and "att" in key


def _is_dropout(key: str) -> bool:
    return "dropout" in key or key.endswith("pdrop")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def refuse_dropout(
    model: PreTrainedModel, layers: Sequence[nn.Module], kinds: Sequence[LayerKind], of_attention: bool = True
) -> None:
    """Raises an error if a config's dropout or jitter would draw from torch's generator in a replica.

    Supported are `nn.Dropout` between the layers, and dropout of attention probabilities in layers whose attention uses
    the interface of transformers and runs packed. `model`: the model, with or without adapters. `of_attention`: whether
    the config's dropout of attention probabilities stays on. Raises `UnsupportedError`: naming the setting of the
    config.
    """
    text = model.config.get_text_config()
    modules = unwrapped_modules(model).values()
    served = {module.p for module in modules if isinstance(module, nn.Dropout)}
    called = {
        rate
        for module in modules
        for name, rate in held_rates(module).items()
        if not isinstance(getattr(module, name), nn.Module) and not (calls_attention(module) and "att" in name)
    }
    own = _own_attention(layers, kinds) if of_attention else None
    for key, value in text.to_dict().items():
        of_another_head = key.startswith(("classifier", "summary", "seq_classif", "qa_"))
        if not (_is_dropout(key) or key.endswith("jitter_noise")) or of_another_head or not _is_positive(value):
            continue
        why = "the random numbers of its layers depend on the layout, so hot-switched training would not be exact"
        fix = f"set config.{key} = 0.0"
        if _drops_attention(key):
            if own is None:
                continue
            why = f"{own} drops attention probabilities by itself, different ones under each layout"
            fix = f"set hotspa_attention_dropout=0, or config.{key} = 0.0"
        elif _is_dropout(key) and (value in served or served == {0}) and value not in called:  # or all are switched off
            continue
        raise UnsupportedError(f"{text.model_type} config has {key}={value}", why=why, fix=fix)


def _own_attention(layers: Sequence[nn.Module], kinds: Sequence[LayerKind]) -> str | None:
    """The class of a module that would drop attention probabilities by itself; None if there is none."""
    attends = False
    for layer, kind in zip(layers, kinds, strict=True):
        modules = dict(layer.named_modules())
        if attention := next((m for m in modules.values() if calls_attention(m)), None):
            attends = True
            if kind.alone:
                return type(attention).__name__
            continue
        for name, module in modules.items():  # state spaces, for example, have none
            if any("att" in f"{name}.{attribute}" and rate > 0 for attribute, rate in held_rates(module).items()):
                return type(module).__name__
    return None if attends else type(layers[0]).__name__


# -- modules that a feature adds beside the weights of the user's model ------------------------------------------------

# Features find them (hook `describe`). Their parameters are in the parameter vector, cut where the weight beside them is cut.
# A replica has the same modules, on its shards.

INPUTS, OUTPUTS, NEITHER = "inputs", "outputs", "neither"
"""The dim that an added parameter shares with the weight beside it, and along which it is cut like that weight. If the
weight is cut along the other one, every shard holds the complete parameter, with a part of its gradient."""


class AddedModules(Protocol):
    """What was added to a model, as plain data.

    Attributes:
        name: The name of the trained ones in the user's model.
        rank: The width of what is added to a weight, for plans.
        scalings: The factors of the added modules' outputs by their names in the user's model, by the name of their layer in
            the transformers model.
        inside: Where each wrapper has the layer that it runs, by the wrapper's name in the transformers model.
        ep_unsupported_reason: Why fused experts cannot be divided over ranks beside them, or None.
    """

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def scalings(self) -> Mapping[str, Mapping[str, float]]: ...
    @property
    def inside(self) -> Mapping[str, str]: ...
    @property
    def ep_unsupported_reason(self) -> str | None: ...

    def digest(self) -> str:
        """Equal on ranks whose added modules compute the same from the same weights."""

    def beside(self, name: str) -> tuple[str, str | None]:
        """The parameter that a name of the transformers model stands for under tensor parallelism, by its name in a model
        without added modules, and `INPUTS`, `OUTPUTS` or `NEITHER` for an added one. Any other name unchanged, and None."""

    def put(self, model: nn.Module) -> None:
        """Puts the modules, on the meta device, into a model freshly built by its class from its config."""


def unwrap(model: nn.Module) -> tuple[Any, str, AddedModules | None]:
    """`bare_model`, and what features added to it. Raises `UnsupportedError`: it cannot be trained exactly, or several
    features added to the model."""
    bare, prefix = bare_model(model)
    refuse_quantized(bare, adapted=is_wrapped(model))
    added = [own for hook in hooks("describe") if (own := hook(model, None).added()) is not None]
    if len(added) > 1:
        raise UnsupportedError(f"{len(added)} features add modules to the model: {[each.name for each in added]}")
    return bare, prefix, added[0] if added else None
