"""The directory of a run: its lock, the commit of a checkpoint, the newest good checkpoint, and rotation.

A checkpoint is written under another name, synced, and renamed to `checkpoint-<step>`: a directory of that name is
complete. Names that begin with a dot are leftovers of an interrupted save or removal; the next run that holds the lock
removes them:

    .tmp-checkpoint-20-<run>   being written
    .old-checkpoint-20-<run>   replaced by a new one of the same step; put back if that one did not arrive
    .del-checkpoint-20-<run>   being removed

One process of a run (rank 0) works with this class. No torch.
"""

import contextlib
import errno
import json
import logging
import os
import re
import socket
import uuid
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from hf_hotspa.checkpoint.format.disk import Disk, directory_mode
from hf_hotspa.checkpoint.format.manifest import MANIFEST, STATE_FOLDER, Manifest, read_manifest, verify
from hf_hotspa.errors import CheckpointError, CheckpointLockError, DamagedCheckpointError, UnsavableError
from hf_hotspa.process_lock import LOCK_NAME, ProcessLock

logger = logging.getLogger(__name__)

LOCK = LOCK_NAME
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
_LEFTOVER = re.compile(r"\.(tmp|old|del)-(checkpoint-\d{1,15})-[A-Za-z0-9]+")
_OF_SYSTEM = re.compile(r"\(os error \d+\)")  # how Rust libraries report a disk error
_CLOCK_S = 1.0
_LOCK_PATIENCE_S = 5.0  # the system frees a killed run's lock once it has removed the process


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def checkpoints(folder: Path) -> list[Path]:
    """Returns the committed checkpoints of a run, newest step first. Does not look into them."""
    numbered = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            match = _CHECKPOINT.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                numbered.append((int(match[1]), entry.name))
    return [folder / name for _, name in sorted(numbered, reverse=True)]


def latest_first(folders: Iterable[Path]) -> list[Path]:
    """Sorts checkpoints by time of writing, latest first, as the stock Trainer rotates them: an earlier run's may have
    higher steps. By step if all times are within a second, as on a file system without times."""
    by_step = sorted(folders, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)
    times = {path: path.stat().st_mtime for path in by_step}
    if not times or max(times.values()) - min(times.values()) < _CLOCK_S:
        return by_step
    return sorted(by_step, key=times.__getitem__, reverse=True)  # equal times stay by step


def check_step(path: Path, manifest: Manifest) -> None:
    """Raises `DamagedCheckpointError` if a directory's name has another step than its manifest."""
    match = _CHECKPOINT.fullmatch(path.name)
    if match and int(match[1]) != manifest.step:
        raise DamagedCheckpointError(f"the directory {path.name!r} holds step {manifest.step}", where=str(path))


