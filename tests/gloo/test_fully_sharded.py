"""`+z2` and `+z3`: units come and go one at a time, and loss and gradients equal the plain model's."""

import pytest
import torch

from hf_hotspa.costs.formulas import traffic
from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import Strategy
from tests.families import FAMILIES, tiny_model
from tests.gloo import test_lora as lora
from tests.gloo.test_exact import check, rank_errors
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.tiny_families import tiny_model_of
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

LOSS = {"loss_chunk_tokens": 7}
OVERLAP = {"overlap_load": True, "overlap_return": True}
STRATEGIES = (
    "dp4+z2", "dp4+z3", "dp2tp2+z3", "dp2tp2+sp+z3", "dp2pp2+z3", "dp2pp2+z2", "dp4+rc+z3", "dp4+ck17+z3", "dp4+ck19+z2",
    "tp4+z3", "pp4+z3", "tp2pp2+rc2+z3", "tp2pp2+sp+z2", "dp2cp2+z3", "cp4+rc+z3", "cp2tp2+sp+z3", "cp2pp2+z2", "dp2cp2+ck19+z3",
    "dp4+ck15+kg1+z3", "dp2tp2+ck13+kg2+kh+z2", "dp2pp2+ck17+z3", "dp2pp2+rc+ck15+z2", "pp4+ck19+z3",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"),
    [pytest.param("qwen3_qk_norm_tied", [LOSS | OVERLAP], id="at once")]
    + [pytest.param(family, [LOSS, {}, OVERLAP], id=family, marks=pytest.mark.slow) for family in FAMILIES],
)
def test_every_strategy(family, options):
    shape = describe_model(tiny_model(family)).shape
    buckets = [f"{s}:40@67" for s in STRATEGIES if Strategy.parse(s).unsupported_reason(shape) is None]
    assert len(buckets) >= 11
    check(run_ranks(4, rank_errors, family, torch.float64, buckets, options, timeout=300), torch.float64)


def other_models(rank, world_size):
    """Experts; layers that run alone; the first layers frozen, all but the head frozen, the embedding alone frozen."""
    found = {}
    for family in ("mixtral", "qwen3_moe", "deepseek_v3"):
        model = tiny_model_of(family)
        rows = random_rows(8, 163, longest=30, seed=2)
        engine = make_engine(model, "dp4+z3:8@16,dp2tp2+z2:16@24,dp2tp2+z3:30@40")
        found[family] = worst_error(engine, make_mini_batch(engine, rows), *shared_reference(model, rows))[0]
        engine.close()
    frozen = {
        "embedding": lambda n: "embed" in n,
        "first layers": lambda n: "embed" in n or "layers.0" in n or "layers.1" in n,
        "all but the head": lambda n: "lm_head" not in n,
        "every second": lambda n: "layers.1" in n or "mlp" in n or "lm_head" in n,
        "embedding is trained": lambda n: "embed" not in n,
    }
    for name, is_frozen in frozen.items():
        model = tiny_model("llama_gqa_bias", torch.float64)
        for n, parameter in model.named_parameters():
            parameter.requires_grad_(not is_frozen(n))
        rows = random_rows(12, 163, longest=40, seed=1)
        engine = make_engine(model, "dp4+z3:8@16,dp2pp2+z3:16@24,tp2pp2+z2:24@32,dp4+rc+z3:40@44")
        loss, gradients = shared_reference(model, rows)
        gradients = {n: gradients[n] for n, p in model.named_parameters() if p.requires_grad}
        for _ in range(2):
            found[name] = worst_error(engine, make_mini_batch(engine, rows), loss, gradients)[0]
        engine.close()
    return found


@pytest.mark.slow
def test_experts_and_frozen_weights():
    for found in run_ranks(4, other_models, timeout=280):
        assert max(found.values()) <= 1e-11, found


@pytest.mark.slow
def test_adapters_stream_the_frozen_base():
    buckets = "dp4+z3:5@24,dp2tp2+z3:10@20,tp2pp2+z3:16,pp4+z2:45@48,dp4+rc+ck17+z3:60"
    cases = [
        ("qwen3_qk_norm_tied", ("qwen3_qk_norm_tied", buckets, {}), {}),
        *(
            (name, (family, buckets, config), {})
            for name, (family, own, config) in lora.CASES.items()
            if config and "tp" in own
        ),
    ]
    lora.check(run_ranks(4, lora.one_step_errors, cases, timeout=280), len(cases))


# ---- what it takes and what it saves


def moved_elements(rank, world_size, strategies):
    """Elements of weights and of gradients that each strategy moved, summed over ranks, of all units and of what is
    loaded once; and the packs of a replica."""
    model, found = tiny_model("llama_gqa_bias", torch.float64), {}
    rows = [{"input_ids": ids, "labels": ids} for n in [40] * (3 * world_size) for ids in [list(range(3, 3 + n))]]
    for strategy in strategies:
        engine = make_engine(model, f"{strategy}:40@40")
        (phase,) = engine.forward_backward(make_mini_batch(engine, rows)).phases
        found[strategy] = (
            (phase.load_bytes + phase.unit_load_bytes) // 8,
            (phase.return_bytes + phase.unit_return_bytes) // 8,
            phase.num_packs // engine.buckets[0].strategy.dp,
        )
        engine.close()
    return found, sum(p.numel() for p in model.parameters())


def test_elements_moved_are_those_of_the_laws():
    """`m` packs: one load and m returns; or two loads a pack, less the units that are in their slots already."""
    found, numel = run_ranks(4, moved_elements, ["dp4+z2", "dp4+z3"])[0]
    for stage, strategy in ((2, "dp4+z2"), (3, "dp4+z3")):
        loads, returns, packs = found[strategy]
        law = traffic(numel, 0, 4, stage, packs)
        assert packs == 3
        assert returns == pytest.approx(4 * law.reduces, rel=0.02)
        if stage == 2:
            assert loads == pytest.approx(4 * law.gathers, rel=0.02)
