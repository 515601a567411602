"""The family sweep: a tiny model of every family with a plan, and of most without, under every kind of layout, against the plain model.

`python -m tests.family_sweep [family ...]` runs families in worlds of four gloo ranks (token chunks on one), in fp64: loss and
gradients of each strategy alone, and of all of them switched inside one mini-batch, with packs of two sequences and at least two
micro-batches for every replica. Results go to `tests/data/family_sweep.json`, from which `docs/families.md` is made.
A family that crashes or hangs costs its own world only.
"""

import argparse
import json
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_hotspa.errors import HotspaError
from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import Strategy
from tests.family_page import outcome, write_pages
from tests.harness import WorldError, run_ranks
from tests.oracle import exact_in_double, reference_step, relative_error
from tests.tiny_families import is_mixture, swept_families, tiny_config_of, tiny_model_of
from tests.worlds import make_engine, make_mini_batch

RESULTS = Path(__file__).parent / "data" / "family_sweep.json"
NUM_ROWS = {
    "dp4": 16,
    "dp2tp2": 8,
    "tp4": 4,
    "dp2pp2": 8,
    "tp2pp2": 4,
    "pp4": 6,
    "dp2cp2": 8,
    "cp4": 4,
    "dp4+z3": 16,
    "dp4+rc+z3": 16,
    "dp1+ck5": 4,
    "dp4ep4": 16,
}
"""Rows of each strategy's mini-batch: two a pack, two packs a replica, three for the longest pipeline."""
MIX = "mix"
CHUNKED = [strategy for strategy in NUM_ROWS if "+ck" in strategy]
"""Run on one rank."""
DIVIDED = [strategy for strategy in NUM_ROWS if "ep" in strategy]
"""Run for mixtures of experts."""
_SHORTEST = 7


def of_four_ranks(is_of_experts: bool) -> list[str]:
    """What is run on four ranks, of a mixture of experts or of a dense model."""
    return [s for s in NUM_ROWS if s not in CHUNKED and (is_of_experts or s not in DIVIDED)]


