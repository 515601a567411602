"""What ran out of memory, for the next launch: one JSON file in the output directory.

`auto` then makes smaller packs for that strategy, and given buckets that failed before cause a warning.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from hf_hotspa.engine.faults import OutOfMemory, PhaseFailures
from hf_hotspa.errors import HotspaConfigError, HotspaError
from hf_hotspa.strategy import Bucket, Strategy
from hf_hotspa.typed import typed
from hf_hotspa.whole_file import read_json, write_json

logger = logging.getLogger(__name__)

FILE = "hotspa_out_of_memory.json"
_KIND, _VERSION = "hotspa_out_of_memory", 1
_REMEDY = f"delete {FILE}: it only says what to avoid"
_SMALLER = 0.75  # factor from a failed pack size to the new one


def record(folder: str | Path, shortage: OutOfMemory) -> None:
    """Adds an entry to the file. Never raises: running out of memory is the error that counts."""
    try:
        try:
            entries = _entries(folder)
        except HotspaError:  # damaged: only the new entry counts
            entries = []
        write_json(Path(folder, FILE), _KIND, _VERSION, {"entries": [*map(asdict, entries), asdict(shortage)]})
    except OSError as error:
        logger.warning("%s could not be written, so the next launch will not know of it: %s", FILE, error)


def note(folder: str | Path, failures: PhaseFailures) -> None:
    """Writes this rank's out-of-memory facts to the file, once. Never raises."""
    shortage, failures.out_of_memory = failures.out_of_memory, None
    if shortage is not None:
        record(folder, shortage)


def largest_packs(folder: str | Path) -> dict[str, int]:
    """Strategy -> maximum tokens of its packs; 0 if its weights did not fit. Empty without a file. Raises
    `HotspaConfigError`: the file is damaged."""
    most: dict[str, int] = {}
    for entry in _entries(folder):
        tokens = int(entry.pack_tokens * _SMALLER)
        most[entry.strategy] = min(tokens, most.get(entry.strategy, tokens))
    return most


def fewest_tokens(shortages: Iterable[Mapping[str, int]]) -> dict[Strategy, int]:
    """Combines `largest_packs` of all ranks."""
    most: dict[Strategy, int] = {}
    for of_rank in shortages:
        for name, tokens in of_rank.items():
            strategy = Strategy.parse(name)
            most[strategy] = min(tokens, most.get(strategy, tokens))
    return most


def warn_of_known(folder: str | Path, buckets: Sequence[Bucket]) -> None:
    """Warns of buckets that failed before. Never raises."""
    try:
        entries = _entries(folder)
    except HotspaError as error:
        logger.warning("%s", error)
        return
    for bucket in buckets:
        failed = [entry for entry in entries if Strategy.parse(entry.strategy) == bucket.strategy]
        tokens = min((entry.pack_tokens for entry in failed), default=None)
        if tokens is not None and bucket.capacity >= tokens:
            what = f"with a pack of {tokens} tokens" if tokens else "before its first pack"
            logger.warning(
                "%s ran out of memory in an earlier run %s (%s): lower the tokens after @, or use more tp or pp",
                bucket, what, Path(folder, FILE),
            )  # fmt: skip


def _entries(folder: str | Path) -> list[OutOfMemory]:
    """The checked entries of the file, if it exists."""
    path = Path(folder, FILE)
    if not path.exists():
        return []
    try:
        entries = typed(read_json(path, _KIND, _VERSION, _REMEDY).get("entries"), list[OutOfMemory])
    except ValueError as error:
        raise HotspaConfigError("its entries are not what a run writes", where=str(path), fix=_REMEDY) from error
    for entry in entries:
        Strategy.parse(entry.strategy)
    return entries
