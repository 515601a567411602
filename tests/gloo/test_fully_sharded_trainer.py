"""Runs of the Trainer under `+z2` and `+z3`: saved, resumed, evaluated, looked at and skipped as any other."""

import pytest
import torch
from transformers import TrainerCallback

from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.training_runs import contents, make_trainer, newest, train

pytestmark = pytest.mark.gloo

STRATEGIES = "dp2+z3:16@32,dp2+rc+z2:32@40,pp2+z3:60@64"


class _Looks(TrainerCallback):
    """Keeps the norm of the model's weights at every log: on-demand weights, in the middle of training."""

    def __init__(self):
        self.norms = []

    def on_log(self, args, state, control, model=None, **kwargs):
        self.norms.append(float(torch.stack([p.detach().norm() for p in model.parameters()]).norm()))


def one(folder, world, strategies, resume=None, callbacks=()):
    """Losses of the steps, of an evaluation under all strategies afterwards, and how often units were logged."""
    trainer = make_trainer(
        folder, world, callbacks=list(callbacks), hotspa_strategies=strategies, max_steps=6, save_steps=3,
        hotspa_async_save=True, hotspa_eval_strategy="buckets",
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    rows = random_rows(12, trainer.model.config.vocab_size, longest=60, seed=5)
    evaluated, predicted = trainer.evaluate(rows)["eval_loss"], trainer.predict(rows).metrics["test_loss"]
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    num_logs = sum("hotspa/unit_mb" in log for log in trainer.state.log_history)
    trainer.close_engine()
    return losses, evaluated, predicted, num_logs


def runs(rank, world, folder):
    """A whole run, one resumed in its middle, and one without `+z2` and `+z3`."""
    looks = _Looks()
    whole = one(f"{folder}/whole", world, STRATEGIES, callbacks=[looks])
    resumed = one(f"{folder}/again", world, STRATEGIES, f"{folder}/whole/checkpoint-3")
    return whole, resumed, one(f"{folder}/plain", world, "dp2:60@64"), looks.norms


def test_a_run_is_saved_resumed_evaluated_and_looked_at(tmp_path):
    for whole, resumed, plain, norms in run_ranks(2, runs, str(tmp_path)):
        assert len(whole[0]) == 6
        assert resumed[:3] == whole[:3]  # the log of a checkpoint has the steps before it
        for found, expected in zip(whole[:3], plain[:3], strict=True):
            assert found == pytest.approx(expected, rel=1e-4)
        assert whole[1] == pytest.approx(whole[2], rel=1e-6)
        assert (whole[3], plain[3]) == (6, 0)
        assert len(set(norms)) >= 6  # weights of the moment
    assert contents(newest(tmp_path / "whole")) == contents(newest(tmp_path / "again"))


def skipping(rank, world, folder):
    """A weight that is not finite for one mini-batch, and is again for the next."""
    trainer = make_trainer(folder, world, hotspa_strategies="dp2+z3:60@64", max_steps=4, hotspa_skip_non_finite=2)

    class Breaks(TrainerCallback):
        kept = None

        def on_step_begin(self, args, state, control, **kwargs):
            share = next(w for w in trainer.engine.master.weights if w is not None)
            if state.global_step == 1:
                self.kept = share.clone()
                share.fill_(float("inf"))
            elif self.kept is not None:
                share.copy_(self.kept)
                self.kept = None

    trainer.add_callback(Breaks())
    train(trainer)
    return [log.get("hotspa/skipped_mini_batches", 0) for log in trainer.state.log_history if "loss" in log]


def test_a_mini_batch_that_is_not_finite_is_skipped(tmp_path):
    for skipped in run_ranks(2, skipping, str(tmp_path)):
        assert skipped == [0, 1, 1, 1]  # so far


def from_config(rank, world, folder):
    """Strategies that say nothing, with DeepSpeed's stage 3 and with `fsdp`."""
    found = []
    for options in ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {"fsdp": "shard_grad_op"}):
        trainer = make_trainer(folder, world, hotspa_strategies="dp2:60@64", max_steps=1, save_steps=9, **options)
        train(trainer)
        found.append(trainer.last_report.phases[0].strategy)
    return found


def test_stages_of_others_are_run(tmp_path):
    assert run_ranks(2, from_config, str(tmp_path)) == [["dp2tp1pp1+z3", "dp2tp1pp1+z2"]] * 2
