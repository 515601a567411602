"""Runs a function on N gloo ranks: `run_ranks(4, fn, *args)` returns the N return values.

Ranks are forked from one server process that has imported torch and transformers already, meet over a file in a
temporary directory (no port, nothing to collide), talk over the loopback interface and compute on one thread, so a
world of four starts in about half a second. `fn` is a module-level function, called as `fn(rank, world_size, *args)`;
its arguments and return values are pickled, so keep them small.

Whatever a rank does, the call ends: a failing rank's traceback is the error, the other ranks are killed; a rank that
hangs is shown with the stack of each rank when the time is up. Every rank ends with a barrier and
`destroy_process_group()`: gloo processes that skip this abort at exit now and then.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from tests.nodes import free_port

T = TypeVar("T")
Device = Literal["cpu", "cuda"]

# What the server imports once; a rank that imports one of these pays nothing.
PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "accelerate",
    "datasets",
    "deepspeed",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "tests.preload",  # the last one: it imports ours, and the Trainer
]
BACKEND_VARIABLE = "HOTSPA_TEST_BACKEND"
"""In a rank, the name of the backend that fits its devices, for functions that make the process group themselves."""
_EXIT_S = 15.0  # for a rank to leave after everything is reported
_LINGER_S = 1.0  # a failed rank stays this long, unless all ranks have reported: peers can still read what it sent
_SETTLE_S = 0.5  # after the first failure, the time for other ranks to report theirs
# What gloo says on the ranks that merely lost a peer: shown after the failure that caused it.
_SECOND_HAND = ("Connection closed by peer", "Connection reset by peer", "caused pair closure", "Broken pipe")


class WorldError(AssertionError):
    """A rank failed, died or did not finish; the message holds the traceback of the first one."""


@dataclass
class Outcome:
    """What became of one rank.

    Args:
        rank: The rank.
        reported: Whether `fn` returned or raised; False when the process died inside `fn`.
        value: What `fn` returned; None when it raised.
        exception: What `fn` raised, when that survives pickling.
        error_type: The name of the exception's class; None when `fn` returned.
        error: The text of the exception.
        traceback: The formatted traceback.
        exitcode: The exit code of the process, minus the signal number when it was killed.
    """

    rank: int
    reported: bool = False
    value: Any = None
    exception: BaseException | None = None
    error_type: str | None = None
    error: str | None = None
    traceback: str | None = None
    exitcode: int | None = None
    ended_at: float = field(default=0.0, repr=False)

    @property
    def ok(self) -> bool:
        """Whether `fn` returned and the process left in order."""
        return self.returned and self.exitcode == 0

    @property
    def returned(self) -> bool:
        return self.reported and self.error_type is None

    def describe(self) -> str:
        if self.traceback:
            return f"rank {self.rank} failed:\n{self.traceback.rstrip()}"
        if not self.reported:
            return f"rank {self.rank} died without a traceback, exit code {_exit_name(self.exitcode)}"
        if self.exitcode is None:
            return f"rank {self.rank} returned, but its process did not leave within {_EXIT_S:.0f} s"
        return f"rank {self.rank} returned, then its process left with exit code {_exit_name(self.exitcode)}"


@overload
def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = ...,
    init: bool = ...,
    env: Mapping[str, str] | None = ...,
    device: Device = ...,
    expect_failure: Literal[False] = ...,
) -> list[T]: ...
@overload
def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = ...,
    init: bool = ...,
    env: Mapping[str, str] | None = ...,
    device: Device = ...,
    expect_failure: Literal[True],
) -> list[Outcome]: ...
def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 300.0,
    init: bool = True,
    env: Mapping[str, str] | None = None,
    device: Device = "cpu",
    expect_failure: bool = False,
) -> list[T] | list[Outcome]:
    """Runs `fn(rank, world_size, *args)` on every rank of a fresh world.

    The launcher's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are set in every
    rank, so `TrainingArguments(use_cpu=True)` sees a world of `world_size` and uses the process group that is there.

    Args:
        world_size: The number of ranks.
        fn: A module-level function.
        args: Further arguments of `fn`, picklable and the same for every rank.
        timeout: Seconds for all ranks to finish, start of the world included; also the timeout of the process group.
        init: Whether to make the default process group (gloo on CPU). Without it `fn` may make its own through `env://`.
        env: Further environment variables of the ranks. Variables of the test process changed after the first call
            are not seen by ranks: pass them here.
        device: What the ranks see. `cpu`: no GPU, even where there is one. `cuda`: a GPU each and NCCL where there are
            enough of them or NCCL lets ranks share one, else the same one and a group that goes through the host
            (`tests/gpu_machine.py`, `tests/shared_gpu.py`).
        expect_failure: Return an `Outcome` for every rank, whatever it did, instead of raising. Ranks then run on after
            another rank failed, and there is no closing barrier.

    Raises:
        WorldError: a rank raised, died, or left with an exit code (not with `expect_failure`); or time was up.
    """
    __tracebackhide__ = True
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="hotspa-world-") as folder:
        variables = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500" if init else str(free_port()),
            "GLOO_SOCKET_IFNAME": _loopback(),
            **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
            **(env or {}),
        }
        plan = _RankPlan(world_size, folder, timeout, init, expect_failure, device, variables, payload)
        with _world(plan) as (processes, pipes):
            outcomes = _supervise(plan, processes, pipes)
    return outcomes if expect_failure else [o.value for o in outcomes]


def warm_up() -> None:
    """Starts the server process in the background, so that its imports run while other tests do."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    wanted = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    wanted["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # libraries look for GPUs when imported: no CUDA before the fork
    missing = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(missing)
    try:
        forkserver.ensure_running()
    finally:
        for key in missing:
            del os.environ[key]


