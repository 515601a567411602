"""Packed layers: frozen weights of the user's model that are held as other tensors, such as codes and scales.

A layer is the module that holds one such weight: a linear layer, or what torch's parametrization keeps of a parameter.

Features find them (hook `describe`). Their tensors are in the parameter vector (`layout.vector.Packed`), cut at block borders
and moved unchanged. A replica has the same layers on its shards, with products that the feature makes.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from hf_hotspa.layout.vector import ParameterSpec
from hf_hotspa.parallel.wrapped_model import replaced_modules
from hf_hotspa.seam import hooks


class Product(Protocol):
    """`x W^T` of a packed layer in a replica, in the place of its forward."""

    def cut(self, dim: int, rows: Sequence[tuple[int, int]], held_whole: bool, group: dist.ProcessGroup) -> None:
        """Makes it the product with a shard: these rows of the weight along the cut dim. With `held_whole` the rank holds
        the complete packed weight, and slices the plain one. `group`: the ranks with all shards."""

    def weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain weight of the shard, made for the call, in a dtype; in its original one when None."""


class PackedLayer(Protocol):
    """One layer as plain data, equal on all ranks.

    Attributes:
        leaf: The name in the module of the parameter with the packed weight.
        shape: Shape of the plain weight.
        form: How messages call the form: "weights in ...".
        kind: How plans call it (`--quantization`).
        skip: How a model is loaded without the form for one module, with a place for its `name`.
        compute_dtype: The dtype of products; None for the dtype of their input.
    """

    @property
    def leaf(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def form(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def skip(self) -> str: ...
    @property
    def compute_dtype(self) -> torch.dtype | None: ...

    def specs(self, spec: ParameterSpec) -> tuple[ParameterSpec, ...]:
        """The tensors of the parameter vector, from the spec of the plain weight; `Packed.weights` adds up to its size."""

    def stored(self, module: Any, name: str) -> Iterator[tuple[str, Tensor]]:
        """The same tensors of the user's module, 1-D, detached, by their names in it. The module may be on meta."""

    def write(self, module: Any, leaf: str, values: Tensor) -> None:
        """Gives the user's module other values of one of them, of any shape, in row-major order."""

    def put(self, model: nn.Module, name: str) -> None:
        """Puts the layer into a fresh model, on the meta device, with parameters named as the specs."""

    def product(self, module: Any) -> Product:
        """Makes the product of such a module its forward."""

    def adapter_class(self) -> type[nn.Module]:
        """PEFT's class around the layer."""

    def packed(
        self, spec: ParameterSpec, start: int, stop: int, read: Callable[[ParameterSpec, int, int], Tensor]
    ) -> Tensor:
        """Packs plain weights: elements `[start, stop)` of one of the specs, in storage order. `spec`: named as in a
        model without adapters. `read`: returns elements of the plain weight, in the storage order of its spec."""


def packed_layers(model: nn.Module, compute_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The `PackedLayer`s of the user's model, by name. From now on its evaluations leave their weights unchanged.
    `compute_dtype`: the dtype of a run in 16 bits, which products then have, too, as under autocast. Raises
    `ModelError`: a layer cannot be read."""
    return {name: layer for hook in hooks("describe") for name, layer in hook(model, compute_dtype).packed().items()}


def products(modules: Mapping[str, Any], layers: Mapping[str, PackedLayer]) -> dict[str, Product]:
    """Makes layers' products their forwards. `modules` are by name without adapters; other stages' are missing."""
    return {name: layer.product(modules[name]) for name, layer in layers.items() if name in modules}


def stored_tensors(
    model: nn.Module, remove_duplicate: bool = True, without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model as `named_parameters`, detached, without those that no forward reads, as trained copies
    replace them; packed weights as the tensors that hold them.

    `without`: names to leave out, of trained parameters, whose values may be unreadable in training.
    """
    packed, replaced, seen = packed_layers(model), replaced_modules(model), set[int]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, _, leaf = name.rpartition(".")
        if name in without or name.startswith(replaced):
            continue
        if remove_duplicate and id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if module in packed and leaf == packed[module].leaf:
            for own, tensor in packed[module].stored(model.get_submodule(module), module):
                yield f"{module}.{own}", tensor
        else:
            yield name, parameter.detach()


# -- the products of linear layers ------------------------------------------------------------------------------------

# A product keeps no plain weight: its backward pass unpacks the weight again, from the codes where they lie then.


def library_layers(model: nn.Module, package: str, kind: str) -> Iterator[tuple[str, Any]]:
    """The modules of a library's class by name, if they have its forward."""
    cls = getattr(sys.modules.get(package), kind, None)  # an object of a package that was never imported does not exist
    if cls is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, cls) and type(module).forward is cls.forward:
            yield name, module


class LinearProduct:
    """`x W^T` of a replica's linear layer: a `Product`, its forward, and its product if a sum over shards comes
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
        """See `Product`."""
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
        """See `Product`: [out, in]."""
        raise NotImplementedError


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, product: LinearProduct) -> Tensor:
        ctx.product = product
        return product.of(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.product.back(grad), None
