"""The search finds plans as good as when `tests/data/plan_table.json` was written; some of its questions in every run."""

import json
from collections.abc import Sequence

import numpy as np
import pytest

from tests.plan_table import MOST, MOST_ON_AVERAGE, TABLE, ask, losses, questions

QUICK = (
    "auto 2x-0-0", "auto 2x-0-1-limit", "auto 2x-1-2-limit", "auto 4x-0-0-limit", "auto 4x-1-3-limit", "auto 4x-1-4",
    "llama2-7b 1x8", "llama2-13b 1x8", "Qwen3-8B h100-80g chat", "Qwen3-8B 4090-24g chat",
    "Qwen3-8B r=16 1x8 uniform", "Qwen3-32B r=16 1x8 chat",
)  # fmt: skip


def _compare(names: Sequence[str]) -> None:
    factors = losses(ask(names))
    assert max(factors.values()) <= MOST, {name: factor for name, factor in factors.items() if factor > MOST}
    assert np.mean(list(factors.values())) <= MOST_ON_AVERAGE


def test_no_plan_of_a_sample_is_slower_than_in_the_table() -> None:
    _compare(QUICK)


@pytest.mark.slow
def test_no_plan_is_slower_than_in_the_table() -> None:
    names = list(questions())
    assert names == list(json.loads(TABLE.read_text()))
    assert len(names) == 120
    _compare(names)
