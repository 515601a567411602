"""What users of `transformers.Trainer` rely on, held by `HotSPaTrainer` on one rank and on two.

The areas are those that the tests of transformers' own Trainer look at; the tests here are ours.

| area | where |
|---|---|
| training: seeds, twice the same, model_init, epochs, steps, train loss | here, test_gain.py, test_trainer.py, test_trainer_arguments.py |
| gradient accumulation, clipping, weight decay, optimizers, schedulers | test_trainer_arguments.py, unit/test_arguments.py |
| label smoothing, NEFTune, activation checkpointing, bf16 | test_objective.py, test_trainer_arguments.py |
| evaluation, prediction, metrics, several sets, batch-wise metrics | test_evaluate.py |
| early stopping, best model at the end | here |
| callbacks: order of events, adding, stopping, asking for logs and evaluations | here |
| logging: strategies, first step, NaN losses, report_to | test_trainer_arguments.py, test_non_finite.py, test_trainer_world.py |
| streams, data loaders, samplers, collators, workers, drop_last | tests/trainer_fuzz.py, test_stock_equal.py, test_streaming.py, test_trainer_arguments.py |
| losses, prediction steps and training steps of one's own | tests/trainer_fuzz.py, test_stock_equal.py |
| checkpoints, save limits, resume, state of callbacks | the tests of checkpoints |
| hub | test_trainer_arguments.py |
| DeepSpeed's JSON configs, its CPU Adam | test_deepspeed.py, unit/test_deepspeed_config.py |

Losses, data collators, overridden methods and optimizers of the user's own are moves (`tests/moves`, test_moves.py). Areas
that do not apply, because the setting is refused by name or has no meaning here: fp16 and grad scalers, DataParallel, DDP
options, FSDP, SageMaker, XLA (the layouts are ours); torch.compile and liger (replicas are rebound); optimizers that are
not elementwise; vision, seq2seq and sequence-classification trainers (causal language models only); hyper-parameter search
(one engine per process group).
"""

import math

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from tests.families import tiny_model
from tests.gloo.test_evaluate import hot_trainer, make_rows
from tests.harness import run_ranks
from tests.moves import padded as _pad

pytestmark = pytest.mark.gloo

QUIET = {"eval_strategy": "no", "eval_on_start": False, "include_for_metrics": []}


def strategies_of(world_size):
    return "dp2:16@32,tp2:60@64" if world_size == 2 else "dp1:60@64"


class _Events(TrainerCallback):
    """Notes every event; asks for what `asks` says at a step."""

    def __init__(self, asks=None):
        self.seen, self.asks = [], asks or {}

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append("step_end")
        for step, name in self.asks.items():
            if state.global_step == step:
                setattr(control, name, True)
        return control


def _note(name):
    def event(self, args, state, control, **kwargs):
        # the stock loop reports a prediction step for every batch of every rank
        self.seen.append(name)

    return event


for _name in (
    "init_end", "train_begin", "train_end", "epoch_begin", "epoch_end", "step_begin", "pre_optimizer_step",
    "optimizer_step", "substep_end", "evaluate", "predict", "save", "log", "prediction_step",
):  # fmt: skip
    setattr(_Events, f"on_{_name}", _note(_name))


def stock_events(rank, world_size, folder):
    model, events = tiny_model("llama_gqa_bias"), _Events({2: "should_evaluate", 3: "should_log"})
    rows, eval_rows = make_rows(model)
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=8, per_device_eval_batch_size=16, max_steps=4, logging_steps=4,
        use_cpu=True, disable_tqdm=True, report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=args, train_dataset=rows, eval_dataset=eval_rows, data_collator=_pad, callbacks=[events]
    )
    trainer.train()
    trainer.predict(eval_rows)
    return events.seen


def contract_world(rank, world_size, folder):
    strategies, found = strategies_of(world_size), {}

    events = _Events({2: "should_evaluate", 3: "should_log"})
    trainer = hot_trainer(
        f"{folder}/a", strategies, callbacks=[events], logging_steps=4, per_device_eval_batch_size=16, **QUIET
    )
    trainer.train()
    trainer.predict(make_rows(trainer.model)[1])
    found["events"] = events.seen
    trainer.close_engine()

    # evaluated at every step and made to look worse from step 3 on: step 2 is the best
    scores = iter([1.0, 3.0, 2.0, 2.0, 2.0, 2.0])
    trainer = hot_trainer(
        f"{folder}/d", strategies, lambda p: {"score": next(scores)}, max_steps=6, eval_strategy="steps", eval_steps=1,
        eval_on_start=False, include_for_metrics=[], save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="score", greater_is_better=True, save_total_limit=2,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    after = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.materialize()
            after[state.global_step] = trainer.model.lm_head.weight.detach().clone()

    trainer.add_callback(Keep())
    trainer.train()
    found["best step"], found["last step"] = trainer.state.best_global_step, trainer.state.global_step
    found["best loaded"] = [step for step, w in after.items() if torch.equal(w, trainer.model.lm_head.weight)]
    found["best evaluates"] = trainer.evaluate()["eval_loss"]
    trainer.close_engine()

    trainer = hot_trainer(f"{folder}/e", strategies, max_steps=2, **QUIET)
    trainer.model_init, calls = lambda: calls.append(1) or tiny_model("llama_gqa_bias"), []
    trainer.train()
    once = trainer.evaluate()["eval_loss"]
    trainer.train()
    found["model_init"] = len(calls), once == trainer.evaluate()["eval_loss"]
    trainer.close_engine()
    return found


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_contract(world_size, tmp_path):
    [events] = run_ranks(1, stock_events, str(tmp_path / "stock"))
    for found in run_ranks(world_size, contract_world, str(tmp_path)):
        assert found["events"] == events
        assert (found["best step"], found["last step"]) == (2, 4)
        assert found["best loaded"] == [2]
        assert math.isfinite(found["best evaluates"])
        assert found["model_init"] == (2, True)
