"""From the data set that a user passes to the Trainer to rows of tokens and their lengths.

Owns the decision between map-style data sets, which are tokenised and scanned as a whole, and streams, which are not.
"""

import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from hf_hotspa.data.prepare import check_masks, prepare_dataset, tokenize_rows
from hf_hotspa.errors import DataError, HotspaError, UnsupportedError
from hf_hotspa.rows.features import LABEL_COLUMNS, RowRules
from hf_hotspa.rows.scan import scan_dataset
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.trainer.per_row import CollatedRows, PerRow


def as_it_is(item: dict[str, Any]) -> dict[str, Any]:
    """The collate function of data sets whose items are collated already. Module-level: workers unpickle it."""
    return item


def unreadable(error: Exception, source: str, where: str) -> HotspaError:
    """Whatever a data set raises, as one of our own errors: it travels to all ranks."""
    if isinstance(error, HotspaError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    return DataError(
        f"{source} failed to give rows: {type(error).__name__}: {error}",
        where=f"{where}, at {last.filename}:{last.lineno}",
        fix=f"read {source} without the trainer to see the whole traceback",
    )


def is_stream(dataset: Any) -> bool:
    """Whether rows can only be read one after the other: no random access, whether or not there is a length."""
    if isinstance(dataset, IterableDataset):  # inherits a __getitem__ that only raises
        return True
    return not hasattr(dataset, "__getitem__") and hasattr(dataset, "__iter__")


def scanned(
    dataset: Any, processing_class: Any, args: TrainingArguments, rules: RowRules, collate: PerRow | None
) -> tuple[Any, SequenceTable]:
    """The data set with token ids, and its scan. One process scans, the others read its cache: a collective call.

    Args:
        processing_class: The tokenizer, for rows without token ids.

    Raises:
        HotspaError: the data set cannot be used as it is.
    """
    with args.main_process_first(desc="scan of the sequence lengths"):
        if collate is not None:
            dataset = CollatedRows(dataset, collate, rules)
        columns = getattr(dataset, "column_names", None)
        if columns and processing_class is not None and "input_ids" not in columns:
            dataset = prepare_dataset(dataset, processing_class, keep=rules.columns)
            _check_labels_are_kept(dataset.column_names, rules)
        check_masks(getattr(dataset, "column_names", None) or ())
        quiet = args.disable_tqdm or args.process_index != 0
        return dataset, scan_dataset(dataset, rules=rules, disable_progress=quiet)


def tokenized_rows(examples: Sequence[Any], tokenizer: Any, rules: RowRules) -> list[Any]:
    """Some rows of a stream, tokenised where they have no token ids.

    Raises:
        HotspaError: they cannot be used as they are.
    """
    had_ids = bool(examples) and "input_ids" in examples[0]
    rows = tokenize_rows(examples, tokenizer)
    if rows and not had_ids:
        _check_labels_are_kept(rows[0], rules)
        kept = [{name: example[name] for name in rules.columns if name in example} for example in examples]
        rows = [{**row, **own} for row, own in zip(rows, kept, strict=True)]
    return rows


def _check_labels_are_kept(names: Iterable[str], rules: RowRules) -> None:
    """The stock Trainer does not tokenise, so that nothing says which of two label maskings of ours and the user's counts."""
    if rules.labels_are_ids and set(LABEL_COLUMNS) & set(names):
        raise UnsupportedError(
            "DataCollatorForLanguageModeling, and a dataset of conversations or completions",
            why="the collator makes every token a label, also those of prompts, which carry none here",
            fix="pass no data_collator, or tokenise the dataset yourself",
        )
