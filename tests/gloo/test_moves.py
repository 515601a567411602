"""Every move of users: equal to the stock Trainer, or refused by name before the first step: a tenth of them on two
processes, and under `slow` all of them on two and on one.

One world runs all moves of a group, one after the other.
"""

import re
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests import trainer_fuzz
from tests.harness import run_ranks
from tests.moves import GROUPS, Drawn, Kit, Move, all_moves, differences
from tests.moves.__main__ import PAGE, TABLE, page, table

pytestmark = pytest.mark.gloo


DEFAULT = ", with default flags"


def chosen(group: str, quick: bool) -> list[Move]:
    run = [move for move in all_moves()[group] if not isinstance(move.run, Drawn)]
    return [move for move in run if is_quick(move) or not quick]


def run_moves(rank: int, world_size: int, group: str, stock: bool, folder: str, quick: bool):
    """For each move what was seen of it, or the error; and how many steps were made."""
    from hf_hotspa.errors import HotspaError

    results: dict[str, tuple[str, Any, int]] = {}
    seen: Any
    for number, move in enumerate(chosen(group, quick)):
        if stock and move.error and not move.left:
            continue
        for default in (True, False) if move.left and not stock else (False,):
            path = Path(folder) / f"{'stock' if stock else 'hot'}-{world_size}-{number}-{default}"
            path.mkdir(parents=True, exist_ok=True)
            kit = Kit(stock, world_size, path, default)
            try:
                kind, seen = "seen", move.run(kit)
            except HotspaError as error:
                kind, seen = "refused", str(error)
            results[move.name + DEFAULT * default] = (kind, seen, kit.counter.made)
            kit.close()
    return results


def complaint(move: Move, stock, ours, default: bool = False) -> str:
    """What is wrong with the outcome of a move on one rank; empty where nothing is."""
    kind, value, made = ours
    if move.error and not default:
        if kind != "refused":
            return "it is not refused"
        if not re.search(move.error, value):
            return f"the refusal does not say {move.error!r}: {value}"
        return f"it is refused after {made} steps" if made else ""
    if kind != "seen":
        return f"it is refused: {value}"
    return "; ".join(differences(value, stock[1], move.tolerance)[:5])


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
    arguments = (str(tmp_path), quick)
    stock = run_ranks(world_size, run_moves, group, True, *arguments, timeout=280)
    wrong = []
    for rank, found in enumerate(run_ranks(world_size, run_moves, group, False, *arguments, timeout=280)):
        for move in chosen(group, quick):
            for default in (False, True) if move.left else (False,):
                text = complaint(move, stock[rank].get(move.name), found[move.name + DEFAULT * default], default)
                if text:
                    wrong.append(f"{move.name}{DEFAULT * default} (rank {rank} of {world_size}): {text}")
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
