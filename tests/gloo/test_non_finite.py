"""Numbers that are not finite, and mini-batches with few labels or none: named, skipped if asked for, never hidden."""

import itertools
import math

import pytest
import torch

from hf_hotspa.errors import DataError, NonFiniteError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows, reference_step
from tests.worlds import make_engine, make_mini_batch, worst_error

pytestmark = pytest.mark.gloo

BUCKETS = "dp2:16@32,tp2:60@64"
BROKEN = 151
"""A token that no other row has; its embedding is made infinite."""


def poisoned(model, at=7, num_rows=12):
    rows = random_rows(num_rows, 150, longest=60, seed=3, masked=False)
    rows[at] = {"input_ids": [5, BROKEN, 6, 7], "labels": [5, BROKEN, 6, 7]}
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN] = float("inf")
    return rows


def named_world(rank, world_size):
    model = tiny_model("llama_gqa_bias")
    rows = poisoned(model)
    engine = make_engine(model, BUCKETS)
    before = [w.clone() for w in engine.master.weights if w is not None]
    with pytest.raises(NonFiniteError) as caught:
        engine.forward_backward(make_mini_batch(engine, rows))
    assert all(
        torch.equal(a, b) for a, b in zip(before, [w for w in engine.master.weights if w is not None], strict=True)
    )
    rows[7] = {"input_ids": [5, 6], "labels": [5, 6]}
    return str(caught.value), engine.forward_backward(make_mini_batch(engine, rows)).loss


def test_the_error_names_parameter_strategy_pack_and_rows():
    messages = run_ranks(2, named_world)
    for message, loss in messages:
        assert message == messages[0][0]
        for part in ("HSP-310", "the gradient of '", "strategy dp2, replica", "pack ", "7", "weights were not"):
            assert part in message, message
        assert math.isfinite(loss), "the engine goes on"


def skip_world(rank, world_size, folder, limit, poisoned_steps):
    """Six mini-batches of 4 rows in order; those of `poisoned_steps` hold a row that makes the loss infinite."""
    model = tiny_model("llama_gqa_bias")
    rows = random_rows(24, 150, longest=60, seed=3, masked=False)
    for step in poisoned_steps:
        poisoned(model)
        rows[4 * step + 1] = {"input_ids": [5, BROKEN, 6], "labels": [5, BROKEN, 6]}
    args = HotSPaTrainingArguments(
        output_dir=folder, hotspa_strategies="dp1:60@64" if world_size == 1 else BUCKETS, hotspa_mini_batch_size=4,
        hotspa_skip_non_finite=limit, max_steps=6, logging_steps=2, use_cpu=True, disable_tqdm=True, report_to="none",
        train_sampling_strategy="sequential", learning_rate=1e-2, lr_scheduler_type="constant", weight_decay=0.1,
    )  # fmt: skip
    weights, losses = [], []

    class Recorder(HotSPaTrainer):
        def training_step(self, *args, **kwargs):
            weights.append(torch.cat([p.detach().flatten() for _, p in self.engine.named_parameters()]))
            return super().training_step(*args, **kwargs)

        def log(self, logs, start_time=None):
            losses.append(self.last_report.loss if self.last_report else None)
            super().log(logs, start_time)

    trainer = Recorder(model=model, args=args, train_dataset=rows)
    error = None
    try:
        trainer.train()
    except NonFiniteError as caught:
        error = str(caught)
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(weights)]
    logs = [(log["loss"], log.get("hotspa/skipped_mini_batches")) for log in trainer.state.log_history if "loss" in log]
    return changed, logs, error, trainer.state.global_step


def skip_worlds(rank, world_size, folder):
    return [skip_world(rank, world_size, folder, *case) for case in ((2, (0, 1, 4)), (1, (2, 3)), (0, (1,)))]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_mini_batches_are_skipped_up_to_a_limit(world_size, tmp_path):
    for (changed, logs, none, last), second, first in run_ranks(world_size, skip_worlds, str(tmp_path)):
        assert (none, last) == (None, 6)
        assert changed == [False, False, True, True, False], "a skipped mini-batch changes nothing, not even by decay"
        assert [count for _, count in logs] == [2.0, 2.0, 3.0]
        assert math.isnan(logs[0][0]), "nothing finite was seen: not shown as 0"
        assert 4 < logs[1][0] < 6
        assert 4 < logs[2][0] < 6
        *_, error, step = second
        assert step == 3
        assert "1 mini-batches were skipped just before it" in error
        *_, error, step = first
        assert step == 1
        assert "HSP-310" in error


def few_labels(rank, world_size):
    """N3: packs, replicas and phases without a label weigh nothing."""
    model = tiny_model("llama_gqa_bias")
    rows = random_rows(10, 150, longest=60, seed=3)
    for row in rows[:-1]:
        if len(row["labels"]) > 16 or row is rows[0]:
            row["labels"] = [-100] * len(row["labels"])
    rows += [{"input_ids": [9] * 30, "labels": [-100] * 30}] * 4
    engine = make_engine(model, "dp2:16@16,tp2:32,pp2:60@60")
    loss, gradients = reference_step(model, rows)
    error, _ = worst_error(engine, make_mini_batch(engine, rows), loss, gradients)
    assert math.isfinite(engine.grad_norm)
    return error


def test_packs_without_labels_weigh_nothing():
    assert max(run_ranks(2, few_labels)) <= 1e-5


def one_rank_without_labels(rank, world_size, folder, limit):
    """Each rank averages over its own labels; rank 1 has none in the second mini-batch."""
    rows = random_rows(12, 150, longest=60, seed=3, masked=False)
    for row in rows[6:8]:
        row["labels"] = [-100] * len(row["labels"])
    args = HotSPaTrainingArguments(
        output_dir=folder, hotspa_strategies=BUCKETS, per_device_train_batch_size=2, average_tokens_across_devices=False,
        hotspa_skip_non_finite=limit, max_steps=3, logging_steps=1, use_cpu=True, disable_tqdm=True, report_to="none",
        train_sampling_strategy="sequential", learning_rate=1e-2,
    )  # fmt: skip
    trainer = HotSPaTrainer(model=tiny_model("llama_gqa_bias"), args=args, train_dataset=rows)
    error = None
    try:
        trainer.train()
    except DataError as caught:
        error = str(caught)
    skipped = [log.get("hotspa/skipped_mini_batches") for log in trainer.state.log_history if "loss" in log]
    weights = None if error else [float(p.sum()) for p in trainer.model.parameters()]
    return error, skipped, trainer.state.global_step, weights


def test_a_mini_batch_without_labels_on_one_rank_is_skipped_or_refused_by_all(tmp_path):
    first, second = run_ranks(2, one_rank_without_labels, str(tmp_path / "skipped"), 1)
    assert first == second
    assert first[:3] == (None, [None, 1.0, 1.0], 3)
    for error, _, step, _ in run_ranks(2, one_rank_without_labels, str(tmp_path / "refused"), 0):
        assert step == 1
        assert "HSP-301" in error
        assert "hotspa_skip_non_finite" in error
