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
        load_s: Moving the weights into the strategy's layout.
        compute_s: Forward and backward of the busiest replica.
        wait_s: The longest that a rank waited for the busiest one.
        return_s: Moving the gradients to the master store.
        load_bytes: Bytes that weights moved between ranks, summed over ranks.
        return_bytes: The same for gradients.
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

    @property
    def switch_s(self) -> float:
        """Everything that is not computing: loading weights and returning gradients."""
        return self.load_s + self.return_s

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
        return sum(phase.switch_s for phase in self.phases)

    @property
    def switch_bytes(self) -> int:
        return sum(phase.switch_bytes for phase in self.phases)

    @property
    def switch_share(self) -> float:
        """The part of the step that switching took, 0 to 1."""
        return self.switch_s / self.total_s if self.total_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready plain data."""
        return asdict(self)
