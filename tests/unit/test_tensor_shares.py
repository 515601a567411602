"""Shares of MLPs by the relative step time of ranks: the best ones, the same for every part of a layer, and what layouts make of them."""

import itertools
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.costs.memory import MemoryModel
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.terms import Cost
from hf_hotspa.costs.time import TimeModel, fastest_stages
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.features.slow_devices.reaction import StageCuts
from hf_hotspa.features.slow_devices.speeds import SpeedHistory, shares_by_speed, works_by_degree
from hf_hotspa.layout.placement import gradient_layout, rank_slots, strategy_layout
from hf_hotspa.layout.shares import (
    cut_columns,
    have_same_shards,
    is_uneven,
    largest_share,
    shard_rows,
    step_times_of_groups,
    works,
)
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.model.specs import describe_model
from hf_hotspa.packing.bucketing import Speeds
from hf_hotspa.strategy import Bucket, Strategy
from tests.families import tiny_model


def vector_of(family: str) -> ParameterVector:
    return describe_model(tiny_model(family, torch.float64)).vector


def sizes(columns: int, beside: int, step_times: tuple[int, ...]) -> list[int]:
    ends = cut_columns(columns, beside, step_times)
    return [stop - start for start, stop in itertools.pairwise(ends)]


def test_a_slow_rank_gets_so_many_columns_that_all_are_done_together():
    assert sizes(48, 0, (100, 300)) == [36, 12]
    assert sizes(48, 12, (100, 300)) == [42, 6]  # 54 and 3 * 18: its heads cost it as well
    assert sizes(48, 48, (100, 800)) == [47, 1]  # attention alone takes longer than all the rest: one column is left
    assert sizes(14336, 0, (100, 100, 400, 100)) == [4480, 4480, 1024, 4352]  # in whole tiles
    assert sizes(1000, 0, (100, 200, 100)) == [400, 200, 400]
    assert cut_columns(1, 0, (100, 200)) == ()


@settings(max_examples=80)
@given(st.integers(2, 14), st.integers(0, 20), st.lists(st.sampled_from([100, 130, 400]), min_size=2, max_size=3))
def test_the_shares_are_the_best_of_all(columns: int, beside: int, step_times: list[int]) -> None:
    if columns < len(step_times):
        assert cut_columns(columns, beside, tuple(step_times)) == ()
        return
    found = sizes(columns, beside, tuple(step_times))
    assert sum(found) == columns
    assert min(found) >= 1

    def slowest(shares: Any) -> int:
        return max(step_time * (beside + share) for step_time, share in zip(step_times, shares, strict=True))

    every = (s for s in itertools.product(range(1, columns + 1), repeat=len(step_times)) if sum(s) == columns)
    assert slowest(found) == min(map(slowest, every))
    assert Counter(zip(step_times, found, strict=True)) == Counter(
        zip(reversed(step_times), sizes(columns, beside, tuple(reversed(step_times))), strict=True)
    )


