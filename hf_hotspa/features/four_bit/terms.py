"""4-bit bases in a plan: sizes of linear layers and their division by tensor parallelism, dequantized weights, seconds.

A code is half a byte per weight, and each block of 64 weights of a row has an fp32 scale (`four_bit_linear`); quantized
scales are held as fp32. Embedding, head, norms and experts are not quantized. `prepare_model_for_kbit_training` makes
an fp32 copy of them, which the master store keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_hotspa.costs.hardware import Hardware
from hf_hotspa.costs.memory import RECOMPUTATION, MemoryStage
from hf_hotspa.costs.model_config import Linear
from hf_hotspa.costs.sizes import ModelSizes, Shares, dtype_bytes
from hf_hotspa.costs.terms import Cost, MemoryTerm, PackedForms, Rate, Terms
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.shares import shard_rows, stored_rows
from hf_hotspa.layout.vector import ParameterSpec, ParameterVector
from hf_hotspa.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

BLOCK = 64  # weights that share a scale
WEIGHT_BYTES = 1 / 2 + 4 / BLOCK  # bytes of a weight, its share of a scale included
KINDS = ("nf4", "fp4")
DEQUANTIZATIONS = 2
"""How often a pack dequantizes each code: for the forward and the backward product. Recomputation adds one."""


@dataclass(frozen=True)
class FourBits:
    """The frozen 4-bit linear layers of every decoder layer, by name; `kind` is one of `KINDS`."""

    kind: str
    linears: Mapping[str, Linear]

    weight_bytes = WEIGHT_BYTES

    @property
    def weights(self) -> int:
        """Weights of one decoder layer."""
        return sum(linear.inputs * linear.outputs for linear in self.linears.values())

    def cut(self, shares: Shares) -> float:
        """Weights that the fullest tp coordinate computes with."""
        return sum(shares[one.of_heads] * one.inputs * one.outputs for one in self.linears.values())

    def held_numel(self, shares: Shares) -> float:
        """Weights that it holds: complete layers where a shard would not end at a block border."""
        return sum(_held_share(one, shares[one.of_heads]) * one.inputs * one.outputs for one in self.linears.values())

    def most_at_a_time(self, shares: Shares) -> float:
        """The most weights that exist dequantized at a time: a matrix, plus its slice if the matrix is held
        complete."""
        at_a_time = [
            (_held_share(one, share) + (share if _held_share(one, share) > share else 0.0)) * one.inputs * one.outputs
            for one in self.linears.values()
            for share in [shares[one.of_heads]]
        ]
        return max(at_a_time, default=0.0)


def _held_share(linear: Linear, share: float) -> float:
    """Cuts must be at block borders; blocks lie along the inputs."""
    columns = linear.inputs if linear.rows else linear.inputs * share
    return share if linear.inputs % BLOCK == 0 and columns % BLOCK == 0 else 1.0


def dequantized(sizes: ModelSizes, tp: int) -> float:
    """The most dequantized weights of a rank at a time, in elements."""
    if sizes.vector is not None:
        packed = (spec for spec in sizes.vector.specs if spec.packed is not None and spec.packed.weights)
        return max((_at_a_time(sizes.vector, Strategy(tp=tp), spec) for spec in packed), default=0)
    return sizes.packed.most_at_a_time(sizes.shares(tp)) if isinstance(sizes.packed, FourBits) else 0.0


def _at_a_time(vector: ParameterVector, strategy: Strategy, spec: ParameterSpec) -> int:
    """Dequantized weights of one matrix on the rank with the largest shard."""
    assert spec.packed is not None
    rows, columns = spec.packed.shape
    if spec.shard_dim is None or strategy.tp == 1:
        return rows * columns
    sizes = []
    for rank in range(strategy.tp):
        length = sum(stop - start for start, stop in shard_rows(vector, strategy, spec, rank))
        shard = length * (columns if spec.shard_dim == 0 else rows)
        sizes.append(shard if stored_rows(vector, strategy, spec, rank) is not None else rows * columns + shard)
    return max(sizes)


def _dequantized(stage: MemoryStage) -> Rate | None:
    weights = dequantized(stage.model.sizes, stage.strategy.tp)
    return Rate(fixed=weights * stage.width) if weights else None


def _second_gradient(stage: MemoryStage) -> Rate | None:
    """While a layer runs again: gradients of both the adapter's product and the frozen one."""
    if not stage.recomputes or not dequantized(stage.model.sizes, stage.strategy.tp):
        return None
    return Rate(pack_token=stage.inner_gradient)


def _read(kind: str, linears: Mapping[str, Linear], added: object) -> FourBits:
    if added is None:
        raise HotspaConfigError(
            f"--quantization {kind} needs an adapter",
            why="weights in 4 bits are frozen, and nothing would be trained",
            fix="add --lora 16",
        )
    return FourBits(kind, linears)


def _seconds(sizes: ModelSizes, tp: int, hardware: Hardware, dtype: str) -> Cost:
    """Separate kernels read codes and write weights, at memory bandwidth."""
    codes = sizes.packed.held_numel(sizes.shares(tp)) if isinstance(sizes.packed, FourBits) else 0.0
    moved = DEQUANTIZATIONS * codes * (WEIGHT_BYTES + dtype_bytes(dtype))
    return Cost(c=moved / hardware.device.memory_bandwidth)


def _convert(model: "PreTrainedModel", kind: str, values: "Tensor") -> None:
    from hf_hotspa.features.four_bit.conversion import convert

    convert(model, kind, values, BLOCK)


def _config(kind: str, double: bool) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double)


TERMS = Terms(
    memory=(
        MemoryTerm("dequantized weights", "activations", _dequantized, "products"),
        MemoryTerm("second gradient inside an MLP", "activations", _second_gradient, RECOMPUTATION),
    ),
    data_sheet=_seconds,
    packed=PackedForms(
        KINDS,
        _read,
        "none in 4 bits",
        "the frozen model is in 4 bits of bitsandbytes (QLoRA); with --lora",
        _convert,
        _config,
    ),
)
