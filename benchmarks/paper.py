"""The experiments of HotSPa (SOSP'24) priced by our models: every figure of docs/paper.md, and docs/data/paper-*.csv.

    python benchmarks/paper.py [table3] [fig7] [fig8] [sweeps] [order] [by-hand] [memory] [links] [traces] [predictions] [--quick] [--write]

* `table3`: the static strategy and C1, C2, C3 on both corpora, in totals and in ratios, beside the published ones.
* `fig7`: three models, 8 to 32 GPUs, 4K to 32K tokens, both corpora.
* `fig8`: seconds of the 20 switches of five strategies; the optimizations of switches are turned off one after the other.
* `sweeps`: longer sequences, larger mini-batches, more GPUs.
* `order`: the bytes that a switch sends in every order of phases.
* `by-hand`: the strategies that the paper's scripts name, beside the planner's.
* `memory`: our memory model beside torch's own tracker, and beside the tensors that autograd keeps (`witnesses.py`).
* `links`: our links beside torch's model of NCCL (`witnesses.py`).
* `traces`: our pipeline schedule beside traces of real jobs (`straggler_trace.py`).
* `predictions`: rows that the pages publish, beside the predictions of the models without them.

Prints Markdown tables. `--quick` computes a few of their lines, which tests compare with the files; `--write` writes the files and the page.
No GPU, no network, no clock: seconds are from the time model for A800 (80 GB), eight per node, from data sheets or, where noted,
from published coefficients. The sides:

* un-packed: each sequence is a micro-batch, the longest first, to the replica that finishes first;
* packed: sequences share micro-batches and stay isolated; the side gives the pack length;
* a static strategy with one replica updates where it computes, so its seconds have no switch; one with several replicas gathers its
  weights and scatters its gradients as ours do; all others include the seconds of all their switches.
"""

import argparse
import csv
import heapq
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, permutations, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from planner_cases import bit_reversed, cluster_of, llama_vector, weights
from planner_targets import CHAINS, chain_row
from straggler_trace import measured_seconds, read_trace, replica_seconds
from written_plans import traffic_of

from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.divided import ulysses_unsupported_reason
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.terms import Cost
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import HotspaError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.plan.planner import plan_load
from hf_hotspa.plan.switch_plan import DST, LENGTH, SRC, START, SwitchPlan, overlapped_seconds
from hf_hotspa.search.baselines import Pricing
from hf_hotspa.search.capacities import Capacities
from hf_hotspa.search.estimate import packed
from hf_hotspa.search.histogram import read_lengths, synthetic_lengths
from hf_hotspa.search.offers import choose
from hf_hotspa.search.question import mini_batches
from hf_hotspa.search.search import SearchOptions
from hf_hotspa.search.setup import Setup
from hf_hotspa.strategy import Strategy

ROOT = Path(__file__).resolve().parents[1]
PAGE, FILES, DATA = ROOT / "docs" / "paper.md", ROOT / "docs" / "data", ROOT / "tests" / "data"
"""Commands whose first table, or its summary, is on the page."""
HARDWARE = "a800-80g"
CORPORA = {"commoncrawl": "CommonCrawl", "github": "GitHub"}
STATIC = Strategy(1, 16, 2)
SEEDS = 4
"""Table 3 is the mean over this many mini-batches of 512 lengths."""

Lines = list[str]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Lines:
    """A Markdown table."""
    written = [" | ".join(map(str, row)) for row in [head, ["---"] * len(head), *rows]]
    return [f"| {row} |" for row in written]


def seconds_text(seconds: float | None) -> str:
    """Seconds, or "does not fit"."""
    return "does not fit" if seconds is None else f"{seconds:.1f}"


def ratio_text(slow: float | None, fast: float | None) -> str:
    """The ratio of the seconds of two sides."""
    return "-" if slow is None or fast is None else f"{slow / fast:.2f}x"


