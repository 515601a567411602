"""Plain data as dataclasses: what is refused, and in which words."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from hf_hotspa.strategy import Strategy
from hf_hotspa.typed import Count, Finite, NotNegative, Positive, PositiveCount, typed


@dataclass(frozen=True)
class Part:
    strategy: str
    seconds: Positive = 1.0
    wait_s: NotNegative = 0.0
    shift: Finite = 0.0

    def __post_init__(self) -> None:
        Strategy.parse(self.strategy)


@dataclass(frozen=True)
class Whole:
    ranks: PositiveCount
    parts: tuple[Part, ...] = ()
    seen: Mapping[str, Count] = field(default_factory=dict)


def test_fields_without_a_value_have_their_default_and_unknown_ones_are_left_alone() -> None:
    data = json.loads('{"ranks": 2, "parts": [{"strategy": "dp2", "seconds": 3}], "seen": {"a": 0}, "newer": 1}')
    assert typed(data, Whole) == Whole(2, (Part("dp2", 3.0),), {"a": 0})


def part(fields: str) -> str:
    return f'{{"ranks": 1, "parts": [{{{fields}}}]}}'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("[1]", "of the wrong type: Expected `object`, got `array`"),
        ("{}", "the field 'ranks' is missing"),
        ('{"ranks": 0}', "ranks is 0: Expected `int` >= 1"),
        ('{"ranks": 1.0}', "ranks is 1.0: of the wrong type: Expected `int`, got `float`"),
        ('{"ranks": true}', "ranks is True: of the wrong type: Expected `int`, got `bool`"),
        ('{"ranks": 1, "parts": {}}', "parts: of the wrong type: Expected `array`, got `object`"),
        (part(""), "the field 'strategy' is missing in parts[0]"),
        (part('"strategy": "up4"'), "parts[0]: 'up4' is not a strategy"),
        (part('"strategy": "dp2", "seconds": 0'), "parts[0].seconds is 0: Expected `float` > 0.0"),
        (part('"strategy": "dp2", "seconds": NaN'), "parts[0].seconds is nan: Expected `float` > 0.0"),
        (part('"strategy": "dp2", "wait_s": -1'), "parts[0].wait_s is -1: Expected `float` >= 0.0"),
        (part('"strategy": "dp2", "shift": Infinity'), "parts[0].shift is inf: Expected `float` <= 1.7"),
        ('{"ranks": 1, "seen": {"a": "b"}}', "seen[...]: of the wrong type: Expected `int`, got `str`"),
    ],
)
def test_a_refusal_names_the_field_and_what_it_holds(data: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        typed(json.loads(data), Whole)
    assert str(caught.value).startswith(message)
