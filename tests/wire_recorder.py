"""Records what a rank says on its process groups, in the order of issue: `Recorder`, and the `Trace` that it leaves.

The methods of torch's `ProcessGroup` and `Work` are wrapped, which every function of `torch.distributed` ends in, whoever calls
it: this package, torch's pipeline schedules, accelerate. A test compares the wrapped methods with all that torch has.

* An operation is written when it is issued, with the stack of the caller. What one `batch_isend_irecv` contains is one group call.
* A wait is written when it begins. A wait for work that a poll (`is_completed`) has seen done blocks nobody, and is left out.
* Threads: a `_Stamp` of the executor is an event that one thread records and another waits for.
* Groups: one that asks for a backend by name is for host tensors; the others are for the device's backend (NCCL on GPUs).
* A host tensor: on a GPU any that is not on it. On CPU one whose memory a factory made without a `device`, or that `.cpu()` gave:
  `_HostMemory` follows these through Python calls as a GPU would keep them apart. Memory given to torch in another way is not
  known, and counts as the device's.
"""

import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[1]
_DEPTH = 5  # frames of a stack
SILENT = frozenset({
    "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "abort", "bound_device_id", "boxed",
    "get_group_store", "group_desc", "group_name", "merge_remote_group", "name", "rank", "set_timeout", "shutdown", "size",
    "split_group", "unbox", "use_pg_for_symm_mem_rendezvous",
})  # fmt: skip
"""Public names of `ProcessGroup` that send nothing, or (`split_group`, `merge_remote_group`) that nobody uses here."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a rank on a communicator. Ranks are global ones; `sizes` are elements: of a message, or as
    `_SIZES` gives them for a collective."""

    comm: str
    kind: str
    sizes: tuple[int, ...]
    dtype: str
    peer: int = -1  # of a message; the root of a collective with one
    tag: int = 0
    call: int = -1  # the group call that contains it
    on_host: bool = False
    stack: tuple[str, ...] = ()
    num_bytes: int = 0  # of a message

    @property
    def is_message(self) -> bool:
        return self.kind in ("send", "recv")


@dataclass(frozen=True, slots=True)
class Event:
    """What a thread does: issues an `operation`, waits for operations, makes a communicator, or records or passes an event."""

    kind: str  # issue, wait, make, record, pass
    thread: int
    operation: Operation | None = None
    targets: tuple[int, ...] = ()  # indices of issues, for a wait; the number of an event
    comm: str = ""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Communicator:
    """The ranks of a group, and whether it is for tensors in host memory."""

    ranks: tuple[int, ...]
    is_host: bool


@dataclass
class Trace:
    """What one rank did."""

    rank: int
    world_size: int
    events: list[Event] = field(default_factory=list)
    communicators: dict[str, Communicator] = field(default_factory=dict)
    error: str = ""  # what ended the run early

    @property
    def operations(self) -> Iterator[Operation]:
        return (event.operation for event in self.events if event.operation is not None)

    def bytes_to_others(self, comm: str) -> int:
        """Payload of the messages that this rank sends on a communicator."""
        return sum(op.num_bytes for op in self.operations if op.comm == comm and op.kind == "send")


# -- what a call says ------------------------------------------------------------------------------------------------

Said = tuple[list[Tensor], tuple[int, ...], int, int]
"""The tensors of a call, its sizes, its peer or root as a rank of the group (-1: none), and its tag."""


