"""What a run notes of a lack of memory, for the next launch: `auto` makes smaller packs for that strategy, and given buckets
that failed before are warned of. One JSON file in the output directory.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_hotspa.costs.json_file import read_json, write_json
from hf_hotspa.engine.faults import OutOfMemory, PhaseFailures
from hf_hotspa.errors import HotspaConfigError, HotspaError
from hf_hotspa.strategy import Bucket, Strategy

logger = logging.getLogger(__name__)

FILE = "hotspa_out_of_memory.json"
_KIND, _VERSION = "hotspa_out_of_memory", 1
_REMEDY = f"delete {FILE}: it only says what to avoid"
_SMALLER = 0.75
"""How much smaller the packs become that failed."""


def record(folder: str | Path, shortage: OutOfMemory) -> None:
    """Adds an entry to the file. Never raises: the lack of memory is the error that counts."""
    try:
        try:
            entries = _entries(folder)
        except HotspaError:  # damaged: what is known now counts
            entries = []
        write_json(Path(folder, FILE), _KIND, _VERSION, {"entries": [*entries, asdict(shortage)]})
    except OSError as error:
        logger.warning("%s could not be written, so the next launch will not know of it: %s", FILE, error)


def note(folder: str | Path, failures: PhaseFailures) -> None:
    """Adds what is known of a lack of memory on this rank to the file, once. Never raises."""
    shortage, failures.out_of_memory = failures.out_of_memory, None
    if shortage is not None:
        record(folder, shortage)


def largest_packs(folder: str | Path) -> dict[str, int]:
    """Strategy -> the most tokens that its packs should have; 0 where its weights did not fit. Empty without a file.

    Raises:
        HotspaConfigError: the file is damaged.
    """
    most: dict[str, int] = {}
    for entry in _entries(folder):
        name, tokens = entry["strategy"], int(entry["pack_tokens"] * _SMALLER)
        most[name] = min(tokens, most.get(name, tokens))
    return most


def fewest_tokens(shortages: Iterable[Mapping[str, int]]) -> dict[Strategy, int]:
    """The answers of `largest_packs` on all ranks as one."""
    most: dict[Strategy, int] = {}
    for of_rank in shortages:
        for name, tokens in of_rank.items():
            strategy = Strategy.parse(name)
            most[strategy] = min(tokens, most.get(strategy, tokens))
    return most


def warn_of_known(folder: str | Path, buckets: Sequence[Bucket]) -> None:
    """Warns of buckets that ran out of memory before. Never raises."""
    try:
        entries = _entries(folder)
    except HotspaError as error:
        logger.warning("%s", error)
        return
    for bucket in buckets:
        failed = [e for e in entries if Strategy.parse(e["strategy"]) == bucket.strategy]
        tokens = min((entry["pack_tokens"] for entry in failed), default=None)
        if tokens is not None and bucket.capacity >= tokens:
            what = f"with a pack of {tokens} tokens" if tokens else "before its first pack"
            logger.warning(
                "%s ran out of memory in an earlier run %s (%s): lower the tokens after @, or use more tp or pp",
                bucket,
                what,
                Path(folder, FILE),
            )


def _entries(folder: str | Path) -> list[dict[str, Any]]:
    """The entries of the file, checked; none without a file."""
    path = Path(folder, FILE)
    if not path.exists():
        return []
    entries: Any = read_json(path, _KIND, _VERSION, _REMEDY).get("entries")
    good = isinstance(entries, list) and all(
        isinstance(e, dict) and isinstance(e.get("strategy"), str) and type(e.get("pack_tokens")) is int
        for e in entries
    )
    if not good or any(entry["pack_tokens"] < 0 for entry in entries):
        raise HotspaConfigError("its entries are not what a run writes", where=str(path), fix=_REMEDY)
    checked: list[dict[str, Any]] = entries
    for entry in checked:
        Strategy.parse(entry["strategy"])
    return checked
