"""`MANIFEST.json`: what a checkpoint holds, and where each element of each parameter lies in it.

The file carries its own SHA-256, and it must be, byte for byte, what `Manifest.text` writes. So every change is
noticed, including doubled keys. A hash finds damage, not forgery by someone with write access.

The parameters lie end to end in one vector, as in `layout.vector`, divided in segments. Rank r holds the elements
`[start + cuts[r], start + cuts[r + 1])` of every segment; its file holds the part of each parameter in that range, as
1-D tensors in storage order (the sharded dim outermost).

In formats 2 and 3 the root is a Hugging Face model (or adapter) folder, and files that only we read lie in `hotspa/`.
Format 1 had our files at the root and the configs in `model/`; it is read, no longer written.
"""

import hashlib
import itertools
import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from hf_hotspa.checkpoint.format import disk
from hf_hotspa.errors import DamagedCheckpointError
from hf_hotspa.layout.placement import MASTER_ALIGNMENT
from hf_hotspa.typed import Count, typed

MANIFEST = "MANIFEST.json"
KIND = "hf_hotspa checkpoint"
SCHEMA_VERSION, WITH_BLOCKS = 2, 3
"""The format; and the one for checkpoints in which a value of a state stands for several elements (unknown to 2)."""
STATE_FOLDER = "hotspa"  # the folder of files that only we read; the names below it are as in `Manifest.located`
STATE = f"{STATE_FOLDER}/state.json"
BUFFERS = f"{STATE_FOLDER}/buffers.safetensors"
TRAINER_STATE = "trainer_state.json"
TRAINING_ARGUMENTS = "training_args.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
MODEL_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""The names under which transformers saves weights."""
WEIGHT = "weight"
"""The state of a parameter that is the parameter itself; the other states are the optimizer's (`exp_avg`, ...)."""

_MAX_WORLD = 1 << 17
_AT_MOST = msgspec.Meta(max_length=1 << 20)
_MAX_MANIFEST_BYTES = 512 << 20
_OLD_MODEL_FOLDER = "model"


@dataclass(frozen=True)
class SavedSegment:
    """Elements `[start, stop)` of the vector; `cuts` [world + 1], counted from `start`, divide them between ranks."""

    start: Count
    stop: Count
    cuts: tuple[Count, ...]

    def __post_init__(self) -> None:
        if not self.cuts or self.cuts[0] or self.cuts[-1] != self.stop - self.start:
            raise ValueError("the cuts do not divide the segment")
        if any(low > high for low, high in itertools.pairwise(self.cuts)):
            raise ValueError("the cuts of a segment do not ascend")


def stored_as(text: str) -> tuple[str, int]:
    """Parses the dtype of a parameter's state, and how many elements one value stands for. Raises `ValueError`: the
    text is invalid."""
    dtype, slash, each = text.partition("/")
    number = int(each) if slash else 1
    if dtype not in disk.DTYPES or number < 1 or MASTER_ALIGNMENT % number:
        raise ValueError(text)
    return dtype, number


