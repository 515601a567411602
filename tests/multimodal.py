"""Tiny multimodal models, with random weights that make mistakes show."""

from collections.abc import Callable

import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, PreTrainedModel

from tests.vision_models import TEXT, VISION_FAMILIES, VOCABULARY, WINDOWS


def _gemma4() -> PreTrainedModel:
    """Its other half is left out."""
    beside = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 8}
    text = TEXT | WINDOWS | beside | {"num_kv_shared_layers": 0}
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text))


MULTIMODAL: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3": VISION_FAMILIES["gemma3"].model,
    "gemma4": _gemma4,
    "mistral3": VISION_FAMILIES["mistral3"].model,
    "qwen3_vl": VISION_FAMILIES["qwen3_vl"].model,
}


def multimodal_model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MULTIMODAL[family]().to(dtype)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.normal_()
    return model
