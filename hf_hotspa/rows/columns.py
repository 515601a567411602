"""What else a row says about its tokens: the columns that a loss of the user's own reads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_hotspa.errors import DataError


def number_columns(example: Any, row: int, names: Sequence[str], length: int) -> dict[str, NDArray[Any]]:
    """Other columns of a row, as int64 or float64: [length] with a number for each token, or one number, [].

    Raises:
        DataError: a column is missing, holds no numbers, or not as many as the row has tokens.
    """
    columns = {}
    for name in names:
        where = f"dataset row {row}, column {name!r}"
        value = example.get(name)
        if value is None:
            raise DataError(
                f"the row has no {name!r}, only {sorted(map(str, example))}",
                where=where,
                why="a loss of your own reads it (loss_columns)",
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
