"""Pieces of the multi-process tests: an engine and its mini-batches from plain rows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hf_hotspa.data.collator import MiniBatch, PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.packing.bucketing import Speeds, plan_mini_batch
from hf_hotspa.report import StepReport
from hf_hotspa.rows.read_row import RowRules, read_row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.strategy import Bucket, parse_buckets
from tests.oracle import exact_in_double, random_rows, reference_step, relative_error

T = TypeVar("T")


def gradient_of(parameter: torch.nn.Parameter) -> Tensor | None:
    """The buffer that `replica.bind_gradient` has bound."""
    return getattr(parameter, "_hotspa_gradient", parameter.grad)


def make_engine(
    model: PreTrainedModel,
    buckets: str,
    weights: Path | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> HotSPaEngine:
    """An engine for a bucket list in the user's grammar; `options` are those of `EngineOptions`."""
    return HotSPaEngine(model, parse_buckets(buckets), EngineOptions(**options), weights=weights, device=device)


def make_mini_batch(
    engine: HotSPaEngine,
    rows: Sequence[dict[str, Any]],
    policy: str = "error",
    columns: Sequence[str] = (),
    speeds: tuple[float, ...] | None = None,
) -> MiniBatch:
    """One mini-batch of all rows, as the data loader would build it on this rank, for ranks of these speeds."""
    shape = engine.description.shape
    collator = PackedBucketCollator(
        engine.buckets,
        rank=engine.rank,
        vocab_size=shape.vocab_size,
        quadratic_cost=shape.quadratic_cost,
        policy=policy,
        rules=RowRules(columns=tuple(columns)),
    )
    if speeds is None:
        return collator(rows)
    read = [read_row(row, index, collator.rules) for index, row in enumerate(rows)]
    table = SequenceTable.of_rows(read, collator.rules)
    plan = plan_mini_batch(
        range(len(rows)),
        table,
        engine.buckets,
        quadratic_cost=shape.quadratic_cost,
        policy=policy,
        speeds=Speeds(speeds),
    )
    return collator.of_plan(plan, dict(enumerate(read)))


def shared_reference(model: PreTrainedModel, rows: Sequence[dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
    """`reference_step`, which rank 0 computes for all: the ranks of a test share few cores. Collective."""
    return from_rank_0(lambda: reference_step(model, rows))


def shared_logits(model: PreTrainedModel, rows: Sequence[dict[str, Any]]) -> list[Tensor]:
    """The plain model's logits [S, V] of each row, likewise. Collective."""

    def logits() -> list[Tensor]:
        with torch.no_grad(), exact_in_double(model.dtype):
            return [model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0] for row in rows]

    return from_rank_0(logits)


def from_rank_0(compute: Callable[[], T]) -> T:
    """What rank 0 computes, for all. Collective."""
    values = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values)
    return cast(T, values[0])


def worst_error(
    engine: HotSPaEngine, mini_batch: MiniBatch, loss: float, gradients: dict[str, Tensor]
) -> tuple[float, StepReport]:
    """The largest relative error of loss and gradients of one step."""
    with exact_in_double(engine.description.compute_dtype):
        report = engine.forward_backward(mini_batch)
    got = engine.full_gradients()
    assert got.keys() == {name for name, g in gradients.items() if g is not None}
    return max(abs(report.loss - loss) / abs(loss), *(relative_error(got[n], gradients[n]) for n in got)), report


def worst_error_with_logits(model: PreTrainedModel, buckets: str, num_rows: int, **options: Any) -> float:
    """The largest relative error of two mini-batches that run in all buckets, trained, and evaluated with the logits of
    every row.

    Args:
        num_rows: Rows of a mini-batch, of up to 60 tokens.
        options: Those of `EngineOptions`.
    """
    engine, errors, ran = make_engine(model, buckets, **options), list[float](), set[Bucket]()
    for seed in range(2):  # the second mini-batch reuses all buffers
        rows = random_rows(num_rows, model.config.vocab_size, longest=60, seed=seed)
        loss, gradients = shared_reference(model, rows)
        mini_batch = make_mini_batch(engine, rows)
        ran |= {phase.bucket for phase in mini_batch.phases}
        errors.append(worst_error(engine, mini_batch, loss, gradients)[0])
        with exact_in_double(torch.float64), engine.evaluation() as evaluation:
            found = evaluation.run(mini_batch, with_logits=True)
        errors.append(abs(found.loss_sum / found.num_labels - loss) / loss)
        assert sorted(found.logits) == [(row, 0) for row in range(num_rows)]
        expected = shared_logits(model, rows)
        errors += [relative_error(logits, expected[row]) for (row, _), logits in found.logits.items()]
    engine.close()
    assert len(ran) == len(engine.buckets)
    return max(errors)
