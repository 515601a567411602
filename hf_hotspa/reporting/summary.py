"""Summarizes a record: totals, rates by strategy, and whether switching paid.

Pure functions of a `RunLog`. Claims state whether they are measured, predicted, or estimated from rates of other
lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from hf_hotspa.report import PhaseReport, StepReport
from hf_hotspa.reporting.gain_words import CORRECTED_ERROR, of_one_strategy, of_predicted_switching
from hf_hotspa.reporting.run_log import RunLog, Sums, sums_of

_MUCH_SWITCHING = 0.25
_LEAST_PADDING = 1.05  # times the tokens of packed rows; less is not said
_MUCH_WAITING = 0.2


@dataclass(frozen=True)
class Summary(Sums):
    """A run in numbers: its `Sums`, and more."""

    first_loss: float | None = None
    last_loss: float | None = None
    median_step_s: float = 0.0
    callback_s: float = 0.0
    utilization: float | None = None  # MFU with the optimizer's step; None if the devices' speed is unknown

    @property
    def num_tokens(self) -> int:
        return sum(totals.num_tokens for totals in self.strategies)

    @property
    def load_return_s(self) -> float:
        return sum(totals.moved_s for totals in self.strategies) - self.switch_s

    @property
    def hidden_s(self) -> float:
        return sum(totals.hidden_s for totals in self.strategies)

    @property
    def wait_s(self) -> float:
        return sum(totals.wait_s for totals in self.strategies)

    @property
    def tokens_per_s(self) -> float:
        """Per second of wall-clock time of steps, optimizer included."""
        return self.num_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def switch_share(self) -> float:
        """Exposed switching seconds over the seconds of steps, 0 to 1."""
        return self.switch_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def load_return_share(self) -> float:
        """The same for the load and the return that a single strategy also needs."""
        return self.load_return_s / self.seconds if self.seconds > 0 else 0.0


def strategy_order(run: RunLog) -> list[str]:
    """Returns the strategies of a run, shortest bucket first, then those without a bucket."""
    named = [bucket["strategy"] for bucket in run.facts.buckets]
    ran = [totals.strategy for totals in sums_of(run.steps).strategies]
    return list(dict.fromkeys([*named, *ran]))


def summarize(run: RunLog) -> Summary:
    """Returns the numbers of a run; zeros without steps."""
    reports = [record.report for record in run.steps]
    every = sums_of(run.steps)
    by_name = {totals.strategy: totals for totals in every.strategies}
    summary = Summary(
        **{**vars(every), "strategies": tuple(by_name[name] for name in strategy_order(run) if name in by_name)},
        first_loss=reports[0].loss if reports else None,
        last_loss=fmean(r.loss for r in reports[-max(1, len(reports) // 10) :]) if reports else None,
        median_step_s=median(r.total_s for r in reports) if reports else 0.0,
        callback_s=sum(run.callback_s.values()),
    )
    flops, squares = run.facts.flops, sum(totals.squared_tokens for totals in summary.strategies)
    if flops is None or not squares:
        return summary
    return replace(summary, utilization=flops.utilization(summary.num_tokens, squares, every.wall_s))


def verdict(run: RunLog, to_be_measured: bool = False) -> list[str]:
    """Returns sentences on whether switching paid; the first is the answer, a heading without a full stop.

    Compares with the best single strategy that fits, on the trained rows. `to_be_measured`: whether a measurement
    follows; then nothing is claimed yet.
    """
    summary = summarize(run)
    if not summary.num_steps:
        return ["No mini-batch was recorded"]
    cost = (
        f"Measured: switching took {summary.switch_share:.1%} of the step time ({summary.switch_s:.2f} s). Loading weights "
        f"and returning gradients once a mini-batch, as one strategy would have, too, took {summary.load_return_share:.1%}."
        + (f" {summary.hidden_s:.2f} s more ran beside computation." if summary.hidden_s else "")
    )
    if run.gain is not None:
        return [*run.gain.sentences, cost]
    if to_be_measured and len(run.facts.buckets) > 1:
        return ["Whether switching paid is measured after training", cost]
    used = summary.strategies
    if len(used) < 2:
        name = used[0].strategy if used else "none"
        predicted = [f"{of_one_strategy(name)}."] if run.facts.plan is not None else []
        head = f"One strategy trained everything ({name}): nothing was switched"
        times = sum(padded_tokens(record.report) for record in run.steps) / max(summary.num_tokens, 1)
        if times < _LEAST_PADDING:
            return [head, *predicted]
        return [
            f"One strategy trained everything ({name}); packing avoided padding, {1 - 1 / times:.0%} of a padded batch",
            *predicted,
            f"With the rows of each mini-batch padded to its longest, the run would have computed {times:.1f} times as many tokens. "
            "To time it against DDP and FSDP, use `hf-hotspa train --measure_gain 10`.",
        ]
    return [*(_against_prediction(run) or _against_own_rates(run, summary)), cost]


def padded_tokens(report: StepReport) -> int:
    """Returns the tokens of a mini-batch with each row as long as the longest."""
    longest = max((phase.longest_tokens for phase in report.phases), default=0)
    return longest * sum(phase.num_sequences for phase in report.phases)


def _against_prediction(run: RunLog) -> list[str] | None:
    """The answer from predicted seconds of the best single strategy; None without a time model."""
    timed = run.steps[1:] if len(run.steps) > 2 else run.steps  # the first one warms up
    known = [(r.report, r.report.single_s, r.report.predicted_s) for r in timed]
    compared = [(report, single, predicted_s) for report, single, predicted_s in known if single and predicted_s]
    if not compared or run.facts.single is None:
        return None
    measured = sum(phase.seconds for report, *_ in compared for phase in report.phases)
    predicted = sum(predicted_s for *_, predicted_s in compared)
    # the model's error for phases that ran is taken for its error for the single strategy
    own = [p for report, *_ in compared for p in report.phases if p.strategy == run.facts.single and p.predicted_s]
    ratio = measured / predicted
    if own:
        ratio = sum(p.seconds for p in own) / sum(p.predicted_s or 0.0 for p in own)
    alone = ratio * sum(single for _, single, _ in compared)
    gain = alone / measured if measured else 1.0
    error = _error([phase for report, *_ in compared for phase in report.phases], ratio)
    basis = (
        f"{len(compared)} steps took {measured:.2f} s in their phases. {run.facts.single} alone, the best single strategy "
        f"that fits, would have taken about {alone:.2f} s for the same rows: as predicted, times {ratio:.2f}, measured by "
        f"predicted seconds of {'its own phases' if own else 'what ran'}."
    )
    return [_heading(gain, error, run.facts.single), basis]


def _error(phases: Sequence[PhaseReport], ratio: float) -> float:
    """The largest relative error of predictions corrected by a ratio, over the strategies that ran."""
    known = [phase for phase in phases if phase.predicted_s]
    off = []
    for strategy in {phase.strategy for phase in known}:
        own = [phase for phase in known if phase.strategy == strategy]
        off.append(sum(p.seconds for p in own) / sum(ratio * (p.predicted_s or 0.0) for p in own))
    return max((max(each, 1 / each) if each else float("inf") for each in off), default=1.0) - 1


def _heading(gain: float, error: float, single: str) -> str:
    apart = max(gain, 1 / gain) - 1
    if error > max(apart, CORRECTED_ERROR):
        return f"Whether switching paid is not known: predictions are off by {error:.0%}, and the difference to {single} is {apart:.0%}"
    return of_predicted_switching(gain, single, CORRECTED_ERROR)


def _against_own_rates(run: RunLog, summary: Summary) -> list[str]:
    """An estimate without a time model, from strategies that ran and whose packs hold every sequence."""
    longest = max(phase.longest_tokens for record in run.steps for phase in record.report.phases)
    holds = {b["strategy"] for b in run.facts.buckets if max(b["pack_tokens"], b["longest"]) >= longest}
    took = sum(s.compute_s + s.moved_s for s in summary.strategies)
    measure = (
        "hotspa_calibration=measure predicts it, and a run under a single strategy with hf-hotspa compare measures it."
    )
    for s in summary.strategies:
        if s.strategy not in holds or not s.tokens_per_s:
            continue
        alone = summary.num_tokens / s.tokens_per_s + s.moved_s / s.num_phases * summary.num_steps
        if alone <= took * (1 + CORRECTED_ERROR):
            basis = (
                f"The packs of {s.strategy} hold the longest sequence ({longest} tokens), and at the rate that it had on its "
                f"own bucket it would have taken about {alone:.2f} s for everything, instead of {took:.2f} s. This is rough: "
            )
            return [f"One strategy may have been as fast: {s.strategy} (an estimate)", basis + measure]
    return ["Whether switching paid is not known", f"No single strategy was measured or predicted: {measure}"]


def advice(run: RunLog) -> list[str]:
    """Returns advice on the largest costs; empty if no cost stands out."""
    summary = summarize(run)
    sentences = []
    if len(summary.strategies) > 1 and summary.switch_share > _MUCH_SWITCHING:
        sentences.append(
            f"Switching takes {summary.switch_share:.0%} of the step: use a larger hotspa_mini_batch_size, fewer strategies, "
            "or hotspa_overlap_load and hotspa_overlap_return."
        )
    if summary.seconds > 0 and summary.wait_s / summary.seconds > _MUCH_WAITING:
        sentences.append(
            f"Ranks wait for the busiest one for {summary.wait_s / summary.seconds:.0%} of the step: use smaller packs "
            "(strategy:longest@tokens) or a larger mini-batch, so that replicas balance."
        )
    if summary.callback_s > 0.01 * summary.wall_s and summary.num_steps > 10:
        worst = max(run.callback_s, key=lambda name: run.callback_s[name])
        sentences.append(f"Callbacks take {summary.callback_s / summary.wall_s:.1%} of the time, most in {worst}.")
    return sentences