# ------------------------------------------------------------------------------------------------ the test process


@dataclass(frozen=True)
class _RankPlan:
    """What a rank process is told."""

    world_size: int
    folder: str
    timeout: float
    init: bool
    expect_failure: bool
    device: Device
    variables: dict[str, str]
    payload: bytes

    def stack_file(self, rank: int) -> Path:
        return Path(self.folder, f"stack-{rank}.txt")


_Pipe = connection.Connection


@contextlib.contextmanager
def _world(plan: _RankPlan) -> Iterator[tuple[list[ForkServerProcess], list[_Pipe]]]:
    """The started processes of a world and the pipes to them; nothing of it is left afterwards."""
    warm_up()
    context = multiprocessing.get_context("forkserver")
    processes: list[ForkServerProcess] = []
    pipes: list[_Pipe] = []
    try:
        for rank in range(plan.world_size):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            process = context.Process(target=_rank_main, args=(rank, plan, theirs), name=f"rank{rank}")
            try:
                process.start()
            except (EOFError, ConnectionError) as error:
                raise WorldError(f"the server of rank processes is gone; can python import {PRELOAD}?") from error
            processes.append(process)
            theirs.close()
        yield processes, pipes
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
        for process in processes:
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def _supervise(plan: _RankPlan, processes: list[ForkServerProcess], pipes: list[_Pipe]) -> list[Outcome]:
    """Waits until every rank has reported or died, lets them go together, and collects the exit codes."""
    outcomes = [Outcome(rank) for rank in range(plan.world_size)]
    deadline = time.monotonic() + plan.timeout
    running = set(range(plan.world_size))
    failed: list[Outcome] = []
    while running:
        events = [pipes[r] for r in running] + [processes[r].sentinel for r in running]
        if not connection.wait(events, timeout=max(0.0, deadline - time.monotonic())):
            break
        for rank in sorted(running):
            if _collect(outcomes[rank], pipes[rank], processes[rank]):
                running.discard(rank)
                if not plan.expect_failure and not outcomes[rank].returned:
                    failed.append(outcomes[rank])
                    deadline = min(deadline, time.monotonic() + _SETTLE_S)
    if failed:
        raise WorldError(_failure_text(failed, plan.world_size))
    if running:
        raise WorldError(_timeout_text(plan, processes, sorted(running)))
    for pipe in pipes:
        with contextlib.suppress(OSError):  # ranks that died
            pipe.send_bytes(b"go")
    leave_by = time.monotonic() + _EXIT_S
    for outcome, process in zip(outcomes, processes, strict=True):
        process.join(max(0.0, leave_by - time.monotonic()))
        outcome.exitcode = process.exitcode
    failed = [o for o in outcomes if not o.ok]
    if failed and not plan.expect_failure:
        raise WorldError(_failure_text(failed, plan.world_size))
    return outcomes


def _collect(outcome: Outcome, pipe: _Pipe, process: ForkServerProcess) -> bool:
    """Reads a rank's report, or its death, into the outcome; whether there was either."""
    dead = bool(connection.wait([process.sentinel], timeout=0))  # asked first: what it sent before is in the pipe now
    if pipe.poll():
        with contextlib.suppress(EOFError):  # the rank died, which closed the pipe
            for name, value in pickle.loads(pipe.recv_bytes()).items():
                setattr(outcome, name, value)
            outcome.reported = True
            return True
        process.join()
        dead = True
    if dead:
        outcome.exitcode = process.exitcode
        outcome.ended_at = time.monotonic()
    return dead


