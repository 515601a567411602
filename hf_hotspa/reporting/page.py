"""The HTML page of a run: self-contained, light and dark, no network. A pure function of a `RunLog`.

Notebooks show the page, and a histogram of lengths, as the last value of a cell (`_repr_html_`), each in a frame, so
that its style sheet and the notebook's do not interfere. Papers and slides get panels as SVG files, with title, legend
and style, on white.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from html import escape
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hf_hotspa.reporting import svg
from hf_hotspa.reporting.measure_table import rows_of, strategy_columns
from hf_hotspa.reporting.run_log import RunLog, StepRecord, length_histogram, read_run_log
from hf_hotspa.reporting.summary import advice, padded_tokens, strategy_order, summarize, verdict
from hf_hotspa.reporting.svg import WIDTH, Mark, Series, short, text_width
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.whole_file import write_whole

if TYPE_CHECKING:
    from jinja2 import Environment

_MIB, _GIB = 1 << 20, 1 << 30
_COLOURS = 6
_MOST_STRIPS = 32
_NO_STEPS = "No mini-batch was recorded."


@dataclass(frozen=True)
class Panel:
    """One figure, of the parts that are not empty; `page.html` renders it."""

    name: str  # for links and tests, such as `loss`
    title: str
    points: int  # number of values shown
    chart: str = ""  # SVG
    note: str = ""
    legend: Sequence[tuple[str, str]] = ()  # (colour class, text) pairs
    wide: bool = False  # whether it fills a row of the page
    rows: Sequence[Sequence[str]] = ()  # a table, the heading first
    left: int = 1  # how many columns of it are flush left
    facts: Mapping[str, object] = field(default_factory=dict)  # a list of names and values
    empty: str = ""  # why there is nothing to show
    text: str = ""  # a text of fixed width, folded away


Drawn = tuple[str, str, Sequence[Series]]  # a chart, its note, and the series of its legend


def _of_steps(name: str, title: str, draw: Callable[[RunLog], Drawn]) -> Callable[[RunLog], Panel]:
    def panel(run: RunLog) -> Panel:
        if not run.steps:
            return Panel(name, title, 0, empty=_NO_STEPS)
        chart, note, series = draw(run)
        return Panel(name, title, len(run.steps), chart, note, _legend(series))

    return panel


def _steps(run: RunLog) -> list[float]:
    return [float(record.step) for record in run.steps]


def _legend(series: Sequence[Series]) -> list[tuple[str, str]]:
    return [(s.style, s.name) for s in series]


def lengths_panel(run: RunLog) -> Panel:
    """The histogram of lengths with the bucket edges."""
    histogram = run.facts.lengths
    if histogram is None or not sum(histogram["sequences"]):
        why = "The data set was a stream: its lengths were not known before."
        return Panel("lengths", "Sequence lengths", 0, empty=why)
    return lengths_figure(histogram, [(b["strategy"], b["longest"]) for b in run.facts.buckets])


def lengths_figure(histogram: Mapping[str, Sequence[int]], buckets: Sequence[tuple[str, int]]) -> Panel:
    """Draws a histogram (`reporting/run_log.py`) and buckets: strategy and longest sequence of each."""
    series = [
        Series(key, style, [n / max(sum(histogram[key]), 1) for n in histogram[key]])
        for key, style in (("sequences", "s0"), ("tokens", "s1"))
    ]
    top = histogram["edges"][-1]
    marks = [Mark(longest, f"{strategy} to {longest}") for strategy, longest in buckets]
    body = svg.histogram("Sequence lengths in tokens", histogram["edges"], series, marks, "tokens")
    beyond = [strategy for strategy, longest in buckets if longest > top]
    note = "Shares by length of the row; lines are the ends of buckets." if buckets else "Shares by length of the row."
    if beyond:
        note += f" {', '.join(beyond)}: beyond the longest row."
    return Panel("lengths", "Sequence lengths", len(histogram["sequences"]), body, note, _legend(series))


def _time(run: RunLog) -> Drawn:
    """Seconds of each step: computation by strategy, switches, the rest."""
    order = strategy_order(run)
    reports = [record.report for record in run.steps]
    series = [
        Series(s, f"s{at % _COLOURS}", [sum(p.compute_s for p in r.phases if p.strategy == s) for r in reports])
        for at, s in enumerate(order)
    ]
    rest = [max(0.0, r.total_s - r.moved_s - sum(p.compute_s for p in r.phases)) for r in reports]
    series = [
        *(s for s in series if any(s.values)),
        Series("load and return", "load", [r.load_return_s for r in reports]),
        Series("switching", "switch", [r.switch_s for r in reports]),
        Series("the rest", "other", rest),
    ]
    note = (
        "Computation of the busiest rank. Load and return: what one strategy alone would have to move, too; switching: what "
        "is moved beyond that; both as far as they are not hidden. The rest is waiting and agreeing."
    )
    return svg.stacked("Seconds of a step", _steps(run), series, " s"), note, series


def _share(run: RunLog) -> Drawn:
    """The share of switching in each step."""
    reports = [record.report for record in run.steps]
    series = [
        Series("switching", "switch", [r.switch_share for r in reports]),
        Series("load and return", "load", [r.load_return_share for r in reports]),
        Series("hidden, of both", "hidden", [r.hidden_s / r.total_s if r.total_s > 0 else 0.0 for r in reports]),
    ]
    if not any(series[2].values):
        series.pop()
    note = (
        "The step takes that much longer by switching, and by the load and the return that one strategy alone would need, "
        "too. Hidden: ran beside computation."
    )
    return svg.lines("Share of switching in the step time", _steps(run), series, "%", 100.0), note, series


def _losses(run: RunLog) -> Drawn:
    by_step = {
        step: next((v for k, v in metrics.items() if k.endswith("_loss")), None) for step, metrics in run.evaluations
    }
    losses = {record.step: record.report.loss for record in run.steps}
    steps = sorted({*losses, *by_step})
    series = [Series("training", "s0", [losses.get(step) for step in steps])]
    if any(value is not None for value in by_step.values()):
        series.append(Series("evaluation", "eval", [by_step.get(step) for step in steps]))
    chart = svg.lines("Loss", [float(s) for s in steps], series, from_zero=False)
    return chart, "Mean over the label tokens of the mini-batch.", series


def _padding(run: RunLog) -> Drawn:
    """The waste of padding, and the unused capacity of packs."""
    reports = [record.report for record in run.steps]
    padded = list(map(padded_tokens, reports))
    capacities = [sum(p.capacity_tokens for p in r.phases) for r in reports]
    tokens = [r.num_tokens for r in reports]
    series = [
        Series("in a padded batch", "s5", list(map(_waste, tokens, padded))),
        Series("unused capacity of packs", "s2", list(map(_waste, tokens, capacities))),
    ]
    schedule = run.facts.settings.get("pipeline_schedule", "auto")
    note = "Padded: every sequence as long as the longest of its mini-batch. Unused capacity costs memory, not seconds."
    if schedule in ("1f1b", "gpipe"):
        note += f" The schedule {schedule} also pads the packs of a replica to one length."
    return svg.lines("Padding share", _steps(run), series, "%", 100.0), note, series


def _waste(tokens: int, slots: int) -> float:
    return max(0.0, 1.0 - tokens / slots) if slots else 0.0


time_panel = _of_steps("time", "Step time by phase", _time)
share_panel = _of_steps("share", "Switching, share of the step", _share)
loss_panel = _of_steps("loss", "Loss", _losses)
padding_panel = _of_steps("padding", "Padding, avoided and left", _padding)


def _curve(
    name: str, title: str, style: str, value: Callable[[StepRecord], float | None], note: str
) -> Callable[[RunLog], Panel]:
    def panel(run: RunLog) -> Panel:
        values = [value(record) for record in run.steps]
        known = sum(value is not None for value in values)
        if not known:
            return Panel(name, title, 0, empty="Not recorded." if run.steps else _NO_STEPS)
        return Panel(name, title, known, svg.lines(title, _steps(run), [Series(title.lower(), style, values)]), note)

    return panel


learning_rate_panel = _curve("lr", "Learning rate", "s0", lambda r: r.lr, "Of the first parameter group.")
grad_norm_panel = _curve(
    "grad_norm", "Gradient norm", "s2", lambda r: r.report.grad_norm, "Over all weights, before clipping."
)
rate_panel = _curve(
    "rate", "Tokens per second", "s1", lambda r: r.report.num_tokens / r.wall_s if r.wall_s > 0 else None,
    "Over all ranks; the optimizer step counts, loading data does not.",
)  # fmt: skip


def memory_panel(run: RunLog) -> Panel:
    name, title = "memory", "Peak memory by rank"
    if not run.memory:
        return Panel(name, title, 0, empty="Not recorded.")
    limit: int | None = run.facts.machine.get("memory_bytes")
    size, unit = (_GIB, " GiB") if max(*run.memory, limit or 0) >= _GIB else (_MIB, " MiB")
    names = [str(i) for i in range(len(run.memory))]
    most = None if limit is None else Mark(limit / size, f"limit {limit / size:.4g}{unit}")
    body = svg.bars(f"Peak memory in{unit}", names, [n / size for n in run.memory], unit, "rank", "s3", most)
    if limit is not None:
        fullest = max(range(len(run.memory)), key=lambda rank: run.memory[rank])
        note = f"Allocated by torch. Rank {fullest} was the fullest: {run.memory[fullest] / limit:.0%} of the limit."
    elif run.facts.machine.get("device", "cpu") == "cpu":
        note = "Resident in the process, libraries and data loading included; there is no limit per process."
    else:
        note = "Allocated by torch."
    return Panel(name, title, len(names), body, note)


def devices_panel(run: RunLog) -> Panel:
    """The relative step time of each rank, as a strip."""
    name, title = "devices", "Relative step time of each device"
    known = [(record.step, record.report) for record in run.steps if record.report.paces is not None]
    if not known:
        return Panel(name, title, 0, empty="Not watched: hotspa_stragglers is off, or there is one process.")
    paces = list(zip_longest(*(report.paces or () for _, report in known)))  # [rank][step]
    size, rows = len(paces), [Series(f"rank {rank}", "heat", of_rank) for rank, of_rank in enumerate(paces)]
    if size > _MOST_STRIPS:
        rows = sorted(rows, key=lambda row: -max(v or 0.0 for v in row.values))[:_MOST_STRIPS]
    label = "Seconds of computation by rank, as a multiple of ranks that are not slow"
    body = svg.heat(label, [float(step) for step, _ in known], rows, 3.0)
    slow = sorted({rank for _, report in known for rank in report.slow})
    called = f"Called slow at some time: rank {', '.join(map(str, slow))}." if slow else "No device was called slow."
    most = f" Of {size} ranks the {_MOST_STRIPS} with the longest steps are shown." if size > _MOST_STRIPS else ""
    note = f"Seconds without waiting for others, by the cost of what the rank ran; full colour is 3 times as long. {called}{most}"
    return Panel(name, title, len(known), body, note)


def prediction_panel(run: RunLog) -> Panel:
    """Predicted and measured seconds of the phases of each step."""
    name, title = "prediction", "Predicted and measured"
    known = [(record.step, [p for p in record.report.phases if p.predicted_s is not None]) for record in run.steps]
    known = [(step, phases) for step, phases in known if phases]
    if not known:
        why = "hotspa_strategies=auto measures the machine first, and so does hotspa_calibration=measure."
        return Panel(name, title, 0, empty=f"No time model: {why}")
    series = [
        Series("measured", "s0", [sum(p.seconds for p in phases) for _, phases in known]),
        Series("predicted", "s4", [sum(p.predicted_s or 0.0 for p in phases) for _, phases in known]),
    ]
    body = svg.lines("Seconds of all phases", [float(step) for step, _ in known], series, " s")
    off = sum(abs((p.predicted_s or 0.0) - p.seconds) for _, phases in known for p in phases)
    measured = sum(p.seconds for _, phases in known for p in phases)
    note = f"Phases were off by {off / measured:.0%} of the measured time on average." if measured else ""
    return Panel(name, title, len(known), body, note, _legend(series))


def plan_panel(run: RunLog) -> Panel:
    facts = run.facts
    rows = [["tokens", "strategy", "pack tokens"]]
    predicted = {row.get("strategy"): row for row in (facts.plan or {}).get("rows", ()) if isinstance(row, dict)}
    if predicted:
        rows[0] += ["compute s", "load + return s"]
    for bucket in facts.buckets:
        row = [f"{bucket['low'] + 1} - {bucket['longest']}", bucket["strategy"], f"{bucket['pack_tokens']}"]
        if predicted:
            prediction = predicted.get(bucket["strategy"], {})
            row += [_seconds(prediction.get("compute_s")), _seconds(prediction.get("switch_s"))]
        rows.append(row)
    note = text = ""
    if facts.plan is not None:
        text = str(facts.plan.get("text", ""))  # records of earlier versions have none
        note = (
            f"Predicted for a typical mini-batch: {facts.plan['seconds']:.3f} s; the best single strategy, "
            f"{facts.plan['static']}, {facts.plan['static_s']:.3f} s."
        )
        if "verdict" in facts.plan and run.gain is None:  # records of earlier versions have no verdict
            for words in filter(None, (facts.plan.get("answer"), str(facts.plan["verdict"]))):
                note += f" {words[:1].upper()}{words[1:]}."
    return Panel("plan", "Buckets", len(facts.buckets), note=note, rows=rows, left=2, text=text)


def race_panel(run: RunLog) -> Panel:
    races = [(record.step, race) for record in run.steps if (race := record.report.race) is not None]
    if not races:
        why = "No plans were raced: strategies were given, one plan is far ahead of the others, or the run is too short for it."
        return Panel("race", "Race of plans", 0, empty=why)
    rows = [
        ["after step", "kept", "second", "plans", "mini-batches", "second by kept", "interval", "cost in mini-batches"]
    ]
    for step, race in races:
        ratios = [f"{race.factor:.2f}x", f"{race.low:.2f} to {race.high:.2f}"]
        counts = [f"{race.tried}", f"{race.mini_batches}", *ratios, f"{race.cost:.1f}"]
        rows.append([f"{step}", race.kept, race.second, *counts])
    return Panel("race", "Race of plans", len(races), note=f"Last: {races[-1][1]}.", wide=True, rows=rows, left=3)


def _seconds(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def strategies_panel(run: RunLog) -> Panel:
    totals = {s.strategy: partial(getattr, s) for s in summarize(run).strategies}
    if not totals:
        return Panel("strategies", "Strategies", 0, empty=_NO_STEPS)
    return Panel("strategies", "Strategies", len(totals), wide=True, rows=rows_of(strategy_columns("page", totals)))


_OPTIONAL = ("devices", "race")  # panels that are left out where there is nothing to show
_MOST_METRICS = 12
_FIRST_METRICS = ("reward", "margin", "kl", "accurac", "entropy")


def run_panel(run: RunLog) -> Panel:
    facts = run.facts
    parts = {**facts.model, **facts.machine, "ranks": facts.world_size, **facts.settings, **facts.versions}
    return Panel("run", "Run and versions", len(parts), wide=True, facts=parts)


def all_panels(run: RunLog) -> list[Panel]:
    """Returns all panels in the order of the page, with empty ones at the end."""
    makers = (
        loss_panel, learning_rate_panel, grad_norm_panel, rate_panel, memory_panel, time_panel, share_panel, lengths_panel,
        padding_panel, devices_panel, prediction_panel, plan_panel, race_panel, strategies_panel, run_panel,
    )  # fmt: skip
    panels = [*(make(run) for make in makers), *metric_panels(run)]
    return sorted((p for p in panels if p.points or p.name not in _OPTIONAL), key=lambda panel: not panel.points)


def metric_panels(run: RunLog) -> list[Panel]:
    """What only this trainer logged: rewards, margins and divergences of TRL's trainers, for example."""
    curves: dict[str, dict[int, float]] = {}
    for step, metrics in run.logs:
        for name, value in metrics.items():
            if value is not None:
                curves.setdefault(name, {})[step] = value
    names = sorted(curves, key=lambda name: not any(word in name for word in _FIRST_METRICS))[:_MOST_METRICS]
    return [_metric(name, curves[name]) for name in names]


