"""What the Trainer counts in the course of training: label tokens, input tokens, floating-point operations.

A mini-batch is one piece that all ranks know the plan of, so nothing is gathered; pads, which the stock Trainer counts
here and there, do not exist.
"""

from typing import Any

import torch

from hf_hotspa.trainer.base import TrainerBase


class CountingMixin(TrainerBase):
    """Counts mini-batches by their plans."""

    _num_parameters: int | None = None
    """Parameters that are no embeddings; of the model of the present engine."""

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> int | None:
        return sum(batch["mini_batch"].num_labels for batch in batch_samples) if batch_samples else None

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """6 FLOP per token of the whole mini-batch and parameter that is no embedding, as the stock Trainer counts; pads,
        which it also counts, are not there. Counted by one rank (the Trainer sums over ranks)."""
        if self.args.process_index != 0:
            return 0
        if self._num_parameters is None:
            self._num_parameters = self.model.num_parameters(exclude_embeddings=True)
        return 6 * inputs["mini_batch"].plan.num_tokens * self._num_parameters

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        self._check_trained()
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += inputs["mini_batch"].plan.num_tokens
