"""Models whose linear layers are put into 8 bits: of a probe, and the config for `from_pretrained`."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_hotspa.features.eight_bit.llm_int8 import LLMInt8


def config_of(of_bitsandbytes: bool) -> Any:
    """The `quantization_config` for 8 bits of bitsandbytes, or else of torchao."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if of_bitsandbytes:
        return BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def convert(model: PreTrainedModel, of_bitsandbytes: bool) -> None:
    """Converts the decoder's linear layers in place, as `from_pretrained` does."""
    head = model.get_output_embeddings()
    for name, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or linear is head:
            continue
        if of_bitsandbytes:
            _to_llm_int8(model, name, linear)
        else:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            with torch.no_grad():
                quantize_(linear, Int8WeightOnlyConfig(set_inductor_config=False))


def _to_llm_int8(model: PreTrainedModel, name: str, linear: nn.Linear) -> None:
    from bitsandbytes.nn.modules import Int8Params

    shape, threshold = (linear.out_features, linear.in_features), config_of(True).llm_int8_threshold
    packed = LLMInt8(shape, linear.bias is not None, threshold).fresh()
    packed.weight = Int8Params(linear.weight.detach().cpu(), requires_grad=False).to(linear.weight.device)
    packed.bias = linear.bias
    model.set_submodule(name, packed)
    model.is_loaded_in_8bit = True
