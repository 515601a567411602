"""Which rank hangs: the ranks that lost a peer meet at a barrier that names the missing.

A rank that hangs says nothing; what its peers see is a collective that times out, or, where another rank was sooner,
a connection that is closed. Each of them leaves its name in the rendezvous store. The ones that timed out wait a few
seconds for the names of all others: ranks that wait for each other give up at about the same moment, so whose name is
missing then hangs, is stopped, or works on something that takes longer than the rest waits. Nothing is written before
a collective has failed: a run in which all is well pays nothing.
"""

import contextlib
import re
import time
from collections.abc import Callable

import torch.distributed as dist

from hf_hotspa.errors import HotspaError, SilentPeerError

ANSWER_S = 3.0
"""How long an answer is waited for, after the timeout of the collective."""

_GRACE_S = 0.5  # between a connection that another rank closes because it gave up, and its call
_POLL_S = 0.05
_TIMED_OUT = re.compile("[Tt]imed? ?out")
_CALLED = "hotspa_barrier"


class MonitoredBarrier:
    """The barrier of one rank, as `torch.distributed.monitored_barrier` but over the store. Several threads may hold it.

    Args:
        store: The store that all ranks share.
        outcome: The key under which the first error of the run appears; nobody waits for names after that.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, outcome: str) -> None:
        self._store, self._rank, self._world_size, self._outcome = store, rank, world_size, outcome

    def named(self, error: HotspaError) -> HotspaError:
        """What to say of a peer that was lost: the error itself, or who is silent.

        Returns:
            A `SilentPeerError` where the wait timed out and some ranks did not answer; else the error itself. Also when
            the store is gone, with the process that holds it.
        """
        with contextlib.suppress(RuntimeError):  # all that torch's stores raise
            self._store.set(self._key(self._rank), "here")
            if not _TIMED_OUT.search(str(error)):
                # perhaps its peer has only just given up, and will say why
                if self._wait(_GRACE_S, lambda: self._store.check([_CALLED])):
                    self._wait(ANSWER_S + _GRACE_S, lambda: False)
                return error
            self._store.set(_CALLED, "called")
            self._wait(ANSWER_S, lambda: not self._silent())
            silent = self._silent()
            if silent and not self._store.check([self._outcome]):
                return _silent_error(error, silent)
        return error

    def _key(self, rank: int) -> str:
        return f"{_CALLED}/{rank}"

    def _silent(self) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._store.check([self._key(rank)])]

    def _wait(self, seconds: float, ready: Callable[[], bool]) -> bool:
        """Waits until it is so, the time is up, or the run has its error; returns whether it is so."""
        deadline = time.monotonic() + seconds
        while not (so := ready()) and not self._store.check([self._outcome]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return so


def _silent_error(error: HotspaError, silent: list[int]) -> SilentPeerError:
    names = ", ".join(map(str, silent))
    who = (
        f"rank {names} is silent" if len(silent) == 1 else f"of the ranks {names}, which are silent, at least one hangs"
    )
    return SilentPeerError(
        f"{who}: the others have waited in vain and found each other, but not it. {error.what}",
        where=error.where,
        why="it hangs, is stopped, or does something that takes longer than the others wait; the master weights of the "
        "ranks are unchanged",
        fix="look at what that rank does (its log, py-spy dump), and start again with resume_from_checkpoint=True; where it "
        "is merely slow, raise ddp_timeout, or hotspa_switch_timeout in a switch",
    )
