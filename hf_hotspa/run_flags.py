"""The flags that `hf-hotspa run` gave, for the processes of its command."""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "HOTSPA_RUN"
"""JSON: `flags` by name, and `trained`, a file that is made when a trainer is. Children of any launcher inherit it."""
_printed: set[str] = set()


@cache
def _values(text: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text)
    return values


def is_active() -> bool:
    """Whether this process is one of a command of `hf-hotspa run`."""
    return VARIABLE in os.environ


def given_flags() -> dict[str, Any]:
    """Returns the flags of `hf-hotspa run`, by name; empty in other processes."""
    return dict(_values(os.environ[VARIABLE])["flags"]) if is_active() else {}


def say(line: str) -> None:
    """Prints a line once, on the main process."""
    if line not in _printed and os.environ.get("RANK", "0") == "0":
        _printed.add(line)
        print(f"hf-hotspa: {line}", file=sys.stderr, flush=True)


def note_trainer() -> None:
    """Notes, for the end of the command, that a trainer was made."""
    Path(_values(os.environ[VARIABLE])["trained"]).touch()
