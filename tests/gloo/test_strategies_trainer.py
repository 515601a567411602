"""The Trainer under `cp`, `+ck` and `+z`: training, evaluation, prediction, the model in between, signals, saves, skipping."""

import math

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.checkpoint.format.manifest import verify
from tests.checkpoints import memory_folder
from tests.gloo import test_non_finite as non_finite
from tests.gloo.test_preemption import terminated_run
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.training_runs import STEPS, contents, make_trainer, newest, one_run, train

pytestmark = pytest.mark.gloo

HOT = {
    "cp": "dp2:16@32,cp2:60@64",
    "chunks": "dp2:16@32,dp2+ck13:32@40,pp2+ck24:60@64",
    "fully sharded": "dp2+z3:16@32,dp2+rc+z2:32@40,pp2+z3:60@64",
}
kinds = pytest.mark.parametrize("kind", HOT)
one_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "fully sharded" else pytest.mark.slow) for kind in HOT]
)


@pytest.fixture
def folder():
    with memory_folder() as path:
        yield path


class _Looks(TrainerCallback):
    """What `trainer.model` holds when a step is logged."""

    def __init__(self):
        self.trainer, self.norms = None, []

    def on_log(self, args, state, control, **kwargs):
        norms = [p.detach().double().square().sum() for p in self.trainer.model.parameters()]
        self.norms.append(float(torch.stack(norms).sum()))


def whole_run(rank, world, folder, strategies):
    looks = _Looks()
    # a loss is a mean over batches of all ranks, which have four rows together on any number of ranks
    evaluation = {"per_device_eval_batch_size": 4 // world}
    evaluation |= {"hotspa_eval_strategy": "buckets"} if "+z" in strategies else {}
    trainer = make_trainer(
        f"{folder}/{world}", world, hotspa_strategies=strategies, save_steps=STEPS, callbacks=[looks], **evaluation
    )
    looks.trainer = trainer
    rows = random_rows(8, 150, longest=60, seed=5)
    trainer.eval_dataset = rows
    evaluated = []
    losses = trainer.train() and [log["loss"] for log in trainer.state.log_history if "loss" in log]
    num_streamed = sum("hotspa/unit_mb" in log for log in trainer.state.log_history)
    assert num_streamed == (len(losses) if "+z" in strategies else 0)
    evaluated.append(trainer.evaluate()["eval_loss"])
    predicted = trainer.predict(rows)
    trainer.close_engine()
    return losses, looks.norms, evaluated, predicted.predictions, predicted.label_ids, predicted.metrics["test_loss"]


@kinds
def test_a_run_is_that_of_one_process(folder, kind):
    """Losses, the weights that a callback sees, `evaluate` and `predict`."""
    (one,) = run_ranks(1, whole_run, str(folder), "dp1:60@64")
    for found in run_ranks(2, whole_run, str(folder), HOT[kind]):
        for mine, expected in zip(found[:3], one[:3], strict=True):
            assert mine == pytest.approx(expected, rel=1e-4)
        assert found[3].shape == one[3].shape
        assert np.array_equal(found[4], one[4])
        real = one[4] != -100  # at padding there are no logits
        assert np.abs(found[3] - one[3])[real].max() < 1e-3
        assert math.isclose(found[5], one[5], rel_tol=1e-4)


@one_kind
def test_a_signal_saves_and_a_resumed_run_ends_with_the_same_bits(folder, kind):
    options = {"hotspa_strategies": HOT[kind], "save_steps": 2, "hotspa_async_save": True}
    for found in run_ranks(2, terminated_run, str(folder / "a"), (1,), "on_phase_begin", dict(options)):
        assert found == (3, 3, True, [])
    verify(checkpoints(folder / "a")[0])
    run_ranks(2, one_run, str(folder / "a"), True, {"hotspa_strategies": HOT[kind], "save_steps": STEPS})
    run_ranks(2, one_run, str(folder / "b"), None, {"hotspa_strategies": HOT[kind], "save_steps": STEPS})
    resumed, whole = (contents(newest(folder / name)) for name in ("a", "b"))
    for state in (resumed, whole):
        del state["trainer_state"]
    assert resumed == whole


def resumed(rank, world, folder, strategies):
    """A run that goes on under other strategies than it began with."""
    trainer = make_trainer(folder, world, hotspa_strategies=strategies, max_steps=STEPS + 2)
    return train(trainer, True)


@one_kind
def test_a_checkpoint_of_dp_goes_on_under_others(folder, kind):
    run_ranks(2, one_run, str(folder), None, {"hotspa_strategies": "dp2:60@64", "save_steps": STEPS})
    for losses in run_ranks(2, resumed, str(folder), HOT[kind]):
        assert sorted(losses) == [STEPS + 1, STEPS + 2]


@one_kind
def test_mini_batches_are_skipped(folder, kind):
    for changed, logs, error, step in run_ranks(2, skipped, str(folder), kind):
        assert (error, step) == (None, 6)
        assert changed == [False, False, True, True, False]
        assert [count for _, count in logs] == [2.0, 2.0, 3.0]


def skipped(rank, world_size, folder, kind):
    non_finite.BUCKETS = HOT[kind]
    return non_finite.skip_world(rank, world_size, folder, 2, (0, 1, 4))


def from_config(rank, world, folder):
    """Strategies that say nothing, with DeepSpeed's stage 3 and with `fsdp`."""
    found = []
    for options in ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {"fsdp": "shard_grad_op"}):
        trainer = make_trainer(folder, world, hotspa_strategies="dp2:60@64", max_steps=1, save_steps=9, **options)
        train(trainer)
        found.append(trainer.last_report.phases[0].strategy)
    return found


def test_sharding_stages_of_others_are_run(folder):
    assert run_ranks(2, from_config, str(folder)) == [["dp2+z3", "dp2+z2"]] * 2
