"""Every move of users: equal to the stock Trainer, or refused by name before the first step: a tenth of them on two
processes, and under `slow` all of them on two and on one.

One world runs all moves of a group, one after the other.
"""

from zlib import crc32

import pytest

from tests import trainer_fuzz
from tests.moves import GROUPS, Drawn, Move, all_moves
from tests.moves.__main__ import PAGE, TABLE, page, table
from tests.moves.compared import complaints

pytestmark = pytest.mark.gloo


def is_quick(move: Move) -> bool:
    """A tenth, drawn by the name so that a new move draws no other one anew."""
    return crc32(move.name.encode()) % 10 == 0


@pytest.mark.parametrize(
    ("world_size", "quick"),
    [
        pytest.param(2, True, id="2-tenth"),
        pytest.param(2, False, id="2", marks=pytest.mark.slow),
        pytest.param(1, False, id="1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("group", GROUPS)
def test_a_move_is_equal_or_refused(group, world_size, quick, tmp_path):
    run = [move for move in all_moves()[group] if not isinstance(move.run, Drawn)]
    wrong = complaints([move.name for move in run if is_quick(move) or not quick], world_size, tmp_path)
    assert not wrong, "\n".join(wrong)


def test_what_the_fuzzer_is_said_to_draw_is_drawn():
    said = [move.run for moves in all_moves().values() for move in moves if isinstance(move.run, Drawn)]
    drawn = {name: values for name, (_, values) in trainer_fuzz.CHOICES.items()} | trainer_fuzz.ARGUMENTS
    assert said
    assert [each for each in said if each.value not in drawn[each.field]] == []


def test_names_are_unique_and_the_page_is_current():
    names = [move.name for moves in all_moves().values() for move in moves]
    assert len(set(names)) == len(names)
    assert PAGE.read_text() == page(), "run: python -m tests.moves"
    assert TABLE.read_text() == table()
