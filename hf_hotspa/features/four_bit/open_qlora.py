"""`open_qlora`: a base in 4 bits below an adapter, too large for one process, whose weights are quantized while they are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.quantizers import AutoHfQuantizer

from hf_hotspa.engine.loading import open_model
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.features.four_bit.four_bit_experts import quantize_experts

if TYPE_CHECKING:
    from peft import LoraConfig


def open_qlora(
    folder: str | Path, adapter: "LoraConfig", quantization: BitsAndBytesConfig, experts: bool = False
) -> Any:
    """Makes the `PeftModel` for a folder of plain weights (`hotspa_model_path`). Its base will be in 4 bits and has no
    weights yet.

    `get_peft_model(prepare_model_for_kbit_training(...))` draws the adapter's factors from torch's random state; set
    the same state on all ranks.

    Args:
        folder: With unquantized weights.
        adapter: A `LoraConfig`.
        quantization: With `load_in_4bit`.
        experts: Whether fused experts are quantized, too (`quantize_experts`).

    Raises:
        HotspaError: as of `open_model`; also for another quantization.
    """
    from peft import get_peft_model, prepare_model_for_kbit_training

    if not quantization.load_in_4bit:
        raise HotspaConfigError(
            "only the 4-bit quantization of bitsandbytes can run while weights are read",
            fix="use BitsAndBytesConfig(load_in_4bit=True)",
        )
    model = open_model(Path(folder).expanduser())
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map=None)
    model.is_loaded_in_4bit, model.hf_quantizer = True, quantizer  # for PEFT and the Trainer
    model.config.quantization_config = quantization
    if experts:
        quantize_experts(model, quantization)
    with _staying_on_cpu():
        return get_peft_model(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False), adapter)


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
