"""Gradients that accumulate in a wider dtype than their parameter has: bf16 weights, fp32 sums.

A torch that has `Tensor.grad_dtype` adds to such a `.grad` itself. For an older one, which refuses it, a hook adds what
each backward has left to the buffer, and takes it from the parameter: the same sums, bit for bit, but for a weight that one
backward uses several times (tied embeddings), whose uses are summed in its own dtype first; and a gradient of one
parameter more in memory while it is added.
"""

import torch
from torch import Tensor, nn

KNOWS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
_BUFFER = "_hotspa_gradient"


def widen(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Lets the gradients of a parameter accumulate in a dtype. Before other hooks of the parameter are registered.

    Args:
        dtype: That of the buffers that `bind_gradient` will get.
    """
    if KNOWS_GRAD_DTYPE:
        parameter.grad_dtype = dtype
    elif dtype != parameter.dtype:
        setattr(parameter, _BUFFER, None)
        parameter.register_post_accumulate_grad_hook(_move)


def bind_gradient(parameter: nn.Parameter, buffer: Tensor | None) -> None:
    """Makes a buffer, of the parameter's shape, what backward passes add to; None: nothing does any more."""
    if hasattr(parameter, _BUFFER):
        parameter.grad = None
        setattr(parameter, _BUFFER, buffer)
    else:
        parameter.grad = buffer


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """The buffer that is bound."""
    return getattr(parameter, _BUFFER) if hasattr(parameter, _BUFFER) else parameter.grad


def _move(parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    buffer = getattr(parameter, _BUFFER)
    if buffer is not None and gradient is not None:
        buffer.add_(gradient)
