"""Bases in 4 bits of bitsandbytes, below an adapter (QLoRA): linear layers, experts, and what these cost."""

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from hf_hotspa.features.four_bit.terms import TERMS
from hf_hotspa.seam import Described

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.model.replica import Replica
    from hf_hotspa.model.specs import ModelDescription

logger = logging.getLogger(__name__)

terms = TERMS


def describe(model: "nn.Module", compute_dtype: "torch.dtype | None") -> Described:
    """The model's linear layers and experts in 4 bits, by name."""

    def packed() -> dict[str, Any]:
        from hf_hotspa.features.four_bit.four_bit_experts import read_experts
        from hf_hotspa.features.four_bit.four_bit_linear import read_four_bit

        return {**read_four_bit(model, compute_dtype), **read_experts(model, compute_dtype)}

    return Described(packed)


def attach(replica: "Replica", description: "ModelDescription", options: "EngineOptions") -> tuple[()]:
    """Attaches nothing; warns once, on rank 0, if the experts of a quantized base are not quantized."""
    from hf_hotspa.features.four_bit.four_bit_experts import left_out

    if replica.mesh.rank == 0 and (text := left_out(description)):
        _warn(text)
    return ()


@cache
def _warn(text: str) -> None:
    logger.warning("%s", text)
