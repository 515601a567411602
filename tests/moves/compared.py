"""Runs moves and public reports with the stock Trainer and with ours, one after the other in one world, and says what differs."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_hotspa.errors import HotspaError
from tests.harness import run_ranks
from tests.moves import Drawn, Kit, Move, all_moves, differences


class Failure(NamedTuple):
    """A move that raised an error."""

    text: str
    is_refusal: bool  # whether it is a `HotspaError`


def every() -> dict[str, Move]:
    """All moves and reports that are run, by name."""
    from tests.public_reports import REPORTS  # which imports the moves

    moves = [move for group in all_moves().values() for move in group]
    return {move.name: move for move in moves if not isinstance(move.run, Drawn)} | REPORTS


def run_both(
    rank: int, world_size: int, names: Sequence[str], folder: str
) -> dict[str, list[tuple[Any, Any, int, bool]]]:
    """Of each move what the stock Trainer shows, if ours must be equal; what ours shows; how many steps ours had made; and
    whether every `hotspa_*` flag was at its default, which is a second try of what is left to `Trainer`."""
    moves, results = every(), dict[str, list[tuple[Any, Any, int, bool]]]()
    for number, name in enumerate(names):
        move, stock = moves[name], None
        outcomes = results.setdefault(name, [])
        for own, default in ((False, False), (True, False), (True, True))[: 2 + move.left]:
            if not own and move.error and not move.left:
                continue
            path = Path(folder) / f"{number}-{own}-{default}-{world_size}"
            path.mkdir(parents=True, exist_ok=True)
            kit = Kit(not own, world_size, path, default)
            try:
                seen: Any = move.run(kit)
            except Exception as error:
                seen = Failure(f"{type(error).__name__}: {error}", isinstance(error, HotspaError))
            kit.close()
            if own:
                outcomes.append((stock, seen, kit.counter.made, default))
            else:
                stock = seen
    return results


def complaint(move: Move, stock: Any, ours: Any, made: int, default: bool) -> str:
    """What is wrong with the outcome of a move on one rank; empty where nothing is."""
    if move.error and not default:
        text = ours.text if isinstance(ours, Failure) and ours.is_refusal else ""
        if not re.search(move.error, text):
            return f"it is not refused with {move.error!r}: {ours.text if isinstance(ours, Failure) else 'it ran'}"
        return f"it is refused after {made} steps" if made else ""
    if isinstance(stock, Failure) or isinstance(ours, Failure):
        texts = (value.text if isinstance(value, Failure) else "ran" for value in (stock, ours))
        return "the stock trainer: {}; ours: {}".format(*texts)
    return "; ".join(differences(ours, stock, move.tolerance)[:5])


def complaints(names: Sequence[str], world_size: int, folder: Path) -> list[str]:
    """What is wrong with some moves on any rank."""
    moves = every()
    return [
        f"{name}{', with default flags' * outcome[-1]} (rank {rank} of {world_size}): {text}"
        for rank, found in enumerate(run_ranks(world_size, run_both, names, str(folder), timeout=600))
        for name, outcomes in found.items()
        for outcome in outcomes
        if (text := complaint(moves[name], *outcome))
    ]