def _flat(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [t for part in tensors or () for t in _flat(part)] if isinstance(tensors, list | tuple) else []


def _numels(tensors: Any) -> tuple[int, ...]:
    return tuple(t.numel() for t in _flat(tensors))


def _one(tensors: Any = (), *_: Any, **__: Any) -> Said:
    return _flat(tensors), _numels(tensors), -1, 0


def _rooted(tensors: Any, given: Any = 0, *_: Any) -> Said:
    root = given if isinstance(given, int) else given.rootRank
    return _flat(tensors), _numels(tensors), root, 0


def _out_in(out: Any, own: Any, *_: Any) -> Said:
    return _flat(own) + _flat(out), (*_numels(own), *_numels(out)), -1, 0


def _out_in_rooted(out: Any, own: Any, opts: Any = None, *_: Any) -> Said:
    sizes = (sum(_numels(own)), sum(_numels(out)))
    return _flat(own) + _flat(out), sizes, opts.rootRank, 0


def _splits(out: Tensor, own: Tensor, received: Any = (), sent: Any = (), *_: Any) -> Said:
    """Rows of the splits become elements; without splits all parts are equal, which `_recorded` fills in."""
    sizes: list[int] = []
    for tensor, rows in ((own, sent), (out, received)):
        width = tensor[0].numel() if len(tensor) else 1
        sizes += [n * width for n in rows] if rows else [-tensor.numel()]
    return [own, out], tuple(sizes), -1, 0


def _message(tensors: Any, peer: int, tag: int = 0) -> Said:
    return _flat(tensors), _numels(tensors), peer, tag


def _reduction(args: Any, kwargs: Any) -> str:
    """The name of what a collective computes, if it computes: ` sum`."""
    for given in (*args, *kwargs.values()):
        operation = getattr(given, "reduceOp", given)
        if isinstance(operation, dist.ReduceOp | dist.ReduceOp.RedOpType):
            names = dist.ReduceOp.RedOpType.__members__.items()
            return next(f" ({name.lower()})" for name, member in names if operation == member)
    return ""


METHODS: dict[str, tuple[str, Callable[..., Said]]] = {
    "allreduce": ("all_reduce", _one),
    "allreduce_coalesced": ("all_reduce", _one),
    "broadcast": ("broadcast", _rooted),
    "reduce": ("reduce", _rooted),
    "allgather": ("all_gather", _out_in),
    "_allgather_base": ("all_gather_single", _out_in),
    "all_gather_single": ("all_gather_single", _out_in),
    "all_gather_single_coalesced": ("all_gather_single", _out_in),
    "allgather_coalesced": ("all_gather", _out_in),
    "allgather_into_tensor_coalesced": ("all_gather_single", _out_in),
    "gather": ("gather", _out_in_rooted),
    "scatter": ("scatter", _out_in_rooted),
    "reduce_scatter": ("reduce_scatter", _out_in),
    "_reduce_scatter_base": ("reduce_scatter_single", _out_in),
    "reduce_scatter_single": ("reduce_scatter_single", _out_in),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single", _out_in),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_single", _out_in),
    "alltoall_base": ("all_to_all", _splits),
    "all_to_all_single": ("all_to_all", _splits),
    "alltoall": ("all_to_all", _out_in),
    "barrier": ("barrier", _one),
    "monitored_barrier": ("barrier", _one),
    "send": ("send", _message),
    "recv": ("recv", _message),
    "recv_anysource": ("recv", lambda tensors, tag=0: _message(tensors, -1, tag)),
}
"""What is wrapped; older releases of torch lack some."""


# -- recording -------------------------------------------------------------------------------------------------------


