"""The files in which a benchmark leaves its numbers and pictures."""

import json
from pathlib import Path
from typing import Any


def write_text(path: str | Path | None, text: str) -> None:
    """Writes a text, where a file was asked for; its folder is made."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)


def write_json(path: str | Path | None, result: Any) -> None:
    """Writes a result, where a file was asked for; its folder is made."""
    write_text(path, json.dumps(result, indent=1) + "\n")
