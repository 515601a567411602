"""In which order the ranks of a pipeline run their stages where each has several (`+v2`): interleaved 1F1B for any packs.

Stage s of p v is on rank s mod p, so a pack goes round the ranks v times, and a stage is 1 / v as long: the pipeline fills and
drains v times as fast, for v times the messages (Narayanan et al., SC'21, section 2.2; bubble (p - 1) / (v m) for m packs).
Their schedule wants m to be a multiple of p, and equal packs. This one takes any number of packs of any sizes:

* packs go round in *groups* of p, the last one of what is left, or with the group before it, where that ends sooner; a pack is
  in a smaller group where more tokens than the limit would be held. Every rank runs its forward passes in one sequence (a
  group's packs on its first stage, then on its second one, ...) and its backward passes in another one (from its last
  stage to its first);
* which of the two goes on next is found by running all ranks against the clock of a model in which a forward pass takes as
  long as it has tokens, and a backward pass twice that: forward and backward in turn where both could, forward as long as
  the rank holds no more passes than 2 (p - 1 - r) + (v - 1) p + 1 and no more tokens than the limit. Tokens on one of v
  stages count 1 / v.

Nothing waits for itself: a rank may always run what the next backward pass of its sequence needs, whatever it holds, so the
first forward or backward pass, in the order of the sequences, that some rank has not run can run there.

Promises: the same order on every rank, a pure function; one order for *all* ranks, so that sends and receives posted in it
match where each blocks until its partner is there, too (`tests/unit/test_interleaved_order.py`); where the longest sequence is
within the limit, no rank holds more. Chunks of packs (`+ck`) are chains; these, tokens and their limit are as in `pipeline_order`.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hf_hotspa.packing.pipeline_order import backward_order

_BACKWARD = 2
"""Backward passes take this many times as long as forward ones, in the model that decides the order."""


class Turn(NamedTuple):
    """One pass of one pack (or chunk) through one stage."""

    stage: int
    unit: int
    is_backward: bool


def at_a_time(orders: Sequence[Sequence[Turn]], num_stages: int) -> list[list[Turn]]:
    """What several ranks run, each in an order of its own, as lists of what can run at a time, one turn a rank at most."""
    left = [list(reversed(order)) for order in orders]
    done: set[Turn] = set()
    beats = []
    while any(left):
        now = []
        for rank, turn in [(rank, turns[-1]) for rank, turns in enumerate(left) if turns]:
            needed = turn._replace(stage=turn.stage + (1 if turn.is_backward else -1))
            if needed in done or not 0 <= needed.stage < num_stages:
                now.append(left[rank].pop())
        assert now, "the ranks of a pipeline wait for one another"
        done.update(now)
        beats.append(now)
    return beats


def interleaved_order(
    tokens: Sequence[int],
    num_ranks: int,
    rounds: int,
    most_tokens: int | None = None,
    chains: Sequence[int] = (),
    is_trained: bool = True,
) -> tuple[Turn, ...]:
    """All passes of a replica, in the one order that all of its ranks follow.

    Args:
        num_ranks: Of the pipeline, at least 2.
        rounds: Stages on each rank.
        is_trained: Whether there are backward passes.
    """
    sizes = tuple(chains) or (1,) * len(tokens)
    return _order(tuple(tokens), num_ranks, rounds, most_tokens if is_trained else None, sizes, is_trained)


@lru_cache(maxsize=256)
def _order(
    tokens: tuple[int, ...], num_ranks: int, rounds: int, most: int | None, chains: tuple[int, ...], is_trained: bool
) -> tuple[Turn, ...]:
    groups = _groups(tokens, num_ranks, rounds, most, chains)
    tried = [groups]
    if len(groups) > 1 and sum(groups[-1]) < num_ranks:
        last = groups[-2] + groups[-1]
        if _holds(last, tokens[len(tokens) - sum(last) :], rounds, most):
            tried.append([*groups[:-2], last])
    runs = [_Run(tokens, num_ranks, rounds, most, each, is_trained) for each in tried]
    best = min(runs, key=lambda run: run.seconds)
    return tuple(best.turns)


_Group = list[int]
"""The units of each chain of a group."""


def _groups(
    tokens: Sequence[int], num_ranks: int, rounds: int, most: int | None, chains: Sequence[int]
) -> list[_Group]:
    groups: list[_Group] = []
    first = 0  # unit of the group that is filled
    for num in chains:
        if groups and sum(groups[-1]) < num_ranks and _holds([*groups[-1], num], tokens[first:], rounds, most):
            groups[-1].append(num)
        else:
            first += sum(groups[-1]) if groups else 0
            groups.append([num])
    return groups


def _holds(group: Sequence[int], tokens: Sequence[int], rounds: int, most: int | None) -> bool:
    """Whether a group that begins with some tokens is within the limit when its first backward pass comes: all of it on all
    stages of a rank but the last, and there one chain."""
    if most is None:
        return True
    own, first = [], 0
    for num in group:
        own.append(sum(tokens[first : first + num]))
        first += num
    return (rounds - 1) * sum(own) + max(own) <= rounds * most


@dataclass
class _Rank:
    """Where one rank is in its two sequences, and what it holds."""

    most_passes: int
    num_forward: int = 0
    num_backward: int = 0
    held: int = 0
    free_at: int = 0
    was_forward: bool = False


class _Run:
    """All ranks against the clock of the model.

    Attributes:
        turns: By when they end.
        seconds: When the last one does.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        num_ranks: int,
        rounds: int,
        most: int | None,
        groups: Sequence[_Group],
        is_trained: bool,
    ) -> None:
        self._tokens, self._num_ranks, self._rounds = tokens, num_ranks, rounds
        self._most = None if most is None else rounds * most
        self._forward: list[tuple[int, int]] = []  # (round, unit)
        self._backward: list[tuple[int, int]] = []
        self._needed: list[int] = []  # forward passes of its rank that a backward pass comes after
        self._ends: dict[Turn, int] = {}
        self._queue(groups, is_trained)
        largest = max([num_ranks, *map(sum, groups)])
        longest = max((num for group in groups for num in group), default=1)
        ahead = (rounds - 1) * largest + longest
        self._ranks = [_Rank(2 * (num_ranks - 1 - rank) + ahead) for rank in range(num_ranks)]
        self._is_trained = is_trained
        self._run()
        self.turns = sorted(self._ends, key=lambda turn: (self._ends[turn], turn.stage % num_ranks))
        self.seconds = max(self._ends.values(), default=0)

    def _queue(self, groups: Sequence[_Group], is_trained: bool) -> None:
        first = 0
        for group in groups:
            num, begin = sum(group), len(self._forward)
            units = range(first, first + num)
            self._forward += [(index, unit) for index in range(self._rounds) for unit in units]
            if is_trained:
                order = [first + unit for unit in backward_order(group)]
                through = [first + sum(group[: i + 1]) for i, n in enumerate(group) for _ in range(n)]
                before = begin + (self._rounds - 1) * num - first
                self._backward += [(index, unit) for index in reversed(range(self._rounds)) for unit in order]
                self._needed += [before + end for end in through]
                self._needed += [begin + self._rounds * num] * (num * (self._rounds - 1))
            first += num

    def _run(self) -> None:
        events, now = [0], 0
        while events:
            now = heapq.heappop(events)
            for index, rank in enumerate(self._ranks):
                if rank.free_at > now:
                    continue
                forward, backward = self._next_forward(index, rank, now), self._next_backward(index, rank, now)
                turn = (backward or forward) if rank.was_forward else (forward or backward)
                if turn is None:
                    continue
                tokens = self._tokens[turn.unit]
                rank.free_at = self._ends[turn] = now + tokens * (_BACKWARD if turn.is_backward else 1)
                rank.num_backward += turn.is_backward
                rank.num_forward += not turn.is_backward
                rank.held += -tokens if turn.is_backward else tokens
                rank.was_forward = not turn.is_backward
                heapq.heappush(events, rank.free_at)
            while events and events[0] == now:
                heapq.heappop(events)
        total = len(self._forward) + len(self._backward)
        assert len(self._ends) == total * self._num_ranks, "the ranks of a pipeline wait for one another"

    def _next_forward(self, index: int, rank: _Rank, now: int) -> Turn | None:
        if rank.num_forward == len(self._forward):
            return None
        part, unit = self._forward[rank.num_forward]
        if self._is_trained and rank.num_forward >= self._needed[rank.num_backward]:
            is_full = rank.num_forward - rank.num_backward >= rank.most_passes
            if is_full or (self._most is not None and rank.held + self._tokens[unit] > self._most):
                return None
        stage = part * self._num_ranks + index
        before = Turn(stage - 1, unit, False)
        return Turn(stage, unit, False) if stage == 0 or self._is_over(before, now) else None

    def _next_backward(self, index: int, rank: _Rank, now: int) -> Turn | None:
        if rank.num_backward == len(self._backward) or rank.num_forward < self._needed[rank.num_backward]:
            return None
        part, unit = self._backward[rank.num_backward]
        stage = part * self._num_ranks + index
        is_last = stage == self._num_ranks * self._rounds - 1
        before = Turn(stage, unit, False) if is_last else Turn(stage + 1, unit, True)
        return Turn(stage, unit, True) if self._is_over(before, now) else None

    def _is_over(self, turn: Turn, now: int) -> bool:
        end = self._ends.get(turn)
        return end is not None and end <= now
