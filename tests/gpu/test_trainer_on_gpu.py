"""`HotSPaTrainer` on CUDA: the stock loss curve; and alone on its GPU a checkpoint that goes on bit for bit, and `auto`.

Worlds of several ranks resume and calibrate in `tests/gpu_parts.py`.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_parts import automatic, interrupted
from tests.harness import run_ranks
from tests.loss_curves import differences, hotspa_losses, stock_losses
from tests.training_runs import STEPS, contents, newest

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


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path):
    options = {"use_cpu": False, "bf16": True}
    run_ranks(1, interrupted, str(tmp_path), options, device="cuda", init=False, timeout=300)
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert whole.name == parts.name == f"checkpoint-{STEPS}"
    assert contents(whole) == contents(parts)


def test_auto_measures_this_gpu(tmp_path: Path):
    ((losses, device, peak),) = run_ranks(1, automatic, str(tmp_path), {}, device="cuda", init=False, timeout=400)
    assert device == "cuda"
    assert peak > 0
    assert len(losses) == 3
