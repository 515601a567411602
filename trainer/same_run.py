"""What the ranks of a run compare before the first update, and the list of what may differ.

The constructor of a trainer compares arguments, releases, settings of the process, and what it was given; `train()`
also the trainer's attributes, which a subclass may have set since, and its data sets. A difference is a
`PlanMismatchError` on every rank, with the values. Beside this module, the engine compares the model's configuration,
buffers and strategies, and each step the optimizer's settings.

Each rank reads other rows of one order. `KnownRows` compares data sets before training, by number of rows, columns and
contents; of large ones by drawn rows. `RowOrder` adds to the meeting of each step the order so far, which every rank's
sampler gives in full, and one row of the step, whichever rank trains it.
"""

import copy
import dataclasses
import functools
import hashlib
import logging
import os
import random
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as compute  # type: ignore[import-untyped]
import torch
from accelerate.data_loader import DataLoaderShard
from torch import nn
from transformers.trainer_utils import has_length

from hf_hotspa.data.collator import is_stream
from hf_hotspa.exchanges import set_class
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.wrapped_model import is_wrapped
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.described import Reader, digest_of, names_of_library, text_of
from hf_hotspa.trainer.given_arguments import flags_of
from hf_hotspa.trainer.protocol import HasRun
from hf_hotspa.versions import library_facts

logger = logging.getLogger(__name__)

DATA_SETS = "train_dataset", "eval_dataset"  # the data sets of a trainer, by the names of its arguments and attributes
_MOST_BYTES, _MOST_ROWS, _DRAWN = 256 << 20, 20_000, 2_000
"""The largest table, and list, whose rows are all compared before training; and how many of a larger one."""

_PROBED = 128  # how many rows of any other data set are read before training


# -- data sets --------------------------------------------------------------------------------------------------------


def _plain(array: Any) -> Any:
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array


def _feed(hasher: Any, array: Any) -> None:
    """Adds the values of an Arrow array to a hash, whatever its chunks, offsets and paddings are."""
    array = _plain(array)
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
        _feed_texts(hasher, array.fill_null("" if "string" in str(kind) else b"").cast(pa.large_binary()))
    elif types.is_integer(kind) or types.is_floating(kind):
        hasher.update(np.ascontiguousarray(np.asarray(array.fill_null(0))).tobytes())
    elif not types.is_null(kind):
        hasher.update(repr(array.to_pylist()).encode())


def _feed_texts(hasher: "hashlib.blake2b", whole: Any) -> None:
    offsets = np.frombuffer(whole.buffers()[1], np.int64)[whole.offset : whole.offset + len(whole) + 1]
    hasher.update((offsets - offsets[:1]).tobytes())
    if len(whole) and offsets[-1] > offsets[0]:
        hasher.update(memoryview(whole.buffers()[2])[int(offsets[0]) : int(offsets[-1])])


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
    return {
        f"column {column!r} of {name}" if column else f"rows of {name}": f"rows {hasher.hexdigest()}"
        for column, hasher in hashers.items()
    }


def _places(size: int, most: int) -> list[int]:
    """Up to `most` of `size` places: both ends, and drawn ones, the same on all ranks."""
    if size <= most:
        return list(range(size))
    return sorted({0, size - 1, *random.Random(size).sample(range(size), most - 2)})


def _is_whole(dataset: object) -> bool:
    """Whether all rows are compared before training, and cannot change later."""
    return isinstance(dataset, datasets.Dataset) and dataset.data.nbytes <= _MOST_BYTES


def _stream_text(dataset: Any) -> str:
    """What a stream says of itself, without reading it."""
    reader = Reader(_ANY)
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


def _copied(dataset: object) -> Any:
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

    def watch(self, loader: object, dataset: object) -> None:
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
                set_class(sampler, _recorded(kind), "sampler")
            except TypeError:  # a list, a range, or no sampler
                return
        sampler._hotspa_order, self.watches = self, True
        self._probe = None if _is_whole(dataset) else Probe.of(dataset)

    def begin(self) -> None:
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


