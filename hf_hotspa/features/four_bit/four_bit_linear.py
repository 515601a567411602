"""Frozen linear layers in 4 bits (QLoRA, Dettmers et al., 2023): what bitsandbytes keeps of them, and products with it.

A replica has PEFT's and bitsandbytes' modules, but the product is made here, with the library's operations: `bnb.matmul_4bit`
forward, `dequantize_4bit` and a product backward. `Linear4bit.forward` is not called: on some CPUs it repacks the weights in
place in evaluation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.errors import ModelError
from hf_hotspa.features.four_bit.four_bit_weight import NARROW, SCALES, FourBitWeight
from hf_hotspa.model.packed_layer import LinearProduct, library_layers


@dataclass(frozen=True)
class FourBit(FourBitWeight):
    """A linear layer in 4 bits as plain data: a `model.packed_layer.PackedLayer`. `options`: further arguments of its
    class."""

    options: Mapping[str, Any]

    leaf: ClassVar[str] = "weight"
    skip: ClassVar[str] = "BitsAndBytesConfig(llm_int8_skip_modules=[{name!r}, ...])"

    @staticmethod
    def state_of(module: Any, name: str) -> Any:
        state = getattr(module.weight, "quant_state", None) or module.quant_state
        if state is None or len(state.shape) != 2 or tuple(state.shape) != (module.out_features, module.in_features):
            raise ModelError(
                f"the weight of {name!r} is not quantized, although it is a {type(module).__name__}",
                fix="load the model with from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
            )
        if getattr(state, "packing_format_for_cpu", False):
            raise ModelError(
                f"the weight of {name!r} was repacked by a forward in evaluation",
                why="bitsandbytes does so on CPUs with AVX512-BF16, and rounds the scales to bf16",
                fix="load the model again, and train it before it is evaluated or generates",
            )
        return state

    def plain_weight(self, name: str) -> str:
        return f"{name.rpartition('.')[0]}.weight"

    def put(self, model: nn.Module, name: str) -> None:
        from bitsandbytes.nn.modules import Linear4bit

        rows, columns = self.shape
        module = Linear4bit(columns, rows, **self.options, device="meta")
        module.support_avx512bf16_for_cpu = False
        module.requires_grad_(False)
        self.put_scales(module)
        model.set_submodule(name, module)
        model.is_loaded_in_4bit = True  # PEFT asks

    def product(self, module: nn.Module) -> "FourBitProduct":
        rows, columns = self.shape
        return FourBitProduct(module, self, (rows, columns))

    def adapter_class(self) -> type[nn.Module]:
        from peft.tuners.lora import Linear4bit

        kind: type[nn.Module] = Linear4bit
        return kind


# -- the user's model -------------------------------------------------------------------------------------------------


def read_four_bit(model: nn.Module, compute_dtype: torch.dtype | None) -> dict[str, FourBit]:
    """The hook `describe`: see `model.packed_layer.packed_layers`. Raises `ModelError`: a layer was not quantized, or a
    forward in evaluation has repacked its weights."""
    narrow = compute_dtype in (torch.bfloat16, torch.float16)
    packed = {}
    for name, module in library_layers(model, "bitsandbytes.nn", "Linear4bit"):
        if hasattr(module, SCALES):  # of a replica
            continue
        module.support_avx512bf16_for_cpu = False
        weight = module.weight
        # weights that are read by slices (`engine.loading`) are quantized later
        state = FourBit.state_of(module, name) if not weight.is_meta else weight
        packed[name] = FourBit(
            shape=(module.out_features, module.in_features),
            block=state.blocksize,
            quant_type=state.quant_type,
            dtype=model.config.dtype if weight.is_meta else state.dtype,
            compute_dtype=compute_dtype if narrow else module.compute_dtype,
            nested=weight.compress_statistics,
            options={
                "bias": module.bias is not None,
                "compute_dtype": module.compute_dtype,
                "compress_statistics": weight.compress_statistics,
                "quant_type": state.quant_type,
                "quant_storage": weight.quant_storage,
            },
        )
    return packed


# -- products ---------------------------------------------------------------------------------------------------------


class FourBitProduct(LinearProduct):
    """The product with codes (uint8, of any shape in row-major order, the layer's `weight`), and scales (its `absmax`)."""

    layer: FourBit

    def dtype_of(self, x: Tensor) -> torch.dtype:
        dtype = super().dtype_of(x)
        return dtype if dtype in NARROW else torch.float32

    def of(self, x: Tensor) -> Tensor:
        if self.slices is not None or not min(self.shape):
            return functional.linear(x, self.weight(x.dtype))
        from bitsandbytes.autograd._functions import matmul_4bit

        codes, state = self._packed(self.layer.dtype)
        out: Tensor = matmul_4bit(x, codes, quant_state=state)
        return out

    def back(self, grad: Tensor) -> Tensor:
        return torch.matmul(grad, self.weight().to(grad.dtype))

    def weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in], dequantized to `dtype`, or to the weights' original dtype."""
        from bitsandbytes.functional import dequantize_4bit

        dtype = dtype or self.layer.dtype
        if not min(self.shape):
            return torch.empty(self.shape, dtype=dtype, device=self.linear.weight.device)
        codes, state = self._packed(dtype)
        whole: Tensor = dequantize_4bit(codes, state)
        if self.slices is None:
            return whole
        dim, rows = self.slices
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in rows], dim)

    def _packed(self, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """The codes [n, 1] and the library's state; copies if a shard of columns lies column by column."""
        layer, linear = self.layer, self.linear
        state = layer.state(linear.absmax.detach(), self.shape if self.slices is None else layer.shape, dtype)
        return linear.weight.detach().contiguous().view(-1, 1), state
