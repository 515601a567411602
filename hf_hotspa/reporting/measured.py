"""Switching against single strategies, measured: seconds of the same mini-batches under both, and what follows from them.

Owns the numbers of `trainer/single_strategies.py` as plain data, their JSON in the record of a run, and the sentence that
says whether switching paid. Promises: the single strategy it is compared with is the fastest of those measured, and the
spread over the mini-batches is said beside the ratio.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hf_hotspa.reporting.terminal import text_table

CLEAR = 0.03
"""Differences below this are not called a gain or a loss."""


@dataclass(frozen=True)
class MeasuredGain:
    """Seconds of forward and backward passes with everything that moves, without the update.

    Args:
        switching: Of each mini-batch under the strategies of the run.
        singles: Of the same mini-batches, in the same order, under each single strategy.
        loss_difference: The largest relative difference between the losses of the same mini-batch.

    Raises:
        ValueError: the seconds are not of the same mini-batches, or there are none.
    """

    switching: tuple[float, ...]
    singles: Mapping[str, tuple[float, ...]]
    loss_difference: float

    def __post_init__(self) -> None:
        counts = {len(self.switching), *map(len, self.singles.values())}
        if not self.singles or len(counts) > 1 or not self.switching or min(self.switching) <= 0:
            raise ValueError("the measured seconds are not of the same mini-batches")

    @property
    def best(self) -> str:
        """The single strategy that took least for all mini-batches."""
        return min(self.singles, key=lambda name: sum(self.singles[name]))

    def gains(self, single: str) -> list[float]:
        """How many times as long as switching a single strategy took, by mini-batch."""
        return [alone / hot for alone, hot in zip(self.singles[single], self.switching, strict=True)]

    @property
    def gain(self) -> float:
        """How many times as long as switching the best single strategy took: the median over the mini-batches."""
        return median(self.gains(self.best))

    @property
    def sentence(self) -> str:
        """The answer, without a full stop."""
        gains, name = self.gains(self.best), self.best
        spread = f"{min(gains):.2f}x to {max(gains):.2f}x" if len(gains) > 1 else "one mini-batch only"
        if self.gain > 1 + CLEAR:
            return f"Switching paid: {self.gain:.2f}x as fast as {name} alone (measured, {spread})"
        if self.gain < 1 - CLEAR:
            spread = f"{1 / max(gains):.2f}x to {1 / min(gains):.2f}x" if len(gains) > 1 else spread
            return f"Switching did not pay: {name} alone is {1 / self.gain:.2f}x as fast (measured, {spread})"
        return f"One strategy is as fast: {name} alone took {self.gain:.2f} times as long (measured, {spread})"

    @property
    def basis(self) -> str:
        """What the answer rests on."""
        count = len(self.switching)
        return (
            f"Measured after training, on {count} mini-batch{'es' if count > 1 else ''} of the run, each under every side in "
            f"turn: forward, backward and all that moves, without the update. Their losses agree to {self.loss_difference:.0e}."
        )

    def __str__(self) -> str:
        rows = [["", "s/mini-batch", "/ switching"], ["switching", f"{median(self.switching):.3f}", ""]]
        for name in sorted(self.singles, key=lambda name: sum(self.singles[name])):
            rows.append([f"{name} alone", f"{median(self.singles[name]):.3f}", f"{median(self.gains(name)):.2f}x"])
        return f"{text_table(self.basis, rows)}\n{self.sentence}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
