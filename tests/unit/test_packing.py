"""Packing: nothing lost, nothing over capacity, the same every time, balanced where it can be."""

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.costs.time import Pipeline, pipeline_seconds
from hf_hotspa.errors import OverlongError
from hf_hotspa.packing.bucketing import (
    MIN_PIPELINE_PACK_TOKENS,
    _cheapest_that_fits,
    pack_sequences,
    sequence_cost,
)

CASES = st.tuples(
    st.integers(8, 400),  # capacity
    st.lists(st.integers(1, 400), max_size=60),
    st.integers(1, 5),  # dp
    st.integers(1, 4),  # pp
    st.sampled_from([0.0, 1e-3, 0.5]),
)


def loads(replicas, lengths, quadratic_cost):
    return [sum(sequence_cost(lengths[i], quadratic_cost) for pack in packs for i in pack) for packs in replicas]


def packs_of(replicas, lengths):
    """The packs of all replicas, which hold every sequence once; none is empty."""
    packs = [pack for packs in replicas for pack in packs]
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(packs)
    return packs


@given(CASES)
@settings(deadline=None, max_examples=200)
def test_every_sequence_once_and_within_capacity(case):
    capacity, lengths, dp, pp, quadratic_cost = case
    lengths = [min(length, capacity) for length in lengths]
    replicas = pack_sequences(lengths, capacity=capacity, dp=dp, pp=pp, quadratic_cost=quadratic_cost)
    assert len(replicas) == dp
    packs = packs_of(replicas, lengths)
    assert all(sum(lengths[i] for i in pack) <= capacity for pack in packs)
    for packs_of_one in replicas:
        costs = [sum(sequence_cost(lengths[i], quadratic_cost) for i in pack) for pack in packs_of_one]
        if pp > 1 and len(costs) > 2:  # a pipeline begins with the second cheapest
            costs.insert(-1, costs.pop(0))
        assert costs == sorted(costs, reverse=True)
    assert replicas == pack_sequences(tuple(lengths), capacity=capacity, dp=dp, pp=pp, quadratic_cost=quadratic_cost)
    if len(lengths) >= dp:  # nobody idles while somebody could be given work
        assert all(replicas)
    load = loads(replicas, lengths, quadratic_cost)
    # longest processing time first: a replica had the least to do when it was given its last, cheapest pack
    for total, packs_of_one in zip(load, replicas, strict=True):
        last = min(loads([[pack] for pack in packs_of_one], lengths, quadratic_cost), default=0.0)
        assert total - last <= min(load) + 1e-6
    # so that none carries more than its share and one pack
    largest = max((loads([[pack]], lengths, quadratic_cost)[0] for pack in packs), default=0.0)
    assert max(load) <= sum(load) / dp + largest + 1e-6


@given(CASES, st.integers(1, 300))
@settings(deadline=None, max_examples=200)
def test_a_sequence_above_the_capacity_has_a_pack_of_its_own(case, capacity):
    _, lengths, dp, pp, quadratic_cost = case
    replicas = pack_sequences(
        lengths, capacity=capacity, dp=dp, pp=pp, quadratic_cost=quadratic_cost, longest=max(lengths, default=0)
    )
    packs = packs_of(replicas, lengths)
    for pack in packs:
        assert len(pack) == 1 or sum(lengths[i] for i in pack) <= capacity
    if len(lengths) >= dp:
        assert all(replicas)


def test_number_of_packs_is_a_multiple_of_dp_where_the_sequences_allow():
    lengths = [100] * 25  # 5 packs of 500 are enough
    replicas = pack_sequences(lengths, capacity=500, dp=4)
    assert [len(packs) for packs in replicas] == [2, 2, 2, 2]
    assert [len(packs) for packs in pack_sequences([400] * 5, capacity=500, dp=4)] == [2, 1, 1, 1]


def test_a_pipeline_gets_enough_packs_but_no_tiny_ones():
    def sizes(lengths, pp):
        (packs,) = pack_sequences(lengths, capacity=4096, dp=1, pp=pp)
        return [sum(lengths[i] for i in pack) for pack in packs]

    assert len(sizes([128] * 32, pp=1)) == 1
    assert sizes([128] * 32, pp=4) == [1024] * 4
    short = sizes([16] * 40, pp=4)  # 640 tokens: two packs of at least 256, not four
    assert len(short) == 2
    assert min(short) >= MIN_PIPELINE_PACK_TOKENS
    assert len(sizes([16] * 10, pp=4)) == 1


def test_nothing_goes_before_a_sequence_that_fills_a_pipeline_alone():
    lengths = [4000, 800, 700, 600]
    assert pack_sequences(lengths, capacity=1000, pp=2, longest=4000) == (((0,), (1,), (2,), (3,)),)
    assert pack_sequences(lengths, capacity=3000, pp=4, longest=4000) == (((2,), (0,), (1,), (3,)),)


@pytest.mark.parametrize("pp", [2, 4])
def test_a_pipeline_that_begins_with_a_cheap_pack_ends_sooner(pp: int):
    def seconds(costs: list[float]) -> float:
        total = len(costs)
        return pipeline_seconds(
            Pipeline([costs] * pp, [[2 * cost for cost in costs]] * pp, [0.0] * total, [total] * total)
        )

    packed = sorted_first = 0.0
    draw = random.Random(0)
    for _ in range(100):
        lengths = [draw.randint(64, 1024) for _ in range(12)]
        (packs,) = pack_sequences(lengths, capacity=1024, pp=pp)
        costs = [float(sum(lengths[i] for i in pack)) for pack in packs]
        packed += seconds(costs)
        sorted_first += seconds(sorted(costs, reverse=True))
    assert packed < 0.995 * sorted_first


