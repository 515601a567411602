"""Predicted against measured: nothing is touched while predictions hold, and everything is corrected alike when not."""

import json
import random
from hashlib import sha256

import pytest

from hf_hotspa.costs.online_calibration import (
    LIMIT,
    WINDOW,
    Factors,
    OnlineCalibration,
    PhaseSeconds,
    ScaledTime,
    fingerprint,
)
from hf_hotspa.costs.terms import Cost
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.packing.bucketing import plan_mini_batch
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.search.chooser import PhaseChooser, predict_phases
from hf_hotspa.strategy import Strategy, parse_buckets
from tests.run_logs import of_earlier_releases

DP, TP, PP = Strategy(dp=4), Strategy(tp=4), Strategy(pp=4)


def observe(online: OnlineCalibration, count: int, *ratios: tuple[Strategy, float, float]):
    """Shows `count` mini-batches whose phases took (computation, switch) times what was predicted."""
    refits = []
    for number in range(count):
        predicted = [PhaseSeconds(s, 1.0 + 0.1 * number, 0.1) for s, _, _ in ratios]
        measured = [
            PhaseSeconds(s, p.compute_s * c, p.switch_s * w) for p, (s, c, w) in zip(predicted, ratios, strict=True)
        ]
        refits.append(online.observe(predicted, measured))
    return [refit for refit in refits if refit is not None]


def test_good_predictions_are_left_alone() -> None:
    online = OnlineCalibration([DP, TP])
    assert not observe(online, 50, (DP, 1.2, 1.2), (TP, 0.85, 1.0))
    assert online.factors == Factors()


def test_bad_predictions_are_corrected_once_and_then_hold() -> None:
    online = OnlineCalibration([DP, TP, PP])
    [refit] = observe(online, 4 * WINDOW, (DP, 1.5, 3.0), (TP, 2.5, 1.0))
    assert refit.error > LIMIT
    assert refit.factors.compute[DP] == pytest.approx(1.5)
    assert refit.factors.compute[TP] == pytest.approx(2.5)
    assert refit.factors.switch[DP] == pytest.approx(3.0)
    assert refit.factors.switch[TP] == pytest.approx(1.0)
    # what did not run is taken to be off by as much as the rest: else it would look like a bargain
    assert refit.factors.compute[PP] == pytest.approx(2.0)
    assert "tp4 2.50 / 1.00" in str(refit)


