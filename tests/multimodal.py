"""Tiny multimodal models, with random weights that make mistakes show."""

from collections.abc import Callable

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

VOCABULARY = 163
_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "image_size": 28, "patch_size": 14}


def _gemma3() -> PreTrainedModel:
    vision = {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"boi_token_index": 160, "eoi_token_index": 161, "image_token_index": 162}
    config = Gemma3Config(text_config=_TEXT | _WINDOWS, vision_config=vision, mm_tokens_per_image=4, **tokens)
    return Gemma3ForConditionalGeneration(config)


def _gemma4() -> PreTrainedModel:
    """Its other half is left out."""
    beside = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 8}
    text = _TEXT | _WINDOWS | beside | {"num_kv_shared_layers": 0}
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text))


def _mistral3() -> PreTrainedModel:
    vision = {**_VISION, "model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**_TEXT, "model_type": "mistral"}
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision, image_token_index=162)
    )


def _qwen3_vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 14, "out_hidden_size": 32,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    tokens = {"image_token_id": 162, "video_token_id": 161, "vision_start_token_id": 160, "vision_end_token_id": 159}
    config = Qwen3VLConfig(text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision, **tokens)
    return Qwen3VLForConditionalGeneration(config)


MULTIMODAL: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "mistral3": _mistral3,
    "qwen3_vl": _qwen3_vl,
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