# -- seconds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfStages(TimeModel):
    """Published seconds of complete stages by (tp, pp); all stages are equal."""

    stages: Mapping[tuple[int, int], Cost] = field(default_factory=dict)

    def stage_costs(self, strategy: Strategy) -> tuple[Cost, ...]:
        return (self.stages[strategy.tp, strategy.pp],) * strategy.pp


def published_coefficients() -> TimeModel:
    """Micro-batch coefficients that the authors' group published for a 32B model (PKU-DAIR/Hetu); (16, 2) is half of (16, 1)."""
    data = json.loads((DATA / "hetu_32b_coefficients.json").read_text())
    rows = [*data["coefficients"], *data["derived"]]
    stages = {(r["tp"], r["pp"]): Cost(r["a"], r["b"], r["c"]) * 1e-3 for r in rows}
    return OfStages(data["source"], StageCosts((1,) * data["model"]["layers"]), stages=stages)


def one_sequence_each(model: TimeModel, strategy: Strategy, lengths: Iterable[int]) -> float:
    """Seconds with one sequence per micro-batch, the longest first to the least loaded replica."""
    cost = model.stage_costs(strategy)[0]
    replicas: list[tuple[float, int, list[tuple[int, ...]]]] = [(0.0, r, []) for r in range(strategy.dp)]
    for length in sorted(lengths, reverse=True):
        load, index, packs = replicas[0]
        packs.append((length,))
        heapq.heapreplace(replicas, (load + cost.of((length,)), index, packs))
    return model.phase_seconds(strategy, [packs for *_, packs in replicas])


def packed_seconds(
    model: TimeModel, strategy: Strategy, lengths: Iterable[int], tokens: int, quadratic: float
) -> float:
    """Seconds with packs of `tokens` tokens."""
    return model.phase_seconds(strategy, packed(sorted(lengths), strategy, tokens, quadratic, tokens))


@cache
def setup(model: str, nodes: str) -> Setup:
    """A model on a number of machines."""
    return Setup.read(model, nodes, HARDWARE)


# -- Table 3 ----------------------------------------------------------------------------------------------------------


def published_table3() -> dict[str, Any]:
    """Table 3."""
    found: dict[str, Any] = json.loads((DATA / "table3.json").read_text())
    return found


def edges_of(group: Mapping[str, Any]) -> tuple[int, int]:
    """The lengths of a group: above the first, up to the second."""
    low, high = (int(edge) * 1024 for edge in group["range"].removesuffix("K").split("-"))
    return low, high


@cache
def _lengths(corpus: str, seed: int) -> tuple[int, ...]:
    return tuple(synthetic_lengths(corpus, 512, 32768, seed))


@cache
def group_seconds(corpus: str, strategy: Strategy, low: int, high: int, *, pack: bool, fitted: bool) -> float:
    """Mean seconds of the lengths in `(low, high]`, without a switch.

    Args:
        pack: Packs of `high` tokens instead of one sequence per micro-batch.
        fitted: From the published coefficients instead of the data sheet.
    """
    cost = setup("llama2-32b", "4x8").cost
    model = published_coefficients() if fitted else cost.time
    found = []
    for seed in range(SEEDS):
        lengths = [n for n in _lengths(corpus, seed) if low < n <= high]
        if not lengths:
            found.append(0.0)
        elif pack:
            found.append(packed_seconds(model, strategy, lengths, high, cost.sizes.shape.quadratic_cost))
        else:
            found.append(one_sequence_each(model, strategy, lengths))
    return fmean(found)


def switches(strategies: Iterable[Strategy]) -> float:
    """Seconds to load each strategy and to return its gradients, with our switches."""
    return sum(setup("llama2-32b", "4x8").cost.switch_seconds(strategies).values())


SIDES = {
    "un-packed, data sheet": ((False, False), False),
    "packed, data sheet": ((True, True), False),
    "static un-packed, others packed, data sheet": ((False, True), False),
    "un-packed, published coefficients": ((False, False), True),
    "packed, published coefficients": ((True, True), True),
}
"""Whether the static strategy and the others are packed, and whether seconds are from published coefficients."""


