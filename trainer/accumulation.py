"""`gradient_accumulation_steps` of a trainer whose mini-batch is one piece.

Accumulation is a part of the mini-batch here (`hotspa_mini_batch_size`), so the loop of transformers must not accumulate a
second time. Owns what the argument reads: 1 where that loop reads it, between the steps, and what the user gave for
callbacks, logs, evaluations, checkpoints and everybody outside of training.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hf_hotspa.errors import HotspaConfigError


def read_accelerator_config(args: TrainingArguments) -> None:
    """Accumulation is that of the arguments: accelerate has nothing to accumulate.

    Raises:
        HotspaConfigError: both give a number of steps.
    """
    values: dict[str, Any] = vars(args)
    config = values["accelerator_config"]
    given = config.gradient_accumulation_kwargs
    if not given:
        return
    steps: int = values["gradient_accumulation_steps"]
    if given.get("num_steps", 1) != 1 and steps != 1:
        raise HotspaConfigError(
            f"The `AcceleratorConfig`'s `num_steps` is set but gradient_accumulation_steps={steps}, too",
            fix="set one of them",
        )
    values["gradient_accumulation_steps"] = steps if steps != 1 else given.get("num_steps", 1)
    values["accelerator_config"] = copy(config)  # not the user's object
    values["accelerator_config"].gradient_accumulation_kwargs = None


@contextmanager
def _reading(args: TrainingArguments, steps: int) -> Iterator[None]:
    values: dict[str, Any] = vars(args)
    before, values["gradient_accumulation_steps"] = values["gradient_accumulation_steps"], steps
    try:
        yield
    finally:
        values["gradient_accumulation_steps"] = before


class AccumulationMixin(Trainer):
    """The loop of transformers, which takes one mini-batch a step."""

    _given_accumulation: int | None = None

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

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader[Any]
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """As in the stock Trainer, with mini-batches for batches."""
        with self._in_the_loop():
            return super().set_initial_training_values(args, dataloader)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        with self._in_the_loop():
            return super()._init_training_state(*args, **kwargs)

    def _run_epoch(self, **kwargs: Any) -> None:
        with self._in_the_loop():
            super()._run_epoch(**kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        with self._arguments_as_given():
            super()._maybe_log_save_evaluate(*args, **kwargs)
