"""Whole runs with 8-bit and 4-bit optimizers: bit for bit on resuming, and the same codes under other strategies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_hotspa.checkpoint.format.manifest import read_manifest
from hf_hotspa.errors import UnsupportedError
from tests.checkpoints import memory_folder
from tests.families import tiny_model
from tests.gloo.test_resume import train_without_steps
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.training_runs import STRATEGIES, contents, make_trainer, newest, one_run, same_bits, train, whole_state

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")
pytestmark = pytest.mark.gloo

# weights of 4096 to 10,432 elements, some of them transposed in the master store, and smaller ones; an embedding
MODEL = {"hidden_size": 64, "intermediate_size": 96}
QUIET: dict[str, Any] = {"family": "llama_gqa_bias", "model": MODEL, "learning_rate": 1e-3, "save_total_limit": None}


@pytest.fixture
def tmp_path():
    with memory_folder() as folder:
        yield folder


def eager(function, *args):
    """torchao compiles for every size of a share otherwise, seconds each."""
    with torch.compiler.set_stance("force_eager"):
        return function(*args)


def two_runs(rank, world, folder):
    found = {}
    for optim in ("adamw_8bit", "adamw_torch_4bit"):
        options = {**QUIET, "optim": optim, "max_steps": 4}
        whole = eager(one_run, rank, world, f"{folder}/{optim}", None, options)
        rest = eager(one_run, rank, world, f"{folder}/{optim}-on", f"{folder}/{optim}/checkpoint-2", options)
        found[optim] = whole, rest
    try:
        trainer = make_trainer(f"{folder}/x", world, optim="adamw_8bit", hotspa_stock_checkpoints=True, max_steps=2)
        train(trainer)
    except UnsupportedError as error:
        found["refused"] = str(error)
        trainer.close_engine()
    return found


def test_a_run_goes_on_bit_for_bit_and_in_another_layout_from_the_same_bits(tmp_path):
    for found in run_ranks(2, two_runs, str(tmp_path), timeout=280):
        assert "hotspa_stock_checkpoints with the optimizer AdamW of bitsandbytes" in found.pop("refused")
        for whole, rest in found.values():
            assert rest == {step: loss for step, loss in whole.items() if step > 2}
    for optim, states in (("adamw_8bit", {"state1", "absmax1"}), ("adamw_torch_4bit", {"exp_avg.codes", "exp_avg"})):
        first = tmp_path / optim
        assert contents(newest(tmp_path / f"{optim}-on")) == contents(newest(first)), optim
        by_name = {p.name: p.states for p in read_manifest(newest(first)).parameters}
        assert states <= {state for of in by_name.values() for state in of}
        embedding = by_name["model.embed_tokens.weight"]
        assert ("absmax1" in embedding, embedding.get("state1")) == (False, "float32" if "torch" not in optim else None)
        options = {**QUIET, "optim": optim, "max_steps": 3, "model_seed": 5}
        trainer = make_trainer(str(tmp_path / f"{optim}-alone"), 1, **options)
        assert eager(train_without_steps, trainer, str(first / "checkpoint-3")) == {}
        assert same_bits(whole_state(newest(tmp_path / f"{optim}-alone")), whole_state(first / "checkpoint-3"))


POOLS = ["dp4:60@64", "dp2tp2:60", "tp4:60", "pp4:60", "tp2pp2:60", "dp4+z3:60@64", "dp2cp2:60@64", STRATEGIES[4]]
LONG = 20


def compared(found: Path, expected: Path) -> tuple[float, int]:
    """The share of codes that are equal, and by how many steps of the code the others are off at most."""
    ours, theirs = (whole_state(newest(path)) for path in (found, expected))
    codes = [name for name, tensor in theirs.items() if tensor.dtype == torch.uint8]
    assert codes
    off = torch.cat([(ours[name].int() - theirs[name].int()).abs().flatten() for name in codes])
    return float((off == 0).double().mean()), int(off.max())


def pools_in_turn(rank, world, folder, optim):
    options = {**QUIET, "optim": optim, "max_steps": LONG, "save_steps": LONG}
    return [
        eager(one_run, rank, world, f"{folder}/{index}", None, {**options, "hotspa_strategies": pool})
        for index, pool in enumerate(POOLS)
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("optim", ["adamw_8bit", "lion_8bit", "ademamix_8bit", "adamw_torch_8bit"])
def test_the_codes_are_those_of_one_process_under_every_strategy(optim, tmp_path):
    options = {**QUIET, "optim": optim, "max_steps": LONG, "save_steps": LONG}
    alone = eager(train, make_trainer(str(tmp_path / "alone"), 1, **options))
    per_rank = run_ranks(4, pools_in_turn, str(tmp_path), optim, timeout=1500)
    for index, pool in enumerate(POOLS):
        share, most = compared(tmp_path / str(index), tmp_path / "alone")
        worst = max(abs(losses[index][step] - loss) / loss for losses in per_rank for step, loss in alone.items())
        print(f"{optim} {pool}: {share:.4%} of the codes equal, at most {most} off, loss {worst:.1e}")
        assert share >= 0.999, (pool, share)
        assert most <= 1, pool
        assert worst <= 1e-5, pool


def stock_losses(folder: Path, optim: str, ours: bool) -> list[float]:
    """The losses of steps of four rows, in order, on the plain model in one process."""
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    options: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": LONG,
        "logging_steps": 1, "learning_rate": 1e-3, "weight_decay": 0.1, "optim": optim, "save_strategy": "no",
        "per_device_train_batch_size": 4, "seed": 7, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    model, rows = tiny_model("llama_gqa_bias", **MODEL), random_rows(4 * LONG, 163, longest=60, seed=3)
    args: Any = TrainingArguments(**options)
    if ours:
        args = HotSPaTrainingArguments(**options, hotspa_strategies="dp1:60@64", hotspa_report=False)
    collator: dict[str, Any] = {} if ours else {"data_collator": padded}
    kind: Any = HotSPaTrainer if ours else Trainer
    trainer = kind(model=model, args=args, train_dataset=rows, **collator)
    eager(trainer.train)
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit", "lion_8bit", "ademamix_8bit", "adamw_torch_8bit"])
def test_twenty_steps_follow_the_stock_trainer(optim, tmp_path):
    ours, theirs = (stock_losses(tmp_path, optim, own) for own in (True, False))
    worst = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    print(f"{optim}: loss within {worst:.1e} of the stock Trainer over {LONG} steps")
    assert len(ours) == LONG
    assert worst <= 1e-3


def padded(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    pad = {"input_ids": 0, "labels": -100}
    batch = {k: torch.tensor([r[k] + [v] * (longest - len(r[k])) for r in rows]) for k, v in pad.items()}
    mask = [[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows]
    return {**batch, "attention_mask": torch.tensor(mask)}
