"""The schedule of a pipeline's packs, and the order in which each stage runs them, within a number of tokens.

Used by the stages and by the cost model that predicts their time and memory. Pure functions, no torch. Arguments:
`tokens` of each unit (a pack or a chunk of one); `most_tokens`, the most tokens in flight on a stage
(`Bucket.most_tokens`), None for no limit; `chains`, the number of units of each chain, in order, empty if each unit is
a chain by itself. No schedule lets a stage hold more tokens than the limit, including padding, except for a single
longer pack.

**One stage on each rank.** Stage s of p in our 1F1B (Narayanan et al., SC'21, section 2.2) runs a
forward pass as long as fewer than p - s packs are in flight, else the oldest backward pass. Packs in flight hold their
activations, so for packs of different sizes a number of tokens limits them, too: a long pack then runs with few or no
others. GPipe runs groups of packs within the limit, one after the other; torch's 1F1B, which knows no limit, is
replaced by ours if its padded packs would exceed it.

A pack cut into chunks of tokens (`+ck`) is a *chain* of units; an uncut pack is a chain of one. Chains run first in,
first out; the chunks of a chain go backward last in, first out, as each needs the gradients of later ones for its keys
and values. All chunks of a chain are forward before the first is backward (Sun et al., 2024, "Seq1F1B"). No stage waits for
itself, even if a message occupies both ends until it is received (`tests/unit/test_pipeline_order.py`): the limit is the
same for all stages, so a stage is at most one forward pass ahead of the next, right before the backward pass that it could
wait for.

**Several stages on each rank (`+v2`)**: interleaved 1F1B. Stage s of p v is on rank s mod p, so a pack goes round the
ranks v times, and a stage is 1 / v as long: the pipeline fills and drains v times as fast, for v times the messages
(bubble (p - 1) / (v m) for m packs). The published schedule requires equal packs and m a multiple of p; ours does not:

* Packs go round in *groups* of p. The last group has the rest, or joins the group before it if that ends sooner; groups
  are smaller if they would exceed the limit. Every rank runs its forward passes in one sequence (a group's packs on its
  first stage, then on its second, ...) and its backward passes in another (from its last stage to its first).
* A simulation of all ranks decides which of the two comes next. A forward pass takes as long as it has tokens, a
  backward pass twice that. Forward and backward alternate if both can run; forward runs as long as the rank holds at
  most 2 (p - 1 - r) + (v - 1) p + 1 passes and stays within the limit. Tokens on one of v stages count 1 / v.

Nothing waits for itself: a rank may always run what its next backward pass needs, whatever it holds. All ranks share
one order, so sends and receives match even if each blocks until its partner arrives
(`tests/unit/test_interleaved_order.py`).

torch's `ScheduleInterleaved1F1B` (`torch_order`) sends packs of one shape round in m // p equal groups, which must divide
m. Ours replaces it for fewer packs than ranks, without equal groups, and if the padded packs in flight would exceed the
limit.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

from hf_hotspa.errors import StrategyError
from hf_hotspa.packing.bucketing import PhasePlan
from hf_hotspa.packing.cuts import cut_for, cut_into_chains
from hf_hotspa.strategy import Strategy

SCHEDULES = ("auto", "own", "1f1b", "gpipe")
"""`own`: our 1F1B, for packs of any sizes; `auto` is the same. `1f1b`, `gpipe`: the schedules of
`torch.distributed.pipelining`, which pad packs to one size. With `+v2` both `own` and `1f1b` are interleaved."""

Operation = tuple[int, bool]  # a pack (or chunk of one), and whether the pass is backward


def runs_chunks(schedule: str) -> bool:
    """Returns whether a schedule supports chunks of packs (`+ck`)."""
    return schedule in ("auto", "own")


def runs_rounds(schedule: str) -> bool:
    """Returns whether a schedule supports several stages on each rank (`+v`)."""
    return schedule != "gpipe"


def wants_one_shape(schedule: str) -> bool:
    """Returns whether a schedule is one of torch's, which need packs of one shape."""
    return schedule in ("1f1b", "gpipe")


