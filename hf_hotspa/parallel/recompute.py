"""Recomputation (`+rc`) of a replica's layers: every n-th of the layers that its stage holds, on any transformers release.

The models' own enabling (`gradient_checkpointing_enable`) also puts hooks on embeddings, which later stages do not have,
and only newer releases can leave layers out.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_hotspa.errors import ModelError
from hf_hotspa.parallel.isolation import keep_pack


def recompute_layers(model: PreTrainedModel, recompute: Callable[..., Any], every: int) -> None:
    """Lets every `every`-th layer keep its input only, and compute the rest anew in the backward pass.

    Raises:
        ModelError: the family cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} cannot recompute its layers",
            fix="leave activation_checkpointing and +rc off, or lower the tokens per pack",
        )
    model._set_gradient_checkpointing(True, recompute)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0
        layer._gradient_checkpointing_func = keep_pack(layer, recompute)