def _failure_text(failed: list[Outcome], world_size: int) -> str:
    """The failure that came first in full, the others in one line."""

    def order(outcome: Outcome) -> tuple[bool, float]:
        return any(text in (outcome.error or "") for text in _SECOND_HAND), outcome.ended_at

    first, *others = sorted(failed, key=order)
    lines = [f"{len(failed)} of {world_size} ranks failed; first {first.describe()}"]
    for other in others:
        text = f"{other.error_type}: {other.error}" if other.error_type else other.describe()
        lines.append(f"also rank {other.rank}: {text.splitlines()[0][:300]}")
    return "\n".join(lines)


def _timeout_text(plan: _RankPlan, processes: list[ForkServerProcess], pending: list[int]) -> str:
    """Which ranks did not finish, and where they are."""
    for rank in pending:
        if (pid := processes[rank].pid) is not None and processes[rank].exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
    time.sleep(0.3)
    lines = [f"ranks {pending} of {plan.world_size} did not finish within {plan.timeout:.0f} s"]
    for rank in pending:
        file = plan.stack_file(rank)
        stack = file.read_text() if file.exists() else ""
        lines.append(f"rank {rank} is at:\n{stack.rstrip() or '(no stack: it never started, or is stopped)'}")
    return "\n".join(lines)


def _exit_name(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"{code} ({signal.Signals(-code).name})"
    return str(code)


def _loopback() -> str:
    """The name of the loopback interface: `lo` on Linux, `lo0` on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


# ------------------------------------------------------------------------------------------------ the rank process


def _rank_main(rank: int, plan: _RankPlan, pipe: _Pipe) -> None:
    """The life of a rank: set up, call, report, wait for the others, tear down."""
    # Kept open for the whole life of the process: faulthandler writes to its file descriptor.
    stack = plan.stack_file(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    # Should the test process be killed, nobody else ends a rank that hangs.
    faulthandler.dump_traceback_later(plan.timeout + _EXIT_S, exit=True, file=stack)
    os.environ.update(plan.variables, RANK=str(rank), LOCAL_RANK=str(rank))
    # As in a user's process. What a forkserver starts would make a server of its own for the workers of a data loader,
    # which imports torch anew: ten seconds for each loader.
    multiprocessing.set_start_method("fork", force=True)
    # A collection would look at every object of the imported libraries, and so copy their pages into this process.
    gc.freeze()
    failed = False
    try:
        data = pickle.dumps({"value": _call(rank, plan), "ended_at": time.monotonic()})
    except BaseException as error:
        failed = True
        data = _failure_report(error)
    with contextlib.suppress(OSError):
        pipe.send_bytes(data)
    # Nobody leaves before everybody has reported, as a closed connection would be one more failure. A rank that failed
    # leaves after a moment all the same, so that peers that wait for it learn of it, and by the short way: exit
    # handlers and destructors could wait for peers that never come.
    pipe.poll(_LINGER_S if failed else None)
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    _leave_world()
    faulthandler.cancel_dump_traceback_later()


def _failure_report(error: BaseException) -> bytes:
    """The report of a rank whose function raised, with the exception itself where it survives pickling."""
    report: dict[str, Any] = {
        "error_type": type(error).__name__,
        "error": str(error),
        "traceback": traceback.format_exc(),
        "ended_at": time.monotonic(),
    }
    with contextlib.suppress(Exception):
        data = pickle.dumps({**report, "exception": error})
        pickle.loads(data)
        return data
    return pickle.dumps(report)


def _call(rank: int, plan: _RankPlan) -> Any:
    """Makes the process group, calls the function, and closes with a barrier."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    from tests import detail
    from tests.shared_gpu import take_gpu

    torch.set_num_threads(1)
    # its default lock is a named semaphore, which a rank that is let go at once would leave behind
    tqdm.set_lock(threading.RLock())
    backend = "gloo" if plan.device == "cpu" else take_gpu(rank, plan.world_size)
    os.environ[BACKEND_VARIABLE] = backend
    if plan.init:
        dist.init_process_group(
            backend,
            init_method=f"file://{plan.folder}/rendezvous",
            rank=rank,
            world_size=plan.world_size,
            timeout=timedelta(seconds=plan.timeout),
        )
    if detail.WANTED:
        detail.separate_messages()
    fn, args = pickle.loads(plan.payload)
    value = fn(rank, plan.world_size, *args)
    if dist.is_initialized() and not plan.expect_failure:
        dist.barrier()
    return value


def _leave_world() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