def check_runs(schedule: str, strategy: Strategy) -> None:
    """Rejects an unsupported schedule: torch's run whole packs, its GPipe one stage on each rank. Raises `StrategyError`."""
    if strategy.ck and strategy.pp > 1 and not runs_chunks(schedule):
        raise StrategyError(
            f"strategy {strategy} has token chunks, and the pipeline schedule is {schedule}",
            why="chunks of a pack run forward in order and backward in reverse, which torch's schedules do not support",
            fix=f"use the schedule own, or leave +ck{strategy.ck} out",
        )
    if strategy.v > 1 and not runs_rounds(schedule):
        raise StrategyError(
            f"strategy {strategy} has several stages on each rank, and the pipeline schedule is {schedule}",
            why="it runs one stage on each rank",
            fix=f"use the schedule own or 1f1b, which are interleaved then, or leave +v{strategy.v} out",
        )


def backward_order(chains: Sequence[int]) -> list[int]:
    """Returns the units in the order of their backward passes."""
    order: list[int] = []
    for num in chains:
        order += range(len(order) + num - 1, len(order) - 1, -1)
    return order


def most_ahead(chains: Sequence[int], depth: int) -> list[int]:
    """Returns how many forward passes the first stage has begun before each backward pass without a limit; each later
    stage has begun one less.

    A stage runs all of a chain before its first backward pass, and at least one forward pass for each backward pass: no
    stage is more than one pass ahead of the next, so blocking sends do not wait for each other. See `Passes.depth`.
    """
    aheads: list[int] = []
    most = 0
    for num in chains:
        for _ in range(num):
            most = max(most + 1, len(aheads) + num)
            aheads.append(most + depth - 1)
    return aheads


def reaches(tokens: Sequence[int], most_tokens: int | None = None, chains: Sequence[int] = ()) -> list[int]:
    """Returns how many forward passes may have begun before each backward pass, in order: the number k of units so that
    the first k, without those already backward, are within the limit; at least a complete chain."""
    total = len(tokens)
    if most_tokens is None:
        return [total] * total
    ends: list[int] = []
    first = end = in_flight = 0
    for num in chains or [1] * total:
        last = first + num
        while end < last:
            in_flight, end = in_flight + tokens[end], end + 1
        for backward in range(last - 1, first - 1, -1):
            while end < total and in_flight + tokens[end] <= most_tokens:
                in_flight, end = in_flight + tokens[end], end + 1
            ends.append(end)
            in_flight -= tokens[backward]
        first = last
    return ends


def delays(reach: Sequence[int], num_stages: int) -> bool:
    """Returns whether the limit delays a forward pass of the plain schedule (`reach`: see `reaches`)."""
    return any(most < min(len(reach), backward + num_stages) for backward, most in enumerate(reach))


def operations(reach: Sequence[int], num_stages: int, stage: int, chains: Sequence[int] = ()) -> list[Operation]:
    """Returns what a stage, counted from 0, runs, in order (`reach`: see `reaches`)."""
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
    """How a replica's packs run through its stages."""

    kind: str  # `own`, `1f1b` or `gpipe`
    num_stages: int
    tokens: tuple[int, ...]  # of each unit, including padding
    reach: tuple[int, ...]  # see `reaches`
    replaced: bool = False  # whether our schedule runs because the requested one would exceed the limit
    chains: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """How many forward passes the first stage may be ahead; GPipe: up to the limit, on every stage."""
        return len(self.tokens) + self.num_stages if self.kind == "gpipe" else self.num_stages

    def operations(self, stage: int) -> list[Operation]:
        return operations(self.reach, self.depth, stage, self.chains)

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The packs `[first, last + 1)` that complete before the next begin: several groups only with GPipe."""
        if self.kind != "gpipe":
            return [(0, len(self.tokens))] if self.tokens else []
        ends = sorted(set(self.reach))
        return list(zip([0, *ends], ends, strict=False))


def choose_passes(
    schedule: str, tokens: Sequence[int], num_stages: int, most_tokens: int | None = None, chains: Sequence[int] = ()
) -> Passes:
    """Decides how the packs of a replica run, by one of `SCHEDULES`."""
    reach = tuple(reaches(tokens, most_tokens, chains))
    own = Passes("own", num_stages, tuple(tokens), reach, chains=tuple(chains))
    if chains:
        return own
    if schedule == "gpipe" and num_stages > 1 and tokens:
        padded, reach = _groups(tokens, most_tokens)
        return Passes("gpipe", num_stages, padded, reach)
    # torch's 1F1B requires at least as many packs as stages
    if schedule == "1f1b" and len(tokens) >= num_stages:
        padded = (max(tokens),) * len(tokens)
        if not delays(reaches(padded, most_tokens), num_stages):
            return Passes("1f1b", num_stages, padded, tuple(reaches(padded)))
        return replace(own, replaced=True)
    return own


def _groups(tokens: Sequence[int], most_tokens: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of packs padded to the longest of their group, and where each pack's group ends."""
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


