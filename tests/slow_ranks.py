"""Ranks that compute slowly, for tests: what they measure is said to be so, or they sleep in every forward."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hf_hotspa.engine.phase import PhaseRunner
from hf_hotspa.model.replica import Replica


@contextmanager
def said_to_take(rank: int, times: Callable[[int, int], float], token_s: float = 1e-2) -> Iterator[None]:
    """Every phase measures a computation in proportion to its tokens, some ranks several times as long.

    Args:
        rank: Of this process.
        times: Mini-batch (counted from 0) and rank to how many times the seconds of a usual rank this one takes.
        token_s: The seconds of a usual rank, a token.
    """
    run = PhaseRunner.run

    def measured(runner: PhaseRunner, phase: Any, *args: Any, step: int, **kwargs: Any) -> Any:
        loss, found = run(runner, phase, *args, step=step, **kwargs)
        tokens = sum(m.num_tokens for m in phase.micro_batches)
        seconds = token_s * tokens * times(step, rank) / runner.mesh.strategy.tp
        return loss, found._replace(compute_s=seconds, others_s=0.0)

    with patch.object(PhaseRunner, "run", measured):
        yield


@contextmanager
def slept(seconds: float) -> Iterator[None]:
    """Every forward of this rank takes so much longer."""
    forward = Replica.forward

    def sleeping(replica: Replica, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return forward(replica, *args, **kwargs)

    with patch.object(Replica, "forward", sleeping):
        yield
