"""What users did in public reports of bugs: equal to the stock trainer, or refused by name before the first step.

One world runs all of them, one after the other, each with the stock trainer and with ours.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.moves import Kit, Move, differences
from tests.public_reports import PAGE, QUICK, REPORTS, TABLE, page, table

pytestmark = pytest.mark.gloo


def run_reports(
    rank: int, world_size: int, names: list[str], folder: str
) -> dict[str, list[tuple[Any, Any, int, bool]]]:
    """Of each report what the stock trainer shows; what ours shows, or the error; how many steps ours had made; and whether
    every `hotspa_*` flag was at its default, which is a second try of what is left to `Trainer`."""
    results: dict[str, list[tuple[Any, Any, int, bool]]] = {}
    for number, name in enumerate(names):
        move, stock = REPORTS[name], None
        outcomes = results.setdefault(name, [])
        for own, default in ((False, False), (True, False), (True, True))[: 2 + move.left]:
            path = Path(folder) / f"{number}-{own}-{default}-{world_size}"
            path.mkdir(parents=True, exist_ok=True)
            kit = Kit(not own, world_size, path, default)
            try:
                seen: Any = move.run(kit)
            except Exception as error:
                seen = f"{type(error).__name__}: {error}"
            kit.close()
            if own:
                outcomes.append((stock, seen, kit.counter.made, default))
            else:
                stock = seen
    return results


def complaint(move: Move, stock: Any, ours: Any, made: int, default: bool) -> str:
    """What is wrong with a report's outcome on one rank; empty where nothing is."""
    if move.error and not default:
        if not isinstance(ours, str) or not re.search(move.error, ours):
            return f"it is not refused with {move.error!r}: {ours if isinstance(ours, str) else 'it ran'}"
        return f"it is refused after {made} steps" if made else ""
    if isinstance(stock, str) or isinstance(ours, str):
        texts = (value if isinstance(value, str) else "ran" for value in (stock, ours))
        return "the stock trainer: {}; ours: {}".format(*texts)
    return "; ".join(differences(ours, stock, move.tolerance)[:5])


@pytest.mark.parametrize(
    ("world_size", "quick"),
    [(1, True), pytest.param(1, False, marks=pytest.mark.slow), pytest.param(2, False, marks=pytest.mark.slow)],
    ids=["quick", "one process", "two processes"],
)
def test_a_report_is_equal_or_refused(world_size, quick, tmp_path):
    names = [name for name in REPORTS if not quick or name.partition(":")[0].split()[1] in QUICK]
    wrong = [
        f"{name} (rank {rank} of {world_size}): {text}"
        for rank, found in enumerate(run_ranks(world_size, run_reports, names, str(tmp_path), timeout=600))
        for name, outcomes in found.items()
        for outcome in outcomes
        if (text := complaint(REPORTS[name], *outcome))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_page_lists_the_reports():
    assert PAGE.read_text() == page(), "run: python -m tests.public_reports"
    assert TABLE.read_text() == table()
