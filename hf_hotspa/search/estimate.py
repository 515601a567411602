"""Fast estimates of phases for many length ranges at once, and the exact evaluation of one.

`LengthTable` estimates a phase for every pair of edges from sums (sequences, tokens, squared lengths) without packing:
a search needs thousands. `Evaluator` packs with the data pipeline's packer, simulates the pipeline and caches the
result, which decides. Both use the same mini-batches and time model.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from hf_hotspa.costs.terms import Cost
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.packing.bucketing import MIN_PIPELINE_PACK_TOKENS, pack_sequences
from hf_hotspa.strategy import Bucket, Strategy

Array = npt.NDArray[np.float64]
_AT_A_TIME = 1 << 14  # estimates computed at a time
_ROUNDING = 1e-9  # rounding error of sums of seconds, as a share


def pack_choices(capacity: int, longest: int, count: int = 4) -> list[int]:
    """Returns the pack sizes worth trying: the capacity and its halves, as long as they hold the longest sequence.

    Memory bounds a pack; smaller packs fill a pipeline and balance replicas better. If the longest sequence has a pack
    to itself (`Bucket`), the others need only be worth a micro-batch of a pipeline.
    """
    choices = [capacity]
    least = max(longest, 1) if longest <= capacity else MIN_PIPELINE_PACK_TOKENS
    while len(choices) < count and choices[-1] // 2 >= least:
        choices.append(choices[-1] // 2)
    return choices


def packed(
    lengths: Sequence[int], strategy: Strategy, pack_tokens: int, quadratic_cost: float, longest: int
) -> list[list[list[int]]]:
    """Returns the lengths in each replica's packs, as the data pipeline makes them: `[replica][pack][sequence]`."""
    pack = partial(pack_sequences, lengths, capacity=pack_tokens, quadratic_cost=quadratic_cost, longest=longest)
    replicas = pack(dp=strategy.dp, pp=strategy.pp)
    return [[[lengths[i] for i in pack] for pack in packs] for packs in replicas]


