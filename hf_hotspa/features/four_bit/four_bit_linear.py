"""Frozen weights in 4 bits (QLoRA, Dettmers et al., 2023): what bitsandbytes keeps of a linear layer, and products with it.

A `Linear4bit` has codes, two weights in a byte, and a scale for each block of consecutive weights in row-major order. Both are
tensors of the parameter vector (`layout.vector.Packed`), cut at block borders and moved unchanged; nested scales are
multiplied out to fp32 once. A replica has PEFT's and bitsandbytes' modules, but the product is made here, with the library's
operations: `bnb.matmul_4bit` forward, `dequantize_4bit` and a product backward. `Linear4bit.forward` is not called: on some CPUs
it repacks the weights in place in evaluation. bitsandbytes is imported only when a model uses it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.layout.vector import Packed, ParameterSpec

SCALES = "absmax"
"""The name of the scales in a replica's `Linear4bit`, and in the parameter vector."""
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_DEQUANTIZE = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}


@dataclass(frozen=True)
class FourBit:
    """A linear layer in 4 bits as plain data.

    Args:
        shape: Shape of its weight, [out, in].
        block: Weights that share a scale.
        quant_type: `nf4` or `fp4`.
        dtype: The dtype of the weights before quantization; a backward pass dequantizes to it.
        compute_dtype: The dtype of products; None for the dtype of their input.
        options: Further arguments of its class.
    """

    shape: tuple[int, int]
    block: int
    quant_type: str
    dtype: torch.dtype
    compute_dtype: torch.dtype | None
    options: Mapping[str, Any]


# -- the user's model -------------------------------------------------------------------------------------------------


def _refuse_quantized_modules(model: nn.Module) -> None:
    """Rejects modules that were quantized after the model had been loaded."""
    for name, module in model.named_modules():
        kinds = {type(p) for p in module.parameters(recurse=False) if not issubclass(type(p), nn.Parameter)}
        if kinds or "quantized" in type(module).__module__.split("."):
            raise UnsupportedError(
                f"the weights of module {name!r} are quantized ({', '.join(k.__name__ for k in (*kinds, type(module)))})",
                why="packed integers and their scales cannot be cut into shards and moved between layouts like weights",
                fix="train the model before it is quantized",
            )


