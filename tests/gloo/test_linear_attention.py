"""Gated delta nets on several ranks: loss and gradients equal the plain model's, however their sequences are cut."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments

from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows, relative_error
from tests.tiny_families import tiny_model_of
from tests.training_runs import make_trainer, train
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

MIXES = {
    2: ("dp2+ck1:12@16,cp2+ck7:24@30,tp2+sp+ck11+kg2:40@48", "pp2+ck5+rc:12@30,dp2+z3+ck3+kh:24@40,cp2:40@48"),
    4: ("dp4+ck1:8@16,dp2cp2+ck5:24@48,tp2pp2+rc+ck9:40@60", "cp4+ck2:8@12,dp2tp2+sp:24@48,pp4+ck7:40@60"),
}
"""Three strategies in one mini-batch, by the number of ranks."""
WAYS = ("ulysses", "allgather", "ring")


def errors_of(rank, world_size, family, bucket_lists, ways, dtype=torch.float64):
    """The worst relative error of each bucket list with each way of cp; those that are refused are left out."""
    model, found = tiny_model_of(family, dtype), {}
    rows = random_rows(8, 163, longest=40, seed=3)
    reference = shared_reference(model, rows)
    for buckets in bucket_lists:
        for way in ways if "cp" in buckets else ways[:1]:
            engine = make_engine(model, buckets, context_parallel=way)
            found[buckets, way] = worst_error(engine, make_mini_batch(engine, rows), *reference)[0]
            engine.close()
    return found


def check(found, least):
    assert len(found) >= least
    assert {case: error for case, error in found.items() if not error <= 1e-11} == {}


def test_three_strategies_in_a_mini_batch():
    check(run_ranks(2, errors_of, "qwen3_5_text", MIXES[2][:1], ("allgather",))[0], 1)


def of_few_tokens(rank, world_size):
    """Ranks with fewer tokens than the convolution is wide, and with none; a document over all ranks."""
    model, found = tiny_model_of("qwen3_5_text"), {}
    for lengths in ((5,), (4, 1, 2), (1, 1, 1, 1, 9), (7, 6)):
        rows = [{"input_ids": list(range(1, n + 1)), "labels": list(range(1, n + 1))} for n in lengths]
        for buckets in ("cp4:16@16", "cp4+ck4:16@16"):
            reference = shared_reference(model, rows)
            for way in WAYS[:2]:
                engine = make_engine(model, buckets, context_parallel=way)
                found[lengths, buckets, way] = worst_error(engine, make_mini_batch(engine, rows), *reference)[0]
                engine.close()
    return found


@pytest.mark.slow
def test_ranks_with_few_tokens_or_none():
    check(run_ranks(4, of_few_tokens)[0], 16)


def adapted(rank, world_size):
    model: Any = get_peft_model(tiny_model_of("qwen3_next"), LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    rows = random_rows(8, 163, longest=40, seed=3)
    loss, gradients = shared_reference(model.train(), rows)
    gradients = {name: g for name, g in gradients.items() if "lora_" in name}
    engine = make_engine(model, "dp2+ck6:12@16,tp2+sp:24@40,cp2+rc+ck9:40@60")
    error = worst_error(engine, make_mini_batch(engine, rows), loss, gradients)[0]
    engine.close()
    return error


@pytest.mark.slow
def test_adapters():
    assert run_ranks(2, adapted)[0] <= 1e-11


# ---- the Trainer


def twenty_steps(rank, world_size, folder, resume, options):
    """Losses and weights of 20 steps in fp64."""
    model = tiny_model_of("qwen3_5_text")
    rows = random_rows(24, 163, longest=40, seed=5)
    with exact_in_double(torch.float64):
        trainer = make_trainer(
            folder, world_size, given=model, rows=rows, max_steps=20, save_steps=10, optim="sgd", learning_rate=0.05,
            train_sampling_strategy="sequential", max_grad_norm=1.0, **options,
        )  # fmt: skip
        losses = train(trainer, resume)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def of_stock(folder):
    """The same by the stock Trainer, one row at a time."""
    model = tiny_model_of("qwen3_5_text")
    args = TrainingArguments(
        folder, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=20, per_device_train_batch_size=1,
        gradient_accumulation_steps=4, optim="sgd", learning_rate=0.05, weight_decay=0.1, warmup_steps=2, seed=7,
        logging_steps=1, save_strategy="no", train_sampling_strategy="sequential", max_grad_norm=1.0,
    )  # fmt: skip
    rows = [{k: torch.tensor(v) for k, v in row.items()} for row in random_rows(24, 163, longest=40, seed=5)]
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    with exact_in_double(torch.float64):
        trainer.train()
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_the_trainer_is_the_stock_trainer_one_row_at_a_time(tmp_path):
    options = {"hotspa_strategies": "dp2+ck3:8@16,tp2+sp:20@32,cp2+ck9:40@48"}
    losses, weights = run_ranks(2, twenty_steps, str(tmp_path / "ours"), None, options, timeout=600)[0]
    expected, expected_weights = of_stock(str(tmp_path / "stock"))
    assert len(losses) == len(expected) == 20
    assert max(abs(losses[step] - expected[step]) / expected[step] for step in expected) <= 1e-4  # logs are rounded
    assert max(relative_error(weights[name], expected_weights[name]) for name in expected_weights) <= 1e-11
