"""One page of HTML for one run: self-contained, light and dark, no network. A pure function of a `RunLog`."""

import time
from collections.abc import Sequence
from html import escape
from importlib import resources

from hf_hotspa.reporting.panels import Panel, all_panels
from hf_hotspa.reporting.run_log import RunLog
from hf_hotspa.reporting.summary import advice, summarize, verdict
from hf_hotspa.reporting.svg import short

PAGE_NAME = "report.html"


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
) -> str:
    """The whole page.

    Args:
        sentences: The answer first, then what it rests on.
        tiles: (number, what it is) pairs.
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
            f'<h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p>',
            '<section class="verdict">' + "".join(f"<p>{escape(s)}</p>" for s in sentences) + "</section>",
            f'<section class="tiles">{tile_html}</section>',
            f'<section class="panels">{"".join(panel.html() for panel in panels)}</section>',
            f"<footer>{escape(footer)}</footer></main>",
            f'<div id="tip" hidden="hidden"></div><script>{asset("page.js")}</script></body></html>',
            "",
        ]
    )


def report_page(run: RunLog, to_be_measured: bool = False) -> str:
    """The page of a run; see `verdict`."""
    summary = summarize(run)
    model = run.facts.model
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.started))
    tiles = [
        (f"{summary.num_steps}", "steps"),
        (short(summary.num_tokens), "tokens trained"),
        (short(summary.tokens_per_s), "tokens per second"),
        (f"{summary.median_step_s:.3f} s", "median step"),
        (f"{summary.switch_share:.1%}", "of the step is switching"),
        (_loss(summary.last_loss), f"loss at the end, {_loss(summary.first_loss)} at first"),
    ]
    if run.callback_s and summary.wall_s:
        tiles.append((f"{summary.callback_s / summary.wall_s:.2%}", "of the time inside callbacks"))
    name = str(model.get("name") or model.get("family") or "a model")
    restarts = f", started {run.starts} times" if run.starts > 1 else ""
    state = "" if run.ended else ". The record has no end: the run is going on, or was stopped"
    return document(
        f"hf_hotspa: {name} on {run.facts.world_size} ranks",
        f"started {started}{restarts}; strategies {', '.join(b['strategy'] for b in run.facts.buckets)}{state}",
        [*verdict(run, to_be_measured), *advice(run)],
        tiles,
        all_panels(run),
        f"Made by hf_hotspa {run.facts.versions.get('hf_hotspa', '')} from the run's record; "
        "hf-hotspa report makes it anew, hf-hotspa compare lays two runs side by side.",
    )


def _loss(loss: float | None) -> str:
    return f"{loss:.4f}" if loss is not None else "-"
