"""Tiny models of the families that the exactness tests run, by name."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM
from transformers.models.olmo import OlmoConfig, OlmoForCausalLM
from transformers.models.olmo2 import Olmo2Config, Olmo2ForCausalLM
from transformers.models.phi3 import Phi3Config, Phi3ForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

_COMMON: dict[str, Any] = {
    "vocab_size": 163,  # odd: uneven shards of the vocabulary
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "llama_gqa_bias": (
        LlamaConfig,
        LlamaForCausalLM,
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "llama_uneven": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "num_key_value_heads": 6,
            "num_attention_heads": 12,
            "hidden_size": 48,
            "intermediate_size": 50,
            "vocab_size": 77,
        },
    ),
    "qwen3_qk_norm_tied": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "gemma2_soft_caps": (
        Gemma2Config,
        Gemma2ForCausalLM,
        # small caps, so that leaving one out shows
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi3_fused": (Phi3Config, Phi3ForCausalLM, {"num_key_value_heads": 4, "sliding_window": 9}),
    # its norms have no parameters
    "olmo": (OlmoConfig, OlmoForCausalLM, {"num_key_value_heads": 4}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"num_key_value_heads": 4}),
}

MIXTURE = "mixtral"
"""A model with experts."""
_MIXTURES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    MIXTURE: (
        MixtralConfig,
        MixtralForCausalLM,
        {"num_key_value_heads": 4, "intermediate_size": 24, "num_local_experts": 8, "sliding_window": None},
    ),
}

FAMILIES = tuple(_FAMILIES)
"""The dense ones."""


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    config_class, _, own = (_FAMILIES | _MIXTURES)[family]
    return config_class(**{**_COMMON, **own, **changes})


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model, the same on every rank, with norms and biases away from their special values 1 and 0."""
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    # stock Gemma 2 caps attention scores only in its eager path
    attention = "eager" if family.startswith("gemma2") else "sdpa"
    if family in _MIXTURES and dtype == torch.float64:  # which the grouped products of experts do not know
        config._experts_implementation = "eager"
    model = (_FAMILIES | _MIXTURES)[family][1]._from_config(config, attn_implementation=attention, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.05)
    return model.to(dtype).train()
