"""What ran where, for README.md and docs/limits.md, made of the log of `make test-gpu` (`docs/gpu-tests.json`).

`python -m tests.gpu_page` writes both anew from the log; `make test-gpu` does so after a complete run. The log holds the
last complete run of every kind of machine, and its failures as well.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.gpu_machine import CPU, HOST, OWN, SHARED, TITLES

ROOT = Path(__file__).resolve().parents[1]
LOG, LIMITS, README = ROOT / "docs" / "gpu-tests.json", ROOT / "docs" / "limits.md", ROOT / "README.md"
PROOFS, MEASURED = ROOT / "docs" / "data" / "wire-proofs.csv", ROOT / "docs" / "measured.md"
EARLIER = {HOST: ("exact", "checkpoints", "auto", "curve")}
"""What passed on one H100 that four ranks shared, before there was a log; a run of the kind takes its place."""
BEGIN, END = "<!-- begin: python -m tests.gpu_page -->", "<!-- end: python -m tests.gpu_page -->"
STATUS = "**Status:**"

Runs = Mapping[str, Mapping[str, Any]]


def read() -> dict[str, dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = json.loads(LOG.read_text())["runs"]
    return runs


def with_run(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The runs of the log, with this one as the last of its kind."""
    return {**(read() if LOG.exists() else {}), run["kind"]: run}


def _name(run: Mapping[str, Any]) -> str:
    gpus = run["versions"]["GPUs"]
    return f"{run['ranks']} ranks on {gpus}" if gpus != "none" else f"{run['ranks']} ranks"


def _nccl(runs: Runs) -> list[Mapping[str, Any]]:
    """The runs over NCCL in which everything passed that could run."""
    return [runs[kind] for kind in (OWN, SHARED) if kind in runs and runs[kind]["result"] == "passed"]


def status(runs: Runs) -> str:
    """The line of the README."""
    found = _nccl(runs)
    if not found:
        return (
            f"{STATUS} alpha. Tested on CPU processes, whose messages keep [NCCL's rules](docs/wire.md), and on one H100 whose processes "
            "talked through the host; nothing has run over NCCL yet, so there are no multi-GPU figures "
            "([what ran where](docs/limits.md)). With two GPUs you can [measure it](docs/measured.md#how-to-send-a-result)."
        )
    where = " and ".join(f"{_name(run)} ({TITLES[run['kind']]})" for run in found)
    missing = "" if any(run["kind"] == OWN for run in found) else " Ranks shared a GPU: there are no multi-GPU figures."
    return f"{STATUS} alpha. Tested on CPU processes, and over NCCL on {where}.{missing} ([What ran where](docs/limits.md).)"


def _cell(runs: Runs, kind: str, part: str) -> str:
    from tests.gpu_check import part_name

    if kind not in runs:
        return "earlier" if part in EARLIER.get(kind, ()) else "not run"
    result = runs[kind]["results"].get(part_name(part))
    return "not run" if result is None else str(result["outcome"])


def block(runs: Runs) -> str:
    """The table of docs/limits.md."""
    from tests.gpu_parts import PARTS

    kinds = (OWN, SHARED, HOST, CPU)
    lines = [f"| | {' | '.join(TITLES[kind] for kind in kinds)} |", "|---|" + "---|" * len(kinds)]
    for part in PARTS.values():
        lines.append(f"| {part.title} | {' | '.join(_cell(runs, kind, part.name) for kind in kinds)} |")
    proofs = len(PROOFS.read_text().splitlines()) - 1
    cells = [f"{proofs} runs" if kind == CPU else "not run" for kind in kinds]
    lines.append(f"| [NCCL's rules](wire.md): order, sizes, waiting | {' | '.join(cells)} |")
    [speed] = re.findall(r"^\| the best stock `Trainer`, .*\| (.*) \|$", MEASURED.read_text(), re.MULTILINE)
    lines += [
        "",
        f"One process on one H100: {speed} times as fast as the best stock `Trainer` ([measured](measured.md#one-h100)).",
        "",
    ]
    if EARLIER.keys() - runs.keys():
        lines += [
            "*earlier*: passed on one H100 that four ranks shared, with the strategies there were before this log existed.",
            "",
        ]
    for kind in kinds:
        if kind not in runs:
            continue
        run = runs[kind]
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version != "none")
        cannot = len(run["cannot run here"])
        rest = f"; {cannot} tests that need a GPU were not run" if cannot else ""
        lines.append(f"{TITLES[kind]}: {run['date']}, {_name(run)}, {versions}: {run['result']}{rest}.")
    return "\n".join([BEGIN, "", *lines, "", END])


def limits_with(text: str, runs: Runs) -> str:
    """docs/limits.md with the table of these runs."""
    before, rest = text.split(BEGIN)
    return before + block(runs) + rest.split(END)[1]


def readme_with(text: str, runs: Runs) -> str:
    """README.md with the line of these runs."""
    return "\n".join(status(runs) if line.startswith(STATUS) else line for line in text.split("\n"))


def rewrite(runs: Runs) -> None:
    """Writes log and pages."""
    LOG.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    LIMITS.write_text(limits_with(LIMITS.read_text(), runs))
    README.write_text(readme_with(README.read_text(), runs))


if __name__ == "__main__":
    from tests import gpu  # noqa: F401  # for the modules of benchmarks/

    rewrite(read())
