"""Callbacks that read step reports: `SwitchOverheadCallback` for the log, `TraceCallback` for the record of the run.

The numbers of `SwitchOverheadCallback` reach every `report_to` and `state.log_history` through `HotSPaTrainer.log`, as
means over the steps since the last log. A printed line has the few that `LogLine` names. Switching is distinguished
from the load and the return that a run under one strategy has, too (`StepReport.longest_phase`).

`ReportCallback` makes one HTML page of the record at the end of training.

The trace holds a few mini-batches, for Perfetto (ui.perfetto.dev) and chrome://tracing. Each rank is a process named
`rank r`. Its first track holds the mini-batches, its second their phases, its third the parts of a phase: `load`,
`compute`, `wait`, `return`, one after the other; before the phases the `agreement` of all ranks, after them the
`finish`. With overlap only part of the load is exposed: this part is drawn first, and the complete load on a track
`beside computation`. Clocks of ranks are aligned at the agreement, which is about the same moment on all of them. Times
are in microseconds, as the format requires.
"""

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm
from transformers import TrainerCallback, TrainerState

from hf_hotspa.errors import HotspaConfigError, HotspaError, printable
from hf_hotspa.process_lock import LOCK_NAME, ProcessLock
from hf_hotspa.report import COUNTED, MEASURES, ModelFlops, RunFacts, StepReport
from hf_hotspa.reporting.measure_table import COLUMNS, SUMMED, rows_of, strategy_columns
from hf_hotspa.reporting.measured import MeasuredGain
from hf_hotspa.reporting.page import PAGE_NAME, report_page, save_pictures
from hf_hotspa.reporting.run_log import FILE_NAME, FOLDER_NAME, FORMAT, MOST_BYTES, RunLog, plain, read_run_log, thinned
from hf_hotspa.reporting.summary import verdict
from hf_hotspa.reporting.terminal import once, text_table
from hf_hotspa.strategy import Strategy
from hf_hotspa.whole_file import write_whole

_SPANS = ("load_s", "compute_s", "wait_s", "return_s")
_TRACKS = ("mini-batch", "phases", "inside phases", "beside computation")
_STEP, _PHASE, _INSIDE, _BESIDE = range(len(_TRACKS))


@dataclass(frozen=True)
class TracedStep:
    """A mini-batch, counted from 1, and the seconds from the first traced one to its begin on the main process.

    Without `ranks` the report's phases stand for every rank.
    """

    step: int
    start_s: float
    report: StepReport


def trace_events(steps: Sequence[TracedStep]) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    worlds = [len(t.report.ranks.agree_s) if t.report.ranks is not None else 1 for t in steps]
    for rank in range(max(worlds, default=0)):
        names = [(0, "process_name", {"name": f"rank {rank}"}), (0, "process_sort_index", {"sort_index": rank})]
        names += [(track, "thread_name", {"name": name}) for track, name in enumerate(_TRACKS)]
        events += ({"ph": "M", "pid": rank, "tid": track, "name": name, "args": args} for track, name, args in names)
    for traced, world in zip(steps, worlds, strict=True):
        for rank in range(world):
            events += _rank_events(traced, rank)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _phases_of(traced: TracedStep, rank: int) -> tuple[float, float, list[dict[str, float]]]:
    """When a rank began a step and agreed on it, and the measures of its phases."""
    report, phases = traced.report, list[dict[str, float]]()
    if report.ranks is not None:
        agree_s = report.ranks.agree_s
        # the main process began at start_s and agreed agree_s[0] later, at the same moment as all ranks
        agreed = traced.start_s + agree_s[0]
        phases = [dict(zip(MEASURES, row, strict=True)) for row in report.ranks.phases[rank]]
        return agreed - agree_s[rank], agreed, phases
    start = 0.0
    for p in report.phases:
        known = {name: getattr(p, name) for name in _SPANS}
        busy = {"load_busy_s": p.load_s + p.hidden_load_s, "return_busy_s": p.return_s + p.hidden_return_s}
        phases.append({**dict.fromkeys(MEASURES, 0.0), **known, **busy, "start_s": start})
        start += sum(known.values())
    return traced.start_s, traced.start_s, phases