class RunFolder:
    """The checkpoints of one run in one directory, which is made when the lock is taken. `run` identifies the run in names
    and manifests."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path, self.disk, self.run = Path(path), disk or Disk(), uuid.uuid4().hex[:12]
        self._verified: dict[Path, tuple[Manifest, list[_Stat]]] = {}
        self._lock = ProcessLock(self.path / LOCK)
        self._mode = directory_mode()

    # -- the lock -----------------------------------------------------------------------------------------------------

    @property
    def is_locked(self) -> bool:
        return self._lock.is_locked

    def lock(self) -> None:
        """Takes the run lock and removes what dead runs left. Does nothing if this process holds it already.

        The lock ends with the process, however it dies, so there are no stale locks. Raises `CheckpointLockError`:
        another run holds it. Raises `CheckpointError`: the directory is not writable.
        """
        if self.is_locked:
            return
        owner = {"run": self.run, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.disk.before("lock", self._lock.path)
            taken = self._lock.take(_LOCK_PATIENCE_S, json.dumps(owner))
        except OSError as error:
            raise write_error("no checkpoint can be written here", self.path, error) from error
        if not taken:
            raise CheckpointLockError(
                f"another run writes its checkpoints into {str(self.path)!r}",
                where=_in_words(self._lock.owner()),
                why="two runs would replace and remove each other's checkpoints",
                fix="give every run its own output_dir, or stop the other one",
            )
        self._clear_leftovers()

    def unlock(self) -> None:
        self._lock.release()

    def _clear_leftovers(self) -> None:
        """Removes what dead runs left, and restores a replaced checkpoint if its successor never arrived."""
        for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name):
            match = _LEFTOVER.fullmatch(entry.name)
            if not match or not entry.is_dir(follow_symlinks=False):
                continue
            path, home = self.path / entry.name, self.path / match[2]
            try:
                if match[1] == "old" and not home.exists():
                    self.disk.rename(path, home)
                    self.disk.sync_directory(self.path)
                else:
                    self.disk.remove(path)
            except OSError as error:
                logger.warning("%s was left by an earlier run and cannot be removed: %s", path, error)

    # -- writing ------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """Makes a directory in which the checkpoint of a step is written, with an empty `hotspa/` in it. Raises
        `CheckpointError`: it cannot be made. Raises `CheckpointLockError`: another run writes here."""
        self.lock()
        path = self.path / f".tmp-{checkpoint_name(step)}-{self.run}"
        try:
            if path.exists():  # an earlier save of this run that could not be removed
                self.disk.remove(path)
            self.disk.make_directory(path)
            self.disk.make_directory(path / STATE_FOLDER)
        except OSError as error:
            self.abandon(path)
            raise write_error(f"{checkpoint_name(step)} was not written", self.path, error) from error
        return path

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Writes the manifest and renames the directory, which commits the checkpoint. `temporary`: from `begin`; holds
        every file of the manifest, synced. Raises `CheckpointError`: something failed; the caller abandons the
        directory."""
        target = self.path / checkpoint_name(manifest.step)
        try:
            state = temporary / STATE_FOLDER
            if any(state.iterdir()):
                state.chmod(self._mode)
                self.disk.sync_directory(state)
            else:  # only the model is saved
                self.disk.remove(state)
            self.disk.write(temporary, MANIFEST, [manifest.text().encode()])
            temporary.chmod(self._mode)
            self.disk.sync_directory(temporary)
            replaced = None
            if target.exists():  # from an earlier run, or damaged: never written into
                replaced = self.path / f".old-{target.name}-{self.run}"
                self.disk.rename(target, replaced)
            try:
                self.disk.rename(temporary, target)
            except OSError:
                if replaced is not None:
                    self.disk.rename(replaced, target)
                raise
            self.disk.sync_directory(self.path)
        except OSError as error:
            raise write_error(f"{target.name} was not written", self.path, error) from error
        self._verified[target] = _signature(target, manifest)
        if replaced is not None:
            self.abandon(replaced)
        return target

    def amend(self, path: Path) -> None:
        """Takes over into the manifest what has changed in the files of a checkpoint since this run committed it, such
        as a config that code of the user completes. Ignores errors of the disk, and a checkpoint without a needed
        file: it does not verify."""
        try:
            manifest = read_manifest(path)
            _, then = self._verified.get(path, (None, ()))
            records = []
            for record, before in zip(manifest.files, then[1:], strict=False):
                file = path / record.name
                if not file.exists():
                    continue
                records.append(record if _stat_of(file) == before else self.disk.record(path, record.name))
            if not then or tuple(records) == manifest.files:
                return
            amended = replace(manifest, files=tuple(records))
            Manifest.parse(amended.text(), str(path))
            self.disk.write(path, f"{MANIFEST}.new", [amended.text().encode()])
            self.disk.rename(path / f"{MANIFEST}.new", path / MANIFEST)
            self.disk.sync_directory(path)
            self._verified[path] = _signature(path, amended)
        except (DamagedCheckpointError, OSError) as error:
            logger.warning("%s was changed after it was written: %s", path, error)

    def abandon(self, path: Path) -> None:
        """Removes a directory of this run that is not a checkpoint, such as a failed save. Ignores disk errors."""
        try:
            if path.exists():
                self.disk.remove(path)
        except OSError as error:
            logger.warning("%s could not be removed: %s", path, error)

    # -- which ones are good ------------------------------------------------------------------------------------------

    def verified(self, path: Path, reread: bool = False) -> bool:
        """Returns whether a checkpoint is complete. Rereads it only if a file's size, time or identity changes."""
        try:
            manifest = read_manifest(path)
            if reread or self._verified.get(path) != _signature(path, manifest):
                check_step(path, verify(path))
                self._verified[path] = _signature(path, manifest)
        except (DamagedCheckpointError, OSError) as error:
            self._verified.pop(path, None)
            logger.warning("%s does not count as a checkpoint: %s", path, error)
            return False
        return True

    def rotate(self, newest: Path, limit: int | None, keep: Collection[Path] = ()) -> None:
        """Removes checkpoints, oldest first, until `limit` good ones are left. Ignores errors of the disk.

        Only checkpoints that verify count. The newest one, just committed, and those to keep (the best model) stay; if
        only the newest one would be left, it is read back first. Directories without a manifest of ours are not
        touched. `limit`: includes those to keep; None or less than 1 for all.
        """
        if limit is None or limit < 1:
            return
        try:
            kept, there = {newest, *keep}, latest_first(checkpoints(self.path))
            good = [path for path in there if path in kept and self.verified(path)]
            if newest not in good:
                return
            victims = []
            for path in there:
                if path in kept:
                    continue
                if len(good) >= limit:
                    victims.append(path)
                elif self.verified(path):
                    good.append(path)
            victims = [path for path in victims if _is_ours(path)]
            if not victims or (len(good) < 2 and not self.verified(newest, reread=True)):
                return
            # the oldest first: if this is interrupted, the newer ones remain
            for path in reversed(victims):
                grave = self.path / f".del-{path.name}-{self.run}"
                self.disk.rename(path, grave)
                self._verified.pop(path, None)
                self.disk.remove(grave)
        except OSError as error:
            logger.warning("older checkpoints in %s could not be removed: %s", self.path, error)


