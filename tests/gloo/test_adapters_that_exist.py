"""Adapters that exist: trained on, one of several, combined or merged before; what is saved and resumed; the object after training."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_hotspa.checkpoint.model_files import export, merge
from hf_hotspa.errors import UnsupportedError
from tests.families import tiny_model
from tests.gloo.test_after_training import EQUAL
from tests.harness import run_ranks
from tests.lora import apart, check_saved, tiny_lora, trained
from tests.moves import padded as _pad
from tests.oracle import exact_in_double, random_rows, relative_error
from tests.training_runs import MINI_BATCH, ROWS, contents, make_trainer, newest, train

pytestmark = pytest.mark.gloo

FAMILY, DOUBLE = "llama_gqa_bias", torch.float64
IDS = torch.arange(3, 20)[None]
RUN: dict[str, Any] = {"max_steps": 4, "save_steps": 2}
MIX, OTHER = "dp2+z3:16@32,tp2+sp:32,pp2:60@64", "tp2:20@32,cp2:60@64"
SECOND = LoraConfig(
    r=2, lora_alpha=7, target_modules=["v_proj", "o_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
)
KINDS = {"continued": ("default", "second"), "the second": ("second", "default"), "combined": ("combined", "second")}
"""The adapter that is trained, and another one."""


def begin(folder: Path) -> None:
    """Two trained adapters as PEFT saves them, and their base."""
    model = tiny_lora(FAMILY, DOUBLE, seed=0, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    torch.manual_seed(3)
    model.add_adapter("second", SECOND)
    model.save_pretrained(folder / "adapters")
    tiny_model(FAMILY, DOUBLE).save_pretrained(folder / "base")


def made(kind: str, folder: str, dtype: torch.dtype = DOUBLE) -> Any:
    saved, (name, _) = f"{folder}/adapters", KINDS[kind]
    model = PeftModel.from_pretrained(tiny_model(FAMILY, dtype), saved, is_trainable=True)
    model.load_adapter(f"{saved}/second", "second")
    if name == "combined":
        model.add_weighted_adapter(["default", "second"], [0.7, 0.4], name, combination_type="cat")
    model.set_adapter(name)
    return model


def of_object(model: Any, name: str, other: str) -> dict[str, torch.Tensor]:
    """What a model computes by itself."""
    model.eval()
    with torch.no_grad():
        found = {"logits": model(input_ids=IDS).logits}
        found["generated"] = model.generate(
            input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False
        )
        with model.disable_adapter():
            found["off"] = model(input_ids=IDS).logits
        found["merged"] = copy.deepcopy(model).merge_and_unload()(input_ids=IDS).logits
        model.set_adapter(other)
        found["other"] = model(input_ids=IDS).logits
        model.set_adapter(name)
    return found


def seen(trainer: Any, kind: str) -> dict[str, Any]:
    """What is compared, after training."""
    model, (name, other) = trainer.model, KINDS[kind]
    weights, evaluated = trained(model), [trainer.evaluate(EQUAL)["eval_loss"]]
    with model.disable_adapter():
        evaluated.append(trainer.evaluate(EQUAL)["eval_loss"])
    model.set_adapter(other)
    evaluated.append(trainer.evaluate(EQUAL)["eval_loss"])
    model.set_adapter(name)
    return {"weights": weights, "evaluated": evaluated, **of_object(model, name, other)}


def stock_trainer(model: Any, output: str, **options: Any) -> Any:
    args = TrainingArguments(
        output, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, learning_rate=1e-2, weight_decay=0.1,
        warmup_steps=2, seed=7, per_device_train_batch_size=MINI_BATCH, **options,
    )  # fmt: skip
    rows = random_rows(ROWS, model.config.vocab_size, longest=60, seed=3)
    return Trainer(model=model, args=args, train_dataset=rows, data_collator=_pad)


def stock(rank: int, world: int, kinds: list[str], folder: str) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        trainer = stock_trainer(made(kind, folder), f"{folder}/stock/{kind}", **RUN)
        with exact_in_double(DOUBLE):
            trainer.train()
            found[kind] = seen(trainer, kind)
    return found


def ours(
    rank: int, world: int, kinds: list[str], folder: str, resume: str | None = None, mix: str = MIX
) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        model, place = made(kind, folder), f"{folder}/{'resumed' if resume else 'ours'}/{kind}"
        if resume:  # all adapters come from the checkpoint
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if ".lora_A." in name:
                        parameter.mul_(0.5)
        trainer = make_trainer(place, world, given=model, hotspa_strategies=mix, **RUN)
        with exact_in_double(DOUBLE):
            trainer.train(resume_from_checkpoint=resume and f"{resume}/{kind}/checkpoint-2")
            found[kind] = seen(trainer, kind)
            trainer.save_model(f"{place}/saved")
            trainer.close_engine()
            closed = of_object(model, *KINDS[kind])
        assert all(torch.equal(closed[name], found[kind][name]) for name in closed)
    return found


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind, right in expected.items():
        own, weights = found[kind], right.pop("weights")
        assert apart(own["weights"], weights) <= 1e-11, kind
        assert own["evaluated"] == pytest.approx(right.pop("evaluated"), rel=1e-9), kind
        assert torch.equal(own["generated"], right.pop("generated"))
        for name, tensor in right.items():
            assert relative_error(own[name], tensor) <= 1e-10, (kind, name)
        right["weights"] = weights


@pytest.mark.parametrize("kinds", [["the second"], pytest.param(list(KINDS), marks=pytest.mark.slow)])
def test_it_is_peft_under_the_stock_trainer_and_what_is_saved_is_pefts(kinds, tmp_path):
    begin(tmp_path)
    [expected] = run_ranks(1, stock, kinds, str(tmp_path), timeout=200)
    for found in run_ranks(2, ours, kinds, str(tmp_path), timeout=200):
        assert len({round(loss, 6) for kind in kinds[:1] for loss in found[kind]["evaluated"]}) == 3
        check(found, {kind: dict(right) for kind, right in expected.items()})
    for kind in kinds[:2]:
        name, other = KINDS[kind]
        last, merged = newest(tmp_path / "ours" / kind), tmp_path / f"merged {kind}"
        export(last, tmp_path / f"exported {kind}")
        merge(last, merged, base=str(tmp_path / "base"))
        begun = trained(made({"default": "continued", "second": "the second"}[other], str(tmp_path)))
        for folder in (tmp_path / "ours" / kind / "saved", last, tmp_path / f"exported {kind}"):
            of_stock = {str(path.relative_to(tmp_path / "stock" / kind / "checkpoint-4"))
                        for path in (tmp_path / "stock" / kind / "checkpoint-4").rglob("adapter_*")}  # fmt: skip
            assert {str(path.relative_to(folder)) for path in folder.rglob("adapter_*")} == of_stock
            places = {"default": folder, "second": folder / "second"}
            check_saved(places[name], tiny_model(FAMILY, DOUBLE), found[kind]["weights"], name)
            check_saved(places[other], tiny_model(FAMILY, DOUBLE), begun, str(other))
        right = PeftModel.from_pretrained(tiny_model(FAMILY, DOUBLE), places[name]).merge_and_unload().state_dict()
        own = AutoModelForCausalLM.from_pretrained(merged).state_dict()
        assert all(torch.equal(own[n], tensor) for n, tensor in right.items())
    # taken over from the stock Trainer's checkpoint, which has both adapters
    resumed = ["the second"]
    for found in run_ranks(2, ours, resumed, str(tmp_path), str(tmp_path / "stock"), OTHER, timeout=200):
        check(found, {kind: dict(expected[kind]) for kind in resumed})


class Freezes(TrainerCallback):
    """A callback that trains no more of lora_A after the second step, and halves lora_B once."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            if state.global_step > 1 and ".lora_A.second." in name:
                parameter.requires_grad_(False)
            elif state.global_step == 2 and ".lora_B.second." in name:
                parameter.data.mul_(0.5)


