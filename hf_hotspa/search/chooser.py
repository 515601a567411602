"""The phases of one mini-batch after the other: selection, hysteresis and correction over a whole run.

Owns what the choice for a mini-batch depends on beside its lengths: the strategies of the one before, and the factors
on the time model (`online`). Mini-batches are numbered from 0 over the whole run, which is the Trainer's global step.

Mini-batches may be planned ahead of training (by a loop; the Trainer does not). So that the choice does not depend on how
fast anybody runs, a correction found after mini-batch n holds from mini-batch `n + 1 + delay` on, and `delay` is at
least as far as anybody plans ahead: every rank chooses alike, and so does a run that goes on from `state_dict`.
`choose` changes nothing and may run in another thread than `trained`. No torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_hotspa.costs.online_calibration import Factors, OnlineCalibration, PhaseSeconds, Refit, ScaledTime, fingerprint
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.search.estimate import Evaluator
from hf_hotspa.search.select import Selection, Selector
from hf_hotspa.strategy import Bucket, Strategy
from hf_hotspa.typed import reading_state


def predict_phases(time: TimeModel, switch: Mapping[Strategy, float], plan: MiniBatchPlan) -> list[PhaseSeconds]:
    """What the phases of a plan will take, in the order of the plan."""
    seconds = []
    for phase in plan.phases:
        strategy = phase.bucket.strategy
        packs = [[pack.lengths for pack in replica] for replica in phase.replicas]
        seconds.append(
            PhaseSeconds(strategy, time.phase_seconds(strategy, packs, phase.bucket.most_tokens), switch[strategy])
        )
    return seconds


class PhaseChooser:
    """Chooses the buckets of mini-batches.

    Args:
        pool: The buckets to choose from, each with a strategy of its own.
        refit: Whether measured seconds correct the time model.
        delay: See the head of the file.
        options: For `Selector`.

    Attributes:
        num_trained: Mini-batches trained so far: the number of the next one.
        previous: The strategies of the one that was trained last.

    Raises:
        HotspaConfigError: what `Selector` refuses.
    """

    def __init__(
        self,
        pool: Sequence[Bucket],
        time: TimeModel,
        switch: Mapping[Strategy, float],
        *,
        quadratic_cost: float = 0.0,
        refit: bool = True,
        delay: int = 2,
        **options: Any,
    ) -> None:
        self.pool, self.delay = tuple(pool), delay
        self._time, self._switch = time, dict(switch)
        self._options = {"quadratic_cost": quadratic_cost, **options}
        self._online = OnlineCalibration(bucket.strategy for bucket in pool) if refit else None
        self._fingerprint = fingerprint(time, {b.strategy: switch[b.strategy] for b in pool if b.strategy in switch})
        # (first mini-batch, factors, selector) of each correction that may still be needed, the oldest first
        self._in_force: list[tuple[int, Factors, Selector]] = [(0, Factors(), self._selector(Factors()))]
        self.num_trained = 0
        self.previous: tuple[Strategy, ...] = ()
        self._seen: set[Strategy] = set()

    def _selector(self, factors: Factors) -> Selector:
        switch = {s: seconds * factors.switch.get(s, 1.0) for s, seconds in self._switch.items()}
        return Selector(self.pool, ScaledTime.of(self._time, factors.compute), switch, **self._options)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that some bucket takes."""
        return max(bucket.longest for bucket in self.pool)

    def restart(self) -> None:
        """Counts from 0 again: another run begins. What was learnt stays."""
        self._in_force = [(0, *self._in_force[-1][1:])]
        self.num_trained = 0

    def choose(self, number: int, lengths: Iterable[int], previous: Sequence[Strategy]) -> Selection:
        """The phases of a mini-batch of sequences of these lengths, none longer than `longest`."""
        return self._entry(number)[1].select(lengths, previous)

    def _entry(self, number: int) -> tuple[Factors, Selector]:
        known = self._in_force
        last = next((entry for entry in reversed(known) if entry[0] <= number), known[0])
        return last[1:]

    def predict(self, number: int, plan: MiniBatchPlan) -> list[PhaseSeconds]:
        """What the phases of a plan will take, by the constants with which mini-batch `number` was chosen."""
        factors = self._entry(number)[0]
        return [factors.apply(phase) for phase in predict_phases(self._time, self._switch, plan)]

    def forecast(self, number: int, lengths: Sequence[int]) -> float:
        """Seconds of a mini-batch as the uncorrected time model has them, in the phases that would be chosen for it."""
        buckets = self.choose(number, lengths, self.previous).buckets
        evaluator = Evaluator([lengths], self._time, self._switch, self._options["quadratic_cost"])
        # the last one reaches as far as its packs allow
        phases = [(b.strategy, b.low, min(b.longest, max(lengths)), b.pack_tokens) for b in buckets]
        return sum(evaluator.phase(*phase).seconds for phase in phases)

    def has_run(self, strategies: Iterable[Strategy]) -> bool:
        """Whether all of them have run before: the first run pays for memory and kernels."""
        return self._seen.issuperset(strategies)

    def takes_over(self, others: Iterable["PhaseChooser"]) -> None:
        """What others have run need not warm up here."""
        self._seen.update(*(other._seen for other in others))

    def trained(
        self, number: int, plan: MiniBatchPlan, measured: Mapping[Strategy, PhaseSeconds] | None
    ) -> Refit | None:
        """Takes what mini-batch `number` took.

        Args:
            measured: Seconds by strategy, equal on all ranks; None where they are to correct nothing.

        Returns:
            The correction that follows from it, if one does, and holds from `number + 1 + delay` on.
        """
        self.num_trained = number + 1
        self.previous = strategies = tuple(phase.bucket.strategy for phase in plan.phases)
        warm = self.has_run(strategies)
        self._seen.update(strategies)
        if self._online is None or measured is None or not warm or not strategies:
            return None
        predicted = predict_phases(self._time, self._switch, plan)
        refit = self._online.observe(predicted, [measured[strategy] for strategy in strategies])
        if refit is not None:
            # never in place: another thread may be looking
            needed = max(i for i, entry in enumerate(self._in_force) if i == 0 or entry[0] <= number + 1)
            new = number + 1 + self.delay, refit.factors, self._selector(refit.factors)
            self._in_force = [*self._in_force[needed:], new]
        return refit

    # ------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next choices depend on, JSON-ready."""
        return {
            "num_trained": self.num_trained,
            "previous": [str(strategy) for strategy in self.previous],
            "constants": self._fingerprint,
            "in_force": [[first, factors.to_dict()] for first, factors, _ in self._in_force],
            "seen": sorted(map(str, self._seen)),
            "trust": self._online.state_dict() if self._online is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Goes on from a state.

        Returns:
            Whether the time model is the same; the corrections of another one are left.

        Raises:
            HotspaConfigError: it is not one.
        """
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
