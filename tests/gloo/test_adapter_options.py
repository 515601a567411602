"""Options of PEFT's `LoraConfig`: gradients of every trained parameter equal PEFT's on the plain model, in fp64."""

import pytest
import torch

from tests.gloo.test_lora import step_error
from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.oracle import random_rows
from tests.worlds import make_engine

pytestmark = pytest.mark.gloo

HOT = "dp2:5@24,tp2:10@24,pp2:16@32,dp2+z3:24@32,tp2+sp:34@40,cp2:60@66"
FOUR = "dp4:5@24,dp2tp2:10@24,tp2pp2+sp:16@32,dp2pp2+z3:24@32,tp4:34@40,cp2tp2:60@66"
PLAIN, TIED = "llama_gqa_bias", "qwen3_qk_norm_tied"
SOME = ["q_proj", "o_proj", "down_proj"]
CASES = {
    "saved ends": (PLAIN, {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "saved inside": (TIED, {"modules_to_save": ["q_norm", "input_layernorm", "o_proj", "k_proj"], "target_modules": ["q_proj"]}),
    "saved embedding, tied": (TIED, {"modules_to_save": ["embed_tokens"]}),
    "saved head, tied": (TIED, {"modules_to_save": ["lm_head"]}),
    "saved ends, tied": (TIED, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "on ends": (PLAIN, {"target_modules": [*SOME, "embed_tokens", "lm_head"]}),
    "on ends, tied": (TIED, {"target_modules": [*SOME, "embed_tokens", "lm_head"]}),
    "dora": (PLAIN, {"use_dora": True}),
    "dora, fused": ("phi3_fused", {"use_dora": True, "use_rslora": True}),
    "dora on ends": (PLAIN, {"use_dora": True, "target_modules": [*SOME, "embed_tokens", "lm_head"]}),
    "tokens": (PLAIN, {"trainable_token_indices": [3, 17, 40, 41]}),
    "tokens, tied": (TIED, {"trainable_token_indices": [3, 17, 40, 41]}),
    "tokens of both": (PLAIN, {"trainable_token_indices": {"embed_tokens": [3, 50], "lm_head": [60, 2, 4]}}),
    "lora bias": (PLAIN, {"lora_bias": True}),
    "bias": (PLAIN, {"bias": "all", "modules_to_save": ["lm_head"], "use_dora": True}),
}  # fmt: skip


def errors(rank, world_size, cases, buckets):
    found = {}
    for name in cases:
        family, config = CASES[name]
        model = tiny_lora(family, torch.float64, **config)
        rows = random_rows(12, model.config.vocab_size, longest=60)
        engine = make_engine(model, buckets)
        found[name], _report = step_error(engine, model, rows)
        engine.close()
    return found


def check(found):
    assert max(found.values()) <= 1e-11, found
    assert min(found.values()) > 0


QUICK = ("saved ends", "saved ends, tied", "on ends", "dora", "tokens, tied", "lora bias")


def test_gradients_equal_those_of_peft():
    check(run_ranks(2, errors, QUICK, HOT, timeout=280)[0])


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [HOT, FOUR], ids=["2", "4"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_option_equal_those_of_peft(name, buckets):
    check(run_ranks(4 if "dp4" in buckets else 2, errors, [name], buckets, timeout=280)[0])
