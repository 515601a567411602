"""Tiny LoRA models: PEFT's own wrapper around the tiny models of `tests.families`."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.families import FAMILIES as DENSE
from tests.families import MIXTURE, tiny_model
from tests.oracle import relative_error
from tests.tiny_families import tiny_model_of

KNOWN = (*DENSE, MIXTURE)
FAMILIES = ("llama_gqa_bias", "qwen3_qk_norm_tied", "phi3_fused")
"""Fewer key/value heads than tp and biases; q/k norms and tied embeddings; fused projections."""

BESIDE = ("lora_embedding", "magnitude", "modules_to_save", "tokens_delta")
"""Parts of the names of what an adapter trains beside its factors."""


def tiny_lora(
    family: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    model: dict[str, Any] | None = None,
    adapter_name: str = "default",
    **config: Any,
) -> Any:
    """A `PeftModel` with LoRA on every linear layer, the same on every rank; no factor of the adapter is zero.

    Args:
        family: As for `tiny_model`, or else for `tiny_model_of`.
        dtype: Of the base model.
        seed: Of base and adapter.
        model: Changes of the base model's config.
        config: Changes of the `LoraConfig`.
    """
    base = tiny_model(family, dtype, seed, **(model or {})) if family in KNOWN else tiny_model_of(family, dtype, seed)
    return adapted(base, seed, adapter_name, **config)


def adapted(base: Any, seed: int, adapter_name: str, **config: Any) -> Any:
    """Such an adapter on a model; `config`: changes of the `LoraConfig`."""
    torch.manual_seed(seed)
    options = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    model = get_peft_model(base, LoraConfig(**options), adapter_name)
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
            elif any(kind in name for kind in BESIDE):  # else they would equal what they replace, or scale it by 1
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model.train()


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative error of all weights together."""
    assert found.keys() == expected.keys()
    return relative_error(*(torch.cat([side[name].flatten() for name in expected]) for side in (found, expected)))


def check_saved(folder: str | Path, base: Any, expected: dict[str, torch.Tensor], name: str = "default") -> None:
    """PEFT loads a saved adapter, bit for bit."""
    found = trained(PeftModel.from_pretrained(base, folder, name, is_trainable=True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], tensor) for n, tensor in expected.items()), folder


def trained(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the trained parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
