"""Finding slow devices at run time, from seconds that every rank knows anyway.

A rank's seconds are those of its computation without waiting for others, and lengths differ from step to step; so they
are divided by the predicted cost of what the rank ran, and compared with those of all ranks: 1 is the pace of the ranks that are
not slow, 3 a device that takes three times as long. These are the fastest ranks, up to the first gap (`usual_pace`), and no
median: a slow majority would be the measure of itself. Ranks that did the same part of the model (a pipeline stage) are compared
first; a whole stage is slow where it is by the costs that speak most for it, as the predictions of embedding and head are rough.
The rule is the paper's (arXiv 2401.11469, section III-A): what is known of a rank changes only when its own
runtime changed by more than 10 %, in either direction, so that a recovery is found like an onset. Beyond the paper, a
change counts when two mini-batches in a row show it alike, and a device that is slow stays slow until it is well below the
limit (hysteresis). The first run of a strategy pays for memory and kernels and says nothing.

Every rank makes the same observations and comes to the same state; `state_dict` goes into checkpoints. No torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from hf_hotspa.strategy import as_written
from hf_hotspa.typed import reading_state

CHANGE = 0.10
"""The paper's significant change of a runtime."""
SLOW, RECOVERED = 1.3, 1.15
"""From the first on, times the pace of those that are not slow, a device is called slow, and no longer below the second."""
CLEAR = 1.5
"""So many times as long as a minority of ranks the next one must take for the minority to be the measure."""
ALIKE = 1.25
"""Two mini-batches agree on a pace where they differ by less: what a busy machine does to them is no pace."""
LEAST_LOST_S = 0.03
"""A device that loses less than this a mini-batch is not called slow: scheduling noise of small models."""


@dataclass(frozen=True)
class PhaseWork:
    """What the ranks did in one phase.

    Args:
        seconds: Of each rank, without waiting.
        costs: Predicted, of what each rank ran, in any unit; 0 for a rank that ran nothing.
        peers: For each rank a number; ranks of one number did comparable work.
        least: What the costs are at least, beside those of ranks of another number; the costs themselves when empty.
        most: The same, at most.
    """

    strategy: str
    seconds: tuple[float, ...]
    costs: tuple[float, ...]
    peers: tuple[int, ...]
    least: tuple[float, ...] = ()
    most: tuple[float, ...] = ()


def usual_pace(paces: Iterable[float]) -> float:
    """The median of the ranks that are not slow: the fastest ones, up to the first gap; of all where there is none."""
    ordered = sorted(paces)
    for count in range(1, len(ordered)):
        if ordered[count] >= ordered[count - 1] * (SLOW if 2 * count >= len(ordered) else CLEAR):
            return median_low(ordered[:count])
    return median_low(ordered)


def expected_seconds(work: PhaseWork) -> tuple[float, ...]:
    """What each rank would have taken at the pace of those that are not slow; 0 for one that ran nothing."""
    seconds, costs, most = work.seconds, work.costs, work.most or work.costs
    least, groups = work.least or costs, dict[int, list[int]]()
    for rank, cost in enumerate(costs):
        if cost > 0.0 and seconds[rank] > 0.0:
            groups.setdefault(work.peers[rank], []).append(rank)
    usual = {number: usual_pace(seconds[r] / costs[r] for r in ranks) for number, ranks in groups.items()}
    # a group is measured by the least that it may have had to do, and judged by the most
    fastest = usual_pace(usual[number] * costs[r] / least[r] for number, (r, *_) in groups.items()) if groups else 0.0
    expected = [0.0] * len(costs)
    for number, ranks in groups.items():
        is_slow = usual[number] * costs[ranks[0]] >= SLOW * fastest * most[ranks[0]]
        for rank in ranks:
            expected[rank] = fastest * most[rank] if is_slow else usual[number] * costs[rank]
    return tuple(expected)


@dataclass(frozen=True)
class SlowEvent:
    """Devices became slow, or recovered.

    Args:
        step: The mini-batch after which it is known, counted from 1.
        slow: Rank -> how many times as long it takes as those that are not slow, of those that became slow.
        recovered: The ranks that are slow no longer.
    """

    step: int
    slow: dict[int, float]
    recovered: tuple[int, ...]

    def __str__(self) -> str:
        said = [
            f"rank {rank} computes {pace:.1f} times as long as ranks that are not slow"
            for rank, pace in self.slow.items()
        ]
        said += [f"rank {rank} has recovered" for rank in self.recovered]
        return "; ".join(said)