def totals(corpus: str, side: str) -> dict[str, float]:
    """Seconds of a mini-batch of the static strategy and of C1, C2, C3."""
    (static, hot), fitted = SIDES[side]
    found = {"Static": group_seconds(corpus, STATIC, 0, 32768, pack=static, fitted=fitted)}
    for name in ("C1", "C2", "C3"):
        groups = [(Strategy(**g["strategy"]), *edges_of(g)) for g in published_table3()["strategies_per_group"][name]]
        computed = sum(group_seconds(corpus, *group, pack=hot, fitted=fitted) for group in groups)
        found[name] = computed + switches([strategy for strategy, *_ in groups])
    return found


def table3(quick: bool) -> Lines:
    """Totals, then groups."""
    published = published_table3()["results"]
    rows = []
    for corpus, title in CORPORA.items():
        sides = {"published": {name: published[title][name]["total_seconds"] for name in ("Static", "C1", "C2", "C3")}}
        sides |= {side: totals(corpus, side) for side in SIDES}
        for side, found in sides.items():
            hot = [f"{found[c]:.1f} ({found['Static'] / found[c]:.2f}x)" for c in ("C1", "C2", "C3")]
            rows.append([title, side, f"{found['Static']:.1f}", *hot])
    lines = table(["corpus", "side", "static, s", "C1, s", "C2, s", "C3, s"], rows)
    seen, groups = set[tuple[str, str, str]](), []
    for corpus, title in CORPORA.items():
        for name in ("C3", "C1", "C2"):
            for group in published[title][name]["groups"]:
                strategy, (low, high) = Strategy(**group["strategy"]), edges_of(group)
                key = title, group["range"], str(strategy)
                if strategy == STATIC or key in seen:
                    continue
                seen.add(key)
                texts = []
                for fitted in (False, True):
                    for pack in (False, True):
                        static = group_seconds(corpus, STATIC, low, high, pack=pack, fitted=fitted)
                        texts.append(
                            f"{static / group_seconds(corpus, strategy, low, high, pack=pack, fitted=fitted):.2f}x"
                        )
                groups.append([*key, f"{group['speedup_from_printed_times']:.2f}x", *texts])
    head = ["corpus", "lengths", "strategy", "published", "un-packed, data sheet", "packed, data sheet"]
    return [*lines, "", *table([*head, "un-packed, published coefficients", "packed, published coefficients"], groups)]


# -- Fig. 7 and the sweeps --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One case."""

    model: str
    nodes: str
    longest: int
    corpus: str
    batch: int = 512

    @property
    def gpus(self) -> int:
        """All of them."""
        return setup(self.model, self.nodes).world_size


SIDES7 = (
    "un-packed static",
    "packed static",
    "ZeRO + Ulysses, un-packed",
    "ZeRO + Ulysses, packed",
    "hot, dp x tp x pp",
    "plan",
)


@cache
def priced(cell: Cell) -> dict[str, float | None]:
    """Seconds of every side of a case; None if the longest sequence does not fit."""
    of = setup(cell.model, cell.nodes)
    drawn, top = read_lengths(cell.corpus, cell.batch, cell.longest, None)
    pricing = Pricing(of.cost, Capacities(of.cost.memory, of.limit_bytes), drawn, cell.batch, top)
    ulysses = replace(pricing, cost=replace(of.cost, time=replace(of.cost.time, context_parallel="ulysses")))
    whole = [s for s in of.strategies() if not s.ck and s.ep == 1]
    plain = [s for s in whole if not s.z and s.cp == 1]
    zero = [s for s in whole if s.tp == s.pp == 1 and not ulysses_unsupported_reason(s, of.model.shape)]
    found = [
        unpacked(pricing, plain),
        static_seconds(pricing, plain),
        unpacked(ulysses, zero),
        static_seconds(ulysses, zero),
        pricing.best("", plain, max_phases=3).seconds,
        planned(of, pricing),
    ]
    return dict(zip(SIDES7, found, strict=True))


