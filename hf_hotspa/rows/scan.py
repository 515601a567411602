"""One scan over a dataset: how long each row is, and which of its tokens are labels.

Owns `scan_dataset`, which makes the `SequenceTable` of a map-style dataset and keeps it on disk for a `datasets.Dataset` (keyed by its fingerprint and by the rules that rows are read by,
written atomically, rebuilt when it cannot be read). What a row may look like is said in `rows.py`.
Imports `datasets` only inside functions, and no torch.
"""

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from hf_hotspa.errors import DataError, UnsupportedError
from hf_hotspa.rows.arrow import is_plain_arrow, scan_arrow, token_columns
from hf_hotspa.rows.features import DEFAULT_RULES, RowRules, read_row
from hf_hotspa.rows.table import SequenceTable, TableBuilder

_FORMAT = 2  # of the cache file; part of its name

logger = logging.getLogger(__name__)


def scan_dataset(
    dataset: Any,
    *,
    rules: RowRules = DEFAULT_RULES,
    cache_dir: str | os.PathLike[str] | None = None,
    disable_progress: bool = False,
) -> SequenceTable:
    """Lengths and labels of a map-style dataset, from the cache where there is one.

    Args:
        dataset: A `datasets.Dataset`, a list of dictionaries, or any dataset with `__len__` and `__getitem__`.
        rules: What rows are read by.
        cache_dir: Where tables are kept; the folder of the `datasets` cache when None. Only a `datasets.Dataset` is
            cached: nothing else has a fingerprint.
        disable_progress: No progress bar.

    Raises:
        UnsupportedError: the dataset is a stream (iterable, no length), or the stock Trainer would train a row in a way
            that packing cannot express.
        DataError: it is empty, or a row is not as `rows.py` describes.
    """
    rules = replace(rules, columns=())
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
        return _scan_rows(dataset, rules, disable_progress)
    path = cache_path(dataset, cache_dir, rules)
    table = _load(path, len(dataset))
    if table is None:
        table = scan_arrow(dataset, rules, disable_progress)
        _save(path, table)
    return table


def _is_stream(dataset: Any) -> bool:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return True
    # torch's IterableDataset inherits a __getitem__ that only raises, and may well have a length.
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(dataset, torch_data.IterableDataset)


def cache_path(dataset: Any, cache_dir: str | os.PathLike[str] | None = None, rules: RowRules = DEFAULT_RULES) -> Path:
    """The cache file of a `datasets.Dataset`."""
    if cache_dir is None:
        import datasets

        cache_dir = Path(datasets.config.HF_DATASETS_CACHE) / "hf_hotspa"
    # Columns that are hidden (`set_format`) leave the fingerprint as it is.
    text = repr((str(dataset._fingerprint), token_columns(dataset), rules.key()))
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Path(cache_dir) / f"lengths-{_FORMAT}-{key}.npz"


def _scan_rows(dataset: Any, rules: RowRules, disable_progress: bool) -> SequenceTable:
    """Row by row: any dataset with `__getitem__`."""
    builder = TableBuilder()
    for row in tqdm(range(len(dataset)), desc="Scanning lengths", unit="row", disable=disable_progress):
        builder.add_rows([read_row(dataset[row], row, rules)])
    return builder.table(rules)


def _load(path: Path, num_rows: int) -> SequenceTable | None:
    """The cached table, or None when there is none that can be used."""
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
    except Exception as error:  # a torn or foreign file, in whatever way it is broken, costs one scan and no more
        logger.warning("The cached scan %s cannot be used (%s); scanning again.", path, error)
        return None


def _save(path: Path, table: SequenceTable) -> None:
    """Written beside its place and renamed, so that no reader ever sees half a file; ranks may do it at once."""
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
    except OSError as error:  # a read-only or full cache costs time, not the training
        logger.warning("The scanned lengths could not be kept in %s (%s).", path, error)
