"""Writes files atomically: no reader ever sees half of one."""

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Writes a temporary file beside the target and renames it; creates folders."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, target)
    return target
