"""Linear layers and experts of a probe, put into 4 bits."""

import torch
from bitsandbytes.functional import QuantState, quantize_4bit
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from bitsandbytes.nn.parametrize import Bnb4bitParametrization
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import PreTrainedModel

from hf_hotspa.features.four_bit.four_bit_experts import plain_experts
from hf_hotspa.features.four_bit.kinds import WITH_EXPERTS


def convert(model: PreTrainedModel, kind: str, values: Tensor, blocksize: int) -> None:
    """Converts the decoder's linear layers in place, and its experts if `kind` says so. Weights repeat the values, so codes
    repeat, too."""
    quant_type = kind.removesuffix(WITH_EXPERTS)
    head, dtype = model.get_output_embeddings(), model.dtype
    narrow = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
    block = values.to(model.device, narrow)
    codes, scales = quantize_4bit(block, blocksize=blocksize, quant_type=quant_type)

    def repeated(shape: torch.Size) -> tuple[Tensor, QuantState]:
        numel = shape.numel()
        absmax = scales.absmax.repeat(-(-numel // len(block)))[: -(-numel // blocksize)]
        state = QuantState(absmax, shape, scales.code, blocksize, quant_type, narrow)
        return codes.reshape(-1).repeat(-(-numel // len(block)))[: -(-numel // 2), None], state

    for name, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or linear is head:
            continue
        rows, columns = linear.weight.shape
        data, state = repeated(linear.weight.shape)
        packed = Linear4bit(columns, rows, linear.bias is not None, narrow, quant_type=quant_type, device="meta")
        packed.weight = Params4bit(
            data, requires_grad=False, quant_state=state, blocksize=blocksize, quant_type=quant_type, module=packed,
            bnb_quantized=True,
        )  # fmt: skip
        packed.bias, packed.quant_state = linear.bias, state
        model.set_submodule(name, packed)
    for name in plain_experts(model) if kind.endswith(WITH_EXPERTS) else ():
        owner, _, leaf = name.rpartition(".")
        experts = model.get_submodule(owner)
        data, state = repeated(model.get_parameter(name).shape)
        setattr(experts, leaf, nn.Parameter(data, requires_grad=False))
        register_parametrization(experts, leaf, Bnb4bitParametrization(state), unsafe=True)
    model.is_loaded_in_4bit = True  # PEFT reads it
