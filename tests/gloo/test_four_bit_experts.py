"""Experts in 4 bits: gradients equal those of PEFT and bitsandbytes in one process, and codes travel bit for bit."""

import pytest

from tests.gloo.test_qlora import step_errors
from tests.harness import run_ranks
from tests.qlora import MIXTURES

pytestmark = pytest.mark.gloo

QWEN, GPT = MIXTURES
ALONE = {"experts": True, "lora": {"target_parameters": None, "target_modules": ["q_proj", "v_proj", "o_proj"]}}
PLAIN = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}
CASES = {
    "ep, tp": (QWEN, "dp2ep2:16@32,tp2:60", MIXTURES[QWEN], ALONE),
    "adapted: tp, pp": (QWEN, "tp2:16@32,pp2:60", MIXTURES[QWEN], {"experts": True, **PLAIN}),
    "adapted: z3, tp": (GPT, "dp2+z3:16@32,tp2+rc:60", MIXTURES[GPT], {"experts": True}),
    "ep, pp": (GPT, "dp2ep2:16@32,pp2:60", MIXTURES[GPT], {**ALONE, **PLAIN}),
}


def test_gradients():
    errors = run_ranks(2, step_errors, CASES)[0]
    print(errors)
    assert 0 < max(errors.values()) <= 1e-5, errors
