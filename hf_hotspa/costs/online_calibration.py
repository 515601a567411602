"""Compares predicted with measured seconds, and corrects a time model that is persistently wrong.

Maintains factors for the seconds of each strategy, separately for computation and switches. A calibration takes seconds
on a small copy of the model; measurements of the run are better evidence. Nothing changes while the median error over
the last `WINDOW` mini-batches is at most `LIMIT`. Above it, all factors are refitted: to the median ratio of each
strategy that ran often enough, and by the median change of all for the others (slow machines slow down all strategies).

A strategy that only rare sequences need does not move that median. If its error was above `LIMIT` in each of its last
`APART` phases, in the same direction, and the other phases are predicted well, its own factor is refitted.

Deterministic in the sequence of observations: ranks with the same (gathered) numbers compute the same factors, and a
run resumed from `state_dict` behaves as if it had not stopped.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from statistics import median
from typing import Any

from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.strategy import Strategy
from hf_hotspa.typed import reading_state, typed

LIMIT = 0.25  # the tolerated relative error
WINDOW = 6  # mini-batches that are needed for a refit, and over which medians are taken
APART = 3  # phases of a strategy that show that it alone is mispredicted
_SEEN = 2  # how often a strategy must run inside the window for its own factor
_STEP = 4.0  # largest change of a factor by one refit, up or down; limits the effect of a short disturbance


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of a phase: forward and backward of the busiest replica; weight load and gradient return."""

    strategy: Strategy
    compute_s: float
    switch_s: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.switch_s


@dataclass(frozen=True)
class Factors:
    """Factors on predicted seconds of computation and switches, by strategy; 1 if absent."""

    compute: Mapping[Strategy, float] = field(default_factory=dict)
    switch: Mapping[Strategy, float] = field(default_factory=dict)

    def apply(self, phase: PhaseSeconds) -> PhaseSeconds:
        """Corrects a prediction of the uncorrected model."""
        s = phase.strategy
        return PhaseSeconds(s, phase.compute_s * self.compute.get(s, 1.0), phase.switch_s * self.switch.get(s, 1.0))

    def to_dict(self) -> dict[str, list[float]]:
        """`{strategy: [compute, switch]}`, JSON-ready."""
        both = sorted({*self.compute, *self.switch})
        return {str(s): [self.compute.get(s, 1.0), self.switch.get(s, 1.0)] for s in both}

    @classmethod
    def from_dict(cls, data: Mapping[str, Sequence[float]]) -> "Factors":
        rows = {Strategy.parse(name): (float(row[0]), float(row[1])) for name, row in data.items()}
        return cls({s: row[0] for s, row in rows.items()}, {s: row[1] for s, row in rows.items()})


@dataclass(frozen=True)
class ScaledTime(TimeModel):
    """A time model with a factor on the seconds of each strategy; 1 if absent."""

    factors: Mapping[Strategy, float] = field(default_factory=dict)

    @classmethod
    def of(cls, time: TimeModel, factors: Mapping[Strategy, float]) -> "ScaledTime":
        return cls(**{f.name: getattr(time, f.name) for f in fields(TimeModel) if f.init}, factors=dict(factors))

    def kind(self, strategy: Strategy) -> Strategy:
        """Every strategy is a separate kind, as it has its own factor."""
        return strategy

    def stage_costs(self, strategy: Strategy) -> tuple[Cost, ...]:
        factor = self.factors.get(strategy, 1.0)
        return tuple(cost * factor for cost in super().stage_costs(strategy))

    def hop(self, strategy: Strategy) -> Hop:
        factor, hop = self.factors.get(strategy, 1.0), super().hop(strategy)
        return Hop(hop.latency_s * factor, hop.token_s * factor)


@dataclass(frozen=True)
class Refit:
    """A correction, for the log: the error that caused it (relative to measured seconds), the new factors, and what was
    mispredicted: a strategy, or None for mini-batches."""

    error: float
    factors: Factors
    apart: Strategy | None = None

    def __str__(self) -> str:
        changed = ", ".join(f"{name} {c:.2f} / {s:.2f}" for name, (c, s) in self.factors.to_dict().items())
        what = "" if self.apart is None else f" of {self.apart}"
        over = f"{WINDOW} mini-batches" if self.apart is None else f"its last {APART} phases"
        return (
            f"predicted seconds{what} were off by {self.error:.0%} (median of {over}): the time model is refitted, "
            f"factors on the calibrated computation / switch: {changed}"
        )


_Pair = tuple[PhaseSeconds, PhaseSeconds]  # prediction and measurement of a phase