def planned(of: Setup, pricing: Pricing) -> float | None:
    """Seconds of the plan, which may use every strategy."""
    try:
        choice = choose(pricing, of.strategies(), SearchOptions(may_go_round=True))
    except HotspaError:
        return None
    return choice.seconds


def static_switch(cost: CostModel, strategy: Strategy) -> float:
    """Seconds in which a static strategy gathers and scatters once per step; 0 if each rank updates the only copy of its shard."""
    return 0.0 if strategy.dp * strategy.cp == 1 else cost.switch_seconds([strategy])[strategy]


def static_seconds(pricing: Pricing, strategies: Sequence[Strategy]) -> float | None:
    """Seconds of the fastest strategy, packed as well as it can be."""
    found = []
    for own in ([s for s in strategies if s.dp * s.cp == 1], [s for s in strategies if s.dp * s.cp > 1]):
        best = pricing.best("", own) if own else None
        if best is not None and best.seconds is not None:
            (bucket,) = best.buckets
            moved = pricing.cost.switch_seconds([bucket.strategy])[bucket.strategy]
            found.append(best.seconds - moved + static_switch(pricing.cost, bucket.strategy))
    return min(found, default=None)


def unpacked(pricing: Pricing, strategies: Iterable[Strategy]) -> float | None:
    """Seconds of the fastest strategy with one sequence per micro-batch."""
    batches, shares = mini_batches(pricing.lengths, pricing.mini_batch_size, max(pricing.lengths))
    found = []
    for strategy in strategies:
        # the longest come first, so a pipeline is full of them
        if pricing.capacities.model.largest_pack(strategy, pricing.capacities.limit_bytes) >= pricing.longest:
            each = [one_sequence_each(pricing.cost.time, strategy, batch) for batch in batches]
            computed = sum(weight * seconds for weight, seconds in zip(shares, each, strict=True))
            found.append(computed + static_switch(pricing.cost, strategy))
    return min(found, default=None)


def _row(cell: Cell, *head: object) -> list[object]:
    found = priced(cell)
    ratios = [
        ("un-packed static", "hot, dp x tp x pp"),
        ("packed static", "hot, dp x tp x pp"),
        ("packed static", "plan"),
    ]
    return [
        *head, *(seconds_text(found[side]) for side in SIDES7),
        *(ratio_text(found[slow], found[fast]) for slow, fast in ratios),
    ]  # fmt: skip


COLUMNS = [*(f"{side}, s" for side in SIDES7), "un-packed / hot", "packed / hot", "packed / plan"]


def fig7(quick: bool) -> Lines:
    """All cases; only the smallest when quick."""
    rows = []
    for model in ("7b", "13b", "32b"):
        for nodes in ("1x8", "2x8", "4x8"):
            for longest in (4096, 8192, 16384, 32768):
                for corpus, title in CORPORA.items():
                    if quick and (model, nodes, longest) not in {("7b", "1x8", 4096), ("32b", "1x8", 32768)}:
                        continue
                    cell = Cell(f"llama2-{model}", nodes, longest, corpus)
                    rows.append(_row(cell, model.upper(), cell.gpus, f"{longest >> 10}K", title))
    return table(["model", "GPUs", "longest", "corpus", *COLUMNS], rows)


def sweeps(quick: bool) -> Lines:
    """One thing varied at a time."""
    cells = [
        ("sequences a mini-batch", batch, Cell("llama2-32b", "4x8", 32768, c, batch))
        for batch in (64, 128, 256, 512, 1024)
        for c in CORPORA
    ]
    cells += [
        ("longest sequence", f"{n >> 10}K", Cell("llama2-32b", "4x8", n, c))
        for n in (4096, 8192, 16384, 32768)
        for c in CORPORA
    ]
    cells += [("GPUs", 8 * n, Cell("llama2-7b", f"{n}x8", 16384, c)) for n in (1, 2, 4, 8) for c in CORPORA]
    if quick:
        cells = [cell for cell in cells if cell[:2] == ("GPUs", 8)]
    rows = [_row(cell, name, value, CORPORA[cell.corpus]) for name, value, cell in cells]
    return table(["varied", "to", "corpus", *COLUMNS], rows)


