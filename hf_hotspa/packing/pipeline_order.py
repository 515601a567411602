"""Which schedule runs the packs of a pipeline, and in which order each stage runs them, within a number of tokens.

Owns the choice of the schedule and the order of its passes, for the stages that run them and for the cost model that
predicts what they take and hold. Pure functions, no torch. In them `tokens` are those of each unit, a pack or a chunk of one;
`most_tokens` the most of them in flight on a stage (`Bucket.most_tokens`), None for no limit; `chains` how many units each chain
has, in order, none where each stands alone. Promises, for every schedule: no stage holds more tokens at a time than the limit,
padding included, but for one pack that is longer alone.

**One stage on each rank.** Stage s of p in our 1F1B (PipeDream-Flush; Narayanan et al., SC'21, section 2.2) runs a forward pass as
long as fewer than p - s packs are in flight, else the oldest backward pass. What is in flight holds its activations; where a
mini-batch has packs of very different sizes, a number of tokens limits it, too: a long pack then goes through with few or no
others beside it, and short ones follow one another closely. GPipe runs its packs in groups that are within the limit, one
group after the other; torch's 1F1B, which knows no limit, gives way to ours where its padded packs would pass it.

A pack that is cut into chunks of tokens (`+ck`) is a *chain* of them, and they are what our 1F1B runs: chains come first in,
first out, and the chunks of a chain go backward last in, first out, as each needs the gradients that later ones have for
its keys and values. All chunks of a chain are forward before the first is backward, so a stage runs n - 1 more forward
passes ahead for chains of n (Sun et al., 2024, "Seq1F1B"). Whole packs are chains of one. No stage waits for itself, also where a
message occupies both ends until it is received (`tests/unit/test_pipeline_order.py`): the limit is the same for all stages, so
a stage is ahead of the next by one forward pass at most, and that one comes right before the backward pass that it could wait for.

**Several stages on each rank (`+v2`)**: interleaved 1F1B. Stage s of p v is on rank s mod p, so a pack goes round the ranks v times,
and a stage is 1 / v as long: the pipeline fills and drains v times as fast, for v times the messages (bubble (p - 1) / (v m) for
m packs). The published schedule wants m to be a multiple of p, and equal packs. Ours takes any number of packs of any sizes:

* packs go round in *groups* of p, the last one of what is left, or with the group before it, where that ends sooner; a pack is
  in a smaller group where more tokens than the limit would be held. Every rank runs its forward passes in one sequence (a
  group's packs on its first stage, then on its second one, ...) and its backward passes in another one (from its last
  stage to its first);
* which of the two goes on next is found by running all ranks against the clock of a model in which a forward pass takes as
  long as it has tokens, and a backward pass twice that: forward and backward in turn where both could, forward as long as
  the rank holds no more passes than 2 (p - 1 - r) + (v - 1) p + 1 and no more tokens than the limit. Tokens on one of v
  stages count 1 / v.

Nothing waits for itself: a rank may always run what the next backward pass of its sequence needs, whatever it holds. There is one
order for *all* ranks, so that sends and receives posted in it match where each blocks until its partner is there, too
(`tests/unit/test_interleaved_order.py`).

torch's `ScheduleInterleaved1F1B` sends packs of one shape round in m // p groups of equal size, so m must be a multiple of that
number. A rank r begins with (v - 1) g + 2 (p - 1 - r) forward passes for groups of g, then one forward and one backward pass in
turn (`torch_order`). Ours runs in its place for fewer packs than ranks, for a number of packs that makes no equal groups, and
where the padded packs in flight would be more than the limit.

**PipeDream**: which version of a stage's weights each pack uses, where stages update after every backward pass. Asynchronous 1F1B
with weight stashing (Narayanan et al., SOSP'19, section 3.3) is a training mode of its own and *not* the synchronous update of
everything else here: stage s of p (from 0) has run the backward passes of p - 1 - s packs less than a sequential optimizer would
have when it runs a pack forward. It keeps the weights of that moment until the pack's backward pass, so that both use the same
bits. With vertical sync all stages use the version of the first one.

* Update k of a stage (k = 0, 1, ...) is that of the k-th packs of all replicas together: the gradient of the mean loss over
  their label tokens. Where they have none, nothing is updated.
* Version v of its weights has seen the updates 0 to v - 1 of the mini-batch. Version 0 is the same point on all stages: a
  pipeline runs empty at the end of every mini-batch.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite
from typing import NamedTuple

from hf_hotspa.errors import HotspaConfigError, StrategyError, UnsupportedError
from hf_hotspa.strategy import Bucket, Strategy

SCHEDULES = ("auto", "own", "1f1b", "gpipe")
"""`own`: our 1F1B, for packs of any sizes; `auto` is the same. `1f1b`, `gpipe`: those of `torch.distributed.pipelining`,
which want packs of one size: shorter ones are padded. With several stages on a rank (`+v2`) both `own` and `1f1b` are interleaved."""

Operation = tuple[int, bool]
"""A pack (or chunk of one), and whether it is its backward pass."""


def runs_chunks(schedule: str) -> bool:
    """Whether a schedule runs chunks of packs (`+ck`), too."""
    return schedule in ("auto", "own")


def runs_rounds(schedule: str) -> bool:
    """Whether a schedule runs several stages on each rank (`+v`), too."""
    return schedule != "gpipe"


def check_runs(schedule: str, strategy: Strategy, flexible: bool = False) -> None:
    """Refuses a schedule that cannot run a pipeline: torch's run whole packs, its GPipe through one stage on each rank.

    Args:
        flexible: Whether ranks of tp may give work away.

    Raises:
        StrategyError: torch's schedule under `+ck` in a pipeline, GPipe under `+v`, or `+v` where ranks give work away.
    """
    if strategy.ck and strategy.pp > 1 and not runs_chunks(schedule):
        raise StrategyError(
            f"strategy {strategy} has token chunks, and the pipeline schedule is {schedule}",
            why="chunks of a pack go forward in their order and backward against it, which torch's schedules do not know",
            fix=f"use the schedule own, or leave +ck{strategy.ck} out",
        )
    if strategy.v > 1 and not runs_rounds(schedule):
        raise StrategyError(
            f"strategy {strategy} has several stages on each rank, and the pipeline schedule is {schedule}",
            why="it runs one stage on each rank",
            fix=f"use the schedule own or 1f1b, which are interleaved then, or leave +v{strategy.v} out",
        )
    if strategy.v > 1 and flexible:
        raise StrategyError(
            f"strategy {strategy} has several stages on each rank, beside ranks that give work away (hotspa_stragglers)",
            why="what a rank gives away is chosen for one stage",
            fix=f"use hotspa_stragglers=balance or watch, or leave +v{strategy.v} out",
        )


def backward_order(chains: Sequence[int]) -> list[int]:
    """Units in the order of their backward passes."""
    order: list[int] = []
    for num in chains:
        order += range(len(order) + num - 1, len(order) - 1, -1)
    return order


def most_ahead(chains: Sequence[int], depth: int) -> list[int]:
    """How many forward passes the first stage has begun before each backward pass, where nothing limits them; each stage
    behind it one less.

    A stage runs all of a chain before its first backward pass, and one forward pass at least for each backward pass: none
    is ahead of the next by more than that one, which is what keeps sends that block from waiting for each other.

    Args:
        depth: See `Passes.depth`.
    """
    aheads: list[int] = []
    most = 0
    for num in chains:
        for _ in range(num):
            most = max(most + 1, len(aheads) + num)
            aheads.append(most + depth - 1)
    return aheads


def reaches(tokens: Sequence[int], most_tokens: int | None = None, chains: Sequence[int] = ()) -> list[int]:
    """How many forward passes may have begun before each backward pass, in order: the number k of units so that the
    first k, without those whose backward pass came before, are within the limit; a whole chain at least."""
    total = len(tokens)
    if most_tokens is None:
        return [total] * total
    ends: list[int] = []
    first = end = held = 0
    for num in chains or [1] * total:
        last = first + num
        while end < last:
            held, end = held + tokens[end], end + 1
        for backward in range(last - 1, first - 1, -1):
            while end < total and held + tokens[end] <= most_tokens:
                held, end = held + tokens[end], end + 1
            ends.append(end)
            held -= tokens[backward]
        first = last
    return ends


def delays(reach: Sequence[int], num_stages: int) -> bool:
    """Whether a forward pass waits that the plain schedule would not let wait (`reach`: see `reaches`)."""
    return any(most < min(len(reach), backward + num_stages) for backward, most in enumerate(reach))


def operations(reach: Sequence[int], num_stages: int, stage: int, chains: Sequence[int] = ()) -> list[Operation]:
    """What a stage, counted from 0, runs, in order (`reach`: see `reaches`)."""
    order: list[Operation] = []
    forwards, chains = 0, chains or [1] * len(reach)
    for backward, most, ahead in zip(backward_order(chains), reach, most_ahead(chains, num_stages), strict=True):
        ahead = min(most, ahead - stage)
        order += ((forward, False) for forward in range(forwards, ahead))
        forwards = max(forwards, ahead)
        order.append((backward, True))
    return order


@dataclass(frozen=True)
class Passes:
    """How the packs of a replica run through its stages.

    Args:
        kind: The schedule: `own`, `1f1b` or `gpipe`.
        tokens: Of each unit as it runs, padding included.
        reach: See `reaches`.
        replaced: Whether it is ours because the one that was asked for would pass the limit.
    """

    kind: str
    num_stages: int
    tokens: tuple[int, ...]
    reach: tuple[int, ...]
    replaced: bool = False
    chains: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """How many forward passes the first stage may be ahead: GPipe goes as far as it may, on every stage."""
        return len(self.tokens) + self.num_stages if self.kind == "gpipe" else self.num_stages

    def operations(self, stage: int) -> list[Operation]:
        return operations(self.reach, self.depth, stage, self.chains)

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The packs `[first, last + 1)` that are through before the next begin: several only with GPipe."""
        if self.kind != "gpipe":
            return [(0, len(self.tokens))] if self.tokens else []
        ends = sorted(set(self.reach))
        return list(zip([0, *ends], ends, strict=False))


