"""Starts the ranks of a benchmark: forked from one warm server, a file as rendezvous, one compute thread, loopback.

`run_world(4, fn, *args)` calls `fn(rank, world_size, *args)` in four processes and returns what rank 0 returned.
"""

import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any, TypeVar

T = TypeVar("T")

_PRELOAD = ("torch", "torch.distributed.pipelining", "transformers.trainer", "transformers.models.llama.modeling_llama")


class WorldError(RuntimeError):
    """A rank failed or died."""


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
        preload: What the server imports once for all ranks; that of the first call counts.

    Returns:
        The value of rank 0.

    Raises:
        WorldError: with the traceback of the first rank that failed.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with tempfile.TemporaryDirectory(prefix="hotspa-bench-") as folder:
        pipes, processes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main, args=(rank, world_size, folder, timeout_s, theirs, fn, args), daemon=True
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes)
        finally:
            for process in processes:
                process.join(timeout=15.0)
                if process.is_alive():
                    process.kill()
                    process.join()


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
