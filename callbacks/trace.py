"""`TraceCallback`: the record of a run as JSONL, and a few mini-batches as a trace for Perfetto.

Written by the main process; what cannot be written (a full disk) is said once and never stops training.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.report import RunFacts, StepReport
from hf_hotspa.reporting.chrome_trace import TracedStep, save_trace
from hf_hotspa.reporting.measured import MeasuredGain
from hf_hotspa.reporting.run_log import FOLDER_NAME, RunLogWriter

TRACE_NAME = "perfetto_trace.json"

logger = logging.getLogger(__name__)


class TraceCallback(TrainerCallback):
    """Writes `hotspa_trace.jsonl` (`reporting/run_log.py` documents it) and `perfetto_trace.json`.

    Args:
        path: The folder for both; `hotspa_report` in the output directory when None.
        steps: How many mini-batches go into the trace, from the second one on (the first warms up); 0 for no trace.

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

    def _try(self, what: Callable[..., Any], *args: Any) -> None:
        """Writes something; a failure ends the record, not the training."""
        try:
            what(*args)
        except OSError as error:
            logger.warning("the record of the run ends here, training goes on: %s", error)
            with suppress(OSError):  # what is still in its buffer cannot be written either
                self._close()
            self._writer = None

    # -- the events of a run ----------------------------------------------------------------------------------------

    def on_run_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        run: RunFacts,
        callback_seconds: Callable[[], dict[str, float]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes what is known of the run."""
        self._facts, self._seconds = run, callback_seconds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begins the record, or goes on with it where the run was resumed."""
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

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock of the step."""
        self._began, self._report = time.perf_counter(), None

    def on_step_report(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, report: StepReport, **kwargs: Any
    ) -> None:
        """Takes the report of a mini-batch."""
        if self._writer is not None:
            self._report, self._report_at = report, time.perf_counter()

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Takes the learning rate of the update."""
        groups = getattr(optimizer, "param_groups", None)
        self._lr = float(groups[0]["lr"]) if groups else None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the line of the step."""
        report, writer = self._report, self._writer
        if report is None or writer is None:
            return
        wall_s = time.perf_counter() - self._began
        self._try(writer.step, state.global_step, report, wall_s, self._lr)
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
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Writes an evaluation."""
        writer = self._writer
        if writer is not None and metrics:
            self._try(writer.evaluation, state.global_step, metrics)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes that a checkpoint was saved."""
        writer = self._writer
        if writer is not None:
            self._try(writer.save, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes the last line, and the trace of a run that was shorter than it."""
        writer = self._writer
        if writer is None:
            return
        if not self._trace_is_done:
            self._try(self._save_trace)
        self._try(writer.end, state.global_step, self._seconds() if self._seconds is not None else {})
        self._close()

    def on_gain_measured(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, gain: MeasuredGain, **kwargs: Any
    ) -> None:
        """Adds what was measured after training to the record."""
        if self.folder is None or self._writer is not None:
            return
        folder = self.folder

        def add() -> None:
            self._writer = RunLogWriter(folder, goes_on=True)
            self._writer.gain(gain)

        self._try(add)
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
