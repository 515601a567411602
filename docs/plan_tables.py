"""Writes the tables of docs/strategies.md: `python docs/plan_tables.py`, or `--check` to see whether they are current.

Each line is one cold run of `hf-hotspa plan`, the seconds of which are printed.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

PAGE = Path(__file__).parent / "strategies.md"
BEGIN, END = "<!-- begin: python docs/plan_tables.py -->\n", "<!-- end -->\n"
HARDWARE, LENGTHS = "a800-80g", "commoncrawl"
MODELS, CLUSTERS = ("llama2-7b", "llama2-13b", "llama2-32b"), ("1x8", "2x8", "4x8")
LONGEST = (32768, 16384, 8192, 4096)
HEADER = (
    "| model | cluster | longest sequence | strategies | s a step | best static strategy | s a step | gain | switch s |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


def plan(model: str, cluster: str, longest: int) -> dict[str, object] | None:
    """What the command answers; None when the longest sequence does not fit."""
    command = [sys.executable, "-m", "hf_hotspa.cli", "plan", "--model", model, "--nodes", cluster]
    command += ["--hardware", HARDWARE, "--lengths", LENGTHS, "--longest", str(longest), "--json"]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"{time.perf_counter() - begin:5.2f} s  {model} {cluster} {longest}", file=sys.stderr)
    if done.returncode == 2 and "HSP-050" in done.stderr:
        return None
    done.check_returncode()
    return json.loads(done.stdout)


def row(model: str, cluster: str) -> str:
    """The line of a model on a cluster, with the longest sequence that fits."""
    for longest in LONGEST:
        found = plan(model, cluster, longest)
        if found is not None:
            break
    else:
        return f"| {model} | {cluster} | none of {LONGEST[-1]} tokens fits |" + " |" * 6 + "\n"
    static = found["static"]
    gain = static["seconds"] / found["seconds"]
    buckets = "<br>".join(f"`{text}`" for text in found["hotspa_strategies"].split(","))
    return (
        f"| {model} | {cluster} | {longest} | {buckets} | {found['seconds']:.2f} | `{static['hotspa_strategies']}` | "
        f"{static['seconds']:.2f} | {gain:.2f}x | {found['switch_seconds']:.2f} |\n"
    )


def main() -> int:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    table = HEADER + "".join(row(model, cluster) for model in MODELS for cluster in CLUSTERS)
    text = before + BEGIN + table + END + after
    if "--check" in sys.argv:
        return int(text != PAGE.read_text())
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
