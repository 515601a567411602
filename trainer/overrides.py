"""Methods that a subclass of the Trainer overrides: honoured where they can be, else refused by name.

Owns what is looked at before the first step: which methods were overridden, what they return, and hooks on the model.
"""

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.model.model_check import check_hooks
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.trainer.base import TrainerBase
from hf_hotspa.trainer.dataloader import MiniBatchLoader
from hf_hotspa.trainer.evaluation_sets import check_evaluation_loader
from hf_hotspa.trainer.row_order import LengthGroupedRows, order_seed, rows_of
from hf_hotspa.trainer.stale_weights import structure_only
from hf_hotspa.trainer.streaming import StreamLoader
from hf_hotspa.trainer.views import is_users

_IN_THE_DATA = "do its work in the data set or in the data collator"

_NEVER_CALLED = {
    "_get_eval_sampler": (
        "rows are evaluated in the order of the data set, each once",
        "pass the rows as eval_dataset",
    ),
    "prediction_step": (
        "evaluation runs under a parallel strategy, and no rank has a model that could be called",
        "use compute_metrics and preprocess_logits_for_metrics",
    ),
    "_get_dataloader": ("mini-batches are packed by this trainer's own data loader", _IN_THE_DATA),
    "_remove_unused_columns": ("columns are read where rows are packed", _IN_THE_DATA),
    "_get_collator_with_removed_columns": ("columns are read where rows are packed", _IN_THE_DATA),
    "_prepare_inputs": ("packs go to the replicas of the engine, not through the Trainer", _IN_THE_DATA),
    "_prepare_input": ("packs go to the replicas of the engine, not through the Trainer", _IN_THE_DATA),
    "compute_loss_context_manager": ("forward passes run in the engine", "use bf16=True for mixed precision"),
    "autocast_smart_context_manager": ("forward passes run in the engine", "use bf16=True for mixed precision"),
}
"""Methods of the stock Trainer that nothing calls here: why, and what to do instead."""

_MUST_CALL_SUPER = ("training_step", "_inner_training_loop", "_run_epoch", "evaluation_loop")


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def refuse_overrides(cls: type[Trainer]) -> None:
    """Refuses a class whose methods could only be ignored.

    Raises:
        UnsupportedError: naming the method.
    """
    for name, (why, fix) in _NEVER_CALLED.items():
        if is_users(getattr(cls, name, None)):
            raise UnsupportedError(f"{name} is overridden, and would never be called", why=why, fix=fix)
    for name in _MUST_CALL_SUPER:
        method = getattr(cls, name)
        code = getattr(inspect.unwrap(method), "__code__", None)
        if is_users(method) and code is not None and name not in _names(code):
            raise UnsupportedError(
                f"{name} is overridden and does not call super().{name}(...)",
                why="forward and backward pass of a mini-batch run under several parallel strategies, inside of it",
                fix=f"call super().{name}(...) in it and work around that",
            )


class TrainingInputs(dict[str, Any]):
    """What an overridden `training_step` gets: the packed mini-batch, which is no dictionary of tensors."""

    def __missing__(self, key: str) -> Any:
        raise UnsupportedError(
            f"the inputs of training_step have no {key!r}",
            why="a step trains a whole mini-batch, packed, of which each rank holds a part: inputs['mini_batch']",
            fix="do it in the data set or the data collator, or leave the inputs alone",
        )


class OverridesMixin(TrainerBase):
    """Looks at overridden methods and at hooks before the first step."""

    _trained_mini_batch = False

    def set_initial_training_values(self, args: TrainingArguments, dataloader: DataLoader[Any]) -> Any:
        """As in the stock Trainer, for a data loader of this one.

        Raises:
            UnsupportedError: an overridden method returns another data loader.
        """
        if not isinstance(dataloader, MiniBatchLoader | StreamLoader):
            raise UnsupportedError(
                f"get_train_dataloader is overridden and returns a {type(dataloader).__name__} of its own",
                why="mini-batches are read, packed and dealt out to the ranks by super().get_train_dataloader()",
                fix="override _get_train_sampler for another order, do the rest in the data set or the data collator",
            )
        self._check_evaluation_loader()
        return super().set_initial_training_values(args, dataloader)

    def _check_evaluation_loader(self) -> None:
        """Calls an overridden `get_eval_dataloader` once, so that what it returns is known before the first step."""
        evaluates = self.args.eval_strategy != IntervalStrategy.NO or self.args.eval_on_start
        if not evaluates or not is_users(type(self).get_eval_dataloader) or self.eval_dataset is None:
            return
        for name in self.eval_dataset if isinstance(self.eval_dataset, dict) else (None,):
            check_evaluation_loader(self.get_eval_dataloader() if name is None else self.get_eval_dataloader(name))

    def _run_epoch(self, **kwargs: Any) -> None:
        with structure_only():  # those that were there at the start were found with the model
            self._running.agreement.run("beginning of an epoch", lambda: check_hooks(self.model))
        super()._run_epoch(**kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The mini-batch of a step."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return [TrainingInputs(sample) for sample in samples], num_items

    def _check_trained(self) -> None:
        """An overridden `training_step` may have found a way around ours."""
        if not self._trained_mini_batch:
            raise UnsupportedError(
                "training_step is overridden and did not call super().training_step(...)",
                why="forward and backward pass of a mini-batch run inside of it",
                fix="call it in every step",
            )
        self._trained_mini_batch = False

    def _row_sampler(self, dataset: Any, table: SequenceTable) -> Sampler[int] | None:
        """An order of rows that is neither the seeded shuffle nor that of the data set."""
        args, seed = self.args, order_seed(self.args)
        if is_users(type(self)._get_train_sampler):
            sampler = self._get_train_sampler(self.train_dataset)
            return rows_of(sampler, len(dataset), seed, lambda text: self._agreement().texts(text))
        if args.train_sampling_strategy == "group_by_length":
            return LengthGroupedRows(table, self.get_total_train_batch_size(args), seed)
        return None
