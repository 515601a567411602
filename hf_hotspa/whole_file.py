"""Writes files atomically, so that no reader ever sees half of one. JSON files that people read and edit, with a kind, a
schema version and clear errors."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_hotspa.errors import HotspaConfigError


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Writes a temporary file beside the target and renames it; creates folders."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, target)
    return target


def write_json(path: str | os.PathLike[str], kind: str, version: int, data: Mapping[str, Any]) -> None:
    """Writes a file atomically, and creates its folders. `kind` is the file's first key."""
    write_whole(path, json.dumps({"kind": kind, "schema_version": version, **data}, indent=1) + "\n")


def read_json(path: str | os.PathLike[str], kind: str, version: int, remedy: str) -> dict[str, Any]:
    """Reads a file of `write_json`. `version`: the version that this program reads. `remedy`: how the user gets a valid
    file, for messages. Raises `HotspaConfigError`: no file, no JSON, another kind, or another version."""
    data, where = read_object(path, kind, remedy), str(path)
    if data.get("kind") != kind:
        raise HotspaConfigError(
            f"the file is not of kind {kind}; it holds {data.get('kind')!r}", where=where, fix=remedy
        )
    if data.get("schema_version") != version:
        raise HotspaConfigError(
            f"{kind} has schema version {data.get('schema_version')!r}, and this program reads {version}",
            where=where,
            fix=remedy,
        )
    return data


def read_object(path: str | os.PathLike[str], what: str, remedy: str) -> dict[str, Any]:
    """Returns the JSON object of a file. Raises `HotspaConfigError`: no file, no JSON, or not an object."""
    where = str(path)
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise HotspaConfigError(f"{what} cannot be read: {error.strerror or error}", where=where, fix=remedy) from None
    except (ValueError, RecursionError) as error:
        raise HotspaConfigError(f"{what} is not valid JSON: {error}", where=where, fix=remedy) from None
    if not isinstance(data, dict):
        raise HotspaConfigError(f"{what} holds {type(data).__name__!r}", where=where, fix=remedy)
    return data
