"""Length histograms: named synthetic distributions, and JSON files.

The two long-tailed ones are log-normal with the parameters that make the published stage times of a 32B model
reproduce the published step times of HotSPa (SOSP'24, Table 3); they stand in for corpora whose lengths nobody
published. Deterministic for a seed; no torch.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hf_hotspa.costs.json_file import read_json, write_json
from hf_hotspa.errors import HotspaConfigError

KIND = "hf_hotspa length histogram"
SCHEMA_VERSION = 1
SHORTEST = 16
"""Tokens of the shortest synthetic sequence."""
_MOST_DIGITS = 12

DISTRIBUTIONS = ("commoncrawl", "github", "uniform", "chat")
"""`commoncrawl`: log-normal, median 326, sigma 1.33. `github`: log-normal, median 1441, sigma 1.46. `uniform`: all
lengths alike. `chat`: three quarters short turns around 180 tokens, a quarter long conversations around 1500."""

_LOG_NORMAL = {"commoncrawl": (326.0, 1.33), "github": (1441.0, 1.46)}


def synthetic_lengths(name: str, count: int, longest: int = 32768, seed: int = 0) -> list[int]:
    """Lengths from a named distribution; what would be longer than `longest` is cut there, as a tokenizer does.

    Draws are stratified (one from each of `count` equal slices of probability, in random order), so that a few
    hundred lengths already have the shape of the distribution.

    Raises:
        HotspaConfigError: no such distribution, or a number below 1.
    """
    if name not in DISTRIBUTIONS:
        raise HotspaConfigError(
            f"there is no length distribution {name!r}",
            fix=f"use one of {', '.join(DISTRIBUTIONS)}, or the path of a JSON histogram",
        )
    if count < 1 or longest < 1:
        raise HotspaConfigError(f"{count} lengths of at most {longest} tokens cannot be drawn", fix="use at least 1")
    rng = np.random.default_rng([seed, DISTRIBUTIONS.index(name)])
    uniform = (rng.permutation(count) + rng.random(count)) / count
    if name == "uniform":
        lengths = SHORTEST + uniform * (longest - SHORTEST + 1)
    elif name == "chat":
        long = rng.permutation(count) < count // 4
        lengths = np.where(long, _log_normal(uniform, 1500.0, 0.9), _log_normal(uniform, 180.0, 0.7))
    else:
        lengths = _log_normal(uniform, *_LOG_NORMAL[name])
    low = min(SHORTEST, longest)
    return [int(length) for length in np.clip(lengths.astype(np.int64), low, longest)]


def _log_normal(uniform: np.typing.NDArray[np.float64], median: float, sigma: float) -> np.typing.NDArray[np.float64]:
    from statistics import NormalDist

    quantile = NormalDist().inv_cdf
    normal = np.array([quantile(min(max(u, 1e-6), 1 - 1e-6)) for u in uniform.tolist()])
    return median * np.exp(sigma * normal)


@dataclass(frozen=True)
class Counts:
    """How many sequences of each length there are.

    Args:
        lengths: [N] int64, different lengths in tokens, each at least 1.
        sizes: [N] int64, how many sequences have each.
        source: Where they are from, in words.
    """

    lengths: np.typing.NDArray[np.int64]
    sizes: np.typing.NDArray[np.int64]
    source: str = ""

    @classmethod
    def of(cls, lengths: Iterable[int] | np.typing.NDArray[np.int64], source: str = "") -> "Counts":
        """The counts of some lengths; those of 0 tokens are left out."""
        different, sizes = np.unique(np.fromiter(lengths, np.int64), return_counts=True)
        some = different > 0
        return cls(different[some], sizes[some].astype(np.int64), source)

    @property
    def total(self) -> int:
        """All sequences."""
        return int(self.sizes.sum())

    def drawn(self, most: int | None = None, seed: int = 0) -> list[int]:
        """At most so many lengths in random order, always with the longest one; all of them without a number."""
        return _drawn(self.lengths, self.sizes, min(self.total, most or self.total), seed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes them as a JSON histogram."""
        counts = {str(length): size for length, size in zip(self.lengths.tolist(), self.sizes.tolist(), strict=True)}
        write_json(path, KIND, SCHEMA_VERSION, {"source": self.source, "counts": counts})

    def __str__(self) -> str:
        return self.source


def load_counts(path: str | os.PathLike[str]) -> Counts:
    """Reads a histogram.

    Raises:
        HotspaConfigError: the file is missing, torn, of another kind or version, empty, or holds impossible numbers.
    """
    remedy = (
        "make it with `hf-hotspa lengths --dataset DATA -o FILE`, or write "
        '{"kind": "' + KIND + '", "schema_version": 1, "counts": {"length": count, ...}}'
    )
    data, where = read_json(path, KIND, SCHEMA_VERSION, remedy), str(path)
    counts = data.get("counts")
    if not isinstance(counts, dict) or not counts:
        raise HotspaConfigError("the histogram has no counts", where=where, fix=remedy)
    lengths, sizes = [], []
    for key, count in counts.items():
        if not str(key).isdecimal() or len(str(key)) > _MOST_DIGITS or int(key) < 1:
            raise HotspaConfigError(f"{key!r} is no length in tokens", where=where, fix=remedy)
        is_number = isinstance(count, int | float) and not isinstance(count, bool)
        if not is_number or not 0 <= count < 10**_MOST_DIGITS or count != int(count):
            raise HotspaConfigError(f"the count of length {key} is {count!r}", where=where, fix=remedy)
        lengths.append(int(key))
        sizes.append(int(count))
    if not sum(sizes):
        raise HotspaConfigError("all counts of the histogram are 0", where=where, fix=remedy)
    return Counts(np.array(lengths), np.array(sizes), where)


def _drawn(
    lengths: np.typing.NDArray[np.int64], sizes: np.typing.NDArray[np.int64], count: int, seed: int
) -> list[int]:
    rng = np.random.default_rng(seed)
    order = np.argsort(lengths)
    ends = np.cumsum(sizes[order])
    total = int(ends[-1])
    # one draw from each of `count` equal slices of the sorted lengths; with count == total these are all of them
    at = (np.arange(count) * total) // count + (rng.integers(0, max(1, total // count), count) if count < total else 0)
    drawn = lengths[order][np.searchsorted(ends, np.minimum(at, total - 1), side="right")]
    drawn[-1] = int(lengths[order][ends > ends[-1] - 1][0])
    return [int(length) for length in rng.permutation(drawn)]
