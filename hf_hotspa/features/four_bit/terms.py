"""4-bit bases in a plan.

A code is half a byte per weight, and each block of 64 weights of a row has an fp32 scale (`four_bit_linear`); quantized
scales are held as fp32.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_hotspa.costs.model_config import Linear
from hf_hotspa.costs.packed_linears import PackedLinears
from hf_hotspa.costs.terms import PackedForms, Terms
from hf_hotspa.features.four_bit.kinds import BLOCK, KINDS, WEIGHT_BYTES, WITH_EXPERTS

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


def four_bits(kind: str, linears: Mapping[str, Linear], experts: Mapping[str, Linear]) -> PackedLinears:
    """The frozen 4-bit linear layers of every decoder layer, by name; `kind` is one of `KINDS`."""
    more = {f"experts.{name}": one for name, one in experts.items()} if kind.endswith(WITH_EXPERTS) else {}
    return PackedLinears(kind, {**linears, **more}, WEIGHT_BYTES, BLOCK)


def _convert(model: "PreTrainedModel", kind: str, values: "Tensor") -> None:
    from hf_hotspa.features.four_bit.conversion import convert

    convert(model, kind, values, BLOCK)


def _config(kind: str, double: bool) -> Any:
    from transformers import BitsAndBytesConfig

    quant_type = kind.removesuffix(WITH_EXPERTS)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=double)


def _complete(model: "PreTrainedModel", kind: str, double: bool) -> None:
    if kind.endswith(WITH_EXPERTS):
        from hf_hotspa.features.four_bit.four_bit_experts import quantize_experts

        quantize_experts(model, _config(kind, double))


def _plain(model: "nn.Module") -> None:
    from hf_hotspa.features.four_bit.four_bit_experts import dequantize_experts

    dequantize_experts(model)


TERMS = Terms(
    packed=PackedForms(
        KINDS,
        four_bits,
        "4 bits of bitsandbytes (QLoRA)",
        "BitsAndBytesConfig(load_in_4bit=True)",
        _convert,
        _config,
        _complete,
        _plain,
    ),
)