def _rank_events(traced: TracedStep, rank: int) -> list[dict[str, Any]]:
    report = traced.report
    begin, agreed, phases = _phases_of(traced, rank)
    end = traced.start_s + report.total_s
    step = traced.step
    events: list[dict[str, Any]] = []

    def span(track: int, name: str, start_s: float, seconds: float, **args: object) -> None:
        numbers = {"ph": "X", "pid": rank, "tid": track, "ts": start_s * 1e6, "dur": max(seconds, 0.0) * 1e6}
        events.append({**numbers, "name": name, "cat": _TRACKS[track], "args": args})

    switching = {"switch_s": report.switch_s, "load_return_s": report.load_return_s}
    span(_STEP, f"step {step}", begin, end - begin, loss=report.loss, tokens=report.num_tokens, **switching)
    if agreed > begin:
        span(_INSIDE, "agreement", begin, agreed - begin, step=step)
    last = agreed
    for phase, measured in zip(report.phases, phases, strict=True):
        named = {"strategy": phase.strategy, "step": step}
        method = {"context_parallel": phase.context} if phase.context else {}
        start = at = agreed + measured["start_s"]
        for name in _SPANS:
            others = {"with_other_ranks_s": measured["others_s"]} if name == "compute_s" else {}
            if name == "compute_s" and measured["context_bytes"]:
                others["context_bytes"] = measured["context_bytes"]
            span(_INSIDE, name.removesuffix("_s"), at, measured[name], **named, **others)
            at += measured[name]
        counts = {"packs": phase.num_packs, "sequences": phase.num_sequences, "tokens": phase.num_tokens}
        span(_PHASE, phase.strategy, start, at - start, step=step, **counts, **method)
        computed = start + measured["load_s"] + measured["compute_s"]
        load_s, return_s = measured["load_busy_s"], measured["return_busy_s"]
        if load_s > 0:
            span(_BESIDE, "load", start, load_s, **named)
        if return_s > 0:
            begun = max(start, at - return_s) if measured["return_s"] else computed - return_s
            span(_BESIDE, "return", begun, return_s, **named)
        last = at
    if end > last:
        span(_INSIDE, "finish", last, end - last, step=step)
    return events


def save_trace(path: str | os.PathLike[str], steps: Sequence[TracedStep]) -> Path:
    """Writes the trace completely or not at all."""
    return write_whole(path, json.dumps(trace_events(steps), separators=(",", ":")))


# -- callbacks --------------------------------------------------------------------------------------------------------


_MUCH_SWITCHING, _STEPS_TO_WARN, _MOST_KEPT = 0.4, 10, 10
logger = logging.getLogger(__name__)


_OF_STEP = (
    "num_tokens", "total_s", "switch_s", "load_return_s", "hidden_s", "switch_bytes", "moved_bytes",
    "num_truncated", "num_split", "num_dropped", "num_empty",
)  # fmt: skip

_Sums = defaultdict[str, Any]


