"""Lengths to plan for: named synthetic distributions, JSON histograms, or a data set's; and the policy for long ones.

The two long-tailed distributions are log-normal, with parameters that make the published stage times of a 32B model
reproduce the published step times of HotSPa (SOSP'24, Table 3); the lengths of these corpora are not published.
Deterministic for a seed; no torch.

If a run's lengths are unknown, its plan is made for the first ones, and they may shift. `LengthsSeen` keeps the last
sequences and their distance from the plan's: half the sum of the absolute differences of both histograms (shares of
tokens, with bins at powers of the root of two). A pure function of its inputs in order, equal on all ranks.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_hotspa.costs.memory import UNLIMITED_TOKENS
from hf_hotspa.errors import HotspaConfigError, OverlongError, check_choice
from hf_hotspa.packing.bucketing import OVERLONG_POLICIES
from hf_hotspa.typed import reading_state
from hf_hotspa.whole_file import read_json, write_json

KIND = "hf_hotspa length histogram"
SCHEMA_VERSION = 1
SHORTEST = 16  # tokens of the shortest synthetic sequence
_MOST_DIGITS = 12
LONGEST = 32768  # the longest synthetic sequence, if the model has enough positions
_SEQUENCES = 2048
_MINI_BATCHES = 64  # lengths are drawn for so many sequences, or for so many mini-batches if these are small
MOST_SEQUENCES = 1 << 14
DISTRIBUTIONS = ("commoncrawl", "github", "uniform", "chat")
"""`commoncrawl`: log-normal, median 326, sigma 1.33. `github`: log-normal, median 1441, sigma 1.46. `uniform`: all
lengths equally likely. `chat`: three quarters short turns around 180 tokens, a quarter long conversations around
1500."""

_LOG_NORMAL = {"commoncrawl": (326.0, 1.33), "github": (1441.0, 1.46)}


def synthetic_lengths(name: str, count: int, longest: int = 32768, seed: int = 0) -> list[int]:
    """Draws lengths from a named distribution; lengths above `longest` are cut to it, as a tokenizer does.

    Draws are stratified (one from each of `count` equal slices of probability, in random order), so that a few hundred
    lengths already have the distribution's shape. Raises `HotspaConfigError`: no such distribution, or a number below 1.
    """
    if name not in DISTRIBUTIONS:
        fix = f"use one of {', '.join(DISTRIBUTIONS)}, or the path of a JSON histogram"
        raise HotspaConfigError(f"there is no length distribution {name!r}", fix=fix)
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


def _log_normal(uniform: NDArray[np.float64], median: float, sigma: float) -> NDArray[np.float64]:
    quantiles = map(NormalDist().inv_cdf, np.clip(uniform, 1e-6, 1 - 1e-6).tolist())
    return median * np.exp(sigma * np.array(list(quantiles)))


@dataclass(frozen=True)
class Counts:
    """The number of sequences (`sizes` [N] int64) of each length (`lengths` [N] int64, different, at least 1 token),
    and their origin in words."""

    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]
    source: str = ""

    @classmethod
    def of(cls, lengths: Iterable[int] | NDArray[np.int64], source: str = "") -> "Counts":
        """Counts some lengths; lengths of 0 tokens are left out."""
        different, sizes = np.unique(np.fromiter(lengths, np.int64), return_counts=True)
        some = different > 0
        return cls(different[some], sizes[some].astype(np.int64), source)

    @property
    def total(self) -> int:
        return int(self.sizes.sum())

    def drawn(self, most: int | None = None, seed: int = 0) -> list[int]:
        """Draws at most `most` lengths (None: all) in random order, always including the longest one."""
        count, total = min(self.total, most or self.total), self.total
        rng, order = np.random.default_rng(seed), np.argsort(self.lengths)
        ends, lengths = np.cumsum(self.sizes[order]), self.lengths[order]
        # one draw from each of `count` equal slices of the sorted lengths; with count == total these are all lengths
        at = np.arange(count) * total // count
        if count < total:
            at += rng.integers(0, max(1, total // count), count)
        drawn = lengths[np.searchsorted(ends, np.minimum(at, total - 1), side="right")]
        drawn[-1] = int(lengths[ends > ends[-1] - 1][0])
        return [*map(int, rng.permutation(drawn))]

    def save(self, path: str | os.PathLike[str]) -> None:
        counts = {str(length): size for length, size in zip(self.lengths.tolist(), self.sizes.tolist(), strict=True)}
        write_json(path, KIND, SCHEMA_VERSION, {"source": self.source, "counts": counts})

    def __str__(self) -> str:
        return self.source


def load_counts(path: str | os.PathLike[str]) -> Counts:
    """Reads a histogram. Raises `HotspaConfigError`: the file is missing, torn, of another kind or version, empty, or
    holds impossible numbers."""
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
            raise HotspaConfigError(f"{key!r} is not a length in tokens", where=where, fix=remedy)
        is_number = isinstance(count, int | float) and not isinstance(count, bool)
        if not is_number or not 0 <= count < 10**_MOST_DIGITS or count != int(count):
            raise HotspaConfigError(f"the count of length {key} is {count!r}", where=where, fix=remedy)
        lengths.append(int(key))
        sizes.append(int(count))
    if not sum(sizes):
        raise HotspaConfigError("all counts of the histogram are 0", where=where, fix=remedy)
    return Counts(np.array(lengths), np.array(sizes), where)


def read_lengths(
    given: str | Counts,  # one of `DISTRIBUTIONS`, the path of a histogram, or counts
    mini_batch_size: int,
    longest: int | None,  # the longest sequence that must fit; None for the longest given
    positions: int | None,  # the model's, which limit synthetic lengths; None for no limit
    overlong: str = "error",  # the policy for longer ones, one of `bucketing.OVERLONG_POLICIES`
) -> tuple[list[int], int]:
    """Returns the lengths to plan for, in random order, and the longest sequence that must fit. Raises
    `HotspaConfigError`: no such distribution or file, an impossible size or policy, or the policy leaves nothing. Raises
    `OverlongError`: there are sequences longer than `longest`, and the policy is `error`."""
    check_choice("the policy for over-long sequences", overlong, OVERLONG_POLICIES)
    if not 1 <= mini_batch_size <= MOST_SEQUENCES:
        fix = f"use 1 to {MOST_SEQUENCES}"
        raise HotspaConfigError(f"a mini-batch of {mini_batch_size} sequences cannot be planned", fix=fix)
    if longest is not None and not 1 <= longest < UNLIMITED_TOKENS:
        raise HotspaConfigError(f"a longest sequence of {longest} tokens is impossible", fix="use at least 1")
    count = max(mini_batch_size, min(_SEQUENCES, _MINI_BATCHES * mini_batch_size))
    if isinstance(given, str):
        if given in DISTRIBUTIONS or not (Path(given).exists() or given.endswith(".json")):
            top = longest or min(LONGEST, positions or LONGEST)
            return synthetic_lengths(given, count, top), top
        given = load_counts(given)
    if longest is None:
        return given.drawn(count), int(given.lengths[given.sizes > 0].max())
    above = int(given.sizes[given.lengths > longest].sum())
    if above and overlong == "error":
        most = int(given.lengths.max())
        raise OverlongError(
            f"{above} of {given.total} lengths are above --longest {longest}; the longest is {most}",
            where=given.source,
            fix=f"use --longest {most}, or --overlong truncate, split or drop as hotspa_overlong will",
        )
    fitting = list(_fitting(given.drawn(count), longest, overlong))
    if not fitting:
        raise HotspaConfigError(
            f"none of {given.total} sequences has at most {longest} tokens", where=given.source, fix="raise --longest"
        )
    return fitting, longest


def _fitting(lengths: Iterable[int], longest: int, policy: str) -> Iterable[int]:
    for length in lengths:
        if length <= longest:
            yield length
        elif policy == "truncate":
            yield longest
        elif policy == "split":
            yield from [longest] * (length // longest)
            if length % longest:
                yield length % longest


_KEPT, _LEAST = 2048, 256  # how many of the last sequences are compared, and the least number for a comparison
_EVERY = 8  # mini-batches between two comparisons
_FAR = 0.3  # a distance, of at most 1, that requires another plan: two draws from one distribution are nearer
_BINS = 64


class LengthsSeen:
    """Compares the lengths of mini-batches with the lengths, in tokens, in `planned_for`."""

    def __init__(self, planned_for: Iterable[int]) -> None:
        self._basis = _histogram(planned_for)
        self.recent: list[int] = []  # the last lengths, in the order of training
        self._mini_batches = 0

    def add(self, lengths: Iterable[int]) -> bool:
        """Adds a mini-batch; returns whether another plan is due."""
        self.recent = [*self.recent, *map(int, lengths)][-_KEPT:]
        self._mini_batches += 1
        return self._mini_batches % _EVERY == 0 and len(self.recent) >= _LEAST and self.distance > _FAR

    @property
    def distance(self) -> float:
        """The distance of the last lengths from the plan's, from 0 to 1."""
        return float(np.abs(_histogram(self.recent) - self._basis).sum() / 2)

    def planned(self) -> None:
        """Makes the last lengths the basis, after another plan was made for them."""
        self._basis = _histogram(self.recent)

    def state_dict(self) -> dict[str, Any]:
        return {"basis": self._basis.tolist(), "recent": self.recent, "mini_batches": self._mini_batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state. Raises `HotspaConfigError`: the state is invalid."""
        with reading_state("the lengths that were trained", "lengths are watched anew"):
            basis = np.array(state["basis"], np.float64)
            recent, number = [int(length) for length in state["recent"]], int(state["mini_batches"])
            if basis.shape != (_BINS,):
                raise ValueError(f"{basis.shape} bins")
        self._basis, self.recent, self._mini_batches = basis, recent, number


def _histogram(lengths: Iterable[int]) -> NDArray[np.float64]:
    tokens = np.maximum(np.array(list(lengths), np.float64), 1.0)
    bins = np.minimum((2 * np.log2(tokens)).astype(np.int64), _BINS - 1)
    sums = np.bincount(bins, tokens, _BINS)
    return sums / max(float(sums.sum()), 1.0)