def test_quadratic_cost_balances_attention_and_not_tokens():
    # In tokens 1000 = 10 * 100; in cost the long one weighs 11,000 and all others together 2,000.
    replicas = pack_sequences([1000] + [100] * 10, capacity=2000, dp=2, quadratic_cost=0.01)
    assert [len(packs[0]) for packs in replicas] == [1, 10]


def test_the_fall_back_still_gives_every_replica_as_many_packs():
    # Seven packs are enough and eight are wanted; cheapest-first leaves 28 without room in any of the eight.
    lengths = [51, 50, 49, 47, 46, 45, 43, 42, 36, 35, 35, 34, 33, 32, 30, 29, 28]
    assert _cheapest_that_fits(range(17), lengths, lengths, 100, 8) is None
    replicas = pack_sequences(lengths, capacity=100, dp=4)
    assert sum(len(packs) for packs in replicas) == 8
    assert sorted(i for packs in replicas for pack in packs for i in pack) == list(range(17))


@given(CASES, st.integers(1, 12))
@settings(deadline=None, max_examples=150)
def test_placement_is_the_cheapest_pack_with_room(case, num_packs):
    capacity, lengths, _, _, quadratic_cost = case
    lengths = sorted((min(length, capacity) for length in lengths), reverse=True)
    costs = [sequence_cost(length, quadratic_cost) for length in lengths]
    packs, rooms, loads = [[] for _ in range(num_packs)], [capacity] * num_packs, [0.0] * num_packs
    for i, length in enumerate(lengths):  # the same rule, written down plainly
        best = min((p for p in range(num_packs) if rooms[p] >= length), key=lambda p: (loads[p], p), default=None)
        if best is None:
            packs = None
            break
        packs[best].append(i)
        rooms[best] -= length
        loads[best] += costs[i]
    assert _cheapest_that_fits(range(len(lengths)), lengths, costs, capacity, num_packs) == packs


def test_the_packs_of_the_papers_example():
    """Fig. 2 of HotSPa (SOSP'24): 16 sequences, in tenths of 1K tokens, and packs of 32K: four passes."""
    lengths = [5, 280, 36, 135, 145, 50, 15, 40, 45, 32, 2, 260, 66, 20, 80, 50]
    (packs,) = pack_sequences(lengths, capacity=320)
    found = sorted(sorted(lengths[index] for index in pack) for pack in packs)
    expected = [[280, 40], [260, 50, 5], [135, 145, 36, 2], [15, 20, 32, 45, 50, 66, 80]]
    assert found == sorted(sorted(pack) for pack in expected)


def test_too_long_for_a_pack_is_refused():
    with pytest.raises(OverlongError, match="11 tokens does not fit into a pack of 10"):
        pack_sequences([3, 11], capacity=10)


def test_the_work_of_packing_grows_hardly_faster_than_the_mini_batch():
    few, many = _lines_run(512), _lines_run(4096)
    assert many < 8 * 2 * few, f"{many} lines for 4096 sequences, {few} for 512"


def _lines_run(num_sequences):
    """Lines of Python that packing so many sequences runs: its work, on any machine."""
    lengths, lines = [1 + (i * 7919) % 4096 for i in range(num_sequences)], 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        pack_sequences(lengths, capacity=8192, dp=8, pp=2, quadratic_cost=1e-4)
    finally:
        sys.settrace(before)
    return lines


@given(CASES, st.data())
@settings(deadline=None, max_examples=200)
def test_slow_replicas_get_less(case, data):
    capacity, lengths, dp, pp, quadratic_cost = case
    lengths = [min(length, capacity) for length in lengths]
    speeds = data.draw(st.lists(st.sampled_from([1.0, 0.5, 0.25]), min_size=dp, max_size=dp))
    replicas = pack_sequences(lengths, capacity=capacity, dp=dp, pp=pp, quadratic_cost=quadratic_cost, speeds=speeds)
    assert len(replicas) == dp
    assert all(sum(lengths[i] for i in pack) <= capacity for pack in packs_of(replicas, lengths))
    assert len(lengths) < dp or all(replicas)
    # when a sequence went to the replica that is done first with it, no other would have been done with it sooner: summed over
    # replicas, their work and that sequence for each of the others. A replica that had none is given a single one.
    costs = [sequence_cost(length, quadratic_cost) for length in lengths]
    largest = max(costs, default=0.0)
    latest = (sum(costs) + (dp - 1) * largest) / sum(speeds)
    for load, speed in zip(loads(replicas, lengths, quadratic_cost), speeds, strict=True):
        assert load / speed <= max(latest, largest / speed) + 1e-6


def test_four_times_slower_is_nearly_ideal():
    lengths = [16] * 52
    replicas = pack_sequences(lengths, capacity=64, dp=4, speeds=[1.0, 0.25, 1.0, 1.0])
    assert loads(replicas, lengths, 0.0) == [256, 64, 256, 256]