class _Totals:
    """Sums over steps; few reports are kept, because a run has no bound. `of_steps`: the sums of `_OF_STEP`, and of the
    predicted seconds of steps and of the best single strategy. `by_strategy`: for each strategy the sums of `SUMMED`,
    of predicted and measured seconds, and of the means over ranks that metrics are relative to."""

    def __init__(self) -> None:
        self.steps = 0
        self.of_steps = _Sums(int)
        self.by_strategy: dict[str, _Sums] = defaultdict(lambda: _Sums(int))
        self.slow: tuple[int, ...] = ()  # the ranks that the last report called slow
        self._step_times: dict[int, tuple[float, int]] = {}

    @property
    def slowest(self) -> tuple[int, float] | None:
        """The rank that took longest for its work, and its mean relative step time; None if not watched."""
        means = {rank: summed / count for rank, (summed, count) in self._step_times.items()}
        return max(means.items(), key=lambda mean: mean[1], default=None)

    def of_phases(self, name: str) -> Any:
        return sum(sums[name] for sums in self.by_strategy.values())

    def ratios(self) -> dict[str, float]:
        """The metrics that are relative to something that may be missing."""
        sums, of_phases, known = self.of_steps, self.of_phases, dict[str, float]()
        for measure in COUNTED:
            if measure.over and (mean := of_phases(f"mean {measure.over}")):
                known[measure.metric] = of_phases(measure.name) / mean
        if measured_s := of_phases("measured_s"):
            known["predicted_s"] = of_phases("predicted_s") / self.steps
            known["prediction_error"] = of_phases("off_s") / measured_s
        if sums["against_single_s"]:
            known["predicted_gain"] = sums["single_s"] / sums["against_single_s"]
        if self.slowest is not None:
            known |= {"slowest_pace": self.slowest[1], "slow_devices": float(len(self.slow))}
        return known

    def add(self, report: StepReport) -> None:
        self.steps += 1
        for name in _OF_STEP:
            self.of_steps[name] += getattr(report, name)
        if report.single_s is not None and report.predicted_s is not None:
            self.of_steps["single_s"] += report.single_s
            self.of_steps["against_single_s"] += report.predicted_s
        self.slow = report.slow
        for rank, step_time in enumerate(report.paces or ()):
            if step_time is not None:
                summed, count = self._step_times.get(rank, (0.0, 0))
                self._step_times[rank] = summed + step_time, count + 1
        for phase in report.phases:
            sums = self.by_strategy[phase.strategy]
            sums["num_phases"] += 1
            for name in SUMMED:
                sums[name] += getattr(phase, name)
            for measure in COUNTED:
                if measure.over and (total := getattr(phase, measure.over)):
                    sums[f"mean {measure.over}"] += total / Strategy.parse(phase.strategy).world_size
            if phase.predicted_s is not None:
                sums["predicted_s"] += phase.predicted_s
                sums["measured_s"] += phase.seconds
                sums["off_s"] += abs(phase.predicted_s - phase.seconds)


