"""Frozen weights in 4 bits (QLoRA, Dettmers et al., 2023): what bitsandbytes keeps of a linear layer, and products with it.

A `Linear4bit` has codes, two weights in a byte, and a scale for each block of consecutive weights in row-major order. Both are
tensors of the parameter vector (`layout.vector.Packed`), cut at block borders and moved unchanged; nested scales are
multiplied out to fp32 once. A replica has PEFT's and bitsandbytes' modules, but the product is made here, with the library's
operations: `bnb.matmul_4bit` forward, `dequantize_4bit` and a product backward. `Linear4bit.forward` is not called: on some CPUs
it repacks the weights in place in evaluation. bitsandbytes is imported only when a model uses it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.errors import ModelError
from hf_hotspa.layout.vector import Packed, ParameterSpec
from hf_hotspa.model.packed_product import LinearProduct, library_layers
from hf_hotspa.model.replica import to_storage

SCALES = "absmax"
"""The name of the scales in a replica's `Linear4bit`, and in the parameter vector."""
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FourBit:
    """A linear layer in 4 bits as plain data: a `model.packed_layer.PackedLayer`.

    Args:
        shape: Shape of its weight, [out, in].
        block: Weights that share a scale.
        kind: `nf4` or `fp4`.
        dtype: The dtype of the weights before quantization; a backward pass dequantizes to it.
        options: Further arguments of its class.
    """

    shape: tuple[int, int]
    block: int
    kind: str
    dtype: torch.dtype
    compute_dtype: torch.dtype | None
    options: Mapping[str, Any]

    form: ClassVar[str] = "4 bits"
    skip: ClassVar[str] = "BitsAndBytesConfig(llm_int8_skip_modules=[{name!r}, ...])"

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    # -- the parameter vector

    def specs(self, spec: ParameterSpec) -> tuple[ParameterSpec, ParameterSpec]:
        """Codes, and scales."""
        (rows, columns), block, numel = self.shape, self.block, self.numel
        # where blocks cross rows, CPU kernels of bitsandbytes 0.50 use different scales in a part than in the whole matrix;
        # training uses the whole one
        step = 0 if spec.shard_dim is None or columns % block or block % 2 else (1, block)[spec.shard_dim]
        packed = Packed(self.shape, step, numel)
        blocks: tuple[int, ...] = (rows, columns // block) if step else (-(-numel // block),)
        codes: tuple[int, ...] = (*blocks, block // 2) if step else (-(-numel // 2),)
        common = replace(spec, frozen_dtype=None, trainable=False, partial_gradient=False)
        return (
            replace(common, shape=codes, dtype="uint8", packed=packed),
            replace(
                common,
                name=f"{spec.name.removesuffix('weight')}{SCALES}",
                shape=blocks,
                dtype="float32",
                packed=replace(packed, weights=0),
            ),
        )

    # -- the user's module

    def stored(self, module: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
        """Codes as uint8, scales as fp32."""
        if module.weight.is_meta:
            yield "weight", torch.empty(-(-self.numel // 2), dtype=torch.uint8, device="meta")
            yield SCALES, torch.empty(-(-self.numel // self.block), device="meta")
        else:
            yield "weight", plain_codes(module.weight)
            yield SCALES, scales_of(_state(module, name))

    def write(self, module: nn.Module, leaf: str, values: Tensor) -> None:
        """Scales are then not nested."""
        if leaf == "weight":
            plain_codes(module.weight).copy_(values.reshape(-1))
        else:
            state = _state(module, "weight")
            state.absmax = values.reshape(-1).to(module.weight.device, copy=True)
            state.nested, state.state2, state.offset = False, None, None

    # -- replicas

    def put(self, model: nn.Module, name: str) -> None:
        """Puts the layer into a fresh model, on the meta device."""
        from bitsandbytes.nn.modules import Linear4bit

        rows, columns = self.shape
        module = Linear4bit(columns, rows, **self.options, device="meta")
        module.support_avx512bf16_for_cpu = False
        module.requires_grad_(False)
        scales = torch.empty(-(-self.numel // self.block), device="meta")
        module.register_parameter(SCALES, nn.Parameter(scales, requires_grad=False))
        model.set_submodule(name, module)
        model.is_loaded_in_4bit = True  # PEFT asks

    def product(self, module: nn.Module) -> "FourBitProduct":
        """Makes the product of a replica's module its forward."""
        return FourBitProduct(module, self, self.shape)

    def adapter_class(self) -> type[nn.Module]:
        from peft.tuners.lora import Linear4bit

        kind: type[nn.Module] = Linear4bit
        return kind

    # -- weights in files

    def packed(
        self, spec: ParameterSpec, start: int, stop: int, read: Callable[[ParameterSpec, int, int], Tensor]
    ) -> Tensor:
        """Elements of codes or scales, the same as of the whole weight: blocks are quantized one by one. Quantized scales
        depend on all scales of a weight, so that some of them take all of it."""
        from bitsandbytes.functional import quantize_4bit

        assert spec.packed is not None
        (rows, columns), block, dim = self.shape, self.block, spec.storage_dim
        are_scales = not spec.packed.weights
        nested = are_scales and self.options["compress_statistics"]
        name = f"{spec.name.rpartition('.')[0]}.weight"
        by_columns = replace(spec, name=name, shape=self.shape, packed=None, shard_dim=1)
        by_rows = replace(by_columns, shard_dim=None)
        # stored elements per row, per column of blocks, or per block
        each = spec.row_size if dim is not None else 1 if are_scales else block // 2
        first, last = (0, spec.numel) if nested else (start // each, -(-stop // each))
        if nested:
            weights = read(by_rows, 0, self.numel)
        elif dim == 1:
            weights = read(by_columns, first * block * rows, last * block * rows).view(-1, rows).t()
        else:
            of_one = columns if dim == 0 else block
            weights = read(by_rows, first * of_one, min(last * of_one, self.numel))
        codes, state = quantize_4bit(
            weights.to(self.dtype).contiguous(), blocksize=block, compress_statistics=nested, quant_type=self.kind
        )
        made = scales_of(state) if are_scales else codes.reshape(-1)
        if dim is not None:
            per_row = rows if nested or dim == 1 else last - first
            made = to_storage(made.view(per_row, -1, *spec.shape[2:]), dim)
        begin = 0 if nested else first * each
        return made[start - begin : stop - begin]


# -- the user's model -------------------------------------------------------------------------------------------------


def read_four_bit(model: nn.Module, compute_dtype: torch.dtype | None) -> dict[str, FourBit]:
    """The hook `describe`: see `model.packed_layer.packed_layers`.

    Raises:
        ModelError: a layer was not quantized, or a forward in evaluation has repacked its weights.
    """
    narrow = compute_dtype in (torch.bfloat16, torch.float16)
    packed = {}
    for name, module in library_layers(model, "bitsandbytes.nn", "Linear4bit"):
        if hasattr(module, SCALES):  # of a replica
            continue
        module.support_avx512bf16_for_cpu = False
        weight = module.weight
        # weights that are read by slices (`engine.loading`) are quantized later
        state = _state(module, name) if not weight.is_meta else weight
        packed[name] = FourBit(
            shape=(module.out_features, module.in_features),
            block=state.blocksize,
            kind=state.quant_type,
            dtype=_dtype_of(model) if weight.is_meta else state.dtype,
            compute_dtype=compute_dtype if narrow else module.compute_dtype,
            options={
                "bias": module.bias is not None,
                "compute_dtype": module.compute_dtype,
                "compress_statistics": weight.compress_statistics,
                "quant_type": state.quant_type,
                "quant_storage": weight.quant_storage,
            },
        )
    return packed


def _dtype_of(model: nn.Module) -> torch.dtype:
    config: Any = model.config
    dtype: torch.dtype | str = config.dtype
    known: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return known


def _state(module: nn.Module, name: str) -> Any:
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


def plain_codes(parameter: Tensor) -> Tensor:
    """A view of a weight's codes as uint8, 1-D, whatever dtype stores them (`bnb_4bit_quant_storage`)."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach().as_subclass(Tensor).reshape(-1).view(torch.uint8)


def scales_of(state: Any) -> Tensor:
    """A weight's scales as fp32, 1-D, multiplied out if they are quantized themselves."""
    if not state.nested:
        return state.absmax.reshape(-1).float()
    from bitsandbytes.functional import dequantize_blockwise

    return (dequantize_blockwise(state.absmax, state.state2) + state.offset).reshape(-1).float()


# -- products ---------------------------------------------------------------------------------------------------------


class FourBitProduct(LinearProduct):
    """The product with codes (uint8, of any shape in row-major order, the layer's `weight`), and scales (its `absmax`)."""

    layer: FourBit

    def dtype_of(self, x: Tensor) -> torch.dtype:
        dtype = super().dtype_of(x)
        return dtype if dtype in _NARROW else torch.float32

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
        from bitsandbytes.functional import QuantState

        layer, linear = self.layer, self.linear
        shape = torch.Size(self.shape if self.slices is None else layer.shape)
        scales = linear.absmax.detach().contiguous().view(-1)
        state = QuantState(scales, shape=shape, blocksize=layer.block, quant_type=layer.kind, dtype=dtype)
        return linear.weight.detach().contiguous().view(-1, 1), state
