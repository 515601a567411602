"""The Trainer's flag for the capacity of experts."""

from dataclasses import dataclass

from hf_hotspa.features.experts.capacity import Capacity
from hf_hotspa.trainer.given_arguments import Number, flag


@dataclass
class ExpertArguments:
    """The capacity of experts."""

    hotspa_expert_capacity: float = flag(
        0.0,
        "Tokens per expert, relative to the mean; 0: no limit.",
        number=Number(0, fix="use 0 for no limit, or 1.25, say"),
        recorded=True,
    )

    def feature_settings(self) -> Capacity | None:
        return Capacity(self.hotspa_expert_capacity) if self.hotspa_expert_capacity else None
