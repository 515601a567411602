"""What all sides of `side_by_side.py` are given: lengths, rows, mini-batches, and the settings of one run.

Mini-batch k is rows `[k * size, (k + 1) * size)`, on every side. Token ids are made on the ranks, from a seed.
"""

import math
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_hotspa.search.histogram import synthetic_lengths

LENGTHS = {
    "commoncrawl": "log-normal, median 326 and sigma 1.33 where the longest is 32,768",
    "github": "log-normal, median 1441 and sigma 1.46 where the longest is 32,768",
    "stdlib": "files of Python's standard library, 32 bytes a token",
    "chat": "log-normal, median 180, sigma 0.5, at most an eighth of the longest",
    "all long": "three to four eighths of the longest",
}
"""All are cut at the longest sequence that was asked for. The first two keep the shape that the paper's data have in a
context of 32K: all lengths are scaled with it. `stdlib` is at an eighth of its size, so that its tail stays."""
_SHORTEST, _CONTEXT = 16, 32768


def draw(name: str, count: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths from a distribution, in random order."""
    rng = np.random.default_rng([seed, list(LENGTHS).index(name)])
    if name in ("commoncrawl", "github"):
        return [
            max(_SHORTEST, length * longest // _CONTEXT) for length in synthetic_lengths(name, count, _CONTEXT, seed)
        ]
    if name == "stdlib":
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        tokens = [min(max(path.stat().st_size // 32, _SHORTEST), longest) for path in files]
        return [tokens[at] for at in rng.integers(0, len(tokens), count)]
    if name == "chat":
        drawn = 180.0 * np.exp(0.5 * rng.standard_normal(count))
        return [int(length) for length in np.clip(drawn, _SHORTEST, max(_SHORTEST, longest // 8))]
    return [int(length) for length in rng.integers(3 * longest // 8, longest // 2 + 1, count)]


def rows_of_mini_batch(name: str, longest: int, tokens: int, ranks: int) -> int:
    """Sequences of a mini-batch of about so many tokens: peers cut it by rank, and that into micro-batches."""
    share = tokens / float(np.mean(draw(name, 4096, longest))) / ranks
    unit = 1 << max(0, int(math.log2(max(share, 1.0))) - 1)
    return max(1, round(share / unit)) * unit * ranks


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
        from contest import make_rows
        from datasets import Dataset

        rows = make_rows(self.lengths, self.vocabulary, seed=1)
        ids = [row["input_ids"] for row in rows]
        return Dataset.from_dict({"input_ids": ids, "labels": ids})


def heaviest_first(lengths: Sequence[int], rows: int) -> tuple[int, ...]:
    """The mini-batch with the longest sequence (of these the one with the most tokens) twice, and then the others."""
    cut = [tuple(lengths[at : at + rows]) for at in range(0, len(lengths), rows)]
    heavy = max(cut, key=lambda batch: (max(batch), sum(batch)))
    others = list(cut)
    others.remove(heavy)
    return tuple(length for batch in (heavy, heavy, *others) for length in batch)


def micro_batch_choices(rows: int, ranks: int) -> list[int]:
    """Micro-batch sizes to try for a mini-batch of so many rows: the smallest, the largest and the middle one of the
    powers of two that cut it evenly over ranks."""
    share, found = rows // ranks, []
    while share % (1 << len(found)) == 0:
        found.append(1 << len(found))
    return sorted({found[0], found[len(found) // 2], found[-1]})
