"""What `peers.py` writes into the README (one line for each family of sides) and into the documentation (every side).

Both are blocks between two marks, made of the JSON file alone: no number is typed by hand.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_profile import profile_table
from peer_tables import (
    AUTO,
    LIMITED,
    MIB,
    STATIC,
    Line,
    cell_tables,
    column,
    fastest,
    lines_of,
    loss_spread,
    noise_of,
)

BEGIN, END = "<!-- peers -->", "<!-- /peers -->"
FAMILIES = (
    ("Trainer + DDP: padded, `batch_rebalance` or flattened", ("Trainer + DDP",)),
    ("TRL `SFTTrainer`, bfd", ("TRL",)),
    ("FSDP2 of transformers", ("FSDP2 of transformers",)),
    ("DeepSpeed ZeRO-1, 2 or 3", ("DeepSpeed ZeRO",)),
    ("DeepSpeed Ulysses", ("DeepSpeed Ulysses",)),
    ("tensor parallelism of transformers", ("tp4 of transformers",)),
    ("ours, one static strategy, packed: the best", STATIC),
    ("ours, the paper's way: fixed buckets", ("ours, the paper's way",)),
    ("**ours, `auto`**", (AUTO,)),
)
"""Rows of the README and how the names of their sides begin. A row shows the fastest of its sides in each column."""
CLOSE = 1.02
"""A side within 2 % of the fastest counts as fastest."""

_LEGEND = (
    "A number of tokens: the longest sequence that a side can hold under the limit. Bold: the fastest, and what is within "
    "2 % of it. All sides, and where their time goes: [side by side](docs/side-by-side.md)."
)

Cell = tuple[float, str]
"""Seconds of a mini-batch (infinite without) and what is shown."""


def readme_block(data: dict[str, Any], kinds: Sequence[str]) -> str:
    """A table for each model and dtype: families of sides against length files, without and under a limit of memory.

    Args:
        data: What was found.
        kinds: Model and dtype of the cells that are shown, `0.9M fp32`.
    """
    text = [_facts(data["machine"])]
    notes, reasons = [_LEGEND], {}
    for kind in kinds:
        cells = {
            key.removeprefix(kind + " "): cell for key, cell in data["cells"].items() if key.startswith(kind + " ")
        }
        if not cells:
            continue
        lines = {name: lines_of(cell) for name, cell in cells.items()}
        limits = [f"{name}, {cell['limit_bytes'] / MIB:.0f} MiB" for name, cell in cells.items()]
        for title, heads, limited in (("no limit", list(cells), False), ("a limit of memory", limits, True)):
            text += ["", f"| {kind}, {title} | " + " | ".join(heads) + " |", "|---" * (len(cells) + 1) + "|"]
            text += _family_rows(lines, limited)
        spread = max(loss_spread(of_cell)[0] for of_cell in lines.values())
        noises = [noise for cell in cells.values() for noise in [noise_of(cell)] if noise is not None]
        noise = f"; rounds of one side differ by {statistics.median(noises):.0%}" if noises else ""
        notes += [*_where_we_lose(kind, lines), f"{kind}: the losses of all exact sides agree to {spread:.0e}{noise}."]
        reasons |= _cannot_run(lines)
    notes += [f"{name} cannot run here: {_short(reason)}." for name, reason in reasons.items()]
    return "\n".join([*text, "", *(f"* {note}" for note in notes)])


def details_block(data: dict[str, Any]) -> str:
    """Every side of every cell, and the phases in which our sides spend their time."""
    text = [_facts(data["machine"])]
    for key, cell in data["cells"].items():
        text += ["", cell_tables(data, [key]), "", "Where the time of our sides goes:", "", profile_table(cell)]
    return "\n".join(text)


def update_block(path: Path, block: str) -> None:
    """Writes a block between the two marks of a file.

    Raises:
        ValueError: the file does not have both marks.
    """
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path} has no {BEGIN} ... {END}")
    before, after = text.split(BEGIN, 1)[0], text.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{block.rstrip()}\n{END}{after}")


def _facts(machine: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {machine[name]}"
        for name in ("torch", "transformers", "accelerate", "trl", "deepspeed")
        if name in machine
    )
    return (
        f"Seconds per mini-batch, {machine['ranks']} gloo ranks on {machine['cores']} CPU cores ({machine['processor']}), "
        f"one thread a rank; {versions} (`make bench-peers`):"
    )


def _family_rows(lines: dict[str, dict[str, Line]], limited: bool) -> list[str]:
    columns = {title: [_best(of_cell, starts, limited) for of_cell in lines.values()] for title, starts in FAMILIES}
    fastest = [min(of[at][0] for of in columns.values()) for at in range(len(lines))]
    rows = []
    for title, of_family in columns.items():
        shown = [
            f"**{text}**" if seconds <= CLOSE * best and text != "-" else text
            for (seconds, text), best in zip(of_family, fastest, strict=True)
        ]
        if set(shown) != {"-"}:
            rows.append(f"| {title} | " + " | ".join(shown) + " |")
    return rows


def _best(lines: dict[str, Line], starts: tuple[str, ...], limited: bool) -> Cell:
    """The fastest of a family in one cell; under a limit of those that fit, or the longest sequence that one holds."""
    mine = {name: seconds for name, seconds in column(lines, limited).items() if name.startswith(starts)}
    if mine:
        seconds = mine[fastest(mine)]
        return seconds, f"{seconds:.2f}"
    held = [
        line.found["longest_held"]
        for name, line in lines.items()
        if limited and name.startswith(starts) and "longest_held" in line.found
    ]
    return float("inf"), (f"{max(held)} tokens" if max(held) else "nothing") if held else "-"


def _where_we_lose(kind: str, lines: dict[str, dict[str, Line]]) -> list[str]:
    """The columns in which another side is faster than `auto` by more than 2 %."""
    lost = []
    for limited, title in ((False, ""), (True, " under the limit")):
        for lengths, of_cell in lines.items():
            seconds = column(of_cell, limited)
            best = fastest(seconds)
            if AUTO in seconds and seconds[AUTO] > CLOSE * seconds[best]:
                lost.append(f"{lengths}{title} ({seconds[AUTO] / seconds[best]:.2f} of {best})")
    return [f"{kind}: `auto` is not the fastest of {'; '.join(lost)}."] if lost else []


def _cannot_run(lines: dict[str, dict[str, Line]]) -> dict[str, str]:
    """Sides that have a reason instead of a number, not for want of memory."""
    return {
        line.name: line.reason
        for of_cell in lines.values()
        for line in of_cell.values()
        if line.seconds is None and "longest_held" not in line.found and not line.name.endswith(LIMITED)
    }


def _short(reason: str, most: int = 150) -> str:
    """The reason without its exception's name, and not much of it: the JSON has it all."""
    kind, _, rest = reason.partition(": ")
    text = (rest if rest and kind.replace(".", "").isalnum() else reason).rstrip(".")
    return text if len(text) <= most else text[: most - 3] + "..."
