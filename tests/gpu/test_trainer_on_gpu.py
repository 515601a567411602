"""`HotSPaTrainer` on CUDA: the stock loss curve, a checkpoint that goes on bit for bit, calibration and `auto`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.families import tiny_model
from tests.harness import run_ranks
from tests.loss_curves import FAMILY, differences, hotspa_losses, stock_losses
from tests.oracle import random_rows
from tests.training_runs import STEPS, contents, make_trainer, newest, train

pytestmark = pytest.mark.gpu


def one_gpu_losses(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> list[list[float]]:
    """Of the stock Trainer and of ours with one strategy, in a world of one, without a process group."""
    options = {"use_cpu": False, **options}
    ours = {**options, "hotspa_strategies": "dp1:60@64"}
    return [
        stock_losses(rank, world_size, folder, 8, options),
        hotspa_losses(rank, world_size, folder, 8, ours),
    ]


@pytest.mark.parametrize(("options", "tolerance"), [({}, 1e-5), ({"bf16": True}, 0.05)], ids=["fp32", "bf16"])
def test_one_gpu_follows_the_stock_trainer(tmp_path: Path, options: dict[str, Any], tolerance: float):
    ((stock, ours),) = run_ranks(1, one_gpu_losses, str(tmp_path), options, device="cuda", init=False)
    assert differences(ours, stock)[1] <= tolerance


def hot_losses(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> list[float]:
    return hotspa_losses(rank, world_size, folder, 8, {"use_cpu": False, **options})


@pytest.mark.parametrize(("options", "tolerance"), [({}, 1e-5), ({"bf16": True}, 0.05)], ids=["fp32", "bf16"])
def test_four_ranks_follow_one(tmp_path: Path, options: dict[str, Any], tolerance: float):
    ((stock, _),) = run_ranks(1, one_gpu_losses, str(tmp_path / "one"), options, device="cuda", init=False)
    for losses in run_ranks(4, hot_losses, str(tmp_path / "four"), options, device="cuda", timeout=300):
        assert differences(losses, stock)[1] <= tolerance


class _StopAfterThree(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


def interrupted(rank: int, world_size: int, folder: str) -> None:
    """A run in one go, and one that is stopped and resumed."""
    options: dict[str, Any] = {"use_cpu": False, "bf16": True}
    train(make_trainer(f"{folder}/whole", world_size, **options))
    train(make_trainer(f"{folder}/parts", world_size, **options, callbacks=[_StopAfterThree()]))
    train(make_trainer(f"{folder}/parts", world_size, **options), resume=True)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, world_size: int):
    run_ranks(world_size, interrupted, str(tmp_path), device="cuda", init=world_size > 1, timeout=300)
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert whole.name == parts.name == f"checkpoint-{STEPS}"
    assert contents(whole) == contents(parts)


def automatic(rank: int, world_size: int, folder: str) -> tuple[float, list[float], str]:
    """The most memory that was allocated, the losses, and the device's name, of `auto` with a calibration."""
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    model = tiny_model(FAMILY)
    args = HotSPaTrainingArguments(
        output_dir=folder, max_steps=3, logging_steps=1, hotspa_mini_batch_size=8, hotspa_strategies="auto",
        hotspa_calibration="measure", disable_tqdm=True, report_to="none", bf16=True, save_strategy="no",
    )  # fmt: skip
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=random_rows(24, model.config.vocab_size, longest=60))
    trainer.train()
    assert trainer.engine is not None
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    peak = float(torch.cuda.max_memory_allocated())
    device = trainer.engine.device.type
    trainer.close_engine()
    return peak, losses, device


@pytest.mark.parametrize("world_size", [1, 4])
def test_auto_measures_this_gpu(tmp_path: Path, world_size: int):
    found = run_ranks(world_size, automatic, str(tmp_path), device="cuda", init=world_size > 1, timeout=400)
    for peak, losses, device in found:
        assert device == "cuda"
        assert peak > 0
        assert losses == found[0][1]
        assert len(losses) == 3
