"""Drawn `LoraConfig`s: each is equal to PEFT (gradients of every trained parameter, fp64), or refused by name before the first step."""

import random
from typing import Any

import pytest
import torch

from hf_hotspa.errors import UnsupportedError
from tests.gloo.test_lora import step_error
from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.oracle import random_rows
from tests.worlds import make_engine

pytestmark = pytest.mark.gloo

FAMILIES = ("llama_gqa_bias", "qwen3_qk_norm_tied", "phi3_fused", "gemma2_soft_caps", "llama_uneven")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
ENDS = ("embed_tokens", "lm_head")
STRATEGIES = ("dp2", "tp2", "tp2+sp", "pp2", "cp2", "dp2+z3", "dp2+rc", "pp2+v2", "tp2+rc", "dp2+z2", "pp2+ck16")
REFUSED = ({"init_lora_weights": "mica"}, {"modules_to_save": ["mlp"]}, {"layer_replication": [[0, 4], [1, 4]]})


def drawn(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A family, and options of a `LoraConfig`; PEFT may reject them together."""

    def maybe(chance, **options):
        return options if draw.random() < chance else {}

    def some(names, most):
        return draw.sample(names, draw.randint(1, most))

    tokens = sorted(draw.sample(range(70), draw.randint(1, 6)))
    family = draw.choice(FAMILIES)
    options = {"r": draw.randint(1, 6), "lora_alpha": draw.randint(1, 9)}
    targets = draw.choice(["all-linear", some(LINEAR, 5), [*some(LINEAR, 4), *some(ENDS, 2)]])
    options |= {"target_modules": targets}
    options |= maybe(0.4, use_dora=True) or maybe(0.3, lora_bias=True)
    options |= maybe(0.3, use_rslora=True) | maybe(0.3, bias=draw.choice(["all", "lora_only"]))
    options |= maybe(0.4, modules_to_save=some(["embed_tokens", "lm_head", "norm", "input_layernorm", "k_proj"], 3))
    options |= maybe(
        0.3, trainable_token_indices=draw.choice([tokens, {"embed_tokens": tokens, "lm_head": tokens[:2]}])
    )
    options |= maybe(0.3, ensure_weight_tying=True)
    options |= maybe(0.3, rank_pattern={draw.choice(LINEAR): 2, "1.mlp.*": 3}, alpha_pattern={draw.choice(LINEAR): 7})
    options |= maybe(0.3, init_lora_weights=draw.choice([False, "gaussian"]))
    options |= maybe(0.3, layers_to_transform=sorted(draw.sample(range(4), 2))) if isinstance(targets, list) else {}
    options |= maybe(0.2, exclude_modules=[draw.choice(LINEAR)])
    return family, options | maybe(0.1, **draw.choice(REFUSED))


def made(draw: random.Random) -> tuple[object, tuple[str, dict[str, Any]]]:
    """The next model that PEFT accepts."""
    while True:
        family, options = drawn(draw)
        try:
            return tiny_lora(family, torch.float64, **options), (family, options)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RuntimeError,
        ):  # PEFT's own, of options that it rejects
            continue


def outcomes(rank, world_size, seed, count):
    """Of each drawn config what it was, the strategies, and the largest error or why it was refused."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        model, config = made(draw)
        one, other = draw.sample(STRATEGIES, 2)
        buckets = f"{one}:16@32,{other}:60@66"
        rows = random_rows(10, model.config.vocab_size, longest=60)
        try:
            engine = make_engine(model, buckets)
        except Exception as error:
            found.append((config, buckets, str(error) if isinstance(error, UnsupportedError) else error))
            continue
        found.append((config, buckets, step_error(engine, model, rows)[0]))
        engine.close()
    return found


@pytest.mark.slow
def test_forty_drawn_configs():
    found = run_ranks(2, outcomes, 0, 40, timeout=600)[0]
    results = [result for *_, result in found]
    assert all(isinstance(r, str) or (isinstance(r, float) and r <= 1e-11) for r in results), found
    assert sum(isinstance(r, float) for r in results) > 20, found
