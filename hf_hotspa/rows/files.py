"""Data files of the user's: what the header of a csv says, and which file is broken, where and why.

Imports pandas only inside functions, and no torch.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_hotspa.errors import DataError

_CHECK = "check the split and the file: one JSON object a line, and the same columns in all rows"


def csv_columns(files: Sequence[Path]) -> list[str]:
    """The columns of csv files, which all have the same.

    Raises:
        DataError: they differ, or rows have more cells than the header.
    """
    import pandas  # type: ignore[import-untyped]

    first: list[str] = []
    for path in files:
        # a reader takes cells that the header has no name for as names of rows, and leaves them out
        head = pandas.read_csv(path, nrows=1, dtype=str, na_filter=False)
        if not isinstance(head.index, pandas.RangeIndex):
            raise DataError(
                f"{path}: a row has more cells than the header has names, {list(head.columns)}",
                where="line 2",
                fix="put cells that hold a comma in double quotes, or name every column",
            )
        columns = list(map(str, head.columns))
        if first and columns != first:
            raise DataError(
                f"{path} has the columns {columns}, and {files[0]} {first}", fix="give all files the same columns"
            )
        first = columns
    return first


def unreadable(files: Sequence[Path], kind: str, split: str, error: Exception) -> DataError:
    """What to say of files that a builder of `datasets` cannot read: the one that is broken, and where.

    Args:
        kind: The builder: json, csv, text or parquet.
        split: What of them was asked for.
        error: What the builder has raised.
    """
    if all(path.stat().st_size == 0 or not path.read_bytes().strip() for path in files):
        return no_rows(files)
    for path in files:
        fault = _json_fault(path) if kind == "json" else _csv_fault(path) if kind == "csv" else None
        if fault is not None:
            return fault
    cause = error.__cause__ or error
    folder = files[0] if len(files) == 1 else files[0].parent
    return DataError(f"{folder} cannot be read as split {split!r}: {type(cause).__name__}: {cause}", fix=_CHECK)


def no_rows(files: Sequence[Path]) -> DataError:
    """The error of files without a row."""
    names = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return DataError(
        f"{names}: {'the file is' if len(files) == 1 else 'the files are'} empty, without a row of data",
        fix="check how it was written, and that all of it was copied",
    )


def _json_fault(path: Path) -> DataError | None:
    """The first line that is no JSON object; None where there is none, or the file is one JSON text and right."""
    fix = 'write one JSON object a line, such as {"text": "..."}, or a list of objects in a .json file'
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = data[: error.start].count(b"\n") + 1
        return DataError(f"{path}, line {at}, is not UTF-8: {error.reason}", fix="save the file as UTF-8")
    try:
        rows = json.loads(text)
        where = _first_no_object(rows) if isinstance(rows, list) else None
        if isinstance(rows, list) and not rows:
            return no_rows([path])
        return None if where is None else DataError(f"{path}: element {where} of the list is no JSON object", fix=fix)
    except json.JSONDecodeError as error:
        whole = error
    if text.lstrip().startswith("[") and not _is_list(text):
        return DataError(f"{path}, line {whole.lineno}, is no JSON: {whole.msg} (column {whole.colno})", fix=fix)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            if not isinstance(json.loads(line), dict):
                return DataError(f"{path}, line {number}, is no JSON object: {line:.80}", fix=fix)
        except json.JSONDecodeError as error:
            return DataError(f"{path}, line {number}, is no JSON: {error.msg} (column {error.colno})", fix=fix)
    return None


def _is_list(line: str) -> bool:
    """Whether the first line is a list by itself, so that the file is one of lines."""
    try:
        return isinstance(json.loads(line.lstrip().split("\n", 1)[0]), list)
    except ValueError:
        return False


def _first_no_object(rows: list[Any]) -> int | None:
    return next((number for number, row in enumerate(rows) if not isinstance(row, dict)), None)


def _csv_fault(path: Path) -> DataError | None:
    """What a csv reader says of the file; None where it finds rows."""
    import pandas

    try:
        return None if len(pandas.read_csv(path, dtype=str, na_filter=False)) else no_rows([path])
    except ValueError as error:  # of the parser, and of its bytes
        return DataError(
            f"{path} is no csv file: {' '.join(str(error).split())}",
            fix="put cells that hold a comma or a line break in double quotes, give every row as many cells as the header, and "
            "save the file as UTF-8",
        )
