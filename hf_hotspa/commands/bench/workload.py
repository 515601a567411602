"""What all sides of a benchmark train: lengths, rows, mini-batches, and the model.

Mini-batch k is rows `[k * size, (k + 1) * size)`, on every side. Token ids come from a seed. Imports no torch until rows
are made.
"""

import hashlib
import json
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
"""All are cut at the longest sequence. The first two keep the shape that the paper's data have in a context of 32K: all
lengths are scaled with it. `stdlib` is at an eighth of its size, so that its tail stays."""
_SHORTEST, _CONTEXT = 16, 32768


def draw(name: str, count: int, longest: int, seed: int = 0) -> list[int]:
    """Returns lengths from a distribution of `LENGTHS`, in tokens, in random order."""
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
    """Returns the sequences of a mini-batch of about so many tokens, which divide by the ranks, and that often by two."""
    share = tokens / float(np.mean(draw(name, 4096, longest))) / ranks
    unit = 1 << max(0, int(math.log2(max(share, 1.0))) - 1)
    return max(1, round(share / unit)) * unit * ranks


def heaviest_first(lengths: Sequence[int], rows: int) -> tuple[int, ...]:
    """Returns the mini-batch with the longest sequence (of these the one with the most tokens) twice, then the others."""
    cut = [tuple(lengths[at : at + rows]) for at in range(0, len(lengths), rows)]
    heavy = max(cut, key=lambda batch: (max(batch), sum(batch)))
    others = list(cut)
    others.remove(heavy)
    return tuple(length for batch in (heavy, heavy, *others) for length in batch)


def micro_batch_choices(rows: int, ranks: int) -> list[int]:
    """Returns micro-batch sizes to try for a mini-batch of so many rows: the smallest, the largest and the middle one of
    the powers of two that divide it evenly over ranks."""
    share, sizes = rows // ranks, list[int]()
    while share % (1 << len(sizes)) == 0:
        sizes.append(1 << len(sizes))
    return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})


def make_rows(lengths: Sequence[int], vocabulary: int, seed: int) -> list[dict[str, list[int]]]:
    """Returns random rows in which small token ids are more frequent, so that there is something to learn."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        a, b = (torch.randint(0, vocabulary, (length,), generator=generator) for _ in range(2))
        rows.append({"input_ids": torch.minimum(a, b).tolist()})
    return rows


def llama(hidden: int, layers: int, vocabulary: int, longest: int) -> dict[str, Any]:
    """Returns the config of a Llama with random weights, as plain data."""
    head = 64 if hidden >= 512 else 16
    return {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers, "num_attention_heads": hidden // head,
        "num_key_value_heads": hidden // head // 2, "max_position_embeddings": longest,
    }  # fmt: skip


@dataclass(frozen=True)
class LengthFile:
    """The rows of one contest. `name`: one of `LENGTHS`. `lengths`: in tokens, of all rows. `rows`: of a mini-batch."""

    name: str
    lengths: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, name: str, longest: int, tokens: int, ranks: int, steps: int) -> "LengthFile":
        """Draws `steps` mini-batches of about `tokens` tokens."""
        rows = rows_of_mini_batch(name, longest, tokens, ranks)
        return cls(name, tuple(draw(name, rows * steps, longest, seed=1)), rows)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the lengths in order: equal files hold equal rows."""
        return hashlib.sha256(json.dumps([self.rows, *self.lengths]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Work:
    """What one side trains in one turn.

    Args:
        model: The folder of the untrained model.
        vocabulary: Token ids are below it.
        bf16: Whether forward and backward run in bfloat16, the weights in fp32; else all in fp32.
        cuda: Whether ranks have GPUs.
        file: The rows.
        warmup: Mini-batches at the start that do not count.
        folder: Where the run may write.
        calibration: The file of `hf-hotspa calibrate`, for our sides.
        micro_tokens: The most tokens of a stock micro-batch of several rows, padded.
    """

    model: str
    vocabulary: int
    bf16: bool
    cuda: bool
    file: LengthFile
    warmup: int
    folder: str
    calibration: str | None
    micro_tokens: int

    @property
    def steps(self) -> int:
        return len(self.file.lengths) // self.file.rows
