"""Experts over ranks (`ep`): the grammar, who holds which expert, what it takes, and what is refused."""

import json
import math
from dataclasses import replace

import pytest
import torch

from hf_hotspa.costs.data_sheet import layer_cost
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import MemoryModel, activation_bytes
from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import StrategyError, UnsupportedError
from hf_hotspa.features.experts.capacity import Capacity
from hf_hotspa.features.experts.terms import exchanges
from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.layout.placement import gradient_layout, rank_slots, strategy_layout
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.layout.vector import ParameterSpec, ParameterVector, Part, build_vector
from hf_hotspa.model.replica import from_storage, to_storage
from hf_hotspa.model.specs import describe_model
from hf_hotspa.search.offers import divided, experts_that_pay
from hf_hotspa.search.setup import Setup, make_plan
from hf_hotspa.strategy import Strategy, check_buckets, expert_strategies, parse_buckets
from tests.tiny_families import tiny_model_of
from tests.unit.test_cost_memory import LLAMA_7B

EXPERTS, WIDTH, HIDDEN = 12, 6, 2
STRATEGIES = [
    "dp4ep4", "dp4ep2", "dp2tp2ep2", "dp2tp2ep4", "tp4ep4", "tp4ep2", "dp2pp2ep2", "dp3ep3pp2", "dp2tp3ep2", "dp2tp3ep6",
    "tp6ep2", "dp2cp2ep4", "dp6ep4pp2tp2",
]  # fmt: skip


def vector_of(layers: int = 2) -> ParameterVector:
    """Per layer: fused experts that tp cuts along rows and along columns, ones that it does not cut, and a norm."""
    part = Part(WIDTH, WIDTH, WIDTH)
    specs = []
    for layer in range(layers):
        at = f"layers.{layer}"
        up, down = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
        specs += [
            ParameterSpec(f"{at}.up", up, "float32", layer, 1, (part, part), experts=EXPERTS),
            ParameterSpec(f"{at}.down", down, "float32", layer, 2, (part,), experts=EXPERTS),
            ParameterSpec(f"{at}.bias", (EXPERTS, 3), "float32", layer, experts=EXPERTS),
            ParameterSpec(f"{at}.norm", (HIDDEN,), "float32", layer),
        ]
    return build_vector(specs, [1] * layers, 0)


@pytest.mark.parametrize("text", STRATEGIES)
def test_grammar_groups_and_layout(text):
    strategy = Strategy.parse(text)
    assert Strategy.parse(str(strategy)) == strategy
    assert f"ep{strategy.ep}" in str(strategy)
    groups = strategy.expert_groups()
    assert sorted(rank for group in groups for rank in group) == list(range(strategy.world_size))
    for group in groups:
        assert [strategy.expert_shard(rank) for rank in group] == list(range(strategy.ep))
        assert len({strategy.coord(rank).pp for rank in group}) == 1
    across = any(len({strategy.coord(rank).dp for rank in group}) > 1 for group in groups)
    assert strategy.keeps_step == across
    assert strategy.layout.ep == strategy.ep
    assert strategy.layout != replace(strategy, ep=1).layout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dp2ep4", "divides experts over 4 ranks, and each of its stages has 2"),
        ("dp2pp2ep4", "each of its stages has 2"),
        ("ep2", "each of its stages has 1"),
        ("dp4ep3", "divides experts over 3 ranks"),
        ("dp4ep0", "ep degree 0"),
        ("dp4ep4+z2", "(ep4) and +z2"),
        ("dp4ep4+z3", "(ep4) and +z3"),
        ("tp4ep2+ck8", "(ep2) and +ck8"),
    ],
)
def test_what_cannot_be_is_refused_with_a_fix(text, says):
    with pytest.raises(StrategyError) as caught:
        Strategy.parse(text)
    assert says in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize("text", STRATEGIES)
