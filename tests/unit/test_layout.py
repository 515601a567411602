"""Layouts: cuts of parts and stages, and who holds which element under every strategy."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable

import pytest
from written_plans import layout_of  # type: ignore[import-not-found]

from hf_hotspa.errors import ModelError
from hf_hotspa.layout.placement import (
    MASTER_ALIGNMENT,
    Interval,
    Layout,
    Slot,
    gradient_layout,
    master_layout,
    rank_slots,
    stage_of_unit,
    strategy_layout,
)
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.layout.vector import EMBEDDING, ParameterSpec, ParameterVector, Part, build_vector
from hf_hotspa.strategy import Coord, Strategy
from tests.random_models import RandomModel, plain, random_model

SEEDS = range(30)


def counts(vector: ParameterVector, intervals: Iterable[Interval]) -> list[int]:
    """How often each element of the vector occurs in the intervals."""
    steps = [0] * (vector.numel + 1)
    for interval in intervals:
        steps[interval.start] += 1
        steps[interval.stop] -= 1
    return list(itertools.accumulate(steps))[:-1]


def replica(layout: Layout, strategy: Strategy, dp_coord: int) -> list[Interval]:
    ranks = [r for r in range(strategy.world_size) if strategy.coord(r).dp == dp_coord]
    return [interval for rank in ranks for interval in layout.holdings[rank]]


def cases(seed: int, count: int = 4) -> list[tuple[RandomModel, Strategy]]:
    rng = random.Random(seed)
    model = random_model(rng)
    return [(model, rng.choice(model.strategies(rng.randint(1, 8)))) for _ in range(count)]


# ------------------------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize(
    ("part", "tp", "cuts"),
    [
        (Part(12, 12, 12), 4, [(0, 3), (3, 6), (6, 9), (9, 12)]),
        (Part(7, 7, 7), 2, [(0, 3), (3, 7)]),  # an odd vocabulary
        (Part(2, 2, 2), 3, [(0, 0), (0, 1), (1, 2)]),  # fewer rows than shards
        (Part(24, 2, 6), 2, [(0, 12), (12, 24)]),  # query heads: whole groups while there are enough
        (Part(24, 2, 6), 4, [(0, 4), (4, 12), (12, 16), (16, 24)]),  # then a group's three heads are shared by two
        (Part(24, 3, 6), 2, [(0, 8), (8, 24)]),  # 3 groups over 2: one and two
        (Part(8, 2, 2, replicate=True), 2, [(0, 4), (4, 8)]),
        (Part(8, 2, 2, replicate=True), 4, [(0, 4), (0, 4), (4, 8), (4, 8)]),  # fewer key/value heads than shards
        (Part(8, 1, 1, replicate=True), 3, [(0, 8)] * 3),
    ],
)
def test_a_part_is_cut_as_by_hand(part: Part, tp: int, cuts: list[tuple[int, int]]) -> None:
    assert [part.cut(tp, shard) for shard in range(tp)] == cuts


def test_every_legal_cut_covers_a_part_exactly_and_never_splits_an_item() -> None:
    for groups, per_group, size in itertools.product(range(1, 7), range(1, 5), range(1, 4)):
        items = groups * per_group
        for tp in range(1, 9):
            if tp > groups and tp % groups and per_group > 1:
                continue  # refused by Strategy.unsupported_reason
            cuts = [Part(items * size, groups, items).cut(tp, shard) for shard in range(tp)]
            assert [cuts[0][0], *(stop for _, stop in cuts)] == [*(start for start, _ in cuts), items * size]
            assert all(start % size == 0 and start <= stop for start, stop in cuts)
            if tp <= groups:
                assert all(start % (per_group * size) == 0 for start, _ in cuts)


# ----------------------------------------------------------------------------------------------------------- stages


def test_a_costly_head_takes_layers_from_the_last_stage() -> None:
    assert StageCosts((1,) * 8).stages(2) == (range(4), range(4, 8))
    assert StageCosts((1,) * 8, head=4).stages(2) == (range(6), range(6, 8))


# ------------------------------------------------------------------------------------------------- parameter vector


def test_tied_embeddings_are_held_by_the_first_and_the_last_stage() -> None:
    specs = [ParameterSpec("embed", (5, 2), "float32", EMBEDDING, 0, plain(5), in_head=True)]
    specs += [ParameterSpec(f"{layer}.norm", (3,), "float32", layer) for layer in range(2)]
    vector, strategy = build_vector(specs, [1, 1], 1), Strategy(tp=2, pp=2)
    layout = strategy_layout(vector, strategy)
    embedding = counts(vector, replica(layout, strategy, 0))[: vector.segments[0].numel]
    assert embedding == [2] * vector.segments[0].numel
    first, last = (layout.holdings[strategy.rank(Coord(0, 1, stage))][0] for stage in (0, 1))
    assert first == last == Interval(4, 10, 0, 0)  # rows 2..4 of 5: an uneven cut


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([ParameterSpec("a", (2,), "float32", 0), ParameterSpec("a", (2,), "float32", 0)], "two parameters"),
        ([ParameterSpec("a", (4, 2), "float32", 0, 0, plain(3))], "do not add up"),
        ([ParameterSpec("a", (4, 2), "float32", 0, 0)], "do not add up"),
        ([ParameterSpec("a", (4, 2), "float32", 0, 0, (Part(4, 3, 4),))], "does not divide"),
        ([], "no parameters"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(specs: list[ParameterSpec], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_vector(specs, [1], 1)


# ------------------------------------------------------------------------------- properties of random models' layouts


@pytest.mark.parametrize("seed", SEEDS)
def test_every_replica_holds_every_element_and_its_buffers_have_no_gaps(seed: int) -> None:
    for model, strategy in cases(seed):
        vector, layout = model.vector, strategy_layout(model.vector, strategy)
        assert layout.world_size == strategy.world_size
        expected = [expected_holders(model, strategy, spec) for spec in vector.specs for _ in range(spec.numel)]
        for dp_coord in range(strategy.dp):
            held = counts(vector, replica(layout, strategy, dp_coord))
            for count, (low, high) in zip(held, expected, strict=True):
                assert low <= count <= high
        for holdings, sizes in zip(layout.holdings, layout.sizes, strict=True):
            assert set(counts(vector, holdings)) <= {0, 1}
            filled = Counter[int]()
            for interval in sorted(holdings, key=lambda i: (i.segment, i.offset)):
                segment = vector.segments[interval.segment]
                assert interval.offset == filled[interval.segment]
                assert segment.start <= interval.start < interval.stop <= segment.stop
                filled[interval.segment] += interval.length
            assert [filled[segment.index] for segment in vector.segments] == list(sizes)


def expected_holders(model: RandomModel, strategy: Strategy, spec: ParameterSpec) -> tuple[int, int]:
    """How many ranks of a replica hold an element of a parameter: at least, at most."""
    stages = 2 if spec.in_head and strategy.pp > 1 else 1
    if spec.shard_dim is None:
        return strategy.tp * stages, strategy.tp * stages
    copies = max(1, strategy.tp // model.shape.num_key_value_heads) if any(p.replicate for p in spec.parts) else 1
    return stages, copies * stages


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_agree_with_the_layout_and_with_the_shapes(seed: int) -> None:
    for model, strategy in cases(seed, 2):
        layout = strategy_layout(model.vector, strategy)
        for rank in range(strategy.world_size):
            slots: tuple[Slot, ...] = rank_slots(model.vector, strategy, rank)
            intervals = [interval for slot in slots for interval in slot.intervals()]
            assert layout_of("", [intervals], [layout.sizes[rank]]).holdings[0] == layout.holdings[rank]
            for slot in slots:
                assert math.prod(slot.shape) == slot.numel
                assert (
                    stage_of_unit(model.vector, strategy, slot.spec.unit) % strategy.pp == strategy.coord(rank).pp
                    or slot.spec.in_head
                )
            stages = range(strategy.coord(rank).pp, strategy.num_stages, strategy.pp)
            parts = [slot for stage in stages for slot in rank_slots(model.vector, strategy, rank, stage)]
            assert sorted(parts, key=lambda slot: slot.spec.offset) == list(slots)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_replicated_parameters_are_counted_once_a_replica_and_those_of_holders_always(seed: int) -> None:
    for model, strategy in cases(seed):
        vector = model.vector
        weights = counts(vector, itertools.chain(*strategy_layout(vector, strategy).holdings))
        gradients = counts(vector, itertools.chain(*gradient_layout(vector, strategy).holdings))
        for spec in vector.specs:
            stages = 2 if spec.in_head and strategy.pp > 1 else 1
            here = slice(spec.offset, spec.stop)
            if not spec.trainable:
                assert not any(gradients[here])
            elif spec.shard_dim is None and not spec.partial_gradient:
                assert gradients[here] == [strategy.dp * stages] * spec.numel
            else:
                assert gradients[here] == weights[here]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_element_of_the_master_store_has_one_owner(seed: int) -> None:
    vector = random_model(random.Random(seed)).vector
    for world_size in range(1, 9):
        layout = master_layout(vector, world_size)
        assert set(counts(vector, itertools.chain(*layout.holdings))) == {1}
        for holdings, sizes in zip(layout.holdings, layout.sizes, strict=True):
            assert sum(interval.length for interval in holdings) == sum(sizes)
            for interval in holdings:
                assert interval.offset == 0
                for cut in (interval.start, interval.stop):  # at a block of its parameter, or between two parameters
                    cuts = [spec for spec in vector.specs if spec.offset < cut < spec.stop]
                    assert all((cut - spec.offset) % MASTER_ALIGNMENT == 0 for spec in cuts)


def test_the_master_store_is_cut_evenly() -> None:
    sizes = [4099, 1, 64, 10_007, 255, 257, 3]  # blocks of one parameter are none of the next
    specs = [ParameterSpec(f"p{i}", (size,), "float32", 0) for i, size in enumerate(sizes)]
    vector = build_vector([*specs, ParameterSpec("b", (999,), "float32", 1)], [1, 1], 0)
    layout = master_layout(vector, 4)
    for segment in vector.segments:
        owned = [per_rank[segment.index] for per_rank in layout.sizes]
        assert sum(owned) == segment.numel
        assert max(owned) - min(owned) <= 2 * MASTER_ALIGNMENT
    inside = {(interval.stop - specs.offset) for holdings in layout.holdings for interval in holdings
              for specs in vector.specs if specs.offset < interval.stop < specs.stop}  # fmt: skip
    assert inside
    assert all(cut % MASTER_ALIGNMENT == 0 for cut in inside)
