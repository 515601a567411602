"""The choice for one mini-batch: which phases of the pool are worth running for these lengths, and the edges between.

A pool is made for a whole data set; a mini-batch without long sequences needs no phase for them, and one with few short
ones may run them along with the long ones. A sequence may go to any bucket whose packs have room for it. Every set of
phases of the pool is looked at, each with its best edges (by estimate); the best of each number of phases and every
single phase that holds all sequences are packed and simulated. The fastest wins, more phases only when they gain two
percent: never slower, under the time model, than the best single phase.

Hysteresis: the phases of the mini-batch before are kept (with edges for these lengths) unless another choice is faster
by a margin, so that layouts do not flap for nothing. The choice is a pure function of its arguments, the phases before
among them: every rank computes the same, and a resumed run needs the last choice to repeat the one it continues.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import HotspaConfigError, OverlongError
from hf_hotspa.search.estimate import Evaluator, LengthTable, PhaseCost, choose_edges
from hf_hotspa.search.partition import best_partitions
from hf_hotspa.strategy import Bucket, Strategy

MARGIN = 0.03
"""How much faster than the phases of the mini-batch before another choice must be, as a share."""
_WORTH_A_PHASE = 0.02
"""How much faster a choice with more phases must be: less is within the error of any time model."""
_MOST_EDGES = 16
_MOST_PHASES = 3


@dataclass(frozen=True)
class Selection:
    """The phases of one mini-batch.

    Args:
        buckets: Those to run, by length, with the edges for this mini-batch: what `plan_mini_batch` takes.
        seconds: Predicted seconds, switches included.
        switch_seconds: The switches in it.
        single_seconds: Those of the best single phase; infinite when none holds all sequences.
        kept: Whether the phases of the mini-batch before were kept although others are faster.
    """

    buckets: tuple[Bucket, ...]
    seconds: float
    switch_seconds: float
    single_seconds: float
    kept: bool = False

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """What the next call takes as `previous`."""
        return tuple(bucket.strategy for bucket in self.buckets)


_Phases = tuple[tuple[int, int, int], ...]
"""`(bucket of the pool, low, high)` of each phase, by length."""


class Selector:
    """Chooses among the buckets of a pool.

    Args:
        pool: The buckets. Their longest lengths are only the order; `Bucket.capacity` says what fits.

    Raises:
        HotspaConfigError: there is no bucket, a strategy has no coefficients or no switch seconds, or the margin is
            negative.
    """

    def __init__(
        self,
        pool: Sequence[Bucket],
        time: TimeModel,
        switch: Mapping[Strategy, float],
        *,
        quadratic_cost: float = 0.0,
        margin: float = MARGIN,
        max_phases: int = _MOST_PHASES,
    ) -> None:
        if not pool or margin < 0 or max_phases < 1:
            raise HotspaConfigError(f"{len(pool)} buckets, margin {margin}, max_phases {max_phases}: nothing to select")
        for bucket in pool:
            time.stage_costs(bucket.strategy)  # names what has no coefficients
            if bucket.strategy not in switch:
                raise HotspaConfigError(f"there are no switch seconds for {bucket.strategy}", fix="calibrate switches")
        self.pool = tuple(sorted(pool, key=lambda bucket: (bucket.longest, bucket.pack_tokens)))
        self.longest = max(bucket.longest for bucket in pool)
        self.time, self.switch, self.quadratic_cost = time, switch, quadratic_cost
        self.margin, self.max_phases = margin, max_phases

    def select(self, lengths: Iterable[int], previous: Iterable[Strategy] = ()) -> Selection:
        """The phases for one mini-batch.

        Args:
            lengths: Tokens of its sequences, after the policy for over-long rows (`bucketing.cut_rows`).
            previous: The strategies of the mini-batch before; empty for none.

        Raises:
            OverlongError: a sequence is longer than the pool's longest bucket.
        """
        batch = sorted(int(length) for length in lengths)
        if not batch:
            return Selection(self.pool[-1:], 0.0, 0.0, 0.0)
        if batch[-1] > self.longest:
            raise OverlongError(
                f"a sequence of {batch[-1]} tokens is longer than the longest bucket, {self.longest} tokens",
                fix="apply the over-long policy first (cut_rows), or search again with that length",
            )
        evaluator = Evaluator([batch], self.time, self.switch, self.quadratic_cost)

        def seconds(phases: _Phases) -> float:
            return sum(self._cost(evaluator, phase).seconds for phase in phases)

        singles: list[_Phases] = [
            ((index, 0, batch[-1]),) for index, bucket in enumerate(self.pool) if bucket.capacity >= batch[-1]
        ]
        before = sorted({i for i, bucket in enumerate(self.pool) if bucket.strategy in set(previous)})
        candidates, again = self._candidates(batch, before)
        single_seconds = min(map(seconds, singles))
        best = min(singles, key=lambda phases: (seconds(phases), phases))
        for phases in sorted(candidates, key=len):
            if seconds(phases) < seconds(best) * (1 - _WORTH_A_PHASE):
                best = phases
        kept = False
        same = again is not None and {index for index, *_ in again} == {index for index, *_ in best}
        if again is not None and not same and seconds(again) <= seconds(best) * (1 + self.margin):
            best, kept = again, True
        best = tuple(phase for phase in best if self._cost(evaluator, phase).num_packs)  # kept ones may be without work
        return Selection(
            self._buckets(best),
            seconds(best),
            sum(self._cost(evaluator, phase).switch_s for phase in best),
            single_seconds,
            kept,
        )

    def _cost(self, evaluator: Evaluator, phase: tuple[int, int, int]) -> PhaseCost:
        index, low, high = phase
        return evaluator.phase(self.pool[index].strategy, low, high, self.pool[index].pack_tokens)

    def _candidates(self, batch: list[int], before: list[int]) -> tuple[list[_Phases], _Phases | None]:
        """The best phases of each number, by estimate; and the best edges for the phases of the mini-batch before."""
        if len(self.pool) == 1:
            return [], None
        edges = choose_edges([batch], [bucket.capacity for bucket in self.pool], batch[-1], _MOST_EDGES)
        table = LengthTable([batch], edges)
        costs = np.stack(
            [
                table.phase_seconds(self.time, b.strategy, [(b.pack_tokens, b.capacity)], self.switch[b.strategy])
                for b in self.pool
            ]
        )
        candidates: list[_Phases] = [
            tuple((index, edges[low], edges[high]) for index, low, high in partition.ranges)
            for partition in best_partitions(costs, self.max_phases, keep=1)
        ]
        again: _Phases | None = None
        if before:
            for partition in best_partitions(costs[before], len(before), keep=1):
                if len(partition.ranges) == len(before):
                    again = tuple((before[index], edges[low], edges[high]) for index, low, high in partition.ranges)
        return [phases for phases in candidates if len(phases) > 1], again

    def _buckets(self, phases: _Phases) -> tuple[Bucket, ...]:
        """The buckets with the edges of the phases.

        The last one reaches as far as its packs allow, the longest sequence of the pool at most: rows that the policy
        for over-long sequences cut to that length were counted with it, so what `plan_mini_batch` cuts stays the same.
        """
        buckets = [replace(self.pool[index], low=low, longest=high) for index, low, high in phases]
        buckets[-1] = replace(buckets[-1], longest=min(self.pool[phases[-1][0]].capacity, self.longest))
        return tuple(buckets)
