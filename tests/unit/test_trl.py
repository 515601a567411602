"""The classes of `hf_hotspa.trl` on one process: what is imported, what configs hold, and what is refused before the first step."""

import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import hf_hotspa.trl
from hf_hotspa.errors import HotspaConfigError, HotspaError, UnsupportedError
from hf_hotspa.switched.model import FrozenModel
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer, switched
from tests.families import tiny_model
from tests.lora import tiny_lora
from tests.trl_runs import COMMON, patched_head, rows, small, tokenizer

trl: Any = import_module("trl")  # which exports nothing explicitly
KINDS = {"SFT": "completions", "DPO": "pairs", "KTO": "judged"}
ONE = {**COMMON, "max_steps": 1, "hotspa_strategies": "dp1:128@256", "hotspa_report": False}


def given(kind: str, folder: Any) -> dict[str, Any]:
    return {"train_dataset": rows(KINDS[kind], str(folder / "rows"), 8), "processing_class": tokenizer()}


def names(kind: str) -> tuple[Any, Any]:
    return getattr(hf_hotspa.trl, f"{kind}Trainer"), getattr(hf_hotspa.trl, f"{kind}Config")


def test_the_package_imports_neither_trl_nor_peft() -> None:
    code = """
import sys, hf_hotspa, hf_hotspa.trainer
print([n for n in ("trl", "peft") if n in sys.modules])
import hf_hotspa.trainer.trainer  # transformers and accelerate import peft
print("trl" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\nFalse\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_has_the_defaults_of_trl_and_our_flags(kind: str, tmp_path: Any) -> None:
    trainer, config = names(kind)
    stock = getattr(trl, f"{kind}Config")
    ours, theirs = config(str(tmp_path), use_cpu=True), stock(str(tmp_path), use_cpu=True)
    assert isinstance(ours, stock)
    assert isinstance(ours, HotSPaTrainingArguments)
    names_of_both = {f.name for f in fields(theirs)} - {"disable_tqdm"}  # no bars here where nobody watches
    assert {name: getattr(ours, name) for name in names_of_both} == {
        name: getattr(theirs, name) for name in names_of_both
    }
    assert ours.hotspa_strategies == "auto"
    assert issubclass(trainer, getattr(trl, f"{kind}Trainer"))
    assert (trainer.__name__, config.__name__) == (f"{kind}Trainer", f"{kind}Config")
    assert trainer is names(kind)[0]
    with pytest.raises(AttributeError, match="NoTrainer"):
        hf_hotspa.trl.NoTrainer  # noqa: B018


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_by_place_are_those_of_trl(kind: str, tmp_path: Any) -> None:
    trainer, config = names(kind)
    first: tuple[Any, ...] = (small(dtype=torch.float32), config(str(tmp_path), **ONE))
    if kind != "SFT":
        first = first[0], small(dtype=torch.float32, seed=1), first[1]
    made = trainer(*first, **given(kind, tmp_path))
    made.train()
    assert made.state.global_step == 1
    assert made.switched.report is not None
    made.close_engine()
    with pytest.raises(TypeError, match="by place"):
        trainer(*first, *[None] * 30)


def test_what_trl_takes_for_arguments(tmp_path: Any) -> None:
    plain = TrainingArguments(str(tmp_path), learning_rate=0.5, use_cpu=True)
    sft, dpo = names("SFT")[0], names("DPO")[0]
    made = sft(small(dtype=torch.float32), plain, **given("SFT", tmp_path))
    assert (made.args.learning_rate, made.args.loss_type, made.args.hotspa_strategies) == (0.5, "nll", "auto")
    with pytest.raises(HotspaConfigError, match="give the DPOConfig of hf_hotspa.trl"):
        dpo(small(dtype=torch.float32), args=plain, **given("DPO", tmp_path))
    own = sft(
        small(dtype=torch.float32), trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False), **given("SFT", tmp_path)
    )
    assert own.args.hotspa_strategies == "auto"
    assert isinstance(own.args, trl.SFTConfig)


def test_no_arguments_and_a_name(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)  # bf16 is TRL's default
    small(dtype=torch.float32).save_pretrained("little")
    made = names("SFT")[0]("little", **given("SFT", tmp_path))
    assert made.args.output_dir == "little-SFT"
    assert made.model.num_parameters() > 0
    assert not any(p.is_meta for p in made.model.parameters())


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_the_gradients_of_linear_losses_are_known_beforehand(loss_type: str, tmp_path: Any) -> None:
    trainer, config = names("SFT")
    args = config(
        str(tmp_path),
        **{**ONE, "max_steps": 3, "loss_type": loss_type, "gradient_accumulation_steps": 2, "max_length": None},
    )
    made = trainer(small(), args, **given("SFT", tmp_path))
    with patched_head(torch.float64):
        made.train()
    # the batches of a step run as one pass
    assert made.switched._passes.counts == {"scoring": 0, "training": 3}
    made.close_engine()


class Twice(trl.SFTTrainer):
    """A user's."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 2


def test_a_subclass_of_trl(tmp_path: Any) -> None:
    losses = []
    for cls in (names("SFT")[0], switched(Twice)):
        args = names("SFT")[1](str(tmp_path), **ONE)
        made = cls(small(dtype=torch.float32), args, **given("SFT", tmp_path))
        made.train()
        losses.append(made.state.log_history[0]["loss"])
        made.close_engine()
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-6)


