"""Renders the page of families, `docs/families.md`, and `docs/data/families.csv` from the results of the sweep."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.vision_models import VISION_FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
TABLE = PAGE.parent / "data" / "families.csv"
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
decoders). On four processes, in fp64, a tiny model of each trains packs of several sequences and is compared with the plain model run on one sequence at a time.
*Exact* means that the loss agrees to 1e-12 and every gradient to 1e-11 (a vanishing gradient, to 1e-11 of a millionth of all of them), under each strategy
of the column: dp4; tp4, dp2tp2; pp4, dp2pp2; tp2pp2; cp4, dp2cp2; dp4+z3, dp4+rc+z3; chunks of 5 tokens on one process (ck); dp4ep4 (ep);
dp, tp and pp switched inside one mini-batch. Anything else is unsupported: an error gives the reason. Weights are random, and the settings expose mistakes: biases, short windows,
soft caps, multipliers.

{counts}

## Find a family

By `model_type`. [Cells and reasons of each family](data/families.csv) as a table.

| unsupported under | families |
|---|---|
{groups}

[Rows with images](images.md) train exactly (1e-11, towers included, under dp, tp, pp, cp, `+sp`, `+z2`, `+z3`, `+rc`) with: {images}.

Why:

* **tp, pp**: the family has no such plan in transformers, or modules outside of every stage.
* **cp, ck, ep**: layers that take whole sequences (a convolution, a state, linear attention, a custom mask), run one sequence of a pack at a time, and gain less
  from packing. ck also: embeddings that count tokens (RoBERTa and its kin). ep also: experts that are not one fused module.
* **+z3**: layers that do not run one after the other (CTRL: activations that cannot be recomputed).
* **everything**: attention outside of transformers' attention interface, so the sequences of a pack would see each other; or a router that draws random numbers in training.

If tp holds a complete block, or a family's plan leaves one out, every rank of a tensor-parallel group computes it: exact, without saving memory.

`python -m tests.family_sweep` runs the sweep (about 20 minutes on two cores) and rewrites the page; `python -m tests.family_sweep qwen3` runs one family.
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


def _groups(families: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each set of columns that are not exact, with the names of its families."""
    groups: dict[str, list[str]] = {}
    for name, row in families.items():
        found = {group: outcome for group in GROUPS if (outcome := cell(row, group)) not in ("exact", "-")}
        if "tp" in found or "pp" in found:  # then both together, too
            found.pop("tp and pp", None)
        texts = [f"{group}: wrong" if outcome == "wrong" else group for group, outcome in found.items()]
        groups.setdefault("everything" if len(texts) == len(GROUPS) - 1 else ", ".join(texts), []).append(name)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return "\n".join(f"| {found or 'nothing: exact'} | {', '.join(names)} |" for found, names in ordered)


def render_page(results: Mapping[str, Any]) -> str:
    families = results["families"]
    return _HEAD.format(
        version=results["transformers"], counts=_counts(families), groups=_groups(families),
        images=", ".join(sorted(VISION_FAMILIES)),
    )  # fmt: skip


def render_csv(results: Mapping[str, Any]) -> str:
    """Returns the text of the table beside the page: the cells of each family, and its reasons."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["family", "experts", *GROUPS, "notes"])
    for name, row in results["families"].items():
        notes = "; ".join(note.replace("\n", " ") for note in reasons(row))
        kind = "experts" if row.get("mixture") else ""
        writer.writerow([name, kind, *(cell(row, group) for group in GROUPS), notes])
    return text.getvalue()


def write_pages(results: Mapping[str, Any]) -> None:
    PAGE.write_text(render_page(results))
    TABLE.write_text(render_csv(results))
