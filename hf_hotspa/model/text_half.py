"""The language half of a multimodal model: what rows of text train.

Replicas are the multimodal class without its other half: the encoders of images and sound and what projects their
output are taken out, and the class's inner forward, which would put that output among the embeddings, goes straight to the
language model. Names stay those of the whole model, which keeps the weights of the other half as they are, in host memory; they
are saved with the rest.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.parallel.adapters import base_layer
from hf_hotspa.parallel.head_loss import BaseOutput

_OTHER_KINDS = ("pixel", "image", "video", "audio")
"""In the names of inputs that are not text."""


def text_base(model: PreTrainedModel) -> str | None:
    """The dotted name of the language model inside of a multimodal model; None for a model of text alone."""
    if model.config.get_text_config() is model.config:
        return None
    embedding = model.get_input_embeddings()
    around = [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, PreTrainedModel) and any(inner is embedding for inner in module.modules())
    ]
    return around[-1] if around and "." in around[-1] else None  # parents come first


def of_text(model: PreTrainedModel) -> Callable[[str], bool]:
    """Whether a parameter, buffer or module belongs to the language half of a model, by its name; all of a model of text alone do."""
    if (base := text_base(model)) is None:
        return lambda name: True
    outer = f"{base.partition('.')[0]}."
    return lambda name: not name.startswith(outer) or f"{name}.".startswith(f"{base}.")


def other_half(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters that rows of text do not train, by name."""
    is_of_text = of_text(model)
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if not is_of_text(name)}


def refuse_idle_adapters(model: Any) -> None:
    """Refuses adapters in the other half of a multimodal model.

    Raises:
        UnsupportedError: naming the first.
    """
    if not isinstance(model, PreTrainedModel):
        return
    is_of_text = of_text(model)
    idle = [name for name, m in model.named_modules() if base_layer(m) is not m and not is_of_text(name)]
    if idle:
        language = (text_base(model) or "").replace(".", "[.]")
        raise UnsupportedError(
            f"{len(idle)} layers with adapters are not in the language model, the first {idle[0]!r}",
            why="rows of text do not train them",
            fix=f"name those of the language model alone: target_modules=r'{language}.*[.](q_proj|v_proj)'",
        )


def keep_text(model: PreTrainedModel) -> None:
    """Takes the other half out of a multimodal model, and leads its forward past it; other models stay as they are."""
    if (base := text_base(model)) is None:
        return
    outer, _, inner = base.rpartition(".")
    around: Any = model.get_submodule(outer)
    for name, child in list(around.named_children()):
        if name != inner and any(True for _ in child.parameters()):
            setattr(around, name, None)
    around.forward = TextForward(around, inner)


class TextForward:
    """The forward of what holds the language model beside encoders, for rows of text."""

    def __init__(self, around: nn.Module, inner: str) -> None:
        self._around, self._inner = around, inner

    def __call__(self, **inputs: Any) -> BaseOutput:
        given = {name: value for name, value in inputs.items() if value is not None}
        if unknown := [name for name in given if any(kind in name for kind in _OTHER_KINDS)]:
            raise UnsupportedError(
                f"the inputs {unknown}", why="rows of text are trained here, without images or sound"
            )
        out = getattr(self._around, self._inner)(**given)
        return BaseOutput(last_hidden_state=out.last_hidden_state)
