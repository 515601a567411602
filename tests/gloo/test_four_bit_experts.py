"""Experts in 4 bits: gradients equal those of PEFT and bitsandbytes in one process, codes travel bit for bit, and one expert is
dequantized at a time."""

import pytest

from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import strategies_of
from tests.gloo.test_qlora import step_errors
from tests.gloo.test_qlora_memory import dequantized
from tests.harness import run_ranks
from tests.qlora import MIXTURES, tiny_qlora

pytestmark = pytest.mark.gloo

QWEN, GPT = MIXTURES
ALONE = {"experts": True, "lora": {"target_parameters": None, "target_modules": ["q_proj", "v_proj", "o_proj"]}}
PLAIN = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}
SOME = {
    "ep, pp": (QWEN, "dp2ep2:16@32,pp2:60", MIXTURES[QWEN], {**ALONE, **PLAIN}),
    "adapted: z3, tp": (GPT, "dp2+z3:16@32,tp2+rc:60", MIXTURES[GPT], {"experts": True}),
}


def test_gradients():
    errors = run_ranks(2, step_errors, SOME)[0]
    print(errors)
    assert 0 < max(errors.values()) <= 1e-5, errors


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("family", MIXTURES)
def test_every_strategy(family, adapted):
    sizes, config = MIXTURES[family], {"experts": True} if adapted else ALONE
    shape = describe_model(tiny_qlora(family, model=sizes, **config)).shape
    strategies = [str(s) for s in strategies_of(4) if s.unsupported_reason(shape) is None]
    assert (shape.ep_unsupported_reason is None) is not adapted
    strategies += [] if adapted else ["dp4ep2", "dp4ep4", "dp2tp2ep4", "dp2pp2ep2", "dp2tp2ep2+sp"]
    strategies += ["dp4+z3", "tp2pp2+sp+rc", "pp2dp2+v2", "dp2tp2+sp+z3", "pp4+ck20"]
    cases = {s: (family, f"{s}:60@64", sizes, config) for s in strategies}
    # no shard of columns of tp 4 is of whole blocks
    mix = f"dp4+z3:5@24,tp4+sp:10@20,tp2pp2:16@32,{'' if adapted else 'dp4ep2:45@48,'}pp2dp2+v2:60@64"
    cases |= {f"{mix} {other}": (family, mix, sizes, {**config, **other}) for other in ({}, PLAIN)}
    errors = run_ranks(4, step_errors, cases, timeout=500)[0]
    print(errors)
    assert 0 < max(errors.values()) <= 1e-5, errors


def test_one_dequantized_expert_at_a_time():
    cases = [
        (QWEN, "tp2+rc", {"model": MIXTURES[QWEN], "experts": True}),
        (GPT, "dp2ep2", {"model": MIXTURES[GPT], **ALONE}),
    ]
    for found in run_ranks(2, dequantized, cases):
        for case, (most, count, weights) in found.items():
            assert count > 4 * 2 * 4, case  # more than the linear layers
            assert most == 4 * weights == 4 * 128 * 256 / (2 if "tp2" in case[1] else 1), case