class SlowDevices:
    """What is known of the pace of each rank.

    Args:
        num_ranks: Of the world.

    Attributes:
        known: The pace of each rank, 1 for one that is not slow: as it was found at the last change.
        slow: The ranks that are called slow.
        num_refreshes: How often `known` changed.
    """

    def __init__(self, num_ranks: int) -> None:
        self.known: list[float] = [1.0] * num_ranks
        self.slow: frozenset[int] = frozenset()
        self.num_refreshes = 0
        self._changed: list[float | None] = [None] * num_ranks  # what the last mini-batch showed, where it differed
        self._seen: set[str] = set()

    def observe(self, step: int, phases: Sequence[PhaseWork]) -> tuple[tuple[float | None, ...], SlowEvent | None]:
        """Takes the phases of a mini-batch.

        Args:
            step: The mini-batch, counted from 1.

        Returns:
            The pace of each rank in this mini-batch, None where it did nothing that says anything; and what changed.
        """
        known = [phase for phase in phases if phase.strategy in self._seen]
        self._seen.update(phase.strategy for phase in phases)
        ranks = range(len(self.known))
        taken, wanted = [0.0] * len(self.known), [0.0] * len(self.known)
        for phase in known:
            for rank, expected in enumerate(expected_seconds(phase)):
                if expected > 0.0:
                    taken[rank] += phase.seconds[rank]
                    wanted[rank] += expected
        paces = tuple(taken[r] / wanted[r] if wanted[r] > 0.0 else None for r in ranks)
        before, refreshed = self.slow, False
        for rank, pace in enumerate(paces):
            if pace is not None:
                refreshed |= self._take(rank, pace, taken[rank] - wanted[rank])
        self.num_refreshes += refreshed
        if self.slow == before:
            return paces, None
        onset = {rank: self.known[rank] for rank in sorted(self.slow - before)}
        return paces, SlowEvent(step, onset, tuple(sorted(before - self.slow)))

    def _take(self, rank: int, pace: float, lost_s: float) -> bool:
        """Whether what is known of a rank changed."""
        refreshed = self._refresh(rank, pace)
        if self.known[rank] >= SLOW and lost_s >= LEAST_LOST_S:
            self.slow |= {rank}
        elif self.known[rank] < RECOVERED:
            self.slow -= {rank}
        return refreshed

    def _refresh(self, rank: int, pace: float) -> bool:
        kept, last = self.known[rank], self._changed[rank]
        if abs(pace / kept - 1.0) <= CHANGE:
            self._changed[rank] = None
            return False
        if last is None or (last > kept) != (pace > kept) or max(last, pace) > ALIKE * min(last, pace):
            self._changed[rank] = pace
            return False
        # the milder of the two: one outlier behind a small change is none
        self.known[rank] = min(last, pace) if pace > kept else max(last, pace)
        self._changed[rank] = None
        return True

    def speeds(self) -> tuple[float, ...] | None:
        """The speed of each rank for a division of work, 1 for one that is not slow; None where none is."""
        if not self.slow:
            return None
        return tuple(1.0 / pace if rank in self.slow else 1.0 for rank, pace in enumerate(self.known))

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next observations depend on, JSON-ready."""
        return {
            "known": list(self.known),
            "slow": sorted(self.slow),
            "changed": list(self._changed),
            "seen": sorted(self._seen),
            "num_refreshes": self.num_refreshes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Goes on from a state.

        Returns:
            Whether it is of as many ranks; another one is left, as its ranks are other devices.

        Raises:
            HotspaConfigError: it is not one.
        """
        with reading_state("slow devices", "they are found anew"):
            known = [float(pace) for pace in state["known"]]
            slow = frozenset(int(rank) for rank in state["slow"])
            changed = [None if pace is None else float(pace) for pace in state["changed"]]
            seen, refreshes = {as_written(str(name)) for name in state["seen"]}, int(state["num_refreshes"])
            if len(changed) != len(known) or not slow <= set(range(len(known))) or min(known, default=1.0) <= 0.0:
                raise ValueError("its lists do not belong together")
        if len(known) != len(self.known):
            return False
        self.known, self.slow, self._changed = known, slow, changed
        self._seen, self.num_refreshes = seen, refreshes
        return True
