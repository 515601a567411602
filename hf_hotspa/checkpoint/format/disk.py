"""Every change that checkpoints make on disk, one method each; files are synced and hashed as they are written.

Each change calls `Disk.before` first. It does nothing; tests replace it to count the changes and to fail or die at any
of them, to check that the last good checkpoint always survives.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from hf_hotspa.errors import DamagedCheckpointError
from hf_hotspa.typed import Count

MAX_JSON_BYTES = 256 << 20  # a larger JSON file is rejected before it is read
MAX_HEADER_BYTES = 100_000_000  # the largest header of a safetensors file that the safetensors library reads
Buffer = bytes | memoryview
T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")

DTYPES = {"float64": ("F64", 8), "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "int64": ("I64", 8),
          "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "uint8": ("U8", 1), "bool": ("BOOL", 1)}  # fmt: skip
"""Name of a dtype -> its name in a safetensors file, and bytes of an element."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its path below the checkpoint (with `/`), bytes, and SHA-256 in hex."""

    name: str
    size: Count
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """One tensor's entry in a safetensors file: name, dtype (such as `float32`) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def check_name(name: str, where: str) -> str:
    """Returns a relative path if all its parts are harmless (letters, digits, `.`, `_`, `-`). Raises
    `DamagedCheckpointError`: it could lead out of the checkpoint."""
    parts = name.split("/")
    if not all(_NAME.fullmatch(part) and part.strip(".") for part in parts) or len(parts) > 4:
        raise DamagedCheckpointError(f"the file name {name[:200]!r} is not allowed", where=where)
    return name


@contextlib.contextmanager
def open_inside(folder: Path, name: str) -> Iterator[BufferedReader]:
    """Opens a file below a checkpoint for reading; no part of the path may be a link. Raises `DamagedCheckpointError`:
    it is missing, unreadable, not a regular file, or its name is not allowed."""
    check_name(name, str(folder))
    path = folder / name
    try:
        for parent in list(path.parents)[: name.count("/")]:
            if parent.is_symlink():
                raise OSError("a symbolic link")
        # without O_NONBLOCK, opening a named pipe would wait for a writer
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("not a regular file")
            yield file
    except OSError as error:
        raise DamagedCheckpointError(
            f"the file {name!r} cannot be read: {error.strerror or error}", where=str(folder)
        ) from error


def read_text(folder: Path, name: str, limit: int = MAX_JSON_BYTES) -> str:
    """Returns the text of a file of a checkpoint. Raises `DamagedCheckpointError`: it cannot be read, is larger than
    `limit` bytes, or is not UTF-8."""
    with open_inside(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise DamagedCheckpointError(f"{name!r} has {size} bytes, more than {limit}", where=str(folder))
        data = file.read(limit + 1)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{name!r} is not UTF-8 text: {error}", where=str(folder)) from None


def parse_object(text: str, name: str, where: str) -> dict[str, Any]:
    """Parses a JSON object. Raises `DamagedCheckpointError`: the text is something else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{name!r} is not valid JSON: {error}", where=where) from None
    if not isinstance(data, dict):
        raise DamagedCheckpointError(f"{name!r} holds no JSON object", where=where)
    return data


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Reads a file of a checkpoint that holds a JSON object. Raises `DamagedCheckpointError` otherwise."""
    return parse_object(read_text(folder, name), name, str(folder))


def tensor_file(tensors: Sequence[tuple[TensorRecord, T]], data: Callable[[T], Buffer]) -> Iterator[Buffer]:
    """Yields a safetensors file: its header, then the bytes of one tensor after the other.

    The writer of the safetensors library needs all tensors in memory at once; this one does not. `tensors`: the records
    of the file, in order, each with a source for `data`. `data`: returns the bytes of a tensor from its source; called
    once for each, in order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for record, _ in tensors:
        kind, itemsize = DTYPES[record.dtype]
        begin, end = end, end + itemsize * math.prod(record.shape)
        header[record.name] = {"dtype": kind, "shape": list(record.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{len(tensors)} tensors are too many for one file")
    yield struct.pack("<Q", len(text)) + text
    for _, source in tensors:
        yield data(source)


class Disk:
    """Changes of the disk. Errors of the system pass through (`OSError`)."""

    def before(self, change: str, path: Path) -> None:
        """Called ahead of every change; for tests."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory that only this user can enter; it must not exist."""
        self.before("mkdir", path)
        os.mkdir(path, 0o700)

    def write(self, folder: Path, name: str, chunks: Iterable[Buffer]) -> FileRecord:
        """Writes a new file chunk by chunk, hashes it and syncs it."""
        path = folder / check_name(name, str(folder))
        digest, size = hashlib.sha256(), 0
        self.before("create", path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o666), "wb") as file:
            for chunk in chunks:
                self.before("write", path)
                view = memoryview(chunk).cast("B")
                digest.update(view)
                size += file.write(view)
            self.before("sync", path)
            file.flush()
            os.fsync(file.fileno())
        return FileRecord(name, size, digest.hexdigest())

    def adopt(self, folder: Path, skipped: Collection[str] = ()) -> list[FileRecord]:
        """Syncs and hashes every file in a folder that other code wrote. Does not sync the folder itself."""
        records = []
        entries = [path for path in folder.iterdir() if path.name not in skipped]
        for path in sorted([*entries, *(below for top in entries if top.is_dir() for below in top.rglob("*"))]):
            name = check_name(path.relative_to(folder).as_posix(), str(folder))
            if path.is_dir():
                self.sync_directory(path)
            else:
                records.append(self.record(folder, name))
        return records

    def record(self, folder: Path, name: str) -> FileRecord:
        """Syncs and hashes a file that other code wrote."""
        self.before("sync", folder / name)
        with open_inside(folder, name) as file:
            os.fsync(file.fileno())
            return FileRecord(name, os.fstat(file.fileno()).st_size, file_digest(file))

    def sync_directory(self, path: Path) -> None:
        """Syncs the names in a directory."""
        self.before("sync", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        """Renames a directory; the target must not exist."""
        self.before("rename", path)
        os.rename(path, target)

    def remove(self, path: Path) -> None:
        """Removes a directory and its contents, never through a link."""
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                self.remove(Path(entry.path))
            else:
                self.before("unlink", Path(entry.path))
                os.unlink(entry.path)
        self.before("rmdir", path)
        os.rmdir(path)


def directory_mode() -> int:
    """Returns the permissions of a new directory of this process. Not for threads: it sets the umask to read it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o777 & ~mask


def file_digest(file: BufferedReader) -> str:
    """Returns the SHA-256, in hex, of a file from its beginning."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()
