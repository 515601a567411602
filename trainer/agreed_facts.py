"""What must be the same on all ranks, as texts by name: what decides training beside the model, and the data.

`Agreement.check` compares the settings where the Trainer is made, where training starts, when optimizer and scheduler are
there, and before each mini-batch. One that differs would train each share of the weights in another way, or leave ranks
waiting in collectives that others never come to.

Rows of other lengths are found by the scan. Rows of the same lengths and other tokens (a data set that is split by rank)
are found by a few that every rank reads; what gives another row at each reading is left to the agreement on each
mini-batch (`hf_hotspa/parallel/same_rows.py`), as it may well be read by one rank only.
"""

import enum
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from torch.optim import Optimizer
from transformers.trainer_utils import has_length

from hf_hotspa.checkpoint.tensors import bare_optimizer
from hf_hotspa.rows.features import RowRules, read_row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.rows import unreadable

_SAMPLED_ROWS = 4

OF_ONE_RANK = frozenset({
    "local_rank", "logging_dir", "run_name", "project", "trackio_space_id", "report_to", "disable_tqdm", "log_level",
    "log_level_replica", "log_on_each_node", "hub_token", "hotspa_phase_table", "hotspa_log_all", "deepspeed", "hotspa_model_path",
})  # fmt: skip
"""Arguments that may differ: what a rank shows and where, and the paths of files whose contents are compared."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def argument_facts(args: HotSPaTrainingArguments) -> dict[str, str]:
    """The training arguments; of a subclass those of `HotSPaTrainingArguments`."""
    facts = {f.name: text_of(getattr(args, f.name, None)) for f in fields(HotSPaTrainingArguments)}
    facts = {name: text for name, text in facts.items() if name not in OF_ONE_RANK}
    return facts | {
        "the DeepSpeed config": text_of(
            args.hotspa_deepspeed and (args.hotspa_deepspeed.arguments, args.hotspa_deepspeed.scheduler)
        )
    }


def optimizer_facts(optimizer: Optimizer, scheduler: Any) -> dict[str, str]:
    """Kind and settings of optimizer and scheduler."""
    state = {} if scheduler is None else {k: v for k, v in scheduler.state_dict().items() if not callable(v)}
    return {
        "the optimizer": type(bare_optimizer(optimizer)).__name__,
        "the scheduler": type(scheduler).__name__,
        **group_facts(optimizer),
        **{f"{key} of the scheduler": text_of(value) for key, value in state.items()},
    }


def group_facts(optimizer: Optimizer) -> dict[str, str]:
    """Rates, decays and whatever else the parameter groups have."""
    return {
        f"{key} of parameter group {number}": text_of(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }


def text_of(value: Any) -> str:
    """A setting as a text that is the same on all ranks where the setting is: without addresses."""
    return value if isinstance(value, str) else _ADDRESS.sub("", json.dumps(value, sort_keys=True, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return repr(value)


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
        except Exception as error:
            raise unreadable(error, "the dataset", f"dataset row {row}") from error
        for array in (parsed.ids, parsed.ids[:0] if parsed.labels is None else parsed.labels, parsed.cuts):
            digest.update(len(array).to_bytes(8, "little") + array.astype("<i8").tobytes())
    return digest.hexdigest()[:16]