def frozen_and_resumed(rank: int, world: int, folder: str, then: str) -> list[Any]:
    """Of a run, and of the same resumed in a layout."""
    found = []
    for name, resume, mix in (("a", None, MIX), ("b", f"{folder}/a/checkpoint-3", then)):
        model = made("the second", folder)
        options = {"given": model, "callbacks": [Freezes()], "hotspa_strategies": mix, "max_steps": 4, "save_steps": 1}
        with exact_in_double(DOUBLE):
            losses = train(make_trainer(f"{folder}/{name}", world, **options), resume)
        found.append((losses, torch.cat([p.detach().flatten() for p in model.parameters()])))
    return found


@pytest.mark.parametrize("then", [MIX, pytest.param(OTHER, marks=pytest.mark.slow)])
def test_a_run_whose_callback_freezes_a_part_and_changes_another_is_saved_and_resumed(then, tmp_path):
    begin(tmp_path)
    for (losses, weights), (again, close) in run_ranks(2, frozen_and_resumed, str(tmp_path), then, timeout=200):
        assert list(again) == [4]
        assert then == OTHER or (again[4] == losses[4] and torch.equal(close, weights))
        assert relative_error(close, weights) <= 1e-11
    assert then == OTHER or contents(newest(tmp_path / "b")) == contents(newest(tmp_path / "a"))
    begun = load_file(tmp_path / "adapters" / "second" / "adapter_model.safetensors")
    ended = load_file(newest(tmp_path / "a") / "second" / "adapter_model.safetensors")
    first = load_file(tmp_path / "a" / "checkpoint-2" / "second" / "adapter_model.safetensors")
    for name in begun:
        assert not torch.equal(first[name], begun[name])
        assert torch.equal(ended[name], first[name]) == ("lora_A" in name)


