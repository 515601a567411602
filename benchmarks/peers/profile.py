"""Where the time of our sides goes in `side_by_side.py`: who waits for whom, phase by phase."""

from typing import Any

from peers.tables import AUTO

PARTS = ("own", "tp", "pp", "wait", "load", "return")
"""Of a phase: what a rank computes itself, waits in collectives of tensor parallelism, and for pipeline messages (means
over ranks); the longest that a rank waits for the busiest replica; moving weights in and gradients out."""


def profile_tables(data: dict[str, Any]) -> str:
    """A table of each cell under its name, as `profile_table`."""
    return "\n\n".join(f"### {key}\n\n{profile_table(cell)}" for key, cell in data["cells"].items())


def all_phases(cell: dict[str, Any]) -> list[tuple[str, str, float, dict[str, float]]]:
    """Side, strategy, seconds outside of phases and sums of each phase, the slowest first.

    Means over the timed mini-batches, those in which the phase did not run included. `rest` is what of a mini-batch of that
    side is outside of all phases: data, agreement, clipping, optimizer, logging.
    """
    rows = []
    for name, found in cell["sides"].items():
        if any(phases for each in found.get("phases", []) for phases in each):
            rest, phases = _phase_sums(found, cell["warmup"])
            rows += [(name, strategy, rest, sums) for strategy, sums in phases.items()]
    rows.sort(key=lambda row: -sum(row[3][part] for part in ("compute", "load", "return")))
    return rows


def profile_table(cell: dict[str, Any], most: int = 3) -> str:
    """Where the time of our sides goes: all phases of auto, and the slowest phases of all sides."""
    rows = all_phases(cell)
    chosen = [row for at, row in enumerate(rows) if at < most or row[0].startswith(AUTO)]
    text = [
        "| side | phase | tokens | " + " | ".join(f"{part} s" for part in PARTS) + " | rest s |",
        "|---" * (len(PARTS) + 4) + "|",
    ]
    for name, strategy, rest, sums in chosen:
        parts = " | ".join(f"{sums[part]:.3f}" for part in PARTS)
        text.append(f"| {name} | {strategy} | {sums['tokens']:,.0f} | {parts} | {rest:.3f} |")
    return "\n".join(text)


def _phase_sums(found: dict[str, Any], warmup: int) -> tuple[float, dict[str, dict[str, float]]]:
    """Seconds outside of phases, and sums by strategy; means over rounds and timed mini-batches."""
    sums: dict[str, dict[str, float]] = {}
    outside, count = 0.0, 0
    for seconds, of_round in zip(found["seconds"], found["phases"], strict=True):
        for step in range(warmup, len(seconds)):
            inside = 0.0
            for phase in of_round[step]:
                into = sums.setdefault(phase["strategy"], dict.fromkeys((*PARTS, "tokens", "compute"), 0.0))
                for part in into:
                    into[part] += phase.get(part, 0.0)
                inside += phase["compute"] + phase["load"] + phase["return"]
            outside += seconds[step] - inside
            count += 1
    means = {strategy: {part: total / count for part, total in of.items()} for strategy, of in sums.items()}
    return outside / count, means
