"""Ranks that compute slowly, for tests: what they measure is said to be so, or they sleep in every forward; and trainings with
them, of which a test sees what each mini-batch had on this rank."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from transformers import TrainerCallback

from hf_hotspa.engine.phase import PhaseRunner
from hf_hotspa.features.slow_devices.flexible_linear import FlexibleWork
from hf_hotspa.layout.vector import EMBEDDING
from hf_hotspa.model.replica import Replica
from hf_hotspa.report import StepReport
from hf_hotspa.seam import settings
from tests.training_runs import contents, make_trainer, newest, train


class Slow(NamedTuple):
    """How many times the seconds of a usual rank each one takes in a mini-batch, counted from 0."""

    first: int
    until: int
    times: float = 4.0
    ranks: tuple[int, ...] = (1,)

    def __call__(self, step: int, rank: int) -> float:
        return self.times if rank in self.ranks and self.first <= step < self.until else 1.0


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


# -- trainings ----------------------------------------------------------------------------------------------------------


class Watch(TrainerCallback):
    """Keeps what is on this rank in each phase, of an engine, and the reports of mini-batches."""

    def __init__(self, trainer: Any, here: Callable[[Any], Any]) -> None:
        self.trainer, self.here = trainer, here
        self.seen, self.reports = list[Any](), list[StepReport]()

    def on_phase_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(self.here(self.trainer.engine))

    def on_step_report(self, args: Any, state: Any, control: Any, report: StepReport, **kwargs: Any) -> None:
        self.reports.append(report)


Run = tuple[str, str | None, dict[str, Any]]
"""A folder, a checkpoint to go on from, and options."""


class Watched(NamedTuple):
    """Of a run on this rank the losses by step, what was here in each phase, and of each mini-batch who is slow and the tokens of
    the busiest rank of the first phase."""

    losses: dict[int, float]
    seen: list[Any]
    slow: list[tuple[int, ...]]
    busiest: list[int]


def watched_runs(
    rank: int, world_size: int, runs: list[Run], slow: Slow, here: Callable[[Any], Any], said: dict[str, Any]
) -> list[Watched]:
    """`said`: options of `said_to_take`."""
    results = []
    for folder, resume, options in runs:
        with said_to_take(rank, slow.__call__, **said):
            trainer = make_trainer(folder, world_size, **options)
            watch = Watch(trainer, here)
            trainer.add_callback(watch)
            losses = train(trainer, resume)
        reported = [report.slow for report in watch.reports], [r.phases[0].busiest_tokens for r in watch.reports]
        results.append(Watched(losses, watch.seen, *reported))
    return results


def resumed_runs(folder: Path, options: dict[str, Any], points: Iterable[int]) -> list[Run]:
    """A run, and the same from its checkpoints after some steps."""
    return [(f"{folder}/a", None, options), *((f"{folder}/{p}", f"{folder}/a/checkpoint-{p}", options) for p in points)]


def check_resumed(folder: Path, points: Iterable[int], whole: Watched, *resumed: Watched) -> None:
    """Whether `resumed_runs` went on bit for bit."""
    for point, run in zip(points, resumed, strict=True):
        assert run.losses == {step: loss for step, loss in whole.losses.items() if step > point}
        assert contents(newest(folder / str(point))) == contents(newest(folder / "a"))
