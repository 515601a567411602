"""The order of phases: the optimum for few, never worse than the given order for many, ties the same everywhere."""

import random
from itertools import pairwise, permutations

import pytest

from hf_hotspa.errors import PlanError
from hf_hotspa.plan.planner import order_phases


def cost(order, first, switch):
    return first[order[0]] + sum(switch[a][b] for a, b in pairwise(order))


def random_costs(seed, count, values=None):
    rng = random.Random(seed)
    draw = rng.random if values is None else lambda: rng.choice(values)
    return [draw() for _ in range(count)], [[draw() for _ in range(count)] for _ in range(count)]


@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("seed", range(6))
def test_optimum_against_all_permutations(seed, count):
    first, switch = random_costs(seed, count)
    best = min(permutations(range(count)), key=lambda order: cost(order, first, switch))
    assert cost(order_phases(first, switch), first, switch) == pytest.approx(cost(best, first, switch))


@pytest.mark.parametrize("seed", range(20))
def test_ties_go_to_the_smallest_order(seed):
    """Costs from {0, 0.1, 0.2} tie often, and their sums differ by rounding."""
    first, switch = random_costs(seed, 5, values=(0.0, 0.1, 0.2))
    least = min(cost(order, first, switch) for order in permutations(range(5)))
    expected = next(o for o in permutations(range(5)) if cost(o, first, switch) <= least * (1 + 1e-9) + 1e-15)
    assert order_phases(first, switch) == expected


def test_rounding_noise_does_not_change_the_order():
    first, switch = random_costs(3, 6, values=(0.1, 0.3))
    noise = random.Random(1)
    for _ in range(20):
        noisy = [[c * (1 + 1e-13 * noise.uniform(-1, 1)) for c in row] for row in switch]
        assert order_phases(first, noisy) == order_phases(first, switch)


def test_a_hidden_chain_is_found_among_many_phases():
    count = 10
    chain = random.Random(5).sample(range(count), count)
    switch = [[1.0] * count for _ in range(count)]
    for a, b in pairwise(chain):
        switch[a][b] = 0.0
    first = [0.0 if phase == chain[0] else 1.0 for phase in range(count)]
    assert order_phases(first, switch) == tuple(chain)


@pytest.mark.parametrize(
    ("first", "switch"),
    [([1.0, 1.0], [[0.0, 1.0]]), ([1.0], [[0.0, 1.0]]), ([float("nan")], [[0.0]]), ([1.0], [[-1.0]])],
)
def test_impossible_costs_are_refused(first, switch):
    with pytest.raises(PlanError):
        order_phases(first, switch)
