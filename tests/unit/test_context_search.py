"""Context parallelism in searches: proposed where it pays, left out where it cannot, and at no cost to the answer."""

from dataclasses import replace

import pytest

import hf_hotspa.search.setup as planning
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions
from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.search.estimate import Evaluator, LengthTable
from hf_hotspa.search.offers import context_strategies, divided, that_pay
from hf_hotspa.search.setup import Setup, make_plan
from hf_hotspa.strategy import Strategy, parse_buckets
from tests.unit.test_cost_memory import LLAMA_7B


def names(strategies):
    return [str(s) for s in strategies]


def test_every_division_of_replicas() -> None:
    assert names(context_strategies([Strategy(6, 2, 1, sp=True), Strategy(1, 8, 1)], LLAMA_7B)) == [
        "dp3cp2tp2+sp", "dp2cp3tp2+sp", "cp6tp2+sp",
    ]  # fmt: skip
    # what cannot run is not offered: pipelines of equal packs, and the ring where it has no kernel
    plain = [Strategy(4, 1, 1), Strategy(2, 1, 2)]
    assert names(divided(plain, LLAMA_7B, RunOptions())) == ["dp2cp2", "cp4", "cp2pp2"]
    assert names(divided(plain, LLAMA_7B, RunOptions("gpipe"))) == ["dp2cp2", "cp4"]
    assert divided(plain, LLAMA_7B, RunOptions(context_parallel="ring", device_type="cuda")) == []
    assert divided(plain, LLAMA_7B, RunOptions(features=(HandOver(),))) == []


def test_what_cannot_pay_is_left_out() -> None:
    plain = [Strategy(8, 1, 1), Strategy(8, 1, 1, z=3), Strategy(4, 2, 1)]
    everything = [*plain, *context_strategies(plain, LLAMA_7B)]
    holds = {8: 1000, 4: 4000}

    def tokens(strategy):
        return holds[strategy.dp * strategy.cp] * strategy.cp

    # many short sequences, and all replicas hold the longest
    assert that_pay(everything, [100] * 64, 64, 500, tokens, 0.0) == plain
    # one that takes as long as three replicas have to do: cp4 of eight, and of four cp2
    found = that_pay(everything, [1] * 63 + [40], 64, 40, tokens, 0.0)
    assert names(s for s in found if s.cp > 1) == ["dp4cp2", "dp2cp4", "dp2cp2tp2"]
    # dp8 does not hold the longest: two that do; `+z3` only where nothing else does
    found = that_pay(everything, [100] * 640, 640, 1500, tokens, 0.0)
    assert names(s for s in found if s.cp > 1) == ["dp4cp2", "dp2cp4"]
    found = that_pay(everything, [100] * 640, 640, 50000, tokens, 0.0)
    assert set(everything) == set(found)
    # one that stands alone stays
    assert that_pay([Strategy(2, cp=4)], [100] * 64, 64, 500, tokens, 0.0) == [Strategy(2, cp=4)]


def test_plans_propose_it_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup.read("llama2-7b", "1x8", "a800-80g")
    found = make_plan(setup, "github", 131072).plan.choice
    chosen = [bucket.strategy for bucket in (*found.buckets, found.static)]
    assert any(strategy.cp > 1 for strategy in chosen)
    assert parse_buckets(str(found)) == found.buckets
    short = make_plan(setup, "commoncrawl", 2048).plan.choice
    assert all(bucket.strategy.cp == 1 for bucket in (*short.buckets, short.static))
    with monkeypatch.context() as patched:
        patched.setattr(planning, "divided", lambda *args: [])
        before = make_plan(setup, "github", 131072).plan.choice
        again = make_plan(setup, "commoncrawl", 2048).plan.choice
        assert replace(again, num_simulated=short.num_simulated) == short
    assert found.seconds < before.seconds * 0.98
    assert found.static_seconds < before.static_seconds


def test_estimates_count_the_ranks_of_cp() -> None:
    """Equal packs, so that what is estimated is exact: on devices of their own, in pipelines, and on shared cores."""
    setup = Setup.read("llama2-7b", "1x8", "a800-80g")
    batch = [4096] * 16
    for strategy in (Strategy(2, cp=4), Strategy(2, 2, cp=2), Strategy(1, 1, 2, cp=4)):
        for slots in (float("inf"), 2.0):
            time = replace(setup.cost.time, slots=slots)
            exact = Evaluator([batch], time, {strategy: 0.0}, 0.0).phase(strategy, 0, 4096, 4096).seconds
            table = LengthTable([batch], [0, 4096])
            estimate = table.phase_seconds(time, strategy, [(4096, 0)], 0.0)[0, 1]
            assert estimate == pytest.approx(exact, rel=0.02 if strategy.pp == 1 else 0.15)
            assert Evaluator([batch], time, {strategy: 0.0}, 0.0).bound(strategy, 0, 4096, 4096) <= exact * (1 + 1e-9)


def test_memory_of_what_is_gathered_and_repeated() -> None:
    """With Ulysses repeated heads are kept; what is gathered is there while no logits are."""
    few = replace(LLAMA_7B, num_key_value_heads=2)

    def activations(shape, way, strategy, tokens=65536):
        model = MemoryModel(ModelSizes(shape, "bfloat16"), 8, MemoryOptions(context_parallel=way))
        found = model.breakdown(strategy, tokens)
        return found.activations, found.logits

    whole, logits = activations(LLAMA_7B, "auto", Strategy(8), 65536 // 8)
    gathered, same = activations(LLAMA_7B, "allgather", Strategy(1, cp=8))
    assert logits == same
    pair = 2 * 32 * 128 * 65536  # elements of keys and values
    assert gathered - whole == pytest.approx(pair * (1.5 * 2 + 4) - logits)
    assert gathered > whole * 1.05
    assert activations(few, "allgather", Strategy(1, cp=8))[0] == activations(few, "auto", Strategy(8), 65536 // 8)[0]
    # 16 query heads for each key/value head, 4 query heads a rank: each is repeated four times
    whole, _ = activations(few, "auto", Strategy(8), 65536 // 8)
    ulysses, _ = activations(few, "ulysses", Strategy(1, cp=8))
    assert ulysses - whole == pytest.approx(3 * 2 * 2 * 128 * 2 * 8192 * few.num_layers)
