"""Starts the ranks of a benchmark: forked from one warm server, a file as rendezvous, one compute thread, loopback.

`run_world(4, fn, *args)` calls `fn(rank, world_size, *args)` in four processes and returns what rank 0 returned; `World`
is the same for those who have other things to do meanwhile.
"""

import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any, TypeVar

T = TypeVar("T")

_PRELOAD = ("torch", "torch.distributed.pipelining", "transformers.trainer", "transformers.models.llama.modeling_llama")


class WorldError(RuntimeError):
    """A rank failed or died."""


class World:
    """Ranks that run `fn(rank, world_size, *args, *of_rank[rank])`, from the start on.

    Args:
        world_size: The number of ranks.
        fn: A module-level function.
        args: Picklable.
        of_rank: More arguments, for each rank its own.
        timeout_s: How long an operation may wait for a peer.
        preload: What the server imports once for all ranks; the first world's counts.
    """

    def __init__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        of_rank: Sequence[tuple[Any, ...]] = (),
        timeout_s: float = 3600.0,
        preload: Sequence[str] = _PRELOAD,
    ) -> None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self._folder = tempfile.TemporaryDirectory(prefix="hotspa-bench-")
        self.pipes: list[connection.Connection[Any, Any]] = []
        self._processes: list[Any] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                own = of_rank[rank] if of_rank else ()
                process = context.Process(
                    target=_rank_main,
                    args=(rank, world_size, self._folder.name, timeout_s, theirs, fn, (*args, *own)),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self._processes.append(process)
        except BaseException:
            self.end(patience_s=0.0)
            raise

    def result(self) -> Any:
        """The value of rank 0, once every rank has returned.

        Raises:
            WorldError: with the traceback of the first rank that failed.
        """
        return _collect(self.pipes)

    @property
    def exit_codes(self) -> list[int | None]:
        """Of the processes; None for those that run."""
        return [process.exitcode for process in self._processes]

    def end(self, patience_s: float = 15.0) -> None:
        """Waits for the processes, and kills those that do not end."""
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
    *args: Any,
    timeout_s: float = 3600.0,
    preload: Sequence[str] = _PRELOAD,
) -> T:
    """Runs a module-level function on every rank of a fresh world (gloo).

    Args:
        world_size: The number of ranks.
        fn: Called as `fn(rank, world_size, *args)`.
        args: Picklable.
        timeout_s: How long an operation may wait for a peer.
        preload: What the server imports once for all ranks; the first call's counts.

    Returns:
        The value of rank 0.

    Raises:
        WorldError: with the traceback of the first rank that failed.
    """
    world = World(world_size, fn, *args, timeout_s=timeout_s, preload=preload)
    try:
        found: T = world.result()
        return found
    finally:
        world.end()


def _collect(pipes: "list[connection.Connection[Any, Any]]") -> Any:
    """The value of rank 0, once every rank has returned."""
    values: dict[int, Any] = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = connection.wait(list(waiting.values()))
        for rank, pipe in list(waiting.items()):
            if pipe not in ready:
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, "died without a traceback"
            if not ok:
                raise WorldError(f"rank {rank} failed:\n{value}")
            values[rank] = value
            del waiting[rank]
    return values[0]


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    pipe: "connection.Connection[Any, Any]",
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    interfaces = [name for _, name in socket.if_nameindex()]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # never opened: the process group that is there is used
        GLOO_SOCKET_IFNAME=next((name for name in ("lo", "lo0") if name in interfaces), interfaces[0]),
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        value = fn(rank, world_size, *args)
        dist.barrier()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        sys.stdout.flush()
        os._exit(1)  # exit handlers could wait for peers that never come
    pipe.send((True, value if rank == 0 else None))
    dist.destroy_process_group()
