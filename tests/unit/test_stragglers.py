"""Slow devices: the paper's equations, algorithms and numbering, and the rule that finds them."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.errors import HotspaConfigError, HotspaError
from hf_hotspa.features.slow_devices.columns import (
    LayerColumns,
    Resizing,
    choose_columns,
    kept_variation,
    migrate,
    most_varying,
    num_kept,
    random_columns,
)
from hf_hotspa.features.slow_devices.device_watch import DeviceWatch
from hf_hotspa.features.slow_devices.giving import (
    Giving,
    PhaseWork,
    PretestCurves,
    SlowDevices,
    TaskWork,
    divide_semi,
    excess_ratio,
    expected_seconds,
    fitted_line,
    migrated_share,
    num_migrating,
    settled_ratios,
    settled_semi,
)
from hf_hotspa.features.slow_devices.speeds import SpeedHistory
from hf_hotspa.packing.bucketing import Speeds
from hf_hotspa.strategy import Strategy
from tests.run_logs import of_earlier_releases

FOUR_SLOW = [8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0]

# -- equations ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "product_s", "reference_s", "share"),
    [
        (2.0, 2.0, 9 / 8, 0.4375), (8.0, 8.0, 15 / 8, 0.765625),  # one slow task of eight, relative to the mean
        (2.0, 2.0, 1.0, 0.5), (8.0, 8.0, 1.0, 0.875),  # and to the others
        (3.0, 2.0, 2.0, 0.5), (2.0, 2.0, 2.0, 0.0), (9.0, 0.0, 1.0, 0.0), (100.0, 1.0, 1.0, 0.95),  # of products, and some stay
    ],
)  # fmt: skip
def test_equation_1(seconds, product_s, reference_s, share):
    assert excess_ratio(seconds, product_s, reference_s) == share


@pytest.mark.parametrize(
    "curves", [PretestCurves(0.1, 0.002, 0.004, 0.003), PretestCurves(1.0, 0.01, 0.1, 0.1, send_static_s=0.5)]
)
def test_equation_2_makes_both_sides_cost_the_same(curves):
    columns, tasks = 300.0, 4
    beta = migrated_share(columns, tasks, curves)
    assert 0.0 < beta < 1.0
    left = curves.static_s + curves.extract_s * columns * (1 - beta)
    right = curves.send(columns * beta) + curves.compute_s * columns * beta / (tasks - 1)
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize(
    ("columns", "curves", "share"),
    [
        (10.0, PretestCurves(100.0, 0.0, 0.001, 0.0), 1.0),
        (10.0, PretestCurves(0.0, 0.0, 1.0, 0.0), 0.0),
        (0.0, PretestCurves(0.0, 1.0, 1.0, 1.0), 1.0),
        # any message costs more than leaving everything out
        (100.0, PretestCurves(1.0, 0.01, 0.1, 0.1, send_static_s=2.5), 0.0),
    ],
)
def test_equation_2_is_clipped(columns, curves, share):
    assert migrated_share(columns, 4, curves) == share


@pytest.mark.parametrize(
    ("cost", "migrating"), [(0.05, 4), (0.0880, 4), (0.0882, 3), (0.5, 3), (0.8202, 3), (0.8204, 2), (100.0, 0)]
)
def test_equation_3_on_the_papers_four_slow_of_eight(cost, migrating):
    # f(x) + Phi_1 is 6.250, 3.861, 2.017, 0.260, and Gamma / L is 0.8750, 1.7083, 2.4583, 2.9583
    assert num_migrating(FOUR_SLOW, [1.0] * 8, lambda n: cost * n) == migrating


def test_algorithm_2_with_one_slow_task_divides_its_excess():
    curves = PretestCurves(0.1, 0.002, 0.004, 0.003)
    work = divide_semi([1.0, 4.0, 1.0, 1.0], [1.0, 4.0, 1.0, 1.0], [400.0] * 4, curves)
    assert work[0] == work[2] == work[3] == TaskWork()
    assert work[1].migrated + work[1].resized == pytest.approx(0.75)
    assert work[1].migrated == pytest.approx(0.75 * migrated_share(300.0, 4, curves))


def test_algorithm_2_with_several_lets_the_slowest_three_migrate():
    order = [3, 0, 5, 1, 7, 2, 4, 6]  # task of each place
    seconds = [0.0] * 8
    for place, task in enumerate(order):
        seconds[task] = FOUR_SLOW[place]
    work = divide_semi(seconds, seconds, [1.0] * 8, PretestCurves(0.0, 0.0, 0.5, 0.0))
    assert [task for task in order if work[task].migrated] == order[:3]
    assert [task for task in order if work[task].resized] == order[3:4]
    assert work[order[0]].migrated == 0.875
    assert work[order[3]].resized == 0.5
    assert all(work[task] == TaskWork() for task in order[4:])


# -- columns ------------------------------------------------------------------------------------------------------------


def test_a_line_through_samples_of_costs_is_never_negative():
    assert fitted_line([(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)]) == pytest.approx((1.0, 2.0))
    assert fitted_line([(1.0, 5.0), (2.0, 3.0), (3.0, 4.0)]) == pytest.approx((4.0, 0.0))  # falls: noise
    assert fitted_line([(1.0, 0.0), (2.0, 2.0)]) == pytest.approx((0.0, 0.8))  # begins below 0


@pytest.mark.parametrize("seconds", [(4.0, 1.0, 1.0, 1.0), (8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)])
def test_semi_settles_where_all_are_done_at_once(seconds):
    """Whoever migrates, is resized, or takes columns; the paper's own choice of who does what stays."""
    curves = PretestCurves(0.0, 0.2, 0.3, 1.0)
    loads, tasks = [1.0] * len(seconds), range(len(seconds))
    first = divide_semi(seconds, seconds, loads, curves)
    work = settled_semi(seconds, seconds, loads, curves)
    assert [w.migrated > 0.0 for w in work] == [w.migrated > 0.0 for w in first]
    assert [w.resized > 0.0 for w in work] == [w.resized > 0.0 for w in first]
    assert any(w.migrated for w in work)
    assert any(w.resized for w in work)
    helpers = [task for task in tasks if work[task].migrated == 0.0]
    taken = sum(w.migrated for w in work) / len(helpers)
    now = [
        t * (1.0 - w.migrated - w.resized + (taken if task in helpers else 0.0))
        for task, (t, w) in enumerate(zip(seconds, work, strict=True))
    ]
    assert now == pytest.approx([min(now)] * len(now), rel=1e-6)
    assert 1.0 < now[0] < 1.6


