"""Products of packed linear layers in a replica: what all forms have in common.

A product keeps no plain weight: its backward pass unpacks the weight again, from the codes where they lie then.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from hf_hotspa.model.packed_layer import PackedLayer


def library_layers(model: nn.Module, package: str, kind: str) -> Iterator[tuple[str, Any]]:
    """The modules of a library's class by name, if they have its forward."""
    cls = getattr(sys.modules.get(package), kind, None)  # an object of a package that was never imported does not exist
    for name, module in model.named_modules():
        if cls is not None and isinstance(module, cls) and type(module).forward is cls.forward:
            yield name, module


class LinearProduct:
    """`x W^T` of a replica's linear layer: a `packed_layer.Product`, its forward, and its product if a sum over shards comes
    before the bias.

    Attributes:
        linear: Has codes and scales.
        layer: Describes the complete layer.
        shape: Shape of the shard of the weight, [out, in].
        slices: The cut dim, and rows along it, if the rank holds the complete packed weight of which it needs a part.
        sharers: The ranks with the other columns of the weight; None if this rank has all columns.
    """

    def __init__(self, linear: nn.Module, layer: PackedLayer, shape: tuple[int, int]) -> None:
        self.linear, self.layer, self.shape = linear, layer, shape
        self.slices: tuple[int, tuple[tuple[int, int], ...]] | None = None
        self.sharers: dist.ProcessGroup | None = None
        linear.hotspa_product, linear.forward = self, self.with_bias

    def cut(self, dim: int, rows: Sequence[tuple[int, int]], held_whole: bool, group: dist.ProcessGroup) -> None:
        """See `packed_layer.Product`."""
        local = list(self.shape)
        local[dim] = sum(stop - start for start, stop in rows)
        self.shape = (local[0], local[1])
        self.slices = (dim, tuple(rows)) if held_whole else None
        self.sharers = group if dim == 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        """The product without bias for x [..., in] of any floating-point dtype."""
        out: Tensor = _Product.apply(x.to(self.dtype_of(x)), self)
        return out.to(x.dtype)

    def with_bias(self, x: Tensor) -> Tensor:
        out, bias = self(x), self.linear.bias
        return out if bias is None else out + bias.to(out.dtype)

    # -- of a form

    def dtype_of(self, x: Tensor) -> torch.dtype:
        """The dtype in which the product with x is computed."""
        return self.layer.compute_dtype or x.dtype

    def of(self, x: Tensor) -> Tensor:
        """[..., out] for x [..., in], without a graph."""
        raise NotImplementedError

    def back(self, grad: Tensor) -> Tensor:
        """The gradient [..., in] of x, from the gradient of the product."""
        raise NotImplementedError

    def weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """See `packed_layer.Product`: [out, in]."""
        raise NotImplementedError


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, product: LinearProduct) -> Tensor:
        ctx.product = product
        return product.of(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.product.back(grad), None
