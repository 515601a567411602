"""The measured gain of switching over single strategies, on the same mini-batches.

Owns the numbers of `trainer/gain.py` as plain data, their JSON in a run's record, and their texts in a terminal, a log
and the run's page. The only statistic is the mean, so each ratio is the ratio of the seconds beside it. The answer is
clear only if the 95% interval of the ratio excludes 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod, sqrt
from statistics import fmean
from typing import Any

from hf_hotspa.errors import StrategyError
from hf_hotspa.reporting.gain_words import of_switching
from hf_hotspa.reporting.terminal import text_table
from hf_hotspa.strategy import Strategy

_KNOWN_AS = {0: "DDP", 2: "ZeRO-2", 3: "FSDP / ZeRO-3"}
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""97.5 % quantiles of Student's t distribution, by degrees of freedom from 1 on."""


def known_as(name: str) -> str:
    """Returns a strategy with its common name, if any: `FSDP / ZeRO-3 (dp4+z3)`."""
    try:
        strategy = Strategy.parse(name)
    except StrategyError:
        return name
    plain = 1 < strategy.dp == prod(strategy.degrees) and not strategy.cuts_packs
    return f"{_KNOWN_AS[strategy.z]} ({name})" if plain else name


def _shown(seconds: float) -> float:
    return float(f"{seconds:#.4g}")


@dataclass(frozen=True)
class Rival:
    """A single strategy compared with switching, on the same mini-batches."""

    name: str  # from `known_as`
    count: int  # mini-batches
    alone: float  # its mean seconds, rounded as shown
    switching: float  # the mean seconds of switching, rounded as shown
    margin: float  # half of the ratio's 95% interval; infinite for one mini-batch

    @property
    def ratio(self) -> float:
        """Its seconds over the seconds of switching."""
        return self.alone / self.switching

    @property
    def low(self) -> float:
        """The lower end of the interval, to two decimals, as shown."""
        return round(max(self.ratio - self.margin, 0.0), 2)

    @property
    def high(self) -> float:
        return round(self.ratio + self.margin, 2)

    @classmethod
    def of(cls, name: str, alone: Sequence[float], switching: Sequence[float]) -> "Rival":
        """Compares seconds in pairs by mini-batch; the interval is for a ratio of two means."""
        count, a, b = len(alone), _shown(fmean(alone)), _shown(fmean(switching))
        margin = float("inf")
        if count > 1:
            off = sum((one - a / b * other) ** 2 for one, other in zip(alone, switching, strict=True))
            free = count - 1
            student = _STUDENT[free - 1] if free <= len(_STUDENT) else 1.96 + 2.4 / free + 2.8 / free**2
            margin = student * sqrt(off / (count * free)) / b
        return cls(known_as(name), count, a, b, margin)


@dataclass(frozen=True)
class MeasuredGain:
    """Seconds of forward and backward passes with all transfers, without the update. Raises `ValueError`: they are
    missing, or not of the same mini-batches."""

    switching: tuple[float, ...]  # of each mini-batch under the run's strategies
    # of the same mini-batches, in the same order, under each single strategy; only of the first ones for a clearly
    # slower strategy
    singles: Mapping[str, tuple[float, ...]]
    loss_difference: float  # the largest relative difference between losses of a mini-batch
    left_out: Mapping[str, str] = field(default_factory=dict)  # common ones that were not measured, and why

    def __post_init__(self) -> None:
        counts = {len(seconds) for seconds in self.singles.values()}
        if not counts or min(counts) < 1 or max(counts) != len(self.switching) or min(self.switching) <= 0:
            raise ValueError("the measured seconds are not of the same mini-batches")

    @property
    def best(self) -> str:
        """The fastest single strategy that ran all mini-batches."""
        whole = [name for name, seconds in self.singles.items() if len(seconds) == len(self.switching)]
        return min(whole, key=lambda name: sum(self.singles[name]))

    def against(self, single: str) -> Rival:
        """Compares a single strategy with switching, on the mini-batches that both ran."""
        alone = self.singles[single]
        return Rival.of(single, alone, self.switching[: len(alone)])

    @property
    def sentence(self) -> str:
        rival = self.against(self.best)
        count = f"{rival.count} mini-batch" + "es" * (rival.count > 1)
        interval = f"95% interval {rival.low:.2f}x to {rival.high:.2f}x" if rival.count > 1 else "without an interval"
        how = f"measured on {count}, {interval}"
        return of_switching(rival.ratio, rival.name, how, rival.low, rival.high, clear=False)

    @property
    def basis(self) -> str:
        return (
            "Measured after training, on the first mini-batches of the run, each under every side in turn: forward, backward "
            "and all that moves, without the update. Seconds and ratios are means; the losses of all sides agree to "
            f"{self.loss_difference:.0e}."
        )

    @property
    def rivals(self) -> list[Rival]:
        return sorted(map(self.against, self.singles), key=lambda rival: (-rival.count, rival.ratio))

    @property
    def not_measured(self) -> str:
        """The single strategies that were not measured, and why."""
        return "; ".join(f"{known_as(name)}: {why}" for name, why in self.left_out.items())

    @property
    def sentences(self) -> list[str]:
        """The text for a page, the answer first."""
        seconds = "; ".join(
            f"{r.name} {r.alone:#.4g} s and switching {r.switching:#.4g} s a mini-batch, {r.ratio:.2f}x, on {r.count}"
            for r in self.rivals
        )
        return [self.sentence, self.basis, f"{seconds}.", *([f"{self.not_measured}."] if self.left_out else [])]

    def __str__(self) -> str:
        rows = [["", "s/mini-batch alone", "switching", "ratio", "mini-batches"]]
        for r in self.rivals:
            rows.append([r.name, f"{r.alone:#.4g}", f"{r.switching:#.4g}", f"{r.ratio:.2f}x", f"{r.count}"])
        return "\n".join(filter(None, [text_table(self.basis, rows), self.not_measured, self.sentence]))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
