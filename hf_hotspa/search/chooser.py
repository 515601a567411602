"""The phases of each mini-batch: which buckets of the pool to run for its lengths, and the edges between them.

A pool is made for a complete data set; a mini-batch without long sequences needs no phase for them, and one with few
short ones may run them along with the long ones. A sequence may go to any bucket whose packs have room for it. Every
set of phases is considered with its best edges (by estimate); the best of each number of phases and every single phase
that holds all sequences are packed and simulated. The fastest wins, with more phases only if they gain two percent:
never slower, under the time model, than the best single phase.

Hysteresis: the previous phases are kept (with edges for these lengths) unless another choice is faster by a margin, so
that layouts do not flap. The choice is a pure function of its arguments, including the previous phases: every rank
computes the same, and a resumed run needs the last choice.

Over a run the choice also depends on the factors on the time model (`online_calibration`). Mini-batches have the
Trainer's global steps as numbers. They may be planned ahead of training (by a loop; the Trainer does not). So that
speed does not affect the choice, a correction computed after mini-batch n applies from `n + 1 + delay` on, and `delay`
is at least as far as anybody plans ahead: every rank makes the same choices, and so does a run resumed from
`state_dict`. `choose` changes nothing and may run in another thread than `trained`. No torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_hotspa.costs.online_calibration import Factors, OnlineCalibration, PhaseSeconds, Refit, ScaledTime, fingerprint
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import HotspaConfigError, OverlongError
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.search.estimate import Evaluator, LengthTable, PhaseCost, choose_edges
from hf_hotspa.search.partition import best_partitions
from hf_hotspa.strategy import Bucket, Strategy
from hf_hotspa.typed import reading_state

MARGIN = 0.03  # how much faster than the previous phases another choice must be, as a share
_WORTH_A_PHASE = 0.02  # how much faster a choice with more phases must be: less is within the error of any time model
_MOST_EDGES = 16
_MOST_PHASES = 3


@dataclass(frozen=True)
class Selection:
    """The phases of one mini-batch."""

    buckets: tuple[Bucket, ...]  # by length, with the edges for this mini-batch: input of `plan_mini_batch`
    seconds: float  # predicted seconds, including switches
    switch_seconds: float  # the switches in it
    single_seconds: float  # predicted seconds of the best single phase; infinite if none holds all sequences
    kept: bool = False  # whether the previous phases were kept although others are faster

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return tuple(bucket.strategy for bucket in self.buckets)


_Phases = tuple[tuple[int, int, int], ...]  # `(bucket of the pool, low, high)` of each phase, by length


class Selector:
    """Chooses among the buckets of a pool. Raises `HotspaConfigError`: no bucket, a strategy without coefficients or
    switch seconds, or a negative margin."""

    def __init__(
        self,
        pool: Sequence[Bucket],  # longest lengths define the order only; `Bucket.capacity` decides what fits
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
            time.stage_costs(bucket.strategy)  # raises an error without coefficients
            if bucket.strategy not in switch:
                raise HotspaConfigError(f"there are no switch seconds for {bucket.strategy}", fix="calibrate switches")
        self.pool = tuple(sorted(pool, key=lambda bucket: (bucket.longest, bucket.pack_tokens)))
        self.longest = max(bucket.longest for bucket in pool)
        self.time, self.switch, self.quadratic_cost = time, switch, quadratic_cost
        self.margin, self.max_phases = margin, max_phases

    def select(self, lengths: Iterable[int], previous: Iterable[Strategy] = ()) -> Selection:
        """Chooses the phases for one mini-batch. `lengths`: tokens of its sequences, after the policy for over-long
        rows (`bucketing.cut_rows`). `previous`: the strategies of the previous mini-batch; empty for none. Raises
        `OverlongError`: a sequence is longer than the pool's longest bucket."""
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

        longest = batch[-1]
        singles: list[_Phases] = [((i, 0, longest),) for i, b in enumerate(self.pool) if b.capacity >= longest]
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
        best = tuple(phase for phase in best if self._cost(evaluator, phase).num_packs)  # kept phases may have no work
        switch_seconds = sum(self._cost(evaluator, phase).switch_s for phase in best)
        return Selection(self._buckets(best), seconds(best), switch_seconds, single_seconds, kept)

    def _cost(self, evaluator: Evaluator, phase: tuple[int, int, int]) -> PhaseCost:
        index, low, high = phase
        return evaluator.phase(self.pool[index].strategy, low, high, self.pool[index].pack_tokens)

    def _candidates(self, batch: list[int], before: list[int]) -> tuple[list[_Phases], _Phases | None]:
        """The best phases of each number, by estimate; and the best edges for the previous phases."""
        if len(self.pool) == 1:
            return [], None
        edges = choose_edges([batch], [bucket.capacity for bucket in self.pool], batch[-1], _MOST_EDGES)
        table = LengthTable([batch], edges)
        packs = [[(bucket.pack_tokens, bucket.capacity)] for bucket in self.pool]
        of_pool = zip((bucket.strategy for bucket in self.pool), packs, strict=True)
        costs = np.stack([table.phase_seconds(self.time, s, own, self.switch[s]) for s, own in of_pool])

        def cut(indices: Sequence[int], most: int) -> list[_Phases]:
            partitions = best_partitions(costs[indices], most, keep=1)
            return [tuple((indices[i], edges[low], edges[high]) for i, low, high in p.ranges) for p in partitions]

        candidates = [phases for phases in cut(range(len(self.pool)), self.max_phases) if len(phases) > 1]
        again = (phases for phases in (cut(before, len(before)) if before else ()) if len(phases) == len(before))
        return candidates, next(again, None)

    def _buckets(self, phases: _Phases) -> tuple[Bucket, ...]:
        """The buckets with the edges of the phases.

        The last one extends as far as its packs allow, at most to the pool's longest sequence: rows that the over-long
        policy cut to that length were counted with it, so `plan_mini_batch` cuts the same.
        """
        buckets = [replace(self.pool[index], low=low, longest=high) for index, low, high in phases]
        buckets[-1] = replace(buckets[-1], longest=min(self.pool[phases[-1][0]].capacity, self.longest))
        return tuple(buckets)