# -- Fig. 8 -----------------------------------------------------------------------------------------------------------

OPERATION_S = 25e-6
"""Seconds of a message beside its bytes: the data sheet's value for a collective inside a node."""
FIVE = CHAINS["C3"]
FORMS = {
    "relayed, nested shards": ("relay", True, "fused"),
    "relayed, plain shards": ("relay", False, "fused"),
    "Algorithm 1, plain shards": ("algorithm1", False, "fused"),
    "Algorithm 1, plain shards, a message a slice": ("algorithm1", False, "slices"),
    "Algorithm 1, plain shards, a message a stretch of the model's own storage": ("algorithm1", False, "stretches"),
}
"""Planner, whether shards are in nested order, and the unit of a message."""


def _messages(plan: SwitchPlan, fusing: str) -> int:
    """Messages that the busiest rank sends and receives."""
    vector = llama_vector("32B")
    specs = sorted(vector.specs, key=lambda spec: spec.offset)
    counts, peers = np.zeros(plan.world_size, np.int64), set[tuple[int, int, int]]()
    per_kind: dict[int, list[int]] = {}
    for segment, kind in enumerate(plan.kind_of):
        if kind >= 0:
            per_kind.setdefault(kind, []).append(segment)
    for kind, segments in per_kind.items():
        base = plan.bases[segments[0]]
        for hop, rows in enumerate(plan.kinds[kind].hops):
            moved = rows[rows[:, SRC] != rows[:, DST]]
            if fusing == "fused":
                peers |= {(hop, int(src), int(dst)) for src, dst in np.unique(moved[:, [SRC, DST]], axis=0)}
                continue
            low, high = base + moved[:, START], base + moved[:, START] + moved[:, LENGTH]
            cuts = np.zeros(len(moved), np.int64)
            for spec in specs:
                inside = (np.minimum(high, spec.stop) > np.maximum(low, spec.offset)).astype(np.int64)
                whole = (low <= spec.offset) & (high >= spec.stop)
                strided = fusing == "stretches" and spec.shard_dim == 1
                cuts += inside * np.where(whole, 1, spec.shape[0] if strided else 1)
            for side in (SRC, DST):
                np.add.at(counts, moved[:, side], cuts * len(segments))
    for _, src, dst in peers:
        counts[src] += 1
        counts[dst] += 1
    return int(counts.max())


@cache
def switch_of(a: Strategy, b: Strategy, form: str) -> tuple[float, int]:
    """Seconds of the bytes of bf16 weights, and messages of the busiest rank."""
    planner, nested, fusing = FORMS[form]
    cluster = cluster_of(32, 8, "device")
    if nested:
        a, b = bit_reversed(a), bit_reversed(b)
    target = weights("32B", b)
    sizes = [2] * len(target.placements)
    plan = plan_load(weights("32B", a), target, cluster, sizes, planner)
    return overlapped_seconds(plan.loads(cluster, sizes), cluster), _messages(plan, fusing)


def fig8(quick: bool) -> Lines:
    """A matrix for each form; only the first row of each when quick."""
    lines: Lines = []
    for form in FORMS:
        rows = []
        for a in FIVE[:1] if quick else FIVE:
            cells = []
            for b in FIVE:
                if a == b:
                    cells.append("-")
                    continue
                wire, messages = switch_of(a, b, form)
                cells.append(f"{wire + messages * OPERATION_S:.3f} ({messages:,})")
            rows.append([f"`{a}`", *cells])
        lines += ["", f"**{form}**", "", *table(["from \\ to", *(f"`{b}`" for b in FIVE)], rows)]
    return lines[1:]