def refuse_quantized(model: nn.Module, adapted: bool) -> None:
    """Raises an error for weights that are not plain floating-point numbers, except 4-bit bitsandbytes below an adapter.

    Args:
        model: The model without an adapter's wrapper.
        adapted: Whether it has one.

    Raises:
        UnsupportedError: naming the method.
    """
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is None and not getattr(model, "is_quantized", False):
        _refuse_quantized_modules(model)
        return

    def value(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    method = str(getattr(value("quant_method"), "value", value("quant_method")) or "an unknown method")
    in_4_bits = method == "bitsandbytes" and value("load_in_4bit")
    method += ", 8 bits" if method == "bitsandbytes" and value("load_in_8bit") else ""
    if in_4_bits and adapted:
        return
    if value("dequantize") and not any(p.dtype.itemsize == 1 for p in model.parameters()):
        return  # only the files were quantized
    why = "packed integers and their scales cannot be cut into shards and moved between layouts like weights"
    fix = (
        "load the model without quantization_config, for instance with dtype=torch.bfloat16: frozen weights are kept once, in "
        "that dtype; or in 4 bits of bitsandbytes (load_in_4bit=True), below a LoRA adapter"
    )
    if in_4_bits:
        method, why = "bitsandbytes, 4 bits", "codes of 4 bits have no gradient, and nothing else would be trained"
        fix = "put a LoRA adapter on it: get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(...))"
    elif method in _DEQUANTIZE:
        fix = f"load it with quantization_config={_DEQUANTIZE[method]}(dequantize=True): its weights are bf16 then"
    raise UnsupportedError(f"the weights are quantized ({method})", why=why, fix=fix)


def is_four_bit(module: Any) -> bool:
    """Whether a module is a 4-bit linear layer of bitsandbytes with the library's forward."""
    bnb: Any = sys.modules.get("bitsandbytes")  # an object of a package that was never imported does not exist
    if bnb is None or not isinstance(module, bnb.nn.Linear4bit):
        return False
    own: Any = type(module).forward
    return own is bnb.nn.Linear4bit.forward


def read_four_bit(model: nn.Module, compute_dtype: torch.dtype | None = None) -> dict[str, FourBit]:
    """The 4-bit linear layers of a model, by name.

    Args:
        model: The user's model. From now on its evaluations leave its weights unchanged.
        compute_dtype: The dtype of a run in 16 bits, which its products then have, too, as under autocast.

    Raises:
        ModelError: a layer was not quantized, or a forward in evaluation has repacked its weights.
    """
    narrow = compute_dtype in (torch.bfloat16, torch.float16)
    packed = {}
    for name, module in model.named_modules():
        if not is_four_bit(module):
            continue
        module.support_avx512bf16_for_cpu = False
        weight = module.weight
        # weights that are read by slices (`engine.loading`) are quantized later
        state = _state(module, name) if not weight.is_meta else weight
        packed[name] = FourBit(
            shape=(module.out_features, module.in_features),
            block=state.blocksize,
            quant_type=state.quant_type,
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


def _state(module: Any, name: str) -> Any:
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


def stored_tensors(
    model: nn.Module, remove_duplicate: bool = True, only_frozen: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model as `named_parameters`, detached; 4-bit codes are followed by their scales.

    Codes are uint8 and 1-D, scales fp32 and 1-D, both in row-major order. `only_frozen` leaves out trained parameters,
    whose values may be unreadable in training.
    """
    packed = {f"{name}.weight": module for name, module in model.named_modules() if is_four_bit(module)}
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        if only_frozen and parameter.requires_grad:
            continue
        module = packed.get(name)
        prefix = name.removesuffix("weight")
        if module is None or hasattr(module, SCALES):
            yield name, parameter.detach()
        elif parameter.is_meta:
            numel = module.out_features * module.in_features
            yield name, torch.empty(-(-numel // 2), dtype=torch.uint8, device="meta")
            yield f"{prefix}{SCALES}", torch.empty(-(-numel // module.weight.blocksize), device="meta")
        else:
            yield name, plain_codes(parameter)
            yield f"{prefix}{SCALES}", scales_of(_state(module, prefix.rstrip(".")))


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


def put_back(module: Any, codes: Tensor | None = None, scales: Tensor | None = None) -> None:
    """Gives a layer other codes (uint8, any shape, row-major) or scales (fp32, likewise), which are then not nested."""
    weight = module.weight
    if codes is not None:
        plain_codes(weight).copy_(codes.reshape(-1))
    if scales is not None:
        state = _state(module, "weight")
        state.absmax = scales.reshape(-1).to(weight.device, copy=True)
        state.nested, state.state2, state.offset = False, None, None


# -- the parameter vector ---------------------------------------------------------------------------------------------


def packed_specs(spec: ParameterSpec, layer: FourBit) -> tuple[ParameterSpec, ParameterSpec]:
    """The codes and the scales of a weight as tensors of the vector, from the spec of the weight before quantization."""
    (rows, columns), block = layer.shape, layer.block
    numel = rows * columns
    # where blocks cross rows, CPU kernels of bitsandbytes 0.50 use different scales in a part than in the whole matrix;
    # training uses the whole one
    step = 0 if spec.shard_dim is None or columns % block or block % 2 else (1, block)[spec.shard_dim]
    packed = Packed(layer.shape, step, numel)
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


# -- replicas ---------------------------------------------------------------------------------------------------------


def put_four_bit(model: nn.Module, layers: Mapping[str, FourBit]) -> None:
    """Puts 4-bit layers, by name, into a fresh model, with parameters on the meta device, and their `absmax`."""
    if not layers:
        return
    from bitsandbytes.nn.modules import Linear4bit

    for name, layer in layers.items():
        rows, columns = layer.shape
        module = Linear4bit(columns, rows, **layer.options, device="meta")
        module.support_avx512bf16_for_cpu = False
        module.requires_grad_(False)
        scales = torch.empty(-(-rows * columns // layer.block), device="meta")
        module.register_parameter(SCALES, nn.Parameter(scales, requires_grad=False))
        model.set_submodule(name, module)
    model.is_loaded_in_4bit = True  # PEFT asks


def products(modules: Mapping[str, Any], layers: Mapping[str, FourBit]) -> dict[str, "FourBitProduct"]:
    """Makes 4-bit layers' products their forwards. `modules` are by name without adapters; other stages' are missing."""
    return {
        name: FourBitProduct(modules[name], layer) for name, layer in layers.items() if is_four_bit(modules.get(name))
    }


class FourBitProduct:
    """`x W^T` of a replica's `Linear4bit`: its forward, and its product if a sum over shards comes before the bias.

    Args:
        linear: Has the codes (uint8, of any shape in row-major order) as `weight`, and their scales as `absmax`.
    """

    def __init__(self, linear: Any, layer: FourBit) -> None:
        self._linear, self._layer, self._shape = linear, layer, layer.shape
        self._slice: tuple[int, tuple[tuple[int, int], ...]] | None = None
        linear.hotspa_product, linear.forward = self, self.with_bias

    def cut(self, dim: int, rows: Sequence[tuple[int, int]], held_whole: bool) -> None:
        """Makes it the product with a shard: these rows of the weight along the cut dim. With `held_whole` the rank holds
        all codes, and slices the dequantized weight."""
        local = list(self._layer.shape)
        local[dim] = sum(stop - start for start, stop in rows)
        self._shape = (local[0], local[1])
        self._slice = (dim, tuple(rows)) if held_whole else None

    def __call__(self, x: Tensor) -> Tensor:
        """The product without bias for x [..., in] of any floating-point dtype."""
        dtype = self._layer.compute_dtype or x.dtype
        narrow = x.to(dtype if dtype in _NARROW else torch.float32)
        out: Tensor = _Product.apply(narrow, self)
        return out.to(x.dtype)

    def with_bias(self, x: Tensor) -> Tensor:
        out, bias = self(x), self._linear.bias
        return out if bias is None else out + bias.to(out.dtype)

    def of(self, x: Tensor) -> Tensor:
        """[..., out], without a graph."""
        if self._slice is not None or not min(self._shape):
            return functional.linear(x, self.weight(x.dtype))
        from bitsandbytes.autograd._functions import matmul_4bit

        codes, state = self._packed(self._layer.dtype)
        out: Tensor = matmul_4bit(x, codes, quant_state=state)
        return out

    def weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in], dequantized to `dtype`, or to the weights' original dtype."""
        from bitsandbytes.functional import dequantize_4bit

        dtype = dtype or self._layer.dtype
        if not min(self._shape):
            return torch.empty(self._shape, dtype=dtype, device=self._linear.weight.device)
        codes, state = self._packed(dtype)
        whole: Tensor = dequantize_4bit(codes, state)
        if self._slice is None:
            return whole
        dim, rows = self._slice
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in rows], dim)

    def _packed(self, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """The codes [n, 1] and the library's state; copies if a shard of columns lies column by column."""
        from bitsandbytes.functional import QuantState

        layer, linear = self._layer, self._linear
        shape = torch.Size(self._shape if self._slice is None else layer.shape)
        scales = linear.absmax.detach().contiguous().view(-1)
        state = QuantState(scales, shape=shape, blocksize=layer.block, quant_type=layer.quant_type, dtype=dtype)
        return linear.weight.detach().contiguous().view(-1, 1), state


class _Product(torch.autograd.Function):
    """Like bitsandbytes' own, but saves nothing: the backward reads the layer's codes, wherever they lie then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, product: FourBitProduct) -> Tensor:
        ctx.product = product
        return product.of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.matmul(grad, ctx.product.weight().to(grad.dtype)), None