def predict_phases(time: TimeModel, switch: Mapping[Strategy, float], plan: MiniBatchPlan) -> list[PhaseSeconds]:
    """Predicts the seconds of the phases of a plan, in the order of the plan."""
    seconds = []
    for phase in plan.phases:
        strategy = phase.bucket.strategy
        packs = [[pack.lengths for pack in replica] for replica in phase.replicas]
        compute_s = time.phase_seconds(strategy, packs, phase.bucket.most_tokens)
        seconds.append(PhaseSeconds(strategy, compute_s, switch[strategy]))
    return seconds


class PhaseChooser:
    """Chooses the buckets of mini-batches. `num_trained`: mini-batches trained so far: the number of the next one.
    `previous`: the strategies of the last trained mini-batch. Raises `HotspaConfigError`: see `Selector`."""

    def __init__(
        self,
        pool: Sequence[Bucket],  # each bucket has a different strategy
        time: TimeModel,
        switch: Mapping[Strategy, float],
        *,
        quadratic_cost: float = 0.0,
        refit: bool = True,  # whether measured seconds correct the time model
        delay: int = 2,  # see the head of the file
        **options: Any,  # for `Selector`
    ) -> None:
        self.pool, self.delay = tuple(pool), delay
        self._time, self._switch = time, dict(switch)
        self._options = {"quadratic_cost": quadratic_cost, **options}
        self._online = OnlineCalibration(bucket.strategy for bucket in pool) if refit else None
        self._fingerprint = fingerprint(time, {b.strategy: switch[b.strategy] for b in pool if b.strategy in switch})
        # (first mini-batch, factors, selector) of each correction that may still be needed, oldest first
        self._in_force: list[tuple[int, Factors, Selector]] = [(0, Factors(), self._selector(Factors()))]
        self.num_trained = 0
        self.previous: tuple[Strategy, ...] = ()
        self._seen: set[Strategy] = set()

    def _selector(self, factors: Factors) -> Selector:
        switch = {s: seconds * factors.switch.get(s, 1.0) for s, seconds in self._switch.items()}
        return Selector(self.pool, ScaledTime.of(self._time, factors.compute), switch, **self._options)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits a bucket."""
        return max(bucket.longest for bucket in self.pool)

    def restart(self) -> None:
        """Counts from 0 again: another run begins. Corrections stay."""
        self._in_force = [(0, *self._in_force[-1][1:])]
        self.num_trained = 0

    def choose(self, number: int, lengths: Iterable[int], previous: Sequence[Strategy]) -> Selection:
        """Chooses the phases of a mini-batch with sequences of these lengths, none longer than `longest`."""
        return self._entry(number)[1].select(lengths, previous)

    def _entry(self, number: int) -> tuple[Factors, Selector]:
        known = self._in_force
        return next((entry for entry in reversed(known) if entry[0] <= number), known[0])[1:]

    def predict(self, number: int, plan: MiniBatchPlan) -> list[PhaseSeconds]:
        """Predicts the seconds of a plan's phases, with the constants that chose mini-batch `number`."""
        factors = self._entry(number)[0]
        return [factors.apply(phase) for phase in predict_phases(self._time, self._switch, plan)]

    def forecast(self, number: int, lengths: Sequence[int]) -> float:
        """Returns a mini-batch's seconds by the uncorrected time model, in the phases that would be chosen for it."""
        buckets = self.choose(number, lengths, self.previous).buckets
        evaluator = Evaluator([lengths], self._time, self._switch, self._options["quadratic_cost"])
        # the last one extends as far as its packs allow
        phases = [(b.strategy, b.low, min(b.longest, max(lengths)), b.pack_tokens) for b in buckets]
        return sum(evaluator.phase(*phase).seconds for phase in phases)

    def has_run(self, strategies: Iterable[Strategy]) -> bool:
        """Returns whether all have run before: the first run pays for memory and kernels."""
        return self._seen.issuperset(strategies)

    def continue_from(self, others: Iterable["PhaseChooser"]) -> None:
        """Treats strategies that the others have run as warm."""
        self._seen.update(*(other._seen for other in others))

    def trained(
        self, number: int, plan: MiniBatchPlan, measured: Mapping[Strategy, PhaseSeconds] | None
    ) -> Refit | None:
        """Records the measured seconds of mini-batch `number` by strategy, equal on all ranks; None corrects nothing.
        Returns the resulting correction, if any; it applies from `number + 1 + delay` on."""
        self.num_trained = number + 1
        self.previous = strategies = tuple(phase.bucket.strategy for phase in plan.phases)
        warm = self.has_run(strategies)
        self._seen.update(strategies)
        if self._online is None or measured is None or not warm or not strategies:
            return None
        predicted = predict_phases(self._time, self._switch, plan)
        refit = self._online.observe(predicted, [measured[strategy] for strategy in strategies])
        if refit is not None:
            # never in place: another thread may be reading
            needed = max(i for i, entry in enumerate(self._in_force) if i == 0 or entry[0] <= number + 1)
            new = number + 1 + self.delay, refit.factors, self._selector(refit.factors)
            self._in_force = [*self._in_force[needed:], new]
        return refit

    # ------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next choices depend on, JSON-ready."""
        return {
            "num_trained": self.num_trained,
            "previous": [str(strategy) for strategy in self.previous],
            "constants": self._fingerprint,
            "in_force": [[first, factors.to_dict()] for first, factors, _ in self._in_force],
            "seen": sorted(map(str, self._seen)),
            "trust": self._online.state_dict() if self._online is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restores a state. Returns whether the time model is the same; corrections of another model are ignored.
        Raises `HotspaConfigError`: the state is invalid."""
        with reading_state("the choice of phases", "the choice starts anew"):
            num_trained = int(state["num_trained"])
            previous = tuple(Strategy.parse(name) for name in state["previous"])
            seen = {Strategy.parse(name) for name in state["seen"]}
            same: bool = state["constants"] == self._fingerprint
            in_force, online = state["in_force"], state["trust"]
            factors = []
            if same and self._online is not None and online is not None:
                factors = [(int(first), Factors.from_dict(row)) for first, row in in_force]
                self._online.load_state_dict(online)
        self.num_trained, self.previous, self._seen = num_trained, previous, seen
        if factors:
            self._in_force = [(first, factor, self._selector(factor)) for first, factor in factors]
        return same
