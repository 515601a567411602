"""Frozen linear layers in a packed form: the bytes they take, and what unpacking them costs.

One weight at a time is unpacked, for a product; none is kept. Embedding, head and norms are not packed, experts in some forms.
`prepare_model_for_kbit_training` makes an fp32 copy of them, which the master store keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hf_hotspa.costs.hardware import Hardware
from hf_hotspa.costs.model_config import EXPERTS, Linear
from hf_hotspa.costs.sizes import EXPERTS_HERE, ModelSizes, Shares, dtype_bytes
from hf_hotspa.costs.terms import Cost
from hf_hotspa.layout.shares import shard_rows, stored_rows
from hf_hotspa.layout.vector import ParameterSpec, ParameterVector
from hf_hotspa.strategy import Strategy

_UNPACKED = 2  # how often a pack unpacks each weight: for the forward and the backward product. Recomputation adds one.


@dataclass(frozen=True)
class PackedLinears:
    """The frozen linear layers of every decoder layer in one form (`sizes.Packed`).

    Args:
        kind: The form, of `terms.form_names`.
        linears: The layers by name.
        weight_bytes: Bytes of a weight, with its share of scales.
        block: Weights of a row that are not divided: a rank holds a layer complete if its shard would not end with a block.
    """

    kind: str
    linears: Mapping[str, Linear]
    weight_bytes: float
    block: int = 1

    @property
    def weights(self) -> int:
        return sum(linear.numel * linear.count for linear in self.linears.values())

    def cut(self, shares: Shares) -> float:
        """Weights that the fullest tp coordinate computes with."""
        return sum(shares[one.of_heads] * _here(one, shares) for one in self.linears.values())

    def held_numel(self, shares: Shares) -> float:
        """Weights that it holds: complete layers where a shard would not end at a block border."""
        return sum(self._share(one, shares[one.of_heads]) * _here(one, shares) for one in self.linears.values())

    def most_at_a_time(self, shares: Shares) -> float:
        """The most weights that exist unpacked at a time: a matrix, plus its slice if the matrix is held complete."""
        at_a_time = [
            (whole + (share if whole > share else 0.0)) * one.numel
            for one in self.linears.values()
            for share in [shares[one.of_heads]]
            for whole in [self._share(one, share)]
        ]
        return max(at_a_time, default=0.0)

    def _share(self, linear: Linear, share: float) -> float:
        row = linear.outputs if linear.transposed else linear.inputs
        columns = row * share if linear.rows == linear.transposed else row
        in_blocks = self.block == 1 or (row % self.block == 0 and columns % self.block == 0)
        return share if in_blocks else 1.0


def _here(linear: Linear, shares: Shares) -> float:
    return linear.numel * linear.count * (shares[EXPERTS_HERE] if linear.of_heads == EXPERTS else 1.0)


def unpacked(sizes: ModelSizes, tp: int) -> float:
    """The most unpacked weights of a rank at a time, in elements."""
    if sizes.vector is not None:
        packed = (spec for spec in sizes.vector.specs if spec.packed is not None and spec.packed.weights)
        return max((_at_a_time(sizes.vector, Strategy(tp=tp), spec) for spec in packed), default=0)
    return sizes.packed.most_at_a_time(sizes.shares(tp)) if sizes.packed is not None else 0.0


def _at_a_time(vector: ParameterVector, strategy: Strategy, spec: ParameterSpec) -> int:
    """Unpacked weights of one matrix on the rank with the largest shard."""
    assert spec.packed is not None
    *lead, rows, columns = spec.packed.shape  # of one expert, if there are several
    if spec.shard_dim is None or strategy.tp == 1:
        return rows * columns
    sizes = []
    for rank in range(strategy.tp):
        length = sum(stop - start for start, stop in shard_rows(vector, strategy, spec, rank))
        shard = length * (columns if spec.shard_dim == len(lead) else rows)
        sizes.append(shard if stored_rows(vector, strategy, spec, rank) is not None else rows * columns + shard)
    return max(sizes)


def unpacking_seconds(sizes: ModelSizes, tp: int, hardware: Hardware, dtype: str) -> Cost:
    """Of one layer, on data sheets: separate kernels read codes and write weights, at memory bandwidth."""
    packed = sizes.packed
    if packed is None:
        return Cost()
    moved = _UNPACKED * packed.held_numel(sizes.shares(tp)) * (packed.weight_bytes + dtype_bytes(dtype))
    return Cost(c=moved / hardware.device.memory_bandwidth)
