"""LLM.int8 of bitsandbytes (`load_in_8bit`, Dettmers et al., 2022): what a `Linear8bitLt` has, and products with it.

The library computes in two ways, and this product takes the one that the library would take:

* in training on a CPU, `x (s c)^T` in the dtype of x, with dequantized weights;
* in evaluation and on GPUs, the same in int8: each token's activations are rounded to 127ths of their largest value.
  Columns of activations in which some token reaches the threshold are left in their dtype. These columns are chosen over all
  tokens of a product: of a pack, or a chunk of it. So they may be others than in a padded batch of the stock Trainer.

The gradient of x is the product with dequantized weights in both. Under a cut of rows each rank has whole activations. Under a
cut of columns ranks exchange the largest value of each token, so that all round as the whole row is rounded; outliers are of
single columns.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.features.eight_bit.row_codes import SCALES, RowCodes
from hf_hotspa.model.packed_layer import LinearProduct, library_layers
from hf_hotspa.parallel.collectives import CLOCK

_EACH = 1.0 / 127.0
_DEQUANTIZING = ("cpu", "xpu")  # devices on which the library trains with dequantized weights


class Int8Product(LinearProduct):
    layer: "LLMInt8"

    def of(self, x: Tensor) -> Tensor:
        if not min(self.shape) or not x.numel() or (self.linear.training and x.device.type in _DEQUANTIZING):
            return functional.linear(x, self.weight(x.dtype))
        return self._in_int8(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def back(self, grad: Tensor) -> Tensor:
        return torch.matmul(grad, self.weight(grad.dtype))

    def weight(self, dtype: torch.dtype | None = None) -> Tensor:
        codes, scales = self.linear.weight.detach(), getattr(self.linear, SCALES).detach()
        return codes.to(dtype or scales.dtype, copy=True).mul_(scales.unsqueeze(1).mul(_EACH))

    def _in_int8(self, x: Tensor) -> Tensor:
        """[T, out] for x [T, in]."""
        from bitsandbytes.functional import int8_vectorwise_quant

        threshold, ops = self.layer.threshold, torch.ops.bitsandbytes
        half = x.to(torch.float16)
        rounded, largest, outliers = int8_vectorwise_quant(half, threshold=threshold)
        if self.sharers is not None:
            with CLOCK.waiting:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.sharers)
            kept = half if outliers is None else half.index_fill(1, outliers, 0)
            rounded = torch.round(kept * (127.0 / largest.unsqueeze(-1))).to(torch.int8)
        codes, scales = self.linear.weight.detach().contiguous(), getattr(self.linear, SCALES).detach()
        if threshold > 0:
            out: Tensor = ops.int8_mixed_scaled_mm(x, rounded, codes, largest, scales, outliers, None)[0]
            return out
        return ops.int8_scaled_mm.default(rounded, codes, largest, scales, bias=None, dtype=x.dtype)


@dataclass(frozen=True)
class LLMInt8(RowCodes):
    """Of bitsandbytes. `threshold`: from which on an activation is an outlier; 0 for none."""

    threshold: float

    kind: ClassVar[str] = "int8"
    skip: ClassVar[str] = "BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=[{name!r}, ...])"
    product_class: ClassVar[type[LinearProduct]] = Int8Product
    tuner: ClassVar[tuple[str, str]] = "bnb", "Linear8bitLt"

    @staticmethod
    def tensors(module: Any) -> tuple[Tensor, Tensor]:
        """The scales move from the weight to the layer's state in the first forward."""
        scales = module.weight.SCB if module.state.SCB is None else module.state.SCB
        if scales is None:  # read by slices, and not quantized yet
            return torch.empty_like(module.weight, dtype=torch.int8), torch.empty(len(module.weight), device="meta")
        return module.weight.data, scales

    def fresh(self) -> nn.Module:
        from bitsandbytes.nn.modules import Linear8bitLt

        rows, columns = self.shape
        return Linear8bitLt(columns, rows, self.bias, has_fp16_weights=False, threshold=self.threshold, device="meta")

    def put(self, model: nn.Module, name: str) -> None:
        super().put(model, name)
        model.is_loaded_in_8bit = True

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        from bitsandbytes.functional import int8_vectorwise_quant

        codes, scales, _ = int8_vectorwise_quant(weight.to(torch.float16))
        return codes, scales


def read_llm_int8(model: nn.Module) -> dict[str, LLMInt8]:
    """The layers of the user's model by name. Raises `ModelError`: one was not quantized. Raises `UnsupportedError`: its
    weights are in 16 bits, and quantized in every forward."""
    packed = {}
    for name, module in library_layers(model, "bitsandbytes.nn", "Linear8bitLt"):
        if hasattr(module, SCALES):  # of a replica
            continue
        if module.state.has_fp16_weights:
            raise UnsupportedError(
                f"the weight of {name!r} is in 16 bits, and quantized in every forward",
                why="its master weights would be neither codes nor the weights that are computed with",
                fix="load the model with BitsAndBytesConfig(load_in_8bit=True), without llm_int8_has_fp16_weight",
            )
        if module.weight.dtype != torch.int8 and not module.weight.is_meta:
            raise ModelError(
                f"the weight of {name!r} is not quantized, although it is a {type(module).__name__}",
                fix="load the model with from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_8bit=True))",
            )
        packed[name] = LLMInt8(
            (module.out_features, module.in_features), module.bias is not None, module.state.threshold
        )
    return packed
