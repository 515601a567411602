"""What users did in public reports of bugs: equal to the stock trainer, or refused by name before the first step.

One world runs all of them, one after the other, each with the stock trainer and with ours.
"""

import pytest

from tests.moves.compared import complaints
from tests.public_reports import PAGE, QUICK, REPORTS, TABLE, page, table

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("world_size", "quick"),
    [(1, True), pytest.param(1, False, marks=pytest.mark.slow), pytest.param(2, False, marks=pytest.mark.slow)],
    ids=["quick", "one process", "two processes"],
)
def test_a_report_is_equal_or_refused(world_size, quick, tmp_path):
    names = [name for name in REPORTS if not quick or name.partition(":")[0].split()[1] in QUICK]
    wrong = complaints(names, world_size, tmp_path)
    assert not wrong, "\n".join(wrong)


def test_the_page_lists_the_reports():
    assert PAGE.read_text() == page(), "run: python -m tests.public_reports"
    assert TABLE.read_text() == table()
