"""Panels of the page as SVG files, for papers and slides: with title, legend and style of their own, on white."""

import os
import re
from html import escape
from pathlib import Path

from hf_hotspa.reporting.page import asset
from hf_hotspa.reporting.panels import Panel, loss_panel, rate_panel, share_panel, time_panel
from hf_hotspa.reporting.run_log import RunLog
from hf_hotspa.reporting.svg import WIDTH, text_width
from hf_hotspa.whole_file import write_whole

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