def may_pass(error: BaseException, folder: Path) -> bool:
    """Returns whether another save may succeed: for a failed disk or no memory, not for files elsewhere or a
    serialiser."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, not imported here
        return True
    if not isinstance(error, OSError) or error.errno is None:
        return bool(_OF_SYSTEM.search(str(error)))
    if error.filename is None:
        return error.errno != errno.ENOENT
    named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else folder
    return named.is_relative_to(folder) or folder.is_relative_to(named)


def unsavable(what: str, folder: Path, error: BaseException) -> UnsavableError:
    """Returns the error for something that no disk could store."""
    return UnsavableError(
        f"{what} cannot be written: {type(error).__name__}: {error}",
        where=str(folder),
        why="no save can succeed with it, and earlier checkpoints are untouched",
        fix="repair what is named; without saves (save_strategy='no') it is not needed",
    )


def write_error(what: str, path: Path, error: BaseException) -> CheckpointError:
    """Returns the error for a failed save: `UnsavableError` if no other save can succeed."""
    if not may_pass(error, path):
        return unsavable("something that is saved beside the weights", path, error)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"{what}: {reason}",
        where=str(path),
        why="earlier checkpoints are untouched",
        fix="free space on the disk (or memory, if that ran out), or make output_dir a writable directory that all ranks share",
    )


def _in_words(owner: str) -> str | None:
    try:
        process = json.loads(owner)
        return f"process {process['pid']} on {process['host']}"
    except (ValueError, KeyError, TypeError):
        return None


def _is_ours(path: Path) -> bool:
    try:
        read_manifest(path)
    except DamagedCheckpointError:
        return False
    return True


_Stat = tuple[int, int, int, int]


def _signature(path: Path, manifest: Manifest) -> tuple[Manifest, list[_Stat]]:
    """Changes whenever a file of the checkpoint is written or replaced."""
    return manifest, [_stat_of(path / name) for name in (MANIFEST, *(file.name for file in manifest.files))]


def _stat_of(file: Path) -> _Stat:
    """Changes whenever the file is written or replaced."""
    s = file.stat()
    return s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns
