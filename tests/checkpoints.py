"""Small checkpoints without torch: two ranks, three parameters, real files; and a disk on which something happens."""

import logging
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hf_hotspa.checkpoint.format.disk import DTYPES, Disk, FileRecord, TensorRecord, tensor_file
from hf_hotspa.checkpoint.format.folder import RunFolder
from hf_hotspa.checkpoint.format.manifest import STATE, Manifest, SavedParameter, SavedSegment, rank_tensors

WORLD = 2


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A temporary directory in memory where the system has one: these tests make thousands of files."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 1 << 30 else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="hotspa-checkpoints-") as folder:
        yield Path(folder)


@contextmanager
def warnings_of_ours() -> Iterator[list[str]]:
    """The warnings that our loggers give in this process inside, also in a rank."""
    said, handler = list[str](), logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_hotspa").addHandler(handler)
    yield said
    logging.getLogger("hf_hotspa").removeHandler(handler)


@pytest.fixture(name="tmp_path")
def memory_path() -> Iterator[Path]:
    """For a test module that imports it: `tmp_path` is in memory."""
    with memory_folder() as folder:
        yield folder


class FaultyDisk(Disk):
    """Notes the changes of a process, and does something ahead of one of them.

    Args:
        fatal: The number of that change, from 0; None for no such thing.
        action: What happens; it is told the kind of change and the path.
    """

    def __init__(self, fatal: int | None = None, action: Callable[[str, Path], None] | None = None) -> None:
        self.changes, self.fatal, self.action = list[tuple[str, str]](), fatal, action

    def before(self, change: str, path: Path) -> None:
        self.changes.append((change, path.name))
        if self.action is not None and len(self.changes) - 1 == self.fatal:
            self.action(change, path)


def die(change: str, path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tiny_manifest(step: int, files: tuple[FileRecord, ...] = (), run: str = "test", world: int = WORLD) -> Manifest:
    """Two segments: a matrix and a bias, and a frozen vector of which rank 0 owns nothing."""
    states = {"weight": "float32", "exp_avg": "float32"}
    return Manifest(
        step=step,
        world_size=world,
        strategies="dp2:8@8",
        resumable=True,
        run=run,
        versions={"hf-hotspa": "0"},
        files=files,
        segments=(SavedSegment(0, 8, (0, 4, 8)), SavedSegment(8, 10, (0, 0, 2))),
        parameters=(
            SavedParameter("a.weight", (2, 3), 1, 0, 0, True, "float32", ("b.weight",), "a.weight", states),
            SavedParameter("a.bias", (2,), None, 0, 6, True, "float32", (), "a.bias", states),
            SavedParameter("norm", (2,), None, 1, 8, False, "bfloat16", (), "norm", {"weight": "bfloat16"}),
        ),
    )


def rank_records(manifest: Manifest, rank: int) -> list[tuple[TensorRecord, bytes]]:
    """The tensors of a rank with contents that depend on step, rank and name."""
    entries = []
    for parameter in manifest.parameters:
        low, high = manifest.share(parameter, rank)
        for state, dtype in parameter.states.items():
            if high > low:
                name = f"{state}/{parameter.name}"
                data = random.Random(f"{manifest.step} {rank} {name}").randbytes((high - low) * DTYPES[dtype][1])
                entries.append((TensorRecord(name, dtype, (high - low,)), data))
    return entries


def write_rank(disk: Disk, folder: Path, step: int, rank: int) -> list[FileRecord]:
    """The files of a rank, one of them of the Hugging Face model; rank 0 writes the state and a config, too."""
    entries = rank_records(tiny_manifest(step), rank)
    records = [disk.write(folder, rank_tensors(rank, WORLD), tensor_file(entries, lambda data: data))]
    name = f"model-{rank + 1:05d}-of-{WORLD:05d}.safetensors"
    records.append(disk.write(folder, name, tensor_file(entries, lambda data: bytes(byte ^ 1 for byte in data))))
    if rank == 0:
        records.append(disk.write(folder, STATE, [b'{"step": %d}' % step]))
        records.append(disk.write(folder, "config.json", [b'{"model_type": "%d"}' % step]))
    return records


def write_checkpoint(
    folder: RunFolder, step: int, prepare: Callable[[Path], None] = lambda path: None, world: int = WORLD
) -> Path:
    """A whole save by one process in place of all ranks."""
    temporary = folder.begin(step)
    prepare(temporary)
    records = [record for rank in range(world) for record in write_rank(folder.disk, temporary, step, rank)]
    return folder.commit(temporary, tiny_manifest(step, tuple(records), folder.run))
