"""Writes docs/moves.md and docs/data/moves.csv: the result of every user action on a Trainer. `python -m tests.moves`."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from tests.moves import GROUPS, Move, all_moves

PAGE = Path(__file__).resolve().parents[2] / "docs" / "moves.md"
TABLE = PAGE.parent / "data" / "moves.csv"
_TITLES = {
    "arguments": (
        "Arguments",
        "batch sizes, accumulation, schedules, evaluation, sampling by length. `fp16` and `torch_compile` are left to `Trainer`",
    ),
    "data": (
        "Rows and columns",
        "padding on either side, packed documents, streams. Labels on padding and masks with holes are left to `Trainer`",
    ),
    "collators": (
        "Data collators",
        "transformers' and custom ones, if they return tokens, labels and positions only",
    ),
    "losses": (
        "Losses",
        "`compute_loss_func`, a `compute_loss` override, label smoothing, token weights, distillation. A loss that "
        "changes inside the `forward` of the model is left to `Trainer`",
    ),
    "optimizers": (
        "Optimizers and schedulers",
        "every elementwise optimizer, also in 8 and 4 bits, and custom schedulers. Adafactor and others that need "
        "a complete matrix are left to `Trainer`",
    ),
    "overrides": (
        "Methods of a subclass",
        "samplers, data loaders, `training_step`, `log`. Hooks on the model do not run",
    ),
    "callbacks": ("Callbacks", "they see current weights wherever `Trainer` calls them"),
    "checkpoints": ("Checkpoints", "the files of `Trainer`; resuming in both directions, but not from DeepSpeed"),
    "models": (
        "Models",
        "causal language models, classifiers, frozen layers, adapters. Masked language models, encoder-decoders and your own `nn.Module` are left to `Trainer`",
    ),
}
"""Of each group: its heading, and its line at the top of the page."""


def here(move: Move) -> str:
    """What becomes of it."""
    if move.left:
        return f"the same, left to `Trainer`; to switch: {move.instead}"
    return f"not supported: {move.instead}" if move.error else f"the same{'; ' + move.ours if move.ours else ''}"


def _counts(moves: Sequence[Move]) -> str:
    left = sum(move.left for move in moves)
    others = sum(bool(move.error) and not move.left for move in moves)
    same = f"{len(moves) - left - others} the same"
    return ", ".join([same, *([f"{left} left"] if left else []), *([f"{others} not supported"] if others else [])])


def page() -> str:
    """The text of the page: a line for each group."""
    moves = all_moves()
    every = [move for group in GROUPS for move in moves[group]]
    unsupported = sum(bool(move.error) and not move.left for move in every)
    left = sum(move.left for move in every)
    lines = [
        "# What carries over from `Trainer`",
        "",
        f"{len(every)} things that users do with the stock `Trainer`. Tests try each of them with both trainers, on one process and on",
        f"two: {len(every) - left - unsupported} give the same losses, rates and weights, {left} are left to `Trainer`, {unsupported} are not supported. In short:",
        "",
        *(f"* **{title}**: {text} ({_counts(moves[group])})." for group, (title, text) in _TITLES.items()),
        "",
        "*Left to `Trainer`* means: nothing is switched, a warning gives the reason, and the stock `Trainer` runs (with several",
        "processes: `DistributedDataParallel`). If you set a `hotspa_*` flag, these are not supported, either. *Not supported*",
        "means: an error before the first step, which names the cause and the alternative.",
        "",
        "[Every one of them](data/moves.csv), with its remark or alternative. `python -m tests.moves` writes both, `tests/gloo/test_moves.py` runs it.",
    ]
    return "\n".join(lines) + "\n"


def table() -> str:
    """The text of the file beside the page: a line for each action."""
    text = io.StringIO()
    rows = [(_TITLES[group][0], move.name, here(move)) for group, moves in all_moves().items() for move in moves]
    csv.writer(text, lineterminator="\n").writerows([("group", "what you do", "here"), *rows])
    return text.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page())
    TABLE.write_text(table())
