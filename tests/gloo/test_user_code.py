"""Code of the user's own that looks at the model in training: what is current where, and an error on every rank elsewhere."""

import re

import pytest
import torch
from transformers import TrainerCallback

from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows

pytestmark = pytest.mark.gloo


class At(TrainerCallback):
    """Calls a function with the model at an event."""

    def __init__(self, event, look):
        setattr(self, event, self.called)
        self.look, self.seen = look, []

    def called(self, args, state, control, model=None, **kwargs):
        self.seen.append(self.look(model))


def trainer_of(folder, *callbacks, **changes):
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    rows = random_rows(20, 163, longest=60, seed=3)
    args = HotSPaTrainingArguments(
        **{
            "output_dir": folder, "max_steps": 2, "learning_rate": 5e-3, "logging_steps": 1, "use_cpu": True,
            "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "hotspa_strategies": "dp2:16@32,tp2:64@64",
            "hotspa_mini_batch_size": 6, "hotspa_report": False, **changes,
        }
    )  # fmt: skip
    model = tiny_model("llama_gqa_bias")
    return HotSPaTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:6], callbacks=list(callbacks))


def look_where_the_weights_are_old(rank, world_size, folder):
    from hf_hotspa.errors import CallbackError

    def first(model):
        return next(model.parameters())

    looks = {
        "on_step_end": lambda model: model(torch.tensor([[1, 2, 3]])),
        "on_step_begin": lambda model: model.state_dict() if first(model).requires_grad else None,
        "on_pre_optimizer_step": lambda model: first(model).grad,
        "on_optimizer_step": lambda model: first(model).data.mul_(0.5),
    }
    errors = {}
    for event, look in looks.items():
        # on one rank alone: the other must not be left behind
        trainer = trainer_of(f"{folder}/{event}", *([At(event, look)] if rank == 0 else []))
        before = [p.detach().clone() for p in trainer.model.parameters()]
        try:
            trainer.train()
        except CallbackError as error:
            errors[event] = str(error)
        trainer.materialize()
        assert any((p != old).any() for p, old in zip(trainer.model.parameters(), before, strict=True))
        trainer.close_engine()
    # a callback of one rank alone may look, and call the model, where all ranks are together
    batch = {name: torch.tensor([[5, 6, 7]]) for name in ("input_ids", "labels")}
    at = At("on_evaluate", lambda model: (float(first(model).norm()), float(model(**batch).loss)))
    trainer = trainer_of(f"{folder}/eval", *([at] if rank == 0 else []), eval_strategy="steps", eval_steps=1)
    start = float(first(trainer.model).norm())
    trainer.train()
    end = float(first(trainer.model).norm())
    trainer.close_engine()
    return errors, at.seen, (start, end), float(trainer.model(**batch).loss)


def test_old_weights_cannot_be_looked_at(tmp_path):
    results = run_ranks(2, look_where_the_weights_are_old, str(tmp_path), timeout=120)
    for errors, *_ in results:
        assert set(errors) == {"on_step_end", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step"}
        assert re.search(
            r"are not the weights of this training step \(embedding\).*materialize", errors["on_step_end"], re.S
        )
        assert "(detach)" in errors["on_step_begin"]
        assert "has no gradient here (grad)" in errors["on_pre_optimizer_step"]
        assert "(data)" in errors["on_optimizer_step"]
    _, seen, (start, end), loss = results[0]
    assert len(seen) == 2
    assert start != seen[0][0] != seen[1][0] == end
    assert seen[0][1] != seen[1][1] == loss
