"""What the Trainer counts in the course of training: label tokens, input tokens, floating-point operations.

A mini-batch is one piece that all ranks know the plan of, so nothing is gathered; pads, which the stock Trainer counts
here and there, do not exist.
"""

from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer

from hf_hotspa.trainer.arguments import HotSPaTrainingArguments


class CountingMixin(Trainer):
    """Counts mini-batches by their plans."""

    args: HotSPaTrainingArguments
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

    if TYPE_CHECKING:

        def _check_trained(self) -> None: ...

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        self._check_trained()
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += inputs["mini_batch"].plan.num_tokens
