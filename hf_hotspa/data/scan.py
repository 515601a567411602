"""One scan over a dataset: how long each row is, and which of its tokens are labels.

Owns `SequenceTable`, the plain numbers that all planning works on, and `scan_dataset`, which makes it from a map-style
dataset and keeps it on disk for a `datasets.Dataset` (keyed by its fingerprint, written atomically, rebuilt when it
cannot be read). It also owns the rules for what a row may look like (`integer_array`, `row_arrays`), which the collator
applies again when it reads rows.

A row has `input_ids` and may have `labels` of the same length (not yet shifted, -100 where a token does not count).
Without `labels` every token but the first counts. Values are not checked against a vocabulary here: the scan of a
`datasets.Dataset` without labels reads lengths only. Imports `datasets` only inside
functions, and no torch.
"""

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from hf_hotspa.errors import DataError, UnsupportedError

IGNORED_LABEL = -100
_FORMAT = 1  # of the cache file; part of its name
_ROWS_PER_READ = 1000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """Lengths and label counts of all rows of a dataset (N rows).

    Args:
        lengths: [N] int64, tokens of each row.
        label_counts: [N] int64, label tokens of each whole row (the first token never counts).
        mask_offsets: [N] int64, the bit where a row's label mask begins in `mask_bits`; -1 where all tokens are labels.
        mask_bits: [B] uint8, one bit for each token of the rows that mask some (`np.packbits` order), 1 = label. Rows
            that mask nothing take no bit, so plain text costs nothing and a billion masked tokens cost 125 MB.
    """

    lengths: NDArray[np.int64]
    label_counts: NDArray[np.int64]
    mask_offsets: NDArray[np.int64]
    mask_bits: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole dataset."""
        return int(self.lengths.sum())

    def num_labels(self, row: int, start: int, stop: int) -> int:
        """Label tokens of the slice ``[start, stop)`` trained on its own: ``labels[start + 1:stop] != -100``."""
        first = start + 1
        if stop <= first:
            return 0
        offset = int(self.mask_offsets[row])
        if offset < 0:
            return stop - first
        low, high = offset + first, offset + stop
        bits = np.unpackbits(self.mask_bits[low // 8 : (high + 7) // 8])
        return int(bits[low % 8 : low % 8 + high - low].sum())

    @classmethod
    def from_lengths(cls, lengths: Any) -> "SequenceTable":
        """The table of rows that train on every token but the first."""
        array = np.asarray(lengths, dtype=np.int64)
        return cls(array, np.maximum(array - 1, 0), np.full(len(array), -1, np.int64), np.zeros(0, np.uint8))


class _Builder:
    """Collects rows chunk by chunk. A chunk's masks begin on a byte of their own, so that chunks simply concatenate."""

    def __init__(self) -> None:
        self._lengths: list[NDArray[np.int64]] = []
        self._counts: list[NDArray[np.int64]] = []
        self._offsets: list[NDArray[np.int64]] = []
        self._bits: list[NDArray[np.uint8]] = []
        self._num_bits = 0

    def add(self, lengths: NDArray[np.int64], is_label: NDArray[np.bool_] | None) -> None:
        """Adds rows; `is_label` has one entry for each of their tokens, None when all count."""
        if is_label is None:
            counts, offsets = np.maximum(lengths - 1, 0), np.full(len(lengths), -1, np.int64)
        else:
            ends = np.cumsum(lengths)
            starts = ends - lengths
            is_label = is_label.copy()
            is_label[starts[lengths > 0]] = True  # counts for nothing, so it should not make a row a masked one
            sums = np.concatenate([[0], np.cumsum(is_label)])
            counts = np.maximum(sums[ends] - sums[starts] - 1, 0)
            masked = counts < lengths - 1
            held = np.where(masked, lengths, 0)
            offsets = np.where(masked, self._num_bits + np.cumsum(held) - held, -1)
            bits = np.packbits(is_label[np.repeat(masked, lengths)])
            self._bits.append(bits)
            self._num_bits += 8 * len(bits)
        self._lengths.append(lengths)
        self._counts.append(counts)
        self._offsets.append(offsets)

    def table(self) -> SequenceTable:
        """The rows added so far."""
        bits = np.concatenate(self._bits) if self._bits else np.zeros(0, np.uint8)
        return SequenceTable(
            np.concatenate(self._lengths).astype(np.int64),
            np.concatenate(self._counts).astype(np.int64),
            np.concatenate(self._offsets).astype(np.int64),
            bits,
        )


