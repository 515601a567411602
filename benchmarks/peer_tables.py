"""Tables of `peers.py`, from what its JSON file holds: of a cell, of the README, and of the slowest phases.

Seconds of a mini-batch are the mean over the mini-batches after the warm-up, each the median over its rounds: what a
user pays in all. The median over mini-batches stands beside it. A side whose mini-batches are its own is counted by
tokens.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMITED = " (limit)"
AUTO = "ours, auto"
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
BEGIN, END = "<!-- peers -->", "<!-- /peers -->"
_MIB = 1 << 20


@dataclass(frozen=True)
class Line:
    """A side in numbers.

    Args:
        name: The side.
        seconds: Of a mini-batch of the cell's mean size; None without a number.
        median: The median mini-batch.
        tokens_per_s: Trained tokens, no padding.
        waste: The share of places that are padding.
        loss: After training, on fixed rows.
        peak_bytes: Of the fullest rank.
        reason: Why there is no number.
        found: Everything.
    """

    name: str
    seconds: float | None
    median: float | None
    tokens_per_s: float | None
    waste: float | None
    loss: float | None
    peak_bytes: float | None
    reason: str
    found: dict[str, Any]


def mini_batch_tokens(cell: dict[str, Any]) -> list[int]:
    """Tokens of every mini-batch."""
    lengths, rows = cell["lengths"], cell["mini_batch_rows"]
    return [sum(lengths[at : at + rows]) for at in range(0, len(lengths), rows)]


def line_of(cell: dict[str, Any], name: str) -> Line:
    """The numbers of a side, or its reason."""
    found = cell["sides"][name]
    if "same_as" in found:  # the limit changes nothing for it
        found = cell["sides"][found["same_as"]] | found
    peak = found.get("peak_bytes")
    if "seconds" not in found:
        return Line(name, None, None, None, None, None, peak, found.get("reason", "not run"), found)
    rounds, warmup, tokens = found["seconds"], cell["warmup"], mini_batch_tokens(cell)
    steps = len(rounds[0])
    timed = [statistics.median(row[step] for row in rounds) for step in range(min(warmup, steps - 1), steps)]
    mean = statistics.fmean(tokens)
    if found.get("own_batches"):
        of_step = [found["tokens"] / steps] * steps
    else:
        of_step = [float(count) for count in tokens[:steps]]
    speed = sum(of_step[-len(timed) :]) / sum(timed)
    scaled = mean / statistics.fmean(of_step) if found.get("own_batches") else 1.0
    return Line(
        name,
        mean / speed,
        statistics.median(timed) * scaled,
        speed,
        1.0 - found["tokens"] / found["slots"] if found["slots"] else None,
        found["loss"],
        peak,
        "",
        found,
    )


def lines_of(cell: dict[str, Any]) -> dict[str, Line]:
    """All sides of a cell."""
    return {name: line_of(cell, name) for name in cell["sides"]}


def fits(line: Line) -> bool | None:
    """Whether a side fits under the limit; None where memory was not measured."""
    if line.seconds is None:
        return False
    if "fits" not in line.found:
        return None
    return bool(line.found["fits"] or line.found.get("fits_alone"))


def fit_text(line: Line, limited: Line | None) -> str:
    """The last column: seconds under the limit, or why there are none."""
    if limited is not None:
        if limited.seconds is None:
            held = limited.found.get("longest_held")
            return f"does not fit (holds {held} tokens)" if held is not None else limited.reason
        if fits(limited) is False:
            return f"does not fit (takes {limited.found['peak_bytes'] / _MIB:.0f} MiB)"
        return f"{limited.seconds:.2f} s"
    if line.seconds is None:
        return ""
    fit = fits(line)
    if fit is None:
        return "memory not measured" + (f": {line.found['memory_reason']}" if "memory_reason" in line.found else "")
    if not fit:
        return f"does not fit (holds {line.found.get('longest_held', '?')} tokens)"
    alone = "" if line.found["fits"] else ", one row a micro-batch only"
    return f"fits, {line.seconds:.2f} s{alone}"


def loss_spread(lines: dict[str, Line]) -> tuple[float, list[str]]:
    """How far apart the losses of the exact sides are, and who differs by design."""
    exact = [line.loss for line in lines.values() if line.loss is not None and not line.found.get("differs")]
    differing = [name for name, line in lines.items() if line.found.get("differs")]
    return (max(exact) - min(exact) if exact else 0.0), differing


def verdict(lines: dict[str, Line]) -> list[str]:
    """How auto compares: to the fastest of all without a limit, to what fits under it."""
    found = []
    free = {name: line.seconds for name, line in lines.items() if line.seconds and not name.endswith(LIMITED)}
    auto, limited = free.get(AUTO), lines.get(AUTO + LIMITED)
    others = {name: seconds for name, seconds in free.items() if name != AUTO}
    if auto and others:
        best = min(others, key=lambda name: others[name])
        found.append(f"no limit: auto takes {auto / others[best]:.3f} of the next best, {best}")
    if limited and limited.seconds and fits(limited) is False:
        found.append("limit: auto itself is above it")
    if limited and limited.seconds:
        static = {
            name: line.seconds
            for name, line in lines.items()
            if name.endswith(LIMITED) and name != AUTO + LIMITED and "way" not in name
            if line.seconds and fits(line) is not False
        }
        peers = {
            name: line.seconds
            for name, line in lines.items()
            if not name.startswith("ours") and line.seconds and fits(line)
        }
        for title, group in (("static strategy", static), ("peer that fits", peers)):
            if group:
                best = min(group, key=lambda name: group[name] or 0.0)
                found.append(f"limit: auto is {(group[best] or 0.0) / limited.seconds:.2f}x the best {title}, {best}")
            else:
                found.append(f"limit: no {title}")
    return found


def cell_tables(data: dict[str, Any], keys: Sequence[str]) -> str:
    """A Markdown table of each cell."""
    return "\n\n".join(_cell_table(key, data["cells"][key]) for key in keys)


def _cell_table(key: str, cell: dict[str, Any]) -> str:
    lines, tokens = lines_of(cell), mini_batch_tokens(cell)
    limit = cell["limit_bytes"] / _MIB
    text = [
        f"### {key}",
        "",
        f"{cell['mini_batch_rows']} rows and {statistics.fmean(tokens):,.0f} tokens a mini-batch, longest "
        f"{max(cell['lengths'])}; memory limit {limit:.0f} MiB a rank",
        "",
        f"| side | s / mini-batch | median | tokens/s | padding | peak MiB | loss | under {limit:.0f} MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, line in lines.items():
        if name.endswith(LIMITED):
            continue
        last = fit_text(line, lines.get(name + LIMITED))
        if line.seconds is None:
            text.append(f"| {_titled(line)} | {line.reason} | | | | | | {last} |")
            continue
        waste = f"{line.waste:.0%}" if line.waste is not None else "?"
        peak = f"{line.peak_bytes / _MIB:.0f}" if line.peak_bytes is not None else "?"
        text.append(
            f"| {_titled(line)} | {line.seconds:.3f} | {line.median:.3f} | {line.tokens_per_s:,.0f} | {waste} | {peak} "
            f"| {line.loss:.5f} | {last} |"
        )
    spread, differing = loss_spread(lines)
    allowed = LOSS_TOLERANCE[key.split()[1]]
    text += ["", f"losses of the exact sides agree to {spread:.1e} ({'ok' if spread <= allowed else 'TOO FAR APART'})"]
    text += [f"{name} differs: {lines[name].found['differs']}" for name in differing]
    return "\n".join([*text, *verdict(lines)])


def _titled(line: Line) -> str:
    rows = line.found.get("micro_batch_rows")
    pool = line.found.get("pool") or ([line.found["strategies"]] if line.found.get("strategies") else None)
    if pool:
        return f"{line.name}: {', '.join(pool)}"
    if not rows or line.found.get("packs") or line.seconds is None:
        return line.name
    return f"{line.name}, {rows} row{'s' if rows > 1 else ''} a micro-batch"


# -- profile ----------------------------------------------------------------------------------------------------------


_PARTS = ("own", "tp", "pp", "wait", "load", "return")
"""Of a phase: what a rank computes itself, waits in collectives of tensor parallelism, and for pipeline messages (means
over ranks); the longest that a rank waits for the busiest replica; moving weights in and gradients out."""


def profile_table(data: dict[str, Any], most: int = 3) -> str:
    """Where the time of our sides goes: all phases of auto, and the slowest phases of all sides.

    Means over the timed mini-batches, those in which the phase did not run included. `rest` is what of a mini-batch of that
    side is outside of all phases: data, agreement, clipping, optimizer, logging.
    """
    text = []
    for key, cell in data["cells"].items():
        rows = []
        for name, found in cell["sides"].items():
            if any(phases for each in found.get("phases", []) for phases in each):
                rest, phases = _phase_sums(found, cell["warmup"])
                rows += [(name, strategy, rest, sums) for strategy, sums in phases.items()]
        rows.sort(key=lambda row: -sum(row[3][part] for part in ("compute", "load", "return")))
        chosen = [row for at, row in enumerate(rows) if at < most or row[0].startswith(AUTO)]
        text += [
            f"### {key}",
            "",
            "| side | phase | tokens | " + " | ".join(f"{part} s" for part in _PARTS) + " | rest s |",
        ]
        text += ["|---" * (len(_PARTS) + 4) + "|"]
        for name, strategy, rest, sums in chosen:
            parts = " | ".join(f"{sums[part]:.3f}" for part in _PARTS)
            text.append(f"| {name} | {strategy} | {sums['tokens']:,.0f} | {parts} | {rest:.3f} |")
        text.append("")
    return "\n".join(text)


def _phase_sums(found: dict[str, Any], warmup: int) -> tuple[float, dict[str, dict[str, float]]]:
    """Seconds outside of phases, and sums by strategy; means over rounds and timed mini-batches."""
    sums: dict[str, dict[str, float]] = {}
    outside, count = 0.0, 0
    for seconds, of_round in zip(found["seconds"], found["phases"], strict=True):
        for step in range(warmup, len(seconds)):
            inside = 0.0
            for phase in of_round[step]:
                into = sums.setdefault(phase["strategy"], dict.fromkeys((*_PARTS, "tokens", "compute"), 0.0))
                for part in into:
                    into[part] += phase.get(part, 0.0)
                inside += phase["compute"] + phase["load"] + phase["return"]
            outside += seconds[step] - inside
            count += 1
    means = {strategy: {part: total / count for part, total in of.items()} for strategy, of in sums.items()}
    return outside / count, means


# -- the README -------------------------------------------------------------------------------------------------------


def readme_block(data: dict[str, Any], kinds: Sequence[str]) -> str:
    """Sides against length files: seconds of a mini-batch without a limit, and under it.

    Args:
        data: What was found.
        kinds: Model and dtype of the cells that are shown, `0.9M fp32`.
    """
    text = [_facts(data["machine"])]
    for kind in kinds:
        cells = {
            key.removeprefix(kind + " "): cell for key, cell in data["cells"].items() if key.startswith(kind + " ")
        }
        if not cells:
            continue
        lines = {name: lines_of(cell) for name, cell in cells.items()}
        limits = [f"{name}, {cell['limit_bytes'] / _MIB:.0f} MiB" for name, cell in cells.items()]
        for title, heads, limited in (("no limit", list(cells), False), ("a limit of memory", limits, True)):
            text += ["", f"| {kind}, {title} | " + " | ".join(heads) + " |", "|---" * (len(cells) + 1) + "|"]
            text += _readme_rows(lines, limited)
        reasons = {line.name: line.reason for cell in lines.values() for line in cell.values() if _cannot_run(line)}
        text += ["", "A number of tokens is the longest sequence that a side can hold under the limit."]
        text += [f"{name} cannot run here: {_short(reason)}." for name, reason in reasons.items()]
    return "\n".join(text)


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


def _cannot_run(line: Line) -> bool:
    return line.seconds is None and "longest_held" not in line.found and not line.name.endswith(LIMITED)


def _readme_rows(lines: dict[str, dict[str, Line]], limited: bool) -> list[str]:
    names = dict.fromkeys(name for cell in lines.values() for name in cell if not name.endswith(LIMITED))
    values = {
        name: [_readme_value(cell.get(name), cell.get(name + LIMITED), limited) for cell in lines.values()]
        for name in names
    }
    best = [min((v[at] for v in values.values() if isinstance(v[at], float)), default=None) for at in range(len(lines))]
    rows = []
    for name, of_side in values.items():
        shown = [
            value if isinstance(value, str) else f"**{value:.2f}**" if value == best[at] else f"{value:.2f}"
            for at, value in enumerate(of_side)
        ]
        if set(shown) != {"-"}:
            rows.append(f"| {name} | " + " | ".join(shown) + " |")
    return rows


def _readme_value(line: Line | None, under: Line | None, limited: bool) -> float | str:
    """Seconds; or tokens that a side holds, `above` for one that takes more than the limit, `-` for no number."""
    if limited and line is not None and line.name.startswith("ours"):
        line = under
    if line is None or _cannot_run(line):
        return "-"
    if limited and (line.seconds is None or not fits(line)):
        held = line.found.get("longest_held")
        return f"{held} tokens" if held is not None else "above" if fits(line) is False and line.seconds else "?"
    return line.seconds if line.seconds is not None else "-"


def _short(reason: str, most: int = 150) -> str:
    """The reason without its exception's name, and not much of it: the JSON has it all."""
    kind, _, rest = reason.partition(": ")
    text = (rest if rest and kind.replace(".", "").isalnum() else reason).rstrip(".")
    return text if len(text) <= most else text[: most - 3] + "..."


def update_readme(data: dict[str, Any], path: Path, kinds: Sequence[str]) -> None:
    """Writes the block between the two marks.

    Raises:
        ValueError: the file does not have both marks.
    """
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path} has no {BEGIN} ... {END}")
    before, after = text.split(BEGIN, 1)[0], text.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{readme_block(data, kinds)}\n{END}{after}")
