"""Scans a dataset for the length of each row and for the tokens that are labels.

Owns `scan_dataset`, which makes the `SequenceTable` of a map-style dataset. For a `datasets.Dataset` it reads columns:
without padding and documents no rows are built, and without labels only lengths are read. It caches the table on disk,
keyed by fingerprint and row rules, written atomically, rebuilt when unreadable. `features.py` defines the format of a
row. Imports `datasets` and `pyarrow` only inside functions; no torch.
"""

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from hf_hotspa.errors import DataError, UnsupportedError
from hf_hotspa.rows.formats import SKIPPED
from hf_hotspa.rows.read_row import (
    DEFAULT_RULES,
    IGNORED_LABEL,
    TOKEN_COLUMNS,
    RowRules,
    read_row,
    refuse_columns,
    unequal,
)
from hf_hotspa.rows.table import SequenceTable, TableBuilder

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]
    from datasets import Dataset

logger = logging.getLogger(__name__)


_ROWS_PER_READ = 1000


def is_plain_arrow(dataset: object) -> bool:
    """Whether this is a `datasets.Dataset` without a transform on reading."""
    if "datasets" not in sys.modules:  # then no such object can exist
        return False
    from datasets import Dataset

    return isinstance(dataset, Dataset) and dataset.format["type"] != "custom"


def scan_arrow(dataset: "Dataset", rules: RowRules, disable_progress: bool) -> SequenceTable:
    """Makes the table of a `datasets.Dataset` by columns, a thousand rows at a time. Raises `DataError`: there is no
    column `input_ids`, or a row is not as `features.py` describes. Raises `UnsupportedError`: the stock Trainer would
    train a row in a way that packing cannot reproduce."""
    names = dataset.format["columns"]
    if "input_ids" not in names:
        raise DataError(
            f"the dataset has no column 'input_ids', only {names}",
            fix="tokenise it first: hf_hotspa.data.prepare.prepare_dataset",
        )
    refuse_columns(names, rules)
    builder, first = TableBuilder(), 0
    view = dataset.select_columns(token_columns(dataset)).with_format("arrow")
    with tqdm(total=len(dataset), desc="Scanning lengths", unit="row", disable=disable_progress) as progress:
        for batch in view.iter(batch_size=_ROWS_PER_READ):
            columns = {name: batch.column(name).combine_chunks() for name in batch.column_names}
            ids = columns["input_ids"]
            lengths = _list_lengths(ids, "input_ids", first, nulls_allowed=rules.skips_empty)
            if _one_document_a_row(columns, lengths):
                builder.add(lengths, _labels_of_columns(columns, lengths, first, rules))
            else:
                rows = _rows_of_columns(columns, len(lengths))
                builder.add_rows(read_row(row, number, rules) for number, row in enumerate(rows, first))
            first += len(lengths)
            progress.update(len(lengths))
    return builder.table(rules)


def _one_document_a_row(columns: Mapping[str, Any], lengths: NDArray[np.int64]) -> bool:
    """Whether `input_ids` and `labels` are enough: no row is padded or holds several documents."""
    total = int(lengths.sum())
    expected = {
        "attention_mask": lambda: np.ones(total, np.int64),
        "position_ids": lambda: np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths),
    }
    for name, column in columns.items():
        if name in ("input_ids", "labels") or column.null_count == len(column):
            continue
        if name not in expected or column.null_count or not _is_integer_list(column.type, booleans=True):
            return False
        values = np.asarray(column.flatten())
        if not np.array_equal(_list_lengths_of(column), lengths) or not np.array_equal(values, expected[name]()):
            return False
    return True


def _labels_of_columns(
    columns: Mapping[str, Any], lengths: NDArray[np.int64], first: int, rules: RowRules
) -> NDArray[np.bool_] | None:
    """[tokens] whether each is a label; None when all are."""
    if rules.labels_are_ids:
        if rules.unlabelled_id is None:
            return np.ones(int(lengths.sum()), np.bool_)
        return np.asarray(np.asarray(columns["input_ids"].flatten()) != rules.unlabelled_id)
    labels = columns.get("labels")
    if labels is None or labels.null_count == len(labels):
        return None
    missing = np.asarray(labels.is_null())
    label_lengths = np.where(missing, lengths, _list_lengths(labels, "labels", first, nulls_allowed=True))
    differ = np.flatnonzero(label_lengths != lengths)
    if len(differ):
        at = int(differ[0])
        raise unequal(first + at, int(lengths[at]), int(label_lengths[at]))
    # Rows without labels (null) train on every token; `flatten` skips them.
    is_label = np.ones(int(lengths.sum()), np.bool_)
    is_label[np.repeat(~missing, lengths)] = np.asarray(labels.flatten()) != IGNORED_LABEL
    return is_label


def token_columns(dataset: "Dataset") -> list[str]:
    """Returns the visible token columns of a `datasets.Dataset` (`set_format` can hide columns)."""
    return [name for name in TOKEN_COLUMNS if name in dataset.format["columns"]]


def _rows_of_columns(columns: Mapping[str, Any], num_rows: int) -> list[dict[str, Any]]:
    values = dict[str, list[Any]]()
    for name, column in columns.items():
        if not _is_list(column.type) or column.null_count == len(column):
            values[name] = column.to_pylist()
        else:
            lists = np.split(np.asarray(column.flatten()), np.cumsum(_list_lengths_of(column))[:-1])
            there = np.asarray(column.is_valid())
            values[name] = [own if is_there else None for own, is_there in zip(lists, there, strict=True)]
    return [{name: column[row] for name, column in values.items()} for row in range(num_rows)]


