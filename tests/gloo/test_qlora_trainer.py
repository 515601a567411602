"""QLoRA under `HotSPaTrainer`: the steps of PEFT and bitsandbytes under the stock Trainer, files, checkpoints, evaluation, TRL."""

import math
from pathlib import Path

import pytest
import torch

from hf_hotspa.errors import ResumeError
from hf_hotspa.model.packed_layer import stored_tensors
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.gloo.test_lora_trainer import trainer_after
from tests.gloo.test_trainer import COMMON, MINI_BATCH, dataset_rows
from tests.harness import run_ranks
from tests.lora import apart, check_saved, trained
from tests.qlora import EIGHT_BITS, MIXTURES, WIDE, quantized, tiny_qlora
from tests.training_runs import contents, make_trainer, newest, one_run, train, whole_state
from tests.trl_runs import Case, both_sides, wrong_ones

pytestmark = pytest.mark.gloo

FAMILY = "llama_gqa_bias"
EVALUATES = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}


def stock_run(rank, world_size, output_dir, form=None):
    model = tiny_qlora(FAMILY, model=WIDE, quantization=EIGHT_BITS.get(form))
    # DDP, also of one process, cannot broadcast torchao's weights
    model._ddp_params_and_buffers_to_ignore = [name for name, p in model.named_parameters() if not p.requires_grad]
    for module in model.modules():  # evaluations would pack weights anew, round scales to bf16, and fail on biases
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    trainer = trainer_after(model, torch.float32, output_dir, **EVALUATES)
    evaluated = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    return evaluated, trained(model)


def hotspa_run(rank, world_size, output_dir, strategies, form=None):
    model = tiny_qlora(FAMILY, model=WIDE, quantization=EIGHT_BITS.get(form))
    before = {name: t.clone() for name, t in stored_tensors(model) if "lora" not in name}
    trainer = trainer_after(model, torch.float32, output_dir, strategies, **EVALUATES)
    trainer.save_model(f"{output_dir}/adapter")
    model.eval()
    with torch.no_grad():  # a forward in evaluation leaves the bytes alone
        model(input_ids=torch.arange(1, 9)[None], use_cache=True)
    evaluated = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    trainer.close_engine()
    assert all(torch.equal(t, before[name]) for name, t in stored_tensors(model) if name in before)
    return evaluated, trained(model)


@pytest.mark.parametrize("form", ["nf4", *(pytest.param(form, marks=pytest.mark.slow) for form in EIGHT_BITS)])
@pytest.mark.parametrize(
    ("world", "strategies"),
    [(2, "dp2:16@32,tp2:60"), pytest.param(4, "dp4+z3:16@32,dp2tp2:32,tp2pp2:60@64", marks=pytest.mark.slow)],
)
def test_steps_equal_peft_under_the_stock_trainer(world, strategies, form, tmp_path):
    [(losses, weights)] = run_ranks(1, stock_run, str(tmp_path / "stock"), form)
    for found_losses, found in run_ranks(world, hotspa_run, str(tmp_path / "hot"), strategies, form):
        assert len(found_losses) == 2
        # LLM.int8 rounds activations in evaluation, by the tokens of a product
        assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found_losses, losses, strict=True))
        assert apart(found, weights) <= 1e-5
    base = quantized(FAMILY, model=WIDE, quantization=EIGHT_BITS.get(form))
    check_saved(tmp_path / "hot" / "adapter", base, found)


def of_form(form, **changes):
    """`form`: nf4, one of `EIGHT_BITS`, or a mixture with experts in nf4."""
    kind = {"experts": True} if form in MIXTURES else {"quantization": EIGHT_BITS.get(form)}
    family, model = (form, MIXTURES[form]) if form in MIXTURES else (FAMILY, WIDE)
    return {"qlora": kind, "max_steps": 4, "family": family, "model": model, **changes}


def resumed(rank, world, folder, form):
    first = one_run(rank, world, f"{folder}/a", None, of_form(form))
    again = one_run(rank, world, f"{folder}/b", f"{folder}/a/checkpoint-2", of_form(form))
    trainer = make_trainer(f"{folder}/c", world, **of_form(form), model_seed=5)
    with pytest.raises(ResumeError, match="the frozen weights of the model are not those"):
        trainer.train(resume_from_checkpoint=f"{folder}/a/checkpoint-2")
    trainer.close_engine()
    return first, again


def elsewhere(rank, world, folder, form):
    """Saved again without a step in between, and trained on."""
    trainer = make_trainer(f"{folder}/same{world}", world, **of_form(form, max_steps=2))
    trainer.train(resume_from_checkpoint=f"{folder}/a/checkpoint-2")
    weights = trained(trainer.model)
    trainer.close_engine()
    return weights, train(make_trainer(f"{folder}/w{world}", world, **of_form(form)), f"{folder}/a/checkpoint-2")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", *EIGHT_BITS, *MIXTURES])
def test_checkpoints_resume_bit_for_bit_here_and_elsewhere(form, tmp_path):
    for first, again in run_ranks(2, resumed, str(tmp_path), form):
        assert again == {step: loss for step, loss in first.items() if step > 2}
    assert contents(newest(tmp_path / "b")) == contents(newest(tmp_path / "a"))
    saved = whole_state(Path(f"{tmp_path}/a/checkpoint-2"))
    for world in (1, 4):
        for weights, losses in run_ranks(world, elsewhere, str(tmp_path), form):
            assert all(torch.equal(weight, saved[f"weight/{name}"]) for name, weight in weights.items())
            assert list(losses) == [3, 4]
            assert all(math.isclose(loss, first[step], rel_tol=1e-6) for step, loss in losses.items())


TWO = ("dp2:20@64,tp2:128@128", "dp4+z3:20@64,dp2tp2:40@64,tp2pp2+sp:128@128")
FIELDS = {"max_length": None, "gradient_checkpointing": True}
TRL = {"sft": Case("SFT", TWO, "completions", FIELDS, lora=True, four_bit=True, dtype=torch.float32)}


def beside_trl(rank, world, folder):
    return both_sides(TRL, world, folder)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_sft_is_trl_under_ddp(world, tmp_path):
    wrong = wrong_ones(run_ranks(world, beside_trl, str(tmp_path), timeout=400), TRL)
    assert not wrong, "\n".join(wrong)


def auto_run(rank, world, folder):
    """Strategies chosen by what the machine measures, without a flag."""
    model = tiny_qlora(FAMILY, model=WIDE)
    rows = dataset_rows(model.config.vocab_size)
    settings = {**COMMON, "max_steps": 3, "save_strategy": "no"}
    args = HotSPaTrainingArguments(output_dir=folder, per_device_train_batch_size=MINI_BATCH, **settings)
    trainer = HotSPaTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8])
    before = trained(model)
    trainer.train()
    trainer.close_engine()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], before, trained(model)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_auto_needs_no_flag(world, tmp_path):
    for losses, before, after in run_ranks(world, auto_run, str(tmp_path), timeout=400):
        assert len(losses) == 3
        assert all(not torch.equal(weight, before[name]) for name, weight in after.items())
