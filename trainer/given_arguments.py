"""Arguments that a script gives and that are unknown, cannot be honoured, or ask for nothing: each is said, with what to use instead."""

import logging
import os
import sys
from collections.abc import Collection
from copy import copy
from difflib import get_close_matches
from typing import Any

from transformers import TrainingArguments

from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.trainer.launcher import OWN_LAYOUTS

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def unknown_flag(flag: str, known: Collection[str]) -> str:
    """A sentence about a flag that is not known, with the nearest one that is.

    Args:
        flag: As it was written, such as ``--hotspa-overlnog``.
        known: The names that are known, without hyphens before them.
    """
    near = nearest(flag, known)
    return f"there is no flag {flag}" + (f"; did you mean --{near}?" if near else "")


def nearest(flag: str, known: Collection[str]) -> str | None:
    """The name that is most like a flag; None where none is."""
    return next(iter(get_close_matches(_name(flag), sorted(known), n=1, cutoff=0.6)), None)


def warn_of_misspelt(fields: Collection[str]) -> None:
    """Warns of flags of the command line that begin as ours do and are none: a parser that a script has made may call them
    unused, or drop them. Each is told once, by one process.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for word in sys.argv[1:]:
        flag = word.partition("=")[0]
        if not flag.startswith(("--hotspa_", "--hotspa-")) or flag in _warned:
            continue
        if any(name.startswith(_name(flag)) for name in fields):  # argparse takes a beginning for the whole
            continue
        if nearest(flag, fields) is not None:
            _warned.add(flag)
            logger.warning("%s", unknown_flag(flag, fields))


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


_EVALUATION = "evaluation runs in the dtype of training; use bf16 for both, or leave it off"

# name -> (values that are fine, why another one is refused or what to use instead)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), "loss scaling is not supported; use bf16 or fp32"),
    "fp16_full_eval": ((False,), _EVALUATION),
    "torch_compile": ((False,), "replicas are rebound to other storage for every phase; leave it off"),
    "fsdp": ((None, False, "", []), "give it to HotSPaTrainingArguments, where full_shard is +z3 of the strategies"),
    "parallelism_config": ((None,), OWN_LAYOUTS),
    "use_liger_kernel": ((False,), "its fused loss does not know a vocabulary that is cut over ranks"),
    "save_on_each_node": (
        (False,),
        "a checkpoint is one directory that all ranks write into; use a shared file system",
    ),
    "optim_target_modules": ((None,), "layer-wise optimizers need whole matrices"),
    "debug": (([], "", None), "the debug hooks sit on a model that does not run; drop the option"),
}

_NO_DDP = "there is no DistributedDataParallel; it has no effect"

# name -> (the value that asks for nothing, what becomes of another one)
_NO_EFFECT: dict[str, tuple[Any, str]] = {
    "bf16_full_eval": (False, "evaluation runs in the dtype of training, bf16 with bf16=True"),
    "auto_find_batch_size": (False, "the tokens of a pack bound the memory, not the batch size; it reads False"),
    "enable_jit_checkpoint": (False, "SIGTERM saves and stops on all ranks alike without it"),
    "ddp_find_unused_parameters": (None, _NO_DDP),
    "ddp_bucket_cap_mb": (None, _NO_DDP),
    "ddp_broadcast_buffers": (None, _NO_DDP),
    "ddp_static_graph": (None, _NO_DDP),
}


CHANGED = ("auto_find_batch_size", "bf16_full_eval", "accelerator_config", "gradient_accumulation_steps")
"""What `explain_arguments` may change."""


def explain_arguments(args: TrainingArguments) -> None:
    """Accepts what has no effect here and none on numbers, and says so in a line each on the main process."""
    for name, (nothing, text) in _NO_EFFECT.items():
        if getattr(args, name, nothing) != nothing and args.process_index == 0:
            logger.warning("%s=%r: %s", name, getattr(args, name), text)
    args.auto_find_batch_size = False  # transformers would start training again where memory ran out
    args.bf16_full_eval = False  # and evaluate another model
    read_accelerator_config(args)


def refuse_arguments(args: TrainingArguments) -> None:
    """Refuses what cannot be honoured.

    Raises:
        UnsupportedError: naming the argument, its value and what to use instead.
    """
    for name, (fine, why) in _REFUSED.items():
        value = getattr(args, name, fine[0])
        if value not in fine:
            shown = getattr(value, "value", value)
            raise UnsupportedError(f"the training argument {name}={shown!r} cannot be honoured", fix=why)
    if vars(args).get("hotspa_stock_checkpoints") and vars(args).get("hotspa_offload") == "master":
        raise UnsupportedError(
            "hotspa_stock_checkpoints=True and hotspa_offload='master' do not go together",
            why="the optimizer is DeepSpeed's CPU Adam then, whose settings are not those of the stock Trainer's",
            fix="leave one of them out; hf-hotspa export gives the weights of any checkpoint",
        )


def read_accelerator_config(args: TrainingArguments) -> None:
    """Accumulation is that of the arguments: accelerate has nothing to accumulate.

    Raises:
        HotspaConfigError: both give a number of steps.
    """
    values: dict[str, Any] = vars(args)
    config = values["accelerator_config"]
    given = config.gradient_accumulation_kwargs
    if not given:
        return
    steps: int = values["gradient_accumulation_steps"]
    if given.get("num_steps", 1) != 1 and steps != 1:
        raise HotspaConfigError(
            f"The `AcceleratorConfig`'s `num_steps` is set but gradient_accumulation_steps={steps}, too",
            fix="set one of them",
        )
    values["gradient_accumulation_steps"] = steps if steps != 1 else given.get("num_steps", 1)
    values["accelerator_config"] = copy(config)  # not the user's object
    values["accelerator_config"].gradient_accumulation_kwargs = None
