"""The plans of a pool of strategies: cached, nested, ordered."""

import itertools
import random
from dataclasses import replace

import pytest
from written_plans import traffic_of  # type: ignore[import-not-found]

from hf_hotspa.cluster import Cluster
from hf_hotspa.engine.switching import PlanPool
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.placement import part_of_layout
from hf_hotspa.layout.vector import build_vector
from hf_hotspa.plan.switch_plan import SECOND, SRC_STORE, SwitchPlan, overlapped_seconds
from hf_hotspa.strategy import Strategy
from tests.random_models import random_model
from tests.unit.test_planner import cut_vector


def pool_of(*names: str, second_source: bool = True, devices_per_node: int = 2) -> PlanPool:
    vector = cut_vector(rows=1024, layers=4)
    strategies = [Strategy.parse(name) for name in names]
    cluster = Cluster(strategies[0].world_size, devices_per_node)
    sizes = [2] * len(vector.segments)
    return PlanPool(vector, strategies, cluster, sizes, sizes, second_source=second_source)


def uses_second(plan: SwitchPlan) -> bool:
    return any((table[:, SRC_STORE] == SECOND).any() for kind in plan.kinds for table in kind.hops)


def test_plans_are_made_once_and_pairs_only_where_the_weights_of_both_are_kept() -> None:
    pool = pool_of("dp4", "tp4", "pp4")
    dp, tp, _ = pool.strategies
    assert pool.load(tp) is pool.load(tp)
    assert pool.load(tp, dp) is pool.load(tp, dp)
    assert uses_second(pool.load(tp, dp))
    assert not uses_second(pool.load(tp))
    assert pool.load(tp, tp) is pool.load(tp)
    assert pool.return_gradients(tp) is pool.return_gradients(tp)
    assert len(pool.plans()) == len({plan.digest for plan in pool.plans()}) == 3 + 3 + 6
    alone = pool_of("dp4", "tp4", "pp4", second_source=False)
    assert alone.load(tp, dp) is alone.load(tp)
    assert len(alone.plans()) == 6


def test_strategies_of_one_layout_have_one_load_and_one_return_and_follow_one_another() -> None:
    for second_source in (False, True):
        pool = pool_of("dp4", "tp4", "cp4", "dp2cp2+ck64", "tp4+rc", second_source=second_source)
        dp, tp, cp, both, recomputing = pool.strategies
        assert pool.load(dp) is pool.load(cp) is pool.load(both) is pool.load(cp, dp)
        assert pool.return_gradients(dp) is pool.return_gradients(cp)
        assert pool.load(tp) is pool.load(recomputing, tp)
        assert pool.num_layouts == 2
        assert len(pool.plans()) == (6 if second_source else 4)
        assert set(map(pool.order(pool.strategies).index, (dp, cp, both))) in ({0, 1, 2}, {2, 3, 4})
    assert pool_of("dp4", "tp4", "cp4", second_source=False).order((dp, tp, cp)) == (dp, cp, tp)


def test_weights_that_are_there_already_move_no_byte() -> None:
    pool = pool_of("dp4", "tp4", "dp2tp2")
    dp, tp, mixed = pool.strategies
    sizes = [2] * 6
    for plan in (pool.load(tp, dp), pool.load(mixed, dp), pool.load(tp, mixed)):  # the last one thanks to nesting
        assert traffic_of(plan, Cluster(4, 2), sizes).wire_bytes == 0
    assert tp.shard_order == (0, 2, 1, 3)


def test_the_order_of_phases_is_the_cheapest_of_all() -> None:
    for names in (("tp8", "dp8", "dp2tp4"), ("tp4pp2", "dp4tp2", "dp8", "dp2tp2pp2")):
        pool = pool_of(*names, devices_per_node=4)

        def seconds(order: tuple[Strategy, ...], pool: PlanPool = pool) -> float:
            steps = zip((None, *order[:-1]), order, strict=True)
            return sum(
                overlapped_seconds(pool.load(b, a).loads(Cluster(8, 4), [2] * 6), Cluster(8, 4)) for a, b in steps
            )

        best = min(map(seconds, itertools.permutations(pool.strategies)))
        assert seconds(pool.order(pool.strategies)) == pytest.approx(best)
        assert sorted(pool.order(pool.strategies[1:])) == sorted(pool.strategies[1:])


