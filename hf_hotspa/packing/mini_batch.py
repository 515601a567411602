"""The plan of one mini-batch as plain data: which slices of which rows run where, and what they weigh.

Owns the value types that travel from the planner (`bucketing.py`) to the collator and the engine. They are frozen and
know neither tensors nor processes. A plan is the same on every rank; `MiniBatchPlan.digest` lets ranks prove it.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from hf_hotspa.strategy import Bucket


@dataclass(frozen=True, slots=True)
class Sequence:
    """The slice ``[start, stop)`` of one dataset row, trained as a sequence of its own.

    Args:
        row: Index of the row in the dataset.
        start: First token of the slice.
        stop: One past its last token; at least one token more than `start`.
        num_labels: Tokens that count in the loss: ``labels[start + 1:stop] != -100``. The first token of a sequence has
            nothing before it that could predict it, so it never counts.
    """

    row: int
    start: int
    stop: int
    num_labels: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Pack:
    """The sequences of one micro-batch, in the order in which they are concatenated. Never empty."""

    sequences: tuple[Sequence, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(s.num_tokens for s in self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_labels(self) -> int:
        return sum(s.num_labels for s in self.sequences)


@dataclass(frozen=True)
class PhasePlan:
    """What one bucket runs inside a mini-batch.

    Args:
        replicas: The packs of each replica, indexed by dp coordinate. Replicas may hold different numbers of packs, and
            none at all.
    """

    bucket: Bucket
    replicas: tuple[tuple[Pack, ...], ...]

    def __post_init__(self) -> None:
        dp = self.bucket.strategy.dp
        assert len(self.replicas) == dp, f"{len(self.replicas)} replicas planned for dp{dp}"

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence of the phase: replica by replica, pack by pack."""
        for packs in self.replicas:
            for pack in packs:
                yield from pack.sequences

    @property
    def num_packs(self) -> int:
        return sum(len(packs) for packs in self.replicas)

    @property
    def num_sequences(self) -> int:
        return sum(len(pack.sequences) for packs in self.replicas for pack in packs)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.sequences())

    @property
    def num_labels(self) -> int:
        return sum(s.num_labels for s in self.sequences())


@dataclass(frozen=True)
class MiniBatchPlan:
    """Everything that is trained in one optimizer step.

    Args:
        phases: One for each bucket that has sequences, in the order of the buckets; buckets without any are left out.
        num_labels: Label tokens of the whole mini-batch: the N of the loss `sum(CE) / N`. Zero is legal.
        num_rows: Dataset rows of the mini-batch, also those that ended up empty or dropped.
        num_truncated: Rows (where rows are packed already: documents) of which only the beginning is trained (policy
            `truncate`).
        num_split: Those cut into several sequences (policy `split`).
        num_dropped: Over-long ones left out (policy `drop`).
        num_empty: Rows without any token, left out.
    """

    phases: tuple[PhasePlan, ...]
    num_labels: int
    num_rows: int
    num_truncated: int = 0
    num_split: int = 0
    num_dropped: int = 0
    num_empty: int = 0

    def __post_init__(self) -> None:
        counted = sum(phase.num_labels for phase in self.phases)
        # A wrong N scales every gradient of the step without any other symptom.
        assert counted == self.num_labels, f"the phases hold {counted} label tokens and N is {self.num_labels}"

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence of the mini-batch, phase by phase."""
        for phase in self.phases:
            yield from phase.sequences()

    @property
    def num_sequences(self) -> int:
        return sum(phase.num_sequences for phase in self.phases)

    @property
    def num_tokens(self) -> int:
        return sum(phase.num_tokens for phase in self.phases)

    def digest(self) -> str:
        """Hex sha256 of all of it; equal plans, equal digests."""
        return hashlib.sha256(repr(self).encode()).hexdigest()
