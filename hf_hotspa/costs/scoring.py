"""Forward passes of a step besides training: without gradients, possibly of a second model."""

from dataclasses import dataclass

TRAINING_UNITS = 3
"""Cost of a training pass, in forward passes of all layers."""


@dataclass(frozen=True)
class Scoring:
    """`forwards`: forward passes of all tokens in a step besides training. `reference`: whether a second model's
    weights are kept, divided over the ranks like the master store."""

    forwards: int = 0
    reference: bool = False

    @property
    def units(self) -> int:
        """Cost of a step, in forward passes of all layers; recomputation adds one."""
        return TRAINING_UNITS + self.forwards


TASKS = {
    "sft": Scoring(),
    "dpo": Scoring(2, reference=True),
    "dpo-precomputed": Scoring(1),
    "grpo": Scoring(),
    "grpo-kl": Scoring(2, reference=True),
    "rloo": Scoring(3, reference=True),
}
"""Scoring by training task: `sft` uses the model's own loss; `dpo` pairs, with a live reference or precomputed; `grpo`
and `rloo` completions, with TRL's defaults or a KL term."""
