"""Expert parallelism in searches: proposed where it pays, left out where it cannot; what a token of a mixture costs."""

import json
from dataclasses import replace

import pytest

from hf_hotspa.costs.data_sheet import layer_cost
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import MemoryModel, activation_bytes
from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.errors import StrategyError
from hf_hotspa.features.experts.capacity import Capacity
from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.search.offers import divided, experts_that_pay
from hf_hotspa.search.setup import Setup, make_plan
from hf_hotspa.strategy import Strategy, check_buckets, expert_strategies, parse_buckets
from tests.unit.test_cost_memory import LLAMA_7B

MIXTRAL_8X7B = {
    "model_type": "mixtral", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu",
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
OF_EXPERTS = 3 * 4096 * 14336
SHAPE = replace(
    LLAMA_7B, layer_parameters=LLAMA_7B.attention_parameters + 8 * OF_EXPERTS, num_experts=8, experts_per_token=2,
    expert_parameters=8 * OF_EXPERTS,
)  # fmt: skip


def names(strategies):
    return [str(s) for s in strategies]


def test_every_division_of_experts() -> None:
    plain = [Strategy(6, 2), Strategy(4, rc=1), Strategy(4, z=3), Strategy(2, 2, 2, sp=True), Strategy(4, ck=8)]
    assert names(expert_strategies(plain, SHAPE)) == [
        "dp6tp2ep2", "dp6tp2ep4", "dp4ep2+rc", "dp4ep4+rc", "dp2tp2pp2ep2+sp", "dp2tp2pp2ep4+sp",
    ]  # fmt: skip
    assert expert_strategies(plain, LLAMA_7B) == []
    assert expert_strategies(plain, replace(SHAPE, ep_unsupported_reason="loose experts")) == []
    # what cannot run is not offered, nor is anything beside cp
    plain = [Strategy(4), Strategy(2, 1, 2), Strategy(2, cp=2), Strategy(2, 2, sp=True)]

    def runnable(**options):
        offered = divided(plain, SHAPE, RunOptions(**options))
        assert all(s.ep == 1 or s.cp == 1 for s in offered)
        return [s for s in offered if s.ep > 1]

    assert names(runnable())[:3] == ["dp4ep2", "dp4ep4", "dp2pp2ep2"]
    assert all(s.pp == 1 for s in runnable(schedule="gpipe"))
    assert all(not s.sp for s in runnable(features=(Capacity(1.25),)))
    assert runnable(features=(HandOver(),)) == []


def test_a_refusal_lists_them_among_the_legal_ones() -> None:
    with pytest.raises(StrategyError, match=r"legal with 2 processes .*: dp2, .*dp2ep2, tp2ep2"):
        check_buckets(parse_buckets("dp4ep4:64"), 2, SHAPE)
    with pytest.raises(StrategyError) as caught:
        check_buckets(parse_buckets("dp4:64"), 2, LLAMA_7B)
    assert "ep" not in str(caught.value.fix).partition(": ")[2]


def test_what_cannot_pay_is_left_out() -> None:
    plain = [Strategy(8), Strategy(8, rc=1), Strategy(4, 2), Strategy(4, 1, 2)]
    everything = [*plain, *expert_strategies(plain, SHAPE)]

    def tokens(strategy):
        return 1000 * strategy.ep * (1 + strategy.rc) * (3 if strategy.tp > 1 else 1)

    assert experts_that_pay(everything, 1000, tokens) == plain
    # dp8 does not hold it: the smallest that does, and one more; no pipeline and nothing that recomputes beside it
    assert names(experts_that_pay(everything, 1500, tokens))[4:] == ["dp8ep2", "dp8ep4"]
    assert names(experts_that_pay(everything, 4000, tokens))[4:] == [
        "dp8ep4", "dp8ep8", "dp4tp2ep2", "dp4tp2ep4",
    ]  # fmt: skip
    # where nothing else holds it, layers that recompute come in
    of_dp = [s for s in everything if s.tp == s.pp == 1]
    assert names(experts_that_pay(of_dp, 16000, tokens))[2:] == ["dp8ep8+rc"]
    # nothing does at all: the largest, of which what is missing is said
    assert names(experts_that_pay(of_dp, 50000, tokens))[2:] == ["dp8ep8", "dp8ep8+rc"]
    # one that stands alone stays
    assert experts_that_pay([Strategy(8, ep=4)], 1000, tokens) == [Strategy(8, ep=4)]


def test_a_token_costs_the_experts_that_compute_it() -> None:
    attention, hidden = SHAPE.attention_parameters, SHAPE.hidden_size
    assert SHAPE.active_parameters == attention + 2 * OF_EXPERTS
    assert LLAMA_7B.active_parameters == LLAMA_7B.layer_parameters
    assert SHAPE.quadratic_cost == SHAPE.attention_size / SHAPE.active_parameters
    # as a dense layer of the same width, and what goes into and comes out of two experts
    dense = replace(
        SHAPE, layer_parameters=SHAPE.active_parameters, num_experts=0, experts_per_token=0, expert_parameters=0
    )
    rows = 2 * 2 * hidden * 2
    for tp in (1, 4):
        assert activation_bytes(SHAPE, tp) == pytest.approx(activation_bytes(dense, tp) + rows)
        assert activation_bytes(SHAPE, tp, ep=4) == pytest.approx(activation_bytes(dense, tp) + rows / tp)
    machine = load_hardware("a800-80g")
    of_mixture, of_dense = (layer_cost(shape, 1, machine, "bfloat16") for shape in (SHAPE, dense))
    assert of_dense.b < of_mixture.b < 1.02 * of_dense.b  # the matrices of an expert are narrower
    assert of_mixture.c > of_dense.c  # all weights are read
    model = MemoryModel(ModelSizes(SHAPE, "bfloat16"), 8)
    other = MemoryModel(ModelSizes(replace(SHAPE, experts_per_token=8), "bfloat16"), 8)
    assert model.breakdown(Strategy(8), 4096).activations < other.breakdown(Strategy(8), 4096).activations / 2
    assert isinstance(SHAPE, ModelShape)


def test_plans_propose_it_where_it_pays(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
    setup = replace(Setup.read(str(tmp_path), "2x8", "h100-80g"), limit_bytes=74 << 30)
    few = [s for s in setup.strategies() if s.z == 0 and s.cp == 1 and not s.sp and not s.rc]
    assert any(s.ep > 1 for s in few)
    monkeypatch.setattr(Setup, "strategies", lambda self: few)
    found = make_plan(setup, "commoncrawl", 8192, mini_batch_size=32).plan.choice
    assert any(bucket.strategy.ep > 1 for bucket in (*found.buckets, found.static))
    assert parse_buckets(str(found)) == found.buckets
    monkeypatch.setattr(Setup, "strategies", lambda self: [s for s in few if s.ep == 1])
    before = make_plan(setup, "commoncrawl", 8192, mini_batch_size=32).plan.choice
    assert found.static_seconds < before.static_seconds
