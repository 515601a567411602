"""What `side_by_side.py` found, in one JSON file: by cell (model, dtype, length file) and by side. A later run adds to it.

`published` is what of it goes into the documentation.
"""

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from peers.memory import Ladder
from peers.sides import sides_of
from peers.work import Work

_LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "trl", "deepspeed", "hf-hotspa")


def machine_facts(options: argparse.Namespace) -> dict[str, Any]:
    """What a number of this benchmark depends on."""
    import torch
    from bf16_products import has_instructions

    from hf_hotspa.calibrate.model_calibration import cpu_name

    facts: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16_products": "of the processor" if has_instructions() else "in fp32, rounded",
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
        self.data["options"] = vars(options)
        return self._machine

    def begin_cell(self, key: str, work: Work, options: argparse.Namespace) -> None:
        """Begins a cell anew, or continues one of the same mini-batches."""
        facts = {
            "machine": self._machine,
            "lengths": list(work.lengths),
            "mini_batch_rows": work.mini_batch_rows,
            "warmup": options.warmup,
        }
        cell = self.data["cells"].get(key)
        same = cell is not None and cell["machine"]["ranks"] == work.ranks
        if not same or any(cell[name] != facts[name] for name in ("lengths", "mini_batch_rows", "warmup")):
            cell = self.data["cells"][key] = {"sides": {}}
        cell |= facts
        self._fresh = set()

    def set_limit(self, key: str, limit_bytes: float) -> None:
        """Notes the memory limit of a cell."""
        self.data["cells"][key]["limit_bytes"] = limit_bytes

    def note(self, key: str, side: str, **facts: Any) -> None:
        """Adds facts about a side. What an earlier run found of it goes first."""
        sides = self.data["cells"][key]["sides"]
        if (key, side) not in self._fresh:
            self._fresh.add((key, side))
            sides[side] = {}
        sides[side] |= {name: value for name, value in facts.items() if value is not None and value != ""}

    def fail(self, key: str, side: str, reason: str, text: str = "") -> None:
        """Notes in a line why a side has no number, and everything that it said."""
        self.note(key, side, reason=reason, text=text)

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
        for cell in self.data["cells"].values():
            sides, order = cell["sides"], [side.name for side in sides_of(cell["machine"]["ranks"])]
            cell["sides"] = {
                name: sides[name] for name in sorted(sides, key=lambda n: order.index(n.split(" (limit)")[0]))
            }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json_text(self.data))


def json_text(data: dict[str, Any]) -> str:
    """The file's text: a line for each side."""
    top = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items() if key != "cells"]
    cells = []
    for key, cell in data["cells"].items():
        facts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in cell.items() if name != "sides"]
        sides = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in cell["sides"].items()]
        cells.append(
            f"{json.dumps(key)}: {{\n" + ",\n".join([*facts, '"sides": {\n' + ",\n".join(sides) + "\n}"]) + "\n}"
        )
    return "{\n" + ",\n".join([*top, '"cells": {\n' + ",\n".join(cells) + "\n}"]) + "\n}\n"


def published(data: dict[str, Any]) -> dict[str, Any]:
    """What is worth keeping beside the tables: without tracebacks and options, and with a few digits.

    A later run can add to it (`--json`).
    """
    cells = {
        key: cell
        | {
            "sides": {
                name: {fact: value for fact, value in found.items() if fact != "text"}
                for name, found in cell["sides"].items()
            }
        }
        for key, cell in data["cells"].items()
    }
    return dict(_rounded({"cells": cells}))


def _rounded(value: Any) -> Any:
    """The same with eight digits: losses are compared to the seventh behind the point."""
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value
