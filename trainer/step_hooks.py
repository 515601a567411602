"""What users attach to an optimizer: torch's step hooks, and a `step` that was replaced on the object.

They see this rank's flat shares. Before the first step with a new one, a copy of it is tried as an optimizer is: on
complete tensors and on flat shares of two ranks. If gradients, weights or numbers that it reads come out different, or
it cannot be tried, an error names it. Copies have their own closures, globals and objects: what they count stays.
"""

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as of_torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hotspa.engine.master import bare_optimizer
from hf_hotspa.errors import UnsupportedError
from hf_hotspa.trainer.described import names_in

_LIBRARIES = {
    "torch", "accelerate", "transformers", "hf_hotspa", "bitsandbytes", "torchao", "deepspeed", "trl", "peft", "logging",
}  # fmt: skip
_SHAPES = (6, 5), (3, 7), (2, 3, 4), (24,)
_SLOPES = (1.0, -3.0, 1e-3, 1e3)
_FIRST = 7  # elements of the first rank's share; of the shapes above, no multiple of a row


class _Scalars(TorchDispatchMode):
    """Records the numbers that code reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.read = list[float]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read.append(float(out))
        return out


def attached(optimizer: object) -> Iterator[tuple[str, Any]]:
    """What users attached to an optimizer, perhaps in accelerate's wrapper: `before`, `after`, `step` or `inner step`
    (in the wrapper), and the function."""
    bare = bare_optimizer(optimizer)
    hooks = {
        "before": (of_torch._global_optimizer_pre_hooks, getattr(bare, "_optimizer_step_pre_hooks", {})),
        "after": (getattr(bare, "_optimizer_step_post_hooks", {}), of_torch._global_optimizer_post_hooks),
    }
    for when, tables in hooks.items():
        for hook in chain(*(table.values() for table in tables)):
            if not _is_library(hook):
                yield when, hook
    for when, stepped in {"step": optimizer, "inner step": bare if bare is not optimizer else None}.items():
        step = None if stepped is None else vars(stepped).get("step")
        while step is not None and _of_scheduler(step):
            cells = _cells(step)
            inner = cells.get("func", cells.get("step_fn"))
            step = MethodType(inner, stepped) if isinstance(inner, FunctionType) else inner
        of_class = getattr(step, "__func__", None) is getattr(type(stepped), "step", None)
        if step is not None and not of_class and not _is_step(step) and not _is_library(step):
            yield when, step


def _is_library(function: object) -> bool:
    function = getattr(function, "func", function)
    return (getattr(function, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def _of_scheduler(function: object) -> bool:
    code = getattr(function, "__code__", None)  # `functools.wraps` copies all else
    return code is not None and code.co_filename == lr_scheduler.__file__


def _is_step(function: Any) -> bool:
    is_step = getattr(function, "__name__", "") == "step" and isinstance(function, MethodType)
    return _of_scheduler(function) or (is_step and hasattr(function.__self__, "param_groups"))


def _cells(function: Any) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__ or (), strict=True)}


def name_of(function: object) -> str:
    function = getattr(function, "func", function)
    return getattr(function, "__qualname__", None) or type(function).__name__


class _Unknown(Exception):
    """The reason why a function cannot be copied for a trial."""


class _Copies:
    """Copies of functions that use another optimizer, whose `step` does nothing in them."""

    def __init__(self, optimizer: object, tried: Optimizer) -> None:
        self._own = {id(optimizer), id(bare_optimizer(optimizer))}
        self._tried, self._made = tried, dict[int, Any]()

    def of(self, value: object) -> Any:
        if id(value) in self._own:
            return self._tried
        if isinstance(value, nn.Module | Tensor) or hasattr(value, "callback_handler"):
            raise _Unknown(f"it refers to a {type(value).__name__}")
        if _is_step(value):
            return lambda *_, **__: None
        if isinstance(value, FunctionType):
            return value if _is_library(value) else self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, partial):
            return partial(self.of(value.func), *map(self.of, value.args), **self._all(value.keywords))
        if isinstance(value, list | tuple | set) and type(value) in (list, tuple, set):
            return type(value)(map(self.of, value))
        if type(value) is dict:
            return self._all(value)
        if isinstance(value, type) or (callable(value) and not hasattr(value, "__dict__")) or _is_library(type(value)):
            return value
        return self._object(value)

    def _all(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: self.of(value) for key, value in values.items()}

    def _object(self, value: object) -> Any:
        if isinstance(value, type(torch)):
            return value
        if not hasattr(value, "__dict__"):
            return deepcopy(value)
        if id(value) not in self._made:
            made = self._made[id(value)] = object.__new__(type(value))
            vars(made).update(self._all(vars(value)))
        return self._made[id(value)]

    def _function(self, function: FunctionType) -> Any:
        if id(function) in self._made:
            return self._made[id(function)]
        inside = dict(function.__globals__)
        cells = tuple(type(cell)() for cell in function.__closure__ or ())
        made = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        self._made[id(function)] = made
        for name in names_in(function.__code__) & inside.keys():
            inside[name] = self.of(inside[name])
        for cell, value in zip(cells, _cells(function).values(), strict=True):
            cell.cell_contents = self.of(value)
        if made.__defaults__:
            made.__defaults__ = tuple(map(self.of, made.__defaults__))
        return made


def check_attached(optimizer: object, when: str, function: object) -> None:
    """Tries a copy of what is attached to an optimizer. Raises `UnsupportedError` if it is not elementwise, or that
    cannot be shown; names it."""
    kind = "a replaced step" if "step" in when else f"a step {'pre' if when == 'before' else 'post'} hook"
    what = f"the optimizer {type(bare_optimizer(optimizer)).__name__} has {kind} {name_of(function)!r}"
    try:
        whole, first, rest = (_trial(optimizer, when, function, share) for share in (None, 0, 1))
    except Exception as error:
        why = str(error) if isinstance(error, _Unknown) else f"a trial raised {type(error).__name__}: {error}"
        raise _rejected(f"{what}, which cannot be shown to be elementwise: {why}") from error
    ends, scalars = whole
    for share, (parts, read) in enumerate((first, rest)):
        numbers = torch.tensor(read), torch.tensor(scalars)
        close = len(read) == len(scalars) and torch.allclose(*numbers, rtol=1e-4, equal_nan=True)
        for end, part in zip(ends, parts, strict=True):
            cut = end.flatten()[_cut(share)]
            close = close and bool(((cut - part).abs() <= 1e-5 * end.abs().max()).all())
        if not close:
            raise _rejected(f"{what}, which is not elementwise")


def _rejected(what: str) -> UnsupportedError:
    return UnsupportedError(
        what,
        why="it sees flat shares of this rank alone, so norms, rows and shapes would be other ones than with the stock Trainer",
        fix="use max_grad_norm, override compute_loss, or work on each element alone",
    )


def _cut(share: int | None) -> slice:
    return slice(None) if share is None else slice(0, _FIRST) if share == 0 else slice(_FIRST, None)


def _trial(optimizer: object, when: str, function: object, share: int | None) -> tuple[list[Tensor], list[float]]:
    """Weights and gradients after some calls, and the numbers that were read."""
    bare = bare_optimizer(optimizer)
    made = list[list[nn.Parameter]]()
    for at, group in enumerate(bare.param_groups):
        starts = [torch.linspace(-1, 2, torch.Size(shape).numel()) * (1 + at) for shape in _SHAPES]
        own = [s.view(shape) if share is None else s[_cut(share)] for s, shape in zip(starts, _SHAPES, strict=True)]
        made.append([nn.Parameter(start.clone()) for start in own if group["params"]])
    groups = [{**group, "params": own} for group, own in zip(bare.param_groups, made, strict=True)]
    tried = Optimizer(groups, dict(bare.defaults))
    called, flat, ends = _Copies(optimizer, tried).of(function), [*chain(*made)], list[Tensor]()
    with _Scalars() as scalars, contextlib.redirect_stdout(io.StringIO()), _without_logs():
        for slope in _SLOPES:
            for at, parameter in enumerate(flat):
                shape = torch.Size(_SHAPES[at % len(_SHAPES)])
                of_step = slope * (1 + at) * torch.linspace(0.1, 5, shape.numel()).square()
                parameter.grad = of_step[_cut(share)].view(parameter.shape).clone()
            called(*{"step": (), "inner step": (None,)}.get(when, (tried, (), {})))
            ends += [p.detach().clone() for p in flat]
            ends += [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in flat]
    return ends, scalars.read


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
