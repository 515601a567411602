"""What the loop of transformers counts in a trainer whose mini-batch is one piece: accumulation, tokens, operations.

All ranks know the plan of a mini-batch, so nothing is gathered; pads, which the stock Trainer counts here and there, do not
exist. Accumulation is a part of the mini-batch here (`hotspa_mini_batch_size`), so the loop of transformers must not accumulate a
second time. Owns what the argument reads: 1 where that loop reads it, between the steps, and what the user gave for
callbacks, logs, evaluations, checkpoints and everybody outside of training.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainingArguments

from hf_hotspa.trainer.base import TrainerBase


@contextmanager
def _reading(args: TrainingArguments, steps: int) -> Iterator[None]:
    values: dict[str, Any] = vars(args)
    before, values["gradient_accumulation_steps"] = values["gradient_accumulation_steps"], steps
    try:
        yield
    finally:
        values["gradient_accumulation_steps"] = before


class AccumulationMixin(TrainerBase):
    """The loop of transformers, which takes one mini-batch a step."""

    _given_accumulation: int | None = None
    _num_parameters: int | None = None
    """Parameters that are no embeddings; of the model of the present engine."""

    @contextmanager
    def _in_the_loop(self) -> Iterator[None]:
        self._given_accumulation = vars(self.args)["gradient_accumulation_steps"]
        try:
            with _reading(self.args, 1):
                yield
        finally:
            self._given_accumulation = None

    @contextmanager
    def _arguments_as_given(self) -> Iterator[None]:
        """Inside, the argument reads what the user gave, also in the loop."""
        if self._given_accumulation is None:
            yield
        else:
            with _reading(self.args, self._given_accumulation):
                yield

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """As in the stock Trainer, with mini-batches for batches."""
        with self._in_the_loop():
            return super().set_initial_training_values(*args, **kwargs)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        with self._in_the_loop():
            return super()._init_training_state(*args, **kwargs)

    def _run_epoch(self, **kwargs: Any) -> None:
        with self._in_the_loop():
            super()._run_epoch(**kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        with self._arguments_as_given():
            super()._maybe_log_save_evaluate(*args, **kwargs)

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
