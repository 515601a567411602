"""What the launcher of this process has said, in the environment: how many processes are meant, and how they train.

Launchers fail quietly: `accelerate launch` starts one process where `--multi_gpu` is missing, whatever its
`--num_processes` says, and torchrun's processes train alone where the script does not ask for the CPU on a machine
without accelerators. Both are errors here, whatever the strategies, also when they are chosen by themselves.
"""

import os
import re
from collections.abc import Sequence
from typing import Any

import psutil  # type: ignore[import-untyped]
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from transformers import TrainingArguments
from transformers.utils.generic import strtobool

from hf_hotspa.errors import LaunchError, UnsupportedError

OWN_LAYOUTS = "hf_hotspa lays out the model itself (hotspa_strategies)"
"""Why nothing else may lay out the model."""

_LAYOUTS = {
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", ", and give the JSON file as deepspeed= to the arguments"),
    "ACCELERATE_USE_FSDP": ("FSDP", ", and give fsdp=True to the arguments, or strategies such as dp8+z3"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", ", and give the degrees as hotspa_strategies"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        "a parallelism_config",
        ", and give the degrees as hotspa_strategies, such as dp4tp2:4096",
    ),
}
"""Variable of accelerate -> what it was told to start, and what to do beside naming another distributed_type."""

_WORLDS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_ONE_PROCESS = ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "MASTER_PORT")
"""What accelerate's launcher of one process sets when it was told to start several: where these are to meet."""
_LAUNCHES = re.compile(r"accelerate\S*[ ./-]launch")
"""The command line of `accelerate launch`, of `accelerate-launch`, or of the module."""
_DTYPES = ("no", "fp32", "bf16")


def refuse_launcher_settings() -> None:
    """Refuses what accelerate's configuration would have laid out or compiled.

    Raises:
        UnsupportedError: naming the variable, and what to use instead.
    """
    for variable, (name, more) in _LAYOUTS.items():
        if strtobool(os.environ.get(variable, "false")):
            raise UnsupportedError(
                f"accelerate was told to start {name} ({variable})",
                why=OWN_LAYOUTS,
                fix=f"use distributed_type: MULTI_GPU without its section{more}",
            )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        raise UnsupportedError(
            f"accelerate was told to compile the model (dynamo_backend {backend})",
            why="replicas are rebound to other storage for every phase",
            fix="leave dynamo_config out of the configuration, and --dynamo_backend out of the launch line",
        )
    precision = _mixed_precision()
    if precision not in _DTYPES:
        raise UnsupportedError(
            f"accelerate was told to train in mixed precision {precision}",
            why="loss scaling and fp8 are not supported",
            fix="use mixed_precision: bf16, or no",
        )


def wants_bf16() -> bool:
    """Whether accelerate's configuration asks for bf16, which is `bf16=True` to the Trainer."""
    return _mixed_precision() == "bf16"


def _mixed_precision() -> str:
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()


def check_processes(world_size: int) -> None:
    """Checks that as many processes train together as were started, and were meant.

    Args:
        world_size: Processes that train together, as transformers sees them.

    Raises:
        LaunchError: they are fewer; the message has the launch line.
    """
    if world_size > 1:
        return
    started = max((int(os.environ[name]) for name in _WORLDS if os.environ.get(name, "").isdigit()), default=1)
    if started > 1:
        raise LaunchError(
            f"{started} processes were started, and each of them would train alone",
            why="without an accelerator, transformers joins processes only where use_cpu=True",
            fix=f"give SCRIPT the flag --use_cpu (use_cpu=True in its arguments): torchrun --nproc_per_node {started} SCRIPT "
            "--use_cpu; or, to train alone, unset WORLD_SIZE",
        )
    if all(name in os.environ for name in _ONE_PROCESS) and (meant := _meant()) != 1:
        raise LaunchError(
            f"accelerate was told to start {meant or 'several'} processes, and has started one",
            why="without --multi_gpu (distributed_type: MULTI_GPU) `accelerate launch` starts one process, also with --cpu",
            fix=f"accelerate launch --multi_gpu --num_processes {meant or 'N'} SCRIPT (on CPU give SCRIPT the flag --use_cpu, "
            "and accelerate no --cpu)",
        )


def _meant() -> int | None:
    """The processes that accelerate's command line or configuration asks for; None where these cannot be seen."""
    for parent in psutil.Process().parents():
        try:
            words = parent.cmdline()
            if not _LAUNCHES.search(" ".join(words)):
                continue
            if (number := _option(words, "num_processes")) is not None:
                return int(number)
            config = _option(words, "config_file") or (default_config_file if "--cpu" not in words else "")
            path = os.path.join(parent.cwd(), config)
            if os.path.isfile(path):
                return int(load_config_from_file(path).num_processes)
            return 1 if int(_option(words, "num_machines") or 1) == 1 else None  # its default
        except (psutil.Error, OSError, ValueError, TypeError):
            continue  # nobody's business, or gone
    return None


def _option(words: Sequence[str], name: str) -> str | None:
    """The value of an option of `accelerate launch`, written with underscores or hyphens, `=` or a blank."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            return value if equals else next(iter(words[at + 1 :]), None)
    return None


def recompute_argument(args: TrainingArguments) -> str:
    """The name of the argument that asks for recomputation: `activation_checkpointing`, once `gradient_checkpointing`.

    Where both are there, transformers keeps them the same.
    """
    return "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"


def workers_context(args: TrainingArguments) -> Any:
    """How loader workers are started; None, the rule of the platform, where there is no such argument."""
    return getattr(args, "dataloader_multiprocessing_context", None)
