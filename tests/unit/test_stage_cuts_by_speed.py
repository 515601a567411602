"""Cuts of pipelines by the speed of devices: which one is the best, when it is left, and what a run keeps of it."""

import json
from fractions import Fraction
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.costs.terms import Cost
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import DeviceMemoryError, HotspaConfigError
from hf_hotspa.features.slow_devices.reaction import StageCuts
from hf_hotspa.features.slow_devices.speeds import (
    LEAST_GAIN,
    StepTimes,
    cut_by_speed,
    stage_loads,
    stages_of_replicas,
    step_times_of_ranks,
    throughput,
)
from hf_hotspa.layout.stages import USUAL_STEP_TIME, StageCosts
from hf_hotspa.layout.vector import ParameterVector
from hf_hotspa.packing.bucketing import Speeds
from hf_hotspa.strategy import Strategy

EIGHT = StageCosts((1,) * 8)
PP2, PP4 = Strategy(1, 1, 2), Strategy(1, 1, 4)


def sizes(costs: StageCosts, depth: int) -> list[int]:
    return [len(stage) for stage in costs.stages(depth)]


def after(costs: StageCosts, strategies: list[Strategy], speeds: tuple[float, ...] | None) -> StageCosts:
    return costs.with_step_times(cut_by_speed(costs, strategies, speeds))


def test_a_slow_stage_gets_fewer_layers_and_an_even_cut_comes_back():
    cut = after(EIGHT, [PP2], (1.0, 1 / 3))
    assert sizes(cut, 2) == [6, 2]
    assert sizes(cut, 4) == [2, 2, 2, 2]  # no pipeline of the pool
    assert after(cut, [PP2], None) == EIGHT


@settings(max_examples=60)
@given(st.data())
def test_the_cut_is_the_fastest_of_all(data: Any) -> None:
    layers = data.draw(st.lists(st.integers(1, 9), min_size=4, max_size=8))
    depth = data.draw(st.integers(2, 4))
    step_times = tuple(data.draw(st.lists(st.sampled_from([100, 150, 400]), min_size=depth, max_size=depth)))
    head, embedding = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 3))
    sends = tuple(data.draw(st.lists(st.integers(0, 9), min_size=len(layers) - 1, max_size=len(layers) - 1)))
    costs = StageCosts(tuple(layers), head, embedding, sends)
    every = [
        tuple(range(a, b) for a, b in pairwise((0, *cut, len(layers))))
        for cut in combinations(range(1, len(layers)), depth - 1)
    ]
    best = max(throughput(costs, stages, [step_times]) for stages in every)
    assert throughput(costs, costs.with_step_times((step_times,)).stages(depth), [step_times]) == best
    cut = after(costs, [Strategy(pp=depth)], tuple(100 / step_time for step_time in step_times)).stages(depth)
    even = throughput(costs, costs.stages(depth), [step_times])
    assert throughput(costs, cut, [step_times]) == (best if best >= (1 + LEAST_GAIN) * even else even)
    assert costs.with_step_times(((USUAL_STEP_TIME,) * depth,)).stages(depth) == costs.stages(depth)


def test_replicas_that_are_not_slow_keep_the_even_cut_where_another_would_cost_them_more():
    slow = (1.0, 1.0, 0.25, 1.0)  # of dp2pp2 the second stage of the first replica
    assert stages_of_replicas(Strategy(2, 1, 2), step_times_of_ranks(slow)) == [[100, 400], [100, 100]]
    assert after(EIGHT, [Strategy(2, 1, 2)], slow) == EIGHT
    both = after(EIGHT, [Strategy(2, 1, 2)], (1.0, 1.0, 0.25, 0.25))
    assert sizes(both, 2) == [7, 1]
    assert sizes(after(EIGHT, [Strategy(1, 2, 2)], slow), 2) == [7, 1]  # one replica: the stage is slow
    # the pool has one cut for its pipelines of a depth
    mixed = [Strategy(2, 1, 2), Strategy(1, 2, 2)]
    assert sizes(after(EIGHT, mixed, slow), 2) == [7, 1]


def test_runs_of_layers_on_a_slow_rank_are_shorter():
    """Stage s of an interleaved pipeline is on rank s mod pp."""
    interleaved = Strategy(1, 1, 2, v=2)
    assert stages_of_replicas(interleaved, (100, 300)) == [[100, 300, 100, 300]]
    cut = after(EIGHT, [interleaved], (1.0, 1 / 3))
    assert sizes(cut, 4) == [3, 1, 3, 1]
    assert cut.rank_costs(2, 2) == [6, 2]
    assert throughput(EIGHT, cut.stages(4), [[100, 300] * 2], 2) == Fraction(1, 6)
    replicas = Speeds((1.0, 1.0, 1 / 6, 1.0), stage_loads(cut)).replica_speeds(Strategy(2, 1, 2, v=2))
    assert replicas == pytest.approx((1 / 3, 2 / 3))


def test_a_cut_is_left_for_one_that_is_faster_by_a_share_at_least():
    hundred = StageCosts((1,) * 100)
    cut = after(hundred, [PP2], (1.0, 0.5))
    assert sizes(cut, 2) == [67, 33]
    assert after(cut, [PP2], (1.0, 0.48)) == cut  # two layers more or less
    other = after(cut, [PP2], (1.0, 0.4))
    assert sizes(other, 2) == [72, 28]
    gain = throughput(cut, other.stages(2), [[100, 250]]) / throughput(cut, cut.stages(2), [[100, 250]])
    assert gain >= 1 + LEAST_GAIN
    assert after(other, [PP2], None) == hundred


