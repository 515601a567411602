"""Nested shard orders: digit reversal, and shards that lie inside each other on every rank."""

from fractions import Fraction
from itertools import combinations, product

import pytest

from hf_hotspa.layout.stages import StageCosts, digit_reversal, nested_orders
from hf_hotspa.strategy import Strategy

COSTS = [3] * 12


def nested(*names: str) -> list[Strategy]:
    pool = [Strategy.parse(name) for name in names]
    orders = nested_orders(pool, COSTS, StageCosts(tuple(COSTS), 2))
    return [s.ordered(orders[s]) for s in pool]


def kept(pool: list[Strategy]) -> Fraction:
    """What stays in place over all pairs, counted rank by rank and layer by layer."""
    total = Fraction(0)
    for a, b in combinations(pool, 2):
        cuts = [StageCosts(tuple(COSTS), 2).stages(s.pp) for s in (a, b)]
        for rank in range(a.world_size):
            at = [s.coord(rank) for s in (a, b)]
            shards = [
                (Fraction(s.shard_index(c.tp), s.tp), Fraction(s.shard_index(c.tp) + 1, s.tp))
                for s, c in zip((a, b), at, strict=True)
            ]
            overlap = min(shards[0][1], shards[1][1]) - max(shards[0][0], shards[1][0])
            layers = len(set(cuts[0][at[0].pp]) & set(cuts[1][at[1].pp]))
            total += max(overlap, Fraction(0)) * layers
    return total


@pytest.mark.parametrize(
    "names",
    [
        ("dp16tp2", "dp8tp4", "dp4tp8", "dp2tp16"),
        ("dp2tp4", "tp8"),
        ("dp9tp2", "dp3tp6", "tp18"),
        ("dp6tp3", "dp3tp6", "tp18"),
        ("dp4tp3", "tp12"),
    ],
)
def test_the_larger_degree_lies_inside_the_smaller_on_every_rank(names):
    for a, b in combinations(nested(*names), 2):
        for rank in range(a.world_size):
            outer, inner = a.shard_index(rank % a.tp), b.shard_index(rank % b.tp)
            assert inner * a.tp // b.tp == outer


@pytest.mark.parametrize(
    "names",
    [
        ("dp2tp4", "dp4tp2", "tp8", "dp2tp2pp2"),
        ("dp3tp4", "dp2tp6", "dp4tp3", "tp12"),
        ("dp3tp4", "dp2tp6"),
        ("dp6tp2pp2", "tp6pp4", "dp2tp12", "dp8tp3"),
    ],
)
def test_best_among_all_combinations_of_candidates(names):
    pool = nested(*names)
    degrees = sorted({s.tp for s in pool})
    radices = {2: [[2]], 3: [[3]], 4: [[2, 2]], 6: [[2, 3], [3, 2]], 8: [[2, 2, 2]]}
    radices[12] = [[2, 2, 3], [2, 3, 2], [3, 2, 2]]
    candidates = [[(), *map(digit_reversal, radices[tp])] for tp in degrees]
    best = max(kept([s.ordered(choice[degrees.index(s.tp)]) for s in pool]) for choice in product(*candidates))
    assert kept(pool) == best