def integer_array(value: Any, key: str, row: int) -> NDArray[np.int64]:
    """One column of one row, a list, array or tensor of integers, as [length] int64.

    Raises:
        DataError: not a flat sequence of integers; names key and row.
    """
    where = f"dataset row {row}, column {key!r}"
    fix = f"{key} must be a flat list, array or tensor of integers"
    if value is None:
        raise DataError(f"{key} is missing (None)", where=where, fix=fix)
    if hasattr(value, "detach"):  # a tensor, recognised without importing torch
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:  # ragged nested lists, among others
        raise DataError(f"{key} is no array of integers: {error}", where=where, fix=fix) from None
    if array.ndim != 1:
        raise DataError(f"{key} has {array.ndim} dimensions instead of 1", where=where, fix=fix)
    if array.size == 0:  # an empty list has no dtype of its own
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise DataError(f"{key} has elements of type {array.dtype} instead of integers", where=where, fix=fix)
    return array.astype(np.int64, copy=False)


def row_arrays(example: Any, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """`input_ids` and, where the row has them, `labels`; both [length] int64.

    Raises:
        DataError: the row is no mapping, has no `input_ids`, or columns of different lengths or wrong types.
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
    ids = integer_array(example["input_ids"], "input_ids", row)
    if "labels" not in example or example["labels"] is None:
        return ids, None
    labels = integer_array(example["labels"], "labels", row)
    if len(labels) != len(ids):
        raise _unequal(row, len(ids), len(labels))
    return ids, labels


def scan_dataset(
    dataset: Any, *, cache_dir: str | os.PathLike[str] | None = None, disable_progress: bool = False
) -> SequenceTable:
    """Lengths and labels of a map-style dataset, from the cache where there is one.

    Args:
        dataset: A `datasets.Dataset`, a list of dictionaries, or any dataset with `__len__` and `__getitem__`.
        cache_dir: Where tables are kept; the folder of the `datasets` cache when None. Only a `datasets.Dataset` is
            cached: nothing else has a fingerprint.
        disable_progress: No progress bar.

    Raises:
        UnsupportedError: the dataset is a stream (iterable, no length).
        DataError: it is empty, or a row is not as described above.
    """
    if isinstance(dataset, Mapping):
        raise DataError(
            f"a dictionary of splits is no dataset; it holds {sorted(map(str, dataset))}", fix="pass one of the splits"
        )
    if _is_stream(dataset):
        raise UnsupportedError(
            f"a stream cannot be scanned: {type(dataset).__name__} has no length or no random access",
            why="the lengths of all rows are needed, as hotspa_strategies=auto does, and a stream shows them one by one",
            fix="give the strategies (hotspa_strategies), which trains streams, or load the dataset without streaming",
        )
    if len(dataset) == 0:
        raise DataError("the dataset is empty", fix="check the split and the filters that were applied to it")
    if not is_plain_arrow(dataset):
        return _scan_rows(dataset, disable_progress)
    path = cache_path(dataset, cache_dir)
    table = _load(path, len(dataset))
    if table is None:
        table = _scan_arrow(dataset, disable_progress)
        _save(path, table)
    return table


def _is_stream(dataset: Any) -> bool:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return True
    # torch's IterableDataset inherits a __getitem__ that only raises, and may well have a length.
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(dataset, torch_data.IterableDataset)


def is_plain_arrow(dataset: Any) -> bool:
    """Whether this is a `datasets.Dataset` whose rows are what its table holds (no transform on reading)."""
    if "datasets" not in sys.modules:  # then nobody can have made one
        return False
    from datasets import Dataset

    return isinstance(dataset, Dataset) and dataset.format["type"] != "custom"


def cache_path(dataset: Any, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache file of a `datasets.Dataset`."""
    if cache_dir is None:
        import datasets

        cache_dir = Path(datasets.config.HF_DATASETS_CACHE) / "hf_hotspa"
    key = hashlib.sha256(str(dataset._fingerprint).encode()).hexdigest()[:32]
    return Path(cache_dir) / f"lengths-{_FORMAT}-{key}.npz"


def _scan_rows(dataset: Any, disable_progress: bool) -> SequenceTable:
    """Row by row: any dataset with `__getitem__`."""
    builder = _Builder()
    for row in tqdm(range(len(dataset)), desc="Scanning lengths", unit="row", disable=disable_progress):
        ids, labels = row_arrays(dataset[row], row)
        builder.add(np.array([len(ids)], np.int64), None if labels is None else labels != IGNORED_LABEL)
    return builder.table()


def _scan_arrow(dataset: Any, disable_progress: bool) -> SequenceTable:
    """By columns, a thousand rows at a time; rows themselves are never made."""
    names = token_columns(dataset)
    if "input_ids" not in names:
        raise DataError(
            f"the dataset has no column 'input_ids', only {dataset.format['columns']}",
            fix="tokenise it first: hf_hotspa.data.prepare.prepare_dataset",
        )
    builder = _Builder()
    with tqdm(total=len(dataset), desc="Scanning lengths", unit="row", disable=disable_progress) as progress:
        for first, columns in _arrow_batches(dataset):
            ids = columns["input_ids"]
            lengths = _list_lengths(ids, "input_ids", first)
            is_label = None
            labels = columns.get("labels")
            if labels is not None and labels.null_count < len(labels):
                missing = np.asarray(labels.is_null())
                label_lengths = np.where(missing, lengths, _list_lengths(labels, "labels", first, nulls_allowed=True))
                unequal = np.flatnonzero(label_lengths != lengths)
                if len(unequal):
                    at = int(unequal[0])
                    raise _unequal(first + at, int(lengths[at]), int(label_lengths[at]))
                # Rows without labels (null) train on every token; flatten() leaves them out.
                is_label = np.ones(int(lengths.sum()), np.bool_)
                is_label[np.repeat(~missing, lengths)] = np.asarray(labels.flatten()) != IGNORED_LABEL
            builder.add(lengths, is_label)
            progress.update(len(lengths))
    return builder.table()


def token_columns(dataset: Any) -> list[str]:
    """Which of `input_ids` and `labels` the rows of a `datasets.Dataset` show (`set_format` can hide columns)."""
    return [name for name in ("input_ids", "labels") if name in dataset.format["columns"]]


def arrow_view(dataset: Any) -> Any:
    """A `datasets.Dataset` reduced to its token columns and read as arrow tables."""
    return dataset.select_columns(token_columns(dataset)).with_format("arrow")


def split_lists(array: Any) -> list[NDArray[Any] | None]:
    """The lists of an arrow column as arrays; None for null."""
    if array.null_count == len(array):
        return [None] * len(array)
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0))
    parts = np.split(np.asarray(array.flatten()), np.cumsum(lengths)[:-1])
    return [part if there else None for part, there in zip(parts, np.asarray(array.is_valid()), strict=True)]


