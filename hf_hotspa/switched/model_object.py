"""What callers hang on a model object, and calls of the object itself: replicas are built from its class without them.

* TRL's `add_fused_lm_head` and PEFT's input hooks are lifted off while an engine is built, and read where they say something;
* a forward of the object goes to the switched model, whose weights are the current ones. Generation runs on the object.
"""

import functools
import inspect
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.parallel.own_loss import SequenceLoss


def only_requires_grad(hook: Any) -> bool:
    """Whether a forward hook does no more than to make the output require a gradient, which changes no number.

    Scripts, transformers, PEFT and TRL hang it on the embedding for gradient checkpointing. It is seen from what the hook does:
    its code reaches for nothing but `requires_grad_`, and a tensor comes back from it as it was.
    """
    code = getattr(hook, "__code__", None)
    if code is None or code.co_freevars or not set(code.co_names) <= {"requires_grad_", "requires_grad"}:
        return False
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        return False
    before = torch.arange(6.0).view(1, 2, 3)
    output = before.clone()
    try:
        given = hook(None, (), output)
    except Exception:  # whatever it wants with its module and inputs
        return False
    return (given is None or given is output) and output.requires_grad and torch.equal(output, before)


def fused_head(model: nn.Module) -> dict[str, Any]:
    """What TRL's `add_fused_lm_head` was asked for; it tells nobody, but the closure of the forward has it."""
    forward = vars(model).get("forward")
    function = getattr(forward, "__func__", None)
    return dict(inspect.getclosurevars(function).nonlocals) if function is not None else {}


@contextmanager
def as_built(model: nn.Module) -> Iterator[None]:
    """Without a forward or a loss function that were put on the object, and without input hooks."""
    own = {name: vars(model).pop(name) for name in ("forward", "_loss_function") if name in vars(model)}
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if only_requires_grad(hook):
                del module._forward_hooks[key]
    try:
        yield
    finally:
        vars(model).update(own)


class Apart:
    """Whether this rank is in code that runs on each rank by itself, perhaps on this one alone (callbacks): calls of model objects
    are then their own, with the weights that the object has, and others need not take part."""

    depth = 0


def route(model: nn.Module, switched: Any) -> None:
    """Calls of the model object go to the switched model: trainers call `self.model`, too, whose weights are old ones.

    But for generation, and for those in code that runs `Apart`.
    """
    target = weakref.ref(switched)
    forward = type(model).forward

    @functools.wraps(forward)  # `generate` looks at the signature
    def routed(self: Any, *args: Any, **kwargs: Any) -> Any:
        to = None if Apart.depth else target()
        if to is None or kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
            if to is not None:
                to.refresh()
            return forward(self, *args, **kwargs)
        return to.forward(*args, **kwargs)

    model.forward = types.MethodType(routed, model)


def unroute(model: nn.Module) -> None:
    """Calls of the model object are its own again."""
    vars(model).pop("forward", None)


def lora_layers(model: nn.Module) -> list[Any]:
    """The LoRA layers of a model; models themselves have a method of the name that tells them."""
    return [module for module in model.modules() if isinstance(getattr(module, "disable_adapters", None), bool)]


def before_steps(switched: Any) -> RemovableHandle:
    """Calls `step_begins` of the switched model before any optimizer that holds its parameters makes a step."""
    target = weakref.ref(switched)
    own = {id(parameter) for _, parameter in switched.named_parameters()}

    def before(optimizer: Optimizer, *_: Any) -> None:
        to = target()
        if to is not None and any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            to.step_begins()

    return register_optimizer_step_pre_hook(before)


def refuse_losses(options: EngineOptions) -> None:
    """What has no meaning where the caller computes the loss.

    Raises:
        UnsupportedError: naming it.
    """
    losses = {"loss": isinstance(options.loss, SequenceLoss), "label_smoothing": options.label_smoothing}
    for name, value in losses.items():
        if value:
            raise UnsupportedError(
                f"the engine option {name} in a switched model",
                why="the caller computes the loss",
                fix=f"leave {name} out; compute the loss from what forward returns",
            )


def replaced_loss(model: nn.Module) -> Any:
    """The loss function that was put on the object (`model.loss_function = f`); None for that of causal language models."""
    function = vars(model).get("_loss_function")
    return None if function is ForCausalLMLoss else function
