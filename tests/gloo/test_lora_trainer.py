"""LoRA under `HotSPaTrainer`: the steps of PEFT under the stock Trainer, its files, and checkpoints without the base."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

from hf_hotspa.checkpoint.format.manifest import read_manifest
from hf_hotspa.checkpoint.model_files import export
from hf_hotspa.errors import ResumeError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import tiny_model
from tests.gloo.test_trainer import COMMON, MINI_BATCH, _LossRecorder, _pad, dataset_rows
from tests.harness import run_ranks
from tests.lora import apart, check_saved, tiny_lora, trained
from tests.oracle import exact_in_double
from tests.training_runs import contents, make_trainer, newest, one_run, whole_state

pytestmark = pytest.mark.gloo

SETTINGS = {**COMMON, "max_steps": 5}
THREE = "dp4:16@32,dp2tp2:32,tp2pp2:60@64"


def stock_run(rank, world_size, family, dtype, output_dir):
    model = tiny_lora(family, dtype)
    args = TrainingArguments(
        output_dir=output_dir, per_device_train_batch_size=MINI_BATCH, save_strategy="no", **SETTINGS
    )
    rows = dataset_rows(model.config.vocab_size)
    trainer = _LossRecorder(model=model, args=args, train_dataset=rows, data_collator=_pad)
    with exact_in_double(dtype):
        trainer.train()
    return trainer.losses, trained(model)


def hotspa_run(rank, world_size, family, dtype, output_dir):
    model = tiny_lora(family, dtype)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    args = HotSPaTrainingArguments(
        output_dir=output_dir,
        hotspa_mini_batch_size=MINI_BATCH,
        hotspa_strategies=THREE,
        save_strategy="no",
        **SETTINGS,
    )
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=dataset_rows(model.config.vocab_size))
    with exact_in_double(dtype):
        trainer.train()
    trainer.save_model(f"{output_dir}/adapter")
    logs = trainer.state.log_history
    trainer.close_engine()
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    return [log["loss"] for log in logs if "loss" in log], trained(model), [log.get("hotspa/frozen_mb") for log in logs]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("qwen3_qk_norm_tied", torch.float32, id="qwen3-fp32"),
        pytest.param("llama_gqa_bias", torch.float64, id="llama-fp64", marks=pytest.mark.slow),
    ],
)
def test_steps_equal_peft_under_the_stock_trainer(family, dtype, tmp_path):
    [(losses, weights)] = run_ranks(1, stock_run, family, dtype, str(tmp_path / "stock"))
    per_rank = run_ranks(4, hotspa_run, family, dtype, str(tmp_path / "hot"))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-11
    for found_losses, found, frozen_mb in per_rank:
        assert len(found_losses) == SETTINGS["max_steps"]
        for a, b in zip(found_losses, losses, strict=True):
            assert math.isclose(a, b, rel_tol=1e-4)  # the log rounds
        assert apart(found, weights) <= tolerance
        assert frozen_mb[0] > 0
    check_saved(tmp_path / "hot" / "adapter", tiny_model(family, dtype), per_rank[0][1])
    assert not list((tmp_path / "hot" / "adapter").glob("model*.safetensors"))


LORA = {"lora": {"bias": "all", "lora_dropout": 0.1}, "max_steps": 4, "family": "llama_gqa_bias"}


def lora_runs(rank, world, folder):
    """Train; go on from the middle; be refused beside another base model; save what was trained."""
    first = one_run(rank, world, f"{folder}/a", None, dict(LORA))
    again = one_run(rank, world, f"{folder}/b", f"{folder}/a/checkpoint-2", dict(LORA))
    trainer = make_trainer(f"{folder}/c", world, **LORA, model_seed=5)
    with pytest.raises(ResumeError, match="the frozen weights of the model are not those"):
        trainer.train(resume_from_checkpoint=f"{folder}/a/checkpoint-2")
    trainer.close_engine()
    trainer = make_trainer(f"{folder}/d", world, **LORA)
    trainer.train(resume_from_checkpoint=f"{folder}/a/checkpoint-4")  # no step is left
    trainer.save_model(f"{folder}/saved")
    weights = trained(trainer.model)
    trainer.close_engine()
    return first, again, weights


def test_checkpoints_hold_the_adapter_and_a_digest_of_the_base(tmp_path):
    per_rank = run_ranks(2, lora_runs, str(tmp_path))
    for first, again, _ in per_rank:
        assert again == {step: loss for step, loss in first.items() if step > 2}
    last = newest(tmp_path / "a")
    assert contents(newest(tmp_path / "b")) == contents(last)
    manifest = read_manifest(last)
    model = tiny_lora("llama_gqa_bias", bias="all")
    assert {p.name for p in manifest.parameters} == trained(model).keys()
    assert all(p.trainable and "exp_avg" in p.states for p in manifest.parameters)
    assert sum(p.numel() for p in model.parameters()) > 1.5 * sum(p.numel for p in manifest.parameters)
    assert not any(file.name == "config.json" for file in manifest.files)
    # the exported adapter is the saved one, and PEFT loads it
    export(last, tmp_path / "exported")
    saved, exported = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("saved", "exported"))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("saved", "exported")]
    for config in configs:
        config["target_modules"].sort()  # a set in memory
        config["base_model_name_or_path"] = config["base_model_name_or_path"] or None  # "" in older releases of PEFT
    assert configs[0] == configs[1]
    check_saved(tmp_path / "exported", tiny_model("llama_gqa_bias"), per_rank[0][2])


def best_and_auto(rank, world, folder):
    """Strategies chosen by what the machine measures, evaluation, and the best model at the end."""
    model = tiny_lora("llama_gqa_bias")
    rows = dataset_rows(model.config.vocab_size)
    args = HotSPaTrainingArguments(
        output_dir=folder, hotspa_mini_batch_size=MINI_BATCH, eval_strategy="steps", eval_steps=2, save_steps=2,
        load_best_model_at_end=True, save_total_limit=2, hotspa_report=False, **{**SETTINGS, "max_steps": 4},
    )  # fmt: skip
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:20])
    trainer.train()
    found = trainer.evaluate()["eval_loss"], trainer.state.best_metric, trainer.state.best_model_checkpoint
    trainer.close_engine()
    return *found, trained(model)


@pytest.mark.slow
def test_auto_evaluation_and_the_best_model(tmp_path):
    for loss, metric, best, weights in run_ranks(2, best_and_auto, str(tmp_path), timeout=280):
        assert math.isclose(loss, metric, rel_tol=1e-6)
        saved = whole_state(Path(best))
        assert all(torch.equal(saved[f"weight/{name}"], weight) for name, weight in weights.items())
