"""What a step runs beside its training pass: forwards without gradients, perhaps of a second model."""

from dataclasses import dataclass

TRAINING_UNITS = 3
"""Of a training pass; a forward of all layers is one."""


@dataclass(frozen=True)
class Scoring:
    """Forwards of all tokens in a step beside its training pass; `reference` says whether a second model's weights are
    kept, shared out over the ranks as the master store is."""

    forwards: int = 0
    reference: bool = False

    @property
    def units(self) -> int:
        """What a step costs, in forwards of all layers; recomputation is one more."""
        return TRAINING_UNITS + self.forwards


TASKS = {
    "sft": Scoring(),
    "dpo": Scoring(2, reference=True),
    "dpo-precomputed": Scoring(1),
    "grpo": Scoring(),
    "grpo-kl": Scoring(2, reference=True),
    "rloo": Scoring(3, reference=True),
}
"""What is trained -> its scoring: a loss of the model's own; pairs, with a live reference or without; completions, in TRL's defaults
and with a KL term."""