def _metric(name: str, values: Mapping[int, float]) -> Panel:
    series = [Series(name, "s0", list(values.values()))]
    chart = svg.lines(escape(name), [float(step) for step in values], series, from_zero=False)
    return Panel(re.sub(r"\W", "-", name), name, len(values), chart, "As logged by the trainer.")


# -- the page ---------------------------------------------------------------------------------------------------------


PAGE_NAME = "report.html"


def asset(name: str) -> str:
    return resources.files("hf_hotspa.reporting").joinpath(name).read_text(encoding="utf-8")


def document(
    title: str,
    subtitle: str,
    sentences: Sequence[str],  # the answer first, then its basis
    tiles: Sequence[tuple[str, str]],  # (number, description) pairs
    panels: Sequence[Panel],
    footer: str,
    facts: Mapping[str, str] | None = None,  # the texts under the title, by name
) -> str:
    return _environment().get_template("page.html").render(
        title=title, subtitle=subtitle, sentences=sentences, tiles=tiles, panels=panels, footer=footer, facts=facts
    ).lstrip()  # fmt: skip


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FunctionLoader  # here, as commands that make no page import this module, too

    made = Environment(loader=FunctionLoader(asset), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.globals["asset"] = asset
    return made


def report_page(run: RunLog, to_be_measured: bool = False) -> str:
    """Returns the page of a run; see `verdict`."""
    facts = run.facts
    model = str(facts.model.get("name") or facts.model.get("family") or "a model")
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.started))
    restarts = f", started {run.starts} times" if run.starts > 1 else ""
    state = "" if run.ended else ". The record has no end: the run has not finished, or was stopped"
    return document(
        f"{facts.run.get('name', 'hf_hotspa')}: {model} on {facts.world_size} rank{'s' * (facts.world_size != 1)}",
        f"started {started}{restarts}; strategies {', '.join(b['strategy'] for b in facts.buckets)}{state}",
        [*verdict(run, to_be_measured), *advice(run)],
        _tiles(run),
        all_panels(run),
        f"Made by hf_hotspa {facts.versions.get('hf_hotspa', '')} from the run's record; "
        "hf-hotspa report makes it again, hf-hotspa compare compares two runs.",
        {name: text for name, text in facts.run.items() if name != "name"},
    )