def test_with_frozen_weights_a_mini_batch_begins_with_the_strategy_that_is_loaded() -> None:
    """Two of three strategies are in every mini-batch, the third in some: no frozen weight of a first phase is moved again.

    The order follows from the step alone: a resumed run goes on in it.
    """
    whole = cut_vector(rows=64, layers=4)
    specs = [replace(spec, trainable=index > 0) for index, spec in enumerate(whole.specs)]
    vector = build_vector(specs, whole.layer_costs, whole.head_cost)
    strategies = [Strategy.parse(name) for name in ("dp4", "dp2tp2", "tp4")]
    sizes = [2] * len(vector.segments)
    pool = PlanPool(vector, strategies, Cluster(4, 2), sizes, sizes)
    assert pool.has_frozen
    loaded = None
    for step, num_strategies in enumerate((3, 2, 2, 3, 3, 2)):
        order = pool.order(strategies[:num_strategies], step)
        assert sorted(order) == sorted(strategies[:num_strategies])
        assert loaded in (None, order[0])
        loaded = order[-1]
    assert pool.order(strategies[:1], 1) == (strategies[0],)


def test_random_pools_plan() -> None:
    rng = random.Random(2)
    for _ in range(10):
        model, world_size = random_model(rng), rng.randint(1, 8)
        strategies = list(dict.fromkeys(rng.choice(model.strategies(world_size)) for _ in range(3)))
        cluster = Cluster(world_size, rng.randint(1, world_size))
        sizes = [4] * len(model.vector.segments)
        pool = PlanPool(model.vector, strategies, cluster, sizes, sizes, second_source=True)
        assert all(isinstance(plan, SwitchPlan) for plan in pool.plans())  # each one proved itself
        assert sorted(pool.order(pool.strategies)) == sorted(strategies)


def delivered(plan: SwitchPlan, element_sizes: list[int]) -> int:
    """Elements that a plan moves, inside ranks and between them."""
    traffic = traffic_of(plan, Cluster(plan.world_size, 1), element_sizes)
    return traffic.local_bytes + traffic.wire_bytes


def test_a_load_of_the_trained_weights_alone_moves_these_and_no_frozen_ones() -> None:
    rng, seen = random.Random(4), 0
    while seen < 5:
        model, world_size = random_model(rng), rng.randint(1, 8)
        strategies = list(dict.fromkeys(rng.choice(model.strategies(world_size)) for _ in range(3)))
        cluster, segments = Cluster(world_size, rng.randint(1, world_size)), model.vector.segments
        pool = PlanPool(model.vector, strategies, cluster, [4] * len(segments), [4] * len(segments))
        assert pool.has_frozen == (len({segment.trainable for segment in segments}) == 2)
        if not pool.has_frozen:
            continue
        seen += 1
        for strategy in pool.strategies:
            whole, part = pool.load(strategy), pool.load(strategy, trained_only=True)
            frozen, trained = ([int(s.trainable == kind) for s in segments] for kind in (False, True))
            layout = pool.layout(strategy)
            needed = sum(int(layout.placements[s.index].sizes.sum()) for s in segments if s.trainable)
            assert delivered(part, frozen) == 0
            assert delivered(part, trained) >= needed > 0  # relays move some twice
            assert delivered(whole, frozen) > 0
            assert layout.sizes == part_of_layout(layout, {0}, "first segment").sizes


def test_frozen_weights_that_every_rank_has_complete_are_in_place_and_in_no_load() -> None:
    whole = cut_vector(rows=64, layers=4)
    last = len(whole.specs) - 1
    specs = [replace(spec, trainable=index == last) for index, spec in enumerate(whole.specs)]
    vector = build_vector(specs, whole.layer_costs, whole.head_cost)
    frozen = {segment.index for segment in vector.segments if not segment.trainable}
    sizes = [2] * len(vector.segments)

    def pool(*names: str) -> PlanPool:
        made = PlanPool(vector, [Strategy.parse(name) for name in names], Cluster(4, 2), sizes, sizes)
        assert not made.in_place
        made.hold_in_place()
        return made

    for names in (("dp4",), ("dp4", "dp2cp2", "cp4+rc"), ("dp4+z2", "dp4")):
        held = pool(*names)
        assert held.in_place == frozen, names
        assert not held.has_frozen
        only_frozen = [int(index in frozen) for index in range(len(sizes))]
        assert all(delivered(held.load(strategy), only_frozen) == 0 for strategy in held.strategies)
        assert held.completion in held.plans()
        assert delivered(held.completion, only_frozen) >= 4 * sum(vector.segments[i].numel for i in frozen)
        assert delivered(held.completion, [1 - each for each in only_frozen]) == 0
    for names in (("dp4", "tp4"), ("dp2tp2",), ("pp4",), ("dp4", "dp4+z3")):
        assert not pool(*names).in_place, names


def test_an_unknown_planner_is_refused() -> None:
    vector = cut_vector()
    with pytest.raises(HotspaConfigError, match="algorithm1"):
        PlanPool(vector, [Strategy(dp=2)], Cluster(2, 2), [2] * 4, [4] * 4, "fastest")
