"""DataLoader workers whose lifetime their rank controls.

Owns how the worker processes of our loaders are started. On Linux:

* Only their rank's SIGTERM ends them, from their start on. Launchers, schedulers and terminals send SIGTERM and SIGINT to
  whole process groups, and the rank needs its workers to finish the current mini-batch.
* They end at once when their rank dies, however it dies. A forked worker holds copies of the rank's connections, so
  peers notice the death only when the workers are gone, too; torch's watchdog checks every five seconds.
* Their rank can end them with `terminate()`, so nothing waits for them when a process exits.

On systems without `sigwaitinfo` (macOS), workers are torch's.
"""

import contextlib
import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import connection, context
from multiprocessing.context import BaseContext
from typing import Any

from hf_hotspa.errors import HotspaConfigError

_ENDING = {signal.SIGTERM, signal.SIGINT}


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Also in processes started inside, until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_when_announced(rank: int) -> None:
    """Receives every SIGTERM in place of the handlers; exits on the rank's."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)  # as torch's workers: any other code counts as a failed worker


def _end_with_rank(rank: Any) -> None:
    try:
        handle = os.pidfd_open(rank.pid)
    except OSError:  # already dead, or no pidfd; the sentinel is a pipe that other children may keep open
        handle = rank.sentinel
    connection.wait([handle])
    os._exit(1)


class _Worker:
    """Starts with both signals blocked; two threads decide when it ends."""

    def start(self) -> None:
        with _signals_blocked():
            super().start()  # type: ignore[misc]

    def run(self) -> None:
        rank = multiprocessing.parent_process()
        assert rank is not None
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # a fork server may have been started before
        for target, argument in ((_end_when_announced, rank.pid), (_end_with_rank, rank)):
            threading.Thread(target=target, args=(argument,), name=f"hotspa{target.__name__}", daemon=True).start()
        super().run()  # type: ignore[misc]


# at module level: a spawned process finds its class by name
class _ForkWorker(_Worker, context.ForkProcess):
    pass


class _SpawnWorker(_Worker, context.SpawnProcess):
    pass


class _ForkServerWorker(_Worker, context.ForkServerProcess):
    pass


_KINDS = {"fork": _ForkWorker, "spawn": _SpawnWorker, "forkserver": _ForkServerWorker}


def worker_context(num_workers: int, chosen: str | BaseContext | None) -> BaseContext | None:
    """Returns the `multiprocessing_context` of a loader. `num_workers`: the loader's workers; with 0 no context is
    needed. `chosen`: the name of a start method, a context, or None for the system's default. Raises
    `HotspaConfigError`: there is no such start method."""
    if num_workers == 0:
        return None
    if chosen is None:
        # not get_context(None), which would fix the choice for the script
        chosen = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if isinstance(chosen, str):
        if chosen not in multiprocessing.get_all_start_methods():
            raise HotspaConfigError(
                f"dataloader_multiprocessing_context is {chosen!r}",
                fix=f"use one of {', '.join(multiprocessing.get_all_start_methods())}",
            )
        chosen = multiprocessing.get_context(chosen)
    kind = _KINDS.get(chosen.get_start_method())
    if kind is None or not hasattr(signal, "sigwaitinfo"):
        return chosen
    guarded = copy.copy(chosen)
    guarded.Process = kind  # type: ignore[attr-defined]
    return guarded
