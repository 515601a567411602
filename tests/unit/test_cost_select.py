"""The choice of phases for one mini-batch."""

import random
from dataclasses import replace

import numpy as np
import pytest

from hf_hotspa.costs.terms import Cost
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import HotspaConfigError, OverlongError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.packing.bucketing import cut_rows, plan_mini_batch
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.search.chooser import Selector, predict_phases
from hf_hotspa.search.single import SingleStrategy, with_single
from hf_hotspa.strategy import Strategy, parse_buckets
from tests.run_logs import made_phase, made_report
from tests.unit.test_cost_search import random_case

POOL = parse_buckets("dp4:1024@4096,dp2tp2:4096@8192,tp4:16384")
# tp costs throughput; a pack costs a little; switches cost as much as some packs
TIME = TimeModel(
    "test", StageCosts((1,) * 4), {1: Cost(1e-12, 1e-7, 1e-4), 2: Cost(1e-12, 8e-8, 1e-4), 4: Cost(1e-12, 7e-8, 1e-4)}
)
SWITCH = {bucket.strategy: 2e-3 for bucket in POOL}


def selector(**options) -> Selector:
    return Selector(POOL, TIME, SWITCH, **options)


def test_the_phases_before_are_kept_for_a_small_gain_only() -> None:
    chosen = selector()
    lengths = next(
        [500] * count + [16000] for count in range(1, 2000) if len(chosen.select([500] * count + [16000]).buckets) == 2
    )
    before = (Strategy(1, 4, 1),)
    assert len(chosen.select(lengths).buckets) == 2
    kept = chosen.select(lengths, before)
    assert kept.kept
    assert kept.strategies == before
    assert kept.seconds <= chosen.select(lengths).seconds * 1.03
    assert not selector(margin=0.0).select(lengths, before).kept
    assert len(chosen.select(lengths + [500] * 2000, before).buckets) == 2  # a large gain
    # phases that cannot hold these lengths are no choice, nor are those that the pool does not have
    assert chosen.select(lengths, (Strategy(4, 1, 1),)) == chosen.select(lengths)
    assert chosen.select(lengths, (Strategy(1, 1, 4),)) == chosen.select(lengths)


def test_never_slower_than_the_best_single_phase() -> None:
    rng = random.Random(11)
    for _ in range(60):
        time, strategies, capacities, switch = random_case(rng)
        edges = sorted(capacities[s] for s in strategies)
        order = sorted(strategies, key=lambda s: capacities[s])
        if len(set(edges)) < len(edges):
            continue
        pool = parse_buckets(",".join(f"{s}:{edge}" for s, edge in zip(order, edges, strict=True)))
        chosen = Selector(pool, time, switch, quadratic_cost=0.001)
        previous: tuple[Strategy, ...] = ()
        for _ in range(4):
            lengths = [min(edges[-1], int(rng.lognormvariate(3.5, 1)) + 1) for _ in range(rng.randint(1, 60))]
            free = chosen.select(lengths)
            assert free.seconds <= free.single_seconds
            assert free == chosen.select(rng.sample(lengths, len(lengths)))
            kept = chosen.select(lengths, previous)
            assert kept.seconds <= free.seconds * 1.03 * (1 + 1e-9)
            assert kept.buckets[-1].longest >= max(lengths)
            assert len(set(kept.strategies)) == len(kept.strategies)
            previous = kept.strategies


@pytest.mark.parametrize("policy", ["truncate", "split", "drop"])
def test_plans_of_selected_buckets_hold_every_sequence(policy: str) -> None:
    rng = np.random.default_rng(5)
    for size in (1, 20, 200):
        table = SequenceTable.from_lengths(np.minimum(rng.lognormal(6, 1.5, size).astype(int), 40_000))
        sequences, counts = cut_rows(range(size), table, POOL[-1].longest, policy)
        selection = selector().select(s.num_tokens for s in sequences)
        plan = plan_mini_batch(range(size), table, selection.buckets, policy=policy)
        assert sorted(plan.sequences(), key=repr) == sorted(sequences, key=repr)
        assert {name: getattr(plan, name) for name in counts} == counts
        for phase in plan.phases:
            assert all(pack.num_tokens <= phase.bucket.pack_tokens for packs in phase.replicas for pack in packs)


def test_bad_input() -> None:
    with pytest.raises(OverlongError, match="20000 tokens is longer than the longest bucket, 16384"):
        selector().select([5, 20_000])
    with pytest.raises(HotspaConfigError, match="nothing to select"):
        Selector((), TIME, SWITCH)
    with pytest.raises(HotspaConfigError, match="no switch seconds for tp4"):
        Selector(POOL, TIME, {s: v for s, v in SWITCH.items() if s.tp < 4})
    with pytest.raises(HotspaConfigError, match="no coefficients for tp8.*tp1, tp2, tp4"):
        Selector(parse_buckets("tp8:16"), TIME, SWITCH)
    empty = selector().select([])
    assert empty.seconds == 0
    assert empty.buckets == POOL[-1:]


@pytest.mark.parametrize("single", POOL)
def test_one_strategy_for_the_same_rows(single) -> None:
    """What switching is compared with: the plan that this strategy alone would have run, and the plan that ran."""
    lengths = [300] * 40 + [900] * 7 + [1000, 3000]
    table, rows = SequenceTable.from_lengths(lengths), range(len(lengths))
    alone = replace(single, low=0, longest=max(lengths), pack_tokens=max(single.pack_tokens, max(lengths)))
    seconds = {
        buckets: sum(p.seconds for p in predict_phases(TIME, SWITCH, plan_mini_batch(rows, table, buckets)))
        for buckets in (POOL, (alone,))
    }
    ran = plan_mini_batch(rows, table, POOL)
    found = SingleStrategy(alone, TIME, SWITCH, 0.0)
    assert found.seconds_by(ran) == pytest.approx((seconds[alone,], seconds[POOL]))
    short = replace(alone, longest=1000, pack_tokens=2999)
    assert SingleStrategy(short, TIME, SWITCH, 0.0).seconds_by(ran) is None  # one row does not fit


def test_the_single_strategy_is_corrected_as_what_ran_is() -> None:
    lengths = [300] * 40 + [3000]
    plan = plan_mini_batch(range(41), SequenceTable.from_lengths(lengths), POOL)
    single = SingleStrategy(POOL[-1], TIME, SWITCH, 0.0)
    found = single.seconds_by(plan)
    assert found is not None
    alone, ran = found
    report = made_report(1, made_phase("dp4", 1.0, predicted_s=1.5 * ran))
    assert with_single(report, single, plan).single_s == pytest.approx(1.5 * alone)
    unknown = made_report(1, made_phase("dp4", 1.0, predicted=False))
    assert with_single(unknown, single, plan).single_s is None