@pytest.mark.parametrize("kind", hf_hotspa.trl.UNSUPPORTED)
def test_other_trainers_are_refused_by_name(kind: str) -> None:
    home = import_module(f"trl.experimental.{hf_hotspa.trl.EXPERIMENTAL[kind]}")
    for cls in (getattr(hf_hotspa.trl, f"{kind}Trainer"), switched(getattr(home, f"{kind}Trainer"))):
        with pytest.raises(UnsupportedError, match=f"TRL's {kind}Trainer"):
            cls(model=None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_offloading", True), ("hotspa_overlong", "truncate"), ("hotspa_empty_rows", "skip"),
        ("hotspa_mini_batch_size", 7), ("use_liger_kernel", True), ("torch_compile", True), ("token_loss", abs),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any, tmp_path: Any) -> None:
    trainer, config = names("SFT")
    fields, more = ({}, {field: value}) if field == "token_loss" else ({field: value}, {})
    with pytest.raises(HotspaError, match=field):
        trainer(small(dtype=torch.float32), config(str(tmp_path), **ONE | fields), **given("SFT", tmp_path), **more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_of_trl_in_front_of_our_trainer_names_the_class_that_reads_it(kind: str, tmp_path: Any) -> None:
    args = getattr(trl, f"{kind}Config")(str(tmp_path), use_cpu=True, bf16=False)
    args.loss_type = "dft" if kind == "SFT" else args.loss_type
    with pytest.raises(HotspaConfigError, match=f"from hf_hotspa.trl import {kind}Config, {kind}Trainer"):
        HotSPaTrainer(small(dtype=torch.float32), args, train_dataset=rows("text", str(tmp_path), 4))


def dpo_as_of_trl(tmp_path: Any, models: Any, **fields: Any) -> tuple[Any, Any]:
    """Two steps of DPO of what `models` makes, a model and its reference: as with TRL. Returns our trainer and the models."""
    trainer, config = names("DPO")
    losses = []
    for cls, kind, extra in (
        (trl.DPOTrainer, trl.DPOConfig, {}),
        (trainer, config, {"hotspa_strategies": "dp1:128@256"}),
    ):
        pair = models()
        args = kind(str(tmp_path), **{**COMMON, "max_steps": 2, **fields, **extra})
        own = rows("pairs", str(tmp_path / f"rows{bool(extra)}"), 8)
        made = cls(*pair, args, train_dataset=own, processing_class=tokenizer())
        made.train()
        losses.append([log["loss"] for log in made.state.log_history if "loss" in log])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    return made, pair


@pytest.mark.parametrize("fields", [{}, {"precompute_ref_log_probs": True}])
def test_special_tokens_that_trl_takes_over_from_the_tokenizer_change_nothing(fields: Any, tmp_path: Any) -> None:
    def untokened() -> Any:
        return [tiny_model("llama_gqa_bias", seed=seed, vocab_size=259, pad_token_id=None) for seed in (0, 1)]

    made, models = dpo_as_of_trl(tmp_path, untokened, **fields)
    with made.switched.routed():
        assert isinstance(made.ref_model, FrozenModel)
    assert made.ref_model is models[1]  # after training, as with TRL
    made.close_engine()


def test_a_reference_of_another_build_has_an_engine_of_its_own(tmp_path: Any) -> None:
    def pair() -> Any:
        return small(dtype=torch.float32), small("qwen3_qk_norm_tied", torch.float32)

    made, _ = dpo_as_of_trl(tmp_path, pair)
    made.close_engine()


@pytest.mark.parametrize("kind", ["Distillation", "GKD"])
def test_a_distillation_that_cannot_be_switched_is_trls(kind: str, tmp_path: Any) -> None:
    trainer, config = names(kind)
    own = {"lmbda": 1.0, "max_new_tokens": 4} if kind == "GKD" else {"max_completion_length": 4}
    asked = {**COMMON, "max_steps": 2, "per_device_train_batch_size": 2, "optim": "adafactor", **own}
    made = trainer(
        small(dtype=torch.float32), args=config(str(tmp_path), **asked), processing_class=tokenizer(),
        teacher_model=small("qwen3_qk_norm_tied", torch.float32, hidden_size=96),
        train_dataset=rows("chats" if kind == "GKD" else "prompts", str(tmp_path / "rows"), 8),
    )  # fmt: skip
    made.train()
    assert made.engine is None
    assert made.state.global_step == 2


def test_a_teacher_that_does_not_fit_is_named_before_the_first_step(tmp_path: Any) -> None:
    trainer, config = names("Distillation")

    def made(teacher: Any) -> Any:
        args = config(str(tmp_path), **{**ONE, "max_completion_length": 4})
        data = rows("prompts", str(tmp_path / "rows"), 8)
        student = small(dtype=torch.float32)
        return trainer(student, teacher_model=teacher, args=args, processing_class=tokenizer(), train_dataset=data)

    with pytest.raises(ValueError, match="vocab_size"):  # of TRL
        made(tiny_model("llama_gqa_bias", vocab_size=300))
    with pytest.raises(UnsupportedError, match="a teacher with an adapter"):
        made(tiny_lora("llama_gqa_bias", model={"vocab_size": 259})).train()