def test_time_model_cuts_alike_and_knows_the_step_times_of_stages():
    layer = Cost(0.0, 1e-3, 0.0)
    even = TimeModel("test", StageCosts((1,) * 8), {1: layer}, forward_share=1 / 3)
    slow = TimeModel("test", EIGHT.with_step_times(((100, 300),)), {1: layer}, forward_share=1 / 3)
    assert [cost.b for cost in even.stage_costs(PP2)] == pytest.approx([4e-3, 4e-3])
    assert [cost.b for cost in slow.stage_costs(PP2)] == pytest.approx([6e-3, 6e-3])
    assert slow.stage_costs(PP4) == even.stage_costs(PP4)
    packs = [[(100,)] * 6]
    kept = TimeModel(
        "test", StageCosts((1,) * 8), {1: layer * 3}, forward_share=1 / 3
    )  # as if the slow stage kept its layers
    assert even.phase_seconds(PP2, packs) < slow.phase_seconds(PP2, packs) < kept.phase_seconds(PP2, packs)


def test_paces_that_are_none_are_refused_and_plain_cuts_are_those_before():
    with pytest.raises(HotspaConfigError, match="relative step time of a stage is not positive"):
        StageCosts((1, 1), step_times=((0, 1),))
    uneven = StageCosts((4, 1, 1, 1), sends=(1, 1, 1))
    assert uneven.stages(2) == uneven.with_step_times([(USUAL_STEP_TIME,) * 2]).stages(2)
    assert json.loads(json.dumps(EIGHT.with_step_times([(100, 300)]).step_times)) == [[100, 300]]


# -- in a run -----------------------------------------------------------------------------------------------------------


class Engine:
    """The part of an engine that decides on cuts, on one rank; its memory holds so many layers on a stage."""

    def __init__(self, most_layers: int) -> None:
        self.phases = {PP2: None}
        self.most_layers, self.asked = most_layers, list[StepTimes]()
        self.take(EIGHT)

    def take(self, costs: StageCosts) -> None:
        self.description = SimpleNamespace(vector=ParameterVector((), (), costs.layers, 0, costs))

    def recut(self, step_times: StepTimes, fits: Any, of_ranks: tuple[int, ...]) -> bool:
        self.asked.append(step_times)
        costs = EIGHT.with_step_times(step_times)
        if max(sizes(costs, 2)) > self.most_layers:
            raise DeviceMemoryError("too many layers")
        changed = costs.stages(2) != self.description.vector.stage_costs.stages(2)
        self.take(costs)
        return changed


def test_a_run_asks_once_for_a_cut_says_what_it_is_and_goes_back():
    engine, taken = Engine(8), list[Any]()
    cuts = StageCuts(engine, fits=lambda _: None, takes=taken.append)  # type: ignore[arg-type]
    assert cuts.decide(None) == ""
    assert cuts.decide((1.0, 1 / 3)) == "layers per stage are now: pp2 6+2"
    assert cuts.decide((1.0, 1 / 3)) == cuts.decide((1.0, 0.34)) == ""  # the same, and too little to gain
    assert cuts.loads == ((1.5, 0.5),)
    assert engine.asked == [((100, 300),)]
    assert cuts.decide(None) == "layers per stage are now: pp2 4+4"
    assert cuts.loads == ()
    assert len(taken) == 2


def test_a_cut_that_memory_does_not_hold_is_said_once():
    cuts = StageCuts(Engine(5), fits=lambda _: None)  # type: ignore[arg-type]
    assert "as memory does not hold another partition" in cuts.decide((1.0, 1 / 3))
    assert cuts.decide((1.0, 0.25)) == ""
    assert cuts.decide((1.0, 0.6)) == "layers per stage are now: pp2 5+3"
    assert "as memory does not hold another partition" in cuts.decide((1.0, 0.2))  # after one that it held
    assert cuts.decide(None).endswith("pp2 4+4")


def test_a_resumed_run_takes_the_cut_of_the_one_before():
    first = StageCuts(Engine(8), fits=lambda _: None)  # type: ignore[arg-type]
    first.decide((1.0, 1 / 3))
    state = json.loads(json.dumps(first.state_dict()))
    engine = Engine(8)
    resumed = StageCuts(engine, fits=lambda _: None)  # type: ignore[arg-type]
    assert resumed.begin() == ""
    resumed.load_state_dict(state)
    assert engine.asked == []  # not yet: the other ranks may still be reading
    assert resumed.begin().endswith("pp2 6+2")
    assert resumed.begin() == resumed.decide((1.0, 1 / 3)) == ""
    assert resumed.state_dict() == first.state_dict()
    resumed.load_state_dict({"paces": [], "decided": None})  # of a run without slow devices
    assert resumed.begin().endswith("pp2 4+4")
    for damage in ({}, {"paces": [[0, 1]], "decided": None}, {"paces": [["x"]], "decided": None}):
        with pytest.raises(HotspaConfigError, match="stages of pipelines cannot be read"):
            resumed.load_state_dict(damage)
