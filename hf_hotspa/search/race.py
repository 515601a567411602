"""The race of the nearest plans: finds the fastest on the first mini-batches of a run.

A time model cannot distinguish neighbours, and all plans train the same. So the mini-batches run them in turn, round
after round, every second round backwards. Each counts with the logarithm of its measured seconds over the seconds
predicted for its lengths under its plan, which removes the effect of the lengths. Comparing round by round removes what
the machine does to all plans. The noise may have any distribution: a plan leaves if it was slower in each of some
rounds (`_CLEARLY`), and two plans are reported with the median of all pairwise means of the differences and its
interval (Wilcoxon's signed ranks).

The regret is bounded. A race costs the time that other plans took beyond the leader's, in mean mini-batches; what the
leader would have taken follows from its runs in the same round and in those next to it, because a machine that was slow
then was slow for all. Before each trial its expected cost must fit into the rest of `SHARE` of the run's mini-batches,
less `_RESERVE` of it for misjudged trials. So all races of a run cost at most that share, plus what misjudged trials
exceed the reserve by.

Afterwards the winner runs. A drift opens the race again: its ratio of measured to predicted seconds has moved, or the
lengths have, so that another plan would be faster by the race's measurements.

A pure function of its inputs in order; a race resumed from `state_dict` decides as if it had not stopped. Plain data,
no torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import mean, median
from typing import Any

from hf_hotspa.report import RaceReport
from hf_hotspa.typed import reading_state

SHARE = 0.01  # what all races of a run may cost, as a share of its mini-batches
_RESERVE = 0.3  # the share of that budget kept back, because trials can take longer than expected
_CLEARLY = (math.inf, 0.12, 0.06, 0.03, 0.0)
"""By how much, as a logarithm, a plan must have been slower in each of 1, 2, ... rounds to leave; the last value holds
for more rounds. One round decides nothing: another process may have used the machine. With noise of 10 % a plan as fast
as another leaves by chance in one of 30 races, where nothing is lost, and a faster plan seldom."""
_SAME = 0.02  # plans that differed by less than this in each of `_ENOUGH` rounds count as equal
_ENOUGH, _MOST_ROUNDS = 3, 8
_COLD = 0.25  # expected extra time of the first mini-batch of a strategy, as a share of one: memory and kernels
_FAR = math.log(1.2)
"""How far behind, as a logarithm, the first run of a plan decides alone. A second run of such a plan costs more than a
run of one that is near, and seldom changes the result."""
_WATCHED, _REST = 8, 32  # mini-batches that show a drift, and that must have passed since the last race
_MOVED, _BETTER = math.log(1.25), math.log(1.05)
"""How far the winner's seconds must have moved, and how much better another plan must look, to race again."""


@dataclass(frozen=True)
class _Run:
    """A mini-batch of a race: plan, round, measured seconds, predicted ones under each plan, whether it counts."""

    plan: int
    round: int
    seconds: float
    predicted: tuple[float, ...]
    warm: bool


