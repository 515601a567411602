"""The rows that ranks read: whether their data sets, and the orders of their epochs, are the same.

Each rank reads other rows of one order. `KnownRows` compares data sets before training, by number of rows, columns and
contents; of large ones by drawn rows. `RowOrder` adds to the meeting of each step the order so far, which every rank's
sampler gives in full, and one row of the step, whichever rank trains it.
"""

import copy
import functools
import hashlib
import random
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
import torch
from accelerate.data_loader import DataLoaderShard
from transformers.trainer_utils import has_length

from hf_hotspa.data.collator import is_stream
from hf_hotspa.trainer.described import Reader, digest_of

DATA_SETS = "train_dataset", "eval_dataset"  # the data sets of a trainer, by the names of its arguments and attributes
_MOST_BYTES, _MOST_ROWS, _DRAWN = 256 << 20, 20_000, 2_000
"""The largest table, and list, whose rows are all compared before training; and how many of a larger one."""

_PROBED = 128  # how many rows of any other data set are read before training


# -- data sets --------------------------------------------------------------------------------------------------------


def _feed(hasher: Any, array: Any) -> None:
    """Adds the values of an Arrow array to a hash, whatever its chunks, offsets and paddings are."""
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind, types = array.type, pa.types
    if array.null_count:
        hasher.update(np.packbits(np.asarray(array.is_null())).tobytes())
    if types.is_struct(kind):
        for name, part in zip((field.name for field in kind), array.flatten(), strict=True):
            hasher.update(name.encode())
            _feed(hasher, part)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        hasher.update(np.asarray(compute.list_value_length(array).fill_null(-1), np.int64).tobytes())
        _feed(hasher, array.flatten())
    elif types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        whole = array.fill_null("" if "string" in str(kind) else b"").cast(pa.large_binary())
        offsets = np.frombuffer(whole.buffers()[1], np.int64)[whole.offset : whole.offset + len(whole) + 1]
        hasher.update((offsets - offsets[:1]).tobytes())
        if len(whole) and offsets[-1] > offsets[0]:
            hasher.update(memoryview(whole.buffers()[2])[int(offsets[0]) : int(offsets[-1])])
    elif types.is_integer(kind) or types.is_floating(kind):
        hasher.update(np.ascontiguousarray(np.asarray(array.fill_null(0))).tobytes())
    elif not types.is_null(kind):
        hasher.update(repr(array.to_pylist()).encode())


def _table_facts(name: str, table: Any) -> dict[str, str]:
    facts = {}
    for column in table.column_names:
        values, hasher = table.column(column), hashlib.blake2b(digest_size=4)
        for first in range(0, len(values), _ROWS_AT_ONCE):
            _feed(hasher, values.slice(first, _ROWS_AT_ONCE))
        facts[f"column {column!r} of {name}"] = f"{values.type}, rows {hasher.hexdigest()}"
    return facts


def _list_facts(name: str, rows: Sequence[Any]) -> dict[str, str]:
    hashers = dict[str, Any]()
    for row in rows:
        for column, value in row.items() if isinstance(row, Mapping) else [("", row)]:
            hasher = hashers.setdefault(str(column), hashlib.blake2b(digest_size=4))
            hasher.update(Reader().text(value, name).encode() + b"\0")
    named = {
        f"column {column!r} of {name}" if column else f"rows of {name}": hasher for column, hasher in hashers.items()
    }
    return {of: f"rows {hasher.hexdigest()}" for of, hasher in named.items()}


def _places(size: int, most: int) -> list[int]:
    """Up to `most` of `size` places: both ends, and drawn ones, the same on all ranks."""
    if size <= most:
        return list(range(size))
    return sorted({0, size - 1, *random.Random(size).sample(range(size), most - 2)})


def _is_whole(dataset: Any) -> bool:
    """Whether all rows are compared before training, and cannot change later."""
    return isinstance(dataset, datasets.Dataset) and dataset.data.nbytes <= _MOST_BYTES


def _stream_text(dataset: Any) -> str:
    """What a stream says of itself, without reading it."""
    reader, parts = Reader(_ANY), list[Any]()
    kept = (bool, int, str, float, types.FunctionType, functools.partial, type(None))
    if isinstance(dataset, datasets.IterableDataset):
        parts = [dataset.column_names, dataset.num_shards, vars(dataset).get("_epoch")]
        source = dataset._ex_iterable
        while source is not None:
            own = {name: value for name, value in vars(source).items() if isinstance(value, kept)}
            parts += [type(source).__name__, own]
            source = vars(source).get("ex_iterable")
    else:
        own = {name: value for name, value in getattr(dataset, "__dict__", {}).items() if isinstance(value, kept)}
        parts = [type(dataset), {name: value for name, value in own.items() if not reader.is_of_rank(name, value)}]
    parts.append(len(dataset) if has_length(dataset) else None)
    return f"a stream {digest_of(reader.text(parts, 'stream'))}"


_ANY, _ROWS_AT_ONCE = 1 << 20, 1 << 16


