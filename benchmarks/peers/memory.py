"""The memory rule of `side_by_side.py`, the same for all sides.

A rank's memory is the most that it has alive during two mini-batches, the heaviest of the data set twice, above what it
had before the side made its model; the fullest rank counts. Freed tensors go back to the system at once, and pages of
program files are left out. A side fits when that is at most the limit, with its micro-batches or with single rows. Of a
side that does not, the longest sequence that it holds alone in a mini-batch is found from the peaks at a few lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_hotspa.commands.bench.workload import heaviest_first
from peers.live import run_untimed
from peers.sides import Side
from peers.work import Work

_FEWEST = 32


class Ladder:
    """Peaks of micro-batches of one sequence, of `longest` tokens and of halves of it; measured when they are asked for.

    Args:
        longest: Tokens.
    """

    def __init__(self, longest: int) -> None:
        self.lengths = sorted({max(_FEWEST, longest >> step) for step in range(6)})
        self._found: list[tuple[int, float]] | None = None

    def peaks(self, side: Side, work: Work, run: Callable[[Work], dict[str, Any]]) -> list[tuple[int, float]]:
        """Lengths and bytes of the fullest rank, shortest first.

        Raises:
            SideError: a run failed.
        """
        if self._found is None:
            self._found = list(zip(self.lengths, self._measured(side, work, run), strict=True))
        return self._found

    def _measured(self, side: Side, work: Work, run: Callable[[Work], dict[str, Any]]) -> list[float]:
        one = replace(work, mini_batch_rows=work.ranks, micro_batch_rows=1, measure="memory")
        if side.ladder:
            # the first mini-batch makes the optimizer's state
            rows = tuple(length for length in (_FEWEST, *self.lengths) for _ in range(work.ranks))
            return list(run(replace(one, lengths=rows, steps=1 + len(self.lengths)))["peaks"][1:])
        runs = [run(replace(one, lengths=(length,) * 2 * work.ranks, steps=2)) for length in self.lengths]
        return [max(each["peaks"]) for each in runs]


def longest_held(peaks: Sequence[tuple[int, float]], limit: float) -> int:
    """The longest sequence that fits, between the lengths that were measured; 0 if the shortest does not.

    Args:
        peaks: Length and bytes, shortest first.
        limit: Bytes.
    """
    longest = 0
    for at, (length, peak) in enumerate(peaks):
        if peak <= limit:
            longest = length
            continue
        if at:
            before, less = peaks[at - 1]
            longest = (
                max(longest, before + int((limit - less) / (peak - less) * (length - before)))
                if less <= limit
                else longest
            )
        break
    return longest


def measure_memory(
    side: Side, work: Work, limit: float, log: Path, limit_s: float, ladder: Ladder | None
) -> dict[str, Any]:
    """`peak_bytes` as trained, `fits`; of a side that does not fit also `peaks` by length, and `longest_held`.

    Where it holds the longest sequence alone, what it takes for the same mini-batches with single rows decides
    (`single_peak_bytes`, `fits_alone`): rows that come before leave gradients.

    Args:
        side: The side.
        work: What it trains.
        limit: Bytes of a rank.
        log: Where its ranks write.
        limit_s: For each run.
        ladder: Finds the longest sequence that fits; None to leave it.

    Raises:
        SideError: a run failed.
    """
    heavy = heaviest_first(work.lengths, work.mini_batch_rows)
    found = run_untimed(side, replace(work, lengths=heavy, steps=2, measure="memory"), log, limit_s)
    peak = max(found["peaks"])
    result: dict[str, Any] = {"peak_bytes": peak, "fits": peak <= limit}
    if peak > limit and ladder is not None:
        result["peaks"] = ladder.peaks(side, work, lambda run: run_untimed(side, run, log, limit_s))
        longest = longest_held(result["peaks"], limit)
        if longest < work.longest:
            result |= {"longest_held": longest, "fits_alone": False}
        elif side.divisible:
            result |= {"longest_held": longest, "fits_alone": True}
        else:
            single = replace(work, lengths=heavy, steps=2, micro_batch_rows=1, measure="memory")
            again = work.micro_batch_rows > 1
            result["single_peak_bytes"] = max(run_untimed(side, single, log, limit_s)["peaks"]) if again else peak
            result["fits_alone"] = result["single_peak_bytes"] <= limit
    return result
