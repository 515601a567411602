"""Hooks that only make the embedding's output require a gradient, however they came there, change nothing."""

from typing import Any

import pytest
from peft import prepare_model_for_kbit_training

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.switched.model_object import only_requires_grad
from tests.families import tiny_model
from tests.moves import Kit

FAMILY = "llama_gqa_bias"
seen: list[Any] = []


def by_hand(module, inputs, output):
    output.requires_grad_(True)


def assigned(module, inputs, output):
    output.requires_grad = True
    return output


def scaled(module, inputs, output):
    output.requires_grad_(True)
    return output * 1.5


def changed(module, inputs, output):
    output.requires_grad_(False)
    output *= 2


def recorded(module, inputs, output):
    seen.append(output.requires_grad_(True))


def indirect(module, inputs, output):
    return (lambda: print(output.requires_grad_(True)))()


class MakesInputs:
    def __call__(self, module, inputs, output):
        output.requires_grad_(True)


def test_hooks_are_known_by_what_they_do():
    assert only_requires_grad(by_hand)
    assert only_requires_grad(assigned)
    assert only_requires_grad(lambda m, i, o: o.requires_grad_(True))
    model = tiny_model(FAMILY)
    model.enable_input_require_grads()
    assert all(map(only_requires_grad, model.get_input_embeddings()._forward_hooks.values()))
    for other in (scaled, changed, recorded, indirect, print, MakesInputs(), lambda m, i, o: None if m.training else o):
        assert not only_requires_grad(other)


def train(stock, model, folder, **options):
    kit = Kit(stock, 1, folder)
    logs = kit.train(kit.trainer(model=model, args=kit.arguments(max_steps=2, **options)))["logs"]
    return [log["loss"] for log in logs if "loss" in log]


@pytest.mark.parametrize("way", ["hook", "kbit", "re-entrant"])
def test_a_prepared_model_is_trained_as_with_the_stock_trainer(way, tmp_path):
    def model():
        made = tiny_model(FAMILY)
        if way == "hook":
            made.get_input_embeddings().register_forward_hook(by_hand)
        elif way == "kbit":
            made = prepare_model_for_kbit_training(made)
            made.requires_grad_(True)
        else:
            made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        return made

    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": way != "hook"}}
    expected, ours = (train(stock, model(), tmp_path, **checkpointing) for stock in (True, False))
    assert ours == pytest.approx(expected, rel=1e-4)


def test_a_hook_that_does_more_is_refused(tmp_path):
    model = tiny_model(FAMILY)
    model.get_input_embeddings().register_forward_hook(scaled)
    with pytest.raises(UnsupportedError, match="embed_tokens' has forward hooks"):
        train(False, model, tmp_path)