FAMILIES = ("llama_gqa_bias", "phi3_fused", "qwen3_qk_norm_tied")
STRATEGIES = [
    Strategy(tp=4).ordered((0, 2, 1, 3)),
    Strategy(dp=2, tp=2),
    Strategy(tp=2, pp=2),
    Strategy(tp=2, cp=2),
    Strategy(dp=2, tp=2, z=3),
    Strategy(tp=4, sp=True),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_layouts_hold_every_element_once_a_replica_and_slow_ranks_hold_less(family: str, strategy: Strategy) -> None:
    even = vector_of(family)
    vector = even.with_step_times((100, 400, 100, 100))
    layout, gradients, usual = (
        strategy_layout(vector, strategy),
        gradient_layout(vector, strategy),
        strategy_layout(even, strategy),
    )
    held = [sum(layout.rank_sizes(rank)) for rank in range(4)]
    before = [sum(usual.rank_sizes(rank)) for rank in range(4)]
    assert held[1] < before[1]
    assert held[0] > before[0]
    for rank in range(4):
        assert sum(slot.numel for slot in rank_slots(vector, strategy, rank)) == held[rank]
        of_group = [r for r in range(4) if r // strategy.tp == rank // strategy.tp]
        if 1 not in of_group:  # another replica, or stage
            assert held[rank] == before[rank]
    for spec in vector.specs:
        if not any(part.by_step_time for part in spec.parts):
            continue
        for first in range(0, 4, strategy.tp):
            group = range(first, first + strategy.tp)
            rows = sorted(row for rank in group for row in shard_rows(vector, strategy, spec, rank))
            ends = [0, *itertools.accumulate(b - a for a, b in rows)]
            assert [a for a, _ in rows] == ends[:-1]
            assert ends[-1] == spec.shape[spec.shard_dim or 0]
        added = Counter(
            i for rank in range(4) for s in gradients.holdings[rank] for i in range(s.start, s.stop)
            if spec.offset <= i < spec.stop
        )  # fmt: skip
        assert set(added.values()) == {strategy.dp * strategy.cp}
        assert len(added) == spec.numel


def test_work_is_that_of_the_shares_and_ends_together():
    vector, tp2 = vector_of("llama_gqa_bias").with_step_times((100, 150)), Strategy(tp=2)
    own = works(vector, tp2)
    assert sum(own) == pytest.approx(2)
    assert own[0] == pytest.approx(1.5 * own[1], rel=0.06)
    assert largest_share(vector, tp2) > 0.5
    assert works(vector, Strategy(dp=2)) == (1, 1)
    assert works(vector.with_step_times(()), tp2) == (1, 1)
    assert largest_share(vector.with_step_times(()), tp2) == 0.5
    dp2 = Strategy(dp=2, tp=2)
    assert works(vector.with_step_times((100, 100, 100, 150)), dp2)[:2] == (1, 1)


def test_even_paces_and_experts_stay_even():
    vector = vector_of("llama_gqa_bias")
    assert not is_uneven(vector.with_step_times((300, 300)), Strategy(tp=2))
    assert have_same_shards(vector, vector.with_step_times((300, 300)), Strategy(tp=2))
    assert not have_same_shards(vector, vector.with_step_times((100, 300)), Strategy(tp=2))
    assert have_same_shards(vector, vector.with_step_times((100, 300)), Strategy(dp=2))
    experts = vector_of("mixtral")
    assert not is_uneven(experts.with_step_times((100, 300)), Strategy(tp=2))
    with pytest.raises(HotspaConfigError, match="relative step time of a rank is not positive"):
        vector.with_step_times((0, 100))


def test_memory_is_that_of_the_fullest_rank():
    description = describe_model(tiny_model("llama_gqa_bias", torch.float64))
    vector = description.vector.with_step_times((100, 100, 100, 400))
    even, uneven = (ModelSizes(description.shape, vector=v) for v in (description.vector, vector))
    models = [MemoryModel(sizes, 4) for sizes in (even, uneven)]
    for strategy in STRATEGIES[:-2]:
        held = [sum(strategy_layout(vector, strategy).rank_sizes(rank)) for rank in range(4)]
        stages = uneven.stages(strategy)
        for stage in range(strategy.pp):
            of_stage = held[stage * strategy.stage_size : (stage + 1) * strategy.stage_size]
            assert stages[stage].weight_bytes == 8 * max(of_stage)
        before, after = (model.stages(Bucket(strategy, 0, 64))[-1] for model in models)
        assert after.activations > before.activations
        assert after.weights > before.weights
    assert uneven.stages(Strategy(dp=4)) == even.stages(Strategy(dp=4))
    assert uneven.mlp_share(Strategy(dp=2, tp=2)) > 0.5


# -- which shares -------------------------------------------------------------------------------------------------------

TP2, TP4 = Strategy(tp=2), Strategy(tp=4)


def test_shares_are_changed_for_a_gain_alone_and_even_ones_come_back():
    vector = vector_of("llama_gqa_bias")
    found = shares_by_speed(vector, [TP2], (1.0, 0.25))
    assert found == (100, 400)
    uneven = vector.with_step_times(found)
    assert shares_by_speed(uneven, [TP2], (1.0, 0.245)) == found  # too little to gain
    assert shares_by_speed(uneven, [TP2], (1.0, 0.8)) == (100, 125)
    assert shares_by_speed(uneven, [TP2], None) == ()
    assert shares_by_speed(vector, [Strategy(dp=2)], (1.0, 0.25)) == ()
    assert shares_by_speed(vector, [TP2], (0.5, 0.5)) == ()  # both alike
    assert shares_by_speed(vector_of("mixtral"), [TP2], (1.0, 0.25)) == ()
    # one of two replicas is faster, the other one stays as it is
    assert shares_by_speed(vector, [Strategy(dp=2, tp=2)], (1.0, 1.0, 1.0, 0.25)) == (100, 100, 100, 400)


def test_a_group_that_divides_by_speed_is_a_faster_stage_and_replica():
    even = vector_of("llama_gqa_bias")
    vector = even.with_step_times((100, 400, 100, 100))
    two, piped = Strategy(dp=2, tp=2), Strategy(tp=2, pp=2)
    assert step_times_of_groups(even, two, (100, 400, 100, 100)) == (400, 400, 100, 100)
    faster, same, *others = step_times_of_groups(vector, two, vector.step_times)
    assert faster == same < 300
    assert others == [100, 100]
    assert fastest_stages(two, (300, 300, 100, 100)) == (100,)
    assert fastest_stages(piped, (300, 400, 100, 100)) == (400, 100)
    works = works_by_degree(vector, [two, piped, Strategy(dp=4)])
    assert [tp for tp, _ in works] == [2]
    slow, quick = Speeds((1.0, 0.25, 1.0, 1.0), works=works).replica_speeds(two) or (0.0, 0.0)
    assert quick == 1.0
    assert slow == pytest.approx(100 / faster, rel=0.01)
    assert Speeds((1.0, 0.25, 1.0, 1.0)).replica_speeds(two) == (0.25, 1.0)
    assert works_by_degree(even, [two]) == ()
    history = SpeedHistory()
    history.trained(0, Speeds((1.0, 0.25, 1.0, 1.0), works=works))
    resumed = SpeedHistory()
    resumed.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert resumed.of(1) == history.of(1)
    with pytest.raises(HotspaConfigError, match="works of another number of ranks"):
        resumed.load_state_dict({"in_force": [[0, [1.0, 0.5], [], [[2, [1.0]]]]]})


def test_time_model_knows_the_step_times_of_groups():
    vector = vector_of("llama_gqa_bias")
    layer, packs = Cost(0.0, 1e-3, 0.0), [[(100,)] * 6]

    def seconds(strategy: Strategy, paced: ParameterVector) -> float:
        model = TimeModel(
            "test", StageCosts(vector.layer_costs), {1: layer, 2: layer, 4: layer}, paced=paced, forward_share=1 / 3
        )
        return model.phase_seconds(strategy, packs * strategy.dp)

    slow = vector.with_step_times((100, 400, 100, 100))
    for strategy in (TP4, Strategy(tp=2, pp=2)):
        assert seconds(strategy, vector) < seconds(strategy, slow) < 4 * seconds(strategy, vector)
    step_time = step_times_of_groups(slow, TP4, slow.step_times)[0] / 100
    assert seconds(TP4, slow) == pytest.approx(step_time * seconds(TP4, vector))
    fast = Strategy(dp=2, tp=2)  # the other replica has more packs
    assert seconds(fast, slow) == seconds(fast, vector)


# -- in a run -----------------------------------------------------------------------------------------------------------


class Engine:
    """The part of an engine that decides on shares, on one rank."""

    def __init__(self, vector: ParameterVector, strategy: Strategy = TP2) -> None:
        self.phases, self.asked = {strategy: None}, list[tuple[int, ...]]()
        self.description = SimpleNamespace(vector=vector)

    def recut(self, step_times: Any, fits: Any, of_ranks: tuple[int, ...]) -> bool:
        self.asked.append(of_ranks)
        vector, before = self.description.vector.with_step_times(of_ranks), self.description.vector
        self.description = SimpleNamespace(vector=vector)
        return not all(have_same_shards(before, vector, s) for s in self.phases)


def test_a_run_divides_says_so_and_goes_back():
    engine = Engine(vector_of("llama_gqa_bias"))
    cuts = StageCuts(engine, fits=lambda _: None)  # type: ignore[arg-type]
    assert cuts.decide(None) == ""
    assert cuts.decide((1.0, 0.25)) == "MLP shares of slow ranks are now: tp2 rank 1 2%"
    assert cuts.decide((1.0, 0.245)) == ""
    assert cuts.works[0][1][0] > 1 > cuts.works[0][1][1]
    resumed = StageCuts(Engine(vector_of("llama_gqa_bias")), fits=lambda _: None)  # type: ignore[arg-type]
    resumed.load_state_dict(json.loads(json.dumps(cuts.state_dict())))
    assert resumed.begin() == "MLP shares of slow ranks are now: tp2 rank 1 2%"
    assert resumed.state_dict() == cuts.state_dict()
    assert cuts.decide(None) == "MLPs are divided evenly again"
    assert engine.asked == [(100, 400), ()]
    assert cuts.works == ()


def test_without_dense_mlps_shares_stay_even():
    engine = Engine(vector_of("mixtral"), Strategy(dp=2, tp=2))
    cuts = StageCuts(engine, fits=lambda _: None)  # type: ignore[arg-type]
    assert cuts.decide((1.0, 1.0, 1.0, 0.5)) == (
        "the shards of dp2tp2 stay even, as no layer has a dense MLP that its plan divides"
    )
    assert cuts.decide((1.0, 1.0, 1.0, 0.3)) == ""
    assert engine.asked == []
