"""The search for pools: against brute force where that is possible, and its promises everywhere."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions
from hf_hotspa.costs.switch_time import estimate
from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import DeviceMemoryError, HotspaConfigError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.search.capacities import Capacities
from hf_hotspa.search.estimate import Evaluator, LengthTable, choose_edges, pack_choices
from hf_hotspa.search.histogram import synthetic_lengths
from hf_hotspa.search.partition import best_partitions
from hf_hotspa.search.question import Question
from hf_hotspa.search.search import Choice, SearchOptions, search
from hf_hotspa.strategy import Strategy, check_buckets, legal_strategies, parse_buckets
from tests.unit.test_cost_memory import LLAMA_7B, SIZES_7B


class FixedCapacities(Capacities):
    """A given capacity for each strategy, whatever the pool and the sequences."""

    capacities: Mapping[Strategy, int]

    def __init__(self, capacities: Mapping[Strategy, int]) -> None:
        object.__setattr__(self, "capacities", capacities)
        object.__setattr__(self, "limit_bytes", None)

    def arena(self, strategy: Strategy) -> int:
        return 0

    def tokens(self, strategy: Strategy, arena: int | None = None) -> int:
        return self.capacities[strategy]

    def pack_tokens(self, strategy: Strategy, arena: int, longest: int) -> int:
        return self.capacities[strategy]

    def too_long(self, longest: int, strategies: Sequence[Strategy]) -> DeviceMemoryError:
        best = max(strategies, key=lambda strategy: self.capacities[strategy])
        return DeviceMemoryError(
            f"no strategy holds a sequence of {longest} tokens",
            fix=f"at most {self.capacities[best]} tokens fit, with {best}",
        )


def searched(
    lengths, strategies, time, capacities, switch, *, mini_batch_size=None, longest=0, quadratic_cost=0.0, **options
):
    """The search among strategies with given seconds of switches."""
    shape = SimpleNamespace(quadratic_cost=quadratic_cost)
    cost = SimpleNamespace(time=time, sizes=SimpleNamespace(shape=shape), switch_seconds=lambda _: switch)
    return search(Question(cost, capacities, lengths, mini_batch_size, longest), strategies, SearchOptions(**options))


FOUR = (Strategy(4, 1, 1), Strategy(2, 2, 1), Strategy(1, 4, 1), Strategy(2, 1, 2))
OPTIONS = (Strategy(2, 2, 1, sp=True), Strategy(1, 4, 1, sp=True), Strategy(2, 1, 2, rc=1), Strategy(1, 4, 1, rc=1))


def random_case(rng: random.Random):
    """A time model, capacities and switch seconds in which each strategy may be the best for some lengths."""
    layers = {
        tp: Cost(rng.uniform(0, 3e-8) / tp, rng.uniform(1, 2) * 1e-6 / tp**0.8, rng.uniform(0, 3e-4))
        for tp in (1, 2, 4)
    }
    time = TimeModel(
        "random", StageCosts((1,) * 4, rng.choice((0, 1))), layers, heads={1: Cost(b=1e-7)}, hop_intra=Hop(1e-5, 1e-9)
    )
    strategies = rng.sample(FOUR + OPTIONS, rng.randint(1, 5))
    capacities = {s: rng.randint(20, 400) * s.tp * s.pp * (1 + s.sp + s.rc) for s in strategies}
    switch = {s: rng.uniform(0, 1e-4) for s in strategies}
    switch |= {s: switch[replace(s, sp=False)] for s in strategies if replace(s, sp=False) in switch}
    return time, strategies, capacities, switch


def brute_force(lengths, strategies, time, capacities, switch, longest, max_phases):
    """The least seconds over all contiguous partitions with different strategies, and all pack sizes."""
    evaluator = Evaluator([lengths], time, switch, 0.001)
    most = max(longest, sum(lengths))
    edges = sorted({*lengths, longest})

    def phase(strategy, low, high):
        capacity = min(capacities[strategy], most)
        if capacity < high:
            return float("inf")
        return min(evaluator.phase(strategy, low, high, tokens).seconds for tokens in pack_choices(capacity, high))

    best = float("inf")
    for count in range(1, max_phases + 1):
        for inner in itertools.combinations(edges[:-1], count - 1):
            cuts = (0, *inner, longest)
            for chosen in itertools.permutations(strategies, count):
                if len({replace(s, sp=False) for s in chosen}) < count:
                    continue  # a strategy with and without `+sp`: a switch for nothing
                best = min(best, sum(phase(s, a, b) for s, a, b in zip(chosen, cuts, cuts[1:], strict=False)))
    return best


@pytest.mark.parametrize(("exact", "cases"), [(True, 150), (False, 100)])
def test_search_against_brute_force(exact: bool, cases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What large searches do finds on small ones what an exhaustive one does, or nearly."""
    if not exact:
        monkeypatch.setattr("hf_hotspa.search.search.EXACT_PHASES", 0)
    rng, several, missed = random.Random(7 + (not exact)), 0, 0
    for _ in range(cases):
        time, strategies, capacities, switch = random_case(rng)
        longest = max(capacities.values())
        lengths = [rng.randint(1, longest) for _ in range(rng.randint(1 if exact else 2, 6))]
        lengths = [rng.choice(lengths) for _ in range(rng.randint(1, 30))] if exact else lengths * 4
        choice = searched(
            lengths,
            strategies,
            time,
            FixedCapacities(capacities),
            switch,
            quadratic_cost=0.001,
            max_phases=3,
            margin=0.0,
        )
        assert exact or not choice.exact or not choice.switches
        found = brute_force(lengths, strategies, time, capacities, switch, max(lengths), 3)
        assert found * (1 - 1e-9) <= choice.seconds <= found * (1 + 1e-9 if exact else 1.1)
        several += choice.switches
        missed += choice.seconds > found * (1 + 1e-9)
    assert missed <= 5
    assert several > 15


