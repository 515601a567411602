"""LoRA and QLoRA in a plan: sizes of adapters and 4-bit linear layers, and their division by tensor parallelism.

A linear layer of `inputs` and `outputs` has an adapter A [r, inputs], B [outputs, r]. Tensor parallelism cuts the
factor along the cut dim of the base; every coordinate holds the complete other factor (`features/lora/adapters.py`). The
base is frozen: the master store keeps one copy in the compute dtype, without gradients and optimizer state.

In 4 bits, a code is half a byte per weight, and each block of 64 weights of a row has an fp32 scale
(`features/four_bit/four_bit_linear.py`); quantized scales are held as fp32. Embedding, head, norms and experts are not quantized.
`prepare_model_for_kbit_training` makes an fp32 copy of them, which the master store keeps.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hf_hotspa.errors import HotspaConfigError

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Linear:
    """One linear layer of a decoder layer, of `query` heads, `key` heads or (None) an MLP. tp cuts its outputs
    (column-parallel) if `rows`, otherwise its inputs."""

    inputs: int
    outputs: int
    of_heads: str | None
    rows: bool

    @property
    def whole(self) -> int:
        """Size of the dim that tp does not cut."""
        return self.inputs if self.rows else self.outputs

    @property
    def cut(self) -> int:
        """Size of the dim that tp cuts."""
        return self.outputs if self.rows else self.inputs


@dataclass(frozen=True)
class Adapter:
    """An adapter on the named linear layers of every decoder layer."""

    rank: int
    linears: Mapping[str, Linear]

    @classmethod
    def read(cls, text: str, known: Mapping[str, Linear]) -> "Adapter":
        """Parses ``16``, ``r=16`` or ``r=16,targets=q_proj+v_proj``.

        Raises:
            HotspaConfigError: another format, or a layer that the model does not have.
        """
        match = re.fullmatch(r"(?:r=)?([1-9][0-9]{0,5})(?:,targets=([\w+-]+))?", text.replace(" ", ""))
        if not match:
            raise HotspaConfigError(
                f"--lora {text!r} is not an adapter", fix="write its r, such as 16, or r=16,targets=q_proj+v_proj"
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
        """Adapter parameters of one decoder layer."""
        return self.rank * sum(linear.inputs + linear.outputs for linear in self.linears.values())

    def held_numel(self, shares: Mapping[str | None, float]) -> float:
        """Adapter parameters of one decoder layer on the fullest tp coordinate.

        Args:
            shares: Its shares of the cut dims, by `Linear.of_heads`.
        """
        return self.rank * sum(linear.whole + linear.cut * shares[linear.of_heads] for linear in self.linears.values())

    def __str__(self) -> str:
        return f"LoRA r={self.rank} on {', '.join(self.linears)}"


BLOCK = 64
"""Weights that share a scale."""
WEIGHT_BYTES = 1 / 2 + 4 / BLOCK
"""Bytes of a weight, its share of a scale included."""
KINDS = ("nf4", "fp4")
DEQUANTIZATIONS = 2
"""How often a pack dequantizes each code: for the forward and the backward product. Recomputation adds one."""


@dataclass(frozen=True)
class FourBits:
    """The frozen 4-bit linear layers of every decoder layer, by name; `kind` is one of `KINDS`."""

    kind: str
    linears: Mapping[str, Linear]

    @property
    def weights(self) -> int:
        """Weights of one decoder layer."""
        return sum(linear.inputs * linear.outputs for linear in self.linears.values())

    def cut(self, shares: Mapping[str | None, float]) -> float:
        """Weights that the fullest tp coordinate computes with; `shares` as in `Adapter.held_numel`."""
        return sum(shares[one.of_heads] * one.inputs * one.outputs for one in self.linears.values())

    def held_numel(self, shares: Mapping[str | None, float]) -> float:
        """Weights that it holds: complete layers where a shard would not end at a block border."""
        return sum(_held_share(one, shares[one.of_heads]) * one.inputs * one.outputs for one in self.linears.values())

    def most_at_a_time(self, shares: Mapping[str | None, float]) -> float:
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


@dataclass(frozen=True)
class FrozenBase:
    """The frozen base of a calibration: in 4 bits (one of `KINDS`), with an adapter of that rank on all linears."""

    kind: str
    rank: int

    @classmethod
    def of(cls, four_bits: FourBits | None, adapter: Adapter | None) -> "FrozenBase | None":
        return cls(four_bits.kind, adapter.rank) if four_bits is not None and adapter is not None else None

    def __str__(self) -> str:
        return f"{self.kind}, LoRA r={self.rank}"
