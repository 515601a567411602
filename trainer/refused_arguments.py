"""Training arguments of transformers that cannot be honoured, each with what to use instead.

A setting that would be ignored silently, or that would make training inexact, is refused by name. The rest works as it is.
"""

import logging
from copy import copy
from typing import Any

from transformers import TrainingArguments

from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.trainer.launcher import OWN_LAYOUTS

logger = logging.getLogger(__name__)

_EVALUATION = "evaluation runs in the dtype of training; use bf16 for both, or leave it off"

# name -> (values that are fine, why another one is refused or what to use instead)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), "loss scaling is not supported; use bf16 or fp32"),
    "fp16_full_eval": ((False,), _EVALUATION),
    "torch_compile": ((False,), "replicas are rebound to other storage for every phase; leave it off"),
    "fsdp": ((None, False, "", []), "give it to HotSPaTrainingArguments, where full_shard is +z3 of the strategies"),
    "parallelism_config": ((None,), OWN_LAYOUTS),
    "ddp_find_unused_parameters": ((None,), "there is no DistributedDataParallel; drop the option"),
    "ddp_bucket_cap_mb": ((None,), "there is no DistributedDataParallel; drop the option"),
    "ddp_broadcast_buffers": ((None,), "there is no DistributedDataParallel; drop the option"),
    "ddp_static_graph": ((None,), "there is no DistributedDataParallel; drop the option"),
    "use_liger_kernel": ((False,), "its fused loss does not know a vocabulary that is cut over ranks"),
    "average_tokens_across_devices": ((True,), "the loss is always the mean over all tokens of the mini-batch"),
    "enable_jit_checkpoint": ((False,), "SIGTERM saves and stops on all ranks alike without it; drop the option"),
    "save_on_each_node": (
        (False,),
        "a checkpoint is one directory that all ranks write into; use a shared file system",
    ),
    "train_sampling_strategy": (
        ("random", "sequential", "group_by_length"),
        "packs are balanced over ranks inside each mini-batch anyway; use random",
    ),
    "dataloader_in_order": ((True,), "every rank must get the mini-batches in the same order; drop the option"),
    "label_names": ((None, ["labels"]), "the loss of a causal language model knows 'labels' only; rename the column"),
    "optim_target_modules": ((None,), "layer-wise optimizers need whole matrices"),
    "debug": (([], "", None), "the debug hooks sit on a model that does not run; drop the option"),
}

# name -> (the value that asks for nothing, what becomes of another one)
_NOTHING_TO_DO: dict[str, tuple[Any, str]] = {
    "bf16_full_eval": (False, "evaluation runs in the dtype of training, bf16 with bf16=True"),
    "auto_find_batch_size": (False, "the tokens of a pack bound the memory, not the batch size; it reads False"),
    "eval_use_gather_object": (False, "every rank has all predictions anyway"),
}


def explain_arguments(args: TrainingArguments) -> None:
    """Accepts what asks for nothing that is not there already, and says so in a line each on the main process."""
    for name, (nothing, text) in _NOTHING_TO_DO.items():
        if getattr(args, name, nothing) != nothing and args.process_index == 0:
            logger.warning("%s=%r: %s", name, getattr(args, name), text)
    args.auto_find_batch_size = False  # transformers would start training again where memory ran out


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
    config: Any = args.accelerator_config
    for name, default in (("split_batches", False), ("dispatch_batches", None), ("use_seedable_sampler", True)):
        if getattr(config, name, default) != default:
            raise UnsupportedError(
                f"accelerator_config={{{name!r}: {getattr(config, name)!r}}} cannot be honoured",
                why="mini-batches are not dealt out to ranks by accelerate",
                fix=f"leave {name} out",
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
