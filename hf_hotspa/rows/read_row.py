"""Reads one row of a data set as tokens, as a user's data collator would.

Owns `read_row`, the only reader of rows, and its `RowRules`. A row has `input_ids` and may have

* ``labels`` (or ``label_ids``) of the same length, not yet shifted, -100 where a token does not count. Without labels
  every token except the first counts;
* ``attention_mask``: 1 for tokens, 0 for padding at the beginning or the end, which is cut off. Padding is never
  trained, nor is any token trained from it;
* ``position_ids`` that restart at 0, ``seq_lengths`` (``seq_lens``), ``cu_seqlens`` (``cu_seq_lens``,
  ``cu_seq_lens_q``) or ``seq_idx``, if the row is already packed: each document is then a separate sequence.

Columns that the stock Trainer would train differently, or that contradict each other, are errors. Values are not
checked against a vocabulary here. No torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_hotspa.errors import DataError, UnsupportedError
from hf_hotspa.rows.formats import SKIPPED


def number_columns(example: Mapping[str, Any], row: int, names: Sequence[str], length: int) -> dict[str, NDArray[Any]]:
    """Returns other columns of a row as int64 or float64: [length], a number for each token, or [], one number. Raises
    `DataError`: a column is missing, is not numeric, or does not have one number for each token."""
    columns = {}
    for name in names:
        where = f"dataset row {row}, column {name!r}"
        value = example.get(name)
        if value is None:
            raise DataError(
                f"the row has no {name!r}, only {sorted(map(str, example))}",
                where=where,
                why="a custom loss reads it (loss_columns)",
                fix="give every row of every data set a number, or a number for each token",
            )
        if hasattr(value, "detach"):
            value = value.detach().cpu().numpy()
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, OverflowError):
            array = np.asarray("")
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"the column {name!r} holds no numbers", where=where, fix="give it numbers, or lists of them"
            )
        if array.shape not in ((), (length,)):
            raise DataError(
                f"the column {name!r} has the shape {list(array.shape)}, and the row has {length} tokens",
                where=where,
                fix="give one number for the row, or one for each token of input_ids",
            )
        columns[name] = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    return columns


# -- rows -------------------------------------------------------------------------------------------------------------


IGNORED_LABEL = -100
LABEL_COLUMNS = ("labels", "label_ids")
LENGTH_COLUMNS = ("seq_lengths", "seq_lens")
BOUNDARY_COLUMNS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q")
CUT_COLUMNS = ("position_ids", *LENGTH_COLUMNS, *BOUNDARY_COLUMNS, "seq_idx")
_CUTS = frozenset(CUT_COLUMNS)
TOKEN_COLUMNS = ("input_ids", *LABEL_COLUMNS, "attention_mask", *CUT_COLUMNS)  # all columns that are read
_NO_CUTS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class RowRules:
    """How a user's data collator and the model treat rows; by default as without a collator.

    Args:
        labels_are_ids: Labels are the input ids, whatever the columns hold (`DataCollatorForLanguageModeling`).
        unlabelled_id: The id that is then never a label: the tokenizer's padding.
        reads_mask: False if the collator leaves `attention_mask` out (`DataCollatorWithFlattening`).
        pads_left: The collator would pad on the left.
        absolute_positions: Padding on the left would shift the model's positions.
        skips_empty: A row without `input_ids` (None) has no tokens, instead of being an error.
        borders: Lengths above which the model uses other rotary tables (`parallel.rope`).
        unsupported: Columns that the model would receive, and that packing cannot honour.
        columns: Other columns that a custom loss reads.
    """

    labels_are_ids: bool = False
    unlabelled_id: int | None = None
    reads_mask: bool = True
    pads_left: bool = False
    absolute_positions: bool = False
    skips_empty: bool = False
    borders: tuple[int, ...] = ()
    unsupported: frozenset[str] = frozenset()
    columns: tuple[str, ...] = ()

    def key(self) -> str:
        """Returns a text that is equal, in every process, for rules that give equal tokens."""
        plain = fields(self)[:-2]  # `unsupported` is a set, and tokens do not depend on `columns`
        return repr((*(getattr(self, column.name) for column in plain), sorted(self.unsupported)))


DEFAULT_RULES = RowRules()


@dataclass(frozen=True, eq=False)
class Row:
    """The tokens of one row, without padding."""

    ids: NDArray[np.int64]  # [length] int64
    labels: NDArray[np.int64] | None  # [length] int64, not shifted; None if every token counts
    cuts: NDArray[np.int64]  # where documents after the first one begin; each is a separate sequence
    first: int  # padding before the first token
    width: int  # tokens and padding of the row in the data set
    # columns of `RowRules.columns`: int64 or float64, [length] or, with one number, []
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    # [length] int64, in place of `labels`: already shifted, the target of each token; -100: uncounted
    targets: NDArray[np.int64] | None = None


def integer_array(value: Any, key: str, row: int, num_tokens: int | None = None) -> NDArray[np.int64]:
    """Converts a column of a row, a list, array or tensor of integers, to [length] int64. `num_tokens`: the required
    length; None for any. Raises `DataError`: it is not a flat sequence of integers, or its length differs; names key
    and row."""
    where = f"dataset row {row}, column {key!r}"
    fix = f"{key} must be a flat list, array or tensor of integers"
    if value is None:
        raise DataError(f"{key} is missing (None)", where=where, fix=SKIPPED if key == "input_ids" else fix)
    if hasattr(value, "detach"):  # a tensor, recognised without importing torch
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:  # such as ragged lists
        raise DataError(f"{key} is not an array of integers: {error}", where=where, fix=fix) from None
    if array.ndim != 1:
        raise DataError(f"{key} has {array.ndim} dimensions instead of 1", where=where, fix=fix)
    if array.size == 0:  # numpy gives an empty list a float dtype
        array = np.zeros(0, np.int64)
    if array.dtype.kind not in ("iub" if key == "attention_mask" else "iu"):
        raise DataError(f"{key} has elements of type {array.dtype} instead of integers", where=where, fix=fix)
    if num_tokens is not None and len(array) != num_tokens:
        raise unequal(row, num_tokens, len(array), key)
    return array.astype(np.int64, copy=False)


def read_row(example: object, row: int, rules: RowRules = DEFAULT_RULES) -> Row:
    """Reads the tokens of a row.

    Args:
        example: A mapping with the columns described above; others are ignored.

    Raises:
        DataError: the row is not a mapping, has no `input_ids`, or its columns are wrong or contradict each other.
        UnsupportedError: the stock Trainer would train it in a way that packing cannot reproduce.
    """
    if not isinstance(example, Mapping):
        raise DataError(
            f"a row is a {type(example).__name__} instead of a mapping",
            where=f"dataset row {row}",
            fix="rows must be dictionaries with 'input_ids' and, where part of the tokens counts, 'labels'",
        )
    if "input_ids" not in example:
        raise DataError(
            f"a row has no 'input_ids', only {sorted(map(str, example))}",
            where=f"dataset row {row}",
            fix="tokenise the dataset first: hf_hotspa.data.prepare.prepare_dataset",
        )
    if rules.skips_empty and example["input_ids"] is None:
        return Row(_NO_CUTS, None, _NO_CUTS, 0, 0)
    if not rules.unsupported.isdisjoint(example):
        refuse_columns((name for name in example if example[name] is not None), rules)
    ids = integer_array(example["input_ids"], "input_ids", row)
    labels = _labels(example, ids, row, rules)
    begin, stop = 0, len(ids)
    if example.get("attention_mask") is not None:
        mask = integer_array(example["attention_mask"], "attention_mask", row, len(ids))
        if (mask != 1).any():
            begin, stop = _unpadded(mask, labels, row, rules, positions=example.get("position_ids") is not None)
    if rules.borders and example.get("position_ids") is None:
        _check_borders(stop - begin, len(ids), rules.borders, row)
    cuts = _NO_CUTS
    if not _CUTS.isdisjoint(example) and any(example.get(name) is not None for name in CUT_COLUMNS):
        cuts = _cuts(example, len(ids), begin, stop, row)
    columns = number_columns(example, row, rules.columns, len(ids)) if rules.columns else {}
    for name, values in columns.items():
        columns[name] = values[begin:stop] if values.ndim else values
    return Row(ids[begin:stop], None if labels is None else labels[begin:stop], cuts, begin, len(ids), columns)


def _labels(example: Mapping[str, Any], ids: NDArray[np.int64], row: int, rules: RowRules) -> NDArray[np.int64] | None:
    if rules.labels_are_ids:
        return ids if rules.unlabelled_id is None else np.where(ids == rules.unlabelled_id, IGNORED_LABEL, ids)
    labels = None
    for name in LABEL_COLUMNS:
        if example.get(name) is not None:
            column = integer_array(example[name], name, row, len(ids))
            if labels is not None and not np.array_equal(labels, column):
                where = f"dataset row {row}"
                raise DataError(f"the columns {list(LABEL_COLUMNS)} differ", where=where, fix="remove one of them")
            labels = column
    return labels


def _check_borders(num_tokens: int, width: int, borders: tuple[int, ...], row: int) -> None:
    """Raises if padding takes a row over a length where the model changes its rotary tables."""
    border = next((border for border in borders if 0 < num_tokens <= border < width), None)
    if border is not None:
        raise UnsupportedError(
            f"a row of {num_tokens} tokens is padded to {width}, and rows of more than {border} "
            "(original_max_position_embeddings of rope_type longrope, max_position_embeddings of dynamic) have other factors",
            where=f"dataset row {row}",
            why="the stock Trainer would use the factors of the padded length, and here rows are not padded",
            fix="do not pad the rows of the data set",
        )


def refuse_columns(names: Iterator[str] | list[str], rules: RowRules) -> None:
    """Checks that no column that the model would receive is left unread. Raises `UnsupportedError`: naming the
    columns."""
    present = sorted(rules.unsupported.intersection(names))
    if present:
        raise UnsupportedError(
            f"the dataset has the columns {present}, which the forward of the model takes",
            why="the stock Trainer gives them to the model; here only tokens, labels, padding and positions are read",
            fix=f"remove them: dataset.remove_columns({present}); or make them in a data_collator",
        )


def refuse_images(dataset: object, who: str, instead: str) -> None:
    """Checks that a data set has no column of images. `who`: would read it; `instead`: what may. Raises `UnsupportedError`:
    naming the columns."""
    present = sorted({"image", "images"}.intersection(getattr(dataset, "column_names", None) or ()))
    if present:
        raise UnsupportedError(
            f"{who} and a dataset with the columns {present}",
            why="no test has compared its rows with images with TRL's",
            fix=f"use {instead}, or dataset.remove_columns({present})",
        )


def check_left_padding(rules: RowRules, lengths: NDArray[np.int64]) -> None:
    """Checks that a collator's padding on the left does not shift positions. `rules`: the rules; without `pads_left`
    everything passes. `lengths`: tokens of the rows. Rows of equal length are not padded. Raises `UnsupportedError`:
    the model has absolute positions."""
    lengths = lengths[lengths > 0]
    if rules.pads_left and rules.absolute_positions and len(lengths) and lengths.min() != lengths.max():
        raise UnsupportedError(
            "the data collator pads on the left",
            why="the positions of a row would begin after its padding, which depends on the other rows of its batch",
            fix="set tokenizer.padding_side = 'right'; here rows are packed, not padded",
        )


def unequal(row: int, num_ids: int, num_found: int, key: str = "labels") -> DataError:
    """Returns the error of a column without one value for each token."""
    if key in LABEL_COLUMNS:
        why = f"{key}[i] says whether input_ids[i] counts in the loss, so there must be as many"
        fix = (
            f"give {key} the length of input_ids, with {IGNORED_LABEL} where a token does not count; do not shift them"
        )
    else:
        why, fix = f"{key}[i] belongs to input_ids[i]", f"give {key} the length of input_ids, or remove the column"
    return DataError(
        f"a row has {num_ids} input_ids and {num_found} {key}", where=f"dataset row {row}", why=why, fix=fix
    )


def _unpadded(
    mask: NDArray[np.int64], labels: NDArray[np.int64] | None, row: int, rules: RowRules, positions: bool
) -> tuple[int, int]:
    """The range of tokens between the padding on both sides."""
    where = f"dataset row {row}, column 'attention_mask'"
    if mask.min() < 0 or mask.max() > 1:
        raise UnsupportedError(
            f"attention_mask holds {int(mask.max() if mask.max() > 1 else mask.min())}",
            where=where,
            why="only 0 (padding) and 1 (a token) are read",
            fix="mark the documents of a packed row with position_ids that restart at 0, or with seq_lengths",
        )
    if not rules.reads_mask:
        raise UnsupportedError(
            "rows are padded, and the data collator leaves their attention_mask out",
            where=where,
            why="DataCollatorWithFlattening gives padding to the model as if it were tokens",
            fix="do not pad the rows, or pass no data_collator",
        )
    tokens = np.flatnonzero(mask)
    begin, stop = (int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else (0, 0)
    if stop - begin != len(tokens):
        hole = begin + int(np.argmin(mask[begin:stop]))
        raise UnsupportedError(
            f"attention_mask is 0 at position {hole}, between tokens",
            where=where,
            why="a trained token that no other token sees cannot be packed",
            fix="mask padding at the beginning and the end only; to leave a token out of the loss set its label to -100",
        )
    if labels is not None:
        counted = (labels != IGNORED_LABEL) & (mask == 0)
        counted[:1] = False  # it has no context
        if counted.any():
            raise UnsupportedError(
                f"position {int(np.argmax(counted))} is padding (attention_mask is 0) and has a label",
                where=f"dataset row {row}",
                why="the stock Trainer would train the model to write padding",
                fix="set labels to -100 wherever attention_mask is 0",
            )
    if begin and rules.absolute_positions and not positions:
        raise UnsupportedError(
            f"the row begins with {begin} tokens of padding, and the model has absolute positions",
            where=f"dataset row {row}",
            why="the stock Trainer would count positions from the padding",
            fix="pad on the right, do not pad, or give position_ids that begin at 0 with the first token",
        )
    return begin, stop


def _cuts(example: Mapping[str, Any], num_tokens: int, begin: int, stop: int, row: int) -> NDArray[np.int64]:
    """The starts of a packed row's documents after the first one, counted from its first token."""
    by_key: dict[str, NDArray[np.int64]] = {}
    for key in CUT_COLUMNS:
        if example.get(key) is None:
            continue
        if key == "position_ids":
            by_key[key] = _restarts(integer_array(example[key], key, row, num_tokens)[begin:stop], row)
        elif key == "seq_idx":
            indices = integer_array(example[key], key, row, num_tokens)
            by_key[key] = np.flatnonzero(np.diff(indices[begin:stop])) + 1
        else:
            by_key[key] = _from_lengths(integer_array(example[key], key, row), key, num_tokens, begin, stop, row)
    (first, cuts), *others = by_key.items()
    for key, other in others:
        if not np.array_equal(cuts, other):
            raise DataError(
                f"{first} and {key} cut the row in different places",
                where=f"dataset row {row}",
                why="each document of a packed row is trained as a separate sequence",
                fix="make them agree, or remove one of the columns",
            )
    return cuts


