"""Multimodal models: rows of text train the language model, and the other half is saved as it was."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

from hf_hotspa.model.model_kind import other_half
from hf_hotspa.trainer import HotSPaTrainer, HotSPaTrainingArguments
from tests.harness import run_ranks
from tests.multimodal import MULTIMODAL, multimodal_model
from tests.oracle import random_rows
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

# without pp: transformers has no plan of stages for the embeddings of each layer of Gemma 4
STAGED = ("gemma3", "mistral3", "qwen3_vl")


def errors_of(rank, world_size, family, bucket_lists):
    model, found = multimodal_model(family), {}
    rows = random_rows(9, 150, longest=24)
    loss, gradients = shared_reference(model, rows)
    other = other_half(model)
    assert not any(gradients[name].any() for name in other)
    for buckets in bucket_lists:
        engine = make_engine(model, buckets)
        # of the encoders, an engine has those of families whose images it trains
        held = {spec.name for spec in engine.description.vector.specs}
        expected = {n: g for n, g in gradients.items() if n in held or n not in other}
        found[buckets], _ = worst_error(engine, make_mini_batch(engine, rows), loss, expected)
        engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_language_model_under_strategies_of_four_ranks(family):
    buckets = ["dp2tp2:24@32", "cp4:24@32", "dp4+rc:24@32", "dp2tp2+ck7:24@32", "dp4:3@24,cp2tp2:12@24,tp4:24@32"]
    buckets += ["pp2tp2+z3:24@32", "dp4:3@24,dp2pp2+rc:12@24,tp2pp2:24@32"] if family in STAGED else []
    for found in run_ranks(4, errors_of, family, buckets, timeout=500):
        assert not {name: error for name, error in found.items() if not error <= 1e-11}


def trained(rank, world_size, family, folder, strategies, steps=3, resume=False, adapter=None):
    """Losses by step; the loss of an evaluation; and parameters that the optimizer has."""
    rows = [{"input_ids": row["input_ids"]} for row in random_rows(24, 150, longest=24) if len(row["input_ids"]) > 1]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    fields = {
        "output_dir": folder, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": steps, "seed": 3,
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 4, "save_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "logging_steps": 1, "logging_nan_inf_filter": False,
    }  # fmt: skip
    model = multimodal_model(family, torch.float32)
    if adapter is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=adapter))
    if strategies is None:
        trainer = Trainer(model=model, args=TrainingArguments(**fields), train_dataset=rows)
    else:
        args = HotSPaTrainingArguments(**fields, hotspa_strategies=strategies, hotspa_report=False)
        trainer = HotSPaTrainer(model=model, args=args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate(rows[:3])["eval_loss"]
    if strategies is not None:
        trainer.close_engine()
    return losses, evaluated


TWO = "dp2:12@32,tp2:24@32"


@pytest.mark.parametrize(
    "family", [f if f == "gemma3" else pytest.param(f, marks=pytest.mark.slow) for f in MULTIMODAL]
)
def test_rows_of_text_train_it_as_the_stock_trainer_does(family, tmp_path):
    """And the checkpoint is one of the multimodal class, whose other half is bit for bit that of the start."""
    expected, of_stock = run_ranks(2, trained, family, str(tmp_path / "stock"), None)[0]
    losses, evaluated = run_ranks(2, trained, family, str(tmp_path / "ours"), TWO)[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert evaluated == pytest.approx(of_stock, rel=1e-5)
    folder = tmp_path / "ours" / "checkpoint-3"
    loaded, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not {key: value for key, value in report.items() if value}
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "stock" / "checkpoint-3").state_dict()
    start, found = multimodal_model(family, torch.float32).state_dict(), loaded.state_dict()
    assert found.keys() == start.keys()
    for name, tensor in found.items():
        is_text = name.startswith(("model.language_model.", "lm_head."))
        if not is_text:
            assert torch.equal(tensor, start[name]), name
        torch.testing.assert_close(tensor, stock[name], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_it_resumes_under_another_strategy(tmp_path):
    whole = run_ranks(2, trained, "gemma3", str(tmp_path / "whole"), TWO)[0][0]
    run_ranks(2, trained, "gemma3", str(tmp_path / "parts"), TWO, 2)
    rest = run_ranks(2, trained, "gemma3", str(tmp_path / "parts"), "pp2:24@32", 3, True)[0][0]
    assert rest[-1] == pytest.approx(whole[-1], rel=1e-6)
    ends = [load_file(tmp_path / name / "checkpoint-3" / "model.safetensors") for name in ("whole", "parts")]
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=1e-4, atol=1e-5)


LANGUAGE = r"model[.]language_model.*[.](q_proj|v_proj)"


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [LANGUAGE, "all-linear", ["q_proj", "fc1"]])
def test_adapters_train_by_rows_of_text_as_in_the_stock_trainer(adapter, tmp_path):
    """Those of the other half stay as they were."""
    expected, _ = run_ranks(2, trained, "gemma3", str(tmp_path / "stock"), None, 3, False, adapter)[0]
    losses, _ = run_ranks(2, trained, "gemma3", str(tmp_path / "ours"), TWO, 3, False, adapter)[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    folders = [tmp_path / side / "checkpoint-3" for side in ("stock", "ours")]
    configs = [json.loads((folder / "adapter_config.json").read_text())["target_modules"] for folder in folders]
    assert sorted(configs[0]) == sorted(configs[1])
    stock, ours = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert stock.keys() == ours.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, stock[name], rtol=1e-3, atol=1e-4)
