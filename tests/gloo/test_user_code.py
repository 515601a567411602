"""Code of the user's own that looks at the model in training: what is current where, and an error on every rank elsewhere."""

import re

import pytest
import torch
from transformers import TrainerCallback

from hf_hotspa.errors import HotspaError
from tests.families import tiny_model
from tests.gloo.test_after_training import TWO
from tests.harness import run_ranks
from tests.unit.test_after_training import trainer_of

pytestmark = pytest.mark.gloo


class At(TrainerCallback):
    """Calls a function with the model at an event."""

    def __init__(self, event, look):
        setattr(self, event, self.called)
        self.look, self.seen = look, []

    def called(self, args, state, control, model=None, **kwargs):
        self.seen.append(self.look(model))


def look_in_a_step(rank, world_size, folder):
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
        at, trainer = At(event, look), trainer_of(f"{folder}/{event}", tiny_model("llama_gqa_bias"), **TWO)
        if rank == 0:
            trainer.add_callback(at)
        try:
            trainer.train()
        except HotspaError as error:
            errors[event] = trainer.state.global_step, str(error)
        else:
            assert len(at.seen) == 2 * (rank == 0)
        trainer.materialize()
        trainer.close_engine()
    # a callback of one rank alone may look, and call the model, where all ranks are together
    batch = {name: torch.tensor([[5, 6, 7]]) for name in ("input_ids", "labels")}
    at = At("on_evaluate", lambda model: (float(first(model).norm()), float(model(**batch).loss)))
    evaluates = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_of(f"{folder}/eval", tiny_model("llama_gqa_bias"), **TWO, **evaluates)
    if rank == 0:
        trainer.add_callback(at)
    start = float(first(trainer.model).norm())
    trainer.train()
    end = float(first(trainer.model).norm())
    trainer.close_engine()
    return errors, at.seen, (start, end), float(trainer.model(**batch).loss)


def test_a_callback_of_one_rank_reads_weights_in_a_step_and_neither_changes_them_nor_reads_gradients(tmp_path):
    results = run_ranks(2, look_in_a_step, str(tmp_path), timeout=120)
    for errors, *_ in results:
        assert set(errors) == {"on_pre_optimizer_step", "on_optimizer_step"}
        step, text = errors["on_pre_optimizer_step"]
        assert step == 0
        assert re.search(r"At.on_pre_optimizer_step reads gradients of the model \(grad\).*full_gradients", text, re.S)
        assert "with other weights" in errors["on_optimizer_step"][1]
    _, seen, (start, end), loss = results[0]
    assert len(seen) == 2
    assert start != seen[0][0] != seen[1][0] == end
    assert seen[0][1] != seen[1][1] == loss
