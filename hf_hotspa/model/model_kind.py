"""Which models are causal language models that can be trained here at all, seen from the object alone.

Asked before anything is built from a model, so that another kind is refused by its name and not by what fails first.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_hotspa.errors import HotspaConfigError, ModelError, UnsupportedError
from hf_hotspa.model.text_half import of_text, text_base
from hf_hotspa.parallel.adapters import bare_model
from hf_hotspa.parallel.attention import calls_attention

_FIX = "pass what AutoModelForCausalLM.from_config or from_pretrained returns, or a subclass of such a model"


def refuse_other_models(model: nn.Module) -> None:
    """Refuses what is no causal language model, and weights in float16.

    Args:
        model: What the user gave, perhaps in PEFT's wrapper; on any device.

    Raises:
        ModelError: it is another kind of model; the message says which.
        UnsupportedError: some of its attention is not causal.
        HotspaConfigError: it was loaded in float16; the stock Trainer's steps would end in NaN.
    """
    bare, _ = bare_model(model)
    if not isinstance(bare, PreTrainedModel):
        raise ModelError(f"the model is a {type(bare).__name__}, not a transformers PreTrainedModel", fix=_FIX)
    if why := _other_kind(bare):
        raise ModelError(f"{type(bare).__name__} is not a causal language model", why=why, fix=_FIX)
    attending = filter(calls_attention, _modules_of_text(bare))
    other = next((type(m).__name__ for m in attending if not getattr(m, "is_causal", True)), None)
    if other is not None:
        raise UnsupportedError(
            f"{other} of {type(bare).__name__} is attention that is not causal",
            why="it sees the tokens after a token, or attends to something else than tokens (layers), which packs would mix",
            fix=_FIX + "; of an encoder, set is_decoder=True in its config",
        )
    half = next((name for name, p in model.named_parameters() if str(p.dtype) == "torch.float16"), None)
    if half is not None:
        raise HotspaConfigError(
            f"the model was loaded in float16 (parameter {half!r})",
            why="there is no loss scaling, without which small gradients vanish in float16",
            fix="load it with dtype=torch.float32, or dtype=torch.bfloat16 and bf16=True",
        )


def _modules_of_text(model: PreTrainedModel) -> list[nn.Module]:
    is_of_text = of_text(model)
    return [module for name, module in model.named_modules() if is_of_text(name)]


def _other_kind(model: PreTrainedModel) -> str | None:
    """Why a model is not a causal language model; None where it looks like one."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "it has an encoder and a decoder"
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if text_base(model) is not None:
        names |= set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    own = type(model).__module__.startswith("transformers.")
    if own and not any(kind.__name__ in names for kind in type(model).__mro__):
        return "AutoModelForCausalLM knows no class of that name"
    try:
        ends = model.get_input_embeddings(), model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return "it does not say which module embeds its tokens (get_input_embeddings)"
    if ends[0] is None or ends[1] is None:
        return f"it has no {'input embedding' if ends[0] is None else 'output embedding (language-model head)'}"
    return None


def refuse_own_attention(model: PreTrainedModel) -> None:
    """Refuses a family none of whose attention goes through the attention interface of transformers (Falcon, BLOOM, GPT-J).

    Raises:
        UnsupportedError: naming the module.
    """
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
"""Families that count positions from the attention mask, or by distance without saying so in their config."""


def has_absolute_positions(config: Any) -> bool:
    """Whether tokens that stand further to the right, after padding that nobody sees, give other results."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "model_type", None) in _POSITIONS_BY_MASK or getattr(text, "alibi", False):
        return False
    rotary = getattr(text, "rope_parameters", None)
    return not rotary and not any(getattr(text, name, None) for name in ("rope_theta", "rotary_dim", "rotary_pct"))