_BACKWARD = 2  # time of a backward pass in forward passes, in the model that decides the order


class Turn(NamedTuple):
    """One pass of one pack (or chunk) through one stage."""

    stage: int
    unit: int
    is_backward: bool


def at_a_time(orders: Sequence[Sequence[Turn]], num_stages: int) -> list[list[Turn]]:
    """Groups the passes of several ranks, each in its order, into lists that can run at the same time: one a rank."""
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
    """Returns all passes of a replica, with backward ones if `is_trained`, in the one order of all ranks of its
    pipeline (at least 2), with `rounds` stages on each."""
    sizes = tuple(chains) or (1,) * len(tokens)
    return _order(tuple(tokens), num_ranks, rounds, most_tokens if is_trained else None, sizes, is_trained)


@lru_cache(maxsize=256)
def _order(
    tokens: tuple[int, ...], num_ranks: int, rounds: int, most: int | None, chains: tuple[int, ...], is_trained: bool
) -> tuple[Turn, ...]:
    groups: list[_Group] = []
    first = 0  # first unit of the open group
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
    runs = (_Run(tokens, num_ranks, rounds, most, each, is_trained) for each in tried)
    return tuple(min(runs, key=lambda run: run.seconds).turns)


_Group = list[int]  # the units of each chain of a group


def _holds(group: Sequence[int], tokens: Sequence[int], rounds: int, most: int | None) -> bool:
    """Whether a group is within the limit at its first backward pass: all of it is then held on all stages of a rank
    but the last, and one chain there. `tokens` begin with the group's."""
    if most is None:
        return True
    own = [sum(tokens[end - num : end]) for num, end in zip(group, accumulate(group), strict=True)]
    return (rounds - 1) * sum(own) + max(own) <= rounds * most


@dataclass
class _Rank:
    """A rank's place in its two sequences, and the tokens that it holds."""

    most_passes: int
    num_forward: int = 0
    num_backward: int = 0
    held_tokens: int = 0
    free_at: int = 0
    was_forward: bool = False


class _Run:
    """Simulates all ranks: `turns` in the order of their ends, and `seconds` until the last end."""

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
        self._needed: list[int] = []  # forward passes of its rank before each backward pass
        self._ends: dict[Turn, int] = {}
        self._queue(groups, is_trained)
        largest = max([num_ranks, *map(sum, groups)])
        longest = max((num for group in groups for num in group), default=1)
        ahead = (rounds - 1) * largest + longest
        self._ranks = [_Rank(2 * (num_ranks - 1 - rank) + ahead) for rank in range(num_ranks)]
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
                rank.held_tokens += -tokens if turn.is_backward else tokens
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
        if self._backward and rank.num_forward >= self._needed[rank.num_backward]:
            is_full = rank.num_forward - rank.num_backward >= rank.most_passes
            if is_full or (self._most is not None and rank.held_tokens + self._tokens[unit] > self._most):
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
    """How a replica's packs run, with several stages on each rank."""

    kind: str  # `own` or `1f1b` (torch's)
    tokens: tuple[int, ...]  # of each unit, including padding
    order: tuple[Turn, ...]  # all passes, each after the passes it needs; each rank runs its own in this order
    replaced: bool = False  # whether our schedule runs because the requested one would exceed the limit