class Switches(TrainerCallback):
    """A callback that switches the model to another adapter."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.set_adapter("default")


def switched_in_training(rank: int, world: int, folder: str) -> None:
    options = {"given": made("the second", folder), "callbacks": [Switches()], "save_strategy": "no"}
    with pytest.raises(UnsupportedError, match=r"the adapter 'default'|\.lora_A\.default\.weight' and"):
        make_trainer(f"{folder}/out", world, **options).train()


def test_another_adapter_in_training_is_an_error_on_all_ranks(tmp_path):
    begin(tmp_path)
    run_ranks(2, switched_in_training, str(tmp_path), timeout=100)


WAYS = ("after", "inputs after"), ("before", "inputs before")


def prepared(way: str) -> Any:
    """A model that a script prepares for gradient checkpointing, before or after `get_peft_model`."""
    model = tiny_model(FAMILY)
    for when in ("before", "after"):
        if way == when:
            model.gradient_checkpointing_enable()
        elif way == f"inputs {when}":
            model.enable_input_require_grads()
        if when == "before":
            torch.manual_seed(5)
            model = get_peft_model(model, copy.deepcopy(SECOND))
    return model


def prepared_runs(rank: int, world: int, ways: tuple[str, ...], folder: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for way in ways:
        model = prepared(way)
        train(make_trainer(f"{folder}/{way}", world, given=model, max_steps=3, save_strategy="no"))
        found.append(trained(model))
    return found


@pytest.mark.parametrize("ways", [WAYS[0], pytest.param(WAYS[1], marks=pytest.mark.slow)])
def test_a_model_that_is_prepared_for_checkpointing_is_trained_as_by_the_stock_trainer(ways, tmp_path):
    results = run_ranks(2, prepared_runs, ways, str(tmp_path), timeout=200)
    for number, way in enumerate(ways):
        model = prepared(way)
        stock_trainer(model, str(tmp_path / "stock"), max_steps=3, save_strategy="no").train()
        for found in results:
            assert apart(found[number], trained(model)) <= 2e-6, way
