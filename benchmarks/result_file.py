"""What benchmarks share: the options that each has, a clock, the facts of a machine, and the files of numbers and pictures."""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The text as it is written, and the default of each option."""


def command_line(text: str | None) -> argparse.ArgumentParser:
    """A command that is described by a text, with `--json`, where its numbers go, and `--quick`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=_Help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that it works")
    return parser


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options as a result has them: without the files that are written."""
    values = {name: value for name, value in vars(options).items() if name not in ("json", "svg")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def timed_calls(function: Callable[..., Any], note: Callable[..., object]) -> Callable[..., Any]:
    """The function; when it began and ended is noted after each call, in seconds, with its arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            note(begin, time.perf_counter(), *args)

    return call


def machine_facts(ranks: int) -> dict[str, Any]:
    """What a number depends on that several processes of this machine gave."""
    import torch
    import transformers

    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "load_average": round(os.getloadavg()[0], 2),
        "ranks": ranks,
        "threads_per_rank": 1,
        "backend": "gloo",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write_text(path: str | Path | None, text: str) -> None:
    """Writes a text, where a file was asked for; its folder is made."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)


def write_json(path: str | Path | None, result: Any) -> None:
    """Writes a result, where a file was asked for; its folder is made."""
    write_text(path, json.dumps(result, indent=1) + "\n")