def _tiles(run: RunLog) -> list[tuple[str, str]]:
    summary, limit = summarize(run), run.facts.machine.get("memory_bytes")
    planned = run.facts.settings.get("max_steps", 0)
    of_all = f" of {planned:,}" if planned > 0 else ""
    tiles = [(f"{short(summary.tokens_per_s)}", f"tokens per second, {short(summary.num_tokens)} in all")]
    if summary.utilization is not None:
        tiles.append((f"{summary.utilization:.1%}", "of the GPUs' peak (MFU)"))
    tiles.append((f"{summary.switch_share:.1%}", "of the step is switching"))
    if run.memory and limit:
        tiles.append((f"{max(run.memory) / limit:.0%}", f"of {limit / _GIB:.4g} GiB on the fullest rank"))
    elif run.memory:
        tiles.append((f"{max(run.memory) / _GIB:.2f} GiB", "on the fullest rank"))
    tiles.append((_loss(summary.last_loss), f"loss at the end, {_loss(summary.first_loss)} at first"))
    evaluated = [
        (value, step)
        for step, metrics in run.evaluations
        for name, value in metrics.items()
        if name.endswith("_loss") and value is not None
    ]
    if evaluated:
        best, step = min(evaluated)
        tiles.append((_loss(evaluated[-1][0]), f"evaluation loss; lowest {_loss(best)} after step {step}"))
    tiles.append((f"{summary.num_steps:,}", f"steps{of_all}, {summary.median_step_s:.3f} s each (median)"))
    return tiles + [(f"{count:,}", f"rows {_CHANGED[change]}") for change, count in summary.rows.items()]


