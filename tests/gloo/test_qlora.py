"""QLoRA: gradients of every strategy equal those of PEFT and bitsandbytes in one process, and codes travel bit for bit."""

from functools import partial

import pytest
import torch

from hf_hotspa.model.packed_layer import stored_tensors
from hf_hotspa.model.replica import Attachment, to_storage
from hf_hotspa.model.specs import describe_model
from tests.gloo.test_lora import step_error
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.qlora import MIXES, WIDE, every_strategy, tiny_qlora
from tests.worlds import make_engine

pytestmark = pytest.mark.gloo


class Watch(Attachment):
    """Compares the codes and scales that each layer computes with, bit for bit, with those of the model that was given."""

    def __init__(self, whole, counted, replica):
        self.counted = counted
        owners = {
            id(p): getattr(m, "hotspa_owner", (m,))[0]  # experts compute with what their parametrization holds
            for m in replica.model.modules()
            for p in m.parameters(recurse=False)
        }
        for parameter, slot in replica.parameters:
            if (spec := slot.spec).packed:
                stored = to_storage(whole[spec.name].reshape(spec.shape), spec.storage_dim)
                runs = [stretch for run in slot.runs for stretch in run.stretches()]
                held = torch.cat([stored[start - spec.offset : stop - spec.offset] for start, stop in runs])
                owners[id(parameter)].register_forward_pre_hook(
                    partial(self.compare, parameter, held, spec.storage_dim)
                )

    def compare(self, parameter, held, storage_dim, *_):
        assert torch.equal(to_storage(parameter.detach(), storage_dim), held)
        self.counted.append(held.numel() * held.itemsize)


def step_errors(rank, world_size, cases, changed=lambda model: model):
    """By case, the largest relative error of an adapter's gradient on rank 0, which holds all of them."""
    found = {}
    for name, (family, buckets, model, config) in cases.items():
        given, counted = changed(tiny_qlora(family, model=model, **config)), []
        rows = random_rows(12, given.config.vocab_size, longest=60)
        engine = make_engine(given, buckets)
        engine.attach(partial(Watch, {key: t.clone() for key, t in stored_tensors(given)}, counted))
        found[name], report = step_error(engine, given, rows)
        assert len(report.phases) == len(engine.buckets), [p.strategy for p in report.phases]
        assert sum(counted) > 0
        engine.close()
    return found


LLAMA, QWEN, GEMMA = "llama_gqa_bias", "qwen3_qk_norm_tied", "gemma2_soft_caps"
PLAIN = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}
SOME = {
    "sp, ck": (GEMMA, "tp2+sp+rc:16@32,pp2+ck20:60", WIDE, {}),
    "z3, cp, v2": (LLAMA, "dp2+z3:10@32,cp2:20@32,pp2+v2:60", WIDE, PLAIN),
    # no shard of columns is of whole blocks, and those of rows are not all
    "whole weights": (LLAMA, "dp2:10@32,tp2:20@32,tp2+sp:60", {}, {}),
}
BESIDE = {
    "dora": (LLAMA, "dp2+z3:10@32,tp2:20@32,tp2+sp:60", WIDE, {"lora": {"use_dora": True}}),
    "dora, whole weights": (LLAMA, "tp2:16@40,cp2:60", {}, {**PLAIN, "lora": {"use_dora": True, "target_modules": ["o_proj", "up_proj"]}}),
    "copies, tied": (QWEN, "tp2:16@32,pp2:60", WIDE, {"lora": {"modules_to_save": ["embed_tokens", "norm"], "ensure_weight_tying": True}}),
    "rows, bias": (LLAMA, "tp2:16@32,pp2:60", WIDE, {"lora": {"trainable_token_indices": [3, 40], "lora_bias": True}}),
    "ends": (LLAMA, "tp2:16@32,pp2:60", WIDE, {"lora": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}}),
}  # fmt: skip
"""What adapters have beside their factors, on 4-bit bases."""


@pytest.mark.parametrize("cases", [SOME, pytest.param(BESIDE, marks=pytest.mark.slow)], ids=["some", "beside"])
def test_gradients(cases):
    errors = run_ranks(2, step_errors, cases, timeout=280)[0]
    print(errors)
    assert 0 < max(errors.values()) <= 1e-5, errors


FAMILIES = {LLAMA: WIDE, QWEN: WIDE, GEMMA: WIDE, "mistral": None, "llama_uneven": {}}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy(family):
    sizes = FAMILIES[family]
    strategies = every_strategy(describe_model(tiny_qlora(family, model=sizes)).shape)
    strategies += [f"{s}+rc" for s in strategies if "+" not in s]
    cases = {s: (family, f"{s}:60@64", sizes, {}) for s in strategies}
    cases |= {
        f"{mix} {kind}": (family, mix, sizes, dict(config))
        for mix in MIXES
        for kind, config in (("nf4", {}), ("fp4", PLAIN))
    }
    errors = run_ranks(4, step_errors, cases, timeout=500)[0]
    assert 0 < max(errors.values()) <= 1e-5, errors