def test_columns_that_were_left_out_keep_their_statistics():
    assert kept_variation([0.1, 0.2, 0.3], None, None) == (0.1, 0.2, 0.3)
    assert kept_variation([0.0, 0.2, 0.0], [9.0, 9.0, 8.0], kept=[1]) == (9.0, 0.2, 8.0)


def test_pri_is_a_round_robin_of_refined_columns():
    """Two of four columns are trained an epoch; those vary less each time, so the others get their turn."""
    variation = [4.0, 3.0, 2.0, 1.0]
    trained = []
    for _ in range(4):
        kept = most_varying(variation, 2)
        trained.append(kept)
        new = [value / 10 if i in kept else 0.0 for i, value in enumerate(variation)]
        variation = list(kept_variation(new, variation, kept))
    assert trained == [(0, 1), (2, 3), (0, 1), (2, 3)]


def test_choices_of_columns():
    variation = [float(i % 5) for i in range(20)]
    common = {"num_iterations": 100, "seed": "a"}
    assert choose_columns("pri", 20, 0.0, variation=variation, **common).pruned == ()
    pri = choose_columns("pri", 20, 0.4, variation=variation, **common)
    assert set(pri.kept) == {i for i in range(20) if i % 5 >= 2}
    drawn = choose_columns("rd", 20, 0.4, variation=variation, **common)
    assert drawn == choose_columns("pri", 20, 0.4, variation=None, **common)
    assert len(drawn.pruned) == 8
    assert drawn != choose_columns("rd", 20, 0.4, variation=None, num_iterations=100, seed="b")
    # four columns do not vary at all; 0.8 * gamma is more
    assert len(choose_columns("pridiffr", 20, 0.4, variation=variation, **common).pruned) == 6
    assert len(choose_columns("pridiffe", 20, 0.1, variation=variation, **common).pruned) == 8
    assert len(choose_columns("pri", 4, 0.95, variation=[1.0] * 4, **common).kept) == 1


