"""Training arguments that older releases of transformers name otherwise, and recomputation without their help."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint

from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.model.replica import recompute_layers
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.given_arguments import recompute_argument, workers_context
from tests.families import tiny_model


@dataclass
class Older:
    """What a transformers without `activation_checkpointing` has."""

    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    model_recomputes = False


@pytest.mark.parametrize(
    ("asked", "options", "every"),
    [(False, None, 0), (True, {"use_reentrant": True}, 1), (True, {"every_n_layers": 2}, 2)],
)
def test_the_older_name_asks_for_recomputation(asked, options, every):
    args = Older(asked, options)
    assert recompute_argument(args) == "gradient_checkpointing"
    assert HotSPaTrainingArguments.hotspa_recompute_every.fget(args) == every


def test_a_refusal_has_the_name_that_was_written():
    with pytest.raises(UnsupportedError, match=r"gradient_checkpointing_kwargs=\{'use_reentrant': 3\}"):
        HotSPaTrainingArguments.hotspa_recompute_every.fget(Older(True, {"use_reentrant": 3}))


def test_how_workers_start_where_there_is_no_such_argument():
    assert workers_context(Older()) is None
    assert workers_context(SimpleNamespace(dataloader_multiprocessing_context="fork")) == "fork"


def test_a_family_that_cannot_says_so():
    model = tiny_model("llama_gqa_bias")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="cannot recompute its layers"):
        recompute_layers(model, checkpoint, 1)
