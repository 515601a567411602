"""From the rows of a mini-batch to its plan: over-long rows, buckets, packs.

Owns the policies for rows longer than the longest bucket, the choice of the bucket of a sequence, and
`plan_mini_batch`, a pure function of plain data which every rank computes for itself with the same result. It reads the
scanned lengths only, never the rows.

Policies for a row of more tokens than the longest bucket takes:

* ``error``: refused by name.
* ``truncate``: the first `longest` tokens are trained, the rest is not.
* ``split``: pieces of `longest` tokens (the last one shorter), each trained as a sequence of its own that does not see
  the others. The first token of a piece has nothing before it in that piece, so it carries no label. Should the last
  piece be a single token, it is planned and counted like any other and weighs nothing in the loss.
* ``drop``: the row is left out.

Every use of a policy is counted in the plan. Rows of one token are sequences without a label. Rows without any token
are left out under every policy and counted as empty. Where rows are packed already, each of their documents is a sequence
of its own: in a bucket by its own length, cut and counted by its own length, never joined with another.
"""

from bisect import bisect_left
from collections.abc import Iterable

from hf_hotspa.errors import HotspaConfigError, OverlongError, check_choice
from hf_hotspa.packing.mini_batch import MiniBatchPlan, Pack, PhasePlan, Sequence
from hf_hotspa.packing.packs import pack_sequences
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.stragglers.speeds import Speeds
from hf_hotspa.strategy import Bucket

OVERLONG_POLICIES = ("error", "truncate", "split", "drop")
"""The `policy` of the functions here."""


def check_lengths(table: SequenceTable, longest: int, policy: str, chosen: bool = False) -> None:
    """Under the policy `error`, looks at the whole table before training starts; other policies accept any length.

    Args:
        longest: The longest bucket.
        chosen: Whether the buckets are those of `hotspa_strategies="auto"`: the message says what to change.

    Raises:
        HotspaConfigError: unknown policy.
        OverlongError: naming the longest row, and how many are over the limit.
    """
    check_choice("the policy for over-long sequences", policy, OVERLONG_POLICIES)
    lengths = table.longest_of_rows
    if policy == "error" and int(lengths.max()) > longest:
        num_over = int((lengths > longest).sum())
        row = int(lengths.argmax())
        remedy = _AUTO if chosen else _GIVEN
        raise _overlong(row, int(lengths[row]), longest, f"{num_over} of {len(table)} rows are over the limit", remedy)


def cut_rows(
    rows: Iterable[int], table: SequenceTable, longest: int, policy: str = "error"
) -> tuple[list[Sequence], dict[str, int]]:
    """Turns rows into sequences of at most `longest` tokens.

    Args:
        rows: Dataset rows, in the order of the mini-batch.
        longest: The longest bucket.

    Returns:
        The sequences, in the order of the rows, and what it took: the counters of `MiniBatchPlan` by name.

    Raises:
        HotspaConfigError: unknown policy.
        OverlongError: policy `error` and a row over the limit.
    """
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
                whole = length == row_length
                num_labels = row_labels if whole else table.num_labels(row, first, end)
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


def assign_buckets(sequences: Iterable[Sequence], buckets: tuple[Bucket, ...]) -> tuple[tuple[Sequence, ...], ...]:
    """The sequences of each bucket, in the order given; a sequence goes to the shortest bucket that takes it.

    Args:
        sequences: None longer than the longest bucket.
        buckets: In any order; the result has the same one.
    """
    by_length = sorted(range(len(buckets)), key=lambda b: buckets[b].longest)
    edges = [buckets[b].longest for b in by_length]
    members: list[list[Sequence]] = [[] for _ in buckets]
    for sequence in sequences:
        members[by_length[bisect_left(edges, sequence.num_tokens)]].append(sequence)
    return tuple(tuple(m) for m in members)


def plan_mini_batch(
    rows: Iterable[int],
    table: SequenceTable,
    buckets: tuple[Bucket, ...],
    *,
    quadratic_cost: float = 0.0,
    policy: str = "error",
    speeds: Speeds | None = None,
) -> MiniBatchPlan:
    """Plans one mini-batch. Pure: the same arguments give the same plan on every rank.

    Args:
        rows: Dataset rows of the mini-batch, in order.
        buckets: Phases come in their order.
        quadratic_cost: See `ModelShape.quadratic_cost`.
        speeds: Where some ranks are slow, by what packs are divided over replicas.

    Raises:
        HotspaConfigError: no bucket, or an unknown policy.
        OverlongError: policy `error` and a row over the limit.
    """
    if not buckets:
        raise HotspaConfigError("there is no bucket", fix="name at least one, such as dp1:2048")
    sequences, counts = cut_rows(rows, table, max(b.longest for b in buckets), policy)
    phases = []
    for bucket, members in zip(buckets, assign_buckets(sequences, buckets), strict=True):
        if not members:
            continue
        replicas = pack_sequences(
            [s.num_tokens for s in members],
            capacity=bucket.pack_tokens,
            dp=bucket.strategy.dp,
            pp=bucket.strategy.pp,
            quadratic_cost=quadratic_cost,
            longest=bucket.longest,
            speeds=speeds.of_replicas(bucket.strategy) if speeds is not None else None,
        )
        packed = tuple(tuple(Pack(tuple(members[i] for i in pack)) for pack in packs) for packs in replicas)
        phases.append(PhasePlan(bucket, packed))
    return MiniBatchPlan(tuple(phases), sum(s.num_labels for s in sequences), **counts)


_GIVEN = "let the last bucket of hotspa_strategies take {} tokens"
_AUTO = "raise hotspa_longest to {} or leave it out"


def _overlong(row: int, length: int, longest: int, why: str, remedy: str) -> OverlongError:
    return OverlongError(
        f"a sequence of {length} tokens is longer than the longest bucket, {longest} tokens",
        where=f"dataset row {row}",
        why=why,
        fix=f"set hotspa_overlong to truncate, split or drop, or {remedy.replace('{}', str(length))}",
    )
