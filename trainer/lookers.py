"""Which callbacks may read or change the model in an event: decided before training, from their code and what they hold.

The weights are spread over the ranks, and bringing them into the model object after every step costs as much as a load of
all weights. It is left out if no callback can look: its methods, and the functions that they use, name no model, pass
their keyword arguments on to nobody, and hold no module, parameter or trainer.
"""

import dis
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback

_NAMES = frozenset(("model", "model_wrapped", "trainer", "optimizer"))
_LIBRARIES = ("transformers", "hf_hotspa", "torch", "numpy", "logging")
_MOST = 1000


def may_look(callback: TrainerCallback, event: str) -> bool:
    """Whether a callback, of neither transformers nor this package, defines an event and may look at the model."""
    own = getattr(type(callback), event, None)
    if own is None or own is getattr(TrainerCallback, event, None) or _package(type(callback)) in _LIBRARIES:
        return getattr(callback, "__dict__", {}).get(event) is not None
    return _looks(callback, set())


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").split(".")[0]


def _looks(value: Any, seen: set[int]) -> bool:
    if value is None or isinstance(value, str | bytes | int | float | types.ModuleType) or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, nn.Module | nn.Parameter | Trainer | Optimizer) or len(seen) > _MOST:
        return True
    if isinstance(value, types.MethodType):
        return _looks(value.__func__, seen) or _looks(value.__self__, seen)
    if isinstance(value, staticmethod | classmethod | property) or hasattr(value, "__wrapped__"):
        inner = getattr(value, "__wrapped__", None) or getattr(value, "fget", None)
        return _looks(inner, seen) or (isinstance(value, types.FunctionType) and _of_function(value, seen))
    if isinstance(value, types.FunctionType):
        return _of_function(value, seen)
    if isinstance(value, Mapping):
        return _any(value.values(), seen)
    if isinstance(value, list | tuple | set | frozenset):
        return _any(value, seen)
    cls = value if isinstance(value, type) else type(value)
    if _package(cls) in _LIBRARIES or _package(cls) == "builtins" or not hasattr(cls, "__dict__"):
        return False
    inside = [] if isinstance(value, type) else [*getattr(value, "__dict__", {}).values()]
    bases = [base for base in cls.__mro__ if _package(base) not in (*_LIBRARIES, "builtins")]
    functions = [f for base in bases for f in vars(base).values() if callable(f) or hasattr(f, "__get__")]
    return _any([*inside, *(f for f in functions if not isinstance(f, type))], seen)


def _any(values: Iterable[Any], seen: set[int]) -> bool:
    return any(_looks(value, seen) for value in values)


def _of_function(function: types.FunctionType, seen: set[int]) -> bool:
    if _package(function) in _LIBRARIES:
        return False
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    names = set[str]()
    if _of_code(function.__code__, names):
        return True
    used = [function.__globals__[name] for name in names if name in function.__globals__]
    return _any([*cells, *used], seen)


def _of_code(code: types.CodeType, names: set[str]) -> bool:
    """Whether code names a model or passes its keyword arguments on; adds the names that it uses."""
    names |= set(code.co_names)
    constants = {constant for constant in code.co_consts if isinstance(constant, str)}
    if _NAMES & {*code.co_names, *code.co_varnames, *code.co_freevars, *constants}:
        return True
    if code.co_flags & 0x08:  # **kwargs
        keywords = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04)]
        for instruction in dis.get_instructions(code):
            value = instruction.argval
            if instruction.opname.startswith("LOAD") and (
                value == keywords or (isinstance(value, tuple) and keywords in value)
            ):
                return True
    return any(_of_code(inner, names) for inner in code.co_consts if isinstance(inner, types.CodeType))
