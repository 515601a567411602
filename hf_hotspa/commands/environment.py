"""`hf-hotspa env`: what a problem report needs to say about a machine. Imports no training library."""

import argparse
import json
import os
import platform
import subprocess
from importlib.metadata import distributions

from hf_hotspa.commands.inputs import add_flags
from hf_hotspa.commands.parser import Commands
from hf_hotspa.errors import printable
from hf_hotspa.reporting.terminal import text_table
from hf_hotspa.versions import LIBRARIES, TRIED, version_of

_MORE = ("trl", "bitsandbytes", "deepspeed", "ray", "axolotl", "ms-swift", "liger-kernel", "flash-attn")
_PREFIXES = ("nvidia-nccl-", "torch")  # such as torchvision
# Values of other variables may be secrets (tokens of hubs and loggers), so no other is printed.
_VARIABLES = ("HOTSPA_", "ACCELERATE_", "NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_RANKS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NNODES", "SLURM_NTASKS")
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def add_parsers(commands: Commands) -> None:
    parser = commands.add_parser(
        "env",
        help="versions, cards and variables of this machine, for a problem report",
        description="Prints the releases of Python and of the libraries of a run, the cards, NCCL, and the environment "
        "variables of this package, accelerate, NCCL and gloo. Other variables are not printed.",
    )
    parser.set_defaults(answer=_print)
    add_flags(parser, {"--json": "print JSON instead of tables"})


def facts() -> dict[str, dict[str, str]]:
    """Returns what a problem report needs, by subject: `machine`, `releases`, `cards` and `variables`."""
    machine = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
    }
    names = dict.fromkeys((*LIBRARIES, *TRIED, *_MORE))
    releases = {name: own for name in names if (own := version_of(name)) is not None}
    more = {name: each.version for each in distributions() if (name := each.name or "").startswith(_PREFIXES)}
    variables = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES) or name in _RANKS}
    return {"machine": machine, "releases": releases | more, "cards": _cards(), "variables": variables}


def _cards() -> dict[str, str]:
    """Name, memory and driver of each NVIDIA GPU, by number; a reason if there is none."""
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=True)
    except FileNotFoundError:
        return {"none": "no nvidia-smi"}
    except (OSError, subprocess.SubprocessError) as error:
        return {"none": f"nvidia-smi failed: {error}"}
    return {str(number): line for number, line in enumerate(answer.stdout.splitlines())}


def _print(args: argparse.Namespace) -> None:
    subjects = facts()
    if args.json:
        print(json.dumps(subjects, indent=1))
        return
    tables = []
    for subject, values in subjects.items():
        rows = [[printable(name), printable(value)] for name, value in values.items()]
        tables.append(text_table("", [[subject, "value"], *(rows or [["none", ""]])], left=2, terminal=False))
    print("\n\n".join(tables))
