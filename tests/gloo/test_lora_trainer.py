"""LoRA under `HotSPaTrainer`: the steps of PEFT under the stock Trainer, its files, and checkpoints without the base."""

import math

import pytest
import torch
from transformers import TrainingArguments

from hf_hotspa.checkpoint.format.manifest import read_manifest
from hf_hotspa.errors import ResumeError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import tiny_model
from tests.gloo.test_trainer import COMMON, MINI_BATCH, _LossRecorder, dataset_rows
from tests.harness import run_ranks
from tests.lora import apart, check_saved, tiny_lora, trained
from tests.moves import padded as _pad
from tests.oracle import exact_in_double
from tests.training_runs import contents, make_trainer, newest, one_run

pytestmark = pytest.mark.gloo

STEPS = 5
THREE = "dp4:16@32,dp2tp2:32,tp2pp2:60@64"


def trainer_after(model, dtype, output_dir, strategies=None, given=(), **settings):
    """The trainer after a run of `COMMON` with other settings: the stock one without strategies."""
    settings = {**COMMON, "output_dir": output_dir, "save_strategy": "no", **settings}
    rows = dataset_rows(model.config.vocab_size)
    given = {"model": model, "train_dataset": rows, "eval_dataset": rows[:8], **dict(given)}
    if strategies is None:
        args = TrainingArguments(per_device_train_batch_size=MINI_BATCH, **settings)
        trainer = _LossRecorder(args=args, data_collator=_pad, **given)
    else:
        flags = {"hotspa_mini_batch_size": MINI_BATCH, "hotspa_strategies": strategies, "hotspa_report": False}
        trainer = HotSPaTrainer(args=HotSPaTrainingArguments(**settings, **flags), **given)
    with exact_in_double(dtype):
        trainer.train()
    return trainer


def stock_run(rank, world_size, family, dtype, output_dir):
    trainer = trainer_after(tiny_lora(family, dtype), dtype, output_dir, max_steps=STEPS)
    return trainer.losses, trained(trainer.model)


def hotspa_run(rank, world_size, family, dtype, output_dir):
    model = tiny_lora(family, dtype)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer = trainer_after(model, dtype, output_dir, THREE, max_steps=STEPS)
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
        assert len(found_losses) == STEPS
        for a, b in zip(found_losses, losses, strict=True):
            assert math.isclose(a, b, rel_tol=1e-4)  # the log rounds
        assert apart(found, weights) <= tolerance
        assert frozen_mb[0] > 0
    check_saved(tmp_path / "hot" / "adapter", tiny_model(family, dtype), per_rank[0][1])
    assert not list((tmp_path / "hot" / "adapter").glob("model*.safetensors"))


LORA = {"lora": {"bias": "all", "lora_dropout": 0.1}, "max_steps": 4, "family": "llama_gqa_bias"}


def lora_runs(rank, world, folder):
    """Train; go on from the middle; be refused beside another base model."""
    first = one_run(rank, world, f"{folder}/a", None, dict(LORA))
    again = one_run(rank, world, f"{folder}/b", f"{folder}/a/checkpoint-2", dict(LORA))
    trainer = make_trainer(f"{folder}/c", world, **LORA, model_seed=5)
    with pytest.raises(ResumeError, match="the frozen weights of the model are not those"):
        trainer.train(resume_from_checkpoint=f"{folder}/a/checkpoint-2")
    trainer.close_engine()
    return first, again


def test_checkpoints_hold_the_adapter_and_a_digest_of_the_base(tmp_path):
    for first, again in run_ranks(2, lora_runs, str(tmp_path)):
        assert again == {step: loss for step, loss in first.items() if step > 2}
    last = newest(tmp_path / "a")
    assert contents(newest(tmp_path / "b")) == contents(last)
    manifest = read_manifest(last)
    model = tiny_lora("llama_gqa_bias", bias="all")
    assert {p.name for p in manifest.parameters} == trained(model).keys()
    assert all(p.trainable and "exp_avg" in p.states for p in manifest.parameters)
    assert sum(p.numel() for p in model.parameters()) > 1.5 * sum(p.numel for p in manifest.parameters)
    assert not any(file.name == "config.json" for file in manifest.files)
