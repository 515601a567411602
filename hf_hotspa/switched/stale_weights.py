"""While training goes on, the weights in `trainer.model` are old: looking at them is an error, not an answer.

The weights that are trained live in the master store; those of the user's model are what they were when they were last
written back. Owns the guard on its parameters. It promises:

* Between the first mini-batch after the weights were current and the next time they are, everything that would read or
  change the values of a trained parameter, or its gradient, raises a `HotspaError` that says what to do. What the
  parameters are (name, shape, dtype, device, `requires_grad`, number of elements) can be looked at always.
* Parameters stay the same objects, so what refers to them (optimizers, tied weights, references of the user's) holds.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from hf_hotspa.errors import HotspaError

_FACTS = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_meta", "is_leaf", "is_cuda", "is_cpu", "is_xpu",
    "is_mps", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "names", "size", "dim", "numel", "nelement",
    "element_size", "stride", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "__len__",
    "requires_grad_", "is_same_size", "type", "retains_grad", "grad_fn", "output_nr",
}  # fmt: skip
"""What says nothing about the values."""

_GRADIENTS = {"grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "_backward_hooks"}

_allowed = threading.local()


def _name(function: Any) -> str:
    """The name of what is called; of the attribute, for those that get or set one."""
    name = str(getattr(function, "__name__", function))
    return function.__self__.__name__ if name in ("__get__", "__set__", "__delete__") else name


def _refusal(name: str) -> HotspaError:
    if name in _GRADIENTS:
        return HotspaError(
            f"a parameter of trainer.model has no gradient here ({name})",
            why="gradients are spread over the ranks, in the master store, and parameters of the model never get any",
            fix="call trainer.engine.full_gradients() on every rank, or look at grad_norm in the log",
        )
    return HotspaError(
        f"the weights in trainer.model are not those of this step of the training ({name})",
        why="the weights that are trained are spread over the ranks; the model is brought up to date for on_log, on_evaluate, "
        "on_save, on_epoch_end, on_train_end and compute_metrics, and after training",
        fix="look at them there, or call trainer.materialize() on every rank first",
    )


@cache
def _guarded(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """A class of parameters like `kind`, whose values cannot be looked at."""

    class Guarded(kind):  # type: ignore[valid-type,misc]
        _true_class = kind

        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            name = _name(func)
            if name not in _FACTS and not getattr(_allowed, "depth", 0):
                raise _refusal(name)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        def __repr__(self, **_: Any) -> str:
            return f"Parameter of shape {tuple(self.shape)}, whose values are in the master store"

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise _refusal("copying")

        def __deepcopy__(self, memo: Any) -> Any:
            raise _refusal("copying")

    Guarded.__name__ = kind.__name__
    Guarded.__qualname__ = kind.__qualname__
    return Guarded


def guard(model: nn.Module) -> None:
    """From now on the values of the trained parameters cannot be looked at."""
    for parameter in model.parameters():
        if parameter.requires_grad and not hasattr(type(parameter), "_true_class"):
            kind: Any = type(parameter)
            parameter.__class__ = _guarded(kind)


def release(model: nn.Module) -> None:
    """The values can be looked at again: they are current, or are about to be."""
    for parameter in model.parameters():
        kind = getattr(type(parameter), "_true_class", None)
        if kind is not None:
            parameter.__class__ = kind


@contextmanager
def structure_only() -> Iterator[None]:
    """Inside, this thread may handle guarded parameters (`state_dict` for names, shapes and dtypes): it knows better
    than to use their values."""
    _allowed.depth = getattr(_allowed, "depth", 0) + 1
    try:
        yield
    finally:
        _allowed.depth -= 1
