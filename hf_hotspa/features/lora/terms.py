"""LoRA in a plan: sizes of adapters, and their division by tensor parallelism.

A linear layer of `inputs` and `outputs` has an adapter A [r, inputs], B [outputs, r]. Tensor parallelism cuts the factor
along the cut dim of the base; every coordinate holds the complete other factor (`adapters`). The base is frozen: the
master store keeps one copy in the compute dtype, without gradients and optimizer state.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hf_hotspa.costs.model_config import Linear
from hf_hotspa.costs.sizes import Shares
from hf_hotspa.errors import HotspaConfigError

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Adapter:
    """An adapter on the named linear layers of every decoder layer."""

    rank: int
    linears: Mapping[str, Linear]

    @classmethod
    def read(cls, text: str, known: Mapping[str, Linear]) -> "Adapter":
        """Parses ``16``, ``r=16`` or ``r=16,targets=q_proj+v_proj``. Raises `HotspaConfigError`: another format, or a
        layer that the model does not have."""
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

    def held_numel(self, shares: Shares) -> float:
        """Adapter parameters of one decoder layer on the fullest tp coordinate."""
        return self.rank * sum(linear.whole + linear.cut * shares[linear.of_heads] for linear in self.linears.values())

    def __str__(self) -> str:
        return f"LoRA r={self.rank} on {', '.join(self.linears)}"
