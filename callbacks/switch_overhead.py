"""`SwitchOverheadCallback`: what switching costs, in the log and as a table.

Sees step reports only. Its numbers reach every `report_to` and `state.log_history` through `HotSPaTrainer.log`, as means
over the steps since the last log. A printed line has the few of them that `SHORT_KEYS` names. Switching is told apart
from the load and the return that a run under one strategy has, too (`StepReport.longest_phase`).
"""

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_hotspa.report import PhaseReport, RunFacts, StepReport
from hf_hotspa.reporting.terminal import once, text_table
from hf_hotspa.strategy import Strategy

_HEADER = (
    "strategy", "packs", "sequences", "tokens", "compute s", "wait s", "load+return s", "hidden s", "MB moved", "share",
)  # fmt: skip
_MUCH_SWITCHING, _STEPS_TO_WARN = 0.4, 10

SHORT_KEYS = tuple(
    f"hotspa/{name}"
    for name in (
        "tokens_per_s",
        "switch_share",
        "predicted_gain",
        "truncated",
        "split",
        "dropped",
        "skipped_mini_batches",
    )
)
"""What printed log lines have of our numbers without `hotspa_log_all`: speed, the cost of switching, and lost rows."""

logger = logging.getLogger(__name__)


@dataclass
class _PhaseSums:
    """Sums over the phases of a strategy; the phases themselves are not kept, as a run has no bound."""

    phases: int = 0
    packs: int = 0
    sequences: int = 0
    tokens: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    moved_s: float = 0.0
    hidden_s: float = 0.0
    moved_bytes: int = 0
    unit_s: float = 0.0
    unit_bytes: int = 0
    predicted_s: float | None = None

    def add(self, phase: PhaseReport) -> None:
        self.phases += 1
        self.packs += phase.num_packs
        self.sequences += phase.num_sequences
        self.tokens += phase.num_tokens
        self.compute_s += phase.compute_s
        self.wait_s += phase.wait_s
        self.moved_s += phase.moved_s
        self.hidden_s += phase.hidden_s
        self.moved_bytes += phase.moved_bytes
        self.unit_s += phase.unit_s
        self.unit_bytes += phase.unit_bytes
        if phase.predicted_s is not None:
            self.predicted_s = (self.predicted_s or 0.0) + phase.predicted_s


