"""What of a data set must be the same on all ranks, and when a run is resumed, as plain data by name.

Rows of other lengths are found by the scan. Rows of the same lengths and other tokens (a data set that is split by rank)
are found by a few that every rank reads; what gives another row at each reading is left to the agreement on each
mini-batch (`hf_hotspa/parallel/same_rows.py`), as it may well be read by one rank only.
"""

import hashlib
from typing import Any

import numpy as np
from transformers.trainer_utils import has_length

from hf_hotspa.errors import DataError, HotspaError
from hf_hotspa.rows.features import RowRules, read_row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.trainer.same_settings import text_of

_SAMPLED_ROWS = 4


def table_facts(table: SequenceTable) -> dict[str, Any]:
    """Number, lengths and labels of rows."""
    arrays = (table.lengths, table.label_counts, table.cuts)
    digest = hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in arrays)).hexdigest()
    return {"rows of the dataset": len(table), "lengths and labels of the rows": digest[:16]}


def data_facts(dataset: Any, table: SequenceTable | None, rules: RowRules) -> dict[str, str]:
    """For `Agreement.check`.

    Args:
        dataset: The data set, with token ids where it is no stream.
        table: Its scan; None for a stream, of which no more than a length may be known.
        rules: What rows are read by.

    Raises:
        HotspaError: a row cannot be read.
    """
    if table is None:
        facts = {"length of the stream": len(dataset) if has_length(dataset) else None}
    else:
        facts = table_facts(table) | {"tokens of some rows": _sample(dataset, rules)}
    return {name: text_of(value) for name, value in facts.items()} | {"what rows are read by": rules.key()}


def _sample(dataset: Any, rules: RowRules) -> str:
    """A digest of some rows, spread over the data set; empty where they are others at each reading."""
    rows = np.unique(np.linspace(0, len(dataset) - 1, _SAMPLED_ROWS).astype(np.int64)).tolist()
    first, second = (_digest(dataset, rows, rules) for _ in range(2))
    return first if first == second else ""


def _digest(dataset: Any, rows: list[int], rules: RowRules) -> str:
    digest = hashlib.sha256()
    for row in rows:
        try:
            parsed = read_row(dataset[row], row, rules)
        except HotspaError:
            raise
        except Exception as error:  # whatever a data set raises is carried to all ranks
            raise DataError(
                f"the dataset failed to give rows: {type(error).__name__}: {error}", where=f"dataset row {row}"
            ) from error
        for array in (parsed.ids, parsed.ids[:0] if parsed.labels is None else parsed.labels, parsed.cuts):
            digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
    return digest.hexdigest()[:16]
