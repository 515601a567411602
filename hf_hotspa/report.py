"""What a step reports: plain numbers for callbacks, logs and benchmarks. Callbacks see reports only, never the engine."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PhaseReport:
    """One phase of a mini-batch. Seconds and bytes of the slowest (busiest) rank, counts over all ranks.

    Args:
        strategy: The strategy that ran, `dp4tp1pp1`.
        num_packs: Micro-batches, over all replicas.
        num_sequences: Sequences trained.
        num_tokens: Tokens trained.
        load_s: Exposed seconds of moving the weights into the strategy's layout: those in which a rank did nothing but
            prepare or wait for it.
        compute_s: Forward and backward of the busiest replica.
        wait_s: The longest that a rank waited for the busiest one.
        return_s: Exposed seconds of moving the gradients to the master store.
        load_bytes: Bytes that weights moved between ranks, summed over ranks.
        return_bytes: The same for gradients.
        hidden_load_s: Seconds in which the load and the computation ran at the same time. Counted on the rank that was
            busy with the load for the shortest time, as the others also waited for it; 0 without overlap.
        hidden_return_s: The same for the return.
    """

    strategy: str
    num_packs: int
    num_sequences: int
    num_tokens: int
    load_s: float
    compute_s: float
    wait_s: float
    return_s: float
    load_bytes: int
    return_bytes: int
    hidden_load_s: float = 0.0
    hidden_return_s: float = 0.0

    @property
    def switch_s(self) -> float:
        """What switching adds to the phase: the exposed seconds of loading weights and returning gradients."""
        return self.load_s + self.return_s

    @property
    def hidden_s(self) -> float:
        """What the phase would have taken longer without overlap, about."""
        return self.hidden_load_s + self.hidden_return_s

    @property
    def switch_bytes(self) -> int:
        return self.load_bytes + self.return_bytes


@dataclass(frozen=True)
class StepReport:
    """One mini-batch.

    Args:
        step: Mini-batches that the engine has run, this one included.
        loss: Token mean of the cross entropy over the whole mini-batch.
        grad_norm: Global 2-norm of its gradient, before clipping.
        num_labels: Label tokens, the N of the mean.
        num_rows: Dataset rows.
        num_truncated: Rows of which only the beginning was trained.
        num_split: Rows that were cut in several sequences.
        num_dropped: Over-long rows left out.
        num_empty: Rows without tokens.
        phases: The phases in the order in which they ran.
        total_s: Wall seconds of forward and backward on this rank, agreement included, optimizer step excluded.
    """

    step: int
    loss: float
    grad_norm: float
    num_labels: int
    num_rows: int
    num_truncated: int
    num_split: int
    num_dropped: int
    num_empty: int
    phases: tuple[PhaseReport, ...]
    total_s: float

    @property
    def num_tokens(self) -> int:
        return sum(phase.num_tokens for phase in self.phases)

    @property
    def switch_s(self) -> float:
        """Exposed seconds of all switches."""
        return sum(phase.switch_s for phase in self.phases)

    @property
    def hidden_s(self) -> float:
        """Seconds of all switches that ran beside computation."""
        return sum(phase.hidden_s for phase in self.phases)

    @property
    def switch_bytes(self) -> int:
        return sum(phase.switch_bytes for phase in self.phases)

    @property
    def switch_share(self) -> float:
        """The part of the step that switching took (exposed seconds), 0 to 1."""
        return self.switch_s / self.total_s if self.total_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready plain data."""
        return asdict(self)
