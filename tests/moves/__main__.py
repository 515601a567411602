"""Writes docs/moves.md: what becomes of everything that users do to a Trainer. `python -m tests.moves`."""

from pathlib import Path

from tests.moves import GROUPS, all_moves

PAGE = Path(__file__).resolve().parents[2] / "docs" / "moves.md"
_TITLES = {
    "arguments": "Arguments", "data": "Rows and columns", "collators": "Data collators", "losses": "Losses",
    "optimizers": "Optimizers and schedulers", "overrides": "Methods of a subclass", "callbacks": "Callbacks",
    "checkpoints": "Checkpoints", "models": "Models",
}  # fmt: skip


def page() -> str:
    """The text of the page."""
    moves = all_moves()
    every = [move for group in GROUPS for move in moves[group]]
    refused = sum(bool(move.refused) and not move.left for move in every)
    left = sum(move.left for move in every)
    lines = [
        "# What carries over from `Trainer`",
        "",
        f"{len(every)} things that users do with the stock `Trainer`, each tried with both on every test run: {len(every) - refused} give the same",
        f"losses, rates and weights, {refused} are refused by name before the first step. Of the equal ones, {left} are",
        "*left to `Trainer`*: nothing is switched, a warning says why, and the run is that of the stock `Trainer` (with several",
        "processes: `DistributedDataParallel`). With a `hotspa_*` flag of your own they are refused. Written by",
        "`python -m tests.moves`; run by `tests/gloo/test_moves.py` on one process and on two.",
    ]
    for group in GROUPS:
        lines += ["", f"## {_TITLES[group]}", "", "| what you do | here |", "|---|---|"]
        for move in moves[group]:
            here = f"refused: {move.instead}" if move.refused else f"the same{'; ' + move.ours if move.ours else ''}"
            if move.left:
                here = f"the same, left to `Trainer`; to switch: {move.instead}"
            lines.append(f"| {move.name} | {here} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