@given(st.integers(1, 200), st.floats(0.0, 0.95))
@settings(deadline=None)
def test_columns_ascend_and_cover_everything(count, ratio):
    columns = LayerColumns(count, random_columns(count, num_kept(count, ratio), "seed"))
    assert sorted(columns.kept + columns.pruned) == list(range(count))


# -- migration ------------------------------------------------------------------------------------------------------------


def test_the_papers_example_of_migration():
    # e = 3, the slow task is the first, two columns: the second task takes the first of them, the third the second
    found = migrate(3, 0, 4, 0.5)
    assert (found.first, found.parts) == (2, ((4, 4), (2, 3), (3, 4)))
    # helpers count from the slow task on, around the group, without another slow one
    assert migrate(5, 3, 8, 0.5, givers=[3, 0]).parts == ((8, 8), (6, 7), (7, 8), (8, 8), (4, 6))


@given(st.integers(2, 9), st.integers(1, 300), st.floats(0.0, 0.95), st.data())
@settings(deadline=None)
def test_every_column_has_one_task(tasks, num_columns, share, data):
    givers = data.draw(st.sets(st.integers(0, tasks - 1), min_size=1))
    giver = data.draw(st.sampled_from(sorted(givers)))
    found = migrate(tasks, giver, num_columns, share, givers)
    if found is None:
        assert round(num_columns * share) == 0 or num_columns == 1 or len(givers) == tasks
        return
    taken = sorted(column for start, stop in found.parts for column in range(start, stop))
    assert taken == list(range(found.first, num_columns))
    assert found.first >= 1
    sizes = [stop - start for start, stop in found.parts]
    assert not any(sizes[task] for task in givers)
    helping = [size for task, size in enumerate(sizes) if task not in givers]
    assert max(helping) - min(helping) <= 1


# -- detection ------------------------------------------------------------------------------------------------------------


def work(seconds, costs=None, peers=None, strategy="dp4"):
    costs = costs or [1.0] * len(seconds)
    return PhaseWork(strategy, tuple(seconds), tuple(costs), tuple(peers or [0] * len(seconds)))


def watched(rows, num_ranks=4):
    devices = SlowDevices(num_ranks)
    devices.observe(0, [work([1.0] * num_ranks)])  # warms up
    return devices, [devices.observe(step, [work(row)])[1] for step, row in enumerate(rows, 1)]


FAST, SLOW, NEARLY, WELL = [1.0] * 4, [1.0, 1.0, 4.0, 1.0], [1.0, 1.0, 1.2, 1.0], [1.0, 1.0, 1.05, 1.0]
ONSET, RECOVERY = "rank 2 computes {} times as long as ranks that are not slow", "rank 2 has recovered"
HISTORIES = {
    "two mini-batches tell": ([FAST, SLOW, SLOW, SLOW, FAST, FAST, FAST], {2: ONSET.format("4.0"), 5: RECOVERY}),
    "one outlier, and small changes": ([[1.0, 1.0, 9.0, 1.0], FAST, *[[1.09, 1.0, 1.0, 1.0]] * 2], {}),
    "two outliers that do not agree": (
        [[1.0, 1.0, t, 1.0] for t in (2.4, 1.5, 1.0, 1.5, 1.6)], {4: ONSET.format("1.5")},
    ),
    "a rank that is a little faster": ([[0.7, 1.0, 1.05, 0.95], [0.7, 1.0, 1.0, 1.0]] * 3, {}),
    "slow until well below the limit": (
        [*[[1.0, 1.0, 1.5, 1.0]] * 2, NEARLY, NEARLY, NEARLY, WELL, WELL], {1: ONSET.format("1.5"), 6: RECOVERY},
    ),
    "what costs nearly nothing": ([[0.001, 0.001, 0.004, 0.001]] * 5, {}),
}  # fmt: skip


@pytest.mark.parametrize("history", HISTORIES)
def test_onsets_and_recoveries(history):
    rows, said = HISTORIES[history]
    devices, events = watched(rows)
    assert {step: str(event) for step, event in enumerate(events) if event is not None} == said
    assert devices.slow or devices.speeds() is None