def num_values(low: int, high: int, each: int) -> int:
    """Returns how many values a state has for elements `[low, high)` of a parameter, one for every `each`."""
    return -(-high // each) - low // each


@dataclass(frozen=True)
class SavedParameter:
    """One parameter."""

    name: str
    shape: tuple[Count, ...]  # its Hugging Face shape
    shard_dim: Count | None  # the dim that is outermost in storage; None for the natural order
    segment: Count
    offset: Count  # where it starts in the vector
    trainable: bool  # False for a frozen one, which has no optimizer state
    model_dtype: str  # its dtype in the Hugging Face model
    tied_names: tuple[str, ...]  # further names of it
    exported_name: (
        str  # the one of its names under which transformers saves it, or its end, in a model inside of others
    )
    # name -> stored dtype: `weight`, and the optimizer's states. One value for each element; with a number, one for
    # each so many, counted from the first (`float32/256`: the scales of quantized states).
    states: dict[str, str]

    def __post_init__(self) -> None:
        if self.shard_dim is not None and self.shard_dim >= len(self.shape):
            raise ValueError(f"parameter {self.name!r} has no dim {self.shard_dim}")
        is_own = any(f".{name}".endswith(f".{self.exported_name}") for name in self.names)
        if not (self.exported_name and is_own) or len(set(self.names)) < len(self.names):
            raise ValueError(f"the names of parameter {self.name!r}")
        if any("/" in state or not state for state in self.states):
            raise ValueError(f"the names of the states of parameter {self.name!r}")
        try:
            for stored in self.states.values():
                stored_as(stored)
            known = {self.states.get(WEIGHT), self.model_dtype} <= disk.DTYPES.keys()
        except ValueError:
            known = False
        if not known:
            raise ValueError(f"the states of parameter {self.name!r}")

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.tied_names

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def format_of(parameters: Iterable[SavedParameter]) -> int:
    """Returns the oldest format that can hold such parameters."""
    blocks = any(stored_as(stored)[1] > 1 for parameter in parameters for stored in parameter.states.values())
    return WITH_BLOCKS if blocks else SCHEMA_VERSION


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=10**15)]  # optimizer steps made
    world_size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_WORLD)]  # ranks that wrote it
    strategies: str  # as the user writes them
    resumable: bool  # False if only the model was saved
    run: str
    versions: dict[str, str]  # of hf_hotspa, torch and transformers
    files: Annotated[tuple[disk.FileRecord, ...], _AT_MOST]  # every file but the manifest
    segments: Annotated[tuple[SavedSegment, ...], _AT_MOST]
    parameters: Annotated[tuple[SavedParameter, ...], _AT_MOST]
    schema_version: int = SCHEMA_VERSION  # the format, 1 to 3; `format_of`

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def has_masters(self) -> bool:
        """Whether it holds the ranks' shares: with `save_only_model`, format 2 has the Hugging Face files only."""
        return self.resumable or self.schema_version == 1

    @property
    def is_adapter(self) -> bool:
        return self.adapter_weights is not None

    @property
    def adapter_weights(self) -> str | None:
        """The file of the trained adapter's weights, in a folder if the adapter has a name; None if the model is
        complete."""
        folders = [
            name.rpartition("/")[0] for _, name in self.model_files() if name.rpartition("/")[2] == ADAPTER_CONFIG
        ]
        for folder in folders:
            own = f".{folder or 'default'}.weight"
            if len(folders) == 1 or any(parameter.name.endswith(own) for parameter in self.parameters):
                return f"{folder}/{ADAPTER_WEIGHTS}".lstrip("/")
        return None

    def frozen_adapters(self) -> list[str]:
        """The files of the weights of adapters beside the trained one."""
        own, weights = self.adapter_weights, f"/{ADAPTER_WEIGHTS}"
        names = [file.name for file in self.files if f"/{file.name}".endswith(weights)]
        return [name for name in names if own is not None and name != own]

    def located(self, name: str) -> str:
        """Returns the path of a file of `hotspa/` in this checkpoint."""
        return name.removeprefix(f"{STATE_FOLDER}/") if self.schema_version == 1 else name

    def model_files(self) -> Iterator[tuple[str, str]]:
        """Yields the model's files except weights (configs, tokenizer): names in the checkpoint and in a model
        folder."""
        for file in self.files:
            top, _, rest = file.name.partition("/")
            if self.schema_version == 1:
                if top == _OLD_MODEL_FOLDER and rest:
                    yield file.name, rest
            elif top not in (STATE_FOLDER, TRAINER_STATE, TRAINING_ARGUMENTS) and not _is_weights(file.name):
                yield file.name, file.name

    def share(self, parameter: SavedParameter, rank: int) -> tuple[int, int]:
        """Returns elements `[low, high)` of a parameter's storage that lie in the file of a rank."""
        segment = self.segments[parameter.segment]
        base = parameter.offset - segment.start
        low, high = (min(max(segment.cuts[rank + i] - base, 0), parameter.numel) for i in (0, 1))
        return low, max(low, high)

    def holders(self, parameter: SavedParameter, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields `(rank, low, high)`: which files hold which part of elements `[start, stop)` of a parameter."""
        segment = self.segments[parameter.segment]
        base = parameter.offset - segment.start
        rank = bisect_right(segment.cuts, base + start) - 1
        while start < stop:
            high = min(segment.cuts[rank + 1] - base, stop)
            if high > start:
                yield rank, start, high
                start = high
            rank += 1

    def text(self) -> str:
        return _hashed({"kind": KIND, **msgspec.to_builtins(self)})

    def check(self) -> None:
        """Checks that its parts belong together, before anything is allocated for them. Raises `ValueError`: they do
        not."""
        sizes = {file.name: file.size for file in self.files}
        if len(sizes) != len(self.files) or MANIFEST in sizes:
            raise ValueError("a file is listed twice")
        ends = [0, *(segment.stop for segment in self.segments)]
        starts = [segment.start for segment in self.segments]
        if starts != ends[:-1] or any(len(segment.cuts) != self.world_size + 1 for segment in self.segments):
            raise ValueError("the segments do not tile the vector")
        self._check_parameters(ends[-1])
        if not self.has_masters:
            return
        for rank, least in enumerate(self._share_bytes()):
            name = self.located(rank_tensors(rank, self.world_size))
            if name not in sizes:
                raise ValueError(f"no file {name!r}")
            if least > sizes[name]:
                raise ValueError(f"{name!r} is too small for its tensors")

    def _check_parameters(self, vector_end: int) -> None:
        end, seen = 0, set[str]()
        for parameter in self.parameters:
            if parameter.offset != end:
                raise ValueError(f"parameter {parameter.name!r} does not start where the previous one ends")
            end += parameter.numel
            if parameter.segment >= len(self.segments):
                raise ValueError(f"parameter {parameter.name!r} has no segment")
            segment = self.segments[parameter.segment]
            if parameter.numel and not segment.start <= parameter.offset < end <= segment.stop:
                raise ValueError(f"parameter {parameter.name!r} leaves its segment")
            if seen.intersection(parameter.names):
                raise ValueError(f"the names of parameter {parameter.name!r}")
            seen.update(parameter.names)
            each = math.lcm(*(stored_as(stored)[1] for stored in parameter.states.values()))
            base = parameter.offset - segment.start
            if each > 1 and any((cut - base) % each for cut in segment.cuts if 0 < cut - base < parameter.numel):
                raise ValueError(f"blocks of parameter {parameter.name!r} are on two ranks")
        if self.segments and end != vector_end:
            raise ValueError("the parameters do not fill the vector")

    def _share_bytes(self) -> list[int]:
        """The least bytes of each rank's file."""
        needed = [0] * self.world_size
        for parameter in self.parameters:
            stored = [stored_as(text) for text in parameter.states.values()]
            for rank, low, high in self.holders(parameter, 0, parameter.numel):
                needed[rank] += sum(num_values(low, high, each) * disk.DTYPES[dtype][1] for dtype, each in stored)
        return needed

    @classmethod
    def parse(cls, text: str, where: str) -> "Manifest":
        """The inverse of `text`. Raises `DamagedCheckpointError`: the text is not an output of `text`, or is
        impossible."""
        data = disk.parse_object(text, MANIFEST, where)
        if data.get("kind") != KIND:
            raise DamagedCheckpointError(f"{MANIFEST} is not a {KIND}", where=where)
        if data.get("schema_version") not in (1, SCHEMA_VERSION, WITH_BLOCKS):
            raise DamagedCheckpointError(
                f"the checkpoint has format {data.get('schema_version')!r}, and this version reads 1 to {WITH_BLOCKS}",
                where=where,
                fix="use the version of hf_hotspa that wrote it",
            )
        if _hashed(data) != text:
            raise DamagedCheckpointError(f"{MANIFEST} was changed after it was written", where=where)
        try:
            manifest = typed(data, cls)
            manifest.check()
        except ValueError as error:
            raise DamagedCheckpointError(f"{MANIFEST} is impossible: {error}", where=where) from error
        if manifest.text() != text:
            raise DamagedCheckpointError(f"{MANIFEST} was changed after it was written", where=where)
        for file in manifest.files:
            disk.check_name(file.name, where)
        return manifest


def rank_tensors(rank: int, world_size: int) -> str:
    return f"{STATE_FOLDER}/master-rank-{rank:05d}-of-{world_size:05d}.safetensors"


def rank_state(rank: int, world_size: int) -> str:
    return f"{STATE_FOLDER}/random-rank-{rank:05d}-of-{world_size:05d}.json"


def rank_columns(rank: int, world_size: int) -> str:
    """Returns the name of the file with a rank's tensors of features, such as what chooses columns to leave out."""
    return f"{STATE_FOLDER}/columns-rank-{rank:05d}-of-{world_size:05d}.safetensors"


def _is_weights(name: str) -> bool:
    return name.rpartition("/")[2] == ADAPTER_WEIGHTS or MODEL_WEIGHTS.fullmatch(name) is not None


def _hashed(data: dict[str, Any]) -> str:
    body = {name: value for name, value in data.items() if name != "sha256"}
    return _render({**body, "sha256": hashlib.sha256(_render(body).encode()).hexdigest()})


def _render(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint; does not look at the other files. Raises `DamagedCheckpointError`: it is
    missing, or was changed."""
    if not os.path.lexists(folder / MANIFEST):
        raise _no_checkpoint(folder)
    return Manifest.parse(disk.read_text(folder, MANIFEST, _MAX_MANIFEST_BYTES), str(folder))


def _no_checkpoint(folder: Path) -> DamagedCheckpointError:
    """The error for a folder without a manifest; if checkpoints lie in the folder, it names one."""
    steps = [int(name) for path in folder.glob("checkpoint-*") if (name := path.name.partition("-")[2]).isdigit()]
    return DamagedCheckpointError(
        f"there is no {MANIFEST}",
        where=str(folder),
        why=f"checkpoints of hf_hotspa have one; the stock Trainer's have a {TRAINER_STATE} instead",
        fix=f"name a checkpoint in it, such as {folder / f'checkpoint-{max(steps)}'}" if steps else None,
    )


def verify_files(
    folder: Path,
    manifest: Manifest,
    part: int = 0,  # compare only every `parts`-th file, from this one on: the ranks share the work
    parts: int = 1,
    # called after all other files have passed, with the error of a changed file of model weights, if the ranks' shares
    # hold the weights, too. Returns if the file holds the same weights.
    rewritten: Callable[[DamagedCheckpointError], None] | None = None,
) -> None:
    """Compares sizes and hashes of the files with the manifest. Raises `DamagedCheckpointError`: naming the file that
    differs."""
    failure = None
    for record in manifest.files[part::parts]:
        try:
            _verify_file(folder, record)
        except DamagedCheckpointError as error:
            if rewritten is None or not (manifest.has_masters and _is_weights(record.name)):
                raise
            failure = failure or error
    if rewritten is not None and failure is not None:
        rewritten(failure)


def _verify_file(folder: Path, record: disk.FileRecord) -> None:
    with disk.open_inside(folder, record.name) as file:
        size = file.seek(0, 2)
        if size != record.size:
            raise DamagedCheckpointError(
                f"{record.name!r} has {size} bytes instead of {record.size}", where=str(folder)
            )
        if disk.file_digest(file) != record.sha256:
            raise DamagedCheckpointError(f"{record.name!r} was changed after it was written", where=str(folder))


def verify(folder: Path) -> Manifest:
    """Reads a complete checkpoint and compares it with its manifest. Raises `DamagedCheckpointError`: naming the file
    that is missing or differs."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    return manifest
