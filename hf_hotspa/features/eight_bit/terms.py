"""8-bit bases in a plan: a code is a byte per weight, and each row of a weight has an fp32 scale (`row_codes`)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_hotspa.costs.model_config import Linear
from hf_hotspa.costs.packed_linears import PackedLinears
from hf_hotspa.costs.terms import PackedForms, Terms
from hf_hotspa.errors import HotspaConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

LLM_INT8, WEIGHT_ONLY = "int8", "int8_weight_only"


def eight_bits(kind: str, linears: Mapping[str, Linear], experts: Mapping[str, Linear]) -> PackedLinears:
    """The frozen 8-bit linear layers of every decoder layer, by name; `kind` is `LLM_INT8` or `WEIGHT_ONLY`. Experts
    are not."""
    weights = sum(linear.inputs * linear.outputs for linear in linears.values())
    scales = sum(linear.outputs for linear in linears.values())
    return PackedLinears(kind, linears, 1 + 4 * scales / weights if weights else 1.0)


def _convert(model: "PreTrainedModel", kind: str, values: "Tensor") -> None:
    from hf_hotspa.features.eight_bit.probe_layers import convert

    convert(model, kind == LLM_INT8)


def _config(kind: str, double: bool) -> Any:
    if double:
        raise HotspaConfigError(
            f"--double-quantization with --quantization {kind}",
            why="its scales are not quantized",
            fix="leave it out",
        )
    from hf_hotspa.features.eight_bit.probe_layers import config_of

    return config_of(kind == LLM_INT8)


TERMS = Terms(
    packed=PackedForms(
        (LLM_INT8, WEIGHT_ONLY),
        eight_bits,
        "8 bits of bitsandbytes (LLM.int8) and of torchao",
        "BitsAndBytesConfig(load_in_8bit=True)",
        _convert,
        _config,
    ),
)