class Recorder:
    """Records what this process says inside of `with`; `trace` is what it said. `stamp`: the class of events between threads,
    if the product has one. `journal`: a file that has the trace even if the process dies (`read_journal`)."""

    def __init__(self, rank: int, world_size: int, stamp: type | None = None, journal: Path | None = None) -> None:
        self.trace = Trace(rank, world_size)
        self._journal = journal.open("wb") if journal is not None else None
        self._lock, self._local, self._stamp = threading.RLock(), threading.local(), stamp
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._works: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._seen_done: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stamps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._made: dict[tuple[int, ...], int] = {}
        self._threads: dict[int, int] = {}
        self._num_calls, self._open = 0, dict[Any, tuple[int, list[int]]]()
        self._memory, self._stack = _HostMemory(), ExitStack()

    def __enter__(self) -> "Recorder":
        world = dist.group.WORLD
        if world is not None:
            self._name(world, is_host=False, what="world")
        for name, (kind, reads) in METHODS.items():
            if hasattr(dist.ProcessGroup, name):
                self._wrap(dist.ProcessGroup, name, partial(self._says, kind=kind, reads=reads))
        self._wrap(dist.ProcessGroup, "_start_coalescing", self._opens)
        self._wrap(dist.ProcessGroup, "_end_coalescing", self._closes)
        self._wrap(dist.Work, "wait", self._waits)
        self._wrap(dist.Work, "is_completed", self._polls)
        for module in (dist, c10d):
            self._wrap(module, "batch_isend_irecv", self._batches)
            self._wrap(module, "destroy_process_group", self._destroys)
        self._wrap(c10d, "_new_group_with_tag", self._makes)
        self._wrap(threading.Thread, "run", self._follows)
        self._wrap(BackwardCFunction, "apply", self._follows)
        if self._stamp is not None:
            self._wrap(self._stamp, "__init__", self._records)
            self._wrap(self._stamp, "wait", self._passes)
        self._stack.enter_context(self._memory)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._stack.close()
        self._keep(f"{type(error).__name__}: {error}" if error is not None else "")

    def _wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        self._stack.enter_context(patch.object(owner, name, wrapper(getattr(owner, name))))

    def _keep(self, item: Any) -> None:
        if self._journal is not None:
            pickle.dump(item, self._journal)
            self._journal.flush()

    # -- events -------------------------------------------------------------------------------------------------------

    def _write(self, kind: str, **values: Any) -> int:
        with self._lock:
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
            self.trace.events.append(Event(kind, thread, **values))
            self._keep(self.trace.events[-1])
            return len(self.trace.events) - 1

    def _says(self, old: Any, kind: str, reads: Callable[..., Said]) -> Any:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            said = reads(*args, **kwargs)
            with self._lock:
                index = self._write("issue", operation=self._operation(group, kind + _reduction(args, kwargs), said))
                if (opened := self._open.get(group)) is not None:
                    opened[1].append(index)
            work = old(group, *args, **kwargs)
            if work is not None:
                self._works[work] = (index,)
            elif group not in self._open:  # torch has waited for it
                self._write("wait", targets=(index,), stack=_stack())
            return work

        return method

    def _operation(self, group: Any, kind: str, said: Said) -> Operation:
        tensors, sizes, peer, tag = said
        comm = self._name(group)
        ranks = self.trace.communicators[comm].ranks
        if kind.startswith("all_to_all"):
            sizes = tuple(s for n in sizes for s in ([-n // len(ranks)] * len(ranks) if n < 0 else [n]))
            if tensors[0].numel() == 0 or tensors[1].numel() == 0:
                sizes = sizes if len(sizes) == 2 * len(ranks) else (0,) * (2 * len(ranks))
        call = self._open[group][0] if group in self._open else getattr(self._local, "call", -1)
        return Operation(
            comm, kind, sizes, str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            ranks[peer] if 0 <= peer < len(ranks) else -1, tag, call,
            any(self._memory.has(t) for t in tensors) and not _chooses_device(), _stack(),
            sum(t.numel() * t.element_size() for t in tensors) if kind in ("send", "recv") else 0,
        )  # fmt: skip

    def _opens(self, old: Any) -> Any:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._num_calls += 1
                self._open[group] = self._num_calls, []
            return old(group, *args, **kwargs)

        return method

    def _closes(self, old: Any) -> Any:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = old(group, *args, **kwargs)
            _, indices = self._open.pop(group)
            if work is not None:
                self._works[work] = tuple(indices)
            return work

        return method

    def _batches(self, old: Any) -> Any:
        def function(operations: Any) -> Any:
            with self._lock:
                self._num_calls += 1
                self._local.call = self._num_calls
            try:
                return old(operations)
            finally:
                self._local.call = -1

        return function

    def _waits(self, old: Any) -> Any:
        def method(work: Any, *args: Any, **kwargs: Any) -> Any:
            if work in self._works and work not in self._seen_done:
                self._write("wait", targets=self._works[work], stack=_stack())
            return old(work, *args, **kwargs)

        return method

    def _polls(self, old: Any) -> Any:
        def method(work: Any) -> Any:
            done = old(work)
            if done:
                self._seen_done.add(work)
            return done

        return method

    # -- communicators ------------------------------------------------------------------------------------------------

    def _name(self, group: Any, is_host: bool = False, what: str = "") -> str:
        if group not in self._names:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._names[group] = self._new(ranks, is_host, what)
        return self._names[group]

    def _new(self, ranks: tuple[int, ...], is_host: bool, what: str = "") -> str:
        with self._lock:
            number = self._made[ranks] = self._made.get(ranks, 0) + 1
            name = what or f"{'host' if is_host else 'device'} {list(ranks)} no. {number}"
            self.trace.communicators[name] = Communicator(ranks, is_host)
            self._keep((name, self.trace.communicators[name]))
            return name

    def _makes(self, old: Any) -> Any:
        def function(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            key = tuple(ranks) if ranks is not None else tuple(range(self.trace.world_size))
            name = self._new(key, backend is not None)
            self._write("make", comm=name, stack=_stack())
            group = old(ranks, timeout, backend, *args, **kwargs)
            if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
                self._names[group] = name
            return group

        return function

    def _destroys(self, old: Any) -> Any:
        def function(group: Any = None) -> Any:
            if group is not None and group in self._names:
                operation = Operation(self._name(group), "destroy", (), "", stack=_stack())
                self._write("issue", operation=operation)
            return old(group)

        return function

    # -- threads ------------------------------------------------------------------------------------------------------

    def _follows(self, old: Any) -> Any:
        """Modes of torch are off in other threads, and in the backward of a `Function`."""

        def method(*args: Any) -> Any:
            with self._memory:
                return old(*args)

        return method

    def _records(self, old: Any) -> Any:
        def method(stamp: Any, *args: Any, **kwargs: Any) -> None:
            old(stamp, *args, **kwargs)
            with self._lock:
                self._stamps[stamp] = self._write("record")

        return method

    def _passes(self, old: Any) -> Any:
        def method(stamp: Any) -> Any:
            if stamp in self._stamps:
                self._write("pass", targets=(self._stamps[stamp],), stack=_stack())
            return old(stamp)

        return method


def read_journal(path: Path, rank: int, world_size: int) -> Trace:
    """The trace of a rank, as far as its process came."""
    trace = Trace(rank, world_size, error="the process ended")
    with path.open("rb") as file:
        while True:
            try:
                item = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return trace
            if isinstance(item, Event):
                trace.events.append(item)
            elif isinstance(item, tuple):
                trace.communicators[item[0]] = item[1]
            else:
                trace.error = item


def _stack() -> tuple[str, ...]:
    """The innermost frames of this repository, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    found = list[str]()
    while frame is not None and len(found) < _DEPTH:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT)) and "site-packages" not in name and name != __file__:
            found.append(f"{name.removeprefix(f'{ROOT}/')}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)


def _chooses_device() -> bool:
    """Whether a collective of torch for objects issues this: it moves what it pickles to the group's device."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == c10d.__file__ and "object" in frame.f_code.co_name:
            return True
        frame = frame.f_back
    return False


# -- memory ----------------------------------------------------------------------------------------------------------


class _HostMemory(TorchFunctionMode):
    """Knows which tensors would be in host memory on a machine with GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self._makers = set(_device_constructors()) | {torch.from_numpy, torch.frombuffer}

    def has(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and (torch.cuda.is_available() or getattr(tensor, _MARK, False))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or result.device.type != "cpu":
            return result
        if func in self._makers:
            on_host = kwargs.get("device") in (None, "cpu")
        elif (moved := self._moved(func, args, kwargs)) is not None:
            on_host = moved
            if on_host and result is args[0]:  # a GPU would copy it
                if result.requires_grad:
                    return result
                result = result.clone()
        else:
            inputs = _flat([a for a in args if isinstance(a, Tensor | list | tuple) and not isinstance(a, torch.Size)])
            on_host = bool(inputs) and all(getattr(t, _MARK, False) for t in inputs)
        if getattr(result, _MARK, False) is not on_host:
            setattr(result, _MARK, on_host)
        return result

    def _moved(self, func: Any, args: Any, kwargs: Any) -> bool | None:
        """Whether a call moves a tensor to the host (True) or to the device; None if it moves nothing."""
        if func is Tensor.cpu:
            return True
        if func is not Tensor.to:
            return None
        device = kwargs.get("device", next((a for a in args[1:] if isinstance(a, str | torch.device)), None))
        return None if device is None else isinstance(device, str) and device == "cpu"


_MARK = "_made_on_host"
