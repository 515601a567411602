"""Options of PEFT's `LoraConfig`: gradients of every trained parameter equal PEFT's on the plain model, in fp64."""

import inspect

import pytest
import torch
from peft import EvaConfig, LoftQConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora import layer
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from peft.utils import loftq_utils

from hf_hotspa.features.slow_devices.flexible_linear import flexible_works, give
from hf_hotspa.features.slow_devices.mode import HandOver
from tests.families import tiny_model
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
        engine = make_engine(model, buckets, loss_chunk_tokens=13)  # heads run on parts of a pack
        found[name], _report = step_error(engine, model, rows)
        engine.close()
    return found


def quick(rank, world_size):
    """The quick cases, and DoRA where a slow rank gives columns of frozen weights away."""
    found = errors(rank, world_size, QUICK, HOT)
    model = tiny_lora(PLAIN, torch.float64, use_dora=True)
    engine = make_engine(model, "tp2:60@66", features=(HandOver(),))
    give(engine, {"tp2": (0.0, 0.5)})
    products = [(work, p) for work in flexible_works(engine).values() for p in work.products.values()]
    assert products
    assert all(work.migrations(p.columns) for work, p in products)
    found["dora, given away"], _report = step_error(engine, model, random_rows(12, model.config.vocab_size, longest=60))
    engine.close()
    return found


def check(found):
    assert max(found.values()) <= 1e-11, found
    assert min(found.values()) > 0


QUICK = ("saved ends, tied", "dora on ends", "tokens, tied")


def test_gradients_equal_those_of_peft():
    check(run_ranks(2, quick, timeout=280)[0])


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [HOT, FOUR], ids=["2", "4"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_option_equal_those_of_peft(name, buckets):
    check(run_ranks(4 if "dp4" in buckets else 2, errors, [name], buckets, timeout=280)[0])


# -- initializations, which PEFT makes of the base, or of data, before training ------------------------------------------


def initialized(kind):
    """A tiny fp32 model whose adapter PEFT has initialized; some kinds change the base."""
    base, more = tiny_model(PLAIN), {}
    ids = torch.randint(0, base.config.vocab_size, (4, 24), generator=torch.Generator().manual_seed(5))
    if kind == "eva":
        more = {"eva_config": EvaConfig(rho=1.5)}
    elif kind == "corda":
        more = {"corda_config": CordaConfig(corda_method="kpm")}
    elif kind == "lora_ga":
        more = {"lora_ga_config": LoraGAConfig()}
    elif kind == "loftq":
        more = {"loftq_config": LoftQConfig(loftq_bits=4)}
        # PEFT's code names the device
        exec(inspect.getsource(loftq_utils.loftq_init).replace('"cuda"', '"cpu"'), vars(loftq_utils))
        layer.loftq_init = loftq_utils.loftq_init
    targets = ["q_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=4, lora_alpha=3, target_modules=targets, init_lora_weights=kind, task_type="CAUSAL_LM", **more
    )
    torch.manual_seed(3)
    if kind == "corda":
        preprocess_corda(base, config, run_model=lambda: [base(input_ids=row[None]) for row in ids])
    elif kind == "lora_ga":
        preprocess_loraga(base, config, lambda: base(input_ids=ids, labels=ids).loss.backward())
    model = get_peft_model(base, config)
    if kind == "eva":
        batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
        initialize_lora_eva_weights(model, batches, gather_distributed_inputs=False, show_progress_bar=False)
    return model.train()


def initialization_errors(rank, world_size, kinds):
    """Errors, and whether the base was changed."""
    found, plain = {}, tiny_model(PLAIN)
    for kind in kinds:
        model = initialized(kind)
        rows = random_rows(10, model.config.vocab_size, longest=60)
        engine = make_engine(model, "dp2:10@24,tp2:24@32,pp2:60")
        error = step_error(engine, model, rows)[0]
        engine.close()
        base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
        found[kind] = error, not torch.equal(base, plain.model.layers[0].self_attn.q_proj.weight)
    return found


CHANGED = ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq")
"""Initializations that change the base."""


@pytest.mark.slow
def test_initializations_equal_those_of_peft():
    kinds = ("gaussian", "orthogonal", "eva", *CHANGED)
    found = run_ranks(2, initialization_errors, kinds, timeout=280)[0]
    assert max(error for error, _ in found.values()) <= 1e-5, found
    assert {kind for kind, (_, changed) in found.items() if changed} == set(CHANGED)
