"""One process at a time compiles an extension of torch, and none waits for a compilation that was killed.

torch's own lock is a file `lock` in the folder of the extension, which stays where its process is killed; every later
one then waits for it for ever, and says nothing. Here ours wait for each other by a lock that ends with its process,
and a file that nobody holds is taken away: at once where one of ours died on this machine, else when it is older than
any compilation.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from hf_hotspa.process_lock import LOCK_NAME, ProcessLock

logger = logging.getLogger(__name__)

_BATON = "lock"  # the name that torch gives it
_PATIENCE_S = 1200.0
"""How long a living process is waited for; less than ranks wait for each other."""

_STALE_S = 600.0
"""The age from which a file is left over that nobody on this machine holds, and that may be another machine's. Compiling
takes a minute or two."""


@contextlib.contextmanager
def sole_compiler(folder: Path) -> Iterator[None]:
    """Inside, no other process of ours compiles in this folder, and torch will not wait for one that is gone.

    Args:
        folder: Of the extension, in torch's cache.

    Raises:
        TimeoutError: another process is at it for longer than any compilation takes.
        OSError: the folder cannot be written to.
    """
    lock, host = ProcessLock(folder / LOCK_NAME), socket.gethostname()
    if not lock.take(owner=host):
        logger.warning("waiting for another process, which compiles in %s", folder)
        if not lock.take(_PATIENCE_S, owner=host):
            raise TimeoutError(f"another process has been compiling in {folder} for {_PATIENCE_S:.0f} s")
    try:
        _take_away(folder / _BATON, died_here=lock.left_behind == host)
        yield
    finally:
        lock.release()


def _take_away(baton: Path, died_here: bool) -> None:
    """Waits until torch's file is gone, or removes it where nobody holds it any more."""
    deadline, waits = time.monotonic() + _PATIENCE_S, False
    while (age_s := _age_s(baton)) is not None:
        holder = _holder(baton)
        if holder is None and (died_here or age_s > _STALE_S):
            logger.warning("%s was left by a compilation that was killed, and is removed", baton)
            baton.unlink(missing_ok=True)
            return
        who = f"process {holder} holds {baton}" if holder is not None else f"{baton} may be another machine's"
        if time.monotonic() > deadline:
            raise TimeoutError(f"{who}; remove it if nothing compiles there")
        if not waits:
            waits = True
            logger.warning("waiting: %s; remove it if nothing compiles there", who)
        time.sleep(0.1)


def _age_s(path: Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None


def _holder(path: Path) -> int | None:
    """A process of this machine that has the file open, as torch has it while it compiles; None where none is seen."""
    wanted = str(path.resolve())
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # of somebody else, or ended meanwhile
            if any(os.readlink(entry.path) == wanted for entry in os.scandir(folder)):
                return int(folder.parent.name)
    return None