def rows_of(strategy: str, vocab_size: int) -> list[dict[str, Any]]:
    """The rows of a strategy's bucket: two lengths that no other bucket has, some labels masked."""
    index = list(NUM_ROWS).index(strategy)
    generator = torch.Generator().manual_seed(index)
    rows = []
    for row in range(NUM_ROWS[strategy]):
        ids = torch.randint(0, vocab_size, (_SHORTEST + 2 * index + row % 2,), generator=generator)
        labels = ids.clone()
        if row % 3 == 0:
            labels[: len(ids) // 2] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def _num_labels(rows: Sequence[dict[str, Any]]) -> int:
    return sum(label != -100 for row in rows for label in row["labels"][1:])


def _weighted(references: Sequence[tuple[int, float, dict[str, Tensor]]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of several sets of rows together, from those of each with its number of labels."""
    total = sum(count for count, _, _ in references)
    loss = sum(count / total * found for count, found, _ in references)
    names = references[0][2]
    return loss, {n: sum((c / total * g[n] for c, _, g in references), torch.zeros(())) for n in names}


def sweep_on_rank(rank: int, world_size: int, family: str, strategies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What became of each strategy, and of the mix of them, on as many ranks as they need.

    Returns:
        By strategy, `{"refused": message}` or the errors `{"loss", "gradient", "parameter"}`; only rank 0 computes the
        reference and the errors.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        model = tiny_model_of(family)
        shape = describe_model(model).shape
        legal = []
        for strategy in strategies:
            if reason := Strategy.parse(strategy).unsupported_reason(shape):
                found[strategy] = {"refused": reason}
            else:
                legal.append(strategy)
        found |= _run(rank, model, legal)
    except HotspaError as error:
        found |= {s: {"refused": str(error)} for s in [*strategies, MIX] if s not in found}
    return found


def gradient_errors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The relative error of each gradient.

    Some gradients are zero but for rounding (a bias of keys that no rotation follows shifts all scores of a query
    alike); one that is below a millionth of the whole gradient is compared with that millionth.
    """
    whole = torch.stack([torch.linalg.vector_norm(g) for g in expected.values()])
    smallest = 1e-6 * float(torch.linalg.vector_norm(whole))
    return {
        key: relative_error(found, expected[key])
        if torch.linalg.vector_norm(expected[key]) >= smallest
        else float(torch.linalg.vector_norm(found - expected[key])) / smallest
        for key, found in got.items()
    }


def _run(rank: int, model: Any, legal: Sequence[str]) -> dict[str, dict[str, Any]]:
    if not legal:
        return {}
    text = model.config.get_text_config()
    vocab_size = getattr(text, "unpadded_vocab_size", None) or text.vocab_size
    rows = {strategy: rows_of(strategy, vocab_size) for strategy in legal}
    longest = {strategy: max(len(row["input_ids"]) for row in rows[strategy]) for strategy in legal}
    buckets = ",".join(f"{strategy}:{longest[strategy]}@{2 * longest[strategy]}" for strategy in legal)
    engine = make_engine(model, buckets)
    references = {s: (_num_labels(rows[s]), *reference_step(model, rows[s])) for s in legal} if rank == 0 else {}
    model.zero_grad(set_to_none=True)
    batches = {s: (rows[s], [s]) for s in legal}
    mixed = [s for s in legal if s not in DIVIDED and "cp" not in s and "+" not in s]
    if len(mixed) > 1:
        batches[MIX] = ([row for s in mixed for row in rows[s]], mixed)
    found = {}
    for name, (own, parts) in batches.items():
        mini_batch = make_mini_batch(engine, own)
        per_replica = [len(packs) for phase in mini_batch.plan.phases for packs in phase.replicas]
        assert min(per_replica) >= 2, per_replica
        assert all(len(p.lengths) > 1 for phase in mini_batch.plan.phases for packs in phase.replicas for p in packs)
        with exact_in_double(torch.float64):
            report = engine.forward_backward(mini_batch)
        got = engine.full_gradients()
        if rank == 0:
            loss, gradients = _weighted([references[part] for part in parts])
            named = model.named_parameters(remove_duplicate=False)
            trained = {key for key, parameter in named if parameter.requires_grad}
            assert got.keys() == trained
            errors = gradient_errors(got, gradients)
            worst = max(errors, key=lambda key: errors[key])
            found[name] = {
                "loss": abs(report.loss - loss) / abs(loss),
                "gradient": errors[worst],
                "parameter": worst,
            }
        else:
            found[name] = {}
    engine.close()
    return found


def add_strategies(family: str, row: dict[str, Any], strategies: Sequence[str], timeout: float) -> None:
    """Runs some strategies alone, and writes them into the row of a family."""
    if "refused" in row:
        return
    worlds: dict[int, list[str]] = {}
    for strategy in strategies:
        worlds.setdefault(Strategy.parse(strategy).world_size, []).append(strategy)
    for world_size, own in worlds.items():
        try:
            found = run_ranks(world_size, sweep_on_rank, family, own, timeout=timeout)[0]
        except WorldError as error:
            found = {strategy: {"failed": str(error)[-1500:]} for strategy in own}
        row["strategies"] |= {strategy: found[strategy] for strategy in own}


def sweep_family(family: str, timeout: float = 240.0, apart: bool = False) -> dict[str, Any]:
    """The row of one family: what its tiny model is, and what became of each strategy."""
    tp, pp = swept_families()[family]
    row: dict[str, Any] = {"tp_plan": tp, "pp_plan": pp, "strategies": {}}
    try:
        row["mixture"] = is_mixture(tiny_config_of(family))
        strategies = of_four_ranks(row["mixture"])
        try:
            row["strategies"] = run_ranks(4, sweep_on_rank, family, strategies, timeout=timeout)[0]
        except WorldError as error:
            row["strategies"] = {MIX: {"failed": str(error)[-1500:]}}
            for strategy in strategies if apart else ():
                try:
                    row["strategies"] |= run_ranks(4, sweep_on_rank, family, [strategy], timeout=timeout)[0]
                except WorldError as own:
                    row["strategies"][strategy] = {"failed": str(own)[-1500:]}
        add_strategies(family, row, CHUNKED, timeout)
        row |= _described(family)
    except HotspaError as error:
        row["refused"] = str(error)
    except Exception:  # one family's mistake must not end the sweep
        row["failed"] = traceback.format_exc()
    return row


def _described(family: str) -> dict[str, Any]:
    """What tensor parallelism holds whole, and which layers run one sequence at a time."""
    description = describe_model(tiny_model_of(family))
    alone = [index for index, kind in enumerate(description.layer_kinds) if kind.alone]
    return {"whole": dict(description.whole), "alone": len(alone), "layers": len(description.layer_kinds)}


def _settled(row: dict[str, Any] | None) -> bool:
    """Whether a row is there, and nothing in it is wrong."""
    if row is None or "failed" in row:
        return False
    return "refused" in row or (bool(row["strategies"]) and "wrong" not in map(outcome, row["strategies"].values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all when left out")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for a family's world")
    parser.add_argument("--apart", action="store_true", help="after a crash, each strategy in a world of its own")
    parser.add_argument("--again", action="store_true", help="only families whose row is missing or not right")
    parser.add_argument(
        "--strategies", nargs="+", choices=list(NUM_ROWS), help="run these alone, and keep what is there"
    )
    parser.add_argument("--page-only", action="store_true", help="make the page of the results that are there")
    options = parser.parse_args()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    known = swept_families()
    results: dict[str, Any] = json.loads(RESULTS.read_text())["families"] if RESULTS.exists() else {}
    families = [] if options.page_only else list(options.families or known)
    if options.again:
        families = [family for family in families if not _settled(results.get(family))]
    for family in families:
        begin = time.monotonic()
        if options.strategies:
            row = results[family]
            dense = not row.get("mixture", False)
            own = [strategy for strategy in options.strategies if not (dense and strategy in DIVIDED)]
            add_strategies(family, row, own, options.timeout)
        else:
            row = results[family] = sweep_family(family, options.timeout, options.apart)
        text = {name: outcome(found) for name, found in row["strategies"].items()}
        print(f"{family:22} {time.monotonic() - begin:5.1f} s  {text}", flush=True)
        for name, found in row["strategies"].items():
            if outcome(found) == "wrong":
                print(f"    {name}: {json.dumps(found)[-1200:]}", flush=True)
        for key in ("refused", "failed"):
            if key in row:
                print(f"    {key}: {row[key][-1500:]}", flush=True)
        ordered = {name: results[name] for name in sorted(results) if name in known}
        RESULTS.write_text(json.dumps({"transformers": transformers.__version__, "families": ordered}, indent=1) + "\n")
    write_pages(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
