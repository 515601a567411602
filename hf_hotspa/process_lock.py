"""Locks of a process on files.

A lock ends with its process, so locks never become stale: a killed process's lock file may stay. `release` removes the
file. They are POSIX locks (`lockf`): forked children do not inherit them, and a process never conflicts with its own
lock. No torch.
"""

import contextlib
import errno
import fcntl
import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_NAME = ".hotspa-lock"  # the name of the lock file of a directory
_MAX_OWNER = 500
_descriptors: dict[str, int] = {}  # open files by locked path. Closing any descriptor of a file releases its lock.


class ProcessLock:
    """A lock on a file, which is created when the lock is taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left_behind = ""  # the text of the previous holder, if it died; empty if it released the lock

    @property
    def _key(self) -> str:
        return str(self.path.parent.resolve() / self.path.name)

    @property
    def is_locked(self) -> bool:
        """Whether this process holds the lock."""
        return self._key in _descriptors

    def take(self, patience_s: float = 0.0, owner: str = "") -> bool:
        """Takes the lock, unless this process already holds it. `patience_s`: seconds to wait for another process; a
        killed process's lock is free once it is reaped. `owner`: the text that others read in the file. Returns whether
        this process holds the lock; true, with a warning, on a file system without locks. Raises `OSError`: the file
        cannot be created or written to."""
        if self.is_locked:
            return True
        deadline = time.monotonic() + patience_s
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                taken = self._wait(descriptor, deadline)
                if taken and self._is_at_path(descriptor):
                    self.left_behind = os.pread(descriptor, _MAX_OWNER, 0).decode(errors="replace")
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, owner.encode(), 0)
                    _descriptors[self._key] = descriptor
                    return True
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
                raise
            os.close(descriptor)
            if not taken:
                return False
            # the previous holder removed the file meanwhile: the next process would lock another file

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _wait(self, descriptor: int, deadline: float) -> bool:
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    logger.warning("no lock on %s (%s): start no second run there", self.path.parent, error.strerror)
                    return True
                if time.monotonic() > deadline:
                    return False
            time.sleep(0.1)

    def owner(self) -> str:
        """Returns the holder's text; empty if unreadable. Not for the holder itself."""
        try:
            return self.path.read_text(errors="replace")[:_MAX_OWNER]
        except OSError:
            return ""

    def release(self) -> None:
        """Releases the lock, if held, and removes its file."""
        descriptor = _descriptors.pop(self._key, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)  # if the file cannot be removed, it must still show that nobody died
                if self._is_at_path(descriptor):
                    os.unlink(self.path)
            os.close(descriptor)