@dataclass
class _Totals:
    """Sums over steps."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    switch_s: float = 0.0
    load_return_s: float = 0.0
    hidden_s: float = 0.0
    switch_bytes: int = 0
    moved_bytes: int = 0
    frozen_bytes: int = 0
    unit_s: float = 0.0
    hidden_unit_s: float = 0.0
    unit_bytes: int = 0
    context_bytes: int = 0
    expert_mean: float = 0.0
    expert_most: int = 0
    expert_dropped: int = 0
    wait_s: float = 0.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    off_s: float = 0.0
    single_s: float = 0.0
    against_single_s: float = 0.0
    paces: dict[int, tuple[float, int]] = field(default_factory=dict)
    slow: frozenset[int] = frozenset()
    by_strategy: dict[str, _PhaseSums] = field(default_factory=lambda: defaultdict(_PhaseSums))

    @property
    def slowest(self) -> tuple[int, float] | None:
        """The rank that took longest for its work, and its mean pace; None where nobody watched."""
        means = {rank: summed / count for rank, (summed, count) in self.paces.items()}
        return max(means.items(), key=lambda mean: mean[1], default=None)

    def add(self, report: StepReport) -> None:
        self.steps += 1
        self.tokens += report.num_tokens
        self.seconds += report.total_s
        self.switch_s += report.switch_s
        self.load_return_s += report.load_return_s
        self.hidden_s += report.hidden_s
        self.switch_bytes += report.switch_bytes
        self.moved_bytes += report.moved_bytes
        self.frozen_bytes += report.frozen_bytes
        self.wait_s += sum(phase.wait_s for phase in report.phases)
        if report.single_s is not None and report.predicted_s is not None:
            self.single_s += report.single_s
            self.against_single_s += report.predicted_s
        self.slow = frozenset(report.slow)
        for rank, pace in enumerate(report.paces or ()):
            if pace is not None:
                summed, count = self.paces.get(rank, (0.0, 0))
                self.paces[rank] = summed + pace, count + 1
        for phase in report.phases:
            self.unit_s += phase.unit_s
            self.hidden_unit_s += phase.hidden_unit_s
            self.unit_bytes += phase.unit_bytes
            self.context_bytes += phase.context_bytes
            if phase.expert_tokens:
                self.expert_mean += phase.expert_tokens / Strategy.parse(phase.strategy).world_size
            self.expert_most += phase.busiest_expert_tokens
            self.expert_dropped += phase.dropped_expert_tokens
            self.by_strategy[phase.strategy].add(phase)
            if phase.predicted_s is not None:
                self.predicted_s += phase.predicted_s
                self.measured_s += phase.seconds
                self.off_s += abs(phase.predicted_s - phase.seconds)


class SwitchOverheadCallback(TrainerCallback):
    """Logs the overhead of switching and, when asked, prints it.

    Args:
        print_table: Print a table of the phases at every logging step, and their sums at the end, on the main process.

    The keys, each a mean over the steps since the last log. Of what was moved, once a mini-batch is what a run under one
    strategy moves, too; the rest is switching: `hotspa/switch_s` and `hotspa/load_return_s` (exposed seconds, which the
    step takes longer), `hotspa/switch_share` (0 to 1), `hotspa/switch_mb` and `hotspa/load_return_mb`, of both together
    `hotspa/hidden_s` (beside computation) and, where weights are frozen, `hotspa/frozen_mb`. Of fully sharded
    strategies apart from these: `hotspa/unit_mb` (weights and gradients of units), `hotspa/unit_s` (the computation waiting
    for them) and `hotspa/hidden_unit_s`. Of context parallelism `hotspa/context_mb` (what its ranks sent each other). Of
    experts over ranks `hotspa/expert_load` (tokens of the busiest rank's, times the mean), and with a capacity
    `hotspa/dropped_expert_tokens`. `hotspa/wait_s` (waiting for the busiest replica), `hotspa/tokens_per_s`,
    `hotspa/phases`, `hotspa/<strategy>/compute_s`; with a time model `hotspa/predicted_s` (of all phases) and `hotspa/prediction_error` (errors of phases, which do not cancel, as a share of
    the measured seconds) and `hotspa/predicted_gain` (seconds of the best single strategy that fits by those of the
    phases: above 1 switching pays); where devices are watched `hotspa/slowest_pace` (of the rank that computes longest, times the
    median) and `hotspa/slow_devices` (how many are called slow); and counts since the last log of rows that a policy changed: `hotspa/truncated`, `hotspa/split`,
    `hotspa/dropped`.
    """

    def __init__(self, print_table: bool = False) -> None:
        self.print_table = print_table
        self._since_log, self._whole_run = _Totals(), _Totals()
        self._changed: dict[str, int] = defaultdict(int)
        self._last: StepReport | None = None

    def on_run_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, run: RunFacts, **kwargs: Any
    ) -> None:
        """Prints the buckets."""
        if self.print_table and state.is_world_process_zero:
            rows = [["tokens", "strategy", "pack tokens"]]
            rows += [[f"{b['low'] + 1} - {b['longest']}", b["strategy"], str(b["pack_tokens"])] for b in run.buckets]
            tqdm.write(text_table(f"buckets on {run.world_size} ranks", rows, left=2))

    def on_step_report(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, report: StepReport, **kwargs: Any
    ) -> None:
        """Takes the report of a mini-batch; called by `HotSPaTrainer`."""
        self._since_log.add(report)
        self._whole_run.add(report)
        self._last = report
        for name in ("truncated", "split", "dropped"):
            self._changed[name] += getattr(report, f"num_{name}")
        whole = self._whole_run
        if whole.steps == _STEPS_TO_WARN and state is not None and state.is_world_process_zero:
            share = whole.switch_s / whole.seconds
            if len(whole.by_strategy) > 1 and share > _MUCH_SWITCHING and once("much switching"):
                logger.warning(
                    "switching takes %.0f %% of the step: use a larger hotspa_mini_batch_size or fewer strategies "
                    "(hotspa_strategies=auto weighs both)",
                    100 * share,
                )

    def pop_metrics(self) -> dict[str, float]:
        """The numbers since the last call, by the keys above; called by `HotSPaTrainer.log`."""
        totals, changed = self._since_log, self._changed
        self._since_log, self._changed = _Totals(), defaultdict(int)
        if not totals.steps:
            return {}
        metrics: dict[str, float] = {
            "hotspa/switch_s": totals.switch_s / totals.steps,
            "hotspa/load_return_s": totals.load_return_s / totals.steps,
            "hotspa/hidden_s": totals.hidden_s / totals.steps,
            "hotspa/switch_mb": totals.switch_bytes / totals.steps / 1e6,
            "hotspa/load_return_mb": (totals.moved_bytes - totals.switch_bytes) / totals.steps / 1e6,
            "hotspa/switch_share": totals.switch_s / totals.seconds,
            "hotspa/wait_s": totals.wait_s / totals.steps,
            "hotspa/tokens_per_s": totals.tokens / totals.seconds,
            "hotspa/phases": sum(sums.phases for sums in totals.by_strategy.values()) / totals.steps,
        }
        if self._whole_run.frozen_bytes:
            metrics["hotspa/frozen_mb"] = totals.frozen_bytes / totals.steps / 1e6
        if self._whole_run.unit_bytes:
            metrics["hotspa/unit_s"] = totals.unit_s / totals.steps
            metrics["hotspa/hidden_unit_s"] = totals.hidden_unit_s / totals.steps
            metrics["hotspa/unit_mb"] = totals.unit_bytes / totals.steps / 1e6
        if self._whole_run.context_bytes:
            metrics["hotspa/context_mb"] = totals.context_bytes / totals.steps / 1e6
        if totals.expert_mean:
            metrics["hotspa/expert_load"] = totals.expert_most / totals.expert_mean
        if self._whole_run.expert_dropped:
            metrics["hotspa/dropped_expert_tokens"] = totals.expert_dropped / totals.steps
        if totals.measured_s > 0:
            metrics["hotspa/predicted_s"] = totals.predicted_s / totals.steps
            metrics["hotspa/prediction_error"] = totals.off_s / totals.measured_s
        if totals.against_single_s > 0:
            metrics["hotspa/predicted_gain"] = totals.single_s / totals.against_single_s
        if totals.slowest is not None:
            metrics["hotspa/slowest_pace"] = totals.slowest[1]
            metrics["hotspa/slow_devices"] = float(len(totals.slow))
        for strategy, sums in totals.by_strategy.items():
            metrics[f"hotspa/{strategy}/compute_s"] = sums.compute_s / totals.steps
        metrics |= {f"hotspa/{name}": float(count) for name, count in changed.items() if count}
        return {key: round(value, 6) for key, value in metrics.items()}

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Prints the phases of the last step."""
        if self.print_table and state.is_world_process_zero and self._last is not None:
            last, self._last = self._last, None
            title = f"step {state.global_step}: loss {last.loss:.4f}, {last.num_tokens} tokens in {last.total_s:.2f} s"
            of_step = _Totals()
            of_step.add(last)
            tqdm.write(_table(title, of_step.by_strategy, last.total_s))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prints the sums of the run."""
        totals = self._whole_run
        if self.print_table and state.is_world_process_zero and totals.steps:
            title = (
                f"whole run: {totals.steps} steps, {totals.tokens} tokens, {totals.tokens / totals.seconds:.0f} tokens/s, "
                f"switching {totals.switch_s / totals.seconds:.1%} of {totals.seconds:.1f} s; loading and returning, which "
                f"one strategy needs too, {totals.load_return_s / totals.seconds:.1%}; "
                f"{totals.hidden_s:.1f} s more hidden behind computation"
            )
            if totals.slow and totals.slowest is not None:
                title += f"; rank {totals.slowest[0]} computed {totals.slowest[1]:.1f} times as long as the median"
            tqdm.write(_table(title, totals.by_strategy, totals.seconds))


def _table(title: str, by_strategy: dict[str, _PhaseSums], seconds: float) -> str:
    predicted = any(sums.predicted_s is not None for sums in by_strategy.values())
    units = any(sums.unit_bytes for sums in by_strategy.values())
    rows = [[*_HEADER, *(["predicted s"] if predicted else []), *(["units s", "MB of units"] if units else [])]]
    for strategy, sums in by_strategy.items():
        rows.append(
            [
                strategy,
                f"{sums.packs}",
                f"{sums.sequences}",
                f"{sums.tokens}",
                f"{sums.compute_s:.3f}",
                f"{sums.wait_s:.3f}",
                f"{sums.moved_s:.3f}",
                f"{sums.hidden_s:.3f}",
                f"{sums.moved_bytes / 1e6:.1f}",
                f"{sums.moved_s / seconds:.1%}",
                *([f"{sums.predicted_s or 0.0:.3f}"] if predicted else []),
                *([f"{sums.unit_s:.3f}", f"{sums.unit_bytes / 1e6:.1f}"] if units else []),
            ]
        )
    return text_table(title, rows)
