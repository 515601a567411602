"""Frozen bases in 8 bits: LLM.int8 of bitsandbytes, and int8 weights of torchao (`row_codes`); what these cost."""

from typing import TYPE_CHECKING, Any

from hf_hotspa.features.eight_bit.terms import TERMS
from hf_hotspa.seam import Described

if TYPE_CHECKING:
    import torch
    from torch import nn

terms = TERMS


def describe(model: "nn.Module", compute_dtype: "torch.dtype | None") -> Described:
    """The model's linear layers in 8 bits, by name. Products have the dtype of their input."""

    def packed() -> dict[str, Any]:
        from hf_hotspa.features.eight_bit.int8_weight_only import read_int8_weights
        from hf_hotspa.features.eight_bit.llm_int8 import read_llm_int8

        return {**read_llm_int8(model), **read_int8_weights(model)}

    return Described(packed)
