"""What a rank of ours does inside of a phase's computation: its own work, tensor-parallel collectives, pipeline messages.

Waiting counts as what is waited for: on fewer cores than ranks, a rank that waits in a collective lends its core. The
clocks cost two readings a collective, and run in every timed mini-batch of ours.
"""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from result_file import timed_calls

_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_single", "reduce_scatter_single")


class PhaseClock:
    """Seconds of this rank since `take` was called last, by strategy: `own`, `tp`, `pp`."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, float]] = {}
        self._now: dict[str, float] | None = None

    def install(self, engine: Any) -> None:
        """Watches the phases of an engine, and every collective that is called inside of them."""
        for strategy, phase in engine.phases.items():
            phase.compute = self._phase(str(strategy), phase.compute)
        for name in _COLLECTIVES:
            setattr(dist, name, self.counted("tp", getattr(dist, name)))
        send = self.counted("pp", dist.batch_isend_irecv)
        dist.batch_isend_irecv = lambda *args, **kwargs: [_Timed(work, self) for work in send(*args, **kwargs)]

    def take(self) -> dict[str, dict[str, float]]:
        """What was measured; begins anew."""
        found, self._seconds = self._seconds, {}
        return found

    def add(self, part: str, seconds: float) -> None:
        """Counts seconds as a part of the phase that runs; none does while weights move."""
        if self._now is not None:
            self._now[part] += seconds
            self._now["own"] -= seconds

    def _phase(self, strategy: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._now = self._seconds.setdefault(strategy, dict.fromkeys(("own", "tp", "pp"), 0.0))
            begin = time.perf_counter()
            try:
                return compute(*args, **kwargs)
            finally:
                self._now["own"] += time.perf_counter() - begin
                self._now = None

        return timed

    def counted(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; its seconds count as a part of the phase that runs."""
        return timed_calls(function, lambda begin, end, *_: self.add(part, end - begin))


class _Timed:
    """A message under way: who waits for it is timed."""

    def __init__(self, work: Any, clock: PhaseClock) -> None:
        self._work = work
        self.wait = clock.counted("pp", work.wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
