"""Whether the masks that a family makes hide what the packed attention hides, for layers whose tokens see both sides."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.parallel.attention import calls_attention, window_of
from hf_hotspa.parallel.fused_attention import hidden_pairs


class InPlaceOf(nn.Module):
    """In the place of a module, on a shallow copy of a model: has the module's attributes, and another forward."""

    def __init__(self, module: nn.Module, run: Callable[..., object]) -> None:
        super().__init__()
        self.__dict__.update(_module=module, _run=run)  # not a child: its weights may be old

    def forward(self, *args: object, **kwargs: object) -> object:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _skip(masks: list[Tensor], hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
    """The forward of a layer that does nothing but note its masks, and of what follows the layers."""
    size = hidden.shape[1]
    masks += [x[0, 0] for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.shape[2:] == (size, size)]
    return hidden


def refuse_other_masks(base: PreTrainedModel) -> None:
    """Runs a base without its layers on a row that is longer than every window. Reads no weights. Raises `UnsupportedError`:
    the masks that it gives a layer hide other tokens than the windows of its attention modules; or it does not run."""
    family = base.config.get_text_config().model_type
    layers = {
        f"{name}.{number}": layer
        for name, stack in base.named_modules()
        if isinstance(stack, nn.ModuleList)
        for number, layer in stack.named_children()
        if any(map(calls_attention, layer.modules()))
    }
    windows = {name: {window_of(m) for m in layer.modules() if calls_attention(m)} for name, layer in layers.items()}
    size = 2 + max((window for own in windows.values() for window in own if window is not None), default=6)
    masks: dict[str, list[Tensor]] = {name: [] for name in layers}
    skipped = {name: InPlaceOf(layer, partial(_skip, masks[name])) for name, layer in layers.items()}
    try:
        with torch.no_grad(), torch.device("cpu"):
            _without_weights(base, skipped, size)(
                input_ids=torch.zeros(1, size, dtype=torch.int64), attention_mask=torch.ones(1, size, dtype=torch.int64)
            )
    except Exception as error:  # whatever the family's code raises
        raise UnsupportedError(
            f"the masks of {family}, whose tokens see later ones, cannot be looked at: {type(error).__name__}: {error}"
        ) from error
    every = slice(0, size)
    for name, own in windows.items():
        expected = [~hidden_pairs(every, every, window, True, torch.device("cpu")) for window in own]
        seen = [mask if mask.dtype == torch.bool else mask == 0 for mask in masks[name]]
        if not all(
            any(torch.equal(mask, other) for other in expected)
            for mask in seen or [torch.ones(size, size, device="cpu") > 0]
        ):
            raise UnsupportedError(
                f"the layer {name} of {family} is given a mask that hides other tokens than its windows ({own})",
                why="its tokens see later ones, and packed attention knows windows alone",
                fix="train it with transformers' Trainer",
            )


def _without_weights(base: PreTrainedModel, layers: Mapping[str, nn.Module], size: int) -> nn.Module:
    """A shallow copy of a base on CPU: with other layers, by name, and without embeddings and what follows the layers."""
    hidden = torch.zeros(1, size, base.config.get_text_config().hidden_size, dtype=torch.float32)
    embedding = base.get_input_embeddings()

    def copied(module: nn.Module, prefix: str) -> nn.Module:
        if prefix in layers:
            return layers[prefix]
        if any(m is embedding for m in module.modules()) and module is not base:
            return InPlaceOf(module, lambda *_, **__: hidden)
        if module is not base and not any(name.startswith(f"{prefix}.") for name in layers):
            has_parameters = any(True for _ in module.parameters())
            return InPlaceOf(module, partial(_skip, [])) if has_parameters else _filled(base, module)
        made = copy.copy(module)
        made._modules = {
            name: child if child is None else copied(child, f"{prefix}.{name}".lstrip("."))
            for name, child in module._modules.items()
        }
        if hasattr(made, "config"):
            made.config = copy.deepcopy(made.config)
            made.config._attn_implementation = "eager"
        vars(made).pop("forward", None)
        return made

    return copied(base, "")


def _filled(base: PreTrainedModel, module: nn.Module) -> nn.Module:
    """A module without parameters, with its buffers on CPU."""
    if not any(buffer.device.type != "cpu" for buffer in module.buffers()):
        return module
    made = copy.deepcopy(module).to_empty(device="cpu")
    for own in made.modules():
        base._init_weights(own)
    return made
