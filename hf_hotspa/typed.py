"""Converts plain data, as JSON files and messages hold it, to the program's dataclasses.

msgspec checks types, bounds and missing fields; this file owns bounds and messages. Unknown fields are ignored, as
newer versions may write them. Fields with a default may be missing, as earlier versions did not write them.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from reprlib import repr as short
from typing import Annotated, Any, TypeVar

import msgspec

from hf_hotspa.errors import HotspaConfigError, HotspaError

T = TypeVar("T")

_LARGEST = 1.7976931348623157e308  # a bound that infinity does not meet
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
Finite = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=_LARGEST)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=_LARGEST)]

_PLACE = re.compile(r"(.*) - at (?:`key` in )?`\$(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def typed(data: object, kind: type[T]) -> T:
    """Converts plain data to a dataclass, or to a type built from dataclasses. `data`: the output of a JSON reader:
    dictionaries, lists, texts, numbers. `kind`: the type; its dataclasses may check themselves in `__post_init__`.
    Raises `ValueError`: the data do not match the type; names the field, its value, and what it should hold."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(error, data)) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextmanager
def reading_state(what: str, fix: str) -> Iterator[None]:
    """Wraps the reading of a part of a checkpoint's state. `what`: what the state belongs to, for the message. `fix`:
    what the user can do, and what follows from it. Raises `HotspaConfigError`: replaces any error of a malformed
    state."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AssertionError) as error:
        raise HotspaConfigError(
            f"the state of {what} cannot be read: {type(error).__name__}: {error}", fix=f"leave it out; {fix}"
        ) from None


def _in_words(error: msgspec.ValidationError, data: object) -> str:
    match = _PLACE.fullmatch(str(error))
    what, place = (match[1], match[2].removeprefix(".")) if match else (str(error), "")
    if missing := _MISSING.match(what):
        return f"the field {missing[1]!r} is missing" + (f" in {place}" if place else "")
    if isinstance(error.__cause__, HotspaError):
        what = error.__cause__.what
    elif ", got `" in what:
        what = f"of the wrong type: {what}"
    value = _value_at(data, place)
    shown = f" is {short(value)}" if value is not None else ""
    return f"{place}{shown}: {what}" if place else what


def _value_at(data: Any, place: str) -> Any:
    """`place` is such as `samples[2].seconds`. None if the value is long or the place cannot be followed (`[...]`)."""
    for name, index in re.findall(r"(\w+)|\[([^]]+)\]", place):
        if index == "...":
            return None
        data = data[int(index)] if index else data[name]
    return None if isinstance(data, dict | list | tuple) else data