class Race:
    """Decides which of some plans runs next; a run too short for a race uses the first one. They are tried in the given
    `order`, else as named; if the budget does not suffice, the last ones are not."""

    def __init__(self, names: Sequence[str], num_steps: int, order: Sequence[int] = ()) -> None:
        self.names, self._budget = tuple(names), SHARE * num_steps
        self._order = list(order or range(len(names)))
        self._spent, self._why, self._number, self._kept = 0.0, "", 0, 0
        self._levels: dict[int, float] = {}
        self._open()
        if len(names) < 2 or self._left < _COLD:  # a short run cannot afford a race
            self._queue.clear()

    def _open(self) -> None:
        self._live = list(self._order)
        self._queue: list[int] = list(self._live)
        self._round = 0
        self._runs: list[_Run] = []
        self._recent: list[tuple[float, tuple[float, ...]]] = []
        self._since = 0

    def of_others(self, names: Sequence[str], why: str, order: Sequence[int] = ()) -> "Race":
        """Returns a race of other plans in the same run, with the remaining budget."""
        race = Race(names, 0, order)
        race._budget, race._spent = self._budget, self._spent
        if len(names) > 1 and self._left >= _COLD:
            race._again(why)
        return race

    def continue_run(self, num_steps: int) -> None:
        """Extends the budget: the same plans train again, for so many mini-batches."""
        self._budget += SHARE * num_steps

    @property
    def _left(self) -> float:
        """What a race that begins now may cost, in mean mini-batches."""
        return (1 - _RESERVE) * self._budget - self._spent

    @property
    def is_on(self) -> bool:
        return bool(self._queue)

    @property
    def plan(self) -> int:
        return self._queue[0] if self._queue else self._kept

    @property
    def wants(self) -> bool:
        """Whether `observe` needs the predictions of all plans for the next mini-batch, not only of its plan."""
        return len(self.names) > 1 and (self.is_on or self._since % _WATCHED == 0)

    def observe(self, seconds: float, predicted: Sequence[float], warm: bool) -> RaceReport | None:
        """Records the next mini-batch. `seconds`: the same on all ranks. `predicted`: under each plan if it `wants`
        them; else under its plan only. All positive. `warm`: whether all strategies of the mini-batch have run before.
        Returns the result of the race, if it ends with this mini-batch."""
        if len(self.names) < 2 or not seconds > 0 or not all(each > 0 for each in predicted):
            return None
        if not self.is_on:
            self._watch(seconds, predicted, warm)
            return None
        plan = self._queue.pop(0)
        self._runs.append(_Run(plan, self._round, seconds, tuple(predicted), warm))
        if not warm:  # again, after all have run once
            self._queue.append(plan)
        if not self._queue:
            self._end_round()
        while self._queue and not self._is_worth(self._queue[0]):
            left = self._queue.pop(0)
            self._live = [plan for plan in self._live if plan != left]
            if not self._queue:
                self._end_round()
        return None if self.is_on else self._ended()

    # -- measurements of a race ---------------------------------------------------------------------------------------

    def _weights(self) -> list[float]:
        return [math.log(mean(run.predicted[plan] for run in self._runs)) for plan in range(len(self.names))]

    def _of_rounds(self, plan: int) -> dict[int, float]:
        return {r.round: math.log(r.seconds / r.predicted[plan]) for r in self._runs if r.warm and r.plan == plan}

    def _score(self, plan: int) -> float:
        """The logarithm of a mean mini-batch's seconds. A plan that has only run cold is as far from the fastest as
        from that plan's cold run. A plan that has not run follows its prediction and the levels of the others."""
        plans, weights = range(len(self.names)), self._weights()
        warm = {p: median(values.values()) for p in plans if (values := self._of_rounds(p))}
        if plan in warm:
            return weights[plan] + warm[plan]
        cold = {p: min(first) for p in plans if (first := self._cold(p))}
        if plan not in cold:
            return weights[plan] + median((warm or cold or {0: 0.0}).values())
        level = cold[plan]
        if both := warm.keys() & cold.keys():
            best = min(both, key=lambda p: weights[p] + warm[p])
            level += warm[best] - cold[best]
        return weights[plan] + level

    def _cold(self, plan: int) -> list[float]:
        return [math.log(r.seconds / r.predicted[plan]) for r in self._runs if not r.warm and r.plan == plan]

    def _leader(self) -> int:
        live = self._live
        return min(list(filter(self._of_rounds, live)) or list(filter(self._cold, live)) or live, key=self._score)

    def _differences(self, plan: int, other: int) -> list[float]:
        """How much slower a plan was than another in the rounds of both, as logarithms."""
        weights, mine, theirs = self._weights(), self._of_rounds(plan), self._of_rounds(other)
        shift = weights[plan] - weights[other]
        return [mine[number] - theirs[number] + shift for number in sorted(mine.keys() & theirs.keys())]

    def _cost(self) -> float:
        leader = self._leader()
        known = self._of_rounds(leader)
        level = self._score(leader) - self._weights()[leader]
        level -= 0.0 if known else math.log(1 + _COLD)

        def then(run: _Run) -> float:
            near = [ratio for number, ratio in known.items() if abs(number - run.round) <= 1]
            return median(near) if near else level

        under_leader = [run.predicted[leader] * math.exp(then(run)) for run in self._runs]
        extra = sum(r.seconds - own for r, own in zip(self._runs, under_leader, strict=True) if r.plan != leader)
        return extra / mean(under_leader)

    def _is_worth(self, plan: int) -> bool:
        """Whether to try a plan: its expected cost is within the budget, and its first run was not far behind."""
        leader = self._leader()
        if plan == leader:
            return True
        behind, cold_runs = self._score(plan) - self._score(leader), self._cold(plan)
        warm_runs = self._of_rounds(plan)
        if behind > _FAR and not warm_runs and cold_runs:
            return False
        if len(warm_runs) == 1 and cold_runs:  # if it took longer than the cold run, something disturbed it
            behind += min(0.0, min(cold_runs) - max(warm_runs.values()))
        slower = math.exp(behind) - 1
        cold = 0.0 if any(run.plan == plan for run in self._runs) else _COLD
        return max(0.0, self._cost()) + max(0.0, slower) + cold <= self._left

    def _end_round(self) -> None:
        """Removes plans that are clearly slower; begins another round if anything is left to find out."""
        self._round += 1
        leader = self._leader()
        apart = {plan: self._differences(plan, leader) for plan in self._live if plan != leader}
        for plan, differences in apart.items():
            number = len(differences)
            if not number or min(differences) > _CLEARLY[min(number, len(_CLEARLY)) - 1]:
                self._live.remove(plan)
        left = [apart[plan] for plan in self._live if plan != leader]
        same = all(len(each) >= _ENOUGH and max(map(abs, each)) < _SAME for each in left)
        if left and not same and self._round < _MOST_ROUNDS:
            self._queue = self._live[:: -1 if self._round % 2 else 1]

    def _ended(self) -> RaceReport | None:
        leader, weights = self._leader(), self._weights()
        for plan in self._live:  # round by round, which removes what the machine did to all, another may be ahead
            if (apart := self._differences(plan, leader)) and _middle(apart)[0] < 0:
                leader = plan
        self._levels = {p: self._score(p) - weights[p] for p in range(len(self.names)) if self._of_rounds(p)}
        cost, self._kept = self._cost(), leader
        self._spent += max(0.0, cost)
        tried = {run.plan for run in self._runs}
        compared = {p: self._differences(p, leader) or [self._score(p) - self._score(leader)] for p in tried}
        compared.pop(leader, None)
        runs, self._runs = self._runs, []
        if not compared:
            return None
        second = min(compared, key=lambda plan: _middle(compared[plan])[0])
        factor, low, high = map(math.exp, _middle(compared[second]))
        names, cost = self.names, max(0.0, cost)
        return RaceReport(names[leader], names[second], len(tried), len(runs), factor, low, high, cost, self._why)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def _watch(self, seconds: float, predicted: Sequence[float], warm: bool) -> None:
        """Opens the race again if a drift makes it worth it."""
        every = predicted if len(predicted) == len(self.names) else ()
        own = predicted[self._kept] if every else predicted[0]
        self._since += 1
        if self._kept not in self._levels or not warm:
            return
        self._recent = [*self._recent, (math.log(seconds / own), tuple(every))][-_WATCHED * _WATCHED :]
        last = [ratio for ratio, _ in self._recent[-_WATCHED:]]
        if self._since < _REST or len(last) < _WATCHED or self._left < _COLD:
            return
        moved = median(last) - self._levels[self._kept]
        if abs(moved) > _MOVED:
            self._again(f"mini-batches take {math.exp(moved):.2f}x their earlier time")
        elif (known := [each for _, each in self._recent if each])[3:] and (better := self._better(known)) is not None:
            self._again(f"for these lengths {self.names[better]} may be faster")

    def _better(self, known: Sequence[Sequence[float]]) -> int | None:
        kept = self._kept
        for plan, level in self._levels.items():
            ahead = [level - self._levels[kept] + math.log(each[plan] / each[kept]) for each in known[-4:]]
            if plan != kept and median(ahead) < -_BETTER:
                return plan
        return None

    def _again(self, why: str) -> None:
        self._why = why
        self._open()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "order": list(self._order),
            "budget": self._budget,
            "spent": self._spent,
            "why": self._why,
            "kept": self._kept,
            "levels": {str(plan): level for plan, level in self._levels.items()},
            "live": list(self._live),
            "queue": list(self._queue),
            "round": self._round,
            "runs": [[*astuple(run)[:3], list(run.predicted), run.warm] for run in self._runs],
            "recent": [[ratio, list(each)] for ratio, each in self._recent],
            "since": self._since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restores a state. Returns whether its plans are these; otherwise the race starts from its beginning. Raises
        `HotspaConfigError`: the state is invalid."""
        with reading_state("the race of plans", "plans are raced anew"):
            if list(state["names"]) != list(self.names):
                return False
            runs = [_Run(int(a), int(b), float(c), tuple(map(float, d)), bool(e)) for a, b, c, d, e in state["runs"]]
            levels = {int(plan): float(level) for plan, level in state["levels"].items()}
            recent = [(float(ratio), tuple(map(float, each))) for ratio, each in state["recent"]]
            numbers = [int(state[name]) for name in ("kept", "round", "since")]
            live, queue = [int(plan) for plan in state["live"]], [int(plan) for plan in state["queue"]]
            order = [int(plan) for plan in state.get("order", range(len(self.names)))]  # not in earlier states
            budget, spent, why = float(state["budget"]), float(state["spent"]), str(state["why"])
            for plan in (numbers[0], *live, *queue, *order, *levels, *(run.plan for run in runs)):
                self.names[plan]
        self._runs, self._levels, self._recent = runs, levels, recent
        self._live, self._queue, self._order = live, queue, order
        (self._kept, self._round, self._since), self._budget, self._spent, self._why = numbers, budget, spent, why
        return True


def _middle(values: Sequence[float]) -> tuple[float, float, float]:
    """The median of pairwise means (Hodges, Lehmann) and its 90 % interval; below 5 values their range."""
    walsh = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    ways, count = [1] + [0] * len(walsh), len(values)  # how many sets of ranks have each sum
    for rank in range(1, count + 1):
        for total in range(len(walsh), rank - 1, -1):
            ways[total] += ways[total - rank]
    below, cut = 0, -1
    while (below + ways[cut + 1]) / 2**count <= 0.05:
        cut += 1
        below += ways[cut]
    cut = max(0, cut)
    return median(walsh), walsh[cut], walsh[-1 - cut]
