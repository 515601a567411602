"""Pictures for notebooks: the page of a run, and a histogram of lengths, as the last value of a cell.

Owns objects that notebooks show as HTML (`_repr_html_`); each is a frame of its own, so that its style sheet and that
of the notebook leave each other alone. Needs nothing but the package, and no network.
"""

import os
from collections.abc import Iterable
from html import escape

import numpy as np

from hf_hotspa.reporting.histogram import length_histogram
from hf_hotspa.reporting.page import document, report_page
from hf_hotspa.reporting.panels import lengths_figure
from hf_hotspa.reporting.run_log import read_run_log
from hf_hotspa.strategy import parse_buckets


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