def choose_passes(
    schedule: str, tokens: Sequence[int], num_stages: int, most_tokens: int | None = None, chains: Sequence[int] = ()
) -> Passes:
    """How the packs of a replica will run, by one of `SCHEDULES`."""
    reach = tuple(reaches(tokens, most_tokens, chains))
    own = Passes("own", num_stages, tuple(tokens), reach, chains=tuple(chains))
    if chains:
        return own
    if schedule == "gpipe" and num_stages > 1 and tokens:
        padded, reach = _groups(tokens, most_tokens)
        return Passes("gpipe", num_stages, padded, reach)
    # torch's 1F1B refuses fewer packs than stages
    if schedule == "1f1b" and len(tokens) >= num_stages:
        padded = (max(tokens),) * len(tokens)
        if not delays(reaches(padded, most_tokens), num_stages):
            return Passes("1f1b", num_stages, padded, tuple(reaches(padded)))
        return replace(own, replaced=True)
    return own


def _groups(tokens: Sequence[int], most_tokens: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of packs that are padded to the longest of their group, and where each pack's group ends."""
    padded: list[int] = []
    reach: list[int] = []
    begin = 0
    while begin < len(tokens):
        end, longest = begin + 1, tokens[begin]
        while end < len(tokens):
            longer = max(longest, tokens[end])
            if most_tokens is not None and (end + 1 - begin) * longer > most_tokens:
                break
            end, longest = end + 1, longer
        padded += [longest] * (end - begin)
        reach += [end] * (end - begin)
        begin = end
    return tuple(padded), tuple(reach)


def most_packs(
    schedule: str, num_stages: int, stage: int, num_packs: int | None, chain: int = 1, rounds: int = 1
) -> int | None:
    """The most units that a stage, counted from 0, holds at a time, where tokens do not limit them; None for any number.

    A rank with several stages holds a pack on some of them only: it counts by their share, rounded up in all.

    Args:
        num_packs: Units of a replica; None for any number.
        chain: Units of the longest chain.
        rounds: Stages on each rank; then `stage` is the rank, of `num_stages`.
    """
    if rounds > 1:  # see `interleaved_order`: no group is larger than 2 p - 1
        passes = 2 * (num_stages - 1 - stage) + (rounds - 1) * (2 * num_stages - 1) + chain
        most = -(passes // -rounds)
    elif schedule == "gpipe" and num_stages > 1:
        return num_packs
    else:
        most = num_stages - stage + chain - 1
    return most if num_packs is None else min(most, num_packs)


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
    """All passes of a replica, backward ones too if `is_trained`, in the one order that all ranks of its pipeline (at
    least 2) follow, with `rounds` stages on each."""
    sizes = tuple(chains) or (1,) * len(tokens)
    return _order(tuple(tokens), num_ranks, rounds, most_tokens if is_trained else None, sizes, is_trained)


@lru_cache(maxsize=256)
def _order(
    tokens: tuple[int, ...], num_ranks: int, rounds: int, most: int | None, chains: tuple[int, ...], is_trained: bool
) -> tuple[Turn, ...]:
    groups: list[_Group] = []
    first = 0  # unit of the group that is filled
    for num in chains:
        if groups and sum(groups[-1]) < num_ranks and _holds([*groups[-1], num], tokens[first:], rounds, most):
            groups[-1].append(num)
        else:
            first += sum(groups[-1]) if groups else 0
            groups.append([num])
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
    """All ranks against the clock of the model: by when `turns` end, and the `seconds` when the last one does."""

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


@dataclass(frozen=True)
class InterleavedPasses:
    """How the packs of a replica run.

    Args:
        kind: The schedule: `own` or `1f1b` (torch's).
        tokens: Of each unit as it runs, padding included.
        order: All passes, in one order in which each comes behind what it needs; of each rank in the order that it runs them.
        replaced: Whether it is ours because the one that was asked for would pass the limit.
    """

    kind: str
    tokens: tuple[int, ...]
    order: tuple[Turn, ...]
    replaced: bool = False


def choose_interleaved(
    schedule: str,
    tokens: Sequence[int],
    num_ranks: int,
    rounds: int,
    most_tokens: int | None = None,
    chains: Sequence[int] = (),
) -> InterleavedPasses:
    """How a replica's packs run by a schedule that `check_runs` allows; otherwise as `interleaved_order`."""
    total, replaced = len(tokens), False
    if schedule == "1f1b" and total >= num_ranks and total % (total // num_ranks) == 0:
        longest = max(tokens)
        held = min(_ahead(total, num_ranks, rounds, 0) + 1, total * rounds)  # passes, 1 / rounds of a pack each
        if most_tokens is None or held * longest <= rounds * most_tokens:
            return InterleavedPasses("1f1b", (longest,) * total, torch_order(total, num_ranks, rounds))
        replaced = True
    order = interleaved_order(tokens, num_ranks, rounds, most_tokens, chains)
    return InterleavedPasses("own", tuple(tokens), order, replaced)


def _group(num_packs: int, num_ranks: int) -> int:
    return num_packs // max(1, num_packs // num_ranks)


def _ahead(num_packs: int, num_ranks: int, rounds: int, rank: int) -> int:
    """Forward passes of a rank before the first one that a backward pass follows."""
    return min((rounds - 1) * _group(num_packs, num_ranks) + 2 * (num_ranks - 1 - rank), num_packs * rounds)


@lru_cache(maxsize=256)
def torch_order(num_packs: int, num_ranks: int, rounds: int) -> tuple[Turn, ...]:
    """All passes of torch's schedule in a valid order; `num_packs` is a multiple of `num_packs // num_ranks` >= 1."""
    orders = [_of_rank(num_packs, num_ranks, rounds, rank) for rank in range(num_ranks)]
    return tuple(turn for turns in at_a_time(orders, num_ranks * rounds) for turn in turns)


def _of_rank(num_packs: int, num_ranks: int, rounds: int, rank: int) -> list[Turn]:
    group, ahead = _group(num_packs, num_ranks), _ahead(num_packs, num_ranks, rounds, rank)
    passes = [
        (index, first + unit)
        for first in range(0, num_packs, group)
        for index in range(rounds)
        for unit in range(group)
    ]
    forward = [Turn(index * num_ranks + rank, unit, False) for index, unit in passes]
    backward = [Turn((rounds - 1 - index) * num_ranks + rank, unit, True) for index, unit in passes]
    turns = forward[:ahead]
    for here, back in zip(forward[ahead:], backward, strict=False):
        turns += [here, back]
    return [*turns, *backward[len(forward) - ahead :]]


SYNCHRONOUS, PIPEDREAM = "synchronous", "pipedream"
PIPELINE_MODES = (SYNCHRONOUS, PIPEDREAM)
"""`synchronous`: one update a mini-batch, the same on all stages. `pipedream`: one a pack and stage, delayed."""


@dataclass(frozen=True)
class PipeDream:
    """How stages update in this mode.

    Args:
        vertical_sync: Whether all stages use, of each pack, the version that the first stage has.
        max_norm: To what 2-norm a stage scales the gradient of each of its updates down, by itself; None for not.

    Raises:
        HotspaConfigError: the norm is no positive number.
    """

    vertical_sync: bool = False
    max_norm: float | None = None

    def __post_init__(self) -> None:
        if self.max_norm is not None and not (isfinite(self.max_norm) and self.max_norm > 0):
            raise HotspaConfigError(
                f"stages clip to the norm {self.max_norm}", fix="use 1.0, say, or None for no clipping"
            )

    def delays(self, num_stages: int) -> tuple[int, ...]:
        """By stage, how many updates of this mini-batch a full pipeline's pack does not see that a sequential one would."""
        return tuple(num_stages - 1 - (0 if self.vertical_sync else stage) for stage in range(num_stages))

    def most_versions(self, num_stages: int, stage: int, num_packs: int | None = None) -> int:
        """The most versions of its weights that a stage holds at a time, for so many packs; None for any number."""
        most = num_stages if self.vertical_sync else num_stages - stage
        if num_packs is None:
            return most
        return max(
            1, min(most, num_packs - self.delays(num_stages)[stage])
        )  # the last updates come after the last forward

    def pack_versions(self, passes: Passes, stage: int) -> list[int]:
        """For each pack the version of the weights that a stage runs it with, forward and backward. Never falls."""
        done, versions = 0, list[int]()
        for _, is_backward in passes.operations(0 if self.vertical_sync else stage):
            if is_backward:
                done += 1
            else:
                versions.append(done)
        return versions

    def text(self, num_stages: int) -> str:
        """What the mode does to a run, for its log."""
        synced = ", all stages with the weights of the first" if self.vertical_sync else ""
        delays = ", ".join(map(str, self.delays(num_stages)))
        return (
            f"PipeDream: asynchronous 1F1B with weight stashing{synced}; not the synchronous update. Each stage updates after "
            f"the backward pass of every pack. Weights are behind by {delays} packs on stages 0 to {num_stages - 1} (fewer at "
            "the beginning of a mini-batch: the pipeline runs empty at its end)"
        )


def check_pipedream(buckets: Sequence[Bucket], tied: Sequence[str] = (), schedule: str = "auto") -> Strategy:
    """Refuses what stages cannot update by themselves; returns the strategy.

    Args:
        tied: The weights that embedding and head share.

    Raises:
        StrategyError: several strategies, no pipeline, or an option that does not go together with it.
        UnsupportedError: a weight on two stages, or another schedule.
    """
    strategy = buckets[0].strategy
    named = f"hotspa_pipeline_mode={PIPEDREAM}"
    back = f"or hotspa_pipeline_mode={SYNCHRONOUS}"
    if len(buckets) > 1:
        raise StrategyError(
            f"{named} with the strategies {', '.join(str(bucket.strategy) for bucket in buckets)}",
            why="stages update by themselves and at different times, so that there is no one state to switch from",
            fix=f"give one strategy with pp of at least 2, such as pp2:{buckets[-1].longest}, {back}",
        )
    if strategy.pp < 2:
        raise StrategyError(
            f"{named} with the strategy {strategy}",
            why="without stages nothing is in flight",
            fix=f"use pp of at least 2, {back}",
        )
    allowed = Strategy(strategy.dp, strategy.tp, strategy.pp, strategy.sp, strategy.rc)
    if strategy != allowed:
        raise StrategyError(
            f"{named} with the strategy {strategy}",
            why="only dp, tp, pp, +sp and +rc run whole packs with weights that are kept for them",
            fix=f"use {allowed}, {back}",
        )
    if not runs_chunks(schedule):
        raise UnsupportedError(
            f"{named} with the pipeline schedule {schedule}",
            why="torch's schedules do not say when a stage may update",
            fix=f"use the schedule own, {back}",
        )
    if tied:
        raise UnsupportedError(
            f"{named} with the tied weight {tied[0]!r}",
            why="first and last stage both hold it, and would update it at different times to different values",
            fix=f"set tie_word_embeddings=False in the model's config, {back}",
        )
    return strategy
