"""After `train()`, and between two uses of a trainer, on two ranks: one alone calls the model, changes are taken over; and
factors of LoRA layers that callbacks change."""

from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.moves import padded
from tests.unit.test_after_training import IDS, ROWS, SETTINGS, resized, trainer_of

pytestmark = pytest.mark.gloo

TWO = {"hotspa_strategies": "dp2:24@48,tp2:64@128", "hotspa_mini_batch_size": 4}
EQUAL = [
    {"input_ids": list(range(first, first + 9)), "labels": list(range(first, first + 9))} for first in (3, 20, 40, 60)
]
"""Rows of equal length: the mean loss of an evaluation is the mean over rows."""


def of_object(model: Any) -> float:
    ids = torch.tensor([row["input_ids"] for row in EQUAL])
    with torch.no_grad():
        return float(model.eval()(input_ids=ids, labels=ids).loss)


def main_alone(rank: int, model: Any, folder: str) -> list[float]:
    """What scripts do on the main process after training."""
    if rank:
        return []
    hidden = model.eval()(IDS, output_hidden_states=True).hidden_states
    made = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False)
    model.save_pretrained(folder)
    return [len(hidden), made.shape[1], of_object(model)]


SEEN: dict[str, Any] = {}


def metrics(_: Any) -> dict[str, float]:
    """On the main process alone."""
    return {"object": of_object(SEEN["model"])} if torch.distributed.get_rank() == 0 else {}


def used_again(rank: int, world_size: int, folder: str) -> Any:
    trainer = trainer_of(folder, tiny_lora("llama_gqa_bias"), **TWO, ddp_timeout=60)
    SEEN["model"], of_metrics = trainer.model, list[float]()
    trainer.compute_metrics = metrics
    pairs = list[tuple[float, float]]()
    pairs.append((of_object(trainer.model), trainer.evaluate(EQUAL)["eval_loss"]))
    trainer.train()
    alone = main_alone(rank, trainer.model, f"{folder}/saved")
    torch.distributed.barrier()

    def change(how: Any) -> None:
        how(trainer.model)
        found = trainer.evaluate(EQUAL)
        pairs.append((of_object(trainer.model), found["eval_loss"]))
        of_metrics.extend(found[name] for name in ("eval_object",) if name in found)

    def halved(model: Any) -> None:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(0.5)

    def reordered(model: Any) -> None:  # the same values in other places
        weight = model.get_output_embeddings().weight
        weight.data[:] = weight.detach().flip(0)

    def rescaled(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 0.4)

    merged, unmerged = lambda model: model.merge_adapter(), lambda model: model.unmerge_adapter()
    for how in (lambda model: None, halved, reordered, rescaled, merged, unmerged):
        change(how)
    trainer.train()
    change(lambda model: None)
    change(lambda model: model.merge_and_unload())
    change(resized)
    try:
        trainer.train()
        error = ""
    except Exception as refused:
        error = str(refused)
    trainer.close_engine()
    return pairs, of_metrics, alone, error


def test_a_trainer_takes_over_what_its_model_has(tmp_path: Any) -> None:
    for rank, (pairs, of_metrics, alone, error) in enumerate(run_ranks(2, used_again, str(tmp_path), timeout=120)):
        for of_the_object, of_the_trainer in pairs:
            assert of_the_trainer == pytest.approx(of_the_object, rel=1e-4)
        assert len({round(one, 4) for one, _ in pairs}) == len(pairs) - 3  # nothing, merging and unloading change none
        assert of_metrics == ([pytest.approx(one, rel=1e-5) for one, _ in pairs[1:]] if rank == 0 else [])
        assert len(alone) == (0 if rank else 3)
        assert "have changed since the optimizer AdamW was used" in error


# -- factors of LoRA layers --------------------------------------------------------------------------------------------


class Scales(TrainerCallback):  # type: ignore[misc]
    def __init__(self, event: str, way: str) -> None:
        setattr(self, event, self.act)
        self.way = way

    def act(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for module in model.modules():
            if hasattr(module, "set_scale"):
                if self.way == "set_scale":
                    module.set_scale("default", 0.4)
                elif self.way == "scale_layer":
                    module.scale_layer(0.7)
                else:
                    module.scaling["default"] *= 0.7


CHANGES = (("on_step_begin", "dict"),)
MORE = (
    ("on_train_begin", "set_scale"), ("on_log", "dict"), ("on_evaluate", "set_scale"), ("on_epoch_begin", "dict"),
    ("on_epoch_end", "scale_layer"),
)  # fmt: skip
RUN = {"max_steps": 4, "logging_steps": 1, "lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 2}


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [value for log in trainer.state.log_history for name, value in log.items() if name in ("loss", "eval_loss")]


def scaled(rank: int, world_size: int, folder: str, changes: Any = CHANGES) -> Any:
    found = []
    for event, way in changes:
        trainer = trainer_of(folder, tiny_lora("llama_gqa_bias"), **TWO, **RUN)
        trainer.eval_dataset = EQUAL
        trainer.add_callback(Scales(event, way))
        found.append(losses(trainer))
        trainer.close_engine()
    return found


def wrongly_scaled(rank: int, world_size: int, folder: str) -> Any:
    errors = []
    for event, on_ranks, changes in (
        ("on_step_begin", (0,), {}),
        ("on_substep_end", (0, 1), {"gradient_accumulation_steps": 2}),
    ):
        trainer = trainer_of(folder, tiny_lora("llama_gqa_bias"), **{**TWO, "hotspa_mini_batch_size": None}, **changes)
        if rank in on_ranks:
            trainer.add_callback(Scales(event, "dict"))
        try:
            trainer.train()
            errors.append("")
        except Exception as error:
            errors.append(str(error))
    return errors


def stock_losses(folder: Any, event: str, way: str) -> list[float]:
    args = TrainingArguments(str(folder), **{**SETTINGS, **RUN})
    stock = Trainer(tiny_lora("llama_gqa_bias"), args, data_collator=padded, train_dataset=ROWS, eval_dataset=EQUAL)
    stock.add_callback(Scales(event, way))
    return losses(stock)


@pytest.mark.parametrize("changes", [CHANGES, pytest.param(MORE, marks=pytest.mark.slow)])
def test_factors_that_callbacks_change_act_as_with_the_stock_trainer(changes: Any, tmp_path: Any) -> None:
    results = run_ranks(2, scaled, str(tmp_path), changes, timeout=120)
    for number, (event, way) in enumerate(changes):
        expected = stock_losses(tmp_path, event, way)
        for found in results:
            assert found[number] == pytest.approx(expected, rel=2e-4), (event, way)


def test_factors_changed_on_one_rank_or_within_a_step_are_errors(tmp_path: Any) -> None:
    for of_one, within in run_ranks(2, wrongly_scaled, str(tmp_path), timeout=120):
        assert "LoRA scalings" in of_one
        assert "the adapter was changed within a step, with the LoRA scalings" in within
