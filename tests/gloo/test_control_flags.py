"""A callback that asks for something on one rank alone: all ranks do it, at the same step."""

import pytest
from transformers import TrainerCallback

from hf_hotspa.trainer.events import FLAGS
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.training_runs import make_trainer, train

pytestmark = pytest.mark.gloo


class Asks(TrainerCallback):
    """On its rank alone: sets a flag in an event at a step. Notes what is done, on all ranks."""

    def __init__(self, rank, wishes):
        self.rank, self.wishes, self.done = rank, wishes, []

    def _asks(self, event, state, control):
        for step, where, flag, rank in self.wishes:
            if (step, where, rank) == (state.global_step, event, self.rank):
                setattr(control, flag, True)

    def on_step_end(self, args, state, control, **kwargs):
        self._asks("step", state, control)

    def on_epoch_end(self, args, state, control, **kwargs):
        self._asks("epoch", state, control)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.done += [(state.global_step, "log")] if "loss" in logs else []
        self._asks("log", state, control)

    def on_evaluate(self, args, state, control, **kwargs):
        self.done.append((state.global_step, "evaluate"))
        self._asks("evaluate", state, control)

    def on_save(self, args, state, control, **kwargs):
        self.done.append((state.global_step, "save"))
        self._asks("save", state, control)


WISHES = (
    (1, "step", "should_save", 1),
    (2, "step", "should_evaluate", 1),
    (3, "step", "should_log", 0),
    (3, "log", "should_evaluate", 1),
    (3, "evaluate", "should_save", 0),
    (4, "epoch", "should_save", 1),
    (5, "step", "should_epoch_stop", 1),
    (6, "step", "should_log", 1),
    (6, "log", "should_training_stop", 0),
)


def asked(rank, world, folder):
    asks = Asks(rank, WISHES)
    rows = random_rows(6, 163, longest=40, seed=4)
    quiet = {
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 1000,
        "num_train_epochs": 9,
        "max_steps": -1,
    }
    trainer = make_trainer(folder, world, family="llama_gqa_bias", callbacks=[asks], **quiet)
    trainer.eval_dataset = rows
    train(trainer)
    return asks.done, trainer.state.global_step, [getattr(trainer.control, name) for name in FLAGS[:1]]


def test_what_one_rank_asks_for_all_do(tmp_path):
    outcomes = run_ranks(2, asked, str(tmp_path), timeout=120)
    done = [(1, "save"), (2, "evaluate"), (3, "log"), (3, "evaluate"), (3, "save"), (4, "save"), (6, "log")]
    assert outcomes == [(done, 6, [True])] * 2
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 3, 4)]
