"""`open_qlora`: a quantized base below an adapter, too large for one process, whose weights are quantized while they are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.quantizers import AutoHfQuantizer

from hf_hotspa.costs.terms import packed_forms
from hf_hotspa.engine.loading import open_model
from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.features.four_bit.four_bit_experts import quantize_experts
from hf_hotspa.model.packed_layer import packed_layers

if TYPE_CHECKING:
    from peft import LoraConfig


def open_qlora(
    folder: str | Path, adapter: "LoraConfig", quantization: BitsAndBytesConfig, experts: bool = False
) -> Any:
    """Makes the `PeftModel` for a folder of plain weights (`hotspa_model_path`). Its base will be quantized, and has no
    weights yet.

    `get_peft_model(prepare_model_for_kbit_training(...))` draws the adapter's factors from torch's random state; set
    the same state on all ranks.

    Args:
        folder: With unquantized weights.
        adapter: A `LoraConfig`.
        quantization: With `load_in_4bit`, or for another form that bitsandbytes quantizes to.
        experts: Whether fused experts are quantized, too (`quantize_experts`).

    Raises:
        HotspaError: as of `open_model`; also for another quantization, and for an adapter that is made of weights.
    """
    from peft import get_peft_model, prepare_model_for_kbit_training

    _refuse_made_of_weights(adapter)
    model = open_model(Path(folder).expanduser())
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map=None)
    if not packed_layers(model):
        raise HotspaConfigError(
            f"{type(quantization).__name__} cannot quantize while weights are read",
            fix=f"use {' or '.join(forms.load for forms in packed_forms())}",
        )
    for bits in (4, 8):  # for PEFT and the Trainer
        setattr(model, f"is_loaded_in_{bits}bit", getattr(quantization, f"load_in_{bits}bit"))
    model.hf_quantizer = quantizer
    model.config.quantization_config = quantization
    if experts:
        quantize_experts(model, quantization)
    with _staying_on_cpu():
        return get_peft_model(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False), adapter)


_MADE_OF_WEIGHTS = ("use_dora", "modules_to_save", "trainable_token_indices")


def _refuse_made_of_weights(adapter: "LoraConfig") -> None:
    given = {option: value for option in _MADE_OF_WEIGHTS if (value := getattr(adapter, option))}
    if adapter.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        given["init_lora_weights"] = adapter.init_lora_weights
    for option, value in given.items():
        raise UnsupportedError(
            f"open_qlora with {option}={value!r}",
            why="PEFT makes it of the base's weights, which are read later, by slices",
            fix="load the base in every process (from_pretrained with the BitsAndBytesConfig), and use get_peft_model",
        )


@contextmanager
def _staying_on_cpu() -> Iterator[None]:
    kind: Any = nn.Module
    move = kind.to

    def to(module: nn.Module, *args: object, **kwargs: object) -> Any:
        if torch.device("meta") not in (*args, kwargs.get("device")):
            return move(module, *args, **kwargs)
        return move(module, dtype=kwargs["dtype"]) if "dtype" in kwargs else module

    kind.to = to
    try:
        yield
    finally:
        kind.to = move