def test_partitions_against_brute_force() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        strategies, edges, most = int(rng.integers(1, 5)), int(rng.integers(2, 6)), int(rng.integers(1, 5))
        costs = rng.random((strategies, edges, edges))
        costs[rng.random(costs.shape) < 0.2] = np.inf
        costs[:, np.tril_indices(edges)[0], np.tril_indices(edges)[1]] = np.inf
        best = np.inf
        for count in range(1, min(most, strategies, edges - 1) + 1):
            for inner in itertools.combinations(range(1, edges - 1), count - 1):
                cuts = (0, *inner, edges - 1)
                for chosen in itertools.permutations(range(strategies), count):
                    best = min(best, sum(costs[s, a, b] for s, a, b in zip(chosen, cuts, cuts[1:], strict=False)))
        found = best_partitions(costs, most)
        assert (found[0].seconds if found else np.inf) == pytest.approx(best)
        for partition in found:
            assert partition.seconds == pytest.approx(sum(costs[r] for r in partition.ranges))
            assert [r[1] for r in partition.ranges] == [0, *(r[2] for r in partition.ranges[:-1])]


def test_estimates_are_near_what_is_simulated() -> None:
    time = TimeModel.analytic(SIZES_7B, load_hardware("a100-80g"))
    batches = [synthetic_lengths("github", 256, 16384, seed) for seed in range(2)]
    edges = choose_edges(batches, [4096], 16384, 8)
    assert edges[0] == 0
    assert edges[-1] == 16384
    table, errors = LengthTable(batches, edges), []
    for strategy in (Strategy(8, 1, 1), Strategy(2, 4, 1), Strategy(1, 2, 4), Strategy(2, 2, 2)):
        evaluator = Evaluator(batches, time, {strategy: 0.1}, LLAMA_7B.quadratic_cost)
        estimates = table.phase_seconds(time, strategy, [(16384, 0)], 0.1)
        for i, j in itertools.combinations(range(len(edges)), 2):
            exact = evaluator.phase(strategy, edges[i], edges[j], 16384).seconds
            assert evaluator.bound(strategy, edges[i], edges[j], 16384) <= exact * (1 + 1e-9)
            errors.append(estimates[i, j] / exact - 1)
    assert np.isinf(table.phase_seconds(time, strategy, [(4096, 0)], 0.1)[0, -1])
    assert np.mean(np.abs(errors)) < 0.1
    assert max(map(abs, errors)) < 0.5


def test_a_phase_that_takes_too_long_is_left_and_others_are_exact() -> None:
    """Bounds that spare packing and simulation never leave out a phase that is fast enough: drawn lengths, packs and strategies."""
    time, rng = CostModel.of_hardware(load_hardware("a100-80g"), SIZES_7B, MemoryOptions(), 8).time, random.Random(5)
    names = "dp2cp2pp2 dp2pp4 dp2tp2pp2+rc dp4pp2+v2 dp4pp2+z2 dp4tp2 dp8 pp8 pp8+ck1024 tp2pp4"
    strategies = [Strategy.parse(name) for name in names.split()]
    batches = [synthetic_lengths("github", 128, 16384, seed) for seed in range(3)]
    left = 0
    for strategy in strategies:
        for _ in range(12):
            low, pack_tokens = rng.choice((0, 0, 300)), int(2 ** rng.uniform(10, 15))
            high = 16384 if strategy.pp > 1 or strategy.ck else max(pack_tokens, 16384)
            pack_tokens = pack_tokens if strategy.pp > 1 else high
            exact = Evaluator(batches, time, {strategy: 0.1}, LLAMA_7B.quadratic_cost).phase(
                strategy, low, high, pack_tokens
            )
            evaluator = Evaluator(batches, time, {strategy: 0.1}, LLAMA_7B.quadratic_cost)
            for most in sorted(exact.seconds * share for share in (0.3 * rng.random(), 0.3 + 0.7 * rng.random(), 1.2)):
                seconds = evaluator.seconds_within(strategy, low, high, pack_tokens, most)
                assert seconds == (exact.seconds if exact.seconds <= most else math.inf)
                left += seconds > most
            assert evaluator.phase(strategy, low, high, pack_tokens) == exact
    assert left > 50


