"""Plans a mini-batch from its rows: over-long rows, buckets, packs.

`plan_mini_batch` is a pure function of plain data: every rank computes the same result. It reads lengths, never rows.

Policies for a row with more tokens than the longest bucket takes:

* ``error``: raises an error that names the row.
* ``truncate``: trains the first `longest` tokens only.
* ``split``: trains pieces of `longest` tokens (the last one shorter) as separate sequences that do not see each other.
  Nothing predicts the first token of a piece, so it carries no label. A last piece of one token is planned and counted
  like any other and weighs nothing in the loss.
* ``drop``: leaves the row out.

The plan counts every use of a policy. Rows of one token are sequences without a label. Rows without tokens are left out
under every policy and counted as empty. In packed rows each document is a separate sequence: bucketed, cut and counted
by its own length, and never joined with another.
"""

import hashlib
import heapq
from bisect import bisect_left, insort
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from hf_hotspa.errors import HotspaConfigError, OverlongError, check_choice
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.strategy import Bucket, Strategy
from hf_hotspa.typed import Positive

# -- plans ------------------------------------------------------------------------------------------------------------

# Value types, frozen, without tensors or processes: which slices of which rows run where. The same on every rank; ranks
# compare `MiniBatchPlan.digest` to prove it.


_count = object.__setattr__  # sets a field that a frozen value computes when it is made


@dataclass(frozen=True, slots=True)
class Sequence:
    """The slice ``[start, stop)`` of one dataset row, trained as a separate sequence."""

    row: int
    start: int
    stop: int  # above `start`
    # tokens that count in the loss: ``labels[start + 1:stop] != -100``. Nothing predicts the first token of a
    # sequence, so it never counts
    num_labels: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Pack:
    """The concatenated sequences of one micro-batch; `lengths` are their tokens. Never empty."""

    sequences: tuple[Sequence, ...]
    lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)
    num_tokens: int = field(init=False, repr=False, compare=False)
    num_labels: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths, num_labels = list[int](), 0
        for sequence in self.sequences:
            lengths.append(sequence.stop - sequence.start)
            num_labels += sequence.num_labels
        _count(self, "lengths", tuple(lengths))
        _count(self, "num_tokens", sum(lengths))
        _count(self, "num_labels", num_labels)


@dataclass(frozen=True)
class PhasePlan:
    """What one bucket runs: packs by replica, in dp order. A replica may have fewer packs than others, or none."""

    bucket: Bucket
    replicas: tuple[tuple[Pack, ...], ...]
    num_packs: int = field(init=False, repr=False, compare=False)
    num_sequences: int = field(init=False, repr=False, compare=False)
    num_tokens: int = field(init=False, repr=False, compare=False)
    num_labels: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        dp = self.bucket.strategy.dp
        assert len(self.replicas) == dp, f"{len(self.replicas)} replicas planned for dp{dp}"
        num_packs = num_sequences = num_tokens = num_labels = 0
        for packs in self.replicas:
            num_packs += len(packs)
            for pack in packs:
                num_sequences += len(pack.sequences)
                num_tokens += pack.num_tokens
                num_labels += pack.num_labels
        _count(self, "num_packs", num_packs)
        _count(self, "num_sequences", num_sequences)
        _count(self, "num_tokens", num_tokens)
        _count(self, "num_labels", num_labels)

    def sequences(self) -> Iterator[Sequence]:
        """Yields all sequences: replica by replica, pack by pack."""
        for packs in self.replicas:
            for pack in packs:
                yield from pack.sequences


