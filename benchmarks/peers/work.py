"""What all sides of `side_by_side.py` are given: lengths, rows, mini-batches, and the settings of one run.

Mini-batch k is rows `[k * size, (k + 1) * size)`, on every side. Token ids are made on the ranks, from a seed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_hotspa.commands.bench.workload import make_rows


@dataclass(frozen=True)
class Work:
    """One run of one side.

    Args:
        model: A key of `contest.MODELS`.
        dtype: `fp32` or `bf16`.
        ranks: Processes.
        lengths: Of all rows.
        mini_batch_rows: Rows of a mini-batch.
        steps: Mini-batches to train; may be fewer than the lengths hold.
        folder: Where the untrained model is saved, and where the run may write.
        micro_batch_rows: Rows of a rank's micro-batch, for sides that count in rows.
        strategies: `hotspa_strategies`, for our sides.
        planner: `hotspa_planner`, for our sides.
        limit_bytes: Memory of a rank that our sides may plan with; None for no limit.
        packed: Whether sequences share packs, for our sides.
        measure: `time`, or `memory` (untimed; every tensor is given back to the system when it is freed).
        name: Of the run, for its files.
    """

    model: str
    dtype: str
    ranks: int
    lengths: tuple[int, ...]
    mini_batch_rows: int
    steps: int
    folder: str
    micro_batch_rows: int = 1
    strategies: str = ""
    planner: str = "relay"
    limit_bytes: float | None = None
    packed: bool = True
    measure: str = "time"
    name: str = "run"

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank and mini-batch."""
        return self.mini_batch_rows // (self.ranks * self.micro_batch_rows)

    @property
    def vocabulary(self) -> int:
        """Words of the model."""
        from contest import MODELS

        return MODELS[self.model][3]

    @property
    def start_folder(self) -> Path:
        """The untrained model, as Hugging Face saves it."""
        return Path(self.folder) / "start"

    def rows(self) -> Any:
        """The data set: `input_ids` and `labels`, the same on every rank."""
        from datasets import Dataset

        rows = make_rows(self.lengths, self.vocabulary, seed=1)
        ids = [row["input_ids"] for row in rows]
        return Dataset.from_dict({"input_ids": ids, "labels": ids})
