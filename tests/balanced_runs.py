"""Trainings with `hotspa_stragglers=balance`, of which a test sees what each mini-batch had on this rank."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from tests.slow_ranks import said_to_take
from tests.training_runs import make_trainer, train

SLOW_FROM, SLOW_UNTIL, STEPS = 2, 6, 9


class Keeper(TrainerCallback):
    """Keeps what is here in each mini-batch, and who was called slow after it.

    Args:
        trainer: Whose engine is looked at.
        look: What is here, of an engine.
    """

    def __init__(self, trainer: Any, look: Callable[[Any], list[int]]) -> None:
        self.trainer, self.look = trainer, look
        self.seen, self.slow = list[int](), list[tuple[int, ...]]()

    def on_phase_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen += self.look(self.trainer.engine)

    def on_step_report(self, args: Any, state: Any, control: Any, report: Any, **kwargs: Any) -> None:
        self.slow.append(report.slow)


def balanced_runs(
    rank: int, world_size: int, runs: list[Any], is_slow: Callable[[int, int], float], look: Callable[[Any], list[int]]
) -> list[Any]:
    """For each run, a folder, a checkpoint to go on from and options: losses, what was here, and who was slow."""
    results = []
    for folder, resume, options in runs:
        with said_to_take(rank, is_slow, token_s=1.0, by_weights=True):
            trainer = make_trainer(folder, world_size, **options)
            keeper = Keeper(trainer, look)
            trainer.add_callback(keeper)
            results.append((train(trainer, resume), keeper.seen, keeper.slow))
    return results
