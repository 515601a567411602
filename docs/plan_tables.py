"""Writes the tables of docs/strategies.md: `python docs/plan_tables.py`. Each line is one answer of `hf-hotspa plan`."""

import sys
from pathlib import Path

from hf_hotspa.errors import DeviceMemoryError
from hf_hotspa.search.plan import Plan
from hf_hotspa.search.planning import Setup, make_plan

PAGE = Path(__file__).parent / "strategies.md"
BEGIN, END = "<!-- begin: python docs/plan_tables.py -->\n", "<!-- end -->\n"
HARDWARE, LENGTHS = "a800-80g", "commoncrawl"
MODELS, CLUSTERS = ("llama2-7b", "llama2-13b", "llama2-32b"), ("1x8", "2x8", "4x8")
LONGEST = (32768, 16384, 8192, 4096)
HEADER = (
    "| model | cluster | longest sequence | strategies | s a step | best static strategy | s a step | gain | switch s |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


def plan(model: str, cluster: str, longest: int) -> Plan | None:
    """The plan; None when the longest sequence does not fit."""
    try:
        return make_plan(Setup.read(model, cluster, HARDWARE), LENGTHS, longest).plan
    except DeviceMemoryError:
        return None


def row(model: str, cluster: str) -> str:
    """The line of a model on a cluster, with the longest sequence that fits."""
    found = next(filter(None, (plan(model, cluster, longest) for longest in LONGEST)), None)
    if found is None:
        return f"| {model} | {cluster} | none of {LONGEST[-1]} tokens fits |" + " |" * 6 + "\n"
    choice = found.choice
    buckets = "<br>".join(f"`{bucket}`" for bucket in choice.buckets)
    return (
        f"| {model} | {cluster} | {found.longest} | {buckets} | {choice.seconds:.2f} | `{choice.static}` | "
        f"{choice.static_seconds:.2f} | {choice.static_seconds / choice.seconds:.2f}x | {choice.switch_seconds:.2f} |\n"
    )


def rewritten_tables() -> str:
    """The page with the tables of now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + HEADER + "".join(row(m, c) for m in MODELS for c in CLUSTERS) + END + after


if __name__ == "__main__":
    PAGE.write_text(rewritten_tables())
    sys.exit(0)
