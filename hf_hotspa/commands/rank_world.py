"""Starts the ranks of a program of this machine: a file as rendezvous, loopback, and no process is left at the end.

`run_world(4, fn, *args)` calls `fn(rank, world_size, *args)` in four processes and returns the value of rank 0; `World`
is the same for callers that do other work meanwhile. Ranks on CPU are forked from one warm server and compute on one
thread, unless OMP_NUM_THREADS is set. Ranks on GPUs are started afresh, as a process that asked for a GPU cannot fork.
"""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any, TypeVar, cast

from hf_hotspa.errors import HotspaError

T = TypeVar("T")

_PRELOAD = ("torch", "torch.distributed.pipelining", "transformers.trainer", "transformers.models.llama.modeling_llama")
_PEERS_S = 1.0  # how long a first failure waits for an earlier cause on another rank
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""With the value 1 several ranks may have one GPU (NCCL 2.30 or newer)."""


class WorldError(RuntimeError):
    """A rank failed or died, or the time was over."""

    @property
    def reason(self) -> str:
        """The line of the traceback that says what was raised."""
        lines = str(self).strip().splitlines()
        at = max((n for n, line in enumerate(lines) if line[:1].strip() and ":" in line), default=len(lines) - 1)
        return lines[at].strip()


class World:
    """Ranks that run `fn(rank, world_size, *args, *of_rank[rank])`, from the start on.

    Args:
        world_size: The number of ranks.
        fn: A module-level function.
        args: Picklable.
        of_rank: More arguments, one tuple for each rank.
        timeout_s: How long an operation may wait for a peer.
        preload: What the server imports once for all ranks; the first world's counts.
        device: `cpu`, or `cuda` with a GPU for each rank.
        log: A file for what the ranks print; None leaves it where it is.
    """

    def __init__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: object,
        of_rank: Sequence[tuple[Any, ...]] = (),
        timeout_s: float = 3600.0,
        preload: Sequence[str] = _PRELOAD,
        device: str = "cpu",
        log: str | None = None,
    ) -> None:
        context = cast(Any, multiprocessing.get_context("forkserver" if device == "cpu" else "spawn"))
        if device == "cpu":
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                os.environ.setdefault(name, "1")
            context.set_forkserver_preload(list(preload))
        self._folder = tempfile.TemporaryDirectory(prefix="hotspa-world-")
        self.pipes: list[connection.Connection[Any, Any]] = []
        self._processes: list[Any] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                own = of_rank[rank] if of_rank else ()
                where = rank, world_size, self._folder.name, timeout_s, device, log
                process = context.Process(target=_rank_main, args=(where, theirs, fn, (*args, *own)), daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self._processes.append(process)
        except BaseException:
            self.end(patience_s=0.0)
            raise

    def result(self, limit_s: float | None = None) -> Any:
        """Returns the value of rank 0, once every rank has returned. Raises `WorldError`: with the traceback of the rank that
        failed first; or `limit_s` seconds are over. Raises `HotspaError`: as a rank did."""
        values: dict[int, Any] = {}
        waiting, end = dict(enumerate(self.pipes)), None if limit_s is None else time.monotonic() + limit_s
        while waiting:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = connection.wait(list(waiting.values()), left)
            if not ready:
                raise WorldError(f"TimeoutError: no result within {limit_s:.0f} s")
            failed = dict[int, str | HotspaError]()
            for rank, pipe in list(waiting.items()):
                if pipe not in ready:
                    continue
                ok, value = _received(pipe)
                if not ok:
                    failed[rank] = value
                values[rank] = value
                del waiting[rank]
            if failed:
                raise _cause(failed, waiting)
        return values[0]

    @property
    def exit_codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]

    def end(self, patience_s: float = 15.0) -> None:
        """Waits for the processes, and kills all that do not end."""
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def run_world(
    world_size: int,
    fn: Callable[..., T],
    *args: object,
    timeout_s: float = 3600.0,
    limit_s: float | None = None,
    **options: object,
) -> T:
    """Runs a module-level function on every rank of a fresh world, and returns the value of rank 0. Raises as `World.result`.

    Args:
        world_size: The number of ranks.
        fn: Called as `fn(rank, world_size, *args)`.
        args: Picklable.
        timeout_s: How long an operation may wait for a peer.
        limit_s: How long the ranks may take together, in seconds; None for no limit.
        options: `preload`, `device` and `log` of `World`.
    """
    world, patience_s = World(world_size, fn, *args, timeout_s=timeout_s, **cast(dict[str, Any], options)), 0.0
    try:
        value: T = world.result(limit_s)
        patience_s = 15.0
        return value
    finally:
        world.end(patience_s)


def _received(pipe: "connection.Connection[Any, Any]") -> tuple[bool, Any]:
    try:
        ok, value = pipe.recv()
    except EOFError:
        return False, "RuntimeError: the process died without a traceback"
    return ok, value


def _cause(
    failed: dict[int, str | HotspaError], waiting: "dict[int, connection.Connection[Any, Any]]"
) -> WorldError | HotspaError:
    """The failure that is not about a lost peer, if one comes soon."""
    deadline = time.monotonic() + _PEERS_S
    while waiting and all(map(_of_peer, failed.values())):
        ready = connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            ok, value = _received(waiting.pop(rank))
            if not ok:
                failed[rank] = value
    rank = min(failed, key=lambda rank: (_of_peer(failed[rank]), rank))
    failure = failed[rank]
    return failure if isinstance(failure, HotspaError) else WorldError(f"rank {rank} failed:\n{failure}")


def _of_peer(failure: str | HotspaError) -> bool:
    return failure.is_echo if isinstance(failure, HotspaError) else any(word in failure for word in _LOST)


Where = tuple[int, int, str, float, str, str | None]


def _rank_main(
    where: Where, pipe: "connection.Connection[Any, Any]", fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches every process of a terminal: the parent ends its ranks
    gc.freeze()  # what the server imported is never garbage, and looking through it takes seconds
    rank, world_size, folder, timeout_s, device, log = where
    if log is not None:
        write_to(f"{log}-{rank}.log")
    import torch
    import torch.distributed as dist

    from hf_hotspa.parallel import backends

    try:
        backends.prefer_loopback(os.environ)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # never opened: the process group exists
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        local = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
        os.environ |= dict(zip(local, (str(rank), str(world_size)), strict=True))
        if device == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
        else:
            if world_size > torch.cuda.device_count():  # ranks share GPUs, and look like nodes of one rank each
                os.environ |= dict(zip(local, (str(rank % torch.cuda.device_count()), "1"), strict=True))
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            backends.prepare_environment(torch.device(device))
        dist.init_process_group(
            backends.backend_for(device), init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        value = fn(rank, world_size, *args)
        dist.barrier()
    except BaseException as error:
        pipe.send((False, error if isinstance(error, HotspaError) else traceback.format_exc()))
        sys.stdout.flush()
        os._exit(1)  # exit handlers could wait for peers that never come
    pipe.send((True, value if rank == 0 else None))
    dist.destroy_process_group()


def write_to(path: str) -> None:
    """Sends everything that this process prints to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(handle, descriptor)
