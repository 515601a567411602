"""`HotSPaTrainer` against the stock Trainer: same losses, same weights, same logs."""

import math

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hotspa.strategy import parse_buckets
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.moves import padded as _pad
from tests.oracle import exact_in_double, random_rows, relative_error

pytestmark = pytest.mark.gloo

STEPS, MINI_BATCH = 20, 12
LOSS, WEIGHTS = {torch.float32: 1e-6, torch.float64: 1e-12}, {torch.float32: 1e-5, torch.float64: 1e-11}
"""Largest relative error of the loss of any step, and of all weights after the last one."""
COMMON = {
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "warmup_steps": 3,
    "lr_scheduler_type": "cosine",
    "seed": 7,
    "logging_steps": 1,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
}


def dataset_rows(vocab_size):
    # 90 rows: the last mini-batch of each epoch is short
    return random_rows(90, vocab_size, longest=60, seed=3)


class _LossRecorder(Trainer):
    """The stock Trainer; keeps the loss of every step in full precision."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def changes(dtype, steps):
    """What a run does otherwise. At a rate of 1e-2, AdamW makes of fp32 rounding 1.2e-6 of a loss in 96 steps; in fp64,
    where the rate stays as it is, the same steps agree to 1e-12: it is rounding."""
    slower = steps > STEPS and dtype == torch.float32
    return {"max_steps": steps, "learning_rate": 1e-3 if slower else COMMON["learning_rate"]}


def stock_run(rank, world_size, family, dtype, output_dir, steps, rows=None, options=None):
    """The losses of the steps, unrounded, the logs and the weights."""
    model = tiny_model(family, dtype)
    rows = dataset_rows(model.config.vocab_size) if rows is None else rows
    args = TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size=MINI_BATCH,
        save_strategy="no",
        **{**COMMON, **changes(dtype, steps), **(options or {})},
    )
    trainer = _LossRecorder(model=model, args=args, train_dataset=rows, data_collator=_pad)
    with exact_in_double(dtype):
        trainer.train()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return trainer.losses, trainer.state.log_history, weights


def hotspa_run(rank, world_size, family, dtype, output_dir, strategies, steps, options=None):
    """The same, and the strategies that have run."""
    losses, phases = [], set()

    class Recorder(TrainerCallback):
        def on_step_report(self, args, state, control, report):
            losses.append(report.loss)
            phases.update(p.strategy for p in report.phases)

    model = tiny_model(family, dtype)
    args = HotSPaTrainingArguments(
        output_dir=output_dir,
        hotspa_mini_batch_size=MINI_BATCH,
        hotspa_strategies=strategies,
        **{**COMMON, **changes(dtype, steps), **(options or {})},
    )
    rows = dataset_rows(model.config.vocab_size)
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=rows, callbacks=[Recorder()])
    with exact_in_double(dtype):
        trainer.train()
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.close_engine()
    return losses, trainer.state.log_history, weights, sorted(phases)


THREE = "dp4:16@32,dp2tp2:32,tp2pp2:60@64"


SAVING = "dp4+rc:16@32,tp2pp2+sp+rc2:32,tp4+sp:60@66"
"""Strategies that save memory."""
CHUNKS = "dp4+ck7:16@32,dp2tp2+sp+ck17:32,tp4+ck32:60@64"
"""Chunks of tokens, in which sequences are cut."""
SHARDED = "dp4+z3:16@32,dp2tp2+z2:32,tp2pp2+rc+z3:60@64"
"""Strategies that hold gradients, or weights, of one layer at a time."""


AN_EPOCH = 9
"""Steps: those of an epoch, with the short last mini-batch, and the first of the next one."""
RUNS = {
    "llama_gqa_bias-fp64": ("llama_gqa_bias", torch.float64, THREE),
    "qwen3_qk_norm_tied-fp32": ("qwen3_qk_norm_tied", torch.float32, THREE),
    "llama_gqa_bias-fp32": ("llama_gqa_bias", torch.float32, THREE),
    "qwen3_qk_norm_tied-fp64": ("qwen3_qk_norm_tied", torch.float64, THREE),
    "saving-memory": ("qwen3_qk_norm_tied", torch.float64, SAVING),
    "token-chunks": ("llama_gqa_bias", torch.float64, CHUNKS),
    "fully-sharded": ("llama_gqa_bias", torch.float64, SHARDED),
}
QUICK = {
    "llama_gqa_bias-fp64": AN_EPOCH,
}
"""The runs that are not slow, and their steps."""


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        *QUICK.items(),
        *(pytest.param(run, steps, marks=pytest.mark.slow) for run in RUNS for steps in (STEPS, 100)
          if QUICK.get(run) != steps),
    ],
)  # fmt: skip
def test_many_steps_equal_the_stock_trainer(run, steps, tmp_path):
    family, dtype, strategies = RUNS[run]
    [(losses, logs, weights)] = run_ranks(1, stock_run, family, dtype, str(tmp_path / "stock"), steps, timeout=300)
    per_rank = run_ranks(4, hotspa_run, family, dtype, str(tmp_path / "hot"), strategies, steps, timeout=300)
    for found, found_logs, found_weights, phases in per_rank:
        assert phases == sorted(str(bucket.strategy) for bucket in parse_buckets(strategies))
        assert len(found) == len(losses) == steps
        worst = max(range(steps), key=lambda i: abs(found[i] - losses[i]) / abs(losses[i]))
        assert math.isclose(found[worst], losses[worst], rel_tol=LOSS[dtype]), f"step {worst + 1} of {steps}"
        whole = relative_error(
            torch.cat([found_weights[n].flatten() for n in weights]), torch.cat([w.flatten() for w in weights.values()])
        )
        assert whole <= WEIGHTS[dtype]
        for name, weight in weights.items():
            assert relative_error(found_weights[name], weight) <= 1e-4, name
        for log, expected in zip(found_logs, logs, strict=True):
            for key in ("epoch", "step", "learning_rate"):
                assert log.get(key) == expected.get(key)
            if "grad_norm" in expected:
                assert math.isclose(log["grad_norm"], expected["grad_norm"], rel_tol=1e-4)
