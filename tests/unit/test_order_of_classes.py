"""Where our methods stand in the order of classes: `switched(MyTrainer)`, subclasses of ours, and what cannot be made."""

import abc
import copy
import functools
import pickle
from pathlib import Path
from types import MethodType, new_class
from typing import Any, Generic, TypeVar

import pytest
import torch
import trl
from datasets import Dataset
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

import hf_hotspa.trl
from hf_hotspa.checkpoint.format.folder import RunFolder
from hf_hotspa.checkpoint.format.manifest import MANIFEST, read_manifest, verify
from hf_hotspa.errors import HotspaConfigError, UnsavableError, UnsupportedError
from hf_hotspa.trainer.model_source import side_files
from hf_hotspa.trainer.replaced import Replaced
from hf_hotspa.trainer.trainer import HotSPaTrainer, switched
from tests.families import tiny_model
from tests.gloo.test_checkpoint import tokenizer
from tests.lora import tiny_lora
from tests.moves import Kit, differences
from tests.overriding import CHANGES, Notes, files_of, outcome, overriding, wrong_with

T = TypeVar("T")


class Stranger(Trainer):
    """A class of the program between two libraries' trainers."""


class Mine(Stranger):
    """A trainer of the program."""

    answer = 42


class Abstract(Mine, abc.ABC, Generic[T]):
    """A trainer with the metaclass of `abc`."""


def names(cls: type) -> str:
    return " ".join(c.__name__ for c in cls.__mro__)


def test_ours_stand_in_front_of_the_trainer_of_the_library():
    ours = "HotSPaTrainer SwitchedMixin Replaced Trainer object"
    assert names(switched(Mine)) == f"Mine Mine Stranger {ours}"
    assert names(switched(Trainer)) == f"Trainer {ours}"
    assert names(switched(Seq2SeqTrainer)) == f"Seq2SeqTrainer Seq2SeqTrainer {ours}"
    assert names(switched(Abstract)) == f"Abstract Abstract Mine Stranger {ours[:-7]} ABC Generic object"
    of_trl = "OverTRL SwitchedMixin _ByName DPOTrainer _BaseTrainer"
    assert names(switched(type("Own", (trl.DPOTrainer,), {}))) == f"Own Own DPOTrainer {of_trl} Replaced Trainer object"
    # a class of the program behind TRL's trainer stays there
    own = type("Own", (trl.DPOTrainer, Stranger), {})
    assert names(switched(own)) == f"Own Own DPOTrainer {of_trl} Stranger Replaced Trainer object"


def test_what_replaces_the_trainer_is_always_directly_in_front_of_it():
    for bases in (
        (HotSPaTrainer, Stranger), (Stranger, HotSPaTrainer), (type("A", (HotSPaTrainer,), {}), Abstract),
        (hf_hotspa.trl.SFTTrainer, Stranger), (switched(Mine), Stranger), (hf_hotspa.trl.GRPOTrainer, abc.ABC),
    ):  # fmt: skip
        made = new_class("Own", bases)
        assert made.__mro__[made.__mro__.index(Trainer) - 1] is Replaced
        assert all(issubclass(made, base) for base in bases)
        assert switched(made) is made