def test_lengths_that_differ_are_no_slow_device():
    rng = random.Random(3)
    devices = SlowDevices(4)
    for step in range(20):
        costs = [rng.uniform(1, 50) for _ in range(4)]
        step_times, event = devices.observe(step, [work([0.2 * cost for cost in costs], costs)])
        assert event is None
        assert step == 0 or step_times == pytest.approx((1.0,) * 4)


def test_a_rank_without_packs_is_not_judged():
    devices = SlowDevices(3)
    for step in range(4):
        step_times, event = devices.observe(step, [work([0.2, 0.0, 0.2], [1.0, 0.0, 1.0])])
        assert event is None
        assert step_times[1] is None


def test_stages_are_compared_among_themselves_where_costs_may_be_to_blame():
    # the second stage has the head, and may take longer than its cost says on both replicas
    both = work([1.0, 1.0, 2.0, 6.0], peers=[0, 0, 1, 1])
    assert expected_seconds(replace(both, most=(1.0, 1.0, 2.0, 2.0))) == (1.0, 1.0, 2.0, 2.0)
    assert expected_seconds(both) == (1.0,) * 4
    # a head that costs less than predicted makes the other stage no slow one
    other = work([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 10.0, 10.0], peers=[0, 0, 1, 1])
    assert expected_seconds(replace(other, least=(1.0,) * 4)) == (1.0,) * 4
    assert expected_seconds(other) == (0.1, 0.1, 1.0, 1.0)
    alone = work([1.0, 1.0, 1.0, 3.0], peers=[0, 1, 2, 3])
    assert expected_seconds(alone) == (1.0,) * 4


@pytest.mark.parametrize(
    ("seconds", "peers", "slow"),
    [
        ((4, 4, 4, 1), (0, 0, 0, 0), {0, 1, 2}),
        ((1, 1, 4, 4), (0, 0, 1, 1), {2, 3}),
        ((4, 3, 1, 1), (0, 0, 1, 1), {0, 1}),
        ((1, 1, 4, 8), (0, 0, 1, 1), {2, 3}),
        ((1, 4, 4, 1), (0, 0, 1, 1), {1, 2}),
        ((1, 4, 4, 4), (0, 1, 2, 3), {1, 2, 3}),
        ((2, 2, 2, 2, 2, 1, 1, 1), (0,) * 8, {0, 1, 2, 3, 4}),
        ((3, 3, 3, 3, 1, 1, 1, 3), (0, 0, 0, 0, 1, 1, 1, 1), {0, 1, 2, 3, 7}),
        ((1, 1.12, 4, 1), (0, 0, 0, 0), {2}),  # the others count as the usual ones
    ],
)
def test_slow_devices_that_are_no_minority_among_their_like(seconds, peers, slow):
    devices = SlowDevices(len(seconds))
    for step in range(3):
        devices.observe(step, [work(map(float, seconds), [1.0] * len(seconds), list(peers))])
    assert devices.slow == slow
    assert devices.speeds() == tuple(1.0 / t if rank in slow else 1.0 for rank, t in enumerate(seconds))


def test_noise_is_no_slow_device():
    rng = random.Random(5)
    for peers in ((0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1), tuple(range(8))):
        devices = SlowDevices(8)
        for step in range(300):
            outliers = [3.0 if (step + 3 * rank) % 7 == 0 else 1.0 for rank in range(8)]
            seconds = [rng.uniform(1.0, 1.25) * outlier for outlier in outliers]
            assert devices.observe(step, [work(seconds, [1.0] * 8, list(peers))])[1] is None


def test_the_state_goes_on_where_it_was():
    rng = random.Random(1)
    rows = [[rng.uniform(0.8, 3.0) for _ in range(4)] for _ in range(30)]
    for cut in range(30):
        devices, resumed = SlowDevices(4), SlowDevices(4)
        for step, row in enumerate(rows[:cut]):
            devices.observe(step, [work(row)])
        assert resumed.load_state_dict(json.loads(json.dumps(devices.state_dict())))
        for step, row in enumerate(rows[cut:]):
            assert devices.observe(step, [work(row)]) == resumed.observe(step, [work(row)])
        assert devices.state_dict() == resumed.state_dict()


