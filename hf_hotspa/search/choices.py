"""`Choices`: which phases the mini-batches of a run have under `hotspa_strategies=auto`.

The nearest plans are raced; the kept one chooses phases for each mini-batch, by seconds that measurements correct; and
where lengths move away from the scanned ones, a plan is made anew. All ranks choose the same, as they see the same.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.online_calibration import PhaseSeconds, Refit
from hf_hotspa.errors import HotspaConfigError, HotspaError, printable
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.report import StepReport
from hf_hotspa.search.bucket_plan import Plan
from hf_hotspa.search.chooser import PhaseChooser
from hf_hotspa.search.histogram import LengthsSeen
from hf_hotspa.search.race import Race
from hf_hotspa.strategy import Bucket, Strategy, as_written
from hf_hotspa.typed import reading_state

logger = logging.getLogger(__name__)

_REFITS_KEPT = 16


@dataclass
class Choices:
    """The choice among the pools of a plan."""

    plan: Plan
    cost: CostModel
    predicts: bool  # whether the cost model's seconds are from this machine
    max_phases: int
    fixed: bool  # whether all runs must choose the same: measured seconds differ
    speaks: bool  # on the main process
    # watches lengths, and plans for new ones with the engine's strategies; None if all were known at the start
    renewed: tuple[LengthsSeen, Callable[[list[int]], Plan]] | None = None

    def __post_init__(self) -> None:
        self.switch = self.cost.switch_seconds([b.strategy for b in (*self.plan.buckets, self.plan.choice.static)])
        self.refits: deque[Refit] = deque(maxlen=_REFITS_KEPT)
        self.race: Race | None = None
        self._pools = self._raced(self.plan)
        self._choosers: list[PhaseChooser] = []
        self._passes: list[tuple[float, list[float], bool]] = []
        self._step_lengths: list[int] = []

    def _raced(self, plan: Plan) -> tuple[tuple[Bucket, ...], ...]:
        return (plan.pool,) if self.fixed else (plan.pool, *plan.raced)

    @property
    def chooser(self) -> PhaseChooser | None:
        """The chooser of the plan that runs next; None before a run has begun."""
        return self._choosers[self.race.plan] if self.race is not None else None

    @property
    def pool(self) -> tuple[Bucket, ...]:
        return self.chooser.pool if self.chooser is not None else self.plan.pool

    def start(self, num_steps: int) -> None:
        """Begins a run of `num_steps` mini-batches; keeps what an earlier one learnt."""
        before, self._choosers = self._choosers, [self._chooser(pool) for pool in self._pools]
        for chooser, old in zip(self._choosers, before, strict=False):
            chooser.load_state_dict(old.state_dict())
            chooser.restart()
        if self.race is None:
            self.race = Race(self._names, num_steps, self.plan.trial_order if len(self._pools) > 1 else ())
        else:
            self.race.continue_run(num_steps)

    @property
    def _names(self) -> list[str]:
        return [" + ".join(str(bucket.strategy) for bucket in pool) for pool in self._pools]

    def _chooser(self, pool: tuple[Bucket, ...]) -> PhaseChooser:
        return PhaseChooser(
            pool, self.cost.time, self.switch, quadratic_cost=self.cost.sizes.shape.quadratic_cost,
            max_phases=self.max_phases, refit=not self.fixed, delay=0,
        )  # fmt: skip

    def choose(self, step: int, lengths: Sequence[int]) -> tuple[Bucket, ...]:
        """The buckets of a mini-batch. Also called in a thread."""
        chooser = self.chooser
        return chooser.choose(step, lengths, chooser.previous).buckets if chooser is not None else self.plan.buckets

    def trained(self, step: int, plan: MiniBatchPlan, report: StepReport) -> Mapping[Strategy, PhaseSeconds] | None:
        """Takes the report of a training pass of mini-batch `step`; returns what was predicted, if anything is."""
        race, chooser = self.race, self.chooser
        assert race is not None
        assert chooser is not None
        lengths = [sequence.num_tokens for phase in plan.phases for sequence in phase.sequences()]
        self._step_lengths += lengths
        if not self.predicts:
            chooser.trained(step, plan, None)
            return None
        predicted = {phase.strategy: phase for phase in chooser.predict(step, plan)}
        by_strategy = {Strategy.parse(phase.strategy): phase for phase in report.phases}
        measured = {s: PhaseSeconds(s, phase.compute_s, phase.moved_s) for s, phase in by_strategy.items()}
        if measured and len(self._choosers) > 1:
            asked = self._choosers if race.wants else [chooser]
            each = [other.forecast(step, lengths) for other in asked]
            have_run = all(any(chooser.has_run([s]) for chooser in self._choosers) for s in measured)
            self._passes.append((report.all_ranks_s, each, have_run))
        refit = chooser.trained(step, plan, None if race.is_on else measured)
        if refit is not None:
            self.refits.append(refit)
            if self.speaks:
                logger.warning("step %d: %s", step + 1, refit)
        return predicted

    def ended(self, step: int, report: StepReport) -> StepReport:
        """Takes the report of all of mini-batch `step`; returns it with the result of a race, if one has ended."""
        passes, self._passes = self._passes, []
        lengths, self._step_lengths = self._step_lengths, []
        if self.race is None:
            return report
        race = None
        if passes:
            seconds, of_plans, have_run = zip(*passes, strict=True)
            each = [sum(of_plan) for of_plan in zip(*of_plans, strict=True)]
            race = self.race.observe(sum(seconds), each, all(have_run))
        if race is not None and self.speaks:
            tqdm.write(printable(f"step {step + 1}: {race}"))
        if self.renewed is not None and self.renewed[0].add(lengths):
            self._renew(step, *self.renewed)
        for chooser in self._choosers:
            chooser.num_trained = step + 1
        return replace(report, race=race)

    def _renew(self, step: int, lengths: LengthsSeen, planned: Callable[[list[int]], Plan]) -> None:
        distance = lengths.distance
        lengths.planned()
        try:
            plan = planned(lengths.recent)
        except HotspaError as error:
            logger.warning("step %d: lengths have moved, and the plan stays: %s", step + 1, error)
            return
        pools = self._raced(plan)
        self._take(pools, plan.trial_order if len(pools) > 1 else ())
        if self.speaks:
            moved = f"lengths have moved ({distance:.0%} of the tokens)"
            tqdm.write(printable(f"step {step + 1}: {moved}; planned again: {plan.choice}"))

    def _take(self, pools: tuple[tuple[Bucket, ...], ...], order: Sequence[int] = ()) -> None:
        assert self.race is not None
        before, self._pools = self._choosers, pools
        self._choosers = [self._chooser(pool) for pool in pools]
        for chooser in self._choosers:
            chooser.continue_from(before)
        self.race = self.race.of_others(self._names, "lengths have moved", order)

    def state_dict(self) -> dict[str, Any]:
        """The state with which a resumed run chooses as this one would; JSON-ready."""
        state: dict[str, Any] = {"pool": [str(bucket) for bucket in self.plan.pool], "chooser": None}
        if self.chooser is not None and self.race is not None:
            state["chooser"] = self.chooser.state_dict()
            if len(self._choosers) > 1:
                state |= {"race": self.race.state_dict(), "raced": [c.state_dict() for c in self._choosers]}
        if self.renewed is not None:
            pools = [[[str(b.strategy), b.longest, b.pack_tokens, b.low] for b in pool] for pool in self._pools]
            state |= {"lengths": self.renewed[0].state_dict(), "pools": pools}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state, also of a run with another pool. Raises `HotspaConfigError` if it is not a state."""
        if not isinstance(state, Mapping) or not {"pool", "chooser"} <= state.keys():
            raise HotspaConfigError("the state of auto strategies has no pool or chooser", fix="leave it out")
        if state["chooser"] is None or self.race is None:
            return
        if self.renewed is not None and "lengths" in state:
            self.renewed[0].load_state_dict(state["lengths"])
            with reading_state("the plans of a run", "they are made again"):
                made = lambda pool: tuple(Bucket(Strategy.parse(s), *map(int, n)) for s, *n in pool)  # noqa: E731
                pools = tuple(map(made, state["pools"]))
            there = {bucket.strategy for bucket in self.plan.buckets}
            if pools != self._pools and all(bucket.strategy in there for pool in pools for bucket in pool):
                self._take(pools)
        if "race" in state and self.race.load_state_dict(state["race"]):
            known = [c.load_state_dict(own) for c, own in zip(self._choosers, state["raced"], strict=True)]
            same = all(known)
        else:
            same = self._choosers[0].load_state_dict(state["chooser"])
        pool = [str(bucket) for bucket in self.plan.pool]
        before = [as_written(str(bucket)) for bucket in state["pool"]]
        if self.speaks and before != pool:
            logger.warning("auto strategies: %s before, %s now", ", ".join(before), ", ".join(pool))
        elif self.speaks and not same:
            logger.warning("the time model differs from the one before: its corrections are reset")
