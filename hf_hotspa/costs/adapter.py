"""LoRA in a plan: what an adapter adds to a layer, and how tensor parallelism divides it.

Beside a linear layer of `inputs` and `outputs` stand A [r, inputs] and B [outputs, r]. Tensor parallelism cuts the factor
that meets the cut dim of the base, and every coordinate holds all of the other one (`parallel/adapters.py`). The base is
frozen: the master store keeps it once in the dtype of computation, without gradients and optimizer state.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hf_hotspa.errors import HotspaConfigError

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Linear:
    """One linear layer of a decoder layer.

    Args:
        of_heads: Whether what tp cuts belongs to `query` heads or to `key` heads; None for an MLP.
        rows: Whether tp cuts its outputs (column-parallel); else its inputs.
    """

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
    """An adapter of every decoder layer.

    Args:
        linears: The linear layers of a decoder layer that it stands beside, by name.
    """

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
        """Those of them that the fullest tp coordinate holds.

        Args:
            shares: The share of the cut dims that it holds, by `Linear.of_heads`.
        """
        return self.rank * sum(linear.whole + linear.cut * shares[linear.of_heads] for linear in self.linears.values())

    def __str__(self) -> str:
        return f"LoRA r={self.rank} on {', '.join(self.linears)}"
