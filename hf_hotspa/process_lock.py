"""Locks of a process on files.

A lock ends with the process that holds it, however that dies, so there are no stale ones: the file that a killed one leaves
may stay. Who gives a lock back removes the file. It is one of POSIX (`lockf`): forked children do not inherit it, and the process itself never
conflicts with it. No torch.
"""

import contextlib
import errno
import fcntl
import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_NAME = ".hotspa-lock"
"""The name of the lock file of a directory."""

_MAX_OWNER = 500
_held: dict[str, int] = {}
"""What this process holds, and the open files: to close any of a file's descriptors gives its lock back."""


class ProcessLock:
    """The lock that a file stands for.

    Args:
        path: The file; made when the lock is taken.

    Attributes:
        left_behind: What the holder before had written, if it died; empty where it gave the lock back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left_behind = ""

    @property
    def _key(self) -> str:
        return str(self.path.parent.resolve() / self.path.name)

    @property
    def held(self) -> bool:
        """Whether this process holds it."""
        return self._key in _held

    def take(self, patience_s: float = 0.0, owner: str = "") -> bool:
        """Takes the lock, if it is not held already.

        Args:
            patience_s: Seconds to wait for another process; a killed one's lock is free as soon as the system has buried it.
            owner: What others read in the file.

        Returns:
            Whether this process has it. True also on a file system without locks, which is said in a warning.

        Raises:
            OSError: the file cannot be made or written to.
        """
        if self.held:
            return True
        deadline = time.monotonic() + patience_s
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                taken = self._wait(descriptor, deadline)
                current = not taken or self._is_at_path(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if taken and current:
                break
            os.close(descriptor)
            if not taken:
                return False
            # the one before has removed the file meanwhile: who comes next would lock another one
        try:
            self.left_behind = os.pread(descriptor, _MAX_OWNER, 0).decode(errors="replace")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner.encode(), 0)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        _held[self._key] = descriptor
        return True

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
        """What the process has written that holds it; empty where nothing can be read. Not for the holder itself."""
        try:
            return self.path.read_text(errors="replace")[:_MAX_OWNER]
        except OSError:
            return ""

    def release(self) -> None:
        """Gives the lock back, if it is held, and removes its file."""
        descriptor = _held.pop(self._key, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)  # also where the file cannot be removed: nobody died here
                if self._is_at_path(descriptor):
                    os.unlink(self.path)
            os.close(descriptor)
