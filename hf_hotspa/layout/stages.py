"""Which pipeline stage holds which layer (used by layouts, replicas and checkpoints), and the nested shard order.

Stage partition: layers are weighed by measured seconds if present, otherwise by parameters (`StageCosts`). Stages with
ranks that take longer are weighed with their relative step time.

Nested shard order: which tp shard each tp coordinate (rank mod tp) holds. In the plain order, a rank's shard at tp 4 is
rarely inside its shard at tp 2. With the digits of the coordinate reversed (bit reversal for powers of two), it always
is, and growing tp moves nothing. Integer arithmetic on plain data.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice, permutations, product

import numpy as np
import numpy.typing as npt

from hf_hotspa.errors import HotspaConfigError, StrategyError
from hf_hotspa.strategy import Strategy

USUAL_STEP_TIME = 100
"""Relative step time of a stage whose devices take the usual time; a stage of 300 takes three times as long for the same layers."""


@dataclass(frozen=True)
class StageCosts:
    """The costs that decide a stage partition, in one unit, such as nanoseconds. Integers, so all ranks cut alike."""

    layers: tuple[int, ...]  # cost of each layer
    head: int = 0  # cost of the head, on the last stage
    embedding: int = 0  # cost of the embedding, on the first stage; a table look-up is nearly free
    sends: tuple[int, ...] = ()  # `sends[i]`: cost of sending the hidden state after layer i, one way; empty if free
    # relative step times of stages (see `USUAL_STEP_TIME`), a tuple for each depth where they differ
    step_times: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if min((step_time for step_times in self.step_times for step_time in step_times), default=1) < 1:
            fix = "give relative step times, with 100 as usual"
            raise HotspaConfigError("a relative step time of a stage is not positive", fix=fix)
        if self.sends and len(self.sends) < len(self.layers) - 1:
            raise HotspaConfigError(f"{len(self.sends)} sends between {len(self.layers)} layers")
        if min(self.head, self.embedding, *self.layers, *self.sends, 0) < 0:
            raise HotspaConfigError("a cost of a stage is negative", fix="measure again")

    def stages(self, num_stages: int) -> tuple[range, ...]:
        """Cuts the layers into consecutive stages so that the slowest stage is as fast as possible.

        The dynamic programme of Narayanan et al. (SOSP'19, section 3.1) for stages of one rank each: `A(j,
        m) = min over i of max(A(i, m - 1), 2 C_i, cost of layers i..j)` over the first j layers and m stages, with C_i
        the cost of sending the hidden state after layer i. Ties of an `A(j, m)`: the smallest sum of squared stage
        costs, then the earliest cut points; the sum of all stages is not always the smallest. Each stage gets at least
        one layer. A stage's cost is multiplied by its relative step time. Raises `StrategyError`: more stages than
        layers.
        """
        if not 1 <= num_stages <= len(self.layers):
            fix = f"use pp between 1 and {len(self.layers)}"
            raise StrategyError(f"{num_stages} pipeline stages cannot share {len(self.layers)} layers", fix=fix)
        return _cut(self, num_stages)

    def step_times_of(self, num_stages: int) -> tuple[int, ...] | None:
        """The relative step times of the stages of a pipeline; None if none is slow."""
        return next((step_times for step_times in self.step_times if len(step_times) == num_stages), None)

    def with_step_times(self, step_times: Iterable[tuple[int, ...]]) -> "StageCosts":
        return replace(self, step_times=tuple(sorted(step_times)))

    def ranks(self, pp: int, v: int = 1) -> tuple[tuple[int, ...], ...]:
        """Layers of each pipeline rank, ascending: stage s of pp * v is on rank s mod pp. Raises `StrategyError`: more
        stages than layers."""
        stages = self.stages(pp * v)
        return tuple(tuple(layer for stage in stages[rank::pp] for layer in stage) for rank in range(pp))

    def rank_costs(self, pp: int, v: int = 1) -> list[int]:
        """Cost of each pipeline rank at the usual relative step time, without sends."""
        costs = self.partition_costs(self.stages(pp * v))
        return [sum(costs[rank::pp]) for rank in range(pp)]

    def partition_costs(self, stages: Sequence[range]) -> list[int]:
        """Cost of each stage of a partition at the usual relative step time, without sends."""
        sums = [sum(self.layers[stage.start : stage.stop]) for stage in stages]
        sums[0] += self.embedding
        sums[-1] += self.head
        return sums

    def passes(self, stages: Sequence[range]) -> list[int]:
        """Cost of the sends between stages, there and back; empty if free."""
        return [2 * self.sends[stage.start - 1] for stage in stages[1:] if self.sends]


@lru_cache(maxsize=64)
def _cut(costs: StageCosts, num_stages: int) -> tuple[range, ...]:
    num_layers, prefix = len(costs.layers), [0, *accumulate(costs.layers)]
    step_times = costs.step_times_of(num_stages) or (USUAL_STEP_TIME,) * num_stages
    # best[j]: (slowest stage or send, sum of squares, cut points) of the first j layers in the stages placed so far
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(num_stages):
        extra = (costs.head if stage == num_stages - 1 else 0) + (costs.embedding if stage == 0 else 0)
        sends = [2 * send * USUAL_STEP_TIME for send in costs.sends] if stage else []
        best = {
            j: min(
                (max(slowest, cost, sends[i - 1] if sends else 0), squares + cost * cost, (*cuts, j))
                for i, (slowest, squares, cuts) in best.items()
                if i < j
                for cost in [(prefix[j] - prefix[i] + extra) * step_times[stage]]
            )
            for j in range(stage + 1, num_layers - (num_stages - stage - 1) + 1)
        }
    cuts = best[num_layers][2]
    return tuple(range(start, stop) for start, stop in zip((0, *cuts[:-1]), cuts, strict=True))


Order = tuple[int, ...]
_Table = npt.NDArray[np.int64]
_MOST_ORDERS = 64  # digit orders tried for one degree
_FINEST_WEIGHT = 1000  # layer weights are rounded to this many steps of the heaviest, so that scores fit 64 bits easily


def nested_orders(
    strategies: Sequence[Strategy], layer_sizes: Sequence[int], costs: StageCosts
) -> dict[Strategy, tuple[int, ...]]:
    """Chooses the shard order of each strategy of a pool, one per tp degree.

    Maximises what stays in place, summed over all pairs of strategies and all ranks: the overlap of the two tp shards
    (as fractions of a layer) times the weight of the layers that both stages hold. Candidates are the identity and the
    digit reversals over the orders of the prime factors of a degree. A coordinate ascent over the degrees with the
    exact score starts from the identity and from the reversals. Ties: the most identities. Replicated key/value heads
    change nothing: they are also cut by shard index.

    The strategies have one world size; their existing shard orders are ignored. Layer sizes are relative. Returns the
    argument of `Strategy.ordered` for each: the shard of each tp coordinate; empty for the identity. Raises
    `StrategyError`: a strategy has more stages than there are layers.
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
    """Returns the permutation that reads the digits of a coordinate (lowest first, in these radices) as highest first.

    Radices of 2 give bit reversal: `digit_reversal([2, 2, 2]) == (0, 4, 2, 6, 1, 5, 3, 7)`.
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
    """Returns the distinct orders of the prime factors, lexicographic, at most `_MOST_ORDERS`."""

    def orders(left: Order) -> Iterator[Order]:
        if not left:
            yield ()
        for factor in sorted(set(left)):
            at = left.index(factor)
            yield from ((factor, *rest) for rest in orders(left[:at] + left[at + 1 :]))

    return list(islice(orders(tuple(_prime_factors(number))), _MOST_ORDERS))


def _digit_reversals(tp: int) -> list[Order]:
    reversals = dict.fromkeys(digit_reversal(radices) for radices in _factor_orders(tp))
    reversals.pop(tuple(range(tp)), None)
    return list(reversals)


def _starts(degrees: Sequence[int], candidates: dict[int, list[Order]]) -> list[dict[int, int]]:
    factors = {tp: _prime_factors(tp) for tp in degrees}
    primes = sorted({prime for each in factors.values() for prime in each})
    priorities = list(permutations(primes)) if len(primes) <= 3 else [tuple(primes), tuple(reversed(primes))]
    sorted_by = [{tp: digit_reversal(sorted(factors[tp], key=p.index)) for tp in degrees} for p in priorities]
    starts = [
        {tp: candidates[tp].index(o) if o in candidates[tp] else 0 for tp, o in each.items()} for each in sorted_by
    ]
    return [dict.fromkeys(degrees, 0), *starts]


def _pair_scores(
    strategies: Sequence[Strategy], candidates: dict[int, list[Order]], layer_sizes: Sequence[int], costs: StageCosts
) -> dict[tuple[int, int], _Table]:
    """Scores every pair of candidates for each pair of degrees a < b. Equal degrees share one order, so any order keeps
    the same amount in place."""
    largest = max(max(layer_sizes, default=0), 1)
    weights = np.array([max(1, size * _FINEST_WEIGHT // largest) for size in layer_sizes], np.int64)
    ranks = {(pp, v): costs.ranks(pp, v) for pp, v in sorted({(s.pp, s.v) for s in strategies})}
    masks = {
        key: np.array([[i in layers for i in range(len(weights))] for layers in cut]) for key, cut in ranks.items()
    }
    common = {(p, q): (masks[p] * weights) @ masks[q].T for p in masks for q in masks}
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
    """Overlap of shard i of degree a and shard j of degree b, in units of 1 / lcm(a, b) of a layer."""
    unit = math.lcm(a, b)
    starts_a, starts_b = np.arange(a)[:, None] * (unit // a), np.arange(b)[None, :] * (unit // b)
    stops = np.minimum(starts_a + unit // a, starts_b + unit // b)
    return np.maximum(stops - np.maximum(starts_a, starts_b), 0)