class SwitchOverheadCallback(TrainerCallback):
    """Logs the overhead of switching and, if asked, prints it.

    Args:
        print_table: Print a table of the phases at every logging step, and their sums at the end, on the main process.

    The keys, each a mean over the steps since the last log. A run under one strategy also moves data once per
    mini-batch; everything beyond that is switching.

    * Switching and the rest: `hotspa/switch_s` and `hotspa/load_return_s` (exposed seconds, which lengthen the step),
      `hotspa/switch_share` (0 to 1), `hotspa/switch_mb` and `hotspa/load_return_mb`; for both together
      `hotspa/hidden_s` (beside computation) and, if weights are frozen, `hotspa/frozen_mb`.
    * Fully sharded strategies, separate from these: `hotspa/unit_mb` (weights and gradients of units), `hotspa/unit_s`
      (the computation waiting for them) and `hotspa/hidden_unit_s`.
    * Context parallelism: `hotspa/context_mb` (sent between its ranks).
    * Experts over ranks: `hotspa/expert_load` (tokens of the busiest rank's experts, as a multiple of the mean), and
      with a capacity `hotspa/dropped_expert_tokens`.
    * Images: `hotspa/image_patches`.
    * `hotspa/wait_s` (waiting for the busiest replica), `hotspa/tokens_per_s`, `hotspa/phases`,
      `hotspa/<strategy>/compute_s`.
    * On a GPU of known speed: `hotspa/mfu` (the model's operations relative to the peak of the data sheet, 0 to 1;
      without the optimizer's step).
    * With a time model: `hotspa/predicted_s` (of all phases), `hotspa/prediction_error` (errors of phases, which do not
      cancel, as a share of the measured seconds) and `hotspa/predicted_gain` (seconds of the best single strategy that
      fits, divided by the seconds of the phases: above 1 switching pays).
    * If devices are watched: `hotspa/slowest_pace` (relative step time of the rank that computes longest, as a multiple
      of the ranks that are not slow) and `hotspa/slow_devices` (how many are called slow).
    * Counts since the last log of rows that a policy changed: `hotspa/truncated`, `hotspa/split`, `hotspa/dropped` and
      `hotspa/empty`.
    """

    def __init__(self, print_table: bool = False) -> None:
        self.print_table = print_table
        self._since_log, self._whole_run = _Totals(), _Totals()
        self._new = list[StepReport]()  # to be added to both
        self._last: StepReport | None = None
        self._flops: ModelFlops | None = None

    def on_run_begin(self, args: object, state: TrainerState, control: object, run: RunFacts, **kwargs: object) -> None:
        self._flops = run.flops
        if self.print_table and state.is_world_process_zero:
            rows = [["tokens", "strategy", "pack tokens"]]
            rows += [[f"{b['low'] + 1} - {b['longest']}", b["strategy"], str(b["pack_tokens"])] for b in run.buckets]
            tqdm.write(text_table(f"buckets on {run.world_size} ranks", rows, left=2))

    def on_step_report(
        self, args: object, state: TrainerState, control: object, report: StepReport, **kwargs: object
    ) -> None:
        """Takes the report of a mini-batch; called by `HotSPaTrainer`."""
        self._new.append(report)
        self._last = report
        warns = self._whole_run.steps + len(self._new) == _STEPS_TO_WARN
        if warns or len(self._new) == _MOST_KEPT:
            self._add_new()
            if warns and state is not None and state.is_world_process_zero:
                self._warn()

    def _add_new(self) -> None:
        for report in self._new:
            self._since_log.add(report)
            self._whole_run.add(report)
        self._new.clear()

    def _warn(self) -> None:
        whole = self._whole_run
        share = whole.of_steps["switch_s"] / whole.of_steps["total_s"]
        if len(whole.by_strategy) > 1 and share > _MUCH_SWITCHING and once("much switching"):
            logger.warning(
                "switching takes %.0f %% of the step: use a larger hotspa_mini_batch_size or fewer strategies "
                "(hotspa_strategies=auto weighs both)",
                100 * share,
            )

    def pop_metrics(self) -> dict[str, float]:
        """The numbers since the last call, by the keys above; called by `HotSPaTrainer.log`."""
        self._add_new()
        totals, self._since_log = self._since_log, _Totals()
        if not totals.steps:
            return {}
        sums, of_phases, whole_run = totals.of_steps, totals.of_phases, self._whole_run
        means = {name: sums[name] for name in ("switch_s", "load_return_s", "hidden_s")} | {
            "switch_mb": sums["switch_bytes"] / 1e6,
            "load_return_mb": (sums["moved_bytes"] - sums["switch_bytes"]) / 1e6,
        }
        for column in COLUMNS:
            if column.metric and (not column.given or whole_run.of_phases(column.given)):
                means[column.metric] = of_phases(column.name) / (1e6 if column.unit == "bytes" else 1)
        means |= {f"{strategy}/compute_s": of_one["compute_s"] for strategy, of_one in totals.by_strategy.items()}
        metrics = {name: summed / totals.steps for name, summed in means.items()}
        metrics["switch_share"] = sums["switch_s"] / sums["total_s"]
        metrics["tokens_per_s"] = sums["num_tokens"] / sums["total_s"]
        if self._flops is not None:
            metrics["mfu"] = self._flops.utilization(sums["num_tokens"], of_phases("squared_tokens"), sums["total_s"])
        metrics |= totals.ratios()
        changed = {name: float(sums[f"num_{name}"]) for name in ("truncated", "split", "dropped", "empty")}
        metrics |= {name: count for name, count in changed.items() if count}
        return {f"hotspa/{name}": round(value, 6) for name, value in metrics.items()}

    def on_log(self, args: object, state: TrainerState, control: object, logs: object = None, **kwargs: object) -> None:
        if self.print_table and state.is_world_process_zero and self._last is not None:
            last, self._last = self._last, None
            title = f"step {state.global_step}: loss {last.loss:.4f}, {last.num_tokens} tokens in {last.total_s:.2f} s"
            of_step = _Totals()
            of_step.add(last)
            tqdm.write(_table(title, of_step.by_strategy, last.total_s))

    def on_train_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._add_new()
        totals = self._whole_run
        if self.print_table and state.is_world_process_zero and totals.steps:
            sums, tokens, seconds = totals.of_steps, totals.of_steps["num_tokens"], totals.of_steps["total_s"]
            title = (
                f"complete run: {totals.steps} steps, {tokens} tokens, {tokens / seconds:.0f} tokens/s, switching "
                f"{sums['switch_s'] / seconds:.1%} of {seconds:.1f} s; loading and returning, which one strategy needs "
                f"too, {sums['load_return_s'] / seconds:.1%}; {sums['hidden_s']:.1f} s more hidden behind computation"
            )
            if totals.slow and totals.slowest is not None:
                title += f"; rank {totals.slowest[0]} computed {totals.slowest[1]:.1f} times as long as ranks that are not slow"
            tqdm.write(_table(title, totals.by_strategy, seconds))


