"""What a further token of a sequence in chunks (`+ck`) takes: keys, values and their gradients, and itself. One process."""

from unittest.mock import patch

import pytest
import torch

from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel import fused_attention
from tests.families import tiny_model
from tests.gloo.test_fully_sharded_memory import Allocated
from tests.harness import run_ranks
from tests.worlds import make_engine

pytestmark = pytest.mark.gloo

SHORT, LONG = 128, 256
TOKEN = 3 * 8
"""Bytes of id, position and label; the borders of each chunk are a byte more."""


@patch.object(fused_attention, "BLOCK_TOKENS", 16)  # attention makes nothing longer
def growth(rank, world_size, strategies):
    """Bytes on the device and in host memory that a further token takes; and the formula of docs/long-sequences.md."""
    model, found = tiny_model("llama_gqa_bias", torch.float32), {}
    shape = describe_model(model).shape
    pair = shape.num_layers * 2 * shape.num_key_value_heads * shape.attention_size // shape.num_attention_heads
    for name in strategies:
        engine = make_engine(model, f"{name}:{LONG}", loss_chunk_tokens=8)
        collate = PackedBucketCollator(engine.buckets, rank=0, vocab_size=model.config.vocab_size)
        peaks, hosts = [], []
        for tokens in (64, SHORT, LONG):  # the first only warms up
            ids = [token % model.config.vocab_size for token in range(tokens)]
            with Allocated() as allocated:
                engine.forward_backward(collate([{"input_ids": ids, "labels": ids}]))
            (runner,) = engine.phases.values()
            hosts.append(runner.host_bytes)
            peaks.append(allocated.peak - hosts[-1])
        engine.close()
        found[name] = tuple((sizes[2] - sizes[1]) / (LONG - SHORT) for sizes in (peaks, hosts))
    return found, pair * (4 + 4)


@pytest.mark.slow
def test_a_further_token_takes_what_is_carried_and_itself():
    ((found, carried),) = run_ranks(1, growth, ("dp1+ck16", "dp1+ck16+kh"))
    assert found == {
        "dp1+ck16": (pytest.approx(carried + TOKEN, abs=2), 0),
        "dp1+ck16+kh": (pytest.approx(TOKEN, abs=2), carried),
    }
