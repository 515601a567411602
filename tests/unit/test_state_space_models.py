"""Families without attention (Mamba and its kin): one process trains them as the stock Trainer does."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

from hf_hotspa.trainer import HotSPaTrainer, HotSPaTrainingArguments

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8, "time_step_rank": 4}, "FalconMamba": {"state_size": 8, "time_step_rank": 4},
    "Mamba2": {"state_size": 8, "head_dim": 8, "num_heads": 4, "n_groups": 2, "chunk_size": 16},
}  # fmt: skip
ROWS = [{"input_ids": [3 + (7 * i + j * j) % 60 for j in range(length)]} for i, length in enumerate((5, 9, 12, 7) * 2)]


@pytest.mark.parametrize("family", OWN)
def test_a_model_that_does_not_pass_the_pack_to_its_layers_trains_as_with_the_stock_trainer(
    family: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    cls = getattr(transformers, f"{family}ForCausalLM")
    model = cls(cls.config_class(**SIZES, **OWN[family])).double()
    ours: dict[str, Any] = {"hotspa_strategies": "dp1:16@32", "hotspa_report": False}
    rows = [{**row, "labels": row["input_ids"]} for row in ROWS]
    found = []
    runs: list[tuple[Any, Any, dict[str, Any]]] = [
        (Trainer, TrainingArguments, {}), (HotSPaTrainer, HotSPaTrainingArguments, ours),
        (HotSPaTrainer, HotSPaTrainingArguments, {**ours, "hotspa_strategies": "dp1+rc:16@32"}),
    ]  # fmt: skip
    for trainer_class, arguments, own in runs:
        args: Any = arguments(
            str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
            per_device_train_batch_size=1, gradient_accumulation_steps=4, learning_rate=1e-3, seed=1, **own,
        )  # fmt: skip
        trainer: Any = trainer_class(copy.deepcopy(model), args, train_dataset=rows)
        trainer.train()
        logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        found.append(torch.tensor(logged, dtype=torch.float64))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)
    assert torch.equal(found[2], found[1])