def planner():
    """Strategies of a 7B model on eight devices, their capacities, and a search among them."""
    hardware = load_hardware("a800-80g")
    time = TimeModel.analytic(SIZES_7B, hardware)
    strategies = [replace(s, sp=s.tp > 1) for s in legal_strategies(8, LLAMA_7B)]
    fitting = Capacities(MemoryModel(SIZES_7B, 8), hardware.device.memory_bytes)
    switch = estimate(strategies, SIZES_7B, hardware.cluster(8))

    def found(lengths, pool=strategies, capacities=fitting, **options) -> Choice:
        cost = LLAMA_7B.quadratic_cost
        return searched(lengths, pool, time, capacities, switch, mini_batch_size=256, quadratic_cost=cost, **options)

    return strategies, fitting, found


@pytest.mark.parametrize("name", ["commoncrawl", "github", "chat", "uniform"])
def test_choices_are_legal_and_never_worse_than_static(name: str) -> None:
    strategies, capacities, found = planner()
    lengths = synthetic_lengths(name, 512, 16384)
    choice = found(lengths)
    assert choice.seconds <= choice.static_seconds
    assert choice.buckets[-1].longest == max(lengths)
    assert parse_buckets(str(choice)) == choice.buckets
    check_buckets(choice.buckets, 8, LLAMA_7B)
    capacities.model.check_pool(choice.buckets, capacities.limit_bytes)
    assert sum(row.num_sequences for row in choice.rows) == 256
    assert sum(row.num_tokens for row in choice.rows) == pytest.approx(sum(lengths) / 2)
    assert sum(row.compute_s + row.switch_s for row in choice.rows) == pytest.approx(choice.seconds)
    assert choice == found(lengths, strategies[::-1])


def test_a_pipeline_without_room_for_many_long_sequences_takes_smaller_packs() -> None:
    """Under a limit that a pipeline full of the longest sequences exceeds, pipelines are not lost."""
    strategies, roomy, searched_with = planner()
    lengths, longest = synthetic_lengths("commoncrawl", 512, 32768), 32768
    model = roomy.model
    limit = 1.02 * min(model.breakdown(s, longest).total for s in strategies)
    capacities = Capacities(model, limit)
    full = FixedCapacities({s: model.largest_pack(s, limit) for s in strategies})

    def found(pool: list[Strategy], capacities: Capacities, max_phases: int = 1) -> Choice:
        return searched_with(lengths, pool, capacities, longest=longest, max_phases=max_phases)

    smaller = 0
    for strategy in strategies:
        if full.capacities[strategy] >= longest:  # what fitted before is not worse
            assert found([strategy], capacities).seconds <= found([strategy], full).seconds * (1 + 1e-9)
        elif capacities.tokens(strategy, capacities.arena(strategy)) >= longest:
            (bucket,) = found([strategy], capacities).buckets
            assert bucket.pack_tokens < longest == bucket.longest
            assert strategy.pp > 1
            arena = model.arena_bytes(strategy)
            held = model.breakdown(strategy, bucket.pack_tokens, longest=longest, arena_bytes=arena)
            assert held.total <= limit
            smaller += 1
    assert smaller
    assert found(strategies, capacities, 3).seconds <= found(strategies, capacities).seconds


@pytest.mark.parametrize("name", ["commoncrawl", "chat"])
def test_packs_are_no_larger_than_is_worth_it(name: str) -> None:
    strategies, _, found = planner()
    lengths, capacities = synthetic_lengths(name, 512, 16384), FixedCapacities(dict.fromkeys(strategies, 1 << 20))

    fast, slim = (found(lengths, capacities=capacities, pack_margin=margin) for margin in (0.0, 0.05))
    assert [bucket.strategy for bucket in slim.buckets] == [bucket.strategy for bucket in fast.buckets]
    pairs = list(zip(fast.rows, slim.rows, strict=True))
    assert all(b.bucket.pack_tokens <= a.bucket.pack_tokens for a, b in pairs)
    assert any(b.bucket.pack_tokens < a.bucket.pack_tokens for a, b in pairs)
    assert fast.seconds <= slim.seconds <= 1.05 * fast.seconds
    assert all(bucket.pack_tokens >= bucket.longest for bucket in slim.buckets)
    assert slim.static.pack_tokens <= fast.static.pack_tokens


