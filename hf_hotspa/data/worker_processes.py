"""DataLoader workers that live exactly as long as their rank wants them to.

Owns how the worker processes of our loaders are started. Promises, on Linux:

* SIGTERM from anybody but their own rank does not end them, from their first moment on. Launchers and schedulers send it
  to whole process groups; the rank needs its workers for the mini-batch that it still finishes, and ends them itself.
* They end at once when their rank dies, however it dies. A forked worker holds copies of the rank's connections, so
  peers notice the death only when its workers are gone, too; torch's own watchdog looks every five seconds.
* Their rank can end them as it ends any (`terminate()`), so nothing waits for them when a process exits.

Where the system has no `sigwaitinfo` (macOS), workers are torch's own.
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


@contextlib.contextmanager
def _sigterm_held() -> Iterator[None]:
    """SIGTERM waits: for this thread until the end, for a process that is started inside until it says otherwise."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_when_announced(rank: int) -> None:
    """Takes every SIGTERM in place of the handlers, and obeys the one that the rank sends."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)  # as torch's workers do: any other code is the failure of a worker


def _end_with_rank(rank: Any) -> None:
    try:
        handle = os.pidfd_open(rank.pid)
    except OSError:  # dead already, or a kernel without; a pipe that other children of the rank may hold open as well
        handle = rank.sentinel
    connection.wait([handle])
    os._exit(1)


class _Worker:
    """A process that starts with SIGTERM held, and has two threads that decide when it ends."""

    def start(self) -> None:
        with _sigterm_held():
            super().start()  # type: ignore[misc]

    def run(self) -> None:
        rank = multiprocessing.parent_process()
        assert rank is not None
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a fork server may have been started before
        for target, argument in ((_end_when_announced, rank.pid), (_end_with_rank, rank)):
            threading.Thread(target=target, args=(argument,), name=f"hotspa{target.__name__}", daemon=True).start()
        super().run()  # type: ignore[misc]


# at the top of the module: a spawned process finds its class by name
class _ForkWorker(_Worker, context.ForkProcess):
    pass


class _SpawnWorker(_Worker, context.SpawnProcess):
    pass


class _ForkServerWorker(_Worker, context.ForkServerProcess):
    pass


_KINDS = {"fork": _ForkWorker, "spawn": _SpawnWorker, "forkserver": _ForkServerWorker}


def worker_context(num_workers: int, chosen: str | BaseContext | None) -> BaseContext | None:
    """The `multiprocessing_context` of a loader.

    Args:
        num_workers: Of the loader; without any, no context is needed.
        chosen: How workers are started: the name of a start method, a context, or None for the system's choice.

    Raises:
        HotspaConfigError: there is no such start method.
    """
    if num_workers == 0:
        return None
    if chosen is None:
        # not get_context(None), after which the script could not choose any more
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
