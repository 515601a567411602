"""Weights in 4 bits of bitsandbytes: codes, two weights in a byte, and a scale for each block of weights.

Both are tensors of the parameter vector (`layout.vector.Packed`), cut at block borders and moved unchanged; nested scales are
multiplied out to fp32 once. bitsandbytes is imported only when a model uses it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_hotspa.layout.vector import Packed, ParameterSpec
from hf_hotspa.model.replica import to_storage

SCALES = "absmax"
"""The name of the scales in a replica, and in the parameter vector."""
NARROW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FourBitWeight:
    """A weight in 4 bits as plain data: a `model.packed_layer.PackedLayer` without its module.

    Args:
        shape: Its shape, [..., rows, columns]. Blocks are of consecutive weights in row-major order.
        block: Weights that share a scale.
        quant_type: `nf4` or `fp4`.
        dtype: The dtype of the weights before quantization; a backward pass dequantizes to it.
        compute_dtype: The dtype of products; None for the dtype of their input.
        nested: Whether scales are quantized themselves.
    """

    shape: tuple[int, ...]
    block: int
    quant_type: str
    dtype: torch.dtype
    compute_dtype: torch.dtype | None
    nested: bool

    form: ClassVar[str] = "4 bits"
    leaf: ClassVar[str]
    skip: ClassVar[str]

    @property
    def kind(self) -> str:
        return self.quant_type

    @property
    def numel(self) -> int:
        return prod(self.shape)

    # -- the parameter vector

    def specs(self, spec: ParameterSpec) -> tuple[ParameterSpec, ParameterSpec]:
        (*lead, columns), block, numel = self.shape, self.block, self.numel
        # where blocks cross rows, CPU kernels of bitsandbytes 0.50 use different scales in a part than in the whole matrix;
        # training uses the whole one
        by_blocks = columns % block == 0 and block % 2 == 0 and (spec.shard_dim is not None or len(lead) > 1)
        step = 0 if spec.shard_dim is None or not by_blocks else block if spec.shard_dim == len(lead) else 1
        packed = Packed(self.shape, step, numel)
        blocks: tuple[int, ...] = (*lead, columns // block) if by_blocks else (-(-numel // block),)
        shape: tuple[int, ...] = (*blocks, block // 2) if by_blocks else (-(-numel // 2),)
        codes = replace(
            spec, shape=shape, dtype="uint8", frozen_dtype=None, trainable=False, partial_gradient=False, packed=packed
        )
        name, packed = f"{spec.name.removesuffix(self.leaf)}{SCALES}", replace(packed, weights=0)
        return codes, replace(codes, name=name, shape=blocks, dtype="float32", packed=packed)

    # -- the user's module

    @staticmethod
    def state_of(module: nn.Module, name: str) -> Any:
        raise NotImplementedError

    def stored(self, module: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
        """Codes as uint8, scales as fp32."""
        codes = getattr(module, self.leaf)
        if codes.is_meta:
            yield self.leaf, torch.empty(-(-self.numel // 2), dtype=torch.uint8, device="meta")
            yield SCALES, torch.empty(-(-self.numel // self.block), device="meta")
        else:
            yield self.leaf, plain_codes(codes)
            yield SCALES, scales_of(self.state_of(module, name))

    def write(self, module: nn.Module, leaf: str, values: Tensor) -> None:
        """Scales are then not nested."""
        codes = getattr(module, self.leaf)
        if leaf == self.leaf:
            plain_codes(codes).copy_(values.reshape(-1))
        else:
            state = self.state_of(module, self.leaf)
            state.absmax = values.reshape(-1).to(codes.device, copy=True)
            state.nested, state.state2, state.offset = False, None, None

    # -- replicas

    def put_scales(self, module: nn.Module) -> None:
        scales = torch.empty(-(-self.numel // self.block), device="meta")
        module.register_parameter(SCALES, nn.Parameter(scales, requires_grad=False))

    def state(self, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """The library's state of weights of a shape with these scales, dequantized to a dtype."""
        from bitsandbytes.functional import QuantState

        return QuantState(
            scales.contiguous().view(-1),
            shape=torch.Size(shape),
            blocksize=self.block,
            quant_type=self.quant_type,
            dtype=dtype,
        )

    # -- weights in files

    def packed(
        self, spec: ParameterSpec, start: int, stop: int, read: Callable[[ParameterSpec, int, int], Tensor]
    ) -> Tensor:
        """Elements of codes or scales, the same as of the whole weight: blocks are quantized one by one. Quantized scales
        depend on all scales of a weight, so that some of them take all of it."""
        from bitsandbytes.functional import quantize_4bit

        assert spec.packed is not None
        block, dim = self.block, spec.storage_dim
        are_scales, by_columns = not spec.packed.weights, dim == len(self.shape) - 1
        nested = are_scales and self.nested
        plain = replace(spec, name=self.plain_weight(spec.name), shape=self.shape, packed=None, shard_dim=dim)
        whole = replace(plain, shard_dim=None)
        # stored elements, and weights, of one index of the stored dim, or of one block
        each = spec.row_size if dim is not None else 1 if are_scales else block // 2
        of_one = (block if by_columns else 1) * self.numel // self.shape[dim] if dim is not None else block
        first, last = (0, spec.numel // each) if nested else (start // each, -(-stop // each))
        if nested:
            weights = read(whole, 0, self.numel)
        elif dim is None:
            weights = read(whole, first * of_one, min(last * of_one, self.numel))
        else:
            weights = read(plain, first * of_one, last * of_one)
            rest = [size for at, size in enumerate(self.shape) if at != dim]
            weights = weights.view(-1, *rest).movedim(0, dim)
        codes, state = quantize_4bit(
            weights.to(self.dtype).contiguous(), blocksize=block, compress_statistics=nested, quant_type=self.quant_type
        )
        made = scales_of(state) if are_scales else codes.reshape(-1)
        if dim is not None:
            shape = list(spec.shape)
            shape[dim] = last - first
            made = to_storage(made.view(shape), dim)
        begin = first * each
        return made[start - begin : stop - begin]

    def plain_weight(self, name: str) -> str:
        """The name of the plain weight, from the name of its codes or scales."""
        raise NotImplementedError


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
