"""Compares the losses and speeds of two runs. Pure functions of two `RunLog`s."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from hf_hotspa.errors import RunLogError
from hf_hotspa.report import StepReport
from hf_hotspa.reporting import svg
from hf_hotspa.reporting.measure_table import COLUMNS, PLACES, rows_of
from hf_hotspa.reporting.page import Panel, document, plan_panel, run_panel
from hf_hotspa.reporting.run_log import RunLog, StepRecord, StrategyTotals
from hf_hotspa.reporting.summary import summarize
from hf_hotspa.reporting.svg import Series, short


@dataclass(frozen=True)
class StrategyPair:
    """One strategy in both runs."""

    strategy: str
    a: StrategyTotals | None  # its totals in run A; None if it did not run
    b: StrategyTotals | None  # the same for run B
    # tokens per second of computation, B over A. For a strategy of one run only, the other run's single strategy is
    # compared, if it has only one. None if nothing can be compared.
    speed_up: float | None


@dataclass(frozen=True)
class Comparison:
    """The comparison of run A and run B."""

    steps: tuple[int, ...]  # steps that both trained
    loss_differences: tuple[float, ...]  # B - A, for each step
    largest_relative: float  # the largest `|B - A| / |A|`
    largest_step: int
    same_tokens: bool  # whether both trained equally many tokens in each step; else losses are of different data
    not_alike: tuple[str, ...]  # what differs of `model`, `data`, `mini-batches`; the speeds then cannot be compared
    same_rates: bool  # whether the learning rates were equal in each step
    settings: dict[str, tuple[str, str]]  # other differences, by name: A's value, B's value
    # median over steps of A's seconds over B's: above 1 B is faster. Without the first step, which warms up, if there
    # are others. None if `not_alike` is not empty.
    speed_up: float | None
    a_seconds: tuple[float, ...]
    b_seconds: tuple[float, ...]
    strategies: tuple[StrategyPair, ...]  # one for each strategy of either run


def compare(a: RunLog, b: RunLog) -> Comparison:
    """Compares two runs step by step. Raises `RunLogError`: no step was trained by both."""
    in_a, in_b = ({record.step: record for record in run.steps} for run in (a, b))
    steps = sorted(in_a.keys() & in_b.keys())
    if not steps:
        raise RunLogError(
            f"the runs have no step in common: {_range(a.steps)} and {_range(b.steps)}",
            where=f"{a.path} and {b.path}",
            fix="compare runs that start at the same step",
        )
    pairs = [(in_a[step].report, in_b[step].report) for step in steps]
    differences = [other.loss - one.loss for one, other in pairs]
    relative = [_relative(d, one.loss) for d, (one, _) in zip(differences, pairs, strict=True)]
    largest = max(range(len(steps)), key=lambda i: relative[i])
    timed = pairs[1:] if len(pairs) > 2 else pairs
    not_alike = _not_alike(a, b, pairs)
    ratios = [one.total_s / other.total_s for one, other in timed if other.total_s > 0]
    return Comparison(
        steps=tuple(steps),
        loss_differences=tuple(differences),
        largest_relative=relative[largest],
        largest_step=steps[largest],
        same_tokens=all(one.num_tokens == other.num_tokens for one, other in pairs),
        not_alike=not_alike,
        same_rates=all(in_a[step].lr == in_b[step].lr for step in steps),
        settings=_differences(a, b),
        speed_up=None if not_alike else median(ratios) if ratios else 1.0,
        a_seconds=tuple(one.total_s for one, _ in pairs),
        b_seconds=tuple(other.total_s for _, other in pairs),
        strategies=_strategies(a, b, bool(not_alike)),
    )


_MODEL = ("name", "family", "parameters", "layers")


def _not_alike(a: RunLog, b: RunLog, pairs: Sequence[tuple[StepReport, StepReport]]) -> tuple[str, ...]:
    one, other = a.facts, b.facts
    differs = {
        "model": any(one.model.get(name) != other.model.get(name) for name in _MODEL),
        "data": one.lengths is not None and other.lengths is not None and one.lengths != other.lengths,
        "mini-batches": any(x.num_rows != y.num_rows or x.num_tokens != y.num_tokens for x, y in pairs),
    }
    return tuple(name for name, does in differs.items() if does)


def _differences(a: RunLog, b: RunLog) -> dict[str, tuple[str, str]]:
    one, other = (
        {**r.facts.model, **r.facts.settings, **r.facts.versions, "ranks": r.facts.world_size} for r in (a, b)
    )
    names = dict.fromkeys([*one, *other])
    return {n: (str(one.get(n)), str(other.get(n))) for n in names if one.get(n) != other.get(n)}


def _range(steps: Sequence[StepRecord]) -> str:
    return f"steps {steps[0].step} to {steps[-1].step}" if steps else "no steps"


def _relative(difference: float, base: float) -> float:
    if difference == 0:
        return 0.0
    return abs(difference) / abs(base) if base else float("inf")


def _strategies(a: RunLog, b: RunLog, apart: bool) -> tuple[StrategyPair, ...]:
    left, right = ({s.strategy: s for s in summarize(run).strategies} for run in (a, b))
    only = [next(iter(side.values())) if len(side) == 1 else None for side in (left, right)]
    pairs = []
    for name in dict.fromkeys([*left, *right]):
        one, other = left.get(name), right.get(name)
        base, against = one or only[0], other or only[1]
        gain = None
        if not apart and base is not None and against is not None and base.tokens_per_s and against.tokens_per_s:
            gain = against.tokens_per_s / base.tokens_per_s
        pairs.append(StrategyPair(name, one, other, gain))
    return tuple(pairs)


def sentences(comparison: Comparison) -> list[str]:
    """Returns the comparison in words, the answer first."""
    gain = comparison.speed_up
    if gain is None:
        what = " and ".join(comparison.not_alike)
        answer = f"Which is faster cannot be said: {what} of A and B are not the same"
    elif abs(gain - 1) <= 0.01:
        answer = "A and B are equally fast"
    elif gain > 1:
        answer = f"B is {gain:.2f}x as fast as A"
    else:
        answer = f"A is {1 / gain:.2f}x as fast as B"
    if not comparison.largest_relative:
        loss = f"All {len(comparison.steps)} losses are equal."
    else:
        loss = f"Losses differ by at most {comparison.largest_relative:.2g} (relative, step {comparison.largest_step})."
    lines = [answer, loss]
    if not comparison.same_tokens:
        lines.append("The runs trained different tokens in some steps: their losses are of different data.")
    if not comparison.same_rates:
        lines.append("Their learning rates differ in some steps.")
    if comparison.settings:
        lines.append(
            "Different: " + "; ".join(f"{name} {x} and {y}" for name, (x, y) in comparison.settings.items()) + "."
        )
    return lines


def strategy_rows(comparison: Comparison) -> list[list[str]]:
    pairs = comparison.strategies
    columns = {"strategy": [pair.strategy for pair in pairs]}
    for column in COLUMNS:
        for side in ("a", "b") if "compare" in column.tables else ():
            totals = [getattr(pair, side) for pair in pairs]
            cells = [column.text(getattr(t, column.name), PLACES["compare"]) if t else "-" for t in totals]
            columns[f"{column.title} {side.upper()}"] = cells
    columns["speed-up"] = [f"{pair.speed_up:.2f}x" if pair.speed_up is not None else "-" for pair in pairs]
    return rows_of(columns)


def compare_page(a: RunLog, b: RunLog, comparison: Comparison) -> str:
    steps = [float(step) for step in comparison.steps]
    losses = []
    for name, style, run in (("A", "s0", a), ("B", "s4", b)):
        of_steps = {record.step: record.report.loss for record in run.steps}
        losses.append(Series(name, style, [of_steps[step] for step in comparison.steps]))
    seconds = [Series("A", "s0", comparison.a_seconds), Series("B", "s4", comparison.b_seconds)]
    count, both = len(steps), (("s0", "A"), ("s4", "B"))
    differences = svg.lines("Loss difference", steps, [Series("B - A", "s2", comparison.loss_differences)])
    note = "Speed-up: tokens per second of computation, B over A; a single strategy is compared with those it replaces."
    panels = [
        Panel("loss", "Loss", count, svg.lines("Loss", steps, losses, from_zero=False), legend=both),
        Panel("difference", "Loss, B - A", count, differences),
        Panel("time", "Step time", count, svg.lines("Step time", steps, seconds, " s"), legend=both),
        Panel(
            "strategies", "Strategies", len(comparison.strategies), rows=strategy_rows(comparison), note=note, wide=True
        ),
    ]
    for make in (plan_panel, run_panel):
        for name, run in (("A", a), ("B", b)):
            panel = make(run)
            panels.append(replace(panel, name=f"{panel.name}-{name.lower()}", title=f"{panel.title} of {name}"))
    totals = summarize(a), summarize(b)
    tiles = [
        (f"{comparison.speed_up:.2f}x" if comparison.speed_up is not None else "-", "median speed-up of B over A"),
        (f"{comparison.largest_relative:.2g}", "largest relative loss difference"),
        (f"{len(steps)}", "steps in both"),
        *((f"{t.switch_share:.1%}", f"of {n}'s steps is switching") for n, t in zip("AB", totals, strict=True)),
        *((short(t.tokens_per_s), f"tokens per second of {n}") for n, t in zip("AB", totals, strict=True)),
    ]
    return document(
        "hf_hotspa: two runs",
        f"A: {a.path}; B: {b.path}",
        sentences(comparison),
        tiles,
        panels,
        "Made by hf-hotspa compare.",
    )