class KnownRows:
    """The facts of data sets, as far as they were read."""

    def __init__(self) -> None:
        self._known = dict[tuple[int, str], tuple[Any, dict[str, str]]]()

    def facts(self, name: str, dataset: Any, reads: bool = False) -> dict[str, str]:
        """Facts of a data set, a mapping of several, or none. `reads`: whether some rows of a data set of a custom
        class are read, too."""
        if isinstance(dataset, Mapping):
            parts = {f"names of {name}": ", ".join(map(str, dataset))}
            for key, part in dataset.items():
                parts |= self.facts(f"{name}[{key!r}]", part, reads)
            return parts
        if dataset is None or isinstance(dataset, str | bool | int):
            return {name: str(dataset)}
        if is_stream(dataset) or not has_length(dataset):
            return {name: _stream_text(dataset) if is_stream(dataset) else type(dataset).__name__}
        known = self._known.get((id(dataset), name))
        if known is not None and known[0] is dataset and isinstance(dataset, datasets.Dataset):
            return known[1]
        facts = {f"number of rows of {name}": str(len(dataset))} | self._contents(name, dataset, reads)
        self._known[id(dataset), name] = dataset, facts
        return facts

    def keep(self, kept: Iterable[Any]) -> None:
        """Forgets all data sets but these."""
        known = set(map(id, kept))
        self._known = {key: value for key, value in self._known.items() if key[0] in known}

    def _contents(self, name: str, dataset: Any, reads: bool) -> dict[str, str]:
        if isinstance(dataset, datasets.Dataset):
            format_ = dataset.format
            plain = dataset.with_format("arrow")
            table = plain[:] if _is_whole(dataset) else plain[_places(len(dataset), _DRAWN)]
            transform = {f"format of {name}": Reader().text([format_["type"], format_["format_kwargs"]], name)}
            return transform | _table_facts(name, table)
        if isinstance(dataset, list | tuple):
            return _list_facts(name, [dataset[place] for place in _places(len(dataset), _MOST_ROWS)])
        facts = {f"class of {name}": Reader().text(type(dataset), name)}
        if reads and (probe := Probe.of(dataset)) is not None:
            rows = [probe.text(place) for place in _places(len(dataset), _PROBED)]
            facts[f"rows of {name}"] = digest_of(" ".join(rows))
        return facts


# -- rows of a custom data set ----------------------------------------------------------------------------------------


class Probe:
    """Reads rows of a data set without leaving a trace: from a copy, with random generators that are restored.
    `dataset`: read as it is."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @classmethod
    def of(cls, dataset: Any) -> "Probe | None":
        """A probe, or None for a data set whose rows differ at each reading, or cannot be read from a copy."""
        try:
            if isinstance(dataset, datasets.Dataset):
                return cls(dataset.with_format("arrow"))
            if isinstance(dataset, list | tuple):
                return cls(dataset)
            probe = cls(_copied(dataset))
            places = _places(len(dataset), _PROBED)
            once, twice = ([probe.text(place) for place in places] for _ in range(2))
            return probe if once == twice else None
        except Exception:  # in the class
            return None

    def text(self, place: int) -> str:
        """A row as text of a fixed length, the same on all ranks with the same row."""
        is_foreign = not isinstance(self._dataset, datasets.Dataset | list | tuple)
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            if is_foreign:  # the same on all ranks
                random.seed(place)
                np.random.seed(place % (1 << 32))
                torch.default_generator.manual_seed(place)
            row = self._dataset[place]
            return digest_of(Reader().text(row.to_pylist() if isinstance(row, pa.Table) else row, "row"))
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


_GENERATORS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random


def _copied(dataset: Any) -> Any:
    """A copy whose attributes can be changed without a change of the original's. Raises `ValueError` if it holds a
    random generator."""
    copied = copy.copy(dataset)
    if copied is dataset:
        raise ValueError
    for name, value in list(vars(copied).items()):
        if isinstance(value, _GENERATORS):
            raise ValueError
        if isinstance(value, list | dict | set | bytearray | np.ndarray):
            setattr(copied, name, copy.copy(value))
        elif hasattr(value, "__getitem__") and hasattr(value, "__dict__") and not isinstance(value, datasets.Dataset):
            setattr(copied, name, _copied(value))
    return copied


# -- the order of an epoch --------------------------------------------------------------------------------------------


@functools.cache
def _recorded(kind: Any) -> Any:
    """The class of a sampler, with its order noted. It has one base: else no object could change to it."""

    def noted(sampler: Any) -> Iterator[Any]:
        order: RowOrder = vars(sampler)["_hotspa_order"]
        order.begin()
        for place in kind.__iter__(sampler):
            order.places.append(place)
            yield place

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, "__iter__": noted})


class RowOrder:
    """The order in which the sampler of a training loader gives the rows of all ranks. `places`: what it has given
    since the last step."""

    def __init__(self) -> None:
        self.places, self._code = list[Any](), 0
        self._probe: Probe | None = None
        self.watches = False  # whether ranks read parts of one order

    def watch(self, loader: Any, dataset: Any) -> None:
        """Notes the order of a loader, of which each rank reads its part."""
        self.watches = False
        if not isinstance(loader, DataLoaderShard) or is_stream(dataset):
            return
        sampler: Any = loader.batch_sampler
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        sampler = getattr(sampler, "sampler", None)
        kind: Any = type(sampler)
        if not hasattr(sampler, "_hotspa_order"):
            try:
                sampler.__class__ = _recorded(kind)
            except TypeError:  # a list, a range, or no sampler
                return
        sampler._hotspa_order, self.watches = self, True
        self._probe = None if _is_whole(dataset) else Probe.of(dataset)

    def begin(self) -> None:
        """Begins an epoch."""
        self.places, self._code = list[Any](), 0

    def words(self) -> str:
        """The order so far, and a row of the coming step, as text for the meeting of all ranks."""
        if not self.watches:
            return ""
        places, self.places = self.places, list[Any]()
        self._code = zlib.crc32(repr(places).encode(), self._code)
        text = f", the order of rows {self._code:08x}"
        if self._probe is None or not places or type(place := places[len(places) // 2]) is not int:
            return text
        try:
            return f"{text}, row {place} of the data set {self._probe.text(place)}"
        except Exception:  # the reader of the row raises it, if any does
            return text
