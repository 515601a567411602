"""LoRA and QLoRA in a plan: what adapters and linear layers in 4 bits take, and how tensor parallelism divides them.

Beside a linear layer of `inputs` and `outputs` stand A [r, inputs] and B [outputs, r]. Tensor parallelism cuts the factor
that meets the cut dim of the base, and every coordinate holds all of the other one (`parallel/adapters.py`). The base is
frozen: the master store keeps it once in the dtype of computation, without gradients and optimizer state.

In 4 bits, codes are half a byte a weight, and each block of 64 weights of a row has an fp32 scale (`parallel/four_bit.py`): scales that
are quantized themselves are held as fp32. What is no linear layer of a decoder layer stays as it is: embedding, head, norms,
experts. `prepare_model_for_kbit_training` makes an fp32 copy of these, which the master store keeps. Plain data, no torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hf_hotspa.errors import HotspaConfigError

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Linear:
    """One linear layer of a decoder layer. tp cuts what belongs to `query` heads, to `key` heads, or (None) to an MLP:
    its outputs (column-parallel) with `rows`, else its inputs."""

    inputs: int
    outputs: int
    of_heads: str | None
    rows: bool

    @property
    def whole(self) -> int:
        """The dim that stays whole."""
        return self.inputs if self.rows else self.outputs

    @property
    def cut(self) -> int:
        """The dim that tp cuts."""
        return self.outputs if self.rows else self.inputs


@dataclass(frozen=True)
class Adapter:
    """An adapter of every decoder layer, beside its linear layers of these names."""

    rank: int
    linears: Mapping[str, Linear]

    @classmethod
    def read(cls, text: str, known: Mapping[str, Linear]) -> "Adapter":
        """From ``16``, ``r=16`` or ``r=16,targets=q_proj+v_proj``.

        Raises:
            HotspaConfigError: it says something else, or names a layer that the model does not have.
        """
        match = re.fullmatch(r"(?:r=)?([1-9][0-9]{0,5})(?:,targets=([\w+-]+))?", text.replace(" ", ""))
        if not match:
            raise HotspaConfigError(
                f"--lora {text!r} is no adapter", fix="write its r, such as 16, or r=16,targets=q_proj+v_proj"
            )
        names = list(known) if match[2] in (None, ALL_LINEAR) else list(dict.fromkeys(match[2].split("+")))
        for name in names:
            if name not in known:
                raise HotspaConfigError(
                    f"--lora {text!r} names {name!r}, which is not counted for this model",
                    fix=f"targets are {ALL_LINEAR}, or some of {'+'.join(known)}",
                )
        return cls(int(match[1]), {name: known[name] for name in names})

    @property
    def parameters(self) -> int:
        """Parameters beside one decoder layer."""
        return self.rank * sum(linear.inputs + linear.outputs for linear in self.linears.values())

    def held(self, shares: Mapping[str | None, float]) -> float:
        """Those of them on the fullest tp coordinate, which has `shares` of the cut dims, by `Linear.of_heads`."""
        return self.rank * sum(linear.whole + linear.cut * shares[linear.of_heads] for linear in self.linears.values())

    def __str__(self) -> str:
        return f"LoRA r={self.rank} on {', '.join(self.linears)}"


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
    """The linear layers of every decoder layer, by name, frozen in 4 bits of a kind of `KINDS`."""

    kind: str
    linears: Mapping[str, Linear]

    @property
    def weights(self) -> int:
        """Of one decoder layer."""
        return sum(linear.inputs * linear.outputs for linear in self.linears.values())

    def cut(self, shares: Mapping[str | None, float]) -> float:
        """Those of them that the fullest tp coordinate computes with; `shares` as in `Adapter.held`."""
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
    """What a calibration is measured with: a base in 4 bits (of `KINDS`), an adapter of that rank on all linears."""

    kind: str
    rank: int

    @classmethod
    def of(cls, four_bits: FourBits | None, adapter: Adapter | None) -> "FrozenBase | None":
        return cls(four_bits.kind, adapter.rank) if four_bits is not None and adapter is not None else None

    def __str__(self) -> str:
        return f"{self.kind}, LoRA r={self.rank}"