def test_each_rank_holds_whole_experts_and_adds_the_gradient_of_all_that_it_holds(text):
    strategy, vector = Strategy.parse(text), vector_of()
    layout, gradients = strategy_layout(vector, strategy), gradient_layout(vector, strategy)
    for rank in range(strategy.world_size):
        slots = rank_slots(vector, strategy, rank)
        of_slots = sorted((i.start, i.stop, i.offset) for slot in slots for i in slot.intervals())
        placed = sorted((i.start, i.stop, i.offset) for i in layout.holdings[rank])
        assert _elements(of_slots) == _elements(placed)
        assert sum(slot.numel for slot in slots) == sum(layout.sizes[rank])
        added = _elements([(i.start, i.stop, i.offset) for i in gradients.holdings[rank]])
        for slot in slots:
            if not slot.spec.experts:
                continue
            # the elements of its experts, in local storage order
            numbers = torch.arange(slot.spec.numel).view(slot.spec.shape)
            stored = to_storage(numbers, slot.spec.shard_dim)
            places = {int(n): slot.spec.offset + at for at, n in enumerate(stored)}
            first = EXPERTS // strategy.ep * strategy.expert_shard(rank)
            mine = numbers[first : first + EXPERTS // strategy.ep]
            assert slot.shape == tuple(mine.shape)
            held = [element for i in slot.intervals() for element in range(i.start, i.stop)]
            local = from_storage(torch.tensor(held), slot.shape, slot.spec.shard_dim)
            assert torch.equal(local, mine.clone().apply_(places.get))
            assert set(held) <= added.keys()
    for spec in vector.specs:
        if spec.experts:
            copies = [sum(i.start <= at < i.stop for held in layout.holdings for i in held) for at in range(spec.offset, spec.stop)]  # fmt: skip
            assert set(copies) == {strategy.stage_size // strategy.ep}


def _elements(rows):
    return {start + i: offset + i for start, stop, offset in rows for i in range(stop - start)}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_sizes_from_a_shape_are_those_of_the_layout(family):
    description = describe_model(tiny_model_of(family, torch.float32))
    exact = ModelSizes(description.shape, "float32", vector=description.vector)
    from_shape = ModelSizes(description.shape, "float32")
    of_experts = 4 * sum(spec.numel for spec in description.vector.specs if spec.experts)
    for text, share in (("dp4ep4", 4), ("dp4ep2", 2)):
        strategy, plain = Strategy.parse(text), Strategy.parse("dp4")
        for sizes in (exact, from_shape):
            (apart,), (whole,) = sizes.stages(strategy), sizes.stages(plain)
            saved = whole.weight_bytes - apart.weight_bytes
            assert math.isclose(saved, of_experts * (1 - 1 / share), rel_tol=1e-3), (text, sizes)


def test_time_counts_the_exchange_of_tokens_and_that_replicas_keep_step():
    shape = describe_model(tiny_model_of("mixtral")).shape
    assert (shape.num_experts, shape.experts_per_token) == (8, 2)
    linked = TimeModel("made up", StageCosts((1,)), hop_intra=Hop(0.0, 1.0), shape=shape)
    assert exchanges(replace(linked, hop_intra=Hop(1.0, 1.0)), Strategy.parse("dp4")) == Cost()
    assert exchanges(linked, Strategy.parse("dp4ep4")) == Cost(b=4 * 2 * 3 / 4)
    assert exchanges(linked, Strategy.parse("tp4ep4")) == Cost(b=2 * 3 / 4)
    time = TimeModel.analytic(ModelSizes(shape, "bfloat16"), load_hardware("a100-80g"))
    uneven = [((8,), (64000,)), ((64000,), (8,)), ((8,),), ((8,),)]
    alone, together = (time.phase_seconds(Strategy.parse(name), uneven) for name in ("dp4", "dp4ep4"))
    # two long packs that follow one another, where a replica alone has one of them
    assert together > 1.5 * alone > 0


def test_families_without_experts_that_can_be_divided_are_refused_by_name():
    for family, says in (
        ("llama", "llama has no experts"),
        ("llama4_text", "is not one fused module"),
        ("lfm2_moe", "lfm2_moe"),
    ):
        shape = describe_model(tiny_model_of(family)).shape
        assert says in Strategy.parse("dp4ep4").unsupported_reason(shape), family
    shape = describe_model(tiny_model_of("mixtral")).shape
    assert Strategy.parse("dp8ep8").unsupported_reason(shape) is None
    assert Strategy.parse("dp3ep3").unsupported_reason(shape) == "ep3 does not divide the 8 experts of a layer"


@pytest.mark.parametrize(("schedule", "flexible"), [("gpipe", False), ("1f1b", False), ("auto", True)])
def test_what_has_not_been_made_exact_with_it_is_refused(schedule, flexible):
    buckets, shape = parse_buckets("dp2pp2ep2:64"), describe_model(tiny_model_of("mixtral")).shape
    RunOptions().check(buckets, shape)
    with pytest.raises(UnsupportedError) as caught:
        RunOptions(schedule, features=(HandOver(),) if flexible else ()).check(buckets, shape)
    assert caught.value.fix


# -- in searches: proposed where it pays, left out where it cannot; what a token of a mixture costs -------------------------

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
