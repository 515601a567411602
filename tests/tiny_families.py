"""A tiny model of every causal language model of transformers with a parallel plan, and of most without one, made from
its config class.

Sizes are small, and every setting that changes what a family computes is away from its neutral value where the config
has it: biases, windows, soft caps, multipliers, norms of queries and keys, several groups of experts. Dropout is off.
"""

from dataclasses import fields
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_hotspa.model.tensor_plan import has_tensor_plan

_SIZES: dict[str, Any] = {
    "vocab_size": 163,  # odd: uneven shards of the vocabulary
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "eod_token_id": 3,
    "sep_token_id": 4,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 20,
    "shared_intermediate_size": 20,
    "shared_experts_intermediate_size": 20,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 40,
    "ffn_hidden_size": 48,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "zero_expert_num": 2,
    "num_layers": 4,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 5,
    # windows
    "sliding_window": 5,
    "sliding_window_size": 5,
    "use_sliding_window": True,
    "max_window_layers": 2,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "use_mamba_kernels": False,
    "block_size": 8,
    "keep_window_size": 4,
    "attention_chunk_size": 6,
    "floor_scale": 4,
    # what is computed beside
    "attention_bias": True,
    "use_bias": True,
    "mlp_bias": True,
    "qkv_bias": True,
    "attention_out_bias": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logit_scale": 0.5,
    "scale_emb": 3.0,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 12,
    "mup_enabled": True,
    "clip_qkv": 0.5,
}

_MIXED = ["linear_attention", "full_attention"] * 2
_INKLING: dict[str, Any] = {
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 8,
    "d_rel": 4,
    "rel_extent": 8,
    "log_scaling_n_floor": 4,
    "conv_kernel_size": 3,
    "unpadded_vocab_size": 150,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, "short_conv_kernel_size": 3},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
        "index_topk": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "layer_types": [
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
            "compressed_sparse_attention",
        ],
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "head_dim": 12,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 12,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 10,
        "swa_v_head_dim": 6,
    },
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.7, 0.0, 0.7, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 163,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 163},
    "gemma4_unified_text": {"global_head_dim": 16},
    "granitemoehybrid": {"layer_types": _MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "inkling_text": _INKLING,
    "inkling2_text": {**_INKLING, "n_layers_per_attn_res_block": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"layer_types": _MIXED},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 56,
            "crop_size": 56,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "bias_max_distance": 10,
        },
    },
    "longcat_flash": {"head_dim": 4},
    "nemotron_h": {"moe_shared_expert_intermediate_size": 20},
}
"""What a family needs beside."""

_OLDER_SIZES: dict[str, Any] = {
    "is_decoder": True,
    "add_cross_attention": False,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 8,
    "n_inner": 48,
    "n_layers": 4,
    "n_heads": 8,
    "d_model": 64,
    "dff": 48,
    "ffn_dim": 48,
    "n_positions": 256,
    "max_seq_len": 256,
    "rotary_dim": 4,
    "attention_heads": 8,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 5,
    "embedding_size": 32,
    "input_embedding_size": 64,
    "output_embedding_size": 64,
    "scale_attn_by_inverse_layer_idx": True,
    "use_task_id": True,
    "pronunciation_vocab_size": 20,
    "shape_vocab_size": 20,
    "word_embed_proj_dim": 32,
    "default_language": "en_XX",
}
"""The sizes of families without a plan, most of which are older and have names of their own for them."""

UNPLANNED = (
    "bamba",
    "bert",
    "bert-generation",
    "biogpt",
    "bitnet",
    "bloom",
    "camembert",
    "ctrl",
    "data2vec-text",
    "diffllama",
    "electra",
    "emu3",
    "ernie",
    "falcon",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox_japanese",
    "gptj",
    "hunyuan_v1_dense",
    "lfm2",
    "megatron-bert",
    "modernbert-decoder",
    "mpt",
    "openai-gpt",
    "opt",
    "persimmon",
    "recurrent_gemma",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "stablelm",
    "xglm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Dense families without a plan that are swept, too: all that transformers trains as decoders of text alone, but for those of
state spaces only and those whose class is another family's."""


def planned_families() -> dict[str, tuple[bool, bool]]:
    """Every causal language model with a plan: whether it has one for tp, and one for pp."""
    found = {}
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        config = CONFIG_MAPPING[name]
        tp, pp = has_tensor_plan(config), bool(config.base_model_pp_plan)
        if tp or pp:
            found[name] = tp, pp
    return found


def swept_families() -> dict[str, tuple[bool, bool]]:
    """Every family of the sweep, as `planned_families` has them."""
    found = planned_families() | dict.fromkeys(UNPLANNED, (False, False))
    return {name: found[name] for name in sorted(found)}


def is_mixture(config: PreTrainedConfig) -> bool:
    text = config.get_text_config()
    if any(getattr(text, switch, True) is False for switch in ("is_moe", "enable_moe_block")):
        return False
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(isinstance(found := getattr(text, name, None), int) and found > 1 for name in names)


def tiny_config_of(family: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model of a family, by its `model_type`."""
    own = {**_FAMILIES.get(family, {}), **changes}
    config = _tiny(CONFIG_MAPPING[family], own, older=family in UNPLANNED)
    types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if types == {"sliding_attention"}:  # full attention comes in every fifth layer or so
        mixed = {"layer_types": ["sliding_attention", "full_attention"] * 2}
        config = _tiny(CONFIG_MAPPING[family], {**own, **mixed})
    return config


def _tiny(config_class: type[PreTrainedConfig], beside: dict[str, Any], older: bool = False) -> PreTrainedConfig:
    own = {field.name for field in fields(config_class)}
    if "text_config" in own:
        text = _tiny(config_class.sub_configs["text_config"], {})
        return config_class(text_config=text.to_dict(), **beside)
    sizes = {name: value for name, value in (_SIZES | (_OLDER_SIZES if older else {})).items() if name in own}
    if "kv_lora_rank" in own:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    dropout = {name: 0.0 for name in own if ("dropout" in name or name.endswith(("pdrop", "jitter_noise")))}
    return config_class(**{**sizes, **dropout, **beside})


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config with every dropout and jitter set to 0; changed in place."""
    for part in (config, config.get_text_config()):
        for name in vars(part):
            if ("dropout" in name or name.endswith(("pdrop", "jitter_noise"))) and isinstance(
                getattr(part, name), float
            ):
                setattr(part, name, 0.0)
    return config


def tiny_model_of(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model, the same on every rank: parameters and saved buffers are away from the values that hide mistakes."""
    torch.manual_seed(seed)
    config = tiny_config_of(family, **changes)
    # the fused kernels of experts do not know fp64
    config._experts_implementation = "eager"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed + 1)
    saved = model.state_dict().keys()
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in saved)]
    with torch.no_grad():
        for name, tensor in named:
            if name.endswith("linear_attn.A_log"):
                tensor.sub_(3.0)  # states that last for a sequence, so that a leak into the next one shows
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.nan_to_num_(0.0).add_(noise, alpha=0.05)
    return model.to(dtype).train()