# -- what a trainer compares -------------------------------------------------------------------------------------------

_OUTPUT = "shown or logged by this process alone"

ARGUMENTS_MAY_DIFFER: dict[str, str] = {  # arguments that may differ between ranks, and why
    **{name: flag.of_one_rank for name, flag in flags_of(HotSPaTrainingArguments).items() if flag.of_one_rank},
    "local_rank": "the place of a process",
    "deepspeed": "a path; the settings in the file are compared",
    "hub_token": "only the main process pushes",
    "run_name": _OUTPUT,
    "project": _OUTPUT,
    "trackio_space_id": _OUTPUT,
    "report_to": _OUTPUT,
    "disable_tqdm": _OUTPUT,
    "log_level": _OUTPUT,
    "log_level_replica": _OUTPUT,
    "log_on_each_node": _OUTPUT,
}

MAY_DIFFER: dict[str, str] = {  # what else may differ between ranks, and why
    "callbacks": "scripts give some to one process; what they change (rates, weights, flags) is compared in each step",
    "the weights of the model": "rank 0's are used on all ranks from the start, as by DistributedDataParallel",
    "rows that are drawn anew at each reading": "augmentations; which rows are read, and their order, is compared",
    "rows of a stream": "with one reader there are no others; its source, columns and functions are compared",
    "values of custom code named after a rank, process, node, device or time, and absolute paths": "each process has its own",
    "environment variables but those that decide what is computed": "paths, caches, addresses, numbers of threads",
    "the folder of a model": "the last part of its path is compared, and its weights",
}