def test_such_a_class_looks_like_the_program_s_own(tmp_path):
    made = switched(Mine)
    assert (made.__name__, made.__qualname__, made.__module__, made.__doc__) == (
        "Mine", "Mine", __name__, "A trainer of the program.",
    )  # fmt: skip
    assert switched(Mine) is made
    trainer = made(tiny_model("llama_gqa_bias"), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    assert isinstance(trainer, Mine)
    assert isinstance(trainer, HotSPaTrainer)
    for cls in (Mine, Abstract):  # an object without attributes: a model is not what this is about
        blank = switched(cls).__new__(switched(cls))
        blank.shown = {"a": [1, 2]}
        again = pickle.loads(pickle.dumps(blank))
        assert type(again) is type(blank)
        assert vars(again) == vars(blank)


class Strict(type):
    """A metaclass that allows no subclass."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        if len(bases) > 1:
            raise TypeError(f"{name} may have one base")
        return super().__new__(cls, name, bases, body)


def test_what_cannot_be_made_is_named():
    strict = Strict("Sealed", (Trainer,), {})
    with pytest.raises(UnsupportedError, match=r"switched\(Sealed\) cannot be made: .*may have one base.*Strict"):
        switched(strict)
    for wrong in (object, 3, torch.nn.Module):
        with pytest.raises(HotspaConfigError, match="switched.*subclass of transformers.Trainer"):
            switched(wrong)


def test_a_constructor_that_passes_over_ours_is_named(tmp_path):
    class Bare(trl.SFTTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            Trainer.__init__(self, *args, **kwargs)

    args = trl.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", bf16=False)
    with pytest.raises(UnsupportedError, match=r"Bare passes over HotSPaTrainer.__init__.*super\(\)"):
        switched(Bare)(tiny_model("llama_gqa_bias"), args, train_dataset=[{"input_ids": [3, 4]}])


DRAWN = [pytest.param(number, marks=[pytest.mark.slow] if number > 3 else []) for number in range(1, 41)]


@pytest.mark.parametrize("number", DRAWN)
def test_a_drawn_subclass_is_equal_to_stock_or_rejected_by_name(tmp_path, number):
    expected, found = (outcome(number, stock, 1, tmp_path / str(stock)) for stock in (True, False))
    assert not wrong_with(found, expected)


def test_under_trl_with_a_class_of_the_program_behind_its_trainer(tmp_path):
    class Behind(Trainer):
        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log({**logs, "behind": 1.0}, *args, **kwargs)

    seen = []
    rows = Dataset.from_list([{"input_ids": [3 + (7 * i + j) % 150 for j in range(6 + i % 9)]} for i in range(12)])
    for stock, config in ((True, trl.SFTConfig), (False, hf_hotspa.trl.SFTConfig)):
        folder = tmp_path / str(stock)
        notes = Notes(folder)
        cls = overriding(type("Base", (trl.SFTTrainer, Behind), {}), sorted(CHANGES), notes)
        args = config(
            str(folder), max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=2, logging_steps=1, use_cpu=True,
            bf16=False, report_to="none", disable_tqdm=True, learning_rate=5e-3, per_device_train_batch_size=3,
            gradient_checkpointing=False, max_length=None,
            optim="sgd",  # AdamW makes whole steps of what rounding leaves of the gradients of key biases, which are 0
        )  # fmt: skip
        model = tiny_model("llama_gqa_bias", vocab_size=400)
        trainer = (cls if stock else switched(cls))(
            model=model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer()
        )
        trainer.train()
        kept = ("loss", "eval_loss", "grad_norm", "mean_token_accuracy", "behind")
        logs = [{key: log[key] for key in kept if key in log} for log in trainer.state.log_history]
        cards = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.md"))
        seen.append([logs, notes.calls, notes.weights, files_of(folder), cards, dict(model.state_dict())])
    assert not differences(seen[1], seen[0], 2e-5)
    assert seen[0][4] == ["README.md"]
    assert all("behind" in log for log in seen[0][0])


# -- what overrides leave in a checkpoint -----------------------------------------------------------------------------


def changed_after(folder: Path, change: Any) -> type:
    class Own(Trainer):
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            change(Path(str(output_dir)))

    return switched(Own)


def test_a_checkpoint_verifies_with_what_an_override_has_changed(tmp_path):
    def change(folder: Path) -> None:
        assert (folder / "model.safetensors").is_file()  # as after `super()` of the stock Trainer
        (folder / "config.json").write_text("{}")
        (folder / "generation_config.json").unlink(missing_ok=True)
        (folder / "notes").mkdir()
        (folder / "notes" / "more.txt").write_text("more")

    kit = Kit(False, 1, tmp_path)
    kit.train(kit.trainer(changed_after(tmp_path, change), args=kit.arguments(save_strategy="steps", save_steps=4)))
    folder = tmp_path / "out" / "checkpoint-4"
    manifest = verify(folder)
    kept = {file.name for file in manifest.files}
    assert "config.json" in kept
    assert "generation_config.json" not in kept
    assert (folder / "config.json").read_text() == "{}"
    kit.close()
    again = kit.trainer(args=kit.arguments(max_steps=5))
    again.train(resume_from_checkpoint=str(folder))
    assert again.state.global_step == 5


def test_a_checkpoint_from_which_an_override_has_removed_a_share_does_not_verify(tmp_path):
    def change(folder: Path) -> None:
        next(folder.glob("hotspa/master-*")).unlink()

    kit = Kit(False, 1, tmp_path)
    kit.train(kit.trainer(changed_after(tmp_path, change), args=kit.arguments(save_strategy="steps", save_steps=4)))
    folder = tmp_path / "out" / "checkpoint-4"
    text = (folder / MANIFEST).read_text()
    assert read_manifest(folder).text() == text
    assert not RunFolder(folder.parent).verified(folder)


def test_a_name_that_no_checkpoint_can_hold_is_named_before_the_first_step(tmp_path):
    with pytest.raises(UnsavableError, match="the adapter 'my adapter' cannot be written.*not allowed"):
        side_files(tiny_lora("llama_gqa_bias", adapter_name="my adapter"), None)
    assert "adapter_config.json" in side_files(tiny_lora("llama_gqa_bias", adapter_name="mine"), None)


@pytest.mark.parametrize("place", ["class", "object", "library"])
def test_an_override_is_called_wherever_it_is_set(tmp_path, monkeypatch, place):
    found = []
    for stock in (True, False):
        calls: list[str] = []
        behind = Trainer.save_model

        @functools.wraps(behind)  # so it has the module of the library
        def save_model(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
            calls.append(Path(str(output_dir)).name)  # noqa: B023
            behind(self, output_dir, *args, **kwargs)  # noqa: B023

        kit = Kit(stock, 1, tmp_path / str(stock))
        cls = type("Own", (kit.trainer_class,), {"save_model": save_model} if place == "class" else {})
        trainer = kit.trainer(cls, args=kit.arguments(save_strategy="steps", save_steps=2))
        if place == "object":
            trainer.save_model = MethodType(save_model, trainer)
        with monkeypatch.context() as patch:
            if place == "library":
                del save_model.__wrapped__
                save_model.__module__ = __name__
                patch.setattr(Trainer, "save_model", save_model)
            kit.train(trainer)
        kit.close()
        found.append(calls)
    assert found == [["checkpoint-2", "checkpoint-4"]] * 2


def test_a_save_that_passes_over_ours_is_named(tmp_path):
    class Own(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            Trainer._save_checkpoint(self, model, trial)

    kit = Kit(False, 1, tmp_path)
    with pytest.raises(UnsupportedError, match=r"Own calls _save_optimizer_and_scheduler.*super\(\)._save_checkpoint"):
        kit.train(kit.trainer(switched(Own), args=kit.arguments(save_strategy="steps", save_steps=1)))


def test_a_constructor_of_trl_that_a_program_has_deleted(tmp_path, monkeypatch):
    needed = ("__init__", "log", "compute_loss", "training_step", "_set_signature_columns_if_needed")
    for name in needed:  # by a constructor of the program, and methods that read what TRL's has made
        monkeypatch.delattr(trl.SFTTrainer, name)
    own = type("Own", (trl.SFTTrainer,), {})
    args = trl.SFTConfig(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", bf16=False, disable_tqdm=True)
    rows, losses = [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]}] * 16, []
    for cls in (own, switched(own)):
        trainer = cls(model=tiny_model("llama_gqa_bias"), args=copy.copy(args), train_dataset=rows)
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_an_override_that_raises_ends_training_as_in_stock(tmp_path):
    class Own(Trainer):
        def save_model(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("of the program")

    for stock in (True, False):
        kit = Kit(stock, 1, tmp_path / str(stock))
        args = kit.arguments(save_strategy="steps", save_steps=1)
        with pytest.raises(ValueError, match="of the program"):
            kit.train(kit.trainer(Own if stock else switched(Own), args=args))
        assert kit.counter.made == 1
