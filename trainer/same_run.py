"""What the ranks of a run compare before the first update, and the list of what may differ.

The constructor of a trainer compares arguments, releases, settings of the process, and what it was given; `train()`
also the trainer's attributes, which a subclass may have set since, and its data sets. A difference is a
`PlanMismatchError` on every rank, with the values. Beside this module, the engine compares the model's configuration,
buffers and strategies, each step the optimizer's settings, and `same_rows` the rows and their order.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_hotspa.parallel.wrapped_model import is_wrapped
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.described import Reader, names_of_library, text_of
from hf_hotspa.trainer.given_arguments import flags_of
from hf_hotspa.trainer.same_rows import DATA_SETS, KnownRows
from hf_hotspa.versions import library_facts

logger = logging.getLogger(__name__)

_OUTPUT = "shown or logged by this process alone"

ARGUMENTS_MAY_DIFFER: dict[str, str] = {  # arguments that may differ between ranks, and why
    **{name: flag.of_one_rank for name, flag in flags_of(HotSPaTrainingArguments).items() if flag.of_one_rank},
    "local_rank": "the place of a process",
    "deepspeed": "a path; the settings in the file are compared",
    "hub_token": "only the main process pushes",
    "run_name": _OUTPUT,
    "project": _OUTPUT,
    "trackio_space_id": _OUTPUT,
    "report_to": _OUTPUT,
    "disable_tqdm": _OUTPUT,
    "log_level": _OUTPUT,
    "log_level_replica": _OUTPUT,
    "log_on_each_node": _OUTPUT,
}

MAY_DIFFER: dict[str, str] = {  # what else may differ between ranks, and why
    "callbacks": "scripts give some to one process; what they change (rates, weights, flags) is compared in each step",
    "the weights of the model": "rank 0's are used on all ranks from the start, as by DistributedDataParallel",
    "rows that are drawn anew at each reading": "augmentations; which rows are read, and their order, is compared",
    "rows of a stream": "with one reader there are no others; its source, columns and functions are compared",
    "values of custom code named after a rank, process, node, device or time, and absolute paths": "each process has its own",
    "environment variables but those that decide what is computed": "paths, caches, addresses, numbers of threads",
    "the folder of a model": "the last part of its path is compared, and its weights",
}

_ENVIRONMENT = (  # how the names of environment variables begin that decide what is computed
    "ACCELERATE_MIXED", "ACCELERATE_GRADIENT", "ACCELERATE_USE", "ACCELERATE_DYNAMO", "ACCELERATE_DEEPSPEED", "FSDP_",
    "PARALLELISM_CONFIG", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip

_COMPARED_ELSEWHERE = {
    "model", "args", "callbacks", *DATA_SETS, "model_wrapped", "accelerator", "state", "control", "callback_handler",
    "optimizer", "optimizers", "lr_scheduler", "hub_model_id", "push_in_progress", "_memory_tracker", "is_in_train",
}  # fmt: skip
"""Names given to a trainer, or of its attributes, that are compared elsewhere, or belong to the loop."""


def argument_facts(args: Any) -> dict[str, str]:
    """The training arguments as text: all fields of their class, and plain attributes that it sets beside."""
    names = {f.name for f in dataclasses.fields(args)}
    beside = {name for name in vars(args) if not name.startswith("_")} - names - _MADE_OF_ARGUMENTS
    facts = {name: text_of(getattr(args, name, None)) for name in sorted(names - ARGUMENTS_MAY_DIFFER.keys())}
    reader = Reader(args.world_size)
    facts |= {name: reader.text(vars(args)[name], name) for name in sorted(beside)}
    mapping = args.hotspa_deepspeed
    return facts | {"the DeepSpeed config": text_of(mapping and (mapping.arguments, mapping.scheduler))}


_MADE_OF_ARGUMENTS = {"distributed_state", "deepspeed_plugin", "fsdp_plugin_args", "scoring"}


def process_facts() -> dict[str, str]:
    """Settings of this process that decide what is computed."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
    settings = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.is_autocast_enabled()": torch.is_autocast_enabled("cpu"),
    }
    named = {f"environment variable {name}": value for name, value in sorted(variables.items())}
    return named | {name: text_of(value) for name, value in settings.items()}


