"""What happens when training or an evaluation ends with an error on this rank: the others and the next launch are told."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_hotspa.errors import CheckpointError
from hf_hotspa.trainer.out_of_memory import note


def model_not_saved(target: Path, failure: Exception) -> CheckpointError:
    """What to raise for a `save_model` that failed."""
    return CheckpointError(
        f"the model cannot be saved: {type(failure).__name__}: {failure}",
        where=str(target),
        fix="name another directory or make room, and call save_model() again: the weights are still there",
    )


@contextmanager
def broadcast_error(trainer: Any, what: str) -> Iterator[None]:
    """Leaves an error for the other ranks, and a lack of memory for the next launch; raises what a peer was first to raise.

    May be nested: an error is told once.

    Args:
        trainer: The `HotSPaTrainer`; without an engine nothing is done.
    """
    try:
        yield
    except Exception as error:
        engine = trainer.engine
        if engine is None:
            raise
        note(trainer.args.output_dir, engine.failures)
        explained = engine.explain(error, f"{what} after step {trainer.state.global_step}")
        if explained is error:
            raise
        raise explained from error
