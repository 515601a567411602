"""A save over all ranks: every rank writes its own files at the same time, and rank 0 commits when all of them are done.

    rank 0   takes the run lock, makes the temporary directory                            agree
    all      write and sync their files, hand over names, sizes and hashes, or an error   gather
    rank 0   writes the manifest, syncs, renames: from here on the checkpoint exists       agree
    rank 0   removes older ones

An error of any rank at any point is raised by all ranks, and nothing is left of the checkpoint. A save in the
background differs in one point: the files are written by a thread of each rank, from copies of the tensors in host
memory, and the ranks commit together at the first `poll` at which all of them have written, or in `finish`. There is
never more than one save under way.
"""

import json
import threading
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from hf_hotspa.checkpoint.format.disk import FileRecord
from hf_hotspa.checkpoint.format.folder import RunFolder, write_error
from hf_hotspa.checkpoint.format.manifest import Manifest
from hf_hotspa.errors import HotspaError
from hf_hotspa.parallel.agreement import Agreement

T = TypeVar("T")
WriteFiles = Callable[[Path], list[FileRecord]]
"""Writes a rank's files into a directory, synced, and says what they are."""

MakeManifest = Callable[[tuple[FileRecord, ...]], Manifest]


@dataclass
class _Pending:
    """A save that is under way on this rank."""

    step: int
    temporary: Path
    make_manifest: MakeManifest
    keep: Callable[[], Collection[Path]]
    limit: int | None
    records: list[FileRecord] = field(default_factory=list)
    error: HotspaError | None = None
    thread: threading.Thread | None = None

    def write(self, write_files: WriteFiles) -> None:
        """Keeps what went wrong: it is raised where all ranks are together."""
        try:
            self.records = write_files(self.temporary)
        except HotspaError as error:
            self.error = error
        except Exception as error:  # whatever a serialiser or the disk raises makes the save fail, and nothing else
            self.error = write_error(f"the checkpoint of step {self.step} was not written", self.temporary, error)


class CheckpointWriter:
    """Saves checkpoints of a run into one directory. All methods are collective.

    Args:
        folder: The directory; only rank 0's is used to commit.

    Attributes:
        committed_step: The step of the last checkpoint that this writer committed.
    """

    def __init__(self, folder: RunFolder, agreement: Agreement) -> None:
        self.folder, self.agreement = folder, agreement
        self._pending: _Pending | None = None
        self.committed_step: int | None = None

    @property
    def pending_step(self) -> int | None:
        """The step of the save that is under way."""
        return self._pending.step if self._pending is not None else None

    def lock(self) -> None:
        """Takes the run lock.

        Raises:
            CheckpointLockError: another run holds it.
            CheckpointError: the directory cannot be written to.
        """
        self._on_first(self.folder.lock)

    def save(
        self,
        step: int,
        write_files: WriteFiles,
        make_manifest: MakeManifest,
        *,
        limit: int | None = None,
        keep: Callable[[], Collection[Path]] = lambda: (),
        background: bool = False,
    ) -> None:
        """Writes a checkpoint. On return it exists, or, in the background, is being written.

        Args:
            write_files: Writes this rank's files; in a thread when in the background.
            make_manifest: The manifest of all ranks' files; called on rank 0.
            limit: How many checkpoints stay, see `RunFolder.rotate`.
            keep: Which ones stay in any case; asked when it is time to remove some.
            background: Whether to return before the files are written.

        Raises:
            CheckpointError: it could not be written; nothing is left of it. Also that of an earlier save in the
                background that was still under way: this one is waited for first.
        """
        self.finish()
        begun = self._on_first(lambda: self.folder.begin(step))
        temporary = Path(self.agreement.texts(str(begun))[0])
        pending = self._pending = _Pending(step, temporary, make_manifest, keep, limit)
        if background:
            # a daemon: a run that dies does not wait for a checkpoint that nobody will commit
            pending.thread = threading.Thread(
                target=pending.write, args=(write_files,), name="hotspa-checkpoint", daemon=True
            )
            pending.thread.start()
            return
        pending.write(write_files)
        self.finish()

    def poll(self) -> None:
        """Commits a save in the background when all ranks have written their files. Call it once a step.

        Raises:
            CheckpointError: it failed on some rank.
        """
        pending = self._pending
        if pending is None:
            return
        done = pending.thread is None or not pending.thread.is_alive()
        if bool(self.agreement.gather([float(done)]).all()):
            self.finish()

    def finish(self) -> None:
        """Waits for a save that is under way, and commits it.

        Raises:
            CheckpointError: it failed on some rank.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.thread is not None:
            pending.thread.join()
        try:
            self.agreement.check({}, pending.error, f"step {pending.step}")
        except HotspaError:
            if self.agreement.rank == 0:
                self.folder.abandon(pending.temporary)
            raise
        texts = self.agreement.texts(json.dumps([asdict(record) for record in pending.records]))
        records = tuple(FileRecord(**file) for text in texts for file in json.loads(text))
        self._on_first(lambda: self._commit(pending, records))
        self.committed_step = pending.step

    def close(self) -> None:
        """Gives the run lock back. Not collective; a save under way stays without its commit."""
        self._pending = None
        self.folder.unlock()

    def _commit(self, pending: _Pending, records: tuple[FileRecord, ...]) -> None:
        try:
            committed = self.folder.commit(pending.temporary, pending.make_manifest(records))
        except Exception:
            self.folder.abandon(pending.temporary)
            raise
        self.folder.rotate(committed, pending.limit, pending.keep())

    def _on_first(self, action: Callable[[], T]) -> T | None:
        """Does something on rank 0, and raises its error on all ranks. None on the others."""
        return self.agreement.run(
            "checkpoint",
            lambda: action() if self.agreement.rank == 0 else None,
            otherwise=lambda failure: write_error("no checkpoint was written", self.folder.path, failure),
        )
