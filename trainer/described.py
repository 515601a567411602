"""Settings, functions and objects as text that is equal on all ranks where they are equal: `text_of` and `Reader`.

A function is its bytecode, constants, names, defaults, closure values and the constants of its module that it names; an
object is its class and plain attributes. Addresses never enter. Code of installed libraries is its name: their releases
are compared.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import os
import re
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer

from hf_hotspa.data.collator import is_stream
from hf_hotspa.model.model_check import weights_digest

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_VALUES = 100_000
_MOST_LEVELS = 12
_SMALL = 64
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, np.ndarray)
_BUILT_IN = (
    types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType,
)  # fmt: skip
_CONFIGS = "transformers", "peft", "trl", "accelerate"
_INSTALLED = ("site-packages", "dist-packages")
_OURS = __name__.partition(".")[0]
_ROUTINE = {  # attributes of classes that hold no code
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__parameters__",
    "__orig_bases__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl", "__slots__",
    "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__annotate_func__", "__annotations_cache__",
}  # fmt: skip

_OF_RANKS = re.compile(
    r"rank|process_(index|id)|proc_id|\bpid|node|device|gpu|worker|is_?(main|master|primary|chief|leader|first|zero)"
    r"|(main|master|first)_?proc",
    re.IGNORECASE,
)
_OF_TIMES = re.compile(r"time|start|began|begin|clock|stamp|date|\btic|\bt0", re.IGNORECASE)
_A_MONTH, _AN_HOUR = 30 * 24 * 3600.0, 3600.0


def digest_of(data: bytes | str) -> str:
    """Eight hex digits that tell contents apart."""
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=4).hexdigest()


def text_of(value: object) -> str:
    """A setting as text, the same on all ranks with the same setting."""
    return value if isinstance(value, str) else Reader().text(value, "")


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a module comes from an installed distribution, Python or this package: its releases are compared."""
    top = module.partition(".")[0]
    if (top in sys.stdlib_module_names and top != "__main__") or top in (_OURS, "builtins"):
        return True
    loaded = sys.modules.get(top)
    file = getattr(loaded, "__file__", None) or next(iter(getattr(loaded, "__path__", ())), None)
    return file is not None and any(part in Path(file).parts for part in _INSTALLED)


def _name(value: object) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', getattr(value, '__name__', '?'))}"