def _libraries(trainer: Any, given: Mapping[str, Any]) -> list[str]:
    """The libraries that this trainer uses beside the usual ones."""
    args, model = trainer.args, given.get("model")
    optim = str(getattr(args.optim, "value", args.optim))
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    used = {
        "trl": any(c.__module__.partition(".")[0] == "trl" for c in type(trainer).__mro__),
        "peft": given.get("peft_config") is not None or (isinstance(model, nn.Module) and is_wrapped(model)),
        "bitsandbytes": quantized or any(part in optim for part in ("bnb", "8bit", "paged", "bitsandbytes")),
        "torchao": "torch_" in optim or "torchao" in optim,
        "deepspeed": args.hotspa_deepspeed is not None or args.hotspa_offload != "none",
    }
    return [name for name, is_used in used.items() if is_used]


_OF_EVALUATION = "compute_metrics", "preprocess_logits_for_metrics"


class SameRun:
    """Reads what this rank compares for a trainer. Nothing is read on one rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._rows = trainer, KnownRows()
        self._names, self._has_trained = frozenset[str](), False

    @property
    def _is_alone(self) -> bool:
        return self._trainer._hotspa_ranks.agreement().group is None

    def given_facts(self, given: Mapping[str, Any]) -> dict[str, str]:
        """What a constructor was given, by name; and the process."""
        if self._is_alone:
            return {}
        trainer, reader, self._names = self._trainer, Reader(self._trainer.args.world_size), frozenset(given)
        facts = library_facts(*_libraries(trainer, given)) | process_facts() | argument_facts(trainer.args)
        facts["class of the trainer"] = reader.text(type(trainer), "trainer")
        model = given.get("model")
        name = Path(model).name if isinstance(model, str | Path) else reader.text(type(model), "model")
        facts["class of the model"] = name
        for name, value in sorted(given.items()):
            if name not in _COMPARED_ELSEWHERE:
                facts[name] = reader.text(value, name)
        for name in DATA_SETS:
            facts |= self._rows.facts(name, given.get(name))
        if reader.unread and trainer.args.process_index == 0:
            logger.info("Ranks compare only the classes of: %s", ", ".join(sorted(set(reader.unread))))
        return facts

    def training_facts(self, checkpoint: Any) -> dict[str, str]:
        """What decides a training, when it starts; `checkpoint`: where it resumes."""
        if self._is_alone:
            return {}
        trainer, facts = self._trainer, argument_facts(self._trainer.args)
        facts["resume_from_checkpoint"] = text_of(checkpoint)
        facts |= self._attributes()
        data = {name: getattr(trainer, name, None) for name in DATA_SETS}
        for name, dataset in data.items():
            facts |= self._rows.facts(name, dataset, reads=True)
        self._rows.keep(data.values())
        reference = vars(trainer).get("_hotspa_reference")
        if isinstance(reference, nn.Module):
            facts["reference model"] = text_of(reference)
        self._has_trained = True
        return facts

    def evaluation_facts(self, dataset: Any) -> dict[str, str]:
        """What decides an evaluation of a data set."""
        trainer = self._trainer
        if self._is_alone:
            return {}
        functions = {name: getattr(trainer, name, None) for name in _OF_EVALUATION}
        reader = Reader(trainer.args.world_size)
        return {name: reader.text(value, name) for name, value in functions.items()} | self._rows.facts("rows", dataset)

    def _attributes(self) -> dict[str, str]:
        """The trainer's attributes that are plain values or functions. After a training only those with the name of an
        argument: others may hold what a rank has counted."""
        trainer, facts = self._trainer, dict[str, str]()
        settings = {f.name for f in dataclasses.fields(trainer.args)} | self._names
        kind: Any = type(trainer)
        of_library = names_of_library(kind)
        for name, value in sorted(vars(trainer).items()):
            if name.startswith("_hotspa") or name in _COMPARED_ELSEWHERE or isinstance(value, nn.Module):
                continue
            if name not in settings and (self._has_trained or (name.startswith("_") and name in of_library)):
                continue
            reader = Reader(trainer.args.world_size)
            if not reader.is_of_rank(name, value) and (text := reader.text(value, name)) and not reader.unread:
                facts[f"{name} of the trainer"] = text
        return facts
