"""`hf-hotspa run [flags] -- COMMAND`: any command that trains with a `transformers.Trainer`, nothing of it changed.

The flags travel to its processes, of whatever launcher, as an environment variable; `hf_hotspa.commands.front.hooks` starts in each
Python process.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from copy import copy
from dataclasses import fields, make_dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from hf_hotspa.errors import HotspaConfigError, HotspaError
from hf_hotspa.nearest import unknown_flag
from hf_hotspa.run_flags import VARIABLE

SITE = Path(__file__).resolve().parent / "front" / "site"


def main(words: Sequence[str]) -> int:
    """Runs the command. `words`: the arguments after `hf-hotspa run`. Returns its exit code; 2 when the input is wrong,
    127 when there is no such command."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    try:
        command = words[at + 1 :]
        if not command:
            raise HotspaConfigError(
                "hf-hotspa run has no command", fix="write it behind --, such as: hf-hotspa run -- python train.py"
            )
        flags = parse_flags(words[:at])
    except HotspaError as error:
        print(f"hf-hotspa run: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="hotspa-run-") as folder:
        trained = Path(folder) / "trained"
        environment = dict(os.environ)
        environment[VARIABLE] = json.dumps({"flags": flags, "trained": str(trained)})
        root = Path(__file__).resolve().parents[2]
        more = [str(SITE)] + [str(root)] * (root / "setup.cfg").is_file()  # a source tree may not be installed
        environment["PYTHONPATH"] = os.pathsep.join([*more, *filter(None, [environment.get("PYTHONPATH")])])
        try:
            code = _run(command, environment)
        except OSError as failure:
            print(f"hf-hotspa run: {command[0]!r} cannot be started: {failure}", file=sys.stderr)
            return 127
        if code == 0 and not trained.exists():
            print("hf-hotspa: no Trainer was made, and nothing was changed", file=sys.stderr)
    return code


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Runs a command to its end; signals go to it, as they would without us."""
    process = subprocess.Popen(command, env=environment)

    def passed_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    # Ctrl-C reaches the whole process group of a terminal: the command handles it, and we wait for its end
    handlers = {
        signal.SIGTERM: passed_on,
        signal.SIGUSR1: passed_on,
        signal.SIGUSR2: passed_on,
        signal.SIGINT: lambda *_: None,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """Returns the flags in a command line that differ from their defaults, by name, JSON-ready. Raises
    `HotspaConfigError`: a flag is unknown, or its value is of another type."""
    if not words:
        return {}
    from transformers import HfArgumentParser

    from hf_hotspa.strategy import parse_buckets
    from hf_hotspa.trainer.arguments import AUTO, HotSPaTrainingArguments, flag_fields
    from hf_hotspa.trainer.given_arguments import check_values

    own = [copy(field) for field in flag_fields()]
    kind: Any = make_dataclass("Flags", [(field.name, field.type, field) for field in own])
    parser = HfArgumentParser(kind, prog="hf-hotspa run", add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        parsed, rest = parser.parse_args_into_dataclasses(
            args=[_full(word) for word in words], return_remaining_strings=True
        )
    except (argparse.ArgumentError, ValueError) as failure:
        raise HotspaConfigError(f"a flag cannot be read: {failure}", fix="hf-hotspa run --help") from failure
    if rest:
        known = [field.name.removeprefix("hotspa_") for field in own]
        short = rest[0].replace("--hotspa_", "--") if rest[0].startswith("--") else rest[0]
        raise HotspaConfigError(unknown_flag(short, known), fix="the command goes behind -- ; flags: docs/flags.md")
    flags = {field.name: getattr(parsed, field.name) for field in own}
    defaults = {field.name: field.default for field in fields(HotSPaTrainingArguments)}
    check_values(SimpleNamespace(**defaults | flags), HotSPaTrainingArguments)
    if (strategies := (parsed.hotspa_strategies or "").strip()) not in ("", AUTO):
        parse_buckets(strategies)
    return {field.name: value for field in own if (value := flags[field.name]) != field.default}


def _full(word: str) -> str:
    """`--model-path=X` as `--hotspa_model_path=X`, and `--no-report` as `--no_hotspa_report`."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    name = name.replace("-", "_").removeprefix("hotspa_")
    full = f"no_hotspa_{name[3:]}" if name.startswith("no_") else f"hotspa_{name}"
    return f"--{full}{equals}{value}"
