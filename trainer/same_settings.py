"""What decides training beside the model, as texts by name: settings that must be the same on all ranks.

`Agreement.check` compares them where the Trainer is made, where training starts, when optimizer and scheduler are there,
and before each mini-batch. A setting that differs would train each share of the weights in another way, or leave ranks
waiting in collectives that others never come to.
"""

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch.optim import Optimizer

from hf_hotspa.checkpoint.tensors import bare_optimizer
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

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