def test_a_state_of_other_ranks_is_left_and_damage_is_named():
    devices = SlowDevices(4)
    assert not devices.load_state_dict(SlowDevices(2).state_dict())
    for damage in ({}, {**devices.state_dict(), "known": ["x"] * 4}, {**devices.state_dict(), "slow": [7]}):
        with pytest.raises(HotspaConfigError, match="slow devices cannot be read"):
            devices.load_state_dict(damage)


@pytest.mark.parametrize(
    ("strategy", "mode", "says"),
    [
        ("cp2", "balance", ("no strategy has replicas, stages or shards (cp2)", "use a strategy with dp2 or pp2 or tp2 or more")),
        ("dp2", "migrate", ("no strategy is tensor parallel (dp2)",)),
        ("tp2+z2", "migrate", ("hotspa_stragglers=migrate with tp2+z2", "leave these strategies out")),
    ],
)  # fmt: skip
def test_answers_that_have_nothing_to_divide_are_refused(strategy, mode, says):
    engine, stages = SimpleNamespace(phases={Strategy.parse(strategy): None}), SimpleNamespace(can_share=True)
    with pytest.raises(HotspaError) as error:
        DeviceWatch(engine, mode, Resizing(), stages)
    assert all(part in str(error.value) for part in says)


# -- speeds ---------------------------------------------------------------------------------------------------------------


def test_a_replica_is_as_fast_as_its_slowest_rank():
    speeds = Speeds((1.0, 1.0, 0.5, 1.0))
    assert speeds.replica_speeds(Strategy(4, 1, 1)) == speeds.ranks
    assert speeds.replica_speeds(Strategy(2, 2, 1)) == (1.0, 0.5)
    assert speeds.replica_speeds(Strategy(1, 4, 1)) is None
    assert Speeds((1.0, 0.5, 0.5, 1.0)).replica_speeds(Strategy(2, 2, 1)) is None
    # its slow stage has less to do
    cut = Speeds((1.0, 1.0, 0.5, 1.0), ((1.25, 0.75),))  # stages of ranks 0 and 1, 2 and 3
    assert cut.replica_speeds(Strategy(2, 1, 2)) == (0.5 / 0.75, 1 / 1.25)
    assert cut.replica_speeds(Strategy(4, 1, 1)) == cut.ranks  # of another depth
    assert Speeds(cut.ranks).replica_speeds(Strategy(2, 1, 2)) == (0.5, 1.0)


def test_speeds_apply_from_the_next_mini_batch_on_and_go_on_from_a_state():
    slow, slower = Speeds((1.0, 0.5)), Speeds((1.0, 0.25), ((1.5, 0.5), (1.0, 1.0, 2.0)))
    history, resumed = SpeedHistory(), SpeedHistory()
    assert [history.trained(*each) for each in ((0, None), (4, slow), (5, slow), (6, slower))] == [None, 5, None, 7]
    resumed.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for each in (history, resumed):
        assert [each.of(n) for n in range(5, 9)] == [slow, slow, slower, slower]
    assert resumed.trained(7, None) == 8
    assert [resumed.of(n) for n in (7, 8)] == [slower, None]
    resumed.restart()
    assert resumed.of(0) is None
    for damage in (
        {},
        {"in_force": []},
        {"in_force": [[0, [1.0, 0.0]]]},
        {"in_force": [["x", None]]},
        {"in_force": [[0, [1.0], [[0.0]]]]},
        {"in_force": [[0, []]]},
        {"in_force": [[0, [1.0], [], [], []]]},
    ):
        with pytest.raises(HotspaConfigError, match="speeds of devices cannot be read"):
            resumed.load_state_dict(damage)


# -- giving columns away --------------------------------------------------------------------------------------------------


