"""What becomes of a user's `data_collator`: rows are packed and never padded, so what it does to labels is all that is left.

Owns the list of collators that need not be run, and the `RowRules` that they come to. Any other, a subclass of one of them
too, is run row by row (`per_row.py`).
"""

from dataclasses import replace
from typing import Any

from transformers.data.data_collator import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
    default_data_collator,
    torch_default_data_collator,
)

from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.model.model_kind import has_absolute_positions
from hf_hotspa.rows.features import IGNORED_LABEL, TOKEN_COLUMNS, RowRules
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.base import TrainerBase
from hf_hotspa.trainer.per_row import PerRow

_ARRANGING = (DefaultDataCollator, DataCollatorWithPadding)
_FUNCTIONS = (default_data_collator, torch_default_data_collator)


def check_collator(collator: Any, args: HotSPaTrainingArguments) -> None:
    """Refuses a data collator that cannot be honoured exactly; None is right.

    Raises:
        UnsupportedError: it may change tokens or labels, or do so in a way that packing cannot express.
        HotspaConfigError: a `PackedBucketCollator` that contradicts the arguments.
    """
    if isinstance(collator, PackedBucketCollator):
        _check_own(collator, args)
    elif type(collator) is DataCollatorForLanguageModeling:
        if collator.mlm:
            raise _refused(collator, "with mlm=True", "masked tokens are no causal language modeling", "set mlm=False")
    elif type(collator) is DataCollatorForSeq2Seq:
        if collator.label_pad_token_id != IGNORED_LABEL:
            raise _refused(
                collator,
                f"with label_pad_token_id={collator.label_pad_token_id}",
                "padding would be trained",
                f"leave label_pad_token_id at {IGNORED_LABEL}",
            )
    elif type(collator) is DataCollatorWithFlattening:
        start = getattr(collator, "position_ids_start", 0)  # older releases have no such option
        if collator.separator_id != IGNORED_LABEL or start != 0:
            raise _refused(
                collator,
                f"with separator_id={collator.separator_id} and position_ids_start={start}",
                "the first token of a row would be trained from another row, or positions would begin elsewhere",
                "leave both as they are",
            )
    elif not _is_known(collator) and not callable(collator):
        raise _refused(collator, "", "it cannot be called", "pass a function, or a class with __call__")


def _is_known(collator: Any) -> bool:
    kinds = (*_ARRANGING, DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithFlattening)
    return collator is None or type(collator) in (*kinds, PackedBucketCollator) or collator in _FUNCTIONS


def row_rules(
    collator: Any, args: HotSPaTrainingArguments, config: Any, signature: list[str], vocab_size: int | None
) -> RowRules:
    """What rows are read by under a collator.

    Args:
        signature: The arguments of the model's forward: a column of one of these names would be given to it.

    Raises:
        HotspaError: what `check_collator` refuses.
    """
    check_collator(collator, args)
    if isinstance(collator, PackedBucketCollator) and vocab_size not in (None, collator.vocab_size):
        raise HotspaConfigError(
            f"the data collator has a vocabulary of {collator.vocab_size} ids and the model of {vocab_size}",
            fix=f"PackedBucketCollator(..., vocab_size={vocab_size})",
        )
    own = collator.rules if isinstance(collator, PackedBucketCollator) else RowRules()
    of_ids = type(collator) is DataCollatorForLanguageModeling
    tokenizer = getattr(collator, "tokenizer", None)
    pads = of_ids or type(collator) is DataCollatorForSeq2Seq
    return RowRules(
        labels_are_ids=of_ids or own.labels_are_ids,
        unlabelled_id=getattr(tokenizer, "pad_token_id", None) if of_ids else own.unlabelled_id,
        reads_mask=type(collator) is not DataCollatorWithFlattening and own.reads_mask,
        pads_left=own.pads_left or (pads and getattr(tokenizer, "padding_side", "right") == "left"),
        absolute_positions=own.absolute_positions or has_absolute_positions(config),
        refused=own.refused | (frozenset(signature) - {*TOKEN_COLUMNS, "label"}),
    )


def _check_own(collator: PackedBucketCollator, args: HotSPaTrainingArguments) -> None:
    if type(collator) is not PackedBucketCollator:
        raise _refused(
            collator, "", "a subclass of PackedBucketCollator may change tokens or labels", "pass no data_collator"
        )
    if args.hotspa_auto:
        raise HotspaConfigError(
            "the data collator has buckets, and hotspa_strategies=auto would choose others",
            fix="pass no data_collator, or give its buckets as hotspa_strategies",
        )
    for name, actual, expected in (
        ("buckets", collator.buckets, tuple(args.hotspa_buckets)),
        ("policy", collator.policy, args.hotspa_overlong),
        ("rank", collator.rank, args.process_index),
    ):
        if actual != expected:
            raise HotspaConfigError(
                f"the {name} of the data collator and of the arguments differ",
                where=f"{_text(actual)} and {_text(expected)}",
                why="rows would be arranged otherwise than one of them says",
                fix="give both the same hotspa_strategies and hotspa_overlong, or pass no data_collator",
            )


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _refused(collator: Any, how: str, why: str, fix: str) -> UnsupportedError:
    name = getattr(collator, "__name__", type(collator).__name__)
    return UnsupportedError(f"the data collator {name}{' ' if how else ''}{how} cannot be honoured", why=why, fix=fix)


class CollatorMixin(TrainerBase):
    """How `HotSPaTrainer` reads rows: by what its data collator and its model would make of their columns."""

    loss_columns: tuple[str, ...]

    def _row_rules(self) -> RowRules:
        self._set_signature_columns_if_needed()
        vocab_size = self.engine.description.shape.vocab_size if self.engine is not None else None
        rules = row_rules(self.data_collator, self.args, self.model.config, self._signature_columns, vocab_size)
        return replace(rules, columns=self.loss_columns)

    def _per_row(self) -> PerRow | None:
        """A data collator of the user's own, as it is run; None for those whose rules are known."""
        if _is_known(self.data_collator):
            return None
        self._set_signature_columns_if_needed()
        columns = self._signature_columns if self.args.remove_unused_columns else None
        return PerRow(self.data_collator, columns, self.loss_columns)