def choose_interleaved(
    schedule: str,
    tokens: Sequence[int],
    num_ranks: int,
    rounds: int,
    most_tokens: int | None = None,
    chains: Sequence[int] = (),
) -> InterleavedPasses:
    """Decides how a replica's packs run by a schedule that `check_runs` allows; otherwise as `interleaved_order`."""
    total, replaced = len(tokens), False
    if schedule == "1f1b" and total >= num_ranks and total % (total // num_ranks) == 0:
        longest = max(tokens)
        passes = min(_ahead(total, num_ranks, rounds, 0) + 1, total * rounds)  # in flight, 1 / rounds of a pack each
        if most_tokens is None or passes * longest <= rounds * most_tokens:
            return InterleavedPasses("1f1b", (longest,) * total, torch_order(total, num_ranks, rounds))
        replaced = True
    order = interleaved_order(tokens, num_ranks, rounds, most_tokens, chains)
    return InterleavedPasses("own", tuple(tokens), order, replaced)


def _group(num_packs: int, num_ranks: int) -> int:
    return num_packs // max(1, num_packs // num_ranks)


def _ahead(num_packs: int, num_ranks: int, rounds: int, rank: int) -> int:
    return min((rounds - 1) * _group(num_packs, num_ranks) + 2 * (num_ranks - 1 - rank), num_packs * rounds)


@lru_cache(maxsize=256)
def torch_order(num_packs: int, num_ranks: int, rounds: int) -> tuple[Turn, ...]:
    """Returns torch's schedule in a valid order: rank r begins with (v - 1) g + 2 (p - 1 - r) forward passes for groups of
    g, then alternates forward and backward. `num_packs` is a multiple of `num_packs // num_ranks` >= 1."""
    orders = [_rank_turns(num_packs, num_ranks, rounds, rank) for rank in range(num_ranks)]
    return tuple(turn for turns in at_a_time(orders, num_ranks * rounds) for turn in turns)


def _rank_turns(num_packs: int, num_ranks: int, rounds: int, rank: int) -> list[Turn]:
    group, ahead = _group(num_packs, num_ranks), _ahead(num_packs, num_ranks, rounds, rank)
    groups = [range(first, first + group) for first in range(0, num_packs, group)]
    passes = [each for units in groups for each in product(range(rounds), units)]
    forward = [Turn(index * num_ranks + rank, unit, False) for index, unit in passes]
    backward = [Turn((rounds - 1 - index) * num_ranks + rank, unit, True) for index, unit in passes]
    turns = forward[:ahead]
    for here, back in zip(forward[ahead:], backward, strict=False):
        turns += [here, back]
    return [*turns, *backward[len(forward) - ahead :]]


# -- the passes of all replicas together -------------------------------------------------------------------------------

# All replicas of a fully sharded strategy load a unit's weights together and return its gradients together, so replicas
# with different packs must agree in which pass they meet: the first pack of every replica, then the second, and so on; a
# replica with fewer packs skips a pass. A pack in chunks of tokens is several passes; if some replicas go forward next and
# others backward, forward passes come first.
#
# In a pipeline replicas meet chunk by chunk: the first chunk of the first chain of every replica's first pack, and so on;
# a replica without such a chunk skips it. Stages run them in our own 1F1B, so each replica keeps its chunk order on every
# stage: forward in token order, backward in reverse (`JointPasses`).

Lengths = Sequence[int]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward pass over the units of a stage, and the replicas (dp coordinates) that compute in it."""

    stage: int
    is_backward: bool
    replicas: tuple[int, ...]


Beat = tuple[Pass, ...]  # passes of different stages that run at the same time


def pack_lengths(phase: PhasePlan) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns the lengths in every pack of every replica: all that the order of passes depends on."""
    return tuple(tuple(pack.lengths for pack in packs) for packs in phase.replicas)


@dataclass(frozen=True)
class JointPasses:
    """The packs, or chunks, that all replicas of a pipeline run together: each pass as large as the largest of any
    replica, and the replicas that take part in it."""

    passes: Passes
    replicas: tuple[tuple[int, ...], ...]

    def operations(self, stage: int, replica: int) -> list[Operation]:
        """Returns what a stage of a replica runs, in order, by the replica's numbers of packs (or chunks)."""
        having = (unit for unit, replicas in enumerate(self.replicas) if replica in replicas)
        own = {unit: number for number, unit in enumerate(having)}
        return [(own[unit], is_backward) for unit, is_backward in self.passes.operations(stage) if unit in own]


def joint_passes(
    strategy: Strategy, replicas: Sequence[Sequence[Lengths]], most_tokens: int | None, pair_cost: float
) -> JointPasses:
    """Plans the passes of packs, or of their chunks, with all replicas together (arguments: see `beats`)."""
    tokens: list[int] = []
    sizes: list[int] = []
    having: list[tuple[int, ...]] = []
    for index in range(max(map(len, replicas), default=0)):
        cut = {
            r: [[stop - first for first, stop in chain] for chain in cut_for(strategy, packs[index], pair_cost)]
            if strategy.ck
            else [[sum(packs[index])]]
            for r, packs in enumerate(replicas)
            if index < len(packs)
        }
        for chain in range(max(map(len, cut.values()))):
            met = {r: chains[chain] for r, chains in cut.items() if chain < len(chains)}
            sizes.append(max(map(len, met.values())))
            for at in range(sizes[-1]):
                there = {r: chunks[at] for r, chunks in met.items() if at < len(chunks)}
                tokens.append(max(there.values()))
                having.append(tuple(there))
    chains = sizes if strategy.ck else ()
    return JointPasses(choose_passes("own", tokens, strategy.pp, most_tokens, chains), tuple(having))


def beats(
    strategy: Strategy,
    replicas: Sequence[Sequence[Lengths]],
    most_tokens: int | None = None,
    is_trained: bool = True,
    pair_cost: float = 0.0,
) -> list[Beat]:
    """Returns all passes of a phase, with backward ones if `is_trained`. See `pack_lengths` for `replicas`; for
    pipelines, `pipeline_order` for `most_tokens` and `cut_into_chains` for `pair_cost`."""
    if strategy.pp > 1:
        return _stage_beats(strategy, joint_passes(strategy, replicas, most_tokens, pair_cost), is_trained)
    return _chunk_beats([_passes(strategy, packs, is_trained) for packs in replicas])


def _passes(strategy: Strategy, packs: Sequence[Lengths], is_trained: bool) -> list[bool]:
    passes: list[bool] = []
    for lengths in packs:
        for chunks in map(len, cut_into_chains(lengths, strategy.ck)) if strategy.ck else (1,):
            again = max(chunks - 1 - strategy.kg, 0)
            passes += [False] * chunks
            if is_trained:
                passes += [True] * (chunks - again) + [False, True] * again
    return passes


def _chunk_beats(replicas: Sequence[Sequence[bool]]) -> list[Beat]:
    beats: list[Beat] = []
    at = [0] * len(replicas)
    while left := [r for r, passes in enumerate(replicas) if at[r] < len(passes)]:
        forward = [r for r in left if not replicas[r][at[r]]]
        now = tuple(forward or left)
        beats.append((Pass(0, not forward, now),))
        for r in now:
            at[r] += 1
    return beats


def _stage_beats(strategy: Strategy, joint: JointPasses, is_trained: bool) -> list[Beat]:
    forward = [(unit, False) for unit in range(len(joint.replicas))]
    orders = [
        [Turn(stage, *operation) for operation in (joint.passes.operations(stage) if is_trained else forward)]
        for stage in range(strategy.pp)
    ]
    return [
        tuple(Pass(turn.stage, turn.is_backward, joint.replicas[turn.unit]) for turn in turns)
        for turns in at_a_time(orders, strategy.pp)
    ]
