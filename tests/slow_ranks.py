"""Ranks that compute slowly, for tests: what they measure is said to be so, or they sleep in every forward."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hf_hotspa.engine.phase import PhaseRunner
from hf_hotspa.features.slow_devices.flexible_linear import FlexibleWork
from hf_hotspa.layout.vector import EMBEDDING
from hf_hotspa.model.replica import Replica
from hf_hotspa.seam import settings


@contextmanager
def said_to_take(
    rank: int,
    times: Callable[[int, int], float],
    token_s: float = 1e-2,
    product_share: float = 0.0,
    by_weights: bool = False,
) -> Iterator[None]:
    """Every phase measures a computation in proportion to its tokens, some ranks several times as long.

    Args:
        rank: Of this process.
        times: Mini-batch (counted from 0) and rank to how many times the seconds of a usual rank this one takes.
        token_s: The seconds of a usual rank, a token.
        product_share: The part of products, which alone takes longer; what a rank gives away it does not compute.
        by_weights: A rank takes in proportion to what it multiplies with, too (the cost of stages by count): `token_s` is
            then that of a million weights.
    """
    run = PhaseRunner.run

    def measured(runner: PhaseRunner, phase: Any, plan: Any, together: Any, *args: Any, **kwargs: Any) -> Any:
        (loss, found), step = run(runner, phase, plan, together, *args, **kwargs), together.step
        tokens = sum(m.num_tokens for m in phase.micro_batches)
        usual = token_s * tokens / runner.mesh.strategy.tp
        if by_weights:
            slots, is_last = runner.replica.slots, runner.replica.is_last
            held = sum(s.numel for s in slots if s.spec.unit != EMBEDDING or (s.spec.in_head and is_last))
            usual = token_s * tokens * held / 1e6
        if not product_share:
            return loss, found | {"compute_s": usual * times(step, rank), "others_s": 0.0}
        work = settings(runner.replica.attachments, FlexibleWork)
        extra = 0.0
        if work is not None:
            given, taken = work.shares[work.position], sum(work.shares) / work.shares.count(0.0)
            extra = (-given if given else taken) - work.left_share
        products_s = usual * product_share * (1.0 + extra) * times(step, rank)
        seconds = usual * (1.0 - product_share) + products_s
        return loss, found | {"compute_s": seconds, "others_s": 0.0, "products_s": products_s}

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
