"""Runs of public reports: the parts that their scripts share."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from datasets import IterableDataset

from tests import trl_runs
from tests.lora import tiny_lora
from tests.moves import STRATEGIES, Kit, Seen, losing, padded
from tests.moves.checkpoints import everyone, folders

BY_STEPS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
EACH: dict[str, Any] = {**SAVES, "eval_strategy": "steps", "eval_steps": 1}
OWN_READING: dict[str, Any] = {"accelerator_config": {"dispatch_batches": False}}
"""Each process reads the stream, so batches of unequal rows need not be sent."""
LORA = partial(tiny_lora, "llama_gqa_bias")


def stream(rows: list[dict[str, Any]]) -> IterableDataset:
    def each() -> Iterator[dict[str, Any]]:
        yield from rows

    return IterableDataset.from_generator(each)


def evaluated(trainer: Any) -> list[dict[str, float]]:
    """The logs of the evaluations, without times."""

    def counts(name: str) -> bool:
        return name.startswith("eval_") and not name.endswith(("runtime", "per_second"))

    logs = [{name: value for name, value in log.items() if counts(name)} for log in trainer.state.log_history]
    return [log for log in logs if log]


def run(
    kit: Kit,
    cls: Any = None,
    rows: Any = None,
    others: Any = None,
    given: Any = None,
    resume: Any = None,
    **arguments: Any,
) -> Seen:
    """Trains, and returns losses, rates, weights, evaluations and folders. `given` is for the constructor."""
    rows = kit.rows() if rows is None else rows
    data = {"train_dataset": rows, "eval_dataset": kit.rows() if others is None else others}
    trainer = kit.trainer(cls, args=kit.arguments(**arguments), **data, **(given or {}))
    seen = kit.train(
        trainer, resume_from_checkpoint=resume and (resume if resume is True else str(kit.folder / "out" / resume))
    )
    everyone(kit)
    state = trainer.state
    return {
        **seen,
        "evaluated": evaluated(trainer),
        "folders": folders(kit),
        "steps": [state.global_step, state.max_steps, state.best_global_step],
    }


def with_loss(kit: Kit, term: Callable[..., Any], **options: Any) -> Seen:
    """Trains with a `compute_loss` that returns `term(trainer, model, inputs, num_items_in_batch)`: loss and outputs."""
    return run(
        kit,
        losing(kit.trainer_class, term),
        **{**options, "given": {"data_collator": padded, **options.get("given", {})}},
    )


def accuracy(predicted: Any) -> dict[str, float]:
    """Accuracy of arg-maxima, shifted as in the report."""
    ids, labels = predicted.predictions[:, :-1], predicted.label_ids[:, 1:]
    real = labels != -100
    return {"hits": float(((ids == labels) & real).sum() / real.sum())}


ARGMAX = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}


def of_trl(kind: str, data: str, given: Callable[[], dict[str, Any]] = dict, **fields: Any) -> Callable[[Kit], Seen]:
    """Logs and weights of a run of TRL's trainer, or of ours."""

    def run_trl(kit: Kit) -> Seen:
        more = lambda: {**given(), "callbacks": [kit.counter]}  # noqa: E731
        case = trl_runs.Case(kind, ("", ""), data, {"max_steps": 3, **fields}, dtype=torch.float32, given=more)
        seen = trl_runs.run(case, str(kit.folder / "out"), None if kit.stock else STRATEGIES[kit.world_size])
        # rewards of the first step are differences of equal sums
        logs = [{name: value if abs(value) > 1e-6 else 0.0 for name, value in log.items()} for log in seen["logs"]]
        return {**seen, "logs": logs}

    return run_trl
