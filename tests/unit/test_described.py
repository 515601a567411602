"""Settings, functions and objects as text that two processes can compare."""

import functools
import sys

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithPadding, GenerationConfig

from hf_hotspa.trainer.described import Reader, text_of
from tests.trl_runs import tokenizer

CONSTANT = 1.0


def reads_constant(value):
    return value * CONSTANT


class Scorer:
    def __init__(self, factor, calls=0):
        self.factor, self.calls = factor, calls

    def __call__(self, value):
        return value * self.factor


def closed(value):
    return lambda other: other * value


def nested(value):
    inner = closed(value)
    return lambda other: inner(other)


class Recursive:
    def __init__(self):
        self.me = self


DIFFERENT = {
    "constant": (lambda x: x + 1, lambda x: x + 2),
    "name": (lambda x: x.a, lambda x: x.b),
    "closure": (closed(1), closed(2)),
    "nested closure": (nested(1), nested(2)),
    "partial": (functools.partial(closed, 1), functools.partial(closed, 2)),
    "object": (Scorer(1), Scorer(2)),
    "method": (Scorer(1).__call__, Scorer(2).__call__),
    "tensor": (torch.ones(99), torch.cat([torch.ones(98), torch.zeros(1)])),
    "array": (np.arange(999), np.arange(999)[::-1]),
    "long list": (list(range(999)), [*range(998), 0]),
    "dict": ({"a": [1, (2,)]}, {"a": [1, (3,)]}),
    "collator": (DataCollatorWithPadding(tokenizer()), DataCollatorWithPadding(tokenizer(), max_length=8)),
    "config": (GenerationConfig(top_k=1), GenerationConfig(top_k=2)),
    "dtype": (torch.float32, torch.float64),
    "builtin": (len, max),
    "class": (Scorer, Recursive),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_reads_differently(name):
    one, other = DIFFERENT[name]
    assert text_of(one) == text_of(one)
    assert text_of(one) != text_of(other)
    assert "0x" not in text_of(one)


def test_a_constant_of_the_module_counts(monkeypatch):
    before = text_of(reads_constant)
    monkeypatch.setattr(sys.modules[__name__], "CONSTANT", 2.0)
    assert text_of(reads_constant) != before


def test_cycles_end():
    assert "Recursive" in text_of(Recursive())


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [("own_rank", 0, 1), ("is_main_process", True, False), ("device", "cuda:0", "cuda:1"), ("path", "/a/b", "/c")],
)
def test_values_named_after_a_rank_and_paths_may_differ(name, value, other):
    texts = []
    for given in (value, other):
        held = Scorer(2)
        setattr(held, name, given)
        texts.append(Reader(world_size=2).text(held, "held"))
    assert texts[0] == texts[1]


def test_other_numbers_of_such_a_name_may_not():
    reader = Reader(world_size=2)
    assert not reader.is_of_rank("warmup_start", 0.5)
    assert not reader.is_of_rank("lora_rank", 8)
