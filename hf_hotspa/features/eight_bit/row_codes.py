"""Linear layers in 8 bits: a code (int8) for each weight, and a scale (fp32) for each row of the weight, [out, in].

Codes are cut like the weight. Scales follow a cut of rows; under a cut of columns each rank has all of them. Both are moved
unchanged (`layout.vector.Packed`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_hotspa.layout.vector import Packed, ParameterSpec
from hf_hotspa.model.packed_layer import LinearProduct
from hf_hotspa.model.replica import to_storage

SCALES = "scales"
"""The name of the scales in a replica's layer, and in the parameter vector."""


@dataclass(frozen=True)
class RowCodes:
    """A linear layer in 8 bits as plain data: a `model.packed_layer.PackedLayer`. `shape`: shape of its weight, [out,
    in]. `bias`: whether it has a bias."""

    shape: tuple[int, int]
    bias: bool

    form: ClassVar[str] = "8 bits"
    leaf: ClassVar[str] = "weight"
    kind: ClassVar[str]
    skip: ClassVar[str]
    product_class: ClassVar[type[LinearProduct]]
    tuner: ClassVar[tuple[str, str]]  # PEFT's module and class around the layer
    compute_dtype: ClassVar[torch.dtype | None] = None

    # -- the parameter vector

    def specs(self, spec: ParameterSpec) -> tuple[ParameterSpec, ParameterSpec]:
        rows, columns = self.shape
        packed = Packed(self.shape, 1, rows * columns)
        codes = replace(spec, dtype="int8", frozen_dtype=None, trainable=False, partial_gradient=False, packed=packed)
        scales = replace(
            codes, name=f"{spec.name.removesuffix('weight')}{SCALES}", shape=(rows,), dtype="float32",
            packed=replace(packed, weights=0),
        )  # fmt: skip
        return codes, scales if spec.shard_dim == 0 else replace(scales, shard_dim=None, parts=())

    # -- the user's module

    @staticmethod
    def tensors(module: Any) -> tuple[Tensor, Tensor]:
        """Views of codes [out, in] and scales [out] of the user's module."""
        raise NotImplementedError

    def stored(self, module: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
        for own, tensor in zip(("weight", SCALES), self.tensors(module), strict=True):
            yield own, tensor.reshape(-1)

    def write(self, module: nn.Module, leaf: str, values: Tensor) -> None:
        codes, scales = self.tensors(module)
        target = codes if leaf == "weight" else scales
        target.copy_(values.view(target.shape))

    # -- replicas

    def fresh(self) -> nn.Module:
        """The layer's module on the meta device, whose weight and scales are replaced."""
        raise NotImplementedError

    def put(self, model: nn.Module, name: str) -> None:
        module = self.fresh()
        module.weight = nn.Parameter(torch.empty(self.shape, dtype=torch.int8, device="meta"), requires_grad=False)
        module.register_parameter(
            SCALES, nn.Parameter(torch.empty(self.shape[0], device="meta"), requires_grad=False)
        )  # fmt: skip
        module.requires_grad_(False)
        model.set_submodule(name, module)

    def product(self, module: nn.Module) -> LinearProduct:
        return self.product_class(module, self, self.shape)

    def adapter_class(self) -> type[nn.Module]:
        module, name = self.tuner
        kind: type[nn.Module] = getattr(import_module(f"peft.tuners.lora.{module}"), name)
        return kind

    # -- weights in files

    def packed(
        self, spec: ParameterSpec, start: int, stop: int, read: Callable[[ParameterSpec, int, int], Tensor]
    ) -> Tensor:
        """Elements of codes or scales, as of the whole weight. A row's scale needs the whole row, so a share of columns takes
        all of the weight."""
        rows, columns = self.shape
        whole = replace(
            spec, name=f"{spec.name.rpartition('.')[0]}.weight", shape=self.shape, packed=None, shard_dim=None, parts=()
        )  # fmt: skip
        each = 1 if len(spec.shape) == 1 else columns
        first, last = (0, rows) if spec.storage_dim == 1 else (start // each, -(-stop // each))
        codes, scales = self.quantized(read(whole, first * columns, last * columns).view(-1, columns))
        made = scales.reshape(-1) if len(spec.shape) == 1 else to_storage(codes, spec.storage_dim)
        return made[start - first * each : stop - first * each]

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of rows of the weight, as of the library; of forms that `open_qlora` makes."""
        raise NotImplementedError
