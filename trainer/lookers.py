"""Which callbacks may read or change the model in an event: decided before training, from their code and what they have.

The weights are spread over the ranks, and bringing them into the model object after every step costs as much as a load of
all weights. It is left out if no callback can look: its methods, and the functions that they use, name no model, pass
their keyword arguments on to nobody, and none has a module, parameter or trainer.
"""

import dis
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback

from hf_hotspa.errors import UnsupportedError

_NAMES = frozenset(("model", "model_wrapped", "trainer", "optimizer"))
_OF_GRADIENTS = frozenset(("grad", "clip_grad_norm_", "clip_grad_value_"))
_OF_OURS = frozenset(("engine", "switched", "full_gradients"))
_LIBRARIES = ("transformers", "hf_hotspa", "torch", "numpy", "logging", "builtins")
_MOST = 1000
GRADIENT_EVENTS = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
"""The events at which parameters have gradients."""


def may_look(callback: TrainerCallback, event: str) -> bool:
    """Whether a callback, of neither transformers nor this package, defines an event and may look at the model."""
    return _defines(callback, event) and _Walk(callback).looks


def refuse_gradients(callbacks: Iterable[TrainerCallback]) -> None:
    """Rejects callbacks that read gradients of the model, which are spread over the ranks. Raises `UnsupportedError`,
    naming the callback and its event."""
    for callback in callbacks:
        event = next((event for event in GRADIENT_EVENTS if _defines(callback, event)), None)
        names = _Walk(callback).names if event is not None else set()
        if names & _OF_GRADIENTS and not names & _OF_OURS:
            raise UnsupportedError(
                f"{type(callback).__name__}.{event} reads gradients of the model ({min(names & _OF_GRADIENTS)})",
                why="gradients are spread over the ranks, in the master store, and parameters of the model never get any",
                fix="call trainer.engine.full_gradients() there on every rank, or read grad_norm in the log",
            )


def _defines(callback: TrainerCallback, event: str) -> bool:
    own = getattr(callback, event, None)
    is_inherited = getattr(type(callback), event, None) is getattr(TrainerCallback, event, None)
    if own is None or _package(type(callback)) in _LIBRARIES:
        return False
    return not is_inherited or event in vars(callback)


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").split(".")[0]


class _Walk:
    """Goes through an object's methods and attributes, and the functions that they use. `looks`: whether it may look at
    a model. `names`: the names that its code uses."""

    def __init__(self, value: Any) -> None:
        self.looks, self.names, self._seen = False, set[str](), dict[int, Any]()
        self._of(value)

    def _of(self, value: Any) -> None:
        if value is None or isinstance(value, str | bytes | int | float | types.ModuleType) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module | nn.Parameter | Trainer | Optimizer) or len(self._seen) > _MOST:
            self.looks = True
        elif isinstance(value, types.MethodType):
            self._all((value.__func__, value.__self__))
        elif isinstance(value, types.FunctionType):
            self._of_function(value)
        elif isinstance(value, staticmethod | classmethod | property):
            self._of(getattr(value, "__func__", None) or getattr(value, "fget", None))
        elif isinstance(value, Mapping):
            self._all([*value.values()])
        elif isinstance(value, list | tuple | set | frozenset):
            self._all([*value])
        else:
            self._of_object(value)

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._of(value)

    def _of_object(self, value: Any) -> None:
        cls = value if isinstance(value, type) else type(value)
        if _package(cls) in _LIBRARIES:
            return
        if not isinstance(value, type):
            self._all([*getattr(value, "__dict__", {}).values()])
        for base in cls.__mro__:
            if _package(base) not in _LIBRARIES:
                self._all([one for one in vars(base).values() if hasattr(one, "__get__") or callable(one)])

    def _of_function(self, function: Any) -> None:
        if _package(function) in _LIBRARIES:
            return
        names = set[str]()
        self._of_code(function.__code__, names)
        self.names |= names
        self._of(getattr(function, "__wrapped__", None))
        for cell in function.__closure__ or ():
            try:
                self._of(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
        self._all([function.__globals__[name] for name in names if name in function.__globals__])

    def _of_code(self, code: types.CodeType, names: set[str]) -> None:
        constants = {constant for constant in code.co_consts if isinstance(constant, str)}
        names |= {*code.co_names, *(_OF_GRADIENTS & constants)}
        if _NAMES & {*code.co_names, *code.co_varnames, *code.co_freevars, *constants}:
            self.looks = True
        if code.co_flags & 0x08:  # it takes any keyword argument
            keywords = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04)]
            for instruction in dis.get_instructions(code):
                value = instruction.argval
                is_it = value == keywords or (isinstance(value, tuple) and keywords in value)
                self.looks |= instruction.opname.startswith("LOAD") and is_it
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._of_code(inner, names)
