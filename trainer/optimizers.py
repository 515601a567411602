"""Which optimizers may run on the master store: those that treat every element on its own.

Each rank holds a flat share of every weight, cut anywhere. An update that looks at whole matrices, rows, blocks or norms
of a tensor would change with the cut, hence with the number of ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers.training_args import OptimizerNames

from hf_hotspa.engine.cpu_adam import CPU_ADAM
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
    """Tries an optimizer class of the user's on a small vector, whole and in pieces.

    Raises:
        UnsupportedError: the pieces do not end up as the whole does, or it does not take 1-D parameters.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    _try_out(name, lambda parameters: optimizer_class([{"params": parameters}], **kwargs), torch.device("cpu"))


def check_optimizer(optimizer: Optimizer, elsewhere: Mapping[int, str] | None = None) -> None:
    """The same for an optimizer object, of which copies are tried; it is unchanged, and so are its parameters.

    Args:
        elsewhere: The ids of parameters that it must know nothing of, and their names.

    Raises:
        UnsupportedError: as above; or it refers to one of those parameters outside of its groups.
    """
    name = type(optimizer).__name__
    if name == CPU_ADAM:
        return  # ours; a copy of it would take the C++ object with it
    devices = [p.device for group in optimizer.param_groups for p in group["params"]]
    met = _Met(elsewhere or {})
    _try_out(name, lambda parameters: _copy(optimizer, parameters, met), devices[0] if devices else torch.device("cpu"))
    if met.found:
        raise UnsupportedError(
            f"the optimizer {name} refers to {met.found[0]!r} outside of its parameter groups",
            why="it would go on with the parameter of the model, which is not the one that is trained",
            fix="keep parameters in param_groups only, or use an optimizer such as torch.optim.AdamW",
        )


class _Met(dict[int, Any]):
    """The memo of a deep copy, which remembers whether it met certain objects."""

    def __init__(self, watched: Mapping[int, str]) -> None:
        super().__init__()
        self.watched, self.found = watched, list[str]()

    def get(self, key: int, default: Any = None) -> Any:
        if key in self.watched:
            self.found.append(self.watched[key])
            return None
        return super().get(key, default)


def _copy(optimizer: Optimizer, parameters: list[nn.Parameter], met: _Met) -> Optimizer:
    """An optimizer like this one without its state, each of whose groups has these parameters (copies of them)."""
    met.clear()
    copied = object.__new__(type(optimizer))
    met[id(optimizer)] = copied
    groups = []
    for group in optimizer.param_groups:
        options = {key: deepcopy(value) for key, value in group.items() if key != "params"}
        groups.append({"params": [nn.Parameter(p.detach().clone()) for p in parameters], **options})
        met[id(group)] = groups[-1]
        met[id(group["params"])] = groups[-1]["params"]
        met.update((id(p), None) for p in group["params"])
    met[id(optimizer.param_groups)] = groups
    met[id(optimizer.state)] = defaultdict[Any, Any](dict)
    for key, value in vars(optimizer).items():
        if key == "step":
            continue  # schedulers wrap it, bound to the original
        if key.endswith("_hooks"):
            copied.__dict__[key] = type(value)()
            continue
        try:
            copied.__dict__[key] = deepcopy(value, met)
        except Exception:  # locks, files and the like are shared
            copied.__dict__[key] = value
    return copied


def _try_out(name: str, make: Callable[[list[nn.Parameter]], Optimizer], device: torch.device) -> None:
    """Compares what three steps make of a vector of 12, of its two pieces, and of the first piece alone, which must not
    depend on the second."""
    start, slope = torch.linspace(-1.0, 2.0, 12, device=device), torch.linspace(0.1, 5.0, 12, device=device).square()
    ends = []
    try:
        for cut in ([12], [5, 7], [5]):
            optimizer = make([nn.Parameter(part.clone()) for part in start[: sum(cut)].split(cut)])
            groups = [group["params"] for group in optimizer.param_groups]
            for step in (1.0, -3.0, 0.5):
                for parameters in groups:
                    for parameter, part in zip(parameters, (step * slope)[: sum(cut)].split(cut), strict=True):
                        parameter.grad = part.clone()
                optimizer.step()
            ends.append(torch.stack([torch.cat([p.detach() for p in parameters]) for parameters in groups]))
    except Exception as error:
        raise UnsupportedError(
            f"the optimizer {name} does not run on 1-D parameters: {type(error).__name__}: {error}",
            why=_WHY,
            fix="use an elementwise optimizer such as torch.optim.AdamW",
        ) from error
    whole, pieces, alone = ends
    for actual, expected in ((pieces, whole), (alone, whole[:, :5])):
        if not torch.allclose(actual, expected, rtol=1e-5, atol=1e-6):  # kernels may round tails of vectors otherwise
            raise UnsupportedError(
                f"the optimizer {name} is not elementwise: cut in two, a vector is updated in another way",
                why=_WHY,
                fix="use an elementwise optimizer such as torch.optim.AdamW",
            )