# -- order of phases, strategies by hand ------------------------------------------------------------------------------


def order(quick: bool) -> Lines:
    """Bytes of every order of three strategies; then seconds of the chains in the published order and in ours."""
    three, cluster = [Strategy(1, 2, 2), Strategy(4), Strategy(2, 2)], cluster_of(4, 4, "device")
    rows = []
    for phases in permutations(three):
        sent = []
        for a, b in pairwise(phases):
            target = weights("7B", b)
            sizes = [2] * len(target.placements)
            plan = plan_load(weights("7B", a), target, cluster, sizes)
            sent.append(traffic_of(plan, cluster, sizes).wire_bytes / 1e9)
        rows.append([" -> ".join(f"`{s}`" for s in phases), *(f"{gb:.2f}" for gb in sent), f"{sum(sent):.2f}"])
    lines = table(["order, 7B on 4 GPUs", "first switch, GB", "second switch, GB", "together, GB"], rows)
    chains = []
    for name in ("C1",) if quick else CHAINS:
        found = [
            chain_row(name, second=True, nested=nested, nic="device", wire="bf16", reorder=re)
            for nested, re in ((False, False), (True, False), (True, True))
        ]
        chains.append(
            [name, *(f"{row['loads_s']:.3f}" for row in found), " -> ".join(f"`{s}`" for s in found[-1]["phases"])]
        )
    head = [
        "strategies of",
        "published order, s",
        "published order, nested shards, s",
        "our order, nested shards, s",
        "our order",
    ]
    return [*lines, "", *table(head, chains)]


def by_hand(quick: bool) -> Lines:
    """The strategies of the paper's scripts: with its edges and packs of the longest length, and with the best edges and packs."""
    rows = []
    cases = published_table3()["other_combinations_32k"]
    for case in cases["cases"]:
        for name in ("c1", "c2"):
            for corpus, title in CORPORA.items():
                if quick and (case["gpus"], case["model"], name) != (8, "7B", "c1"):
                    continue
                of = setup(f"llama2-{case['model'].lower()}", f"{case['gpus'] // 8}x8")
                rows.append(
                    [
                        case["model"],
                        case["gpus"],
                        title,
                        name.upper(),
                        *_by_hand(of, corpus, case[name], cases["bucket_edges"][name]),
                    ]
                )
    head = [
        "model",
        "GPUs",
        "corpus",
        "strategies",
        "`--strategies`",
        "as written, s",
        "best edges and packs, s",
        "plan, s",
        "as written / plan",
    ]
    return table(head, rows)


def _by_hand(of: Setup, corpus: str, degrees: Sequence[Sequence[int]], edges: Sequence[int]) -> list[str]:
    first, *others = (Strategy(*each) for each in degrees)
    ascending = [*others, first]  # the longest bucket comes first in the scripts, then the shortest upward
    drawn, top = read_lengths(corpus, 512, 32768, None)
    pricing = Pricing(of.cost, Capacities(of.cost.memory, of.limit_bytes), drawn, 512, top)
    found = []
    for again in product(
        (0, 1), repeat=len(ascending)
    ):  # they have sequence parallelism, and recomputation where memory asks for it
        run = [replace(s, sp=s.tp > 1, rc=rc) for s, rc in zip(ascending, again, strict=True)]
        buckets = [f"{s}:{edge}@{edge}" for s, edge in zip(run, sorted(edges)[1:], strict=True)]
        rival = pricing.written(",".join(buckets), of.world_size)
        if rival.seconds is not None:
            found.append((rival.seconds, rival.name, ",".join(map(str, run))))
    known, written, names = min(found)
    best, plan = pricing.written(names, of.world_size).seconds, planned(of, pricing)
    return [f"`{written}`", *map(seconds_text, (known, best, plan)), ratio_text(known, plan)]


