"""The result of `hf-hotspa bench`: its JSON file, its verdict, and its table and page; and several results side by side.

Plain data, as people send it: no host name, no path, no user. Every ratio is the seconds of another side over the seconds
of `auto`, on the same mini-batches; above 1 `auto` is faster.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.reporting import svg
from hf_hotspa.reporting.gain_words import PREDICTED_ERROR, against_others
from hf_hotspa.reporting.measured import MeasuredGain, Rival
from hf_hotspa.reporting.page import Panel, document
from hf_hotspa.reporting.terminal import text_table
from hf_hotspa.typed import Count, Finite, NotNegative, Positive, PositiveCount, typed
from hf_hotspa.whole_file import read_json, write_json

KIND, SCHEMA_VERSION = "hf_hotspa bench", 1
REMEDY = "give the bench.json that hf-hotspa bench wrote"
EXACT = 1e-6
"""The largest relative error of a loss or gradient that counts as exact: stock norms of an fp64 model cast to fp32."""
OURS, AUTO = "ours", "ours, auto"
_SAME = 0.01  # measured ratios nearer to 1 are called the same
_GIB = 1 << 30


@dataclass(frozen=True)
class PoolErrors:
    """Relative errors of strategies against one process: of the loss, and of the gradient that differs most."""

    loss: NotNegative
    gradient: NotNegative
    parameter: str

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradient)


@dataclass(frozen=True)
class Links:
    """Messages between neighbours, all ranks at once."""

    latency_s: NotNegative
    bandwidth: Positive  # bytes per second and direction
    slots: Positive | None  # how many ranks compute at the same time; None if each has its own core or device


@dataclass(frozen=True)
class Prediction:
    """What was predicted before the first turn."""

    strategies: str  # what `auto` would run, as `hotspa_strategies`
    sides: Mapping[str, Positive]  # seconds of a mini-batch by side
    answer: str
    switching: str


@dataclass(frozen=True)
class SideResult:
    """What was measured of one side."""

    kind: str
    strategies: str = ""
    rounds: tuple[tuple[Positive, ...], ...] = ()  # seconds of each timed mini-batch, by round
    losses: tuple[Finite, ...] = ()  # of all mini-batches of the last round
    peak_bytes: Count = 0  # of the fullest rank; 0 on CPU
    micro_rows: Count = 0  # of a stock micro-batch
    ran: tuple[str, ...] = ()  # strategies of ours
    failed: str = ""  # why a turn failed

    @property
    def seconds(self) -> list[float]:
        """Of all timed mini-batches, in order."""
        return [seconds for each in self.rounds for seconds in each]


@dataclass(frozen=True)
class FileResult:
    """The contest over one file of lengths."""

    name: str
    digest: str  # of the lengths and the size of a mini-batch
    rows: PositiveCount  # of a mini-batch
    tokens: Positive  # of a mini-batch, in the mean
    longest: PositiveCount
    prediction: Prediction | None = None
    sides: Mapping[str, SideResult] = field(default_factory=dict)

    def against(self, name: str) -> Rival | None:
        """Compares a side with `auto` on the mini-batches that both ran; None if either ran none."""
        auto, side = self.sides.get(AUTO), self.sides.get(name)
        if auto is None or side is None:
            return None
        both = [
            pair for one, other in zip(side.rounds, auto.rounds, strict=False) for pair in zip(one, other, strict=False)
        ]
        return Rival.of(name, [a for a, _ in both], [b for _, b in both]) if both else None

    def fastest(self, ours: bool) -> Rival | None:
        """The fastest single strategy of ours, or the fastest of the others."""
        names = [name for name, side in self.sides.items() if (side.kind == OURS) == ours and name != AUTO]
        rivals = [rival for name in names if (rival := self.against(name)) is not None]
        return min(rivals, key=lambda rival: rival.ratio, default=None)

    @property
    def loss_difference(self) -> float | None:
        runs = [side.losses for side in self.sides.values() if side.losses]
        if len(runs) < 2:
            return None
        return max((max(step) - min(step)) / max(abs(x) for x in step) for step in zip(*runs, strict=False))

    @property
    def sentences(self) -> list[str]:
        """Both answers, and what was predicted before."""
        lines = []
        if (other := self.fastest(ours=False)) is not None:
            margin = other.margin / min(1.0, other.ratio)  # of a ratio below 1: so that its upper end is below 1
            error = max(_SAME, margin) if math.isfinite(margin) else PREDICTED_ERROR
            how = f"measured on {other.count} mini-batches"
            lines.append(f"{self.name}: {against_others(other.ratio, other.name, error, how)}.")
        if (single := self.fastest(ours=True)) is not None:
            auto, alone = self.sides[AUTO].seconds, self.sides[single.name].seconds
            count = min(len(auto), len(alone))
            gain = MeasuredGain(tuple(auto[:count]), {_bare(single.name): tuple(alone[:count])}, 0.0)
            lines.append(f"{self.name}: {gain.sentence}.")
        if lines and self.prediction is not None:
            lines.append(f"{self.name}, predicted before: {self.prediction.answer}. {self.prediction.switching}.")
        return lines or [f"{self.name}: nothing to compare was measured."]


@dataclass(frozen=True)
class BenchResult:
    """Everything that a run of `hf-hotspa bench` found, as far as it came."""

    program: str  # version and, in a clone, commit
    started: str  # UTC, ISO 8601
    settings: Mapping[str, str]
    model: Mapping[str, str]
    machine: Mapping[str, Mapping[str, str]]  # facts by subject, as of `hf-hotspa env`
    ranks: PositiveCount
    devices: str  # such as `2 x Tesla T4`
    topology: str = ""
    exactness: Mapping[str, PoolErrors] = field(default_factory=dict)
    links: Links | None = None
    files: tuple[FileResult, ...] = ()
    parts: Mapping[str, NotNegative] = field(default_factory=dict)  # seconds by part
    not_done: tuple[str, ...] = ()  # parts that failed or were left out, and why
    ended: str = ""  # empty if everything was run, else why it ended early

    def save(self, path: str | os.PathLike[str]) -> None:
        write_json(path, KIND, SCHEMA_VERSION, asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "BenchResult":
        """Reads a file of `save`. Raises `HotspaConfigError`: it is missing, damaged, or of another kind."""
        data = read_json(path, KIND, SCHEMA_VERSION, REMEDY)
        try:
            return typed(data, cls)
        except ValueError as error:
            raise HotspaConfigError(f"the result cannot be read: {error}", where=str(path), fix=REMEDY) from None

    @property
    def worst(self) -> tuple[str, PoolErrors] | None:
        """The pool with the largest error; None if exactness was not checked."""
        return max(self.exactness.items(), key=lambda each: each[1].worst, default=None)

    @property
    def exact(self) -> bool | None:
        """Whether all strategies were exact; None if that was not checked."""
        return None if self.worst is None else self.worst[1].worst <= EXACT

    @property
    def exact_sentence(self) -> str:
        if self.worst is None:
            return "Exactness was not checked: speeds may be of wrong updates."
        (pool, errors), count = self.worst, len(self.exactness)
        if self.exact:
            return f"Exact: loss and gradients of {count} pools of strategies agree with one process to {errors.worst:.0e}."
        return (
            f"NOT EXACT: under {pool} loss and gradients differ from one process by {errors.worst:.0e} "
            f"({errors.parameter}). Speeds do not count; please report it with this result."
        )

    @property
    def sentences(self) -> list[str]:
        """The verdict: exactness first."""
        early = [f"Ended early: {self.ended}. What was measured until then:"] if self.ended else []
        return [*early, self.exact_sentence, *(line for file in self.files for line in file.sentences)]

    def __str__(self) -> str:
        tables = [text_table(_title(file), side_rows(file), 2, terminal=None) for file in self.files if file.sides]
        left = [f"not done: {text}" for text in self.not_done]
        return "\n\n".join([*tables, "\n".join([*self.sentences, *left])])


def _bare(name: str) -> str:
    return name.removeprefix(f"{OURS}, ")


def _title(file: FileResult) -> str:
    return f"{file.name}: {file.rows} rows and {file.tokens:,.0f} tokens a mini-batch, the longest {file.longest}"


def side_rows(file: FileResult) -> list[list[str]]:
    """Returns the table of a file, heading first: a line for each side, the first two columns flush left."""
    predicted = file.prediction.sides if file.prediction is not None else {}
    rows = [["", "side", "s/mini-batch", "of auto", "predicted s", "peak GiB", "last loss"]]
    for number, (name, side) in enumerate(file.sides.items()):
        rival = file.against(name)
        cells = [
            f"{fmean(side.seconds):#.4g}" if side.rounds else side.failed or "not run",
            f"{rival.ratio:.2f}x" if rival is not None else "-",
            f"{predicted[name]:#.4g}" if name in predicted else "-",
            f"{side.peak_bytes / _GIB:.1f}" if side.peak_bytes else "-",
            f"{side.losses[-1]:.5f}" if side.losses else "-",
        ]
        rows.append([chr(ord("a") + number), name, *cells])
    return rows


# -- pages ------------------------------------------------------------------------------------------------------------


def _file_panel(file: FileResult) -> Panel:
    timed = {
        chr(ord("a") + number): fmean(side.seconds)
        for number, side in enumerate(file.sides.values())
        if side.rounds
    }  # fmt: skip
    if not timed:
        return Panel(_anchor(file), _title(file), 0, rows=side_rows(file) if file.sides else (), empty="No side ran.")
    chart = svg.bars("Seconds of a mini-batch", list(timed), list(timed.values()), " s", "side")
    failed = [f"{name}: {side.failed}" for name, side in file.sides.items() if side.failed]
    off = file.loss_difference
    losses = [f"Losses of all sides agree to {off:.0e}."] if off is not None else []
    ran = [f"auto ran {', '.join(file.sides[AUTO].ran)}."] if AUTO in file.sides and file.sides[AUTO].ran else []
    return Panel(
        _anchor(file), _title(file), len(timed), chart, " ".join([*losses, *ran, *failed]),
        rows=side_rows(file), left=2,
    )  # fmt: skip


def _anchor(file: FileResult) -> str:
    return f"file-{file.name.replace(' ', '-')}"


def _exact_panel(result: BenchResult) -> Panel:
    rows = [["strategies", "loss", "gradients", "the worst gradient"]]
    for pool, errors in result.exactness.items():
        rows.append([pool, f"{errors.loss:.1e}", f"{errors.gradient:.1e}", errors.parameter])
    note = "Relative errors in fp64 against one process, one row at a time, of the gradients of all parameters."
    empty = "" if result.exactness else "Not checked."
    return Panel("exactness", "Exactness", len(result.exactness), note=note, wide=True, rows=rows, empty=empty)


def _parts_panel(result: BenchResult) -> Panel:
    rows = [["part", "seconds"], *([name, f"{seconds:.1f}"] for name, seconds in result.parts.items())]
    return Panel("parts", "Seconds of each part", len(result.parts), note=" ".join(result.not_done), rows=rows)


def _machine_panel(result: BenchResult) -> Panel:
    facts: dict[str, object] = {**result.settings, **result.model, "started": result.started}
    if (links := result.links) is not None:
        facts["links"] = f"{links.bandwidth / 1e9:.3g} GB/s, latency {links.latency_s * 1e6:.1f} us"
        if links.slots is not None:
            facts["ranks that compute at a time"] = f"{links.slots:.1f}"
    for values in result.machine.values():
        facts |= values
    if result.topology:
        facts["topology"] = result.topology
    return Panel("machine", "Machine and versions", len(facts), wide=True, facts=facts)


def bench_page(result: BenchResult) -> str:
    return document(
        f"hf_hotspa bench: {result.devices}",
        f"{result.program}; {result.ranks} ranks; started {result.started}",
        result.sentences,
        _tiles(result),
        [*map(_file_panel, result.files), _exact_panel(result), _parts_panel(result), _machine_panel(result)],
        "Made by hf-hotspa bench; hf-hotspa bench --compare shows several results side by side.",
    )


def _tiles(result: BenchResult) -> list[tuple[str, str]]:
    tiles = []
    if result.worst is not None:
        tiles.append((f"{result.worst[1].worst:.0e}", "largest error of loss and gradients"))
    for ours, what in ((False, "over the fastest stock Trainer"), (True, "over the best single strategy")):
        ratios = [rival.ratio for file in result.files if (rival := file.fastest(ours)) is not None]
        if ratios:
            tiles.append((_span(ratios), what))
    if result.links is not None:
        tiles.append((f"{result.links.bandwidth / 1e9:.3g} GB/s", "between neighbours"))
    tiles.append((f"{result.ranks}", f"ranks on {result.devices}"))
    return tiles


def _span(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"{low}x" if low == high else f"{low} to {high}x"


_COMPARED = ["machine", "lengths", "exact", "auto s", "over stock", "stock", "over single", "single", "predicted s"]


def compared_rows(results: Sequence[BenchResult]) -> list[list[str]]:
    """Returns a table, heading first: a line for each result and file of lengths, the first two columns flush left."""
    rows = [_COMPARED]
    for number, result in enumerate(results):
        exact = {True: "yes", False: "NO", None: "not checked"}[result.exact]
        for file in result.files:
            auto, stock, single = file.sides.get(AUTO), file.fastest(ours=False), file.fastest(ours=True)
            predicted = file.prediction.sides.get(AUTO) if file.prediction is not None else None
            rows.append(
                [
                    f"{number + 1}: {result.devices}",
                    f"{file.name} ({file.digest[:6]})",
                    exact,
                    f"{fmean(auto.seconds):#.4g}" if auto is not None and auto.rounds else "-",
                    *((f"{stock.ratio:.2f}x", stock.name) if stock is not None else ("-", "-")),
                    *((f"{single.ratio:.2f}x", _bare(single.name)) if single is not None else ("-", "-")),
                    f"{predicted:#.4g}" if predicted is not None else "-",
                ]
            )
    return rows


def compared_sentences(results: Sequence[BenchResult]) -> list[str]:
    """Returns what all results say together, exactness first."""
    checked = [result.exact for result in results if result.exact is not None]
    lines = [f"{checked.count(True)} of {len(results)} results are exact, {checked.count(False)} are not."]
    for ours, what in ((False, "the fastest stock Trainer"), (True, "the best single strategy")):
        ratios = [r.ratio for result in results for file in result.files if (r := file.fastest(ours)) is not None]
        if ratios:
            ahead = sum(ratio > 1 for ratio in ratios)
            lines.append(f"auto is {_span(ratios)} as fast as {what}; ahead in {ahead} of {len(ratios)} contests.")
    digests = {(file.name, file.digest) for result in results for file in result.files}
    if len(digests) > len({name for name, _ in digests}):
        lines.append("Lengths of one name but with another hash are other rows: compare ratios, not seconds.")
    return lines


def compared_page(results: Sequence[BenchResult]) -> str:
    rows = compared_rows(results)
    names = [f"{number + 1}: {result.devices}, {result.program}" for number, result in enumerate(results)]
    charts = []
    for ours, what in ((False, "the fastest stock Trainer"), (True, "the best single strategy")):
        ratios = {
            f"{number + 1}{file.name[:2]}": rival.ratio
            for number, result in enumerate(results)
            for file in result.files
            if (rival := file.fastest(ours)) is not None
        }
        if ratios:
            one = svg.Mark(1.0, "equally fast")
            chart = svg.bars(
                f"Seconds of {what} by auto's", list(ratios), list(ratios.values()), "x", "contest", "s1", one
            )
            charts.append(Panel(f"over-{OURS if ours else 'stock'}", f"Over {what}", len(ratios), chart))
    return document(
        f"hf_hotspa bench: {len(results)} results",
        "; ".join(names),
        compared_sentences(results),
        [(str(len(results)), "results"), (str(len(rows) - 1), "contests")],
        [*charts, Panel("compared", "All contests", len(rows) - 1, wide=True, rows=rows, left=2)],
        "Made by hf-hotspa bench --compare.",
    )
