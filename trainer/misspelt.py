"""A flag that nobody knows: the name that was meant."""

import logging
import os
import sys
from collections.abc import Collection
from difflib import get_close_matches

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def unknown_flag(flag: str, known: Collection[str]) -> str:
    """A sentence about a flag that is not known, with the nearest one that is.

    Args:
        flag: As it was written, such as ``--hotspa-overlnog``.
        known: The names that are known, without hyphens before them.
    """
    near = nearest(flag, known)
    return f"there is no flag {flag}" + (f"; did you mean --{near}?" if near else "")


def nearest(flag: str, known: Collection[str]) -> str | None:
    """The name that is most like a flag; None where none is."""
    return next(iter(get_close_matches(_name(flag), sorted(known), n=1, cutoff=0.6)), None)


def warn_of_misspelt(fields: Collection[str]) -> None:
    """Warns of flags of the command line that begin as ours do and are none: a parser that a script has made may call them
    unused, or drop them. Each is told once, by one process.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for word in sys.argv[1:]:
        flag = word.partition("=")[0]
        if not flag.startswith(("--hotspa_", "--hotspa-")) or flag in _warned:
            continue
        if any(name.startswith(_name(flag)) for name in fields):  # argparse takes a beginning for the whole
            continue
        if nearest(flag, fields) is not None:
            _warned.add(flag)
            logger.warning("%s", unknown_flag(flag, fields))


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