def test_small_samples_fill_a_mini_batch_and_longer_rows_keep_their_place() -> None:
    time = TimeModel("test", StageCosts((1, 1)), {1: Cost(b=1e-6), 2: Cost(b=1e-6)})
    capacities = FixedCapacities({Strategy(2, 1, 1): 100, Strategy(1, 2, 1): 1000})
    choice = searched(
        [10, 20], capacities.capacities, time, capacities, dict.fromkeys(capacities.capacities, 0.0), mini_batch_size=8
    )
    assert choice.rows[0].num_sequences == 8
    choice = searched(
        [10, 20], capacities.capacities, time, capacities, dict.fromkeys(capacities.capacities, 0.0), longest=500
    )
    assert choice.buckets[-1].longest == 500
    assert choice.static.strategy == Strategy(1, 2, 1)


def test_what_no_sample_shows_still_gets_a_good_strategy() -> None:
    time = TimeModel("test", StageCosts((1, 1)), {1: Cost(b=1e-6), 2: Cost(1e-9, 1e-6), 4: Cost(1e-12, 1e-6)})
    capacities = FixedCapacities({Strategy(4, 1, 1): 100, Strategy(2, 2, 1): 9000, Strategy(1, 4, 1): 9000})
    for longest in (1000, 9000):
        switch = dict.fromkeys(capacities.capacities, 1e-6)
        choice = searched([10, 20] * 20, capacities.capacities, time, capacities, switch, longest=longest)
        assert [b.strategy for b in choice.buckets] == [Strategy(4, 1, 1), Strategy(1, 4, 1)]
        assert choice.rows[1].num_sequences == 0


def test_bad_input() -> None:
    time = TimeModel("test", StageCosts((1, 1)), {1: Cost(b=1e-6)})
    capacities, switch = FixedCapacities({Strategy(2, 1, 1): 100}), {Strategy(2, 1, 1): 0.0}
    with pytest.raises(DeviceMemoryError, match="500 tokens.*at most 100 tokens fit, with dp2"):
        searched([10, 500], capacities.capacities, time, capacities, switch)
    for lengths in ([], [0, 5]):
        with pytest.raises(HotspaConfigError, match="lengths"):
            searched(lengths, capacities.capacities, time, capacities, switch)
    with pytest.raises(HotspaConfigError, match="no strategy has coefficients"):
        searched([5], [Strategy(1, 2, 1)], time, capacities, switch)
    with pytest.raises(HotspaConfigError, match="max_phases 0"):
        searched([5], capacities.capacities, time, capacities, switch, max_phases=0)
    with pytest.raises(
        DeviceMemoryError, match="a limit of [0-9]+MiB .* with .*, or sequences of at most [0-9]+ tokens"
    ):
        planner()[-1]([10_000_000])


@pytest.mark.parametrize("num_layers", [8, 7])
def test_two_stages_on_each_rank_of_a_pipeline_are_chosen_where_they_are_faster_and_fit(num_layers: int) -> None:
    """Only for what would be chosen without: a handful of packs through four ranks, which need eight layers for it."""
    pipeline, lengths = Strategy(1, 1, 4), [100] * 8
    time = TimeModel("test", StageCosts((1,) * num_layers), {1: Cost(b=1e-6)}, hop_intra=Hop(1e-9, 1e-12))
    roomy = FixedCapacities({pipeline: 200, replace(pipeline, v=2): 200})
    plain, found = (
        searched(lengths, [pipeline], time, roomy, {pipeline: 1e-6}, may_go_round=may) for may in (False, True)
    )
    assert plain.static.strategy == pipeline
    assert found.static.strategy == found.buckets[0].strategy == replace(pipeline, v=2 if num_layers == 8 else 1)
    assert found.seconds < plain.seconds * 0.95 if num_layers == 8 else found.seconds == plain.seconds
    # what does not hold the longest sequence, and what hops make slower, is not
    narrow = FixedCapacities({pipeline: 200, replace(pipeline, v=2): 99})
    assert searched(lengths, [pipeline], time, narrow, {pipeline: 1e-6}, may_go_round=True).static.strategy == pipeline
    far = replace(time, hop_intra=Hop(1.0, 0.0))
    assert searched(lengths, [pipeline], far, roomy, {pipeline: 1e-6}, may_go_round=True).static.strategy == pipeline
