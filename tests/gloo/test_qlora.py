"""QLoRA: gradients of every strategy equal those of PEFT and bitsandbytes in one process, and codes travel bit for bit."""

import pytest
import torch

from tests.gloo.test_lora import trained_gradients
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.qlora import WIDE, tiny_qlora
from tests.worlds import make_engine, make_mini_batch, worst_error

pytestmark = pytest.mark.gloo


def step_errors(rank, world_size, cases):
    """By case, the largest relative error of an adapter's gradient on rank 0, which holds all of them."""
    found = {}
    for name, (family, buckets, model, config) in cases.items():
        given = tiny_qlora(family, model=model, **config)
        rows = random_rows(12, given.config.vocab_size, longest=60)
        engine = make_engine(given, buckets)
        mini_batch = make_mini_batch(engine, rows)
        if rank == 0:
            found[name], report = worst_error(engine, mini_batch, *trained_gradients(given, rows))
        else:
            report = engine.forward_backward(mini_batch)
            engine.full_gradients()
        assert len(report.phases) == len(engine.buckets), [p.strategy for p in report.phases]
        engine.close()
    return found


LLAMA, QWEN, GEMMA = "llama_gqa_bias", "qwen3_qk_norm_tied", "gemma2_soft_caps"
PLAIN = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}
CASES = {
    "dp, tp": (LLAMA, "dp2:16@32,tp2:60", WIDE, {}),
    "pp, cp": (QWEN, "pp2:16@32,cp2:60", WIDE, PLAIN),
    "sp, ck": (GEMMA, "tp2+sp+rc:16@32,pp2+ck20:60", WIDE, {}),
    "z3, v2": (LLAMA, "dp2+z3:16@32,pp2+v2:60", WIDE, PLAIN),
    # no shard of columns is of whole blocks, and those of rows are not all
    "whole weights": (LLAMA, "dp2:10@32,tp2:20@32,tp2+sp:60", {}, {}),
    "other blocks": ("llama_uneven", "tp2:20@40,cp2:60", {}, PLAIN),
}


def test_gradients():
    errors = run_ranks(2, step_errors, CASES)[0]
    print(errors)
    assert 0 < max(errors.values()) <= 1e-5, errors
