"""QLoRA: gradients of every strategy equal those of PEFT and bitsandbytes in one process, and codes travel bit for bit."""

from functools import partial

import pytest
import torch

from hf_hotspa.model.packed_layer import stored_tensors
from hf_hotspa.model.replica import Attachment, to_storage
from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import strategies_of
from tests.gloo.test_lora import trained_gradients
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.qlora import WIDE, tiny_qlora
from tests.worlds import make_engine, make_mini_batch, worst_error

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


def step_errors(rank, world_size, cases):
    """By case, the largest relative error of an adapter's gradient on rank 0, which holds all of them."""
    found = {}
    for name, (family, buckets, model, config) in cases.items():
        given, counted = tiny_qlora(family, model=model, **config), []
        rows = random_rows(12, given.config.vocab_size, longest=60)
        engine = make_engine(given, buckets)
        engine.attach(partial(Watch, dict(stored_tensors(given)), counted))
        mini_batch = make_mini_batch(engine, rows)
        if rank == 0:
            found[name], report = worst_error(engine, mini_batch, *trained_gradients(given, rows))
        else:
            report = engine.forward_backward(mini_batch)
            engine.full_gradients()
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
MORE = {
    "dp, tp": (LLAMA, "dp2:16@32,tp2:60", WIDE, {}),
    "pp, cp": (QWEN, "pp2:16@32,cp2:60", WIDE, PLAIN),
    "other blocks": ("llama_uneven", "tp2:20@40,cp2:60", {}, PLAIN),
}
BESIDE = {
    "dora": (LLAMA, "dp2+z3:10@32,tp2:20@32,tp2+sp:60", WIDE, {"lora": {"use_dora": True}}),
    "dora, whole weights": (LLAMA, "tp2:16@40,cp2:60", {}, {**PLAIN, "lora": {"use_dora": True, "target_modules": ["o_proj", "up_proj"]}}),
    "copies, tied": (QWEN, "tp2:16@32,pp2:60", WIDE, {"lora": {"modules_to_save": ["embed_tokens", "norm"], "ensure_weight_tying": True}}),
    "rows, bias": (LLAMA, "tp2:16@32,pp2:60", WIDE, {"lora": {"trainable_token_indices": [3, 40], "lora_bias": True}}),
    "ends": (LLAMA, "tp2:16@32,pp2:60", WIDE, {"lora": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}}),
}  # fmt: skip
"""What adapters have beside their factors, on 4-bit bases."""


@pytest.mark.parametrize("cases", [SOME, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_gradients(cases):
    errors = run_ranks(2, step_errors, cases)[0]
    print(errors)
    assert 0 < max(errors.values()) <= 1e-5, errors


@pytest.mark.slow
def test_gradients_of_what_adapters_have_beside_their_factors():
    errors = run_ranks(2, step_errors, BESIDE, timeout=280)[0]
    assert 0 < max(errors.values()) <= 1e-5, errors


FAMILIES = {LLAMA: WIDE, QWEN: WIDE, GEMMA: WIDE, "mistral": None, "llama_uneven": {}}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy(family):
    sizes = FAMILIES[family]
    shape = describe_model(tiny_qlora(family, model=sizes)).shape
    strategies = [str(s) for s in strategies_of(4) if s.unsupported_reason(shape) is None]
    strategies += [f"{s}+rc" for s in strategies] + [
        "dp4+z3",
        "tp2pp2+sp+rc",
        "pp2dp2+v2",
        "dp2tp2+sp+z3",
        "cp2tp2",
        "cp4",
        "pp4+ck20",
    ]
    cases = {s: (family, f"{s}:60@64", sizes, {}) for s in strategies}
    mixes = (
        "dp4:5@24,dp2tp2:10@20,tp2pp2:16,pp4:45@48,tp4:60",
        "dp4+z3:5@24,tp4+sp:10@20,cp2tp2:16@32,pp2dp2+v2:45@48,pp4+ck20+rc:60",
    )
    cases |= {
        f"{mix} {kind}": (family, mix, sizes, dict(config))
        for mix in mixes
        for kind, config in (("nf4", {}), ("fp4", PLAIN))
    }
    errors = run_ranks(4, step_errors, cases, timeout=500)[0]
    assert 0 < max(errors.values()) <= 1e-5, errors