def _list_lengths(array: "pa.Array", key: str, first: int, nulls_allowed: bool = False) -> NDArray[np.int64]:
    """Checks an arrow column's type and missing values; returns its list lengths (0 for null)."""
    if array.null_count and not nulls_allowed:
        row = first + int(np.flatnonzero(np.asarray(array.is_null()))[0])
        raise DataError(f"{key} is missing (None)", where=f"dataset row {row}", fix=SKIPPED)
    if not _is_integer_list(array.type):
        raise DataError(
            f"column {key!r} is of type {array.type} instead of a list of integers",
            where=f"dataset rows {first} to {first + len(array) - 1}",
            fix="tokenise the dataset, or cast the column to a list of integers",
        )
    if array.flatten().null_count:
        raise DataError(f"{key} holds missing values (None)", where=f"dataset rows {first} to {first + len(array) - 1}")
    return _list_lengths_of(array)


def _list_lengths_of(array: "pa.Array") -> NDArray[np.int64]:
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    return np.asarray(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_integer_list(kind: "pa.DataType", booleans: bool = False) -> bool:
    import pyarrow as pa

    return _is_list(kind) and (
        pa.types.is_integer(kind.value_type)
        or pa.types.is_null(kind.value_type)
        or (booleans and pa.types.is_boolean(kind.value_type))
    )


_FORMAT = 2  # of the cache file; part of its name


def scan_dataset(
    dataset: Any,
    *,
    rules: RowRules = DEFAULT_RULES,
    cache_dir: str | os.PathLike[str] | None = None,
    disable_progress: bool = False,
) -> SequenceTable:
    """Returns lengths and labels of a map-style dataset, from the cache if possible.

    Args:
        dataset: A `datasets.Dataset`, a list of dictionaries, or any dataset with `__len__` and `__getitem__`.
        cache_dir: By default the folder of the `datasets` cache. Only a `datasets.Dataset` is cached: others have no
            fingerprint.

    Raises:
        UnsupportedError: the dataset is a stream, or the stock Trainer would train a row in a way that packing cannot
            reproduce.
        DataError: it is empty, or a row is not as `features.py` describes.
    """
    rules = replace(rules, columns=())
    if isinstance(dataset, Mapping):
        raise DataError(
            f"a dictionary of splits is not a dataset; it holds {sorted(map(str, dataset))}",
            fix="pass one of the splits",
        )
    if _is_stream(dataset):
        raise UnsupportedError(
            f"a stream cannot be scanned: {type(dataset).__name__} has no length or no random access",
            why="the lengths of all rows are needed, as by hotspa_strategies=auto, and a stream gives them one by one",
            fix="give strategies (hotspa_strategies), which works for streams, or load the dataset without streaming",
        )
    if len(dataset) == 0:
        raise DataError("the dataset is empty", fix="check the split and the filters that were applied to it")
    if not is_plain_arrow(dataset):
        builder = TableBuilder()
        for row in tqdm(range(len(dataset)), desc="Scanning lengths", unit="row", disable=disable_progress):
            builder.add_rows([read_row(dataset[row], row, rules)])
        return builder.table(rules)
    path = cache_path(dataset, cache_dir, rules)
    table = _load(path, len(dataset))
    if table is None:
        table = scan_arrow(dataset, rules, disable_progress)
        _save(path, table)
    return table


def _is_stream(dataset: object) -> bool:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return True
    # torch's IterableDataset inherits a __getitem__ that only raises, and may have a length.
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(dataset, torch_data.IterableDataset)


def cache_path(
    dataset: "Dataset", cache_dir: str | os.PathLike[str] | None = None, rules: RowRules = DEFAULT_RULES
) -> Path:
    if cache_dir is None:
        import datasets

        cache_dir = Path(datasets.config.HF_DATASETS_CACHE) / "hf_hotspa"
    # Hiding columns (`set_format`) does not change the fingerprint.
    text = repr((str(dataset._fingerprint), token_columns(dataset), rules.key()))
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Path(cache_dir) / f"lengths-{_FORMAT}-{key}.npz"


def _load(path: Path, num_rows: int) -> SequenceTable | None:
    """The cached table, or None if it is missing or unusable."""
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as data:
            table = SequenceTable(**{column.name: data[column.name] for column in fields(SequenceTable)})
        dtypes = [getattr(table, column.name).dtype.str for column in fields(table)]
        sizes = {len(table.lengths), len(table.label_counts), len(table.mask_offsets)}
        sizes |= {len(table.cut_ends)} if len(table.cuts) else set()
        if dtypes != ["<i8", "<i8", "<i8", "|u1", "<i8", "<i8"] or sizes != {num_rows}:
            raise ValueError(f"unexpected contents: {dtypes}, {sorted(sizes)} rows instead of {num_rows}")
        return table
    except Exception as error:  # a broken or foreign file costs only a new scan
        logger.warning("The cached scan %s cannot be used (%s); scanning again.", path, error)
        return None


def _save(path: Path, table: SequenceTable) -> None:
    """Writes atomically, so that no reader sees half a file; ranks may do so at the same time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as file:
            try:
                np.savez(file, **{column.name: getattr(table, column.name) for column in fields(table)})
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:  # a read-only or full cache costs only time
        logger.warning("The scanned lengths could not be kept in %s (%s).", path, error)
