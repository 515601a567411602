"""Which families' attention is refused on a ring before the first step."""

import pytest

from hf_hotspa.model.specs import describe_model
from tests.tiny_families import tiny_model_of


@pytest.mark.parametrize("family", ["phi3", "mistral", "qwen3"])
def test_a_window_rules_out_the_ring_wherever_its_forward_reads_it(family: str) -> None:
    model = tiny_model_of(family)
    assert model.config.sliding_window == 5
    assert "a sliding window of 5 tokens" in (describe_model(model).shape.ring_unsupported_reason or "")


def test_attention_without_a_window_runs_on_a_ring() -> None:
    assert describe_model(tiny_model_of("llama")).shape.ring_unsupported_reason is None
