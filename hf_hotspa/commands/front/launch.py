"""What launchers and front ends ask for before a model is loaded: FSDP, DeepSpeed, torch.compile, fp16.

Each would lay out, wrap or cast the model. `take` removes the request, and `give_to` passes what it means to the arguments.
"""

import os
from collections.abc import MutableMapping
from typing import Any

from hf_hotspa.run_flags import say

_asked: dict[str, Any] = {}  # argument of `TrainingArguments` -> what was asked for elsewhere

_VARIABLES = {  # of accelerate
    "ACCELERATE_USE_FSDP": "FSDP, sharded here by +z of the strategies",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed, whose config is mapped onto arguments",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config, left out: the strategies give the degrees",
    "ACCELERATE_DYNAMO_BACKEND": "torch.compile, left out: layers move between layouts",
}


def ask(name: str, value: Any) -> None:
    """Notes what a program asks for outside of `TrainingArguments`. `name`: `fsdp`, `fsdp_config` or `deepspeed`."""
    _asked.setdefault(name, value)


def take() -> None:
    """Takes accelerate's variables out of the environment."""
    for name, what in _VARIABLES.items():
        if os.environ.pop(name, "").lower() not in ("", "0", "false", "no"):
            say(f"the environment asks for {what} ({name})")
            if name == "ACCELERATE_USE_FSDP":
                _ask_for_fsdp()
            elif name == "ACCELERATE_USE_DEEPSPEED":
                stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0"))
                file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
                ask("deepspeed", file or {"zero_optimization": {"stage": stage}})
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp16":
        instead = os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if _has_bf16() else "no"
        say(f"the environment asks for fp16: {instead} instead, as losses are not scaled")


def _ask_for_fsdp() -> None:
    resharded = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true")
    stage = os.environ.get("FSDP_SHARDING_STRATEGY", resharded)
    offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "false")
    ask("fsdp", True)
    ask("fsdp_config", {"reshard_after_forward": stage.lower(), "offload_params": offload.lower() == "true"})


def give_to(args: Any) -> None:
    """Gives training arguments, before they are set up, what was asked for elsewhere, unless they ask for something."""
    if not (args.fsdp or args.deepspeed):
        for name, value in _asked.items():
            setattr(args, name, value)


def replace(values: MutableMapping[str, Any]) -> None:
    """Replaces arguments that front ends set, often by default, with one line each. `values`: by name."""
    for name, why in _IGNORED.items():
        if values.get(name):
            say(f"{name}={values[name]!r} is ignored: {why}")
            values[name] = False
    if values.get("fp16"):
        values["fp16"], values["bf16"] = False, bool(values.get("bf16")) or _has_bf16()
        say(f"fp16=True: {'bf16' if values['bf16'] else 'fp32'} instead, as losses are not scaled")
    if values.get("activation_offloading"):
        say(f"activation_offloading={values['activation_offloading']!r}: layers are recomputed instead (+rc)")
        values["gradient_checkpointing"] = True
    if "activation_offloading" in values:
        values["activation_offloading"] = False  # None means no, too


_IGNORED = {
    "use_liger_kernel": "the loss is computed shard by shard, and no logits of a whole row exist",
    "torch_compile": "layers move between layouts",
}


def _has_bf16() -> bool:
    from hf_hotspa.parallel.backends import gpu_has_bf16  # imports torch

    return gpu_has_bf16()