def test_equation_1_settles_where_all_are_done_at_once():
    # one answer alone leaves the slow task at 1.75 times the others
    gammas = settled_ratios([1.0, 4.0, 1.0, 1.0], [1.0, 4.0, 1.0, 1.0], [1])
    assert gammas == pytest.approx((0.0, 9 / 13, 0.0, 0.0))
    assert 4.0 * (1 - gammas[1]) == pytest.approx(1.0 + gammas[1] / 3)
    # where products are half of the seconds, all of them would have to go
    assert settled_ratios([1.0, 4.0, 1.0, 1.0], [0.5, 2.0, 0.5, 0.5], [1])[1] == 0.95
    two = settled_ratios([3.0, 1.0, 2.0, 1.0], [3.0, 1.0, 2.0, 1.0], [0, 2])
    assert 3.0 * (1 - two[0]) == pytest.approx(2.0 * (1 - two[2])) == pytest.approx(1.0 + (two[0] + two[2]) / 2)
    assert settled_ratios([2.0, 2.0], [2.0, 2.0], [0, 1]) == (0.0, 0.0)


def given_run(mini_batches, giving, devices, slow):
    """Lets rank 1 be four times as slow in its products (0.8 of the seconds of the others) where `slow` says so."""
    decided = []
    for step in mini_batches:
        extra = giving.extra("tp4")
        product_s = [0.8 * (1.0 + a) * (4.0 if rank == 1 and slow(step) else 1.0) for rank, a in enumerate(extra)]
        seconds = [0.2 + m for m in product_s]
        times = giving.measured("tp4", seconds, product_s)
        devices.observe(step, [PhaseWork("tp4", tuple(seconds), times, (0,) * 4)])
        decided.append(giving.decide(devices.known, devices.slow))
    return decided, seconds


def test_a_slow_rank_gives_until_it_recovers():
    giving, devices = Giving([Strategy(1, 4, 1)]), SlowDevices(4)
    decided, seconds = given_run(range(10), giving, devices, lambda step: step >= 3)
    assert [step for step, changed in enumerate(decided) if changed] == [4]
    assert devices.slow == {1}
    assert devices.known[1] == pytest.approx(3.4)
    assert giving.shares["tp4"][1] > 0.6
    assert seconds == pytest.approx([seconds[0]] * 4)  # all are done at once
    resumed, other = Giving([Strategy(1, 4, 1)]), SlowDevices(4)
    resumed.load_state_dict(json.loads(of_earlier_releases(json.dumps(giving.state_dict()))))
    other.load_state_dict(json.loads(of_earlier_releases(json.dumps(devices.state_dict()))))
    for state in ((giving, devices), (resumed, other)):
        decided, _ = given_run(range(10, 16), *state, lambda step: step < 12)
        assert [step for step, changed in enumerate(decided, 10) if changed] == [13]
        assert state[0].shares == {"tp4": (0.0,) * 4}
    assert resumed.state_dict() == giving.state_dict()
    with pytest.raises(HotspaConfigError, match="migrated columns cannot be read"):
        resumed.load_state_dict({"shares": {"tp4": [0.0]}, "products": {"tp4": [0.0]}, "decided": None})


def test_a_group_of_slow_ranks_alone_gives_nothing():
    giving = Giving([Strategy(2, 2, 1)])
    giving.measured("dp2tp2", [1.0] * 4, [0.8] * 4)
    assert giving.decide([4.0, 4.0, 1.0, 2.0], frozenset({0, 1, 3}))
    shares = giving.shares["dp2tp2"]
    assert shares[:3] == (0.0, 0.0, 0.0)
    assert shares[3] > 0.2
    assert giving.extra("dp2tp2")[2] == shares[3]
    assert giving.extra("dp4") == ()


def test_what_goes_to_nobody_makes_a_slow_rank_as_fast_as_the_fastest():
    giving = Giving([Strategy(1, 4, 1)], "resize")
    giving.measured("tp4", [1.0, 4.0, 1.0, 1.0], [0.8, 3.8, 0.8, 0.8])
    assert giving.decide([1.0, 4.0, 1.0, 1.0], frozenset({1}))
    shares = giving.resized["tp4"]
    assert shares == pytest.approx((0.0, 3.0 / 3.8, 0.0, 0.0))
    assert giving.shares["tp4"] == (0.0,) * 4
    assert giving.extra("tp4") == (0.0, -shares[1], 0.0, 0.0)
    times = giving.measured("tp4", [1.0] * 4, [0.8, 0.8, 0.8, 0.8])
    assert times == pytest.approx((1.0, 0.25, 1.0, 1.0))