def _table(title: str, by_strategy: dict[str, _Sums], seconds: float) -> str:
    for sums in by_strategy.values():
        sums["moved_share"] = sums["moved_s"] / seconds
    of = {strategy: sums.__getitem__ for strategy, sums in by_strategy.items()}
    return text_table(title, rows_of(strategy_columns("log", of)))


# -- the record of a run ----------------------------------------------------------------------------------------------

# Written by the main process; a failure to write (a full disk) is logged once and never stops training.


TRACE_NAME = "perfetto_trace.json"
# beginnings of logged names that are in a step's report, in an evaluation, or known before
_WRITTEN_ELSEWHERE = ("hotspa/", "eval_", "train_", "loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos")


class TraceCallback(TrainerCallback):
    """Writes `hotspa_trace.jsonl` (`reporting/run_log.py` documents it) and `perfetto_trace.json`.

    Args:
        path: The folder for both; `hotspa_report` in the output directory when None.
        steps: Mini-batches in the trace, starting with the second (the first warms up); 0 for no trace.

    Raises:
        HotspaConfigError: `steps` is negative.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, steps: int = 3) -> None:
        if steps < 0:
            raise HotspaConfigError(f"a trace of {steps} steps (hotspa_trace_steps)", fix="use 0 for no trace")
        self.path, self.steps = path, steps
        self.folder: Path | None = None
        self._facts: RunFacts | None = None
        self._writer: RunLogWriter | None = None
        self._traced: list[TracedStep] = []
        self._trace_is_done = steps == 0
        self._began = self._trace_zero = 0.0
        self._report: StepReport | None = None
        self._report_at = 0.0
        self._lr: float | None = None
        self._seconds: Callable[[], dict[str, float]] | None = None

    def _try(self, what: Callable[..., Any], *args: object, **values: object) -> None:
        """Writes something; a failure ends the record, but not the training."""
        try:
            what(*args, **values)
        except OSError as error:
            logger.warning("the record of the run ends here, training continues: %s", error)
            with suppress(OSError):  # the contents of its buffer cannot be written either
                self._close()
            self._writer = None

    # -- the events of a run ----------------------------------------------------------------------------------------

    def on_run_begin(
        self, args: object, state: TrainerState, control: object, run: RunFacts,
        callback_seconds: Callable[[], dict[str, float]] | None = None, **kwargs: object,
    ) -> None:  # fmt: skip
        self._facts, self._seconds = run, callback_seconds

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begins the record, or continues it if the run was resumed."""
        self._close()
        self._traced, self._trace_is_done, self._lr, self._report = [], self.steps == 0, None, None
        if not state.is_world_process_zero or self._facts is None:
            return
        facts = self._facts
        self.folder = Path(self.path) if self.path is not None else Path(args.output_dir or ".") / FOLDER_NAME

        def begin() -> None:
            assert self.folder is not None
            self._writer = RunLogWriter(self.folder, goes_on=state.global_step > 0)
            self.folder = self._writer.path.parent
            self._writer.header(facts)

        self._try(begin)

    def on_step_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._began, self._report = time.perf_counter(), None

    def on_step_report(
        self, args: object, state: TrainerState, control: object, report: StepReport, **kwargs: object
    ) -> None:
        if self._writer is not None:
            self._report, self._report_at = report, time.perf_counter()

    def on_pre_optimizer_step(
        self, args: object, state: TrainerState, control: object, optimizer: object = None, **kwargs: object
    ) -> None:
        """Takes the learning rate, before the scheduler sets the next step's."""
        groups = getattr(optimizer, "param_groups", None)
        self._lr = float(groups[0]["lr"]) if groups else None

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        report, writer = self._report, self._writer
        if report is None or writer is None:
            return
        wall_s = time.perf_counter() - self._began
        self._try(writer.write, "step", report, step=state.global_step, wall_s=wall_s, lr=self._lr)
        if not self._trace_is_done:
            start = self._report_at - report.total_s
            self._trace_zero = self._trace_zero if self._traced else start
            self._traced.append(TracedStep(state.global_step, start - self._trace_zero, report))
            if len(self._traced) > self.steps:
                self._try(self._save_trace)

    def _save_trace(self) -> None:
        self._trace_is_done = True
        traced = self._traced[1:] if len(self._traced) > 1 else self._traced
        if traced and self.folder is not None:
            zero = traced[0].start_s
            save_trace(self.folder / TRACE_NAME, [TracedStep(t.step, t.start_s - zero, t.report) for t in traced])
        self._traced = []

    def on_evaluate(
        self, args: object, state: TrainerState, control: object, metrics: object = None, **kwargs: object
    ) -> None:
        self._write_metrics("eval", state.global_step, metrics)

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, Any] | None = None, **kwargs: object
    ) -> None:
        """Writes what only this trainer logs, such as TRL's rewards; steps and evaluations have their own lines."""
        own = {name: each for name, each in (logs or {}).items() if not name.startswith(_WRITTEN_ELSEWHERE)}
        self._write_metrics("log", state.global_step, own)

    def _write_metrics(self, kind: str, step: int, metrics: object) -> None:
        if self._writer is not None and metrics:
            self._try(self._writer.metrics, kind, step, metrics)

    def on_save(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if self._writer is not None:
            self._try(self._writer.write, "save", step=state.global_step)

    def on_train_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Writes the last line, and the trace if the run was shorter than it."""
        writer = self._writer
        if writer is None:
            return
        if not self._trace_is_done:
            self._try(self._save_trace)
        seconds = self._seconds() if self._seconds is not None else {}
        self._try(writer.write, "end", step=state.global_step, callback_s=seconds)
        self._close()

    def on_gain_measured(
        self, args: object, state: TrainerState, control: object, gain: MeasuredGain, **kwargs: object
    ) -> None:
        """Adds the measurement after training to the record."""
        if self.folder is None or self._writer is not None:
            return
        folder = self.folder

        def add() -> None:
            self._writer = RunLogWriter(folder, goes_on=True)
            self._writer.write("gain", **gain.to_dict())

        self._try(add)
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


# -- its writer -------------------------------------------------------------------------------------------------------


_PREVIOUS = "hotspa_trace.previous.jsonl"
_GROWTH = 1.01
_MAX_FOLDERS = 1000


def _own_folder(wanted: Path) -> tuple[Path, ProcessLock]:
    """The folder, or, if another process uses it, the first free one of `<name>-2`, `<name>-3`, ... Made if missing,
    and locked."""
    for number in range(1, _MAX_FOLDERS):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        lock = ProcessLock(folder / LOCK_NAME)
        if lock.take():
            if number > 1:
                logger.warning("another run writes its record into %s; this run's record is in %s", wanted, folder)
            return folder, lock
    raise OSError(f"{_MAX_FOLDERS} runs write their records beside {wanted}")


class RunLogWriter:
    """Writes a record, line by line. `folder`: made if missing. While another process writes a record there, this one's
    is in a folder beside it (`hotspa_report-2`), which a warning names. `goes_on`: whether the run was resumed: it
    appends to an existing record. Otherwise that is kept as `hotspa_trace.previous.jsonl`, one at most."""

    def __init__(self, folder: str | os.PathLike[str], goes_on: bool = False) -> None:
        own, self._lock = _own_folder(Path(folder))
        self.path = own / FILE_NAME
        if self.path.exists() and not goes_on:
            os.replace(self.path, self.path.with_name(_PREVIOUS))
        elif self.path.exists() and (data := self.path.read_bytes()) and not data.endswith(b"\n"):  # a torn line
            os.truncate(self.path, data.rfind(b"\n") + 1)
        self._file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  # closed by close()
        self._memory: list[int] = []
        self._bytes = self.path.stat().st_size

    def write(self, kind: str, report: StepReport | None = None, **values: object) -> None:
        values = {"kind": kind, **values, "time": time.time()}
        if report is not None:
            values["report"] = report.to_dict()
            memory, before = report.ranks.memory_bytes if report.ranks is not None else self._memory, self._memory
            grown = len(memory) != len(before)
            for new, old in zip(memory, before, strict=False):
                grown = grown or new > _GROWTH * old
            if grown:
                self._memory = values["memory"] = memory
        try:
            line = json.dumps(values, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError):  # a type that JSON does not support
            line = json.dumps(plain(values), allow_nan=False, separators=(",", ":"))
        self._file.write(line + "\n")
        self._file.flush()
        self._bytes += len(line) + 1  # ASCII
        if self._bytes > MOST_BYTES and kind == "step":
            try:
                self._thin()
            except (ValueError, KeyError, TypeError) as error:  # of a resumed record that was changed by hand
                raise OSError(f"{self.path} cannot be thinned out: {error}") from error

    def _thin(self) -> None:
        lines = [json.loads(line) for line in self.path.read_bytes().splitlines()]
        size = self._bytes
        while size > MOST_BYTES // 2:
            fewer = thinned(lines)
            if len(fewer) == len(lines):
                break  # the last steps alone are larger
            lines = fewer
            text = "".join(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n" for line in lines)
            size = len(text)
        if size < self._bytes:
            self._file.close()
            write_whole(self.path, text)
            self._file, self._bytes = open(self.path, "a", encoding="utf-8"), size  # noqa: SIM115

    def header(self, facts: RunFacts) -> None:
        self.write("header", format=FORMAT, **facts.to_dict())

    def metrics(self, kind: str, step: int, metrics: dict[str, Any]) -> None:
        """Writes metrics; those that are not numbers are left out."""
        numbers = {key: plain(value) for key, value in metrics.items()}
        numbers = {key: value for key, value in numbers.items() if value is None or isinstance(value, int | float)}
        if numbers:
            self.write(kind, step=step, metrics=numbers)

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            self._lock.release()


# -- the page of a run ------------------------------------------------------------------------------------------------


class ReportCallback(TraceCallback):
    """A `TraceCallback` that also writes `report.html`, and prints its path. The default of `HotSPaTrainer`.

    Args:
        path: The folder; `hotspa_report` in the output directory when None.
        steps: See `TraceCallback`.
        pictures: Also write SVG files of the main charts.

    Attributes:
        gain_follows: Whether `measure_gain` follows after training; false at first. The page claims no gain before it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, steps: int = 3, pictures: bool = False) -> None:
        super().__init__(path, steps)
        self.pictures, self.gain_follows = pictures, False

    @property
    def page(self) -> Path | None:
        """Where the page is, or will be at the end of training; None without a record."""
        return None if self.folder is None else self.folder / PAGE_NAME

    def on_train_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Ends the record and writes the page."""
        had_record = self._writer is not None
        super().on_train_end(args, state, control, **kwargs)
        if had_record and (run := self._make_page(self.gain_follows)) is not None:
            tqdm.write(printable(f"{verdict(run, self.gain_follows)[0]}. The run in one page: {self.page}"))

    def on_gain_measured(
        self, args: object, state: TrainerState, control: object, gain: MeasuredGain, **kwargs: object
    ) -> None:
        """Writes the page again, with the measurement after training."""
        super().on_gain_measured(args, state, control, gain, **kwargs)
        if self._make_page() is not None:
            tqdm.write(printable(f"The run in one page: {self.page}"))

    def on_train_interrupted(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Writes the page of a run that Ctrl-C has ended; its record has no last line."""
        had_record = self._writer is not None
        self._close()
        if had_record:
            self._make_page()

    def _make_page(self, to_be_measured: bool = False) -> RunLog | None:
        if self.folder is None:
            return None
        try:
            run = read_run_log(self.folder)
            write_whole(self.folder / PAGE_NAME, report_page(run, to_be_measured))
            if self.pictures:
                save_pictures(run, self.folder)
        except (OSError, HotspaError) as error:
            logger.warning("no page of the run was made: %s", error)
            return None
        return run
