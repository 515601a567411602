"""Linear layers of a probe, put into 4 bits."""

import torch
from bitsandbytes.functional import QuantState, quantize_4bit
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from torch import Tensor, nn
from transformers import PreTrainedModel


def convert(model: PreTrainedModel, kind: str, values: Tensor, blocksize: int) -> None:
    """Converts the decoder's linear layers in place. Weights repeat the values, so codes repeat, too."""
    head, dtype = model.get_output_embeddings(), model.dtype
    narrow = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
    block = values.to(model.device, narrow)
    codes, scales = quantize_4bit(block, blocksize=blocksize, quant_type=kind)
    for name, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or linear is head:
            continue
        rows, columns = linear.weight.shape
        numel = rows * columns
        state = QuantState(
            scales.absmax.repeat(-(-numel // len(block)))[: -(-numel // blocksize)],
            shape=linear.weight.shape, code=scales.code, blocksize=blocksize, quant_type=kind, dtype=narrow,
        )  # fmt: skip
        packed = Linear4bit(columns, rows, linear.bias is not None, narrow, quant_type=kind, device="meta")
        data = codes.reshape(-1).repeat(-(-numel // len(block)))[: -(-numel // 2), None]
        packed.weight = Params4bit(
            data, requires_grad=False, quant_state=state, blocksize=blocksize, quant_type=kind, module=packed,
            bnb_quantized=True,
        )  # fmt: skip
        packed.bias, packed.quant_state = linear.bias, state
        model.set_submodule(name, packed)
    model.is_loaded_in_4bit = True  # PEFT reads it
