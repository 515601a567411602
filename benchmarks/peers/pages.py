"""What `side_by_side.py` writes: the block of docs/measured.md (families of sides, relative to `auto`) and
docs/data/side-by-side*.csv (their seconds, every side, every phase).

All are made from the JSON file alone: no number is typed by hand. The file itself lies beside the pages.
"""

import csv
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.profile import PARTS, all_phases
from peers.tables import (
    AUTO,
    LIMITED,
    MIB,
    STATIC,
    Line,
    column,
    fastest,
    fit_text,
    fits,
    kinds_of,
    lines_of,
    loss_spread,
    noise_of,
    titled,
)

BEGIN, END = "<!-- peers -->", "<!-- /peers -->"
FAMILIES = (
    ("Trainer + DDP: padded, `batch_rebalance` or flattened", ("Trainer + DDP",)),
    ("TRL `SFTTrainer`, bfd", ("TRL",)),
    ("FSDP2 of transformers", ("FSDP2 of transformers",)),
    ("DeepSpeed ZeRO-1, 2 or 3", ("DeepSpeed ZeRO",)),
    ("DeepSpeed Ulysses", ("DeepSpeed Ulysses",)),
    ("tensor parallelism of transformers", ("tp",)),
    ("ours, one static strategy, packed: the best", STATIC),
    ("ours, the paper's way: fixed buckets", ("ours, the paper's way",)),
    ("**ours, `auto`**", (AUTO,)),
)
"""Rows of tables and the prefixes of their sides' names. A row shows the fastest of its sides for each length file."""
CLOSE = 1.02
"""A side within 2 % of the fastest counts as fastest."""

_LEGEND = (
    "Time of the fastest side of a family, relative to `auto`, for the same mini-batches: the geometric mean over "
    "the cells, the minimum and maximum, and in how many of the cells in which it ran it fits. A cell is a model, a "
    "dtype and a file of lengths. All seconds: [side by side](side-by-side.md)."
)

Cell = tuple[float, str]
"""Seconds of a mini-batch (infinite without) and the text that is shown."""
Kind = dict[str, dict[str, Any]]
"""The cells of a model and dtype, by length file."""


def families_block(data: dict[str, Any], names: Sequence[str]) -> str:
    """One table: families of sides over all cells, without and under a limit of memory, relative to `auto`.

    Args:
        data: The results.
        names: Model and dtype of the cells to show, such as `0.9M fp32`.
    """
    kinds = {name: kind for name, kind in kinds_of(data).items() if name in names}
    cells = {f"{name} {lengths}": cell for name, kind in kinds.items() for lengths, cell in kind.items()}
    lines = {name: lines_of(cell) for name, cell in cells.items()}
    text = [f"Measured on {_facts(list(cells.values()))}:", "", *_relative_table(list(lines.values()))]
    notes: list[str] = [_LEGEND, *_where_we_lose(lines)]
    noises = [noise for cell in cells.values() for noise in [noise_of(cell)] if noise is not None]
    noise = f"; rounds of one side differ by {statistics.median(noises):.0%}" if noises else ""
    spreads: dict[str, float] = {}
    for name, of_cell in lines.items():
        dtype = name.split()[1]
        spreads[dtype] = max(spreads.get(dtype, 0.0), loss_spread(of_cell)[0])
    agree = ", ".join(f"{spread:.0e} in {dtype}" for dtype, spread in spreads.items())
    notes.append(f"The losses of all exact sides agree to {agree}{noise}.")
    return "\n".join([*text, "", *(f"* {note}" for note in notes)])


def csv_files(data: dict[str, Any]) -> dict[str, str]:
    """The text of each file of docs/data: families in seconds, every side of every cell, and every phase of ours."""
    families: list[list[str]] = [["model", "limit", "lengths", "limit_mib", "family", "seconds_or_longest"]]
    for name, kind in kinds_of(data).items():
        of_kind = {lengths: lines_of(cell) for lengths, cell in kind.items()}
        for title, limited in (("no limit", False), ("a limit of memory", True)):
            for family, starts in FAMILIES:
                cells = [_best(of_cell, starts, limited)[1] for of_cell in of_kind.values()]
                if set(cells) == {"-"}:
                    continue
                for (lengths, cell), text in zip(kind.items(), cells, strict=True):
                    mib = f"{cell['limit_bytes'] / MIB:.0f}" if limited else ""
                    families.append([name, title, lengths, mib, family.replace("*", "").replace("`", ""), text])
    heads = ["cell", "side", "seconds", "median_seconds", "tokens_per_second", "padding", "peak_mib", "loss"]
    sides: list[list[Any]] = [[*heads, "limit_mib", "under_the_limit", "reason", "differs"]]
    phases: list[list[Any]] = [
        ["cell", "side", "phase", "tokens", *(f"{part}_seconds" for part in PARTS), "rest_seconds"]
    ]
    for key, cell in data["cells"].items():
        lines = lines_of(cell)
        for name, line in lines.items():
            if name.endswith(LIMITED) and name.removesuffix(LIMITED) in lines:
                continue  # a column of the side has it
            numbers = (line.seconds, line.median, line.tokens_per_s, line.waste)
            peak = line.peak_bytes and line.peak_bytes / MIB
            shown = ["" if number is None else f"{number:.4g}" for number in (*numbers, peak)]
            loss = "" if line.loss is None else f"{line.loss:.5f}"
            under = fit_text(line, lines.get(name + LIMITED))
            last = [f"{cell['limit_bytes'] / MIB:.0f}", under, line.reason, line.found.get("differs", "")]
            sides.append([key, titled(line), *shown, loss, *last])
        for name, strategy, rest, sums in all_phases(cell):
            parts = [f"{sums[part]:.3f}" for part in PARTS]
            phases.append([key, name, strategy, f"{sums['tokens']:.0f}", *parts, f"{rest:.3f}"])
    files = {"side-by-side-families.csv": families, "side-by-side.csv": sides, "side-by-side-phases.csv": phases}
    return {name: _csv(rows) for name, rows in files.items()}


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def update_block(path: Path, block: str) -> None:
    """Writes a block between the two marks of a file.

    Raises:
        ValueError: a mark is missing in the file.
    """
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path} has no {BEGIN} ... {END}")
    before, after = text.split(BEGIN, 1)[0], text.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{block.rstrip()}\n{END}{after}")