def memory(quick: bool) -> Lines:
    """The tables of `witnesses.py`."""
    import witnesses  # brings in torch

    return [*table(witnesses.HEAD, witnesses.memory(quick)), "", *table(witnesses.KEPT_HEAD, witnesses.kept(quick))]


def predictions(quick: bool) -> Lines:
    """Rows that these pages publish, beside predictions from data sheets only; and the file of predictions."""
    rows: list[list[object]] = []
    published = published_table3()["results"]
    for corpus, title in CORPORA.items():
        modelled = totals(corpus, "un-packed, data sheet")
        for name in ("Static", "C1", "C2", "C3"):
            real = published[title][name]["total_seconds"]
            rows.append(_beside(f"Table 3, {title}, {name}", "s", real, modelled[name]))
    for what, unit, real, ours in h100():
        rows.append(_beside(what, unit, real, ours))
    kept = json.loads((ROOT / "benchmarks" / "data" / "published_predictions.json").read_text())
    files = [[kept["date"], f"`{kept['cost model of commit'][:7]}`", len(kept["predictions"])]]
    head = ["row", "unit", "measured", "predicted", "error"]
    return [*table(["predictions of", "cost model of commit", "runs"], files), "", *table(head, rows)]


def _beside(what: str, unit: str, real: float, ours: float) -> list[object]:
    return [what, unit, f"{real:.2f}", f"{ours:.2f}", f"{ours / real - 1:+.0%}"]


def h100() -> list[tuple[str, str, float, float]]:
    """The side with packs of one length of docs/one-gpu.json: what, unit, measured, predicted from the data sheet."""
    found = json.loads((ROOT / "docs" / "one-gpu.json").read_text())
    rounds, hidden, layers, tokens = found["sides"]["ours, dp1 in packs of 32768"], 1024, 16, found["longest"]
    width = hidden * 11 // 4
    of_layer = 3 * hidden**2 + 3 * hidden * width + 2 * hidden  # half as many key/value heads as query heads
    shape = ModelShape("llama", layers, 16, 8, hidden, hidden, 32000, of_layer, max_position_embeddings=tokens)
    cost = CostModel.of_hardware(load_hardware("h100-80g"), ModelSizes(shape), MemoryOptions(), 1)
    num_steps = len(rounds[0]["seconds"])
    warm, strategy = 2, Strategy()
    drawn = synthetic_lengths("commoncrawl", 64 * (warm + num_steps), tokens, 1)
    seconds = [
        packed_seconds(cost.time, strategy, drawn[64 * step : 64 * (step + 1)], tokens, shape.quadratic_cost)
        for step in range(warm, warm + num_steps)
    ]
    real = fmean(median(each["seconds"]) for each in rounds)
    peak = fmean(each["peak_bytes"] for each in rounds) / 2**30
    ours = cost.memory.breakdown(strategy, tokens).total / 2**30
    return [("one H100, packs of 32K", "s", real, median(seconds)), ("one H100, packs of 32K", "GiB", peak, ours)]


def links(quick: bool) -> Lines:
    """All-reduces by torch's model of NCCL and by ours; and both beside published measurements."""
    import witnesses  # brings in torch

    return [*table(witnesses.LINKS_HEAD, witnesses.links(quick)), "", *table(witnesses.BUS_HEAD, witnesses.buses())]


def traces(quick: bool) -> Lines:
    """The simulated schedule beside two traces of real jobs."""
    rows = []
    for name in ("ST", "SE"):
        path = DATA / f"straggler_trace_{name}.parquet"
        measured, steps = measured_seconds(path), read_trace(path)
        simulated = [max(map(replica_seconds, replicas)) for replicas in steps]
        errors = [ours / real - 1 for ours, real in zip(simulated, measured, strict=True)]
        job = f"{name}: {len(steps[0])} replicas of {len(steps[0][0][0][0])} stages, {len(steps)} steps"
        worst = max(errors, key=abs)
        rows.append(
            [job, f"{fmean(measured):.3f}", f"{fmean(simulated):.3f}", f"{fmean(errors):+.2%}", f"{worst:+.2%}"]
        )
    return table(["job", "measured, s a step", "simulated, s a step", "mean error", "worst step"], rows)


