"""torchao's int8 weights (`Int8WeightOnlyConfig`, by rows): what such a linear layer has, and products with it.

The library multiplies by the codes in the dtype of x, then by the scales. So does this product, forward and backward, but it
keeps no codes in that dtype for the backward pass.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hf_hotspa.features.eight_bit.row_codes import SCALES, RowCodes
from hf_hotspa.model.packed_layer import LinearProduct

if TYPE_CHECKING:
    from torchao.quantization import Int8Tensor


class CodesProduct(LinearProduct):
    """Scales are multiplied in after the codes, as in the library."""

    def of(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self._codes(x.dtype).t()) * self._scales(x.dtype)

    def back(self, grad: Tensor) -> Tensor:
        return torch.matmul(grad * self._scales(grad.dtype), self._codes(grad.dtype))

    def weight(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or torch.float32
        return self._codes(dtype) * self._scales(dtype).unsqueeze(1)

    def _codes(self, dtype: torch.dtype) -> Tensor:
        return self.linear.weight.detach().to(dtype)

    def _scales(self, dtype: torch.dtype) -> Tensor:
        scales: Tensor = getattr(self.linear, SCALES).detach().to(dtype)
        return scales


@dataclass(frozen=True)
class Int8Weights(RowCodes):
    """Of torchao."""

    kind: ClassVar[str] = "int8_weight_only"
    skip: ClassVar[str] = "TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=[{name!r}, ...])"
    product_class: ClassVar[type[LinearProduct]] = CodesProduct
    tuner: ClassVar[tuple[str, str]] = "torchao", "TorchaoLoraLinear"

    @staticmethod
    def tensors(module: Any) -> tuple[Tensor, Tensor]:
        return module.weight.qdata, module.weight.scale

    def fresh(self) -> nn.Module:
        rows, columns = self.shape
        return nn.Linear(columns, rows, self.bias, device="meta")


def read_int8_weights(model: nn.Module) -> dict[str, Int8Weights]:
    """The layers of the user's model by name; others of torchao are left out, and so not accepted."""
    kind = getattr(sys.modules.get("torchao.quantization"), "Int8Tensor", None)
    if kind is None:
        return {}
    return {
        name: Int8Weights((module.out_features, module.in_features), module.bias is not None)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and type(module.weight) is kind and _is_by_rows(module.weight)
    }


def _is_by_rows(weight: "Int8Tensor") -> bool:
    """Whether weights alone are quantized, symmetrically, with a scale for each row."""
    rows, columns = weight.shape
    asymmetric = weight.zero_point is not None and bool(weight.zero_point.any())
    return (
        tuple(weight.scale.shape) == (rows, 1)
        and list(weight.block_size) == [1, columns]
        and weight.scale.dtype == torch.float32
        and weight.act_quant_kwargs is None
        and weight.act_pre_scale is None
        and not asymmetric
    )
