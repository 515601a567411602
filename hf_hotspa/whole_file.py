"""Files of which no reader ever sees half."""

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Writes a file beside its place and renames it; folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, target)
    return target
