"""Tiny QLoRA models: PEFT's wrapper around the tiny models of `tests.families`, whose linear layers bitsandbytes quantizes."""

from typing import Any

import torch
from peft import prepare_model_for_kbit_training
from torchao.quantization import Int8WeightOnlyConfig
from transformers import BitsAndBytesConfig, TorchAoConfig

from hf_hotspa.features.four_bit.four_bit_experts import quantize_experts
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import legal_strategies
from tests.families import tiny_model
from tests.lora import KNOWN, adapted
from tests.tiny_families import tiny_model_of

EIGHT_BITS = {
    "int8": BitsAndBytesConfig(load_in_8bit=True), "int8_weight_only": TorchAoConfig(Int8WeightOnlyConfig()),
}  # fmt: skip
"""Configs of 8-bit bases by form."""
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 16}
"""Sizes of which tp 2 cuts whole blocks of 64."""


def quantized(
    family: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    model: Any = None,
    quantization: Any = None,
    **config: Any,
) -> Any:
    """A tiny model that `from_pretrained` has quantized, to nf4 by default, without an adapter.

    Args:
        model: Changes of the model's config.
        quantization: Another config than the `BitsAndBytesConfig`.
        config: Changes of that.
    """
    plain = (tiny_model if family in KNOWN else tiny_model_of)(family, dtype, seed, **(model or {}))
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, **config}
    state = plain.state_dict()
    if plain.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return type(plain).from_pretrained(
        None,
        config=plain.config,
        state_dict=state,
        dtype=dtype,
        quantization_config=quantization or BitsAndBytesConfig(**options),
    )


def every_strategy(shape: ModelShape) -> list[str]:
    """Of four ranks: all that the model can run, and some with options."""
    return [
        *map(str, legal_strategies(4, shape)),
        "dp4+z3",
        "tp2pp2+sp+rc",
        "pp2dp2+v2",
        "dp2tp2+sp+z3",
        "cp2tp2",
        "cp4",
        "pp4+ck20",
    ]


MIXES = (
    "dp4:5@24,dp2tp2:10@20,tp2pp2:16,pp4:45@48,tp4:60",
    "dp4+z3:5@24,tp4+sp:10@20,cp2tp2:16@32,pp2dp2+v2:45@48,pp4+ck20+rc:60",
)
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 128},
    "gpt_oss": {"hidden_size": 128, "intermediate_size": 128},
}
"""Sizes of mixtures of which tp 2 cuts whole blocks of 64."""


def tiny_qlora(
    family: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    model: Any = None,
    lora: Any = None,
    adapter_name: str = "default",
    quantization: Any = None,
    experts: bool = False,
    **config: Any,
) -> Any:
    """A `PeftModel` with LoRA on every linear layer of such a model, the same on every rank; no factor is zero. `experts`:
    whether fused experts are quantized, too, and adapted unless `lora` says what is."""
    loaded = quantized(family, dtype, seed, model, quantization, **config)
    if experts:
        lora = {"target_parameters": list(quantize_experts(loaded)), **(lora or {})}
    base = prepare_model_for_kbit_training(loaded, use_gradient_checkpointing=False)
    return adapted(base, seed, adapter_name, **(lora or {}))