# -- the page ---------------------------------------------------------------------------------------------------------

COMMANDS: dict[str, Callable[[bool], Lines]] = {
    "table3": table3, "fig7": fig7, "fig8": fig8, "sweeps": sweeps, "order": order, "by-hand": by_hand,
    "memory": memory, "links": links, "traces": traces, "predictions": predictions,
}  # fmt: skip


def section(page: str, name: str) -> tuple[str, str, str]:
    """The text before the table of a command in a page, the table, and the text after it."""
    before, begin, rest = page.partition(f"<!-- begin: python benchmarks/paper.py {name} -->\n")
    inside, end, after = rest.partition("<!-- end -->\n")
    if not end:
        raise ValueError(f"the page has no table of {name}")
    return before + begin, inside, end + after


Rows = list[list[str]]


def files_of(name: str, lines: Lines) -> dict[str, Rows]:
    """The tables of a command by file of docs/data, each with its head. Titled tables of one head share a file."""
    found, title, head = dict[str, Rows](), "", list[str]()
    for line in lines:
        if not line.startswith("|"):
            title, head = line.strip("*") or title, []
            continue
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")]
        titled = ([title] if title else []) + cells
        if not head:
            head = cells
            start = ["form", *cells] if title else cells
            if start not in [rows[0] for rows in found.values()]:
                found[f"paper-{name}{f'-{len(found) + 1}' if found else ''}.csv"] = [start]
        elif set("".join(cells)) != {"-"}:
            list(found.values())[-1].append(titled)
    return found


def csv_text(rows: Rows) -> str:
    """A file's text."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_rows(file: str) -> Rows:
    """The rows of a file of docs/data."""
    return list(csv.reader((FILES / file).read_text().splitlines()))


def table3_summary() -> Lines:
    """The published totals of Table 3, and ours by the data sheet, from its file."""
    head, *rows = read_rows("paper-table3.csv")
    return table(head, [row for row in rows if row[1] in ("published", *list(SIDES)[:2])])


def fig7_summary() -> Lines:
    """The mean ratios of the file of Fig. 7 at 4K and 32K, and the smallest and largest, over models and GPUs."""
    head, *rows = read_rows("paper-fig7.csv")
    kinds: dict[tuple[str, str], Rows] = {}
    for row in rows:
        if "-" not in row and row[2] in ("4K", "32K"):  # - is a side that does not fit
            kinds.setdefault((row[3], row[2]), []).append(row)
    lines = []
    for (corpus, longest), of in sorted(kinds.items(), key=lambda item: (item[0][0], int(item[0][1][:-1]))):
        ratios = [[float(row[at].rstrip("x")) for row in of] for at in (-3, -2, -1)]
        lines.append(
            [corpus, longest, *(f"{fmean(each):.2f}x ({min(each):.2f} to {max(each):.2f})" for each in ratios)]
        )
    return table(["corpus", "longest", *head[-3:]], lines)


ON_PAGE = {"table3": table3_summary, "fig7": fig7_summary}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints tables, or writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[*COMMANDS, []], help="which; all of them by default")
    parser.add_argument("--quick", action="store_true", help="a few lines of each")
    parser.add_argument("--write", action="store_true", help="write them into docs/data/paper-*.csv and docs/paper.md")
    options = parser.parse_args(arguments)
    for name in options.tables or COMMANDS:
        lines = COMMANDS[name](options.quick)
        if options.quick or not options.write:
            print("\n".join(lines) + "\n")
            continue
        for file, rows in files_of(name, lines).items():
            (FILES / file).write_text(csv_text(rows))
        if name in ON_PAGE:
            before, _, after = section(PAGE.read_text(), name)
            PAGE.write_text(before + "\n".join(ON_PAGE[name]()) + "\n" + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