def _restarts(positions: NDArray[np.int64], row: int) -> NDArray[np.int64]:
    is_first = positions == 0
    wrong = np.flatnonzero(~is_first & (np.diff(positions, prepend=-1) != 1))
    if len(wrong):
        at = int(wrong[0])
        raise DataError(
            f"position_ids holds {int(positions[at])} at token {at}"
            + (f", after {int(positions[at - 1])}" if at else ""),
            where=f"dataset row {row}, column 'position_ids'",
            why="positions must count up from 0, and restart at 0 where another document begins",
            fix="remove the column, or let each document count from 0",
        )
    return np.flatnonzero(is_first[1:]) + 1


def _from_lengths(
    values: NDArray[np.int64], key: str, num_tokens: int, begin: int, stop: int, row: int
) -> NDArray[np.int64]:
    where = f"dataset row {row}, column {key!r}"
    lengths = values
    if key in BOUNDARY_COLUMNS:
        if not len(values) or values[0] != 0:
            raise DataError(f"{key} does not begin with 0", where=where, fix="give [0, end of the first document, ...]")
        lengths = np.diff(values)
    if (lengths < 0).any():
        raise DataError(f"{key} says that a document has {int(lengths.min())} tokens", where=where)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    if total not in (num_tokens, stop - begin):
        raise DataError(
            f"the documents of a packed row have {total} tokens by {key}, and the row has {num_tokens}",
            where=where,
            fix=f"let {key} cover all of input_ids",
        )
    inside = ends - begin if total == num_tokens else ends
    cuts: NDArray[np.int64] = np.unique(inside[(inside > 0) & (inside < stop - begin)])
    return cuts