class OnlineCalibration:
    """Watches predictions, and provides the current correction `factors`."""

    def __init__(self, strategies: Iterable[Strategy]) -> None:
        self.factors = Factors()
        self._strategies = tuple(sorted(strategies))
        self._window: list[list[_Pair]] = []
        self._last: dict[Strategy, list[_Pair]] = {}

    def observe(self, predicted: Sequence[PhaseSeconds], measured: Sequence[PhaseSeconds]) -> Refit | None:
        """Adds the phases of one mini-batch, and refits the factors if the error is too large. `predicted`: predictions
        of the uncorrected model. `measured`: measurements in the same order, equal on all ranks. Returns the
        correction, already applied to `factors`; None if none was needed."""
        mini_batch = list(zip(predicted, measured, strict=True))
        self._window = [*self._window, mini_batch][-WINDOW:]
        for pair in mini_batch:
            strategy = pair[0].strategy
            self._last[strategy] = [*self._last.get(strategy, []), pair][-APART:]
        if len(self._window) == WINDOW and (error := median(map(self._error, self._window))) > LIMIT:
            self.factors = self._refitted(chain.from_iterable(self._window), self._strategies)
            self._window, self._last = [], {}
            return Refit(error, self.factors)
        for phase in predicted:
            if (error := self._error_apart(phase.strategy)) > LIMIT:
                self.factors = self._refitted(self._last.pop(phase.strategy), (phase.strategy,))
                return Refit(error, self.factors, phase.strategy)
        return None

    def _error_apart(self, strategy: Strategy) -> float:
        """The median error of a strategy's last phases; 0 if one of them, or the others, do not show that it is wrong."""
        own = self._last[strategy]
        others = [pair for other, pairs in self._last.items() if other != strategy for pair in pairs]
        if len(own) < APART or len(others) < APART:
            return 0.0
        errors = [self._error([pair]) for pair in own]
        slower = {measured.seconds > self.factors.apply(predicted).seconds for predicted, measured in own}
        if len(slower) > 1 or min(errors) <= LIMIT:
            return 0.0
        return median(errors) if median(self._error([pair]) for pair in others) <= LIMIT else 0.0

    def _error(self, pairs: Sequence[_Pair]) -> float:
        """Relative error of a mini-batch; errors of phases do not cancel."""
        off = total = 0.0
        for predicted, measured in pairs:
            corrected = self.factors.apply(predicted)
            off += abs(corrected.compute_s - measured.compute_s) + abs(corrected.switch_s - measured.switch_s)
            total += measured.seconds
        return off / total if total else 0.0

    def _refitted(self, phases: Iterable[_Pair], strategies: Sequence[Strategy]) -> Factors:
        before, pairs = self.factors, list(phases)
        compute = [(p.strategy, m.compute_s / p.compute_s) for p, m in pairs if p.compute_s > 0]
        switch = [(p.strategy, m.switch_s / p.switch_s) for p, m in pairs if p.switch_s > 0]
        return Factors(_medians(compute, before.compute, strategies), _medians(switch, before.switch, strategies))

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON-ready state; a phase is a strategy and (predicted, measured) computation and switch seconds."""

        def rows(pairs: Sequence[_Pair]) -> list[list[Any]]:
            return [
                [str(p.strategy), *map(float, (p.compute_s, m.compute_s, p.switch_s, m.switch_s))] for p, m in pairs
            ]

        last = {str(strategy): rows(pairs) for strategy, pairs in sorted(self._last.items())}
        return {"factors": self.factors.to_dict(), "window": list(map(rows, self._window)), "last": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state. Raises `HotspaConfigError`: the state is invalid."""
        with reading_state("the time model's correction", "the correction starts anew"):
            saved = typed(dict(state), _Saved)
            factors = Factors.from_dict(saved.factors)
            window = [[_pair(*row) for row in rows] for rows in saved.window]
            last = {Strategy.parse(name): [_pair(*row) for row in rows] for name, rows in saved.last.items()}
        self.factors, self._window, self._last = factors, window, last


_Row = tuple[str, float, float, float, float]  # see `OnlineCalibration.state_dict`


@dataclass(frozen=True)
class _Saved:
    factors: dict[str, tuple[float, float]]
    window: list[list[_Row]]
    last: dict[str, list[_Row]] = field(default_factory=dict)  # earlier checkpoints have none


def _medians(
    ratios: Sequence[tuple[Strategy, float]], before: Mapping[Strategy, float], strategies: Sequence[Strategy]
) -> dict[Strategy, float]:
    """Factors changed by the median change of a strategy if it ran often enough, and else of all."""
    changes = [(strategy, ratio / before.get(strategy, 1.0)) for strategy, ratio in ratios]
    if not changes:
        return dict(before)
    common, factors = median(change for _, change in changes), dict(before)
    for strategy in strategies:
        own = [change for ran, change in changes if ran == strategy]
        change = median(own) if len(own) >= _SEEN else common
        factors[strategy] = before.get(strategy, 1.0) * min(max(change, 1 / _STEP), _STEP)
    return factors


def _pair(name: str, *numbers: float) -> _Pair:
    strategy, (predicted_c, measured_c, predicted_s, measured_s) = Strategy.parse(name), numbers
    return PhaseSeconds(strategy, predicted_c, predicted_s), PhaseSeconds(strategy, measured_c, measured_s)


def fingerprint(time: TimeModel, switch: Mapping[Strategy, float]) -> str:
    """Identifies the constants of a time model, as factors are valid for these only."""
    # existing checkpoints use this spelling
    data = repr((time, [(strategy.spelled_out, seconds) for strategy, seconds in sorted(switch.items())]))
    return hashlib.sha256(data.encode()).hexdigest()[:16]