def test_one_hiccup_changes_nothing_and_errors_do_not_cancel() -> None:
    online = OnlineCalibration([DP, TP])
    for _ in range(5):
        assert not observe(online, WINDOW // 2, (DP, 1.0, 1.0))
        assert not observe(online, 1, (DP, 50.0, 1.0))
    cancelling = OnlineCalibration([DP, TP])
    assert observe(cancelling, WINDOW, (DP, 1.6, 1.0), (TP, 0.4, 1.0))  # the sum is right


def test_a_strategy_of_rare_sequences_is_corrected_alone() -> None:
    online = OnlineCalibration([DP, TP, PP])
    refits = [observe(online, 1, (DP, 1.1, 1.0), *[(TP, 1.6, 1.0)] * (number % 5 == 0)) for number in range(30)]
    [(refit,)] = filter(None, refits)
    assert refits.index([refit]) == 10  # the third phase of tp; most mini-batches have none
    assert refit.factors.to_dict() == {"tp4": [pytest.approx(1.6), 1.0]}
    assert str(refit).startswith("predicted seconds of tp4 were off by ")
    slower, *_ = observe(online, WINDOW, (DP, 2.0, 2.0))  # now everything takes twice as long
    common = slower.factors.compute[DP]
    assert common > 1.5
    assert slower.factors.compute == {DP: common, TP: pytest.approx(1.6 * common), PP: common}


@pytest.mark.parametrize("ratios", [(1.6, 1.6, 1.1), (1.6, 0.5, 1.6), (1.6, 1.6)])
def test_a_strategy_is_corrected_alone_only_if_it_is_wrong_each_time(ratios) -> None:
    online = OnlineCalibration([DP, TP])
    for ratio in ratios:
        assert not observe(online, 1, (DP, 1.0, 1.0), (TP, ratio, 1.0))
        assert not observe(online, 4, (DP, 1.0, 1.0))
    assert online.factors == Factors()


def test_a_refit_is_bounded() -> None:
    online = OnlineCalibration([DP])
    [first] = observe(online, WINDOW, (DP, 1000.0, 1.0))
    assert first.factors.compute[DP] == 4.0
    [second] = observe(online, WINDOW, (DP, 1000.0, 1.0))
    assert second.factors.compute[DP] == 16.0


def test_without_switches_there_is_no_factor_for_them() -> None:
    online = OnlineCalibration([DP])
    for _ in range(WINDOW):
        online.observe([PhaseSeconds(DP, 1.0, 0.0)], [PhaseSeconds(DP, 2.0, 0.0)])
    assert online.factors.to_dict() == {"dp4": [2.0, 1.0]}


def test_the_state_goes_on_where_it_stopped() -> None:
    rng = random.Random(3)
    whole, first = OnlineCalibration([DP, TP]), OnlineCalibration([DP, TP])
    stream = [
        (DP, rng.uniform(1, 3), rng.uniform(0.5, 2)) if rng.random() < 0.6 else (TP, rng.uniform(1, 3), 1.0)
        for _ in range(40)
    ]
    for phase in stream:
        observe(whole, 1, phase)
    for phase in stream[:17]:
        observe(first, 1, phase)
    second = OnlineCalibration([DP, TP])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for phase in stream[17:]:
        observe(second, 1, phase)
    assert second.state_dict() == whole.state_dict()
    assert whole.factors != Factors()


@pytest.mark.parametrize(
    "state", [{}, {"factors": {}}, {"factors": {"x": [1, 1]}, "window": []}, {"factors": {}, "window": [[["dp1", 1]]]}]
)
def test_a_broken_state_is_refused(state) -> None:
    with pytest.raises(HotspaConfigError, match="leave it out|not a strategy"):
        OnlineCalibration([DP]).load_state_dict(state)


def test_scaled_seconds_are_scaled_for_every_kind_of_strategy() -> None:
    time = TimeModel("test", StageCosts((1,) * 8), {1: Cost(1e-9, 1e-6, 1e-4), 4: Cost(1e-9, 5e-7, 1e-4)})
    scaled = ScaledTime.of(time, {PP: 3.0, TP: 0.5})
    packs = [[(100, 20), (50,)]]
    for strategy, factor in ((DP, 1.0), (TP, 0.5), (PP, 3.0)):
        assert scaled.phase_seconds(strategy, packs) == pytest.approx(factor * time.phase_seconds(strategy, packs))


# ----------------------------------------------------------------------------------------------- over a whole run

POOL = parse_buckets("dp4:512@1024,tp4:4096")
TIME = TimeModel("test", StageCosts((1,) * 4), {1: Cost(1e-12, 4e-7, 1e-5), 4: Cost(1e-12, 2e-7, 1e-5)})
SWITCH = {DP: 2e-4, TP: 2e-4}
RNG = random.Random(0)
TABLE = SequenceTable.from_lengths([RNG.choice([100, 200, 300, 2000]) for _ in range(2000)])
BATCHES = [list(range(n, n + 40)) for n in range(0, 2000, 40)]


def chooser(**options) -> PhaseChooser:
    return PhaseChooser(POOL, TIME, SWITCH, **options)


def seconds_of(chooser: PhaseChooser, plan, dp_factor: float):
    """What a machine measures on which dp takes longer than calibrated."""
    return {
        p.strategy: PhaseSeconds(p.strategy, p.compute_s * (dp_factor if p.strategy == DP else 1.0), p.switch_s)
        for p in predict_phases(TIME, SWITCH, plan)
    }


def walk(chooser: PhaseChooser, first: int, last: int, ahead: int, dp_factor: float = 8.0):
    """Trains mini-batches with plans made up to `ahead` early; returns the strategies of each."""
    chain, chosen, ran = chooser.previous, {}, []
    number = first
    for current in range(first, last):
        while number <= min(current + ahead, len(BATCHES) - 1):
            selection = chooser.choose(number, TABLE.lengths[BATCHES[number]].tolist(), chain)
            chosen[number], chain = selection.buckets, selection.strategies
            number += 1
        plan = plan_mini_batch(BATCHES[current], TABLE, chosen[current])
        ran.append(tuple(phase.bucket.strategy for phase in plan.phases))
        chooser.trained(current, plan, seconds_of(chooser, plan, dp_factor))
    return ran


def test_a_run_learns_and_planning_ahead_changes_nothing() -> None:
    lazy, eager = chooser(delay=5), chooser(delay=5)
    ran = walk(lazy, 0, 50, ahead=0)
    assert walk(eager, 0, 50, ahead=5) == ran
    assert eager.state_dict() == lazy.state_dict()
    assert DP in ran[0]
    assert all(strategies == (TP,) for strategies in ran[20:])  # dp turned out to be slow
    never = chooser(refit=False)
    assert any(DP in strategies for strategies in walk(never, 0, 50, ahead=0)[20:])


def test_a_resumed_run_chooses_as_the_whole_one() -> None:
    whole = chooser(delay=3)
    ran = walk(whole, 0, 50, ahead=3)
    for stop in (1, 6, 8, 9, 10, 12, 30):
        first = chooser(delay=3)
        head = walk(first, 0, stop, ahead=3)
        second = chooser(delay=3)
        assert second.load_state_dict(json.loads(of_earlier_releases(json.dumps(first.state_dict()))))
        assert second.num_trained == stop
        assert head + walk(second, stop, 50, ahead=3) == ran


def test_time_models_of_earlier_checkpoints_are_known_again() -> None:
    then = repr((TIME, [("dp1tp2pp1+sp", 0.2), ("dp2tp1pp1", 0.1)]))
    switch = {Strategy(2): 0.1, Strategy(tp=2, sp=True): 0.2}
    assert fingerprint(TIME, switch) == sha256(then.encode()).hexdigest()[:16]


def test_corrections_of_another_time_model_are_left() -> None:
    learnt = chooser()
    walk(learnt, 0, 20, ahead=1)
    other = PhaseChooser(POOL, TIME, dict.fromkeys(SWITCH, 1.0))
    assert not other.load_state_dict(learnt.state_dict())
    assert other.num_trained == 20
    assert other.previous == learnt.previous
    plan = plan_mini_batch(BATCHES[0], TABLE, POOL)
    assert other.predict(20, plan) == predict_phases(TIME, other._switch, plan)
    assert learnt.predict(25, plan) != predict_phases(TIME, SWITCH, plan)


@pytest.mark.parametrize("name", ["num_trained", "previous", "constants", "in_force", "seen", "trust"])
def test_a_broken_state_of_the_choice_is_refused(name) -> None:
    state = chooser().state_dict()
    del state[name]
    with pytest.raises(HotspaConfigError, match="starts anew"):
        chooser().load_state_dict(state)