def _facts(cells: Sequence[dict[str, Any]]) -> str:
    """Machines and versions; cells may come from several machines."""
    machines = [cell["machine"] for cell in cells]
    names = ("torch", "transformers", "accelerate", "trl", "deepspeed")
    versions = ", ".join(f"{name} {_each(machines, name)}" for name in names if any(name in each for each in machines))
    return (
        f"{_each(machines, 'ranks')} gloo ranks, {_each(machines, 'cores')} CPU cores ({_each(machines, 'processor')}), one "
        f"thread a rank; {versions} (`make bench-peers`)"
    )


def _each(machines: Sequence[dict[str, Any]], fact: str) -> str:
    return " or ".join(dict.fromkeys(str(machine[fact]) for machine in machines if fact in machine))


def _relative_table(cells: Sequence[dict[str, Line]]) -> list[str]:
    free, limited = ([column(lines, is_limited) for lines in cells] for is_limited in (False, True))
    of = f"{len(cells)} cell{'s' * (len(cells) > 1)}"
    text = [f"| | {of}, no limit | {of}, limit of memory |", "|---|---|---|"]
    for title, starts in FAMILIES:
        if ran := len(_ratios(free, starts)):
            text.append(f"| {title} | {_relative(free, starts, len(cells))} | {_relative(limited, starts, ran)} |")
    return text


def _ratios(of_cells: Sequence[dict[str, float]], starts: tuple[str, ...]) -> list[tuple[float, float]]:
    """Seconds of a family and of auto in the cells that have both."""
    return [
        (min(seconds), of_cell[AUTO])
        for of_cell in of_cells
        for seconds in [[took for name, took in of_cell.items() if name.startswith(starts)]]
        if seconds and AUTO in of_cell
    ]


def _relative(of_cells: Sequence[dict[str, float]], starts: tuple[str, ...], ran: int) -> str:
    """The time of a family relative to auto in the cells; for auto its seconds. `ran` cells could have one."""
    mine = _ratios(of_cells, starts)
    if not mine:
        return "does not fit"
    if starts == (AUTO,):
        return f"1 ({min(auto for _, auto in mine):.2f} to {max(auto for _, auto in mine):.2f} s)"
    times = [seconds / auto for seconds, auto in mine]
    text = f"{statistics.geometric_mean(times):.2f}"
    if len(times) > 1:
        text += f" ({min(times):.2f} to {max(times):.2f})"
    return text + (f", {len(mine)} of {ran}" if len(mine) < ran else "")


def _best(lines: dict[str, Line], starts: tuple[str, ...], limited: bool) -> Cell:
    """The fastest of a family in one cell; under a limit the fastest that fits, or the longest sequence that one holds."""
    mine = {name: seconds for name, seconds in column(lines, limited).items() if name.startswith(starts)}
    if mine:
        seconds = mine[fastest(mine)]
        return seconds, f"{seconds:.2f}"
    if not limited:
        return float("inf"), "-"
    family = [line.found for name, line in lines.items() if name.startswith(starts)]
    if single := [found["single_peak_bytes"] for found in family if "single_peak_bytes" in found]:
        return float("inf"), f"takes {min(single) / MIB:.0f} MiB"
    longest = [found["longest_held"] for found in family if "longest_held" in found]
    return float("inf"), (f"{max(longest)} tokens" if max(longest) else "nothing") if longest else "-"


def _where_we_lose(cells: dict[str, dict[str, Line]]) -> list[str]:
    """In how many columns another side is faster than `auto` by more than 2 %, and the limits that `auto` exceeds."""
    lost, columns = dict[str, float](), 0
    for name, of_cell in cells.items():
        for limited, title in ((False, ""), (True, " under the limit")):
            seconds = column(of_cell, limited)
            if AUTO in seconds:
                columns += 1
                best = fastest(seconds)
                if seconds[AUTO] > CLOSE * seconds[best]:
                    lost[f"{name}{title}, by {best}"] = seconds[AUTO] / seconds[best]
    of_limit = {name: of_cell.get(AUTO + LIMITED) for name, of_cell in cells.items()}
    above = [name for name, line in of_limit.items() if line and line.seconds and fits(line) is False]
    found = []
    if lost:
        most = max(lost, key=lambda name: lost[name])
        found = [
            f"`auto` is not the fastest in {len(lost)} of {columns} columns; it takes up to {lost[most]:.2f} times as long ({most})."
        ]
    return found + ([f"`auto` takes more than the limit of {', '.join(above)}."] if above else [])
