"""The scripts of public bug reports of transformers, PEFT, TRL and accelerate, with the stock Trainer and with ours.

The results must be equal, or an error must name the cause before the first step. The reported bug itself is transformers' matter.
`tests/gloo/test_public_reports.py` runs them; `python -m tests.public_reports` writes docs/data/public-reports.csv and
their section of docs/exactness.md.
"""

import csv
import io
from pathlib import Path

from tests.moves.__main__ import here
from tests.public_reports import adapters, trainer

_ALL = (*trainer.REPORTS, *adapters.REPORTS)

REPORTS = {f"{report}: {move.name}": move for report, move in _ALL}
"""By name, in the order of the page."""

QUICK = ("961", "26413", "39842", "24832", "43595", "7823", "20029", "27962", "35651", "9359", "31923", "25841",
         "31033", "29972", "30104", "33130", "10140", "3728", "2194", "1447", "1287", "43708")  # fmt: skip
"""Run with the fast tests: the bugs that were fixed, and the reports that differ most from tests/moves
and other tests."""

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
TABLE = PAGE.parent / "data" / "public-reports.csv"
_HEADING, _NEXT = "## Public bug reports tried\n", "\n## "


def section() -> str:
    numbers, left = len({report for report, _ in _ALL}), sum(move.left for _, move in _ALL)
    unsupported = sum(bool(move.error) and not move.left for _, move in _ALL)
    lines = [
        _HEADING,
        f"The scripts of [{numbers} bug reports](data/public-reports.csv) of transformers, PEFT, TRL and accelerate, run with the stock trainer and with ours,",
        f"on one process and on two: {len(_ALL) - left - unsupported} give the same logs, weights and files, {left} are left to `Trainer`, {unsupported} are not supported",
        "([what that means](moves.md)). `tests/gloo/test_public_reports.py` runs them.",
        "",
    ]
    return "\n".join(lines)


def table() -> str:
    """The text of the file that lists them."""
    rows = []
    for report, move in _ALL:
        repository, number = report.split()
        rows.append((f"https://github.com/huggingface/{repository}/issues/{number}", move.name, here(move)))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("report", "what its script does", "here"), *rows])
    return text.getvalue()


def page() -> str:
    """The page with the current section."""
    before, _, rest = PAGE.read_text().partition(_HEADING)
    _, found, after = rest.partition(_NEXT)
    return before + section() + found + after
