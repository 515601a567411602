"""What `peers.py` found, in one JSON file: by cell (model, dtype, length file) and by side. A later run adds to it."""

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from peer_memory import Ladder
from peer_sides import SIDES
from peer_work import Work

_LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "trl", "deepspeed", "hf-hotspa")


def machine_facts(options: argparse.Namespace) -> dict[str, Any]:
    """What a number of this benchmark depends on."""
    from hf_hotspa.runtime.calibration import cpu_name

    facts: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": cpu_name(),
        "ranks": options.ranks,
        "threads_per_rank": 1,
        "backend": "gloo",
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


class Results:
    """The file.

    Args:
        path: Where it is, or will be.

    Attributes:
        calibrated: Model and dtype of calibrations that were made in this run.
        ladders: Peaks of memory that were measured in this run, by model, dtype and side.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cells": {}}
        self._machine: dict[str, Any] = {}
        self._fresh: set[tuple[str, str]] = set()
        self.calibrated: set[tuple[str, str]] = set()
        self.ladders: dict[tuple[str, str, str], Ladder] = {}

    def begin_run(self, options: argparse.Namespace) -> dict[str, Any]:
        """Notes the machine, and what is asked for; returns the facts of the machine."""
        self._machine = machine_facts(options)
        self.data["machine"], self.data["options"] = self._machine, vars(options)
        return self._machine

    def begin_cell(self, key: str, work: Work, limit_bytes: float, options: argparse.Namespace) -> None:
        """Begins a cell anew, or goes on with one of the same mini-batches."""
        facts = {
            "machine": self._machine,
            "lengths": list(work.lengths),
            "mini_batch_rows": work.mini_batch_rows,
            "warmup": options.warmup,
            "limit_bytes": limit_bytes,
        }
        cell = self.data["cells"].get(key)
        if cell is None or any(cell[name] != facts[name] for name in ("lengths", "mini_batch_rows", "warmup")):
            cell = self.data["cells"][key] = {"sides": {}}
        cell |= facts
        self._fresh = set()

    def note(self, key: str, side: str, **facts: Any) -> None:
        """Adds facts about a side. What an earlier run found of it goes first."""
        sides = self.data["cells"][key]["sides"]
        if (key, side) not in self._fresh:
            self._fresh.add((key, side))
            sides[side] = {}
        sides[side] |= {name: value for name, value in facts.items() if value is not None and value != ""}

    def fail(self, key: str, side: str, reason: str, held: int | None = None, text: str = "") -> None:
        """Notes why a side has no number.

        Args:
            key: The cell.
            side: The side.
            reason: One line.
            held: The longest sequence that it could hold, where that is the reason.
            text: Everything that it said.
        """
        self.note(key, side, reason=reason, longest_held=held, text=text)

    def failed(self, key: str, side: str) -> bool:
        """Whether a side has a reason instead of numbers."""
        return "reason" in self.data["cells"][key]["sides"].get(side, {})

    def add_round(self, key: str, side: str, turns: list[dict[str, Any]], end: dict[str, Any]) -> None:
        """Adds what a side took in one round."""
        self.note(key, side)
        found = self.data["cells"][key]["sides"][side]
        for name in ("seconds", "cpu", "phases"):
            found.setdefault(name, []).append([turn[name] for turn in turns])
        found["tokens"], found["slots"], found["loss"] = end["tokens"], end["slots"], end["loss"]
        for name in ("pool", "packs"):
            if name in end:
                found[name] = end[name]

    def save(self) -> None:
        """Writes the file."""
        order = [side.name for side in SIDES]
        for cell in self.data["cells"].values():
            sides = cell["sides"]
            cell["sides"] = {
                name: sides[name] for name in sorted(sides, key=lambda n: order.index(n.split(" (limit)")[0]))
            }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")
