"""Nested shard order: which tp shard each tp coordinate holds, so that much stays in place between strategies.

Rank arithmetic puts neighbouring coordinates side by side, so rank r has tp coordinate r mod tp. In the plain order the
shard of a rank at tp 4 is then rarely inside its shard at tp 2. When the digits of the coordinate are reversed (bit
reversal for powers of two), the shard at the higher degree lies inside the one at the lower degree on every rank, and
growing tp moves nothing. Pure integer arithmetic on plain data.
"""

import math
from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
import numpy.typing as npt

from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.strategy import Strategy

Order = tuple[int, ...]
_Table = npt.NDArray[np.int64]

_MOST_ORDERS = 64
"""Digit orders tried for one degree."""
_FINEST_WEIGHT = 1000
"""Layer weights are rounded to this many steps of the heaviest, so that scores stay far inside 64 bits."""


def nested_orders(
    strategies: Sequence[Strategy], layer_sizes: Sequence[int], costs: StageCosts
) -> dict[Strategy, tuple[int, ...]]:
    """The shard order of each strategy of a pool, one per tp degree.

    Maximises what stays in place, summed over all pairs of strategies: over the ranks, the overlap of the two tp shards
    (as fractions of a layer) times the weight of the layers that both stages hold. The candidates of a degree are the
    identity and the digit reversals over the orders of its prime factors; a coordinate ascent over the degrees with the
    exact score starts from the identity and from the reversals. Among equal scores the one with the most identities.
    Replicated key/value heads are cut by shard index as well and change nothing.

    Args:
        strategies: The pool; all of one world size. Their own shard orders are ignored.
        layer_sizes: Relative to one another.
        costs: What stages are cut by.

    Returns:
        For each strategy what `Strategy.ordered` takes: the shard of each tp coordinate; empty for the identity.

    Raises:
        StrategyError: a strategy has more stages than there are layers.
    """
    degrees = sorted({s.tp for s in strategies})
    candidates = {tp: [tuple(range(tp)), *_digit_reversals(tp)] for tp in degrees}
    movable = [tp for tp in degrees if len(candidates[tp]) > 1]
    scores = _pair_scores(strategies, candidates, layer_sizes, costs)

    def value(choice: dict[int, int]) -> tuple[int, int, tuple[int, ...]]:
        total = sum(int(table[choice[a], choice[b]]) for (a, b), table in scores.items())
        return total, sum(not index for index in choice.values()), tuple(-choice[tp] for tp in degrees)

    best = dict.fromkeys(degrees, 0)
    for start in _starts(degrees, candidates):
        choice, overlap = start, value(start)
        while True:
            trials = [{**choice, tp: index} for tp in movable for index in range(len(candidates[tp]))]
            better = max(trials, key=value, default=choice)
            if value(better) <= overlap:
                break
            choice, overlap = better, value(better)
        if overlap > value(best):
            best = choice
    return {s: candidates[s.tp][best[s.tp]] if best[s.tp] else () for s in strategies}


def digit_reversal(radices: Sequence[int]) -> tuple[int, ...]:
    """The permutation that reads the digits of a coordinate (lowest first, of these radices) as highest first.

    All radices 2 is bit reversal: `digit_reversal([2, 2, 2]) == (0, 4, 2, 6, 1, 5, 3, 7)`.
    """
    order = []
    for coordinate in range(math.prod(radices)):
        shard, rest = 0, coordinate
        for radix in radices:
            rest, digit = divmod(rest, radix)
            shard = shard * radix + digit
        order.append(shard)
    return tuple(order)


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def _factor_orders(number: int) -> list[Order]:
    """The distinct orders of the prime factors, lexicographic, at most `_MOST_ORDERS`."""
    orders: list[Order] = []

    def extend(prefix: Order, left: Order) -> None:
        if not left:
            orders.append(prefix)
        for factor in sorted(set(left)):
            if len(orders) < _MOST_ORDERS:
                at = left.index(factor)
                extend((*prefix, factor), left[:at] + left[at + 1 :])

    extend((), tuple(_prime_factors(number)))
    return orders


def _digit_reversals(tp: int) -> list[Order]:
    """The digit reversals of a degree other than the identity (a prime has none)."""
    reversals = dict.fromkeys(digit_reversal(radices) for radices in _factor_orders(tp))
    reversals.pop(tuple(range(tp)), None)
    return list(reversals)


def _starts(degrees: Sequence[int], candidates: dict[int, list[Order]]) -> list[dict[int, int]]:
    """Where the ascent starts: the identity, and all degrees with their factors sorted by one order of the primes."""
    starts = [dict.fromkeys(degrees, 0)]
    primes = sorted({p for tp in degrees for p in _prime_factors(tp)})
    priorities = list(permutations(primes)) if len(primes) <= 3 else [tuple(primes), tuple(reversed(primes))]
    for priority in priorities:
        start = {}
        for tp in degrees:
            order = digit_reversal(sorted(_prime_factors(tp), key=priority.index))
            start[tp] = candidates[tp].index(order) if order in candidates[tp] else 0
        starts.append(start)
    return starts


def _pair_scores(
    strategies: Sequence[Strategy],
    candidates: dict[int, list[Order]],
    layer_sizes: Sequence[int],
    costs: StageCosts,
) -> dict[tuple[int, int], _Table]:
    """For each pair of degrees a < b the score of every pair of their candidates.

    Strategies of equal degree share one order, which keeps the same amount in place whatever it is: no such pairs.
    """
    largest = max(max(layer_sizes, default=0), 1)
    weights = np.array([max(1, size * _FINEST_WEIGHT // largest) for size in layer_sizes], np.int64)
    ranks = {(pp, v): costs.ranks(pp, v) for pp, v in sorted({(s.pp, s.v) for s in strategies})}
    held = {key: np.array([[i in layers for i in range(len(weights))] for layers in cut]) for key, cut in ranks.items()}
    common = {(p, q): (held[p] * weights) @ held[q].T for p in held for q in held}
    # meetings[a, b][t, u]: the weight of the layers that ranks with coordinate t at degree a and u at degree b keep
    meetings: dict[tuple[int, int], _Table] = {}
    for s, o in product(strategies, strategies):
        if s.tp < o.tp:
            rank = np.arange(s.world_size)
            kept = common[(s.pp, s.v), (o.pp, o.v)][rank * s.pp // s.world_size, rank * o.pp // o.world_size]
            meeting = meetings.setdefault((s.tp, o.tp), np.zeros((s.tp, o.tp), np.int64))
            np.add.at(meeting, (rank % s.tp, rank % o.tp), kept)
    tables = {}
    for (a, b), meeting in meetings.items():
        overlap = _overlaps(a, b)
        scores = [
            [int((meeting * overlap[np.ix_(first, second)]).sum()) for second in candidates[b]]
            for first in candidates[a]
        ]
        tables[a, b] = np.array(scores) * (math.lcm(*candidates) // math.lcm(a, b))
    return tables


def _overlaps(a: int, b: int) -> _Table:
    """Overlap of shard i of a and shard j of b, in units of 1 / lcm(a, b) of a layer."""
    unit = math.lcm(a, b)
    starts_a, starts_b = np.arange(a)[:, None] * (unit // a), np.arange(b)[None, :] * (unit // b)
    stops = np.minimum(starts_a + unit // a, starts_b + unit // b)
    return np.maximum(stops - np.maximum(starts_a, starts_b), 0)
