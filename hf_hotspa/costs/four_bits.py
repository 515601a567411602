"""QLoRA in a plan: what linear layers in 4 bits take of memory, and what their products cost more.

Codes are half a byte a weight, and each block of 64 weights of a row has an fp32 scale (`parallel/four_bit.py`): scales that
are quantized themselves are held as fp32. What is no linear layer of a decoder layer stays as it is: embedding, head, norms,
experts. `prepare_model_for_kbit_training` makes an fp32 copy of these, which the master store keeps. Plain data, no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hf_hotspa.costs.adapter import Adapter, Linear

BLOCK = 64
"""Weights that share a scale."""
WEIGHT_BYTES = 1 / 2 + 4 / BLOCK
"""Bytes of a weight with its share of a scale."""
KINDS = ("nf4", "fp4")
DEQUANTIZATIONS = 2
"""How often a pack makes a weight of each code: for the forward product, and for the backward one; again for a forward pass that
is computed again."""


@dataclass(frozen=True)
class FourBits:
    """The linear layers of every decoder layer, frozen in 4 bits.

    Args:
        kind: One of `KINDS`.
        linears: By name.
    """

    kind: str
    linears: Mapping[str, Linear]

    @property
    def weights(self) -> int:
        """Of one decoder layer."""
        return sum(linear.inputs * linear.outputs for linear in self.linears.values())

    def cut(self, shares: Mapping[str | None, float]) -> float:
        """Those of them that the fullest tp coordinate computes with.

        Args:
            shares: See `Adapter.held`.
        """
        return sum(shares[one.of_heads] * one.inputs * one.outputs for one in self.linears.values())

    def held(self, shares: Mapping[str | None, float]) -> float:
        """Those that it holds: all of a layer whose shard does not end with blocks, too."""
        return sum(_held(one, shares[one.of_heads]) * one.inputs * one.outputs for one in self.linears.values())

    def most_at_a_time(self, shares: Mapping[str | None, float]) -> float:
        """The most weights that exist dequantized at a time: a matrix, with the slice of it where it is held whole."""
        at_a_time = [
            (_held(one, share) + (share if _held(one, share) > share else 0.0)) * one.inputs * one.outputs
            for one in self.linears.values()
            for share in [shares[one.of_heads]]
        ]
        return max(at_a_time, default=0.0)


def _held(linear: Linear, share: float) -> float:
    """The share of a layer that a coordinate holds: cuts are at borders of blocks, which lie along its inputs."""
    columns = linear.inputs if linear.rows else linear.inputs * share
    return share if linear.inputs % BLOCK == 0 and columns % BLOCK == 0 else 1.0


@dataclass(frozen=True)
class FrozenBase:
    """What a calibration has to be measured with: a base in 4 bits, and the adapter beside it.

    Args:
        kind: One of `KINDS`.
        rank: Of an adapter of all linear layers.
    """

    kind: str
    rank: int

    @classmethod
    def of(cls, four_bits: FourBits | None, adapter: Adapter | None) -> "FrozenBase | None":
        """That of a plan."""
        return cls(four_bits.kind, adapter.rank) if four_bits is not None and adapter is not None else None

    def __str__(self) -> str:
        return f"{self.kind}, LoRA r={self.rank}"
