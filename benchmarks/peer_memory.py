"""The memory rule of `peers.py`, the same for all sides.

A rank's memory is the most that it has alive during two mini-batches, the heaviest of the data set twice, above what it
had before the side made its model; the fullest rank counts. Freed tensors go back to the system at once, and pages of
program files are left out. A side fits when that is at most the limit. Of a side that does not, the longest sequence
that it holds alone in a micro-batch is found from the peaks at a few lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer_live import run_untimed
from peer_sides import Side
from peer_work import Work, heaviest_first

_PARTS = (8, 4, 2, 1)
_FEWEST = 32


def longest_held(peaks: Sequence[tuple[int, float]], limit: float) -> int:
    """The longest sequence that fits, between the lengths that were measured; 0 if the shortest does not.

    Args:
        peaks: Length and bytes, shortest first.
        limit: Bytes.
    """
    held = 0
    for at, (length, peak) in enumerate(peaks):
        if peak <= limit:
            held = length
            continue
        if at:
            before, less = peaks[at - 1]
            held = (
                max(held, before + int((limit - less) / (peak - less) * (length - before))) if less <= limit else held
            )
        break
    return held


def measure_memory(
    side: Side, work: Work, limit: float, log: Path, limit_s: float, ladder: bool = True
) -> dict[str, Any]:
    """`peak_bytes` as trained, `fits`; of a side that does not fit also `longest_held` and `peaks` by length.

    A side that holds the longest sequence in a micro-batch of its own fits, too: `fits_alone`.

    Args:
        side: The side.
        work: What it trains.
        limit: Bytes of a rank.
        log: Where its ranks write.
        limit_s: For each run.
        ladder: Whether to look for the longest sequence that fits.

    Raises:
        SideError: a run failed.
    """
    heavy = heaviest_first(work.lengths, work.mini_batch_rows)
    found = run_untimed(side, replace(work, lengths=heavy, steps=2, measure="memory"), log, limit_s)
    peak = max(found["peaks"])
    result: dict[str, Any] = {"peak_bytes": peak, "fits": peak <= limit}
    if peak > limit and ladder:
        result["peaks"] = _peaks(side, work, lambda run: run_untimed(side, run, log, limit_s))
        result["longest_held"] = longest_held(result["peaks"], limit)
        result["fits_alone"] = result["longest_held"] >= work.longest
    return result


def _peaks(side: Side, work: Work, run: Callable[[Work], dict[str, Any]]) -> list[tuple[int, float]]:
    """Peaks of micro-batches of one sequence, of the longest and of parts of it."""
    lengths = sorted({max(_FEWEST, work.longest // part) for part in _PARTS})
    one = replace(work, mini_batch_rows=work.ranks, micro_batch_rows=1, measure="memory")
    if side.ladder:
        # the first mini-batch makes the optimizer's state
        rows = tuple(length for length in (_FEWEST, *lengths) for _ in range(work.ranks))
        found = run(replace(one, lengths=rows, steps=1 + len(lengths)))["peaks"][1:]
    else:
        runs = [run(replace(one, lengths=(length,) * 2 * work.ranks, steps=2)) for length in lengths]
        found = [max(each["peaks"]) for each in runs]
    return list(zip(lengths, found, strict=True))
