"""A data collator of the user's own, run on one row at a time.

What such a collator gives for a row alone is what it gives for that row in any batch, padding apart, or it cannot be honoured:
rows of a batch are trained in packs here. Owns `PerRow`, which runs it, and the proof: before the first step up to a thousand
rows are collated each alone and in pairs, and must come out the same. Collators that draw random numbers, join rows, or cut
them to the length of others are refused by this; of a stream, the rows of each mini-batch are compared.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from hf_hotspa.errors import DataError, HotspaError, UnsupportedError
from hf_hotspa.rows.features import IGNORED_LABEL, TOKEN_COLUMNS, Row, RowRules, read_row

_PAIRS = 1000
_READ = frozenset(TOKEN_COLUMNS)


class PerRow:
    """Runs a collator on single rows.

    Args:
        columns: The columns that it is given; None for all.
        loss_columns: Columns that a loss of the user's own reads: of the collator, or else of the data set.
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], Any],
        columns: Collection[str] | None,
        loss_columns: Collection[str] = (),
    ) -> None:
        self._loss_columns = tuple(loss_columns)
        self.name = getattr(collator, "__name__", type(collator).__name__)
        self._collator, self._columns = collator, None if columns is None else frozenset(columns)

    def __call__(self, example: Any, row: int) -> dict[str, Any]:
        """The row as the collator makes it.

        Raises:
            HotspaError: it fails, or gives something else than tokens and labels.
        """
        own = {name: example[name] for name in self._loss_columns if name in example}
        return {**own, **self._collated([example], row)[0]}

    def check(self, examples: Mapping[int, Any], rules: RowRules) -> None:
        """Compares neighbouring rows collated together with each alone.

        Args:
            examples: Rows by number, as the data set gives them.

        Raises:
            UnsupportedError: a row comes out otherwise beside another.
            HotspaError: the collator fails.
        """
        rules = replace(rules, columns=())
        alone = {row: read_row(self(example, row), row, rules) for row, example in examples.items()}
        for pair in pairwise(examples) if len(examples) > 1 else [(row, row) for row in examples]:
            for row, collated in zip(pair, self._collated([examples[row] for row in pair], pair[0]), strict=True):
                if not _same(collated, alone[row], row, rules):
                    raise self._refused(
                        f"rows {pair[0]} and {pair[1]} come out otherwise together than alone",
                        row,
                        "rows are trained in packs with others, so each must come out the same in every batch",
                    )

    def _collated(self, examples: list[Any], row: int) -> list[dict[str, Any]]:
        if all(isinstance(example, Mapping) for example in examples):  # copies: collators take columns out
            kept = self._columns
            examples = [{key: e[key] for key in e if kept is None or key in kept} for e in examples]
        try:
            batch = dict(self._collator(examples))
            given = {key: value for key, value in batch.items() if value is not None}
            columns = {key: value if hasattr(value, "shape") else np.asarray(value) for key, value in given.items()}
        except HotspaError:
            raise
        except Exception as error:  # collators raise what they like
            raise DataError(
                f"the data collator {self.name} failed: {type(error).__name__}: {error}", where=f"dataset row {row}"
            ) from error
        unread = sorted(given.keys() - _READ - {*self._loss_columns})
        if unread:
            raise self._refused(
                f"it gives {unread}", row, "the stock Trainer hands them to the model; here they go unread"
            )
        if not {"input_ids", "labels"} <= given.keys():
            raise self._refused(f"it gives {sorted(given)}", row, "a language model is trained on input_ids and labels")
        for key, value in columns.items():
            flat = len(value.shape) != 2 and key in _READ
            if flat or not len(value.shape) or value.shape[0] != len(examples):
                raise self._refused(
                    f"{key} has the shape {list(value.shape)} for {len(examples)} rows",
                    row,
                    "each row must stay one row",
                )
        return [{key: value[index] for key, value in columns.items()} for index in range(len(examples))]

    def _refused(self, what: str, row: int, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"the data collator {self.name} cannot be honoured: {what}",
            where=f"dataset row {row}",
            why=why,
            fix="do its work in the dataset (columns input_ids and labels) and pass no data_collator",
        )


def _same(collated: Mapping[str, Any], own: Row, row: int, rules: RowRules) -> bool:
    """Whether a row of a batch is the same as alone. Padding at the end that has no mask and no label changes nothing."""
    there = read_row(collated, row, rules)
    length = len(own.ids)
    if len(there.ids) < length or not np.array_equal(there.ids[:length], own.ids):
        return False
    labels = there.labels
    assert labels is not None  # or it would have been refused
    if not np.array_equal(labels[:length], own.labels) or not np.array_equal(there.cuts, own.cuts):  # type: ignore[arg-type]
        return False
    return bool((labels[length:] == IGNORED_LABEL).all())


class CollatedRows(Dataset[Any]):
    """A map-style data set whose rows are what a collator makes of them.

    Raises:
        HotspaError: the collator cannot be run row by row.
    """

    def __init__(self, dataset: Any, collate: PerRow, rules: RowRules) -> None:
        self._dataset, self._collate = dataset, collate
        rows = dict.fromkeys(np.linspace(0, len(dataset) - 1, min(len(dataset), _PAIRS)).astype(int).tolist())
        collate.check({row: dataset[row] for row in rows}, rules)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._collate(self._dataset[row], row)