class LengthTable:
    """Sums over the lengths of some mini-batches between edges. `edges`: ascending lengths, the first one 0; range (i,
    j) holds the lengths in `(edges[i], edges[j]]`. `weights`: weight of each mini-batch; None for equal weights with
    sum 1."""

    def __init__(
        self, batches: Sequence[Sequence[int]], edges: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        self._weights = np.array(weights if weights is not None else [1 / len(batches)] * len(batches))
        self.edges = np.array(edges, np.int64)
        self._sorted = [np.sort(np.asarray(batch, np.int64)) for batch in batches]
        at = np.stack([np.searchsorted(lengths, self.edges, side="right") for lengths in self._sorted])
        sums = [np.concatenate(([0.0], np.cumsum(lengths, dtype=np.float64))) for lengths in self._sorted]
        squares = [np.concatenate(([0.0], np.cumsum(lengths.astype(np.float64) ** 2))) for lengths in self._sorted]
        # all pairs of edges (low, high), sorted by the high one; everything below is [mini-batch, pair]
        self._high, self._low = np.tril_indices(len(edges), -1)
        low_at, high_at = at[:, self._low], at[:, self._high]

        def between(prefix: Sequence[Array]) -> Array:
            low = np.stack([sums[row] for sums, row in zip(prefix, low_at, strict=True)])
            return np.stack([sums[row] for sums, row in zip(prefix, high_at, strict=True)]) - low

        self._from, self._to = low_at.astype(np.float64), high_at.astype(np.float64)
        self.count = self._to - self._from
        self.tokens, self.squares = between(sums), between(squares)
        top = [
            np.where(row > 0, lengths[np.maximum(row - 1, 0)], 0) if len(lengths) else np.zeros(len(row), np.int64)
            for lengths, row in zip(self._sorted, at, strict=True)
        ]
        self.longest = np.where(self.count > 0, np.stack(top)[:, self._high], 0).astype(np.float64)
        self._most = max(map(max, self._sorted))
        self._at, size = at, max(map(len, self._sorted))
        self._padded = np.stack([np.pad(row.astype(np.float64), (0, size - len(row))) for row in self._sorted])
        # all mini-batches in one ascending array, each offset above the previous one
        self._apart = np.arange(len(batches))[:, None] * (self._most + 1)
        self._joined = np.concatenate([row + apart for row, apart in zip(self._sorted, self._apart[:, 0], strict=True)])
        self._first = np.cumsum([0, *map(len, self._sorted[:-1])])[:, None]
        self._used_weight = self._weights @ (self.count > 0)
        self._known: dict[tuple[Strategy, tuple[tuple[int, int], ...]], Array] = {}

    def phase_seconds(
        self, time: TimeModel, strategy: Strategy, sizes: Sequence[tuple[int, int]], switch_s: float
    ) -> Array:
        """Returns estimated (weighted) mean seconds of each range's phase with the best of some pack sizes, including
        the switch; [low edge, high edge].

        Tokens and squares are spread evenly over the replicas. Packs are as full as tokens allow (a pack holds one
        sequence of more than half the capacity); their number follows `packing.bucketing`. A pipeline takes its slowest
        stage once for each pack and the others once. If ranks share cores, no phase is shorter than its work on all of
        them. Infinite for empty ranges (low edge not below high) and lengths above both the capacity and the longest
        sequence. `sizes`: `(capacity, longest sequence)` of each pack size.
        """
        key = time.kind(strategy), tuple(sizes)
        if key not in self._known:
            some = max(1, _AT_A_TIME // self.count.size)  # arrays that stay in a cache
            parts = [key[1][first : first + some] for first in range(0, len(sizes), some)]
            least = [self._compute_seconds(time, key[0], part).min(axis=0) for part in parts]
            self._known[key] = np.minimum.reduce(least)
        seconds = np.full((len(self.edges), len(self.edges)), np.inf)
        seconds[self._low, self._high] = self._known[key] + self._used_weight * switch_s
        return seconds

    def _compute_seconds(self, time: TimeModel, strategy: Strategy, sizes: Sequence[tuple[int, int]]) -> Array:
        """The same without the switch, for each pack size and each pair of edges; [pack size, pair]."""
        dp, pp = strategy.dp, strategy.pp
        fitting = int(np.searchsorted(self._high, np.searchsorted(self.edges, max(map(max, sizes)), side="right")))
        tokens, squares, count = self.tokens[:, :fitting], self.squares[:, :fitting], self.count[:, :fitting]
        capacities = np.array([capacity for capacity, _ in sizes])
        capacity = capacities[:, None, None]  # all below is [pack size, mini-batch, pair], for the pairs that fit
        half = np.searchsorted(self._joined, np.minimum(capacity // 2, self._most) + self._apart, side="right")
        large = self._to[:, :fitting] - np.maximum(self._from[:, :fitting], (half - self._first).astype(np.float64))
        packs = np.maximum(np.ceil(tokens / capacity), large)
        if dp > 1:
            packs = np.ceil(packs / dp) * dp
        if pp > 1:
            affordable = tokens // MIN_PIPELINE_PACK_TOKENS // dp * dp
            packs = np.maximum(packs, np.minimum(dp * pp, affordable))
        packs = np.maximum(np.minimum(packs, count), 1)
        each, spread = np.ceil(packs / dp), np.minimum(packs, dp)
        costs, through = time.different_costs(strategy)
        greatest = _greatest(costs)

        def load(cost: Cost) -> Array:
            seconds: Array = (cost.a * squares + cost.b * tokens) / spread
            return seconds + cost.c * each if cost.c else seconds

        total = slowest = seconds = np.maximum.reduce([load(cost) for cost in greatest])
        if pp > 1:
            total = load(through)
            hop = time.hop(strategy)
            passing = 2 * (strategy.num_stages - 1) * (hop.latency_s + hop.token_s * tokens / packs / strategy.cp)
            # filled and drained, with several stages on a rank
            sooner = each if strategy.v == 1 else each * np.minimum(each, strategy.v)
            seconds = slowest + (total - slowest) / sooner + passing
            full = int(np.searchsorted(capacities, self._most))
            if full:
                seconds[:full] += self._alone_seconds(greatest, capacities[:full], pp)[:, :, :fitting] / dp
        longest = self.longest[:, :fitting]
        seconds = np.maximum(seconds, through.a * longest**2 + through.b * longest + through.c)
        if strategy.z and time.streams is not None:
            moving = each * time.streams.pack_s(strategy)
            seconds = seconds + moving if math.isfinite(time.slots) else np.maximum(seconds, moving)
        if strategy.world_size > time.slots:
            seconds = np.maximum(seconds, total * spread * strategy.tp * strategy.cp / time.slots)
        mean = np.full((len(sizes), len(self._high)), np.inf)
        mean[:, :fitting] = self._weights @ ((seconds + time.fixed_s) * (count > 0))
        mean[self.edges[self._high] > np.array([[max(size)] for size in sizes])] = np.inf
        return mean

    def _alone_seconds(self, costs: Iterable[Cost], capacities: npt.NDArray[np.int64], pp: int) -> Array:
        """Seconds that stages wait because sequences longer than the packs leave little room in the pipeline: with room
        for 1 / n of as many packs as there are stages, each takes n times as long; [pack size, mini-batch, pair]."""
        tokens = self._padded
        slowest = np.maximum.reduce([cost.a * tokens**2 + cost.b * tokens + cost.c for cost in costs])
        wait = np.zeros((len(capacities), len(tokens), tokens.shape[1] + 1))
        # shorter sequences cause no wait
        np.cumsum(slowest * (np.clip(tokens / capacities[:, None, None], 1, pp) - 1), axis=2, out=wait[:, :, 1:])
        reached = np.take_along_axis(wait, self._at[None], axis=2)  # [pack size, mini-batch, edge]
        between: Array = reached[:, :, self._high] - reached[:, :, self._low]
        return between


def _greatest(costs: Iterable[Cost]) -> list[Cost]:
    return [c for c in costs if not any(o != c and o.a >= c.a and o.b >= c.b and o.c >= c.c for o in costs)]


@dataclass(frozen=True)
class PhaseCost:
    """The weighted mean of a phase over the mini-batches: seconds of its packs on the busiest replica, of its switch if
    it runs, and packs over all replicas."""

    compute_s: float
    switch_s: float
    num_packs: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.switch_s


class Evaluator:
    """Packs and simulates phases of some mini-batches, and caches the result."""

    def __init__(
        self,
        batches: Sequence[Sequence[int]],
        time: TimeModel,
        switch: Mapping[Strategy, float],  # load and return seconds of each strategy; more may be added
        quadratic_cost: float,  # see `ModelShape.quadratic_cost`; balances the packs
        weights: Sequence[float] | None = None,  # weight of each mini-batch; None for equal weights with sum 1
    ) -> None:
        equal = [1 / len(batches)] * len(batches)
        self._batches = [(sorted(b), w) for b, w in zip(batches, weights or equal, strict=True)]
        self._tokens = [[0, *accumulate(batch)] for batch, _ in self._batches]
        self._squares = [[0, *accumulate(length * length for length in batch)] for batch, _ in self._batches]
        self._cubes = [[0, *accumulate(length**3 for length in batch)] for batch, _ in self._batches]
        self._time, self.switch, self._quadratic_cost = time, dict(switch), quadratic_cost
        self._known: dict[tuple[Strategy, int, int, int], tuple[float, float, float]] = {}
        # least seconds of a phase without its switch
        self._above: dict[tuple[Strategy, int, int, int], float] = {}

    @property
    def num_simulated(self) -> int:
        """Phases that were packed and simulated, completely or in part."""
        return len(self._known.keys() | self._above.keys())

    def phase(self, strategy: Strategy, low: int, high: int, pack_tokens: int) -> PhaseCost:
        """Returns the phase that runs the lengths in `(low, high]`; see `Bucket` for `pack_tokens`."""
        key = self._time.kind(strategy), low, high, pack_tokens
        if key not in self._known:
            self._simulate(key, self.switch[strategy], math.inf)
        compute, used, num_packs = self._known[key]
        return PhaseCost(compute, self.switch[strategy] * used, num_packs)

    def seconds_within(self, strategy: Strategy, low: int, high: int, pack_tokens: int, most: float) -> float:
        """Returns the seconds of the phase, or infinity if above `most`, for which it simulates only enough."""
        key, switch_s = (self._time.kind(strategy), low, high, pack_tokens), self.switch[strategy]
        if key not in self._known and self._above.get(key, 0.0) + switch_s * self._used(low, high) <= most:
            self._simulate(key, switch_s, most)
        return self.phase(strategy, low, high, pack_tokens).seconds if key in self._known else math.inf

    def _simulate(self, key: tuple[Strategy, int, int, int], switch_s: float, most: float) -> None:
        """Packs and simulates a phase, until it is known to take more than so many seconds."""
        strategy, low, high, pack_tokens = key
        computed = num_packs = 0.0
        most_tokens = Bucket(strategy, high, pack_tokens).most_tokens
        bounds = self._bounds(strategy, low, high, pack_tokens) if most < math.inf else {}
        if strategy.pp > 1 and strategy.v == 1 and not strategy.cuts_packs:
            bounds = {index: max(bound, self._queueing(index, *key)) for index, bound in bounds.items()}
        least = sum(bounds.values())
        used = self._used(low, high)
        room = most * (1 + _ROUNDING) - switch_s * used
        if least > room:
            self._above[key] = least
            return
        for index, (batch, weight) in enumerate(self._batches):
            lengths = batch[bisect_right(batch, low) : bisect_right(batch, high)]
            if not lengths:
                continue
            least -= bounds.get(index, 0.0)
            replicas = packed(lengths, strategy, pack_tokens, self._quadratic_cost, high)
            num_packs += weight * sum(map(len, replicas))
            enough = (room - computed - least) / weight
            computed += weight * self._time.phase_seconds(strategy, replicas, most_tokens, enough=enough)
            if computed + least > room:
                self._above[key] = max(computed + least, self._above.get(key, 0.0))
                return
        self._known[key] = computed, used, num_packs

    def _queueing(self, index: int, strategy: Strategy, low: int, high: int, pack_tokens: int) -> float:
        """Lower bound of a pipeline's seconds for a mini-batch, times its weight: tokens are in flight for as long as
        their sequence takes through all stages, and at most `Bucket.most_tokens` at a time (Little's law)."""
        batch, weight = self._batches[index]
        first, end = bisect_right(batch, low), bisect_right(batch, high)
        tokens, squares, cubes = (
            float(sums[index][end] - sums[index][first]) for sums in (self._tokens, self._squares, self._cubes)
        )
        _, through = self._time.different_costs(strategy)
        most_tokens = Bucket(strategy, high, pack_tokens).most_tokens
        token_seconds = through.a * cubes + through.b * squares + through.c * tokens
        return weight * (token_seconds / strategy.dp / most_tokens + self._time.fixed_s)

    def _used(self, low: int, high: int) -> float:
        return sum(weight for batch, weight in self._batches if bisect_right(batch, low) < bisect_right(batch, high))

    def bound(self, strategy: Strategy, low: int, high: int, pack_tokens: int, shares: bool = False) -> float:
        """Returns a lower bound of `phase` in seconds, also with several stages on a rank: the largest of the busiest
        stage's work spread evenly over the replicas, the longest sequence through all stages, and all work spread over
        shared cores; and the transfers that replace a switch (`+z2`, `+z3`). `shares`: whether replicas may share packs
        (cp), which divides one sequence's time: ignores that sequence."""
        computed = self._bounds(strategy, low, high, pack_tokens, shares)
        return sum(computed.values()) + self.switch[strategy] * self._used(low, high)

    def _bounds(
        self, strategy: Strategy, low: int, high: int, pack_tokens: int, shares: bool = False
    ) -> dict[int, float]:
        """The same without the switch, for each mini-batch that holds such lengths, times its weight."""
        bounds = dict[int, float]()
        (costs, through), streams = self._time.different_costs(strategy), self._time.streams
        slots, z = self._time.slots, strategy.z
        once = streams.once_s(strategy) if z and streams is not None else 0.0
        alone = strategy.pp == 1 and not strategy.cuts_packs
        moving = streams.pack_s(strategy) if z and streams is not None and alone else 0.0
        for index, (batch, weight) in enumerate(self._batches):
            sums, square_sums = self._tokens[index], self._squares[index]
            first, end = bisect_right(batch, low), bisect_right(batch, high)
            if first < end:
                tokens, squares = sums[end] - sums[first], square_sums[end] - square_sums[first]
                longer = min(max(first, bisect_right(batch, pack_tokens)), end)
                packs = end - longer - (sums[longer] - sums[first]) // -pack_tokens
                loads = {cost: cost.a * squares + cost.b * tokens + cost.c * packs for cost in costs}
                everything = sum(loads[cost] * times for cost, times in costs.items())
                busiest = max(max(loads.values()) / strategy.dp, everything * strategy.tp * strategy.cp / slots)
                if not strategy.cuts_packs and not shares:  # chunks of a sequence are on several stages at a time
                    busiest = max(busiest, through.seconds(batch[end - 1] ** 2, batch[end - 1]))
                least = max(busiest + once, -(-packs // strategy.dp) * moving)
                bounds[index] = weight * (least + self._time.fixed_s)
        return bounds


def choose_edges(batches: Sequence[Sequence[int]], capacities: Sequence[int], longest: int, most: int) -> list[int]:
    """Chooses candidate edges: 0, then at most about `most` lengths that occur, then `longest`.

    All different lengths if they are few. Otherwise the longest sequence that each capacity holds, and quantiles: half
    by number of sequences, half by tokens, because a few long sequences hold much of the work.
    """
    lengths = sorted(length for batch in batches for length in batch)
    unique = sorted(set(lengths))
    if len(unique) <= most:
        chosen = set(unique)
    else:
        chosen = {lengths[bisect_right(lengths, capacity) - 1] for capacity in capacities if capacity >= lengths[0]}
        if len(chosen) > most:  # capacities of many strategies lie close together
            ordered = sorted(chosen)
            chosen = {ordered[step * (len(ordered) - 1) // (most - 1)] for step in range(most)}
        tokens = np.cumsum(lengths)
        slices = max(2, (most - len(chosen)) // 2 + 1)
        for step in range(1, slices):
            chosen.add(lengths[step * (len(lengths) - 1) // slices])
            chosen.add(lengths[bisect_left(tokens, step / slices * float(tokens[-1]))])
    return [0, *sorted(edge for edge in chosen if 0 < edge < longest), longest]