class Reader:
    """Reads values as text. `world_size`: values that are named after a rank, and may be one, are left out; with 0 all
    count."""

    def __init__(self, world_size: int = 0) -> None:
        self._world_size = world_size
        self._path = list[int]()
        self._left = _MOST_VALUES
        self.unread = list[str]()  # the names of values of which only the class is known

    def text(self, value: object, name: str) -> str:
        self._left = _MOST_VALUES
        read = self._read(value, name)
        return read if isinstance(read, str) else _ADDRESS.sub("", json.dumps(read))

    def is_of_rank(self, name: str, value: object) -> bool:
        """Whether a value says which rank this may be, when, or where in files: such values differ in any script."""
        if isinstance(value, float) and _OF_TIMES.search(name):
            counter = time.perf_counter()
            of_counter = counter > _AN_HOUR and abs(value - counter) < _AN_HOUR and not value.is_integer()
            return of_counter or abs(value - time.time()) < _A_MONTH
        if isinstance(value, str) and value.startswith(os.sep):
            return self._world_size > 0
        if not self._world_size or not _OF_RANKS.search(name):
            return False
        if isinstance(value, str):
            return any(int(digits) < self._world_size for digits in re.findall(r"\d+", value))
        return isinstance(value, bool) or (isinstance(value, int) and 0 <= value < self._world_size)

    # -- values -------------------------------------------------------------------------------------------------------

    def _read(self, value: object, name: str) -> Any:
        self._left -= 1
        if isinstance(value, enum.Enum):
            return self._read(value.value, name)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, type | types.ModuleType | torch.dtype | torch.layout | Path | re.Pattern):
            return self._class(value, name) if isinstance(value, type) else str(value)
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, bytes | bytearray):
            return f"{len(value)} bytes {digest_of(bytes(value))}"
        if id(value) in self._path or self._left < 0 or len(self._path) > _MOST_LEVELS:
            return f"more of {type(value).__name__}"
        self._path.append(id(value))
        try:
            return self._read_parts(value, name)
        except Exception as error:  # in a property
            self.unread.append(f"{name} ({type(error).__name__})")
            return _name(type(value))
        finally:
            self._path.pop()

    def _read_parts(self, value: object, name: str) -> Any:
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return self._array(value)
        if isinstance(value, Mapping):
            items = ((str(key), self._read(item, f"{name}[{key!r}]")) for key, item in value.items())
            return dict(sorted(items, key=lambda item: item[0]))
        if isinstance(value, list | tuple):
            if len(value) > _SMALL and isinstance(value[0], int | float):
                numbers = np.asarray(value)
                return f"{len(value)} of {self._array(numbers)}" if numbers.dtype.kind in "biuf" else repr(value)
            return [self._read(item, f"{name}[{place}]") for place, item in enumerate(value)]
        if isinstance(value, set | frozenset):
            return sorted(json.dumps(self._read(item, name)) for item in value)
        if isinstance(value, functools.partial):
            return ["partial", *(self._read(part, name) for part in (value.func, value.args, value.keywords))]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return [self._read(value.__func__, name), self._read(value.__self__, name)]
        if isinstance(value, _BUILT_IN):
            return _name(value)
        return self._object(value, name)

    def _array(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.is_meta:
                return f"{value.dtype} {list(value.shape)}"
            value = value.detach().cpu()
            if value.dtype == torch.bfloat16:
                value = value.view(torch.int16)
            value = value.numpy()
        if value.size <= _SMALL and value.dtype.kind in "biufU":
            return value.tolist()
        return f"{value.dtype} {list(value.shape)} {digest_of(np.ascontiguousarray(value).tobytes())}"

    def _object(self, value: object, name: str) -> Any:
        kind = type(value)
        if isinstance(value, Trainer) or is_stream(value):
            return _name(kind)
        if isinstance(value, nn.Module):
            config: Any = getattr(value, "config", None)
            options = self._read(config.to_dict(), name) if hasattr(config, "to_dict") else None
            return [self._class(kind, name), options, weights_digest(value)[:8]]
        if isinstance(value, PreTrainedTokenizerBase):
            parts = value.get_vocab(), value.special_tokens_map, getattr(value, "chat_template", None)
            sides = value.padding_side, value.truncation_side
            return f"{kind.__name__} {digest_of(json.dumps([parts, sides], sort_keys=True, default=str))}"
        if isinstance(value, ProcessorMixin):
            return [_name(kind), self._read(getattr(value, "tokenizer", None), name)]
        if hasattr(value, "to_dict") and any(part.__module__.partition(".")[0] in _CONFIGS for part in kind.__mro__):
            return [kind.__name__, self._read(value.to_dict(), name)]
        if hasattr(value, "column_names") and hasattr(value, "__len__"):
            return f"{kind.__name__} of {len(value)} rows"
        attributes = getattr(value, "__dict__", None)
        if attributes is None or (is_installed(kind.__module__) and not dataclasses.is_dataclass(kind)):
            self.unread.append(f"{name} ({kind.__name__})")
            return _name(kind)
        return [self._class(kind, name), self._named(attributes, name)]

    def _named(self, values: Mapping[str, Any], name: str) -> dict[str, Any]:
        kept = {key: value for key, value in values.items() if not self.is_of_rank(key, value)}
        return {key: self._read(value, f"{name}.{key}") for key, value in sorted(kept.items())}

    # -- code ---------------------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType) -> str:
        name, cells = _name(function), dict[str, Any]()
        for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                cells[free] = cell.cell_contents
            except ValueError:  # not set yet
                cells[free] = None
        parts = function.__defaults__, function.__kwdefaults__
        read = [*(self._read(part, name) for part in parts), self._named(cells, name)]
        if is_installed(function.__module__ or ""):
            return name if read == [None, None, {}] else f"{name} (with {digest_of(json.dumps(read))})"
        read += [_code(function.__code__), self._constants(function)]
        return f"{name} (code {digest_of(_ADDRESS.sub('', json.dumps(read)))})"

    def _constants(self, function: types.FunctionType) -> dict[str, Any]:
        """What a function names in its module: plain values, and functions and classes outside of libraries. Lower-case
        names of lists and mappings are left out: they are usually filled while a script runs."""
        named = dict[str, Any]()
        for name in sorted(names_in(function.__code__)):
            value = function.__globals__.get(name)
            holds_values = isinstance(value, _CONTAINERS) or type(value) is Tensor
            is_code = isinstance(value, types.FunctionType | type) and not is_installed(value.__module__ or "")
            if is_code or (isinstance(value, _PLAIN) and value is not None) or (holds_values and name.isupper()):
                named[name] = value
        return self._named(named, _name(function))

    def _class(self, kind: type, name: str) -> Any:
        if is_installed(kind.__module__) or id(kind) in self._path:
            return _name(kind)
        self._path.append(id(kind))
        try:
            parts = [self._class_of_user(part, name) for part in kind.__mro__ if not is_installed(part.__module__)]
        finally:
            self._path.pop()
        return f"{_name(kind)} (code {digest_of(json.dumps(parts))})"

    def _class_of_user(self, kind: type, name: str) -> Any:
        own = dict[str, Any]()
        for key, value in vars(kind).items():
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            elif isinstance(value, property):
                value = [value.fget, value.fset]
            elif isinstance(value, functools.cached_property):
                value = value.func
            if key not in _ROUTINE and (isinstance(value, (*_PLAIN, types.FunctionType, list, tuple, dict, type))):
                own[key] = value
        return [_name(kind), *map(_name, kind.__bases__), self._named(own, name)]


def _code(code: types.CodeType) -> Any:
    constants = list[Any]()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constants.append(_code(constant))
        elif isinstance(constant, frozenset):
            constants.append(sorted(map(repr, constant)))
        else:
            constants.append(repr(constant))
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return [code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars, counts]


def names_in(code: types.CodeType) -> set[str]:
    """All names in a piece of code, and in functions that it defines."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


@functools.cache
def names_of_library(kind: type) -> frozenset[str]:
    """All names in the code of the installed classes that a class derives from: which attributes are theirs."""
    names = set[str]()
    for part in kind.__mro__:
        if is_installed(part.__module__):
            for value in vars(part).values():
                function: Callable[..., Any] | Any = getattr(value, "__func__", getattr(value, "fget", value))
                while function is not None:
                    names |= names_in(function.__code__) if isinstance(function, types.FunctionType) else set()
                    function = getattr(function, "__wrapped__", None)
    return frozenset(names)
