"""The search: which strategies, which bucket edges and which pack sizes, for a histogram of lengths.

Exactness:

* Buckets are contiguous ranges of the sorted lengths, each with a different strategy; at most `max_phases`. Edges are
  lengths that occur: all of them if they are few, else quantiles and the longest sequence each strategy can hold.
* With few candidates (up to `EXACT_PHASES` phases) every phase is packed and simulated, and the dynamic programme over
  these times is exact. Otherwise a heuristic: it runs over estimates (`estimate.LengthTable`), the best partitions are
  packed and simulated, which corrects the estimates of the others, and the edges of the best are moved while that
  helps. Of strategies that differ in `+sp` only, which costs no time, the one with more capacity is searched, with the
  packs of both; its `+sp` is removed again if the packs fit without.
* The best single strategy is always exact (all whose lower bound can win are packed and simulated), and a pool must
  beat it by `margin`: the answer is never worse than the best static strategy, and may be not to switch. Packs are then
  made smaller if that costs at most `pack_margin`.
* A run races a few plans, because no time model distinguishes neighbours. One rule chooses them: the best single
  strategy, the best that has replicas only, in whole packs and in chunks (offered where memory is short: their time is
  hard to predict), the best that moves no layers, in whole packs, and the best pool.
* Two stages on each rank of a pipeline (`+v2`) are tried last, in the best pool, the best single strategy and the best
  single pipeline that can have them. They do not change what is moved and hardly change what is held,
  so the best strategies and edges are taken to be the same; searching every pipeline both ways would take twice as
  long.
* Memory: a pool shares an arena as large as its largest strategy needs, which reduces the others' capacity. The search
  runs once for each size of arena (of nearly equal sizes for the largest). A pipeline whose memory does not hold as
  many of the longest sequences as it has stages uses smaller packs, and runs these sequences one by one (`Bucket`).

Times are means over mini-batches drawn from the histogram; a phase costs nothing in a mini-batch that does not need it.
If longer sequences than the drawn ones must fit, one mini-batch in a hundred holds one and nothing else: enough for a
good choice of its strategy, too little to affect other choices. Deterministic; no torch.

What the golden table (`tests/plan_table.py`; 59 of its questions to `plan`) loses without a constant or a part, in
predicted seconds, on average and at most; what loses less than 0.5 % and 3 % went:

| without | loses | so it |
|---|---|---|
| the least difference of arenas (1 % of the limit) | 0, 0 | went |
| how near, how many and of which kind raced plans are (six constants) | 0, 0 | went: one rule, see above |
| the margin of plainer single strategies | less than 0 | went: the best replicas are raced |
| the 32 pools kept by estimate (8 instead) | 0.0 %, 3.7 % | stayed |
| `_PATIENCE` (until no estimate is better) | 0.1 %, 3.05 %; with 3 instead of 7: 0.1 %, 3.3 % | stayed |
| edges that are moved at the end | 0.2 %, 3.7 % | stayed |
| layouts that share packs, searched separately | 1.5 %, 22 % | stayed |
| all arenas (only the largest instead) | 2.2 %, 13 % | stayed |
| chunks as single strategies (`chunks_alone`) | 0, 0 | stayed: measured under a limit, a run was 1.10x as slow without |
| `offers.MARGIN` of a pool | -0.5 % | stayed: the gain is within the error of a time model |
| `automatic.PACK_MARGIN`, `NEAR` | not in the table | stayed: memory, which the table does not weigh |
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.search.estimate import LengthTable, choose_edges, pack_choices
from hf_hotspa.search.partition import best_partitions
from hf_hotspa.search.question import Question
from hf_hotspa.strategy import Bucket, Strategy


@dataclass(frozen=True)
class Row:
    """One bucket of the answer: numbers and seconds are means a mini-batch; packs are over all replicas."""

    bucket: Bucket
    num_sequences: float
    num_tokens: float
    num_packs: float
    compute_s: float
    switch_s: float


@dataclass(frozen=True)
class Near:
    """Another plan, and its predicted mean seconds of a mini-batch, including switches."""

    buckets: tuple[Bucket, ...]
    seconds: float

    def __str__(self) -> str:
        return ",".join(map(str, self.buckets))


@dataclass(frozen=True)
class Choice:
    """The answer of a search."""

    buckets: tuple[Bucket, ...]
    seconds: float  # predicted mean seconds of a mini-batch, including switches
    switch_seconds: float  # the switches in it
    static: Bucket  # the best single strategy, its packs and its lengths
    static_seconds: float  # its seconds, including its switch
    rows: tuple[Row, ...]
    exact: bool  # whether all ranges of lengths were simulated, see `search`
    num_simulated: int  # phases that were packed and simulated in the search
    near: tuple[Near, ...] = ()  # the other plans that a run may race, fastest first, if requested

    @property
    def switches(self) -> bool:
        return len(self.buckets) > 1

    def with_packs_of(self, pool: Sequence[Bucket]) -> "Choice":
        """Returns the same choice with packs no larger than in a pool with its strategies."""
        most = {bucket.strategy: bucket.pack_tokens for bucket in pool}

        def smaller(bucket: Bucket) -> Bucket:
            return replace(bucket, pack_tokens=min(bucket.pack_tokens, most.get(bucket.strategy, bucket.pack_tokens)))

        rows = tuple(replace(row, bucket=smaller(row.bucket)) for row in self.rows)
        return replace(self, buckets=tuple(map(smaller, self.buckets)), static=smaller(self.static), rows=rows)

    def __str__(self) -> str:
        return ",".join(map(str, self.buckets))


Phase = tuple[Strategy, int, int, int]  # `(strategy, low, high, pack tokens)`
Phases = tuple[Phase, ...]  # by length


MOST_PHASES = 8  # more phases have never gained; the time of a search grows with them
EXACT_PHASES = 600  # phases (strategies x ranges x pack sizes) up to which every one is packed and simulated
_MOST_EDGES = 24
_KEPT = 32  # pools kept for each arena and number of phases, by estimate
_PATIENCE = 7  # pools that are simulated in vain before the search ends
_STEPS = (-1, 1, -2, 2, -4, 4, -8, 8)  # by how many candidates an edge is moved at a time


@dataclass(frozen=True)
class SearchOptions:
    """What a search may choose."""

    max_phases: int = 3  # the most buckets
    margin: float = 0.01  # how much better than the best single strategy a pool must be, as a share
    # how much slower a bucket may be with smaller packs, which use less memory and are nearer to what was measured
    pack_margin: float = 0.0
    may_go_round: bool = False  # whether the ranks of a pipeline may have two stages each (`+v2`)
    raced: bool = False  # whether the other plans that a run may race are wanted, too
    # strategies of one layout each that are also searched separately: see `offers.sharing_layouts`
    families: Sequence[Sequence[Strategy]] = ()
    alone: Sequence[Strategy] = ()  # strategies that are never in pools


def search(question: Question, strategies: Iterable[Strategy], options: SearchOptions | None = None) -> Choice:
    """Chooses strategies, edges and pack sizes among legal strategies; those without coefficients in the time model are
    left out. Raises `HotspaConfigError`: there are no lengths, no strategy with coefficients, or an option is
    impossible. Raises `HotspaError`: no strategy holds the longest sequence; from `Capacities`."""
    asked, size, lengths = options or SearchOptions(), question.mini_batch_size, question.lengths
    if not lengths or min(lengths) < 1:
        raise HotspaConfigError("there are no lengths, or some are below 1 token", fix="give a histogram with lengths")
    if asked.max_phases < 1 or not 0 <= asked.margin < 1 or (size is not None and size < 1):
        raise HotspaConfigError(
            f"max_phases {asked.max_phases}, margin {asked.margin} or mini_batch_size {size} is wrong"
        )
    pool = sorted({s for s in strategies if question.cost.time.knows(s)})
    if not pool:
        fix = "calibrate the model's strategies"
        raise HotspaConfigError("no strategy has coefficients in the time model", fix=fix)
    if question.longest < max(lengths):
        question = replace(question, longest=max(lengths))
    if not any(map(question.holds, pool)):
        raise question.capacities.too_long(question.longest, pool)
    return _Search(question, pool, asked).run()


_Estimated = tuple[tuple[Strategy, int, int, float], ...]
"""`(strategy, low, high, estimated seconds)` of each phase, by length."""


class _Search:
    """One search; arguments as for `search`. `exact`: all ranges were simulated."""

    def __init__(self, question: Question, pool: list[Strategy], options: SearchOptions) -> None:
        self.question, self.longest = question, question.longest
        self.time, self.capacities = question.cost.time, question.capacities
        self.batches, self.weights = question.batches
        self.options = options
        self.evaluator = question.price([*pool, *filter(self.time.knows, options.alone)])
        self.switch = self.evaluator.switch
        self.most_tokens = max(self.longest, *map(sum, self.batches))
        # the same without `+z2` and `+z3` is never slower: shards are for limited memory
        unlimited = {s for s in pool if not s.z and self.capacities.tokens(s) >= self.most_tokens}
        pool = [s for s in pool if not s.z or replace(s, z=0) not in unlimited]
        # `+sp` changes memory only: it is searched instead of its twin without, and removed if packs fit without
        twins = {sp: replace(sp, sp=False) for sp in pool if sp.sp}
        self.plain = {
            sp: plain
            for sp, plain in twins.items()
            if plain in pool and self.time.kind(sp) == self.time.kind(plain) and self.switch[sp] == self.switch[plain]
            if self.capacities.tokens(sp) >= self.capacities.tokens(plain)
        }
        self.pool = [s for s in pool if s not in set(self.plain.values())]
        self.exact = True
        self._known_packs: dict[tuple[Strategy, int, int], list[int]] = {}

    def run(self) -> Choice:
        margin = self.options.margin
        singles = self._best_singles()
        pools = self._candidates() if self.options.max_phases > 1 and len(self.pool) > 1 else []
        static = singles[0]
        for phases in self._of_families(min(map(self._seconds, (static, *pools)))):
            if len(phases) > 1:
                pools.append(phases)
            else:
                static = min(static, phases, key=self._seconds)
        best = min((static, *pools), key=self._seconds)
        if self.options.may_go_round:
            # another single pipeline may be the fastest then: not all strategies can have two stages on a rank
            best, static, other = map(self._going_round, (best, static, self._pipeline or static))
            if self._seconds(other) < self._seconds(static) * (1 - margin):
                static = other
            best = min(best, static, key=self._seconds)
        if len(best) > 1 and not self._seconds(best) < self._seconds(static) * (1 - margin):
            best = static
        others = [static, *singles[1:], *sorted(pools, key=self._seconds)[:1]] if self.options.raced else []
        best, static, *others = (self._plainest(map(self._slim, phases)) for phases in (best, static, *others))
        others = [each for each in dict.fromkeys(others) if each != best]
        return self._choice(best, static, sorted(others, key=self._seconds))

    def _of_families(self, most: float) -> list[Phases]:
        """The best of each family that may take less than so many seconds."""
        chosen: list[Phases] = []
        options = SearchOptions(self.options.max_phases, self.options.margin)
        for family in self.options.families:
            own = sorted(filter(self.time.knows, family))
            bounds = (self.evaluator.bound(s, 0, self.longest, self.most_tokens, shares=True) for s in own)
            if any(map(self.question.holds, own)) and min(bounds) < most:
                buckets = _Search(self.question, own, options).run().buckets
                chosen.append(tuple((b.strategy, b.low, b.longest, b.pack_tokens) for b in buckets))
        return chosen

    def _can_go_round(self, strategy: Strategy) -> bool:
        """Whether the ranks of its pipeline can have two stages each."""
        return strategy.can_go_round and 2 * strategy.pp <= len(self.time.cut.layers)

    def _going_round(self, phases: Phases) -> Phases:
        """The same phases, with two stages on each rank of the pipelines that are faster with them and fit."""
        for index, (strategy, low, high, tokens) in enumerate(phases):
            if not self._can_go_round(strategy):
                continue
            twin = replace(strategy, v=2)
            self.switch[twin] = self.switch[strategy]
            arena = max(map(self.capacities.arena, (twin, *(phase[0] for phase in phases))))
            tokens = min(tokens, self.capacities.pack_tokens(twin, arena, high))
            trial = (*phases[:index], (twin, low, high, tokens), *phases[index + 1 :])
            fits = all(
                end <= self.capacities.tokens(own, arena) and 0 < packs <= self.capacities.pack_tokens(own, arena, end)
                for own, _, end, packs in trial
            )
            least = self.options.margin * self._seconds((phases[index],))
            if fits and self._seconds(trial) < self._seconds(phases) - least:
                phases = trial
        return phases

    def _slim(self, phase: Phase) -> Phase:
        strategy, low, high, tokens = phase
        most = self.evaluator.phase(*phase).seconds * (1 + self.options.pack_margin)
        for smaller in pack_choices(tokens, high)[::-1] if self.options.pack_margin else ():
            if self.evaluator.phase(strategy, low, high, smaller).seconds <= most:
                return strategy, low, high, smaller
        return phase

    def _plainest(self, slim: Iterable[Phase]) -> Phases:
        """The same without `+sp` if the packs fit without."""
        phases = list(slim)
        arena, plainest = max(self.capacities.arena(phase[0]) for phase in phases), []
        for strategy, low, high, tokens in phases:
            plain = self.plain.get(strategy)
            fits = plain is not None and high <= self._capacity(plain, arena)
            if plain is not None and fits and tokens <= self.capacities.pack_tokens(plain, arena, high):
                strategy = plain
            plainest.append((strategy, low, high, tokens))
        return tuple(plainest)

    def _seconds(self, phases: Phases) -> float:
        return sum(self.evaluator.phase(*phase).seconds for phase in phases)

    def _may_take(self, phases: Phases, most: float) -> bool:
        """Whether phases take no more than so many seconds together; stops as soon as they take more."""
        for phase in phases:
            most -= self.evaluator.seconds_within(*phase, most)
        return most > -math.inf

    def _capacity(self, strategy: Strategy, arena: int) -> int:
        return min(self.capacities.tokens(strategy, arena), self.most_tokens)

    def _packs(self, strategy: Strategy, arena: int, high: int) -> list[int]:
        """Pack sizes worth trying with sequences up to `high`; none if these do not fit."""
        key = strategy, arena, high
        if key not in self._known_packs:
            fits = high <= self._capacity(strategy, arena)
            capacity = min(self.capacities.pack_tokens(strategy, arena, high), self.most_tokens) if fits else 0
            sizes = set(pack_choices(capacity, high)) if capacity else set()
            if strategy in self.plain:
                sizes.update(self._packs(self.plain[strategy], arena, high))
            self._known_packs[key] = sorted(sizes, reverse=True)
        return self._known_packs[key]

    def _best_singles(self) -> list[Phases]:
        """The best single strategy and, if plans are raced, the best that has replicas only, in whole packs and in
        chunks, and the best that moves no layers, in whole packs, as far as there are any. Exact: tries all pack sizes,
        lowest bound first, while the bound can win."""
        whole, every = (0, self.longest), [*self.pool, *filter(self.time.knows, self.options.alone)]
        bounds = [
            (self.evaluator.bound(strategy, *whole, tokens), strategy, tokens)
            for strategy in every
            for tokens in self._packs(strategy, self.capacities.arena(strategy), self.longest)
        ]
        kinds: list[Callable[[Strategy], bool]] = [lambda s: True]
        if self.options.raced:
            kinds += [
                lambda s: s.ranks_of_a_replica == 1 and not s.cuts_packs,
                lambda s: s.ranks_of_a_replica == 1 and s.cuts_packs,
                lambda s: s.z < 3 and not s.cuts_packs,
            ]
        least, best = [math.inf] * len(kinds), [Phases()] * len(kinds)
        round_s, self._pipeline = math.inf, Phases()
        for bound, strategy, tokens in sorted(bounds):
            mine = [index for index, has in enumerate(kinds) if has(strategy) and bound < least[index]]
            rounds = bound < least[0] and self._can_go_round(strategy)
            if not mine:
                continue
            most = max(*(least[index] for index in mine), round_s if rounds else 0.0)
            seconds = self.evaluator.seconds_within(strategy, *whole, tokens, most)
            phases = ((strategy, *whole, tokens),)
            for index in mine:
                if seconds < least[index]:
                    least[index], best[index] = seconds, phases
            if rounds and seconds < round_s:
                round_s, self._pipeline = seconds, phases
        return [phases for phases in best if phases]

    def _candidates(self) -> list[Phases]:
        def total(phases: _Estimated) -> float:
            return sum(seconds for *_, seconds in phases)

        candidates: dict[tuple[Strategy, ...], _Estimated] = {}
        self.exact = True
        for arena in self._arenas():
            capacities = {s: self._capacity(s, arena) for s in self.pool if self.capacities.arena(s) <= arena}
            capacities = {s: capacity for s, capacity in capacities.items() if capacity >= min(map(min, self.batches))}
            if len(capacities) > 1 and max(capacities.values()) >= self.longest:
                for each in self._partitions(capacities, arena):
                    strategies = tuple(strategy for strategy, *_ in each)
                    candidates[strategies] = min(candidates.get(strategies, each), each, key=total)
        if self.exact:
            return [self._with_packs(each) for each in candidates.values()]
        return self._best_first(list(candidates.values()))

    def _arenas(self) -> list[int]:
        """Sizes of arena that are worth a search, descending. Nearly equal sizes give the same strategies; the pools are
        packed with the arena that they need."""
        sizes, limit = sorted({self.capacities.arena(s) for s in self.pool}, reverse=True), self.capacities.limit_bytes
        if limit is None:
            return sizes[:1]
        arenas: list[int] = []
        for arena in sizes:
            if arena <= limit and (not arenas or arena < arenas[-1] * 0.9):
                arenas.append(arena)
        return arenas

    def _best_first(self, left: list[_Estimated]) -> list[Phases]:
        """Simulates pools, best estimate first, until the best is not beaten for a while.

        A strategy's ratio of simulated to estimated seconds is about the same for other lengths; so each simulation
        corrects the estimates of all pools with the same strategies.
        """
        packed: list[Phases] = []
        error: dict[Strategy, float] = {}
        best, in_vain = math.inf, 0

        def corrected(each: _Estimated) -> float:
            return sum(seconds * error.get(self.time.kind(strategy), 1.0) for strategy, _, _, seconds in each)

        while left and in_vain < _PATIENCE:
            each = min(left, key=corrected)
            left.remove(each)
            phases = self._with_packs(each)
            seconds = self._seconds(phases)
            for phase, (strategy, *_, estimate) in zip(phases, each, strict=True):
                if estimate:
                    error[self.time.kind(strategy)] = self.evaluator.phase(*phase).seconds / estimate
            packed.append(phases)
            in_vain = 0 if seconds < best else in_vain + 1
            best = min(best, seconds)
        packed.sort(key=self._seconds)
        return [*packed, *map(self._moved, packed[:2])]

    def _with_packs(self, each: _Estimated) -> Phases:
        arena = max(self.capacities.arena(strategy) for strategy, *_ in each)
        return tuple(self._packed(strategy, low, high, arena) for strategy, low, high, _ in each)

    def _partitions(self, capacities: Mapping[Strategy, int], arena: int) -> list[_Estimated]:
        edges = choose_edges(self.batches, list(capacities.values()), self.longest, _MOST_EDGES)
        strategies = list(capacities)
        if len(capacities) * (len(edges) * (len(edges) - 1) // 2) * 4 <= EXACT_PHASES:
            costs = np.stack([self._simulated(edges, strategy, arena) for strategy in strategies])
            keep = 1
        else:
            self.exact, keep = False, _KEPT
            table = LengthTable(self.batches, edges, self.weights)
            costs = np.stack([self._estimated(table, strategy, capacities[strategy], arena) for strategy in strategies])
        return [
            tuple((strategies[s], edges[i], edges[j], float(costs[s, i, j])) for s, i, j in partition.ranges)
            for partition in best_partitions(costs, self.options.max_phases, keep)
            if len(partition.ranges) > 1
        ]

    def _estimated(
        self, table: LengthTable, strategy: Strategy, capacity: int, arena: int
    ) -> np.typing.NDArray[np.float64]:
        """Estimated seconds of every range with its best pack size; [low edge, high edge]."""
        longest = min(capacity, self.longest)
        pack_tokens = min(self.capacities.pack_tokens(strategy, arena, 0), self.most_tokens)
        sizes = {(tokens, 0) for tokens in pack_choices(pack_tokens, 1)} if pack_tokens else set()
        if longest > pack_tokens:
            sizes |= {(tokens, longest) for tokens in self._packs(strategy, arena, longest)}
        # smaller packs are for pipelines: they fill them sooner
        chosen = sorted(sizes)[-1:] if strategy.pp == 1 else sorted(sizes)
        return table.phase_seconds(self.time, strategy, chosen, self.switch[strategy])

    def _simulated(self, edges: Sequence[int], strategy: Strategy, arena: int) -> np.typing.NDArray[np.float64]:
        costs = np.full((len(edges), len(edges)), np.inf)
        for j, high in enumerate(edges):
            for i in range(j) if self._packs(strategy, arena, high) else ():
                costs[i, j] = self.evaluator.phase(*self._packed(strategy, edges[i], high, arena)).seconds
        return costs

    def _packed(self, strategy: Strategy, low: int, high: int, arena: int) -> Phase:
        sizes = self._packs(strategy, arena, high)
        best, best_seconds = sizes[0], math.inf
        for tokens in sizes:
            if self.evaluator.bound(strategy, low, high, tokens) < best_seconds:
                seconds = self.evaluator.seconds_within(strategy, low, high, tokens, best_seconds)
                if seconds < best_seconds:
                    best, best_seconds = tokens, seconds
        return strategy, low, high, best

    def _moved(self, phases: Phases) -> Phases:
        """The same strategies, with edges moved to neighbouring candidates while that helps."""
        best, best_seconds = phases, self._seconds(phases)
        edges = choose_edges(self.batches, [max(phase[2:]) for phase in phases], self.longest, 2 * _MOST_EDGES)
        improved = True
        while improved:
            improved = False
            for index in range(len(best) - 1):
                (first, low, edge, capacity), (second, _, high, other) = best[index : index + 2]
                at, both = int(np.searchsorted(edges, edge)), self._seconds(best[index : index + 2])
                for near in (at + step for step in _STEPS):
                    if 0 < near < len(edges) and low < edges[near] < high and edges[near] <= max(capacity, edge):
                        moved = edges[near]
                        trial = (*best[:index], (first, low, moved, capacity), (second, moved, high, other))
                        trial = (*trial, *best[index + 2 :])
                        if not self._may_take(trial[index : index + 2], both):
                            continue
                        if (seconds := self._seconds(trial)) < best_seconds:
                            best, best_seconds, improved = trial, seconds, True
                            break
        return best

    def _choice(self, phases: Phases, static: Phases, others: Sequence[Phases]) -> Choice:
        rows, num = [], round(1 / self.weights[0])
        for strategy, low, high, tokens in phases:
            cost = self.evaluator.phase(strategy, low, high, tokens)
            lengths = [length for batch in self.batches[:num] for length in batch if low < length <= high]
            counts = len(lengths) / num, sum(lengths) / num, cost.num_packs
            rows.append(Row(Bucket(strategy, high, tokens, low), *counts, cost.compute_s, cost.switch_s))
        ((strategy, _, high, tokens),) = static
        return Choice(
            tuple(row.bucket for row in rows),
            sum(row.compute_s + row.switch_s for row in rows),
            sum(row.switch_s for row in rows),
            Bucket(strategy, high, tokens),
            self._seconds(static),
            tuple(rows),
            self.exact,
            self.evaluator.num_simulated,
            tuple(
                Near(tuple(Bucket(s, high, tokens, low) for s, low, high, tokens in other), self._seconds(other))
                for other in others
            ),
        )
