"""The lengths that a plan is made for: named ones, a histogram, or those of a data set; and what becomes of long ones."""

from collections.abc import Iterable
from pathlib import Path

from hf_hotspa.costs.memory import UNLIMITED_TOKENS
from hf_hotspa.errors import HotspaConfigError, OverlongError, check_choice
from hf_hotspa.packing.bucketing import OVERLONG_POLICIES
from hf_hotspa.search.histogram import DISTRIBUTIONS, Counts, load_counts, synthetic_lengths

LONGEST = 32768
"""The longest sequence of synthetic lengths, where a model has positions for it."""
_SEQUENCES = 2048
_MINI_BATCHES = 64
"""Lengths are drawn for so many sequences, or so many mini-batches where these are small."""
_MOST_SEQUENCES = 1 << 14


def read_lengths(
    given: str | Counts, mini_batch_size: int, longest: int | None, positions: int | None, overlong: str = "error"
) -> tuple[list[int], int]:
    """Lengths to plan for, in random order, and the longest sequence that must fit.

    Args:
        given: One of `DISTRIBUTIONS`, the path of a histogram, or counts.
        longest: The longest sequence that must fit; that of the lengths when None.
        positions: Those of the model, which synthetic lengths keep to; None for no limit.
        overlong: What becomes of longer ones, one of `bucketing.OVERLONG_POLICIES`.

    Raises:
        HotspaConfigError: no such distribution or file, an impossible size or policy, or the policy leaves nothing.
        OverlongError: there are sequences longer than `longest`, and the policy is `error`.
    """
    check_choice("the policy for over-long sequences", overlong, OVERLONG_POLICIES)
    if not 1 <= mini_batch_size <= _MOST_SEQUENCES:
        raise HotspaConfigError(
            f"a mini-batch of {mini_batch_size} sequences cannot be planned", fix=f"use 1 to {_MOST_SEQUENCES}"
        )
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
    """What a policy makes of lengths."""
    for length in lengths:
        if length <= longest:
            yield length
        elif policy == "truncate":
            yield longest
        elif policy == "split":
            yield from [longest] * (length // longest)
            if length % longest:
                yield length % longest