_ENVIRONMENT = (  # how the names of environment variables begin that decide what is computed
    "ACCELERATE_MIXED", "ACCELERATE_GRADIENT", "ACCELERATE_USE", "ACCELERATE_DYNAMO", "ACCELERATE_DEEPSPEED", "FSDP_",
    "PARALLELISM_CONFIG", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip

_COMPARED_ELSEWHERE = {
    "model", "args", "callbacks", *DATA_SETS, "model_wrapped", "accelerator", "state", "control", "callback_handler",
    "optimizer", "optimizers", "lr_scheduler", "hub_model_id", "push_in_progress", "_memory_tracker", "is_in_train",
}  # fmt: skip
"""Names given to a trainer, or of its attributes, that are compared elsewhere, or belong to the loop."""


_MADE_OF_ARGUMENTS = {"distributed_state", "deepspeed_plugin", "fsdp_plugin_args", "scoring"}


def argument_facts(args: Any) -> dict[str, str]:
    """The training arguments as text: all fields of their class, and plain attributes that it sets beside."""
    names = {f.name for f in dataclasses.fields(args)}
    beside = {name for name in vars(args) if not name.startswith("_")} - names - _MADE_OF_ARGUMENTS
    facts = {name: text_of(getattr(args, name, None)) for name in sorted(names - ARGUMENTS_MAY_DIFFER.keys())}
    reader = Reader(args.world_size)
    facts |= {name: reader.text(vars(args)[name], name) for name in sorted(beside)}
    mapping = args.hotspa_deepspeed
    return facts | {"the DeepSpeed config": text_of(mapping and (mapping.arguments, mapping.scheduler))}


def process_facts() -> dict[str, str]:
    """Settings of this process that decide what is computed."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
    settings = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.is_autocast_enabled()": torch.is_autocast_enabled("cpu"),
    }
    named = {f"environment variable {name}": value for name, value in sorted(variables.items())}
    return named | {name: text_of(value) for name, value in settings.items()}


def _libraries(trainer: HasRun, given: Mapping[str, Any]) -> list[str]:
    """The libraries that this trainer uses beside the usual ones."""
    args, model = trainer.args, given.get("model")
    optim = str(getattr(args.optim, "value", args.optim))
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    used = {
        "trl": any(c.__module__.partition(".")[0] == "trl" for c in type(trainer).__mro__),
        "peft": given.get("peft_config") is not None or (isinstance(model, nn.Module) and is_wrapped(model)),
        "bitsandbytes": quantized or any(part in optim for part in ("bnb", "8bit", "paged", "bitsandbytes")),
        "torchao": "torch_" in optim or "torchao" in optim,
        "deepspeed": args.hotspa_deepspeed is not None or args.hotspa_offload != "none",
    }
    return [name for name, is_used in used.items() if is_used]


class SameRun:
    """Reads what this rank compares for a trainer. Nothing is read on one rank."""

    def __init__(self, trainer: HasRun, agreement: Callable[[], Agreement]) -> None:
        self._trainer, self._agreement, self._rows = trainer, agreement, KnownRows()
        self._names, self._has_trained = frozenset[str](), False

    @property
    def _is_alone(self) -> bool:
        return self._agreement().group is None

    def given_facts(self, given: Mapping[str, Any]) -> dict[str, str]:
        """What a constructor was given, by name; and the process."""
        if self._is_alone:
            return {}
        trainer, reader, self._names = self._trainer, Reader(self._trainer.args.world_size), frozenset(given)
        facts = library_facts(*_libraries(trainer, given)) | process_facts() | argument_facts(trainer.args)
        facts["class of the trainer"] = reader.text(type(trainer), "trainer")
        model = given.get("model")
        name = Path(model).name if isinstance(model, str | Path) else reader.text(type(model), "model")
        facts["class of the model"] = name
        for name, value in sorted(given.items()):
            if name not in _COMPARED_ELSEWHERE:
                facts[name] = reader.text(value, name)
        for name in DATA_SETS:
            facts |= self._rows.facts(name, given.get(name))
        if reader.unread and trainer.args.process_index == 0:
            logger.info("Ranks compare only the classes of: %s", ", ".join(sorted(set(reader.unread))))
        return facts

    def training_facts(self, checkpoint: object, reference: object) -> dict[str, str]:
        """What decides a training, when it starts; `checkpoint`: where it resumes; `reference`: its reference model."""
        if self._is_alone:
            return {}
        trainer, facts = self._trainer, argument_facts(self._trainer.args)
        facts["resume_from_checkpoint"] = text_of(checkpoint)
        facts |= self._attributes()
        data = {name: getattr(trainer, name, None) for name in DATA_SETS}
        for name, dataset in data.items():
            facts |= self._rows.facts(name, dataset, reads=True)
        self._rows.keep(data.values())
        if isinstance(reference, nn.Module):
            facts["reference model"] = text_of(reference)
        self._has_trained = True
        return facts

    def evaluation_facts(self, dataset: object) -> dict[str, str]:
        """What decides an evaluation of a data set."""
        trainer = self._trainer
        if self._is_alone:
            return {}
        reader, names = Reader(trainer.args.world_size), ("compute_metrics", "preprocess_logits_for_metrics")
        functions = {name: reader.text(getattr(trainer, name, None), name) for name in names}
        return functions | self._rows.facts("rows", dataset)

    def _attributes(self) -> dict[str, str]:
        """The trainer's attributes that are plain values or functions. After a training only those with the name of an
        argument: others may hold what a rank has counted."""
        trainer, facts = self._trainer, dict[str, str]()
        settings = {f.name for f in dataclasses.fields(trainer.args)} | self._names
        kind: Any = type(trainer)
        of_library = names_of_library(kind)
        for name, value in sorted(vars(trainer).items()):
            if name.startswith("_hotspa") or name in _COMPARED_ELSEWHERE or isinstance(value, nn.Module):
                continue
            if name not in settings and (self._has_trained or (name.startswith("_") and name in of_library)):
                continue
            reader = Reader(trainer.args.world_size)
            if not reader.is_of_rank(name, value) and (text := reader.text(value, name)) and not reader.unread:
                facts[f"{name} of the trainer"] = text
        return facts
