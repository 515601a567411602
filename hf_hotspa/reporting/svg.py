"""Small charts as inline SVG: histograms, bars, stacked bars and lines, in the colours of the page's style sheet.

Every function returns one well-formed `<svg>` element that scales with its column. Colours are classes (`s0` ... `s5`
for strategies, `switch`, `load`, `wait`, `other`, `hidden`), so that the style sheet chooses light or dark. The page's
script shows tips from `data-tip`. Texts neither overlap nor leave the chart: fonts are unknown, and `text_width` is an
upper bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape, quoteattr

import numpy as np

WIDTH, HEIGHT = 420, 230
FONT = {"tick": 11.5, "label": 11.5, "marktext": 10.5}  # font sizes in pixels by class of text; as in `chart.css`
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 14, 34
_ROW = 13  # pixels between rows of mark texts
_MOST_POINTS = 160


@dataclass(frozen=True)
class Series:
    """A named row of numbers."""

    name: str  # for the legend and tips
    style: str  # the CSS class of its colour
    values: Sequence[float | None]  # one for each x, or None


@dataclass(frozen=True)
class Mark:
    """A labelled line at a value."""

    x: float
    text: str


_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_NARROW, _USUAL, _WIDE = 0.64, 0.66, 1.0  # widths of characters in ems, of DejaVu Sans, the widest of the common fonts


def short(value: float) -> str:
    """Formats a number with about three digits: 12.3k, 0.0041."""
    size = abs(value)
    for limit, unit in _UNITS:
        if size >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def distinct(values: Sequence[float], unit: str = "") -> list[str]:
    """Formats numbers like `short`, with as many digits as distinguish them."""
    size = max(map(abs, values), default=0.0)
    scale, letter = next(((n, c) for n, c in _UNITS if size >= n), (1.0, ""))
    texts: list[str] = []
    for digits in range(3, 10):
        texts = [f"{value / scale:.{digits}g}" + (letter if value else "") + unit for value in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts


def text_width(text: str, style: str = "tick") -> float:
    """Returns an upper bound of a text's width in pixels, in browsers' default fonts."""
    return sum(_NARROW if c in " .,:il1'|" else _WIDE if c in "mwMW%@+" else _USUAL for c in text) * FONT[style]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns at most `most + 1` round numbers in `[low, high]`."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + i) * step, 12) for i in range(count)]


def thinned(xs: Sequence[float], series: Sequence[Series]) -> tuple[list[float], list[Series]]:
    """Returns at most `_MOST_POINTS` points: means over neighbours, at the x of the last one."""
    size = -(-len(xs) // _MOST_POINTS)
    if size <= 1:
        return list(xs), list(series)
    groups = [range(begin, min(begin + size, len(xs))) for begin in range(0, len(xs), size)]

    def mean(values: Sequence[float | None], group: range) -> float | None:
        known = [v for v in (values[i] for i in group) if v is not None]
        return sum(known) / len(known) if known else None

    means = [Series(s.name, s.style, [mean(s.values, group) for group in groups]) for s in series]
    return [xs[group[-1]] for group in groups], means


class _Frame:
    def __init__(
        self,
        label: str,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        unit: str,
        y_ticks: Sequence[tuple[float, str]] = (),
    ) -> None:
        self.label = label
        self.x_low, self.x_high = x_range
        self.y_low, self.y_high = y_range
        self.parts: list[str] = []
        self.top, self.height = _TOP, HEIGHT
        at = ticks(*y_range)
        self.y_ticks = y_ticks or list(zip(at, distinct(at, unit), strict=True))
        self.left = max(_LEFT, math.ceil(max((text_width(text) for _, text in self.y_ticks), default=0)) + 8)
        self.width = WIDTH - self.left - _RIGHT

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low
        return self.left + self.width * ((value - self.x_low) / span if span else 0.5)

    def y(self, value: float) -> float:
        span = self.y_high - self.y_low
        bottom = self.height - _BOTTOM
        return bottom - (bottom - self.top) * ((value - self.y_low) / span if span else 0.5)

    def rect(
        self, style: str, x0: float, x1: float, low: float, high: float, tip: str = "", shade: float | None = None
    ) -> None:
        top, bottom = self.y(high), self.y(low)
        attribute = f" data-tip={quoteattr(tip)}" if tip else ""
        attribute += "" if shade is None else f' fill-opacity="{0.06 + 0.94 * shade:.2f}"'
        self.parts.append(
            f'<rect class="{style}" x="{x0:.1f}" y="{top:.1f}" width="{max(x1 - x0, 0.5):.1f}" '
            f'height="{max(bottom - top, 0):.1f}"{attribute}/>'
        )

    def text(self, x: float, y: float, text: str, anchor: str = "middle", style: str = "tick") -> None:
        self.parts.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def hover(self, x: float, width: float, tip: str) -> None:
        left, right = max(x - width / 2, self.left), min(x + width / 2, WIDTH - _RIGHT)
        self.parts.append(
            f'<rect class="hover" x="{left:.1f}" y="{self.top}" width="{max(right - left, 0.5):.1f}" '
            f'height="{self.height - self.top - _BOTTOM}" data-tip={quoteattr(tip)}/>'
        )

    def marks(self, marks: Sequence[tuple[float, str]]) -> None:
        """Draws vertical lines at pixels of x, with texts in rows above, which move later elements down."""
        rows: list[list[tuple[float, float]]] = []
        placed = []
        for x, text in sorted(marks):
            size = text_width(text, "marktext")
            begin = max(2.0, x - 4 - size) if x + 4 + size > WIDTH - 2 else x + 4
            row = next(
                (row for row in rows if all(begin > stop + 4 or begin + size < start - 4 for start, stop in row)), None
            )
            if row is None:
                rows.append(row := [])
            row.append((begin, begin + size))
            placed.append((x, begin, rows.index(row), text))
        self.top += _ROW * len(rows)
        self.height += _ROW * max(len(rows) - 1, 0)
        bottom = self.height - _BOTTOM
        for x, begin, place, text in placed:
            y = _TOP + _ROW * place
            self.parts.append(
                f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 6}" y2="{bottom}" data-tip={quoteattr(text)}/>'
            )
            self.text(begin, y, text, "start", "marktext")

    def svg(self, x_label: str, x_ticks: Sequence[tuple[float, str]]) -> str:
        frame, self.parts = self.parts, []
        for value, text in self.y_ticks:
            y = self.y(value)
            self.parts.append(f'<line class="grid" x1="{self.left}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.text(self.left - 6, y + 4, text, "end")
        free = WIDTH - 1.0
        for x, text in sorted(x_ticks, reverse=True):  # the last one is always shown
            half = text_width(text) / 2
            middle = min(x, WIDTH - 1 - half)
            if middle + half <= free and middle - half >= 0:
                self.text(middle, self.height - _BOTTOM + 16, text)
                free = middle - half - 4
        self.text((WIDTH + self.left) / 2, self.height - 4, x_label, style="label")
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label={quoteattr(self.label)}>'
        return "".join([head, *self.parts, *frame, "</svg>"])


def _slot_ticks(frame: _Frame, xs: Sequence[float]) -> list[tuple[float, str]]:
    count, slot = min(6, len(xs)), frame.width / len(xs)
    at = sorted({round(i * (len(xs) - 1) / max(count - 1, 1)) for i in range(count)})
    return [(frame.left + slot * (i + 0.5), f"{int(xs[i])}") for i in at]


def _top(values: Sequence[float]) -> float:
    return max([*values, 0.0]) * 1.06 or 1.0


def lines(
    label: str,
    xs: Sequence[float],
    series: Sequence[Series],
    unit: str = "",
    scale: float = 1.0,
    from_zero: bool = True,
) -> str:
    """Draws lines over steps. Values are multiplied by `scale` and shown with `unit`; None leaves a gap."""
    xs, series = thinned(
        xs, [Series(s.name, s.style, [None if v is None else v * scale for v in s.values]) for s in series]
    )
    known = [v for s in series for v in s.values if v is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    if from_zero:
        y_range = (min(0.0, low), _top([high]))
    else:
        margin = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
        y_range = (low - margin, high + margin)
    frame = _Frame(label, (xs[0], xs[-1]) if len(xs) > 1 else (xs[0] - 1, xs[0] + 1), y_range, unit)
    for s in series:
        at = [None if v is None else (frame.x(x), frame.y(v)) for x, v in zip(xs, s.values, strict=True)]
        points = [point for point in at if point]
        for _, piece in groupby(points if s.style == "eval" else at, key=bool):  # evaluations are joined
            line = " ".join(f"{point[0]:.1f},{point[1]:.1f}" for point in piece if point)
            if " " in line:
                frame.parts.append(f'<polyline class="line {s.style}" points="{line}"/>')
        if len(points) <= 24:
            dots = (f'<circle class="dot {s.style}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points)
            frame.parts += dots
    column = frame.width / max(len(xs) - 1, 1)
    for i, x in enumerate(xs):
        shown = [f"{s.name} {short(v)}{unit}" for s in series if (v := s.values[i]) is not None]
        if shown:
            frame.hover(frame.x(x), column, f"step {int(x)}: " + ", ".join(shown))
    whole = [t for t in ticks(frame.x_low, frame.x_high) if t == int(t)] or [round(frame.x_low)]
    return frame.svg("step", [(frame.x(t), f"{int(t)}") for t in whole])


def stacked(label: str, xs: Sequence[float], series: Sequence[Series], unit: str = "") -> str:
    """Draws stacked bars over steps, the first series at the bottom."""
    xs, series = thinned(xs, series)
    totals = [sum(s.values[i] or 0.0 for s in series) for i in range(len(xs))]
    frame = _Frame(label, (xs[0] - 0.5, xs[-1] + 0.5), (0.0, _top(totals)), unit)
    slot = frame.width / len(xs)
    for i, x in enumerate(xs):
        middle = frame.left + slot * (i + 0.5)
        base = 0.0
        for s in series:
            value = s.values[i] or 0.0
            if value > 0:
                frame.rect(s.style, middle - slot * 0.42, middle + slot * 0.42, base, base + value)
                base += value
        shown = [f"{s.name} {short(v)}{unit}" for s in series if (v := s.values[i])]
        frame.hover(middle, slot, f"step {int(x)}: {short(base)}{unit}; " + ", ".join(shown))
    return frame.svg("step", _slot_ticks(frame, xs))


def bars(
    label: str,
    names: Sequence[str],
    values: Sequence[float],
    unit: str,
    x_label: str,
    style: str = "s0",
    limit: Mark | None = None,
) -> str:
    """Draws one bar for each name, and the names that fit; `limit` is a labelled horizontal line."""
    frame = _Frame(label, (0, len(names)), (0.0, _top([*values, limit.x * 1.08 if limit is not None else 0.0])), unit)
    slot = frame.width / len(names)
    every = -(-len(names) // 12)
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        x = frame.left + slot * (i + 0.5)
        frame.rect(style, x - slot * 0.4, x + slot * 0.4, 0.0, value, f"{x_label} {name}: {short(value)}{unit}")
    if limit is not None:
        y = frame.y(limit.x)
        frame.parts.append(
            f'<line class="mark" x1="{frame.left}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" data-tip={quoteattr(limit.text)}/>'
        )
        frame.text(WIDTH - _RIGHT, y - 4, limit.text, "end", "marktext")
    return frame.svg(x_label, [(frame.left + slot * (i + 0.5), names[i]) for i in range(0, len(names), every)])


def heat(label: str, xs: Sequence[float], rows: Sequence[Series], high: float) -> str:
    """Draws a strip over steps for each row, top down, darker up to the value `high`; None leaves a gap."""
    xs, rows = thinned(xs, rows)
    names = [(len(rows) - i - 0.5, rows[i].name) for i in range(0, len(rows), -(-len(rows) // 8))]
    frame = _Frame(label, (0, len(xs)), (0.0, float(len(rows))), "", names)
    slot = frame.width / len(xs)
    for number, row in enumerate(rows):
        low = float(len(rows) - number - 1)
        for i, value in enumerate(row.values):
            if value is not None:
                x = frame.left + slot * i
                shade = min(max((value - 1.0) / (high - 1.0), 0.0), 1.0)
                frame.rect("heat", x, x + slot, low, low + 1.0, f"{row.name}, step {int(xs[i])}: {short(value)}", shade)
    return frame.svg("step", _slot_ticks(frame, xs))


def histogram(label: str, edges: Sequence[int], series: Sequence[Series], marks: Sequence[Mark], x_label: str) -> str:
    """Draws shares (0 to 1) by bins with `edges` [B + 1], series of [B] side by side; marks are x values."""
    bins = len(edges) - 1
    values = [v or 0.0 for s in series for v in s.values]
    frame = _Frame(label, (0, bins), (0.0, _top([v * 100 for v in values])), "%")
    slot = frame.width / bins
    between = np.interp([mark.x for mark in marks], edges, range(len(edges)))
    frame.marks([(frame.left + slot * x, mark.text) for x, mark in zip(between.tolist(), marks, strict=True)])
    bar = slot * 0.84 / len(series)
    for i in range(bins):
        tip = f"{edges[i] + 1} to {edges[i + 1]} {x_label}: " + ", ".join(
            f"{(s.values[i] or 0.0) * 100:.1f}% of {s.name}" for s in series
        )
        for j, s in enumerate(series):
            x = frame.left + slot * (i + 0.08) + bar * j
            frame.rect(s.style, x, x + bar, 0.0, (s.values[i] or 0.0) * 100)
        frame.hover(frame.left + slot * (i + 0.5), slot, tip)
    every = -(-bins // 7)
    return frame.svg(x_label, [(frame.left + slot * (i + 1), short(edges[i + 1])) for i in range(bins - 1, -1, -every)])