@dataclass(frozen=True)
class MiniBatchPlan:
    """What one optimizer step trains."""

    phases: tuple[PhasePlan, ...]  # for each bucket with sequences, in the order of the buckets
    num_labels: int  # label tokens of the mini-batch: the N of the loss `sum(CE) / N`. May be zero
    num_rows: int  # rows of the mini-batch, including empty and dropped ones
    num_truncated: int = 0  # rows (of packed rows: documents) of which only the beginning is trained
    num_split: int = 0  # rows or documents cut into several sequences
    num_dropped: int = 0  # over-long rows or documents left out
    num_empty: int = 0  # rows without tokens, left out

    def __post_init__(self) -> None:
        counted = 0
        for phase in self.phases:
            counted += phase.num_labels
        # A wrong N scales every gradient of the step without any other symptom.
        assert counted == self.num_labels, f"the phases hold {counted} label tokens and N is {self.num_labels}"

    def sequences(self) -> Iterator[Sequence]:
        """Yields all sequences, phase by phase."""
        for phase in self.phases:
            yield from phase.sequences()

    @property
    def num_sequences(self) -> int:
        return sum(phase.num_sequences for phase in self.phases)

    @property
    def num_tokens(self) -> int:
        return sum(phase.num_tokens for phase in self.phases)

    def digest(self) -> str:
        """Returns the hex sha256 of the plan."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


# -- packs ------------------------------------------------------------------------------------------------------------

# Costs in a pack add up (`sequence_cost`), because packed sequences do not attend to each other. Five deterministic steps,
# ties by index:
#
# 1. Best-fit decreasing on tokens: a feasible packing with few packs.
# 2. Raise the number of packs to balance replicas: to a multiple of dp, and for a pipeline to dp * pp (fewer leave
#    stages idle) while packs keep `MIN_PIPELINE_PACK_TOKENS` on average. Never more than sequences.
# 3. Longest first, each sequence goes to the cheapest pack that has room. If that fails (packs nearly full), keep the
#    packs of step 1 and halve the costliest up to the number of step 2.
# 4. Packs go to replicas, costliest first, each to the replica with the least cost so far.
# 5. A pipeline of three packs or more begins with its second cheapest: later stages wait for the complete first forward
#    pass, earlier ones for the complete last backward pass (1 to 5 % of a phase, by `costs.time`).
#
# If replicas differ in speed (`Speeds`), each sequence, longest first, goes to the replica that would finish it
# first; each replica then packs its own.
#
# In a pipeline a sequence above the capacity, up to a given length, has a pack to itself.
#
# Promises: no pack of several sequences exceeds the capacity; every sequence is in exactly one pack; no pack is empty;
# a replica's packs come in descending cost, except for step 5 (large packs run early, so that a lack of memory shows).
# O(n log n).


MIN_PIPELINE_PACK_TOKENS = 256
"""Least mean tokens of packs that are made smaller only to fill a pipeline: below, a stage is bound by launch overhead
and a shorter bubble gains nothing."""

Packs = list[list[int]]


@dataclass(frozen=True)
class Speeds:
    """Speeds that divide packs over replicas."""

    ranks: tuple[Positive, ...]  # the speed of each rank, relative to each other
    # if pipeline stages are also partitioned by speed, the work of each stage relative to its pipeline's mean: one
    # tuple per depth, with one entry per stage
    loads: tuple[tuple[Positive, ...], ...] = ()
    # if tensor-parallel groups also divide MLPs by speed, the work of each rank relative to an even share: one tuple
    # per degree of tp, after the degree
    works: tuple[tuple[int, tuple[Positive, ...]], ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks or any(len(own) != len(self.ranks) for _, own in self.works):
            raise ValueError("works of another number of ranks")

    def replica_speeds(self, strategy: Strategy) -> tuple[float, ...] | None:
        """The speed of each replica, which is its slowest rank's; None if all are equally fast."""
        if strategy.dp == 1:
            return None
        stages, pp = strategy.num_stages, strategy.pp
        loads = next((loads for loads in self.loads if len(loads) == stages), (1.0,) * stages)
        of_ranks = [sum(loads[rank::pp]) / strategy.v for rank in range(pp)]  # stage s is on rank s mod pp
        slowest = [float("inf")] * strategy.dp
        works = dict(self.works).get(strategy.tp, (1.0,) * len(self.ranks))
        for rank, (speed, work) in enumerate(zip(self.ranks, works, strict=True)):
            coord = strategy.coord(rank)
            slowest[coord.dp] = min(slowest[coord.dp], speed / (of_ranks[coord.pp] * work))
        return tuple(slowest) if len(set(slowest)) > 1 else None


def sequence_cost(num_tokens: int, quadratic_cost: float) -> float:
    """Returns the cost of one sequence, in units of the linear cost of a token."""
    return num_tokens + quadratic_cost * num_tokens * num_tokens


