"""One page of HTML for one run: self-contained, light and dark, no network. A pure function of a `RunLog`.

Pictures for notebooks: the page of a run, and a histogram of lengths, as the last value of a cell.

Owns objects that notebooks show as HTML (`_repr_html_`); each is a frame of its own, so that its style sheet and that
of the notebook leave each other alone. Needs nothing but the package, and no network.

Panels of the page as SVG files, for papers and slides: with title, legend and style of their own, on white.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

import numpy as np

from hf_hotspa.reporting.panels import (
    Panel,
    all_panels,
    lengths_figure,
    loss_panel,
    rate_panel,
    share_panel,
    time_panel,
)
from hf_hotspa.reporting.run_log import RunLog, length_histogram, read_run_log
from hf_hotspa.reporting.summary import advice, summarize, verdict
from hf_hotspa.reporting.svg import WIDTH, short, text_width
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.whole_file import write_whole

PAGE_NAME = "report.html"
_GIB = 1 << 30


def asset(name: str) -> str:
    """A file of this folder."""
    return resources.files("hf_hotspa.reporting").joinpath(name).read_text(encoding="utf-8")


def document(
    title: str,
    subtitle: str,
    sentences: Sequence[str],
    tiles: Sequence[tuple[str, str]],
    panels: Sequence[Panel],
    footer: str,
    facts: Mapping[str, str] | None = None,
) -> str:
    """The whole page.

    Args:
        sentences: The answer first, then what it rests on.
        tiles: (number, what it is) pairs.
        facts: What stands under the title, by name.
    """
    tile_html = "".join(f'<div class="tile"><b>{escape(n)}</b><span>{escape(what)}</span></div>' for n, what in tiles)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{escape(title)}</title>",
            '<link rel="icon" href="data:,"/>',
            f"<style>{asset('page.css')}{asset('chart.css')}</style></head><body><main>",
            f'<h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p>{names_of(facts or {})}',
            '<section class="verdict">' + "".join(f"<p>{escape(s)}</p>" for s in sentences) + "</section>",
            f'<section class="tiles">{tile_html}</section>',
            f'<section class="panels">{"".join(panel.html() for panel in panels)}</section>',
            f"<footer>{escape(footer)}</footer></main>",
            f'<div id="tip" hidden="hidden"></div><script>{asset("page.js")}</script></body></html>',
            "",
        ]
    )


def names_of(facts: Mapping[str, str]) -> str:
    """A list of names and texts."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return f'<dl class="names">{rows}</dl>' if rows else ""


def report_page(run: RunLog, to_be_measured: bool = False) -> str:
    """The page of a run; see `verdict`."""
    facts = run.facts
    model = str(facts.model.get("name") or facts.model.get("family") or "a model")
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.started))
    restarts = f", started {run.starts} times" if run.starts > 1 else ""
    state = "" if run.ended else ". The record has no end: the run is going on, or was stopped"
    return document(
        f"{facts.run.get('name', 'hf_hotspa')}: {model} on {facts.world_size} ranks",
        f"started {started}{restarts}; strategies {', '.join(b['strategy'] for b in facts.buckets)}{state}",
        [*verdict(run, to_be_measured), *advice(run)],
        _tiles(run),
        all_panels(run),
        f"Made by hf_hotspa {facts.versions.get('hf_hotspa', '')} from the run's record; "
        "hf-hotspa report makes it anew, hf-hotspa compare lays two runs side by side.",
        {name: text for name, text in facts.run.items() if name != "name"},
    )


def _tiles(run: RunLog) -> list[tuple[str, str]]:
    """The numbers at the top: is it fast, does it fit, does it learn, and was every row trained."""
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
"""What was done to rows, as people say it."""


def _loss(loss: float | None) -> str:
    return f"{loss:.4f}" if loss is not None else "-"


class InlinePage:
    """A page in the output of a cell.

    Args:
        page: The whole page, HTML.
        height: Of its frame, in pixels; what is longer scrolls.
    """

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
    """The page of a run.

    Args:
        run: An output directory, its `hotspa_report` folder, or the record in it.
        height: Of the frame, in pixels.

    Raises:
        RunLogError: there is no record, or it is damaged.
    """
    return InlinePage(report_page(read_run_log(run)), height)


def show_lengths(lengths: Iterable[int], strategies: str = "", height: int = 460) -> InlinePage:
    """The histogram of sequence lengths.

    Args:
        lengths: In tokens.
        strategies: As for `hotspa_strategies`; the ends of its buckets are marked.
        height: Of the frame, in pixels.

    Raises:
        StrategyError: the strategies do not parse.
    """
    array = np.asarray(list(lengths), dtype=np.int64)
    buckets = [(str(b.strategy), b.longest) for b in parse_buckets(strategies)] if strategies else []
    ordered = np.sort(array)
    tiles = []
    if len(array):
        numbers = (len(array), int(array.sum()), int(ordered[len(array) // 2]), int(ordered[-1]))
        tiles = [(f"{n:,}", name) for n, name in zip(numbers, ("rows", "tokens", "median", "longest"), strict=True)]
    figures = [lengths_figure(length_histogram(array), buckets)] if len(array) else []
    return InlinePage(document("Sequence lengths", "in tokens", [], tiles, figures, ""), height)


SUFFIX = ".svg"
_MAIN = {
    "loss": loss_panel,
    "step_time": time_panel,
    "switch_share": share_panel,
    "tokens_per_second": rate_panel,
}
_MARGIN, _ROW, _KEY = 12, 16, 14
"""Pixels: around text, from one row of it to the next, and what a key of the legend takes."""


def save_pictures(run: RunLog, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes `loss.svg`, `step_time.svg`, `switch_share.svg` and `tokens_per_second.svg`; none for a run without steps."""
    if not run.steps:
        return []
    return [write_whole(Path(folder) / f"{name}{SUFFIX}", picture(panel(run))) for name, panel in _MAIN.items()]


def picture(panel: Panel) -> str:
    """A panel that holds a chart, as the text of an SVG file."""
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
    height = top + int(re.findall(r'viewBox="0 0 \d+ (\d+)"', panel.body)[0])
    chart = panel.body.partition(">")[2].removesuffix("</svg>")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{2 * WIDTH}" height="{2 * height}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#ffffff"/>'
        f'<text x="{_MARGIN}" y="{_ROW}" font-family="sans-serif" font-size="13" font-weight="bold">'
        f'{escape(panel.title)}</text>{"".join(legend)}<g transform="translate(0 {top})">{chart}</g></svg>\n'
    )
