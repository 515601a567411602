"""The numbers of `side_by_side.py`, from what its JSON file holds: a line for each side, and the table of a cell.

Seconds of a mini-batch are the mean over the mini-batches after the warm-up, each the median over its rounds: what a
user pays in all. The median over mini-batches stands beside it. A side whose mini-batches are its own is counted by
tokens.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIMITED = " (limit)"
"""Behind the name of a side of ours that planned under the memory limit."""
AUTO = "ours, auto"
STATIC = ("ours, dp", "ours, tp", "ours, pp")
"""How names begin of sides of ours that have one strategy."""
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
MIB = 1 << 20


@dataclass(frozen=True)
class Line:
    """A side in numbers.

    Args:
        name: The side.
        seconds: Of a mini-batch, the mean over those that are timed; None without a number.
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


def kinds_of(data: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Cells by model and dtype, and in these by length file."""
    kinds: dict[str, dict[str, dict[str, Any]]] = {}
    for key, cell in data["cells"].items():
        model, dtype, lengths = key.split(" ", 2)
        kinds.setdefault(f"{model} {dtype}", {})[lengths] = cell
    return kinds


def timed_tokens(cell: dict[str, Any]) -> float:
    """Tokens of a mini-batch, the mean over those that are timed."""
    lengths, rows = cell["lengths"], cell["mini_batch_rows"]
    return statistics.fmean(sum(lengths[at : at + rows]) for at in range(cell["warmup"] * rows, len(lengths), rows))


def line_of(cell: dict[str, Any], name: str) -> Line:
    """The numbers of a side, or its reason."""
    found = cell["sides"][name]
    if "same_as" in found:  # the limit changes nothing for it
        found = cell["sides"][found["same_as"]] | found
    peak = found.get("peak_bytes")
    if "seconds" not in found:
        return Line(name, None, None, None, None, None, peak, found.get("reason", "not run"), found)
    rounds, warmup = found["seconds"], cell["warmup"]
    steps = len(rounds[0])
    timed = [statistics.median(row[step] for row in rounds) for step in range(min(warmup, steps - 1), steps)]
    tokens = timed_tokens(cell)
    # a side that trains other rows is compared by tokens; one that trains the first mini-batches only by mini-batches
    scale = tokens * steps / found["tokens"] if found.get("own_batches") else 1.0
    seconds = statistics.fmean(timed) * scale
    return Line(
        name,
        seconds,
        statistics.median(timed) * scale,
        tokens / seconds,
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


def limited_seconds(line: Line) -> float | None:
    """Seconds of a side under the limit, None where it does not fit.

    Where only single rows fit, but more of them are faster: by what both took in the trial.
    """
    if line.seconds is None or not fits(line):
        return None
    tried, rows = line.found.get("tried"), line.found.get("micro_batch_rows")
    return line.seconds if line.found["fits"] or not tried else line.seconds * tried["1"] / tried[str(rows)]


def fit_text(line: Line, limited: Line | None) -> str:
    """The last column: seconds under the limit, or why there are none."""
    if limited is not None:
        if limited.seconds is None:
            if limited.peak_bytes is not None:
                return f"does not fit (takes {limited.peak_bytes / MIB:.0f} MiB)"
            longest = limited.found.get("longest_held")
            return f"does not fit (holds {longest} tokens)" if longest is not None else limited.reason
        if fits(limited) is False:
            return f"does not fit (takes {limited.found['peak_bytes'] / MIB:.0f} MiB)"
        return f"{limited.seconds:.2f} s"
    if line.seconds is None:
        return ""
    fit = fits(line)
    if fit is None:
        return "memory not measured" + (f": {line.found['memory_reason']}" if "memory_reason" in line.found else "")
    if not fit:
        if "single_peak_bytes" in line.found:
            return f"does not fit (takes {line.found['single_peak_bytes'] / MIB:.0f} MiB with single rows)"
        return f"does not fit (holds {line.found.get('longest_held', '?')} tokens)"
    alone = "" if line.found["fits"] else ", one row a micro-batch only"
    return f"fits, {limited_seconds(line):.2f} s{alone}"


def loss_spread(lines: dict[str, Line]) -> tuple[float, list[str]]:
    """How far apart the losses of the exact sides are, and who differs by design."""
    exact = [line.loss for line in lines.values() if line.loss is not None and not line.found.get("differs")]
    differing = [name for name, line in lines.items() if line.found.get("differs")]
    return (max(exact) - min(exact) if exact else 0.0), differing


def noise_of(cell: dict[str, Any]) -> float | None:
    """How far apart two rounds of one side are, as a part of them; the median over sides, None with one round."""
    found = []
    for each in cell["sides"].values():
        totals = [sum(row[cell["warmup"] :]) for row in each.get("seconds", [])]
        if len(totals) > 1:
            found.append((max(totals) - min(totals)) / statistics.fmean(totals))
    return statistics.median(found) if found else None


def column(lines: dict[str, Line], limited: bool) -> dict[str, float]:
    """Seconds by side, of those that have a number: of all without a limit, or of those that were seen to fit under it.

    Sides of ours plan anew under the limit; they keep their names.
    """
    found = {}
    for name in dict.fromkeys(name.removesuffix(LIMITED) for name in lines):
        shown = lines.get(name + LIMITED if limited and name.startswith("ours") else name)
        seconds = None if shown is None else limited_seconds(shown) if limited else shown.seconds
        if seconds is not None:
            found[name] = seconds
    return found


def fastest(seconds: dict[str, float]) -> str:
    """The side that is fastest; of none, nothing."""
    return min(seconds, key=lambda name: seconds[name], default="")


def near_the_fastest(lines: dict[str, Line], within: float) -> set[str]:
    """Sides that take at most `within` times what the fastest takes, of all and of ours under the limit.

    One for which the limit changes nothing counts by the name that ran.
    """
    seconds = {name: line.seconds for name, line in lines.items() if line.seconds is not None}
    limited = {name for name in seconds if name.endswith(LIMITED)}
    near = set()
    for names in (set(seconds) - limited, limited):
        most = within * min((seconds[name] for name in names), default=0.0)
        near |= {str(lines[name].found.get("same_as", name)) for name in names if seconds[name] <= most}
    return near


def verdict(lines: dict[str, Line]) -> list[str]:
    """How auto compares: to the fastest of all without a limit, to what fits under it."""
    found = []
    free = column(lines, limited=False)
    auto, limited = free.pop(AUTO, None), lines.get(AUTO + LIMITED)
    if auto and free:
        best = fastest(free)
        found.append(f"no limit: auto takes {auto / free[best]:.3f} of the next best, {best}")
    if limited is None or not limited.seconds:
        return found
    if fits(limited) is None:
        return [*found, "limit: memory not measured"]
    if not fits(limited):
        found.append("limit: auto itself is above it")
    fitting = column(lines, limited=True)
    static = {name: took for name, took in fitting.items() if name.startswith(STATIC)}
    peers = {name: took for name, took in fitting.items() if not name.startswith("ours")}
    for title, group in (("static strategy", static), ("peer that fits", peers)):
        best = fastest(group)
        found.append(
            f"limit: auto is {group[best] / limited.seconds:.2f}x the best {title}, {best}"
            if best
            else f"limit: no {title}"
        )
    return found


def cell_tables(data: dict[str, Any], keys: Sequence[str]) -> str:
    """A Markdown table of each cell."""
    return "\n\n".join(_cell_table(key, data["cells"][key]) for key in keys)


def _cell_table(key: str, cell: dict[str, Any]) -> str:
    lines = lines_of(cell)
    limit = cell["limit_bytes"] / MIB
    text = [
        f"### {key}",
        "",
        f"{cell['mini_batch_rows']} rows and {timed_tokens(cell):,.0f} tokens a mini-batch, longest "
        f"{max(cell['lengths'])}; memory limit {limit:.0f} MiB a rank",
        "",
        f"| side | s / mini-batch | median | tokens/s | padding | peak MiB | loss | under {limit:.0f} MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, line in lines.items():
        if name.endswith(LIMITED) and name.removesuffix(LIMITED) in lines:
            continue  # the last column of the side has it
        last = fit_text(line, lines.get(name + LIMITED))
        if line.seconds is None:
            text.append(f"| {titled(line)} | {line.reason} | | | | | | {last} |")
            continue
        waste = f"{line.waste:.0%}" if line.waste is not None else "?"
        peak = f"{line.peak_bytes / MIB:.0f}" if line.peak_bytes is not None else "?"
        text.append(
            f"| {titled(line)} | {line.seconds:.3f} | {line.median:.3f} | {line.tokens_per_s:,.0f} | {waste} | {peak} "
            f"| {line.loss:.5f} | {last} |"
        )
    spread, differing = loss_spread(lines)
    allowed = LOSS_TOLERANCE[key.split()[1]]
    text += ["", f"losses of the exact sides agree to {spread:.1e} ({'ok' if spread <= allowed else 'TOO FAR APART'})"]
    text += [f"{name} differs: {lines[name].found['differs']}" for name in differing]
    noise = noise_of(cell)
    text += [f"rounds of one side differ by {noise:.1%} in the median"] if noise is not None else []
    return "\n".join([*text, *verdict(lines)])


def titled(line: Line) -> str:
    """The name of a side, with its strategies or the rows of its micro-batches."""
    rows = line.found.get("micro_batch_rows")
    pool = line.found.get("pool") or ([line.found["strategies"]] if line.found.get("strategies") else None)
    if pool:
        return f"{line.name}: {', '.join(pool)}"
    if not rows or line.found.get("packs") or line.seconds is None:
        return line.name
    return f"{line.name}, {rows} row{'s' if rows > 1 else ''} a micro-batch"