def pack_sequences(
    lengths: abc.Sequence[int],  # tokens of each sequence, each at least 1
    *,
    capacity: int,  # most tokens of a pack
    dp: int = 1,
    pp: int = 1,
    quadratic_cost: float = 0.0,  # cost of a pair of tokens relative to the cost of one token
    longest: int = 0,  # a sequence above the capacity that is no longer than this has a pack to itself
    speeds: abc.Sequence[float] | None = None,  # relative speed of each replica; None if they are equal
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Packs sequences and assigns the packs to replicas. Returns `replicas[dp coordinate][pack]` = indices into
    `lengths`. A replica may hold no pack. Raises `OverlongError`: a sequence is longer than both the capacity and
    `longest`."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # equal lengths in their order
    if order and lengths[order[0]] > max(capacity, longest):
        raise OverlongError(
            f"a sequence of {lengths[order[0]]} tokens does not fit into a pack of {capacity}",
            where=f"sequence {order[0]} of the bucket",
            fix=f"raise the pack tokens of the bucket to at least {lengths[order[0]]}",
        )
    costs: list[float] = []
    for length in lengths:
        costs.append(length + quadratic_cost * length * length)  # `sequence_cost`
    if speeds is not None:
        pack = partial(pack_sequences, capacity=capacity, pp=pp, quadratic_cost=quadratic_cost, longest=longest)
        shares = divide_by_speed(order, costs, speeds)
        own = [(share, pack([lengths[i] for i in share])[0]) for share in shares]
        return tuple(tuple(tuple(map(share.__getitem__, one)) for one in packs) for share, packs in own)
    alone, fitted = list[list[int]](), list[list[int]]()
    for i in order:
        if lengths[i] <= capacity:
            break
        alone.append([i])
    rest, facts = order[len(alone) :], (len(order), sum(lengths), dp, pp)
    least, most = _fitted_between(rest, lengths, capacity)
    target = _num_packs(len(alone) + least, *facts)
    if target != _num_packs(len(alone) + most, *facts):
        fitted = _best_fit(rest, lengths, capacity)
        target = _num_packs(len(alone) + len(fitted), *facts)
    target -= len(alone)
    packs = _cheapest_that_fits(rest, lengths, costs, capacity, target)
    if not packs:
        packs = _halve_to(fitted or _best_fit(rest, lengths, capacity), costs, target)
    replicas = _to_replicas(alone + packs, costs, dp)
    if pp == 1:
        return replicas
    most_tokens = Bucket(Strategy(pp=pp), longest, capacity).most_tokens
    return tuple(_filling_soon(replica, lengths, most_tokens) for replica in replicas)


def divide_by_speed(order: abc.Sequence[int], costs: abc.Sequence[float], speeds: abc.Sequence[float]) -> Packs:
    """Assigns each sequence to the replica that would finish it first; a replica's sequences stay in order. No replica
    is left without work if there is enough: its recovery would go unnoticed."""
    shares: Packs = [[] for _ in speeds]
    loads = [0.0] * len(speeds)
    for i in order:
        replica = min(range(len(speeds)), key=lambda r: ((loads[r] + costs[i]) / speeds[r], r))
        shares[replica].append(i)
        loads[replica] += costs[i]
    for share in shares:
        if not share and len(fullest := max(shares, key=len)) > 1:
            share.append(fullest.pop())  # its shortest
    return [sorted(share) for share in shares]


def _best_fit(order: abc.Sequence[int], lengths: abc.Sequence[int], capacity: int) -> Packs:
    packs: Packs = []
    free: list[tuple[int, int]] = []  # (free tokens, pack), ascending
    for i in order:
        length = lengths[i]
        at = bisect_left(free, (length, -1))
        if at < len(free):
            left, pack = free.pop(at)
        else:
            left, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(i)
        insort(free, (left - length, pack))
    return packs


def _fitted_between(order: abc.Sequence[int], lengths: abc.Sequence[int], capacity: int) -> tuple[int, int]:
    """Bounds the number of packs that `_best_fit` makes. A sequence of l tokens opens a pack if all others have less
    than l left, so they hold `capacity - l + 1` tokens each."""
    if not order:
        return 0, 0
    placed = at_most = large = 0
    for index, i in enumerate(order):
        length = lengths[i]
        if 2 * length > capacity:
            large = at_most = index + 1
        elif (number := placed // (capacity - length + 1) + 1) > at_most:
            at_most = number
        placed += length
    return max(large, -(-placed // capacity)), at_most


def _num_packs(num_fitted: int, num_sequences: int, num_tokens: int, dp: int, pp: int) -> int:
    target = -(-num_fitted // dp) * dp
    if pp > 1:
        affordable = num_tokens // MIN_PIPELINE_PACK_TOKENS // dp * dp
        target = max(target, min(dp * pp, affordable))
    if target <= num_sequences:
        return target
    multiple = num_sequences // dp * dp
    return multiple if multiple >= num_fitted else num_sequences


def _cheapest_that_fits(
    order: abc.Sequence[int], lengths: abc.Sequence[int], costs: abc.Sequence[float], capacity: int, num_packs: int
) -> Packs | None:
    """Puts each sequence, longest first, into the cheapest pack that has room; None if a sequence finds no room.

    A pack without room waits aside, by free tokens. Lengths only fall, so once it has room it keeps it until it gets a
    sequence: each pack moves at most once for each sequence placed.
    """
    packs: Packs = []
    free: list[int] = []
    ready: list[tuple[float, int]] = []  # heap by cost
    for number in range(num_packs):  # the first sequences have a pack each
        pack = list(order[number : number + 1])
        packs.append(pack)
        free.append(capacity - lengths[pack[0]] if pack else capacity)
        ready.append((costs[pack[0]] if pack else 0.0, number))
    heapq.heapify(ready)
    aside: list[tuple[int, int, float]] = []  # heap by -free
    for i in order[num_packs:]:
        length = lengths[i]
        while aside and -aside[0][0] >= length:
            _, number, cost = heapq.heappop(aside)
            heapq.heappush(ready, (cost, number))
        while ready and free[ready[0][1]] < length:
            cost, number = heapq.heappop(ready)
            heapq.heappush(aside, (-free[number], number, cost))
        if not ready:
            return None
        cost, number = ready[0]
        packs[number].append(i)
        free[number] -= length
        heapq.heapreplace(ready, (cost + costs[i], number))
    return packs


def _halve_to(packs: Packs, costs: abc.Sequence[float], target: int) -> Packs:
    packs = [list(pack) for pack in packs]
    heap = [(-sum(costs[i] for i in pack), index) for index, pack in enumerate(packs) if len(pack) > 1]
    heapq.heapify(heap)
    while len(packs) < target:
        # one can always be halved: `target` is at most the number of sequences
        _, index = heapq.heappop(heap)
        halves: Packs = [[], []]
        loads = [0.0, 0.0]
        for i in packs[index]:
            lighter = int(loads[1] < loads[0])
            halves[lighter].append(i)
            loads[lighter] += costs[i]
        packs[index] = halves[0]
        packs.append(halves[1])
        for at, half, load in ((index, halves[0], loads[0]), (len(packs) - 1, halves[1], loads[1])):
            if len(half) > 1:
                heapq.heappush(heap, (-load, at))
    return packs


def _to_replicas(packs: Packs, costs: abc.Sequence[float], dp: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    pack_costs: list[float] = []
    for pack in packs:
        pack_costs.append(sum(map(costs.__getitem__, pack)))
    replicas: list[list[tuple[int, ...]]] = []
    for _ in range(dp):
        replicas.append([])
    loads = [*zip([0.0] * dp, range(dp), strict=True)]
    for number in sorted(range(len(packs)), key=pack_costs.__getitem__, reverse=True):
        load, replica = loads[0]
        replicas[replica].append(tuple(packs[number]))
        heapq.heapreplace(loads, (load + pack_costs[number], replica))
    return tuple(map(tuple, replicas))


def _filling_soon(
    packs: tuple[tuple[int, ...], ...], lengths: abc.Sequence[int], most_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Moves the second cheapest of descending packs to the front, if enough packs fill a pipeline.

    Not before a pack that must run alone (`packing.pipeline_order`): that would wait for both to end.
    """
    if len(packs) < 3 or sum(lengths[i] for pack in (packs[0], packs[-2]) for i in pack) > most_tokens:
        return packs
    return (packs[-2], *packs[:-2], packs[-1])


# -- buckets ----------------------------------------------------------------------------------------------------------


OVERLONG_POLICIES = ("error", "truncate", "split", "drop")  # the values of `policy`


def check_lengths(table: SequenceTable, longest: int, policy: str, chosen: bool = False) -> None:
    """Checks the table before training starts, under the policy `error`; other policies accept any length. `longest`:
    the longest bucket. `chosen`: whether `hotspa_strategies="auto"` chose the buckets, which changes the fix in the
    message. Raises `HotspaConfigError`: unknown policy. Raises `OverlongError`: naming the longest row, and how many
    are over the limit."""
    check_choice("the policy for over-long sequences", policy, OVERLONG_POLICIES)
    lengths = table.longest_of_rows
    if policy == "error" and int(lengths.max()) > longest:
        num_over = int((lengths > longest).sum())
        row = int(lengths.argmax())
        remedy = _AUTO if chosen else _GIVEN
        raise _overlong(row, int(lengths[row]), longest, f"{num_over} of {len(table)} rows are over the limit", remedy)


def cut_rows(
    rows: abc.Iterable[int], table: SequenceTable, longest: int, policy: str = "error"
) -> tuple[list[Sequence], dict[str, int]]:
    """Turns rows into sequences of at most `longest` tokens, the longest bucket's. Returns the sequences, in the order of
    the rows, and the counters of `MiniBatchPlan` by name. Raises `HotspaConfigError`: unknown policy. Raises
    `OverlongError`: policy `error` and a row over the limit."""
    if policy not in OVERLONG_POLICIES:
        check_choice("the policy for over-long sequences", policy, OVERLONG_POLICIES)
    rows = list(rows)
    lengths: list[int] = table.lengths[rows].tolist()
    labels: list[int] = table.label_counts[rows].tolist()
    packed = len(table.cuts) > 0
    sequences: list[Sequence] = []
    counts = dict.fromkeys(("num_truncated", "num_split", "num_dropped", "num_empty"), 0) | {"num_rows": len(rows)}
    for row, row_length, row_labels in zip(rows, lengths, labels, strict=True):
        if row_length == 0:
            counts["num_empty"] += 1
            continue
        for first, end in table.documents(row) if packed else ((0, row_length),):
            length = end - first
            if length <= longest:
                num_labels = row_labels if length == row_length else table.num_labels(row, first, end)
                sequences.append(Sequence(row, first, end, num_labels))
            elif policy == "error":
                raise _overlong(row, length, longest, "no bucket takes it", f"{_GIVEN} (under auto: {_AUTO})")
            elif policy == "drop":
                counts["num_dropped"] += 1
            elif policy == "truncate":
                counts["num_truncated"] += 1
                stop = first + longest
                sequences.append(Sequence(row, first, stop, table.num_labels(row, first, stop)))
            else:
                counts["num_split"] += 1
                for start in range(first, end, longest):
                    stop = min(start + longest, end)
                    sequences.append(Sequence(row, start, stop, table.num_labels(row, start, stop)))
    return sequences, counts


def plan_mini_batch(
    rows: abc.Iterable[int],  # dataset rows, in order
    table: SequenceTable,
    buckets: tuple[Bucket, ...],  # in any order, which the phases keep
    *,
    quadratic_cost: float = 0.0,  # see `ModelShape.quadratic_cost`
    policy: str = "error",
    speeds: Speeds | None = None,  # if some ranks are slow: divides packs over replicas
) -> MiniBatchPlan:
    """Plans one mini-batch. Pure: the same arguments give the same plan on every rank.

    A sequence goes to the shortest bucket that takes it; a bucket's sequences stay in their order. Raises
    `HotspaConfigError`: no bucket, or an unknown policy. Raises `OverlongError`: policy `error` and a row over the limit.
    """
    if not buckets:
        raise HotspaConfigError("there is no bucket", fix="name at least one, such as dp1:2048")
    longest, members = list[int](), list[list[Sequence]]()
    for bucket in buckets:
        longest.append(bucket.longest)
        members.append([])
    by_length, edges = sorted(range(len(buckets)), key=longest.__getitem__), sorted(longest)
    sequences, counts = cut_rows(rows, table, edges[-1], policy)
    num_labels, phases = 0, list[PhasePlan]()
    for sequence in sequences:
        num_labels += sequence.num_labels
        members[by_length[bisect_left(edges, sequence.stop - sequence.start)]].append(sequence)
    for bucket, own in zip(buckets, members, strict=True):
        if not own:
            continue
        lengths = list[int]()
        for sequence in own:
            lengths.append(sequence.stop - sequence.start)
        replicas = pack_sequences(
            lengths,
            capacity=bucket.pack_tokens,
            dp=bucket.strategy.dp,
            pp=bucket.strategy.pp,
            quadratic_cost=quadratic_cost,
            longest=bucket.longest,
            speeds=speeds.replica_speeds(bucket.strategy) if speeds is not None else None,
        )
        packed = list[tuple[Pack, ...]]()
        for packs in replicas:
            of_replica = list[Pack]()
            for pack in packs:
                of_replica.append(Pack(tuple(map(own.__getitem__, pack))))
            packed.append(tuple(of_replica))
        phases.append(PhasePlan(bucket, tuple(packed)))
    return MiniBatchPlan(tuple(phases), num_labels, **counts)


_GIVEN = "let the last bucket of hotspa_strategies take {} tokens"
_AUTO = "raise hotspa_longest to {} or leave it out"


def _overlong(row: int, length: int, longest: int, why: str, remedy: str) -> OverlongError:
    return OverlongError(
        f"a sequence of {length} tokens is longer than the longest bucket, {longest} tokens",
        where=f"dataset row {row}",
        why=why,
        fix=f"set hotspa_overlong to truncate, split or drop, or {remedy.replace('{}', str(length))}",
    )
