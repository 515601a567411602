"""Bases in 4 bits of bitsandbytes, below an adapter (QLoRA): their layers (`four_bit_linear`), and what these cost."""

from typing import TYPE_CHECKING, Any

from hf_hotspa.features.four_bit.terms import TERMS
from hf_hotspa.seam import Described

if TYPE_CHECKING:
    import torch
    from torch import nn

terms = TERMS


def describe(model: "nn.Module", compute_dtype: "torch.dtype | None") -> Described:
    """The model's linear layers in 4 bits, by name."""

    def packed() -> dict[str, Any]:
        from hf_hotspa.features.four_bit.four_bit_linear import read_four_bit

        return {**read_four_bit(model, compute_dtype)}

    return Described(packed)
