"""The scripts of public bug reports of transformers, PEFT, TRL and accelerate, with the stock Trainer and with ours.

The results must be equal, or an error must name the cause before the first step. The reported bug itself is transformers' matter.
`tests/gloo/test_public_reports.py` runs them; `python -m tests.public_reports` writes their table in docs/exactness.md.
"""

from pathlib import Path

from tests.moves.__main__ import here
from tests.public_reports import adapters, trainer

_ALL = (*trainer.REPORTS, *adapters.REPORTS)

REPORTS = {f"{report}: {move.name}": move for report, move in _ALL}
"""By name, in the order of the page."""

QUICK = ("961", "26413", "39842", "24832", "43595", "7823", "20029", "27962", "35651", "9359", "21494", "11710", "31923", "25841",
         "31033", "29972", "30104", "33130", "10140", "2864", "3728", "3927", "2194", "1447", "1287", "43708")  # fmt: skip
"""Run with the fast tests: the bugs that were fixed, and the reports that differ most from tests/moves."""

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
_HEADING, _NEXT = "## Public bug reports tried\n", "\n## "


def section() -> str:
    """The section of the page that lists them."""
    numbers, left = len({report for report, _ in _ALL}), sum(move.left for _, move in _ALL)
    unsupported = sum(bool(move.error) and not move.left for _, move in _ALL)
    rows = []
    for report, move in _ALL:
        repository, number = report.split()
        rows.append(
            f"| [{report}](https://github.com/huggingface/{repository}/issues/{number}) | {move.name} | {here(move)} |"
        )
    lines = [
        _HEADING,
        f"The scripts of {numbers} bug reports of transformers, PEFT, TRL and accelerate, run with the stock trainer and with ours, on one process",
        f"and on two: {len(rows) - left - unsupported} give the same logs, weights and files, {left} are left to `Trainer`, {unsupported} are not supported",
        "([what that means](moves.md)). Four were silently wrong here before: the gradient of a term of the weights in a loss was lost",
        "(33130), and hidden states that a config asks for were missing in predictions (30104); both raise an error now. The last batch of a stream",
        "had more rows than with `dispatch_batches` on several processes, and counted as a complete one in an evaluation, also on one process (961);",
        "both now match the stock trainer. An adapter on a model with resized embeddings was saved without them (1287), and raises an error now.",
        "`tests/gloo/test_public_reports.py` runs them.",
        "",
        '<details markdown="1">',
        "<summary>Every one of them</summary>",
        "",
        "| report | what its script does | here |",
        "|---|---|---|",
        *rows,
        "",
        "</details>",
        "",
    ]
    return "\n".join(lines)


def page() -> str:
    """The page with the current list."""
    before, _, rest = PAGE.read_text().partition(_HEADING)
    _, found, after = rest.partition(_NEXT)
    return before + section() + found + after