_CHANGED = {"truncated": "cut", "split": "split", "dropped": "dropped, too long", "empty": "without a token"}
"""Changes of rows, in words."""


def _loss(loss: float | None) -> str:
    return f"{loss:.4f}" if loss is not None else "-"


class InlinePage:
    """An HTML page in a cell's output, in a scrolling frame `height` pixels high."""

    def __init__(self, page: str, height: int) -> None:
        self.page, self.height = page, height

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.page, quote=True)}" width="100%" height="{self.height}" '
            'style="border: 1px solid #8884" loading="eager"></iframe>'
        )

    def __repr__(self) -> str:
        return f"a page of {len(self.page)} characters, which a notebook shows"


def show_report(run: str | os.PathLike[str], height: int = 900) -> InlinePage:
    """Returns the page of a run for a notebook, in a frame `height` pixels high. `run`: an output directory, its
    `hotspa_report` folder, or the record in it. Raises `RunLogError`: there is no record, or it is damaged."""
    return InlinePage(report_page(read_run_log(run)), height)


def show_lengths(lengths: Iterable[int], strategies: str = "", height: int = 460) -> InlinePage:
    """Returns the histogram of sequence lengths in tokens for a notebook, in a frame `height` pixels high. `strategies`: as
    for `hotspa_strategies`, to mark bucket ends. Raises `StrategyError`: they do not parse."""
    array = np.sort(np.asarray(list(lengths), dtype=np.int64))
    buckets = [(str(b.strategy), b.longest) for b in parse_buckets(strategies)] if strategies else []
    tiles, figures = list[tuple[str, str]](), list[Panel]()
    if len(array):
        numbers = {"rows": len(array), "tokens": array.sum(), "median": array[len(array) // 2], "longest": array[-1]}
        tiles = [(f"{number:,}", name) for name, number in numbers.items()]
        figures = [lengths_figure(length_histogram(array), buckets)]
    return InlinePage(document("Sequence lengths", "in tokens", [], tiles, figures, ""), height)


SUFFIX = ".svg"
_MAIN = {
    "loss": loss_panel,
    "step_time": time_panel,
    "switch_share": share_panel,
    "tokens_per_second": rate_panel,
    "lengths": lengths_panel,
}
_MARGIN, _ROW, _KEY = 12, 16, 14  # pixels: around text, between rows of text, and the width of a legend key


def save_pictures(run: RunLog, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes the main charts that have something to show as SVG, and as PNG if `resvg-py` is installed; none without
    steps. Returns the paths."""
    panels = {name: panel(run) for name, panel in _MAIN.items()} if run.steps else {}
    texts = {name: picture(panel) for name, panel in panels.items() if panel.chart}
    paths = [write_whole(Path(folder) / f"{name}{SUFFIX}", text) for name, text in texts.items()]
    with suppress(ImportError):
        from resvg_py import svg_to_bytes

        for name, text in texts.items():
            paths.append(Path(folder) / f"{name}.png")
            paths[-1].write_bytes(bytes(svg_to_bytes(svg_string=text)))
    return paths


def picture(panel: Panel) -> str:
    """Returns a panel with a chart as the text of an SVG file."""
    colours = dict(re.findall(r"--(\w+): (#\w+);", asset("page.css").partition("@media")[0]))
    style = re.sub(r"var\(--(\w+)\)", lambda name: colours[name[1]], asset("chart.css"))  # few programs know variables
    x, y, legend = _MARGIN, 2 * _ROW + 4, []
    for colour, text in panel.legend:
        width = _KEY + round(text_width(text, "label"))
        if x > _MARGIN and x + width > WIDTH:
            x, y = _MARGIN, y + _ROW
        legend.append(f'<rect class="{colour}" x="{x}" y="{y - 9}" width="10" height="10"/>')
        legend.append(f'<text class="label" x="{x + _KEY}" y="{y}">{escape(text)}</text>')
        x += width + _MARGIN
    top = y + 4 if legend else _ROW + 8
    height = top + int(re.findall(r'viewBox="0 0 \d+ (\d+)"', panel.chart)[0])
    chart = panel.chart.partition(">")[2].removesuffix("</svg>")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{2 * WIDTH}" height="{2 * height}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#ffffff"/>'
        f'<text x="{_MARGIN}" y="{_ROW}" font-family="sans-serif" font-size="13" font-weight="bold">'
        f'{escape(panel.title)}</text>{"".join(legend)}<g transform="translate(0 {top})">{chart}</g></svg>\n'
    )