def _arrow_batches(dataset: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """(first row, {token column: arrow array}) for each chunk of rows."""
    first = 0
    for table in arrow_view(dataset).iter(batch_size=_ROWS_PER_READ):
        yield first, {name: table.column(name).combine_chunks() for name in table.column_names}
        first += table.num_rows


def _list_lengths(array: Any, key: str, first: int, nulls_allowed: bool = False) -> NDArray[np.int64]:
    """Lengths of the lists of an arrow column (0 for null), after a look at its type and for missing values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if array.null_count and not nulls_allowed:
        row = first + int(np.flatnonzero(np.asarray(array.is_null()))[0])
        raise DataError(f"{key} is missing (None)", where=f"dataset row {row}", fix="remove the row")
    kind = array.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not (is_list and (pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type))):
        raise DataError(
            f"column {key!r} is of type {kind} instead of a list of integers",
            where=f"dataset rows {first} to {first + len(array) - 1}",
            fix="tokenise the dataset, or cast the column to a list of integers",
        )
    if array.flatten().null_count:
        raise DataError(f"{key} holds missing values (None)", where=f"dataset rows {first} to {first + len(array) - 1}")
    return np.asarray(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)


def _unequal(row: int, num_ids: int, num_labels: int) -> DataError:
    return DataError(
        f"a row has {num_ids} input_ids and {num_labels} labels",
        where=f"dataset row {row}",
        why="labels[i] says whether input_ids[i] counts in the loss, so there must be as many",
        fix="give labels the length of input_ids, with -100 where a token does not count; do not shift them",
    )


def _load(path: Path, num_rows: int) -> SequenceTable | None:
    """The cached table, or None when there is none that can be used."""
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as data:
            lengths, counts, offsets, bits = (data[k] for k in ("lengths", "label_counts", "mask_offsets", "mask_bits"))
        dtypes = [a.dtype.str for a in (lengths, counts, offsets, bits)]
        if dtypes != ["<i8", "<i8", "<i8", "|u1"] or not len(lengths) == len(counts) == len(offsets) == num_rows:
            raise ValueError(f"unexpected contents: {dtypes}, {len(lengths)} rows instead of {num_rows}")
        return SequenceTable(lengths, counts, offsets, bits)
    except Exception as error:  # a torn or foreign file, in whatever way it is broken, costs one scan and no more
        logger.warning("The cached scan %s cannot be used (%s); scanning again.", path, error)
        return None


def _save(path: Path, table: SequenceTable) -> None:
    """Written beside its place and renamed, so that no reader ever sees half a file; ranks may do it at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as file:
            try:
                np.savez(
                    file,
                    lengths=table.lengths,
                    label_counts=table.label_counts,
                    mask_offsets=table.mask_offsets,
                    mask_bits=table.mask_bits,
                )
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:  # a read-only or full cache costs time, not the training
        logger.warning("The scanned lengths could not be kept in %s (%s).", path, error)
