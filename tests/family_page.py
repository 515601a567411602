"""Renders the page of families, `docs/families.md`, from the results of the sweep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-12, 1e-11
GROUPS = {
    "dp": ("dp4",),
    "tp": ("tp4", "dp2tp2"),
    "pp": ("pp4", "dp2pp2"),
    "tp and pp": ("tp2pp2",),
    "cp": ("dp2cp2", "cp4"),
    "+z3": ("dp4+z3", "dp4+rc+z3"),
    "ck": ("dp1+ck5",),
    "ep": ("dp4ep4",),
    "switched": ("mix",),
}
"""The columns of the table, and the strategies of the sweep for each."""

_HEAD = """# Families

Every causal language model of transformers {version} with a tensor-parallel or a pipeline plan, and the dense ones without a plan (BERT and its kin as
decoders). The family sweep tests a tiny model of each, on four processes, in fp64, in packs of several sequences, against the plain model run on one sequence at a time. *exact* means
that the loss agrees to 1e-12 and every gradient to 1e-11 (a vanishing gradient, to 1e-11 of a millionth of all of them), under each strategy
of the column (dp4; tp4 and dp2tp2; pp4 and dp2pp2; tp2pp2; cp4 and dp2cp2; dp4+z3 and dp4+rc+z3; chunks of 5 tokens on one process; dp4ep4 of
mixtures of experts; the plain strategies without cp, switched inside one mini-batch). *unsupported* means an error that gives the reason. Weights are random, and the settings expose mistakes: biases, short windows, soft caps, multipliers.

If tp holds a complete block, or a family's plan leaves one out, every rank of a tensor-parallel group computes it: exact, without saving
memory. Layers that run one sequence of a pack at a time gain less from packing.

{counts}

The page is generated: `python -m tests.family_sweep` runs the sweep (about {minutes} minutes on two cores) and rewrites it;
`python -m tests.family_sweep qwen3` runs one family.

| family | | dp | tp | pp | tp and pp | cp | +z3 | ck | ep | switched | notes |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def outcome(result: Mapping[str, Any]) -> str:
    """`exact`, `unsupported`, or `wrong` for anything else."""
    if "refused" in result:
        return "unsupported"
    exact = result.get("loss", 1.0) <= LOSS_TOLERANCE and result.get("gradient", 1.0) <= GRADIENT_TOLERANCE
    return "exact" if exact else "wrong"


def cell(row: Mapping[str, Any], group: str) -> str:
    """The cell of a family in a column: the worst outcome of its strategies."""
    if "refused" in row:
        return "unsupported"
    outcomes = {outcome(row["strategies"][s]) for s in GROUPS[group] if s in row["strategies"]}
    if "failed" in row or not row["strategies"]:
        return "wrong"
    if not outcomes:  # a mix needs two strategies that run, of dp, tp and pp; others have not been run
        planned = row.get("tp_plan", True) or row.get("pp_plan", True)
        return "unsupported" if group == "switched" and planned else "-"
    return next(name for name in ("wrong", "unsupported", "exact") if name in outcomes)


def reasons(row: Mapping[str, Any]) -> list[str]:
    """Why a family is unsupported, each reason once, and which blocks tp does not shard."""
    texts: list[str] = []
    for result in (row, *row["strategies"].values()):
        if "refused" in result:
            texts.append(str(result["refused"]).partition(" | Fix:")[0])
    notes = list(dict.fromkeys(texts))
    for name, why in row.get("whole", {}).items():
        notes.append(f"tp does not shard `{name.partition('layers.*.')[2] or name}`: {why}")
    if row.get("alone"):
        notes.append(f"{row['alone']} of {row['layers']} layers run one sequence of a pack at a time")
    return notes


def _has(row: Mapping[str, Any], plan: str) -> bool:
    return any(row.get(name) for name in (("tp_plan", "pp_plan") if plan == "any_plan" else (plan,)))


def _counts(families: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        "| | families | exact under dp | tp | pp | cp | +z3 | ck | ep | switched |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    kinds = {"dense": False, "mixture of experts": True}
    for kind, mixture in kinds.items():
        rows = [row for row in families.values() if row.get("mixture", False) == mixture]
        cells = []
        for group, plan in (
            ("dp", None),
            ("tp", "tp_plan"),
            ("pp", "pp_plan"),
            ("cp", None),
            ("+z3", None),
            ("ck", None),
            ("ep", "mixture"),
            ("switched", "any_plan"),
        ):
            planned = [row for row in rows if plan is None or _has(row, plan)]
            cells.append(
                "-" if not planned else f"{sum(cell(row, group) == 'exact' for row in planned)} of {len(planned)}"
            )
        lines.append(f"| {kind} | {len(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def render_page(results: Mapping[str, Any], minutes: int = 20) -> str:
    """Returns the text of the page."""
    families = results["families"]
    lines = []
    for name, row in families.items():
        cells = [cell(row, group) for group in GROUPS]
        notes = "; ".join(text.replace("|", "\\|").replace("\n", " ") for text in reasons(row))
        kind = "experts" if row.get("mixture") else ""
        lines.append(f"| {name} | {kind} | " + " | ".join(cells) + f" | {notes} |")
    head = _HEAD.format(version=results["transformers"], counts=_counts(families), minutes=minutes)
    return head + "\n".join(lines) + "\n"
