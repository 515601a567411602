"""Which optimizers may run on the master store: those that treat every element on its own.

Each rank holds a flat share of every weight, cut anywhere. An update that looks at whole matrices, rows, blocks or norms
of a tensor would change with the cut, hence with the number of ranks.
"""

from typing import Any

import torch
from torch import nn
from transformers.training_args import OptimizerNames

from hf_hotspa.errors import UnsupportedError

ELEMENTWISE_OPTIMIZERS = (
    OptimizerNames.ADAMW_TORCH,
    OptimizerNames.ADAMW_TORCH_FUSED,
    OptimizerNames.SGD,
    OptimizerNames.ADAGRAD,
    OptimizerNames.RMSPROP,
)
"""The values of `--optim` that are elementwise and need no further package or device."""

_WHY = "every rank updates a flat share of each weight, and only elementwise optimizers are exact on that"
_REASONS = {
    "whole matrices or the norm of whole tensors": (
        "adafactor", "lomo", "adalomo", "galore", "apollo", "stable_adamw", "grokadamw",
    ),
    "whole blocks of elements": ("8bit", "4bit"),
    "weights of its own in evaluation": ("schedule_free",),
}  # fmt: skip


def check_optimizer_name(optim: OptimizerNames) -> None:
    """Refuses a value of `--optim`.

    Raises:
        UnsupportedError: it is not elementwise, or needs a package that is not a dependency.
    """
    if optim in ELEMENTWISE_OPTIMIZERS:
        return
    needs = next((need for need, parts in _REASONS.items() if any(part in optim.value for part in parts)), None)
    names = ", ".join(o.value for o in ELEMENTWISE_OPTIMIZERS)
    raise UnsupportedError(
        f"the optimizer {optim.value!r} cannot be honoured",
        why=f"it needs {needs}; {_WHY}" if needs else "it needs another package or device, and nobody has tested it",
        fix=f"use one of {names}, or pass optimizer_cls_and_kwargs with an elementwise class",
    )


def check_elementwise(optimizer_class: Any, kwargs: dict[str, Any]) -> None:
    """Tries an optimizer class of the user's on a small vector, whole and in two pieces.

    Raises:
        UnsupportedError: the pieces do not end up as the whole does, or it does not take 1-D parameters.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    whole, pieces = torch.linspace(-1.0, 2.0, 12), []
    try:
        for cut in ([12], [5, 7]):
            parameters = [nn.Parameter(part.clone()) for part in whole.split(cut)]
            optimizer = optimizer_class([{"params": parameters}], **kwargs)
            for step in (1.0, -3.0, 0.5):
                gradient = step * torch.linspace(0.1, 5.0, 12).square()
                for parameter, part in zip(parameters, gradient.split(cut), strict=True):
                    parameter.grad = part.clone()
                optimizer.step()
            pieces.append(torch.cat([parameter.detach() for parameter in parameters]))
    except Exception as error:
        raise UnsupportedError(
            f"the optimizer {name} does not run on 1-D parameters: {type(error).__name__}: {error}",
            why=_WHY,
            fix="use an elementwise optimizer such as torch.optim.AdamW",
        ) from error
    if not torch.allclose(*pieces, rtol=1e-5, atol=1e-6):  # kernels may round tails of vectors in another way
        raise UnsupportedError(
            f"the optimizer {name} is not elementwise: cut in two, a vector is updated in another way",
            why=_WHY,
            fix="use an elementwise optimizer such as torch.optim.AdamW",
        )
