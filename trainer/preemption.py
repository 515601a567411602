"""Events that stop a run or skip a step: SIGTERM, Ctrl-C, and mini-batches that cannot be trained.

Owns the handlers. They only note the signal. Ranks exchange their notes with the gather that ends each mini-batch anyway,
so all save and stop at the same step, whichever received it, and `train()` returns. Promises:

* The current mini-batch is finished (or, during a save or an evaluation, the next one), then a checkpoint is written,
  unless `save_strategy` is `no`. A signal after the last mini-batch changes nothing.
* Launchers pass signals on: a SIGINT within `FORWARD_S` of another signal, or a SIGTERM so soon after a SIGINT, is the
  same request. Schedulers send SIGTERM to all: a SIGTERM within `REPEAT_S` of the first is the same request.
* A later SIGTERM has the effect from before training: it usually ends the process at once. A later SIGINT, the second
  press of Ctrl-C, raises `KeyboardInterrupt`. torch's launcher passes the second press on as SIGTERM. Files on disk stay
  complete.
* The handlers exist during `train()` only, and only if `train()` runs in the main thread, as Python requires; SIGINT is
  taken only from Python's own handler.
* The main process logs in one line how to resume, and where the report of the run is, unless SIGTERM ends it at once.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from hf_hotspa.callbacks.progress import in_notebook
from hf_hotspa.callbacks.step_reports import ReportCallback
from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.errors import DataError, HotspaError, printable
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.trainer.protocol import HasRun
from hf_hotspa.uncaught import interrupt_is_announced, signal_came

logger = logging.getLogger(__name__)

REPEAT_S = 10.0  # how long a repeated SIGTERM counts as the first one
FORWARD_S = 1.0
"""How long after a signal a SIGINT, or after a SIGINT any signal, is the same one, passed on by a launcher."""


class Preemption:
    """Notes SIGTERM and the first SIGINT inside a `with` statement. `requested`: whether this process has received one
    of them. `agreed`: whether all ranks stop because of it; set by the trainer."""

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args
        self.requested = self.agreed = False
        self._first, self._first_at = 0, 0.0  # the first signal, and when it came
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """The signal that this process received; if another process did, it may be either."""
        return {0: "SIGTERM or Ctrl-C", signal.SIGINT: "Ctrl-C"}.get(self._first, "SIGTERM")

    def __enter__(self) -> "Preemption":
        self.requested, self.agreed, self._first = False, False, 0
        if threading.current_thread() is threading.main_thread():
            sigterm, sigint = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
            # a handler that was not set from Python could not be restored
            self._before = {signal.SIGTERM: sigterm} if sigterm is not None else {}
            if sigint is signal.default_int_handler:
                self._before[signal.SIGINT] = sigint
            for number in self._before:
                signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        if launched and self._first:  # the launcher may still pass on the signal, which would end the script
            time.sleep(max(0.0, self._first_at + FORWARD_S - time.monotonic()))
        self._restore(signal.SIGTERM)
        if not (launched and kind is KeyboardInterrupt):  # else it ends this process, and may be passed on
            self._restore(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._first:
            self.requested, self._first, self._first_at = True, number, time.monotonic()
            signal_came()
            if number == signal.SIGINT and self._args.process_index == 0:
                saves = " and saves" if self._args.save_strategy != SaveStrategy.NO else ""
                _say_at_once(f"Ctrl-C: training stops after this step{saves}; press again to stop at once")
        elif time.monotonic() > self._first_at + (REPEAT_S if self._first == number == signal.SIGTERM else FORWARD_S):
            if number == signal.SIGINT:
                signal.signal(number, lambda *_: None)
                raise KeyboardInterrupt
            self._restore(number)
            signal.raise_signal(number)

    def _restore(self, number: int) -> None:
        if number in self._before:
            signal.signal(number, self._before.pop(number))


def _say_at_once(text: str) -> None:
    """Prints from a signal handler: the code that it interrupts may be printing."""
    if in_notebook():
        print(printable(text), file=sys.stderr, flush=True)
        return
    with suppress(OSError):  # the line of a bar has no end
        os.write(2, f"{chr(10) * os.isatty(2)}{text}\n".encode())


def take_sigterm_from(callbacks: Iterable[Any]) -> None:
    """Removes the handler of transformers' `enable_jit_checkpoint`: `Preemption` stops all ranks at the same step."""
    for manager in (getattr(callback, "jit_manager", None) for callback in callbacks):
        if manager is not None and manager._original_sigterm_handler is not None:
            signal.signal(signal.SIGTERM, manager._original_sigterm_handler)
            manager._original_sigterm_handler = None  # else it would replace our handler when training ends


def stop_where_told(trainer: HasRun, preemption: Preemption) -> None:
    # called again at the end of the epoch, when everything is on disk already
    first, preemption.agreed = not preemption.agreed, True
    saves = trainer.args.save_strategy != SaveStrategy.NO
    trainer.control.should_training_stop = True
    trainer.control.should_save = first and saves
    trainer.control.should_evaluate = False  # the remaining time is for the checkpoint
    if first and trainer.is_world_process_zero():
        logger.warning(
            "%s on rank %s: training stops after step %d; %s%s",
            preemption.name,
            ", ".join(map(str, trainer.switched.engine.stop_ranks)),
            trainer.state.global_step,
            "train(resume_from_checkpoint=True) resumes from its checkpoint, and trainer.preempted is true for the script to test"
            if saves
            else "nothing is saved, and trainer.preempted is true for the script to test",
            _where_the_report_is(trainer),
        )


def say_interrupted(trainer: HasRun) -> None:
    """After the second Ctrl-C: makes the report of the steps so far, and the main process logs how to resume."""
    if not trainer.is_world_process_zero():
        return
    with suppress(Exception):  # it must not replace the interrupt
        trainer.callback_handler.dispatch("on_train_interrupted", trainer.args, trainer.state, trainer.control)
    saved = checkpoints(Path(trainer.args.output_dir)) if trainer.args.output_dir else []
    resumes = f"train(resume_from_checkpoint=True) resumes from {saved[0]}" if saved else "no checkpoint was saved"
    where = _where_the_report_is(trainer)
    logger.warning("Ctrl-C: training stopped after step %d; %s%s", trainer.state.global_step, resumes, where)
    interrupt_is_announced()


def _where_the_report_is(trainer: HasRun) -> str:
    pages = [callback.page for callback in trainer.callback_handler.every if isinstance(callback, ReportCallback)]
    return next((f"; the run in one page: {page}" for page in pages if page is not None), "")


class SkippedMiniBatches:
    """The skipped mini-batches of a run. `limit`: how many may be skipped in a row."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.total = self._in_a_row = self._since_log = 0  # how many were skipped
        self._loss_sum, self._num_losses = 0.0, 0

    def skip(self, switched: SwitchedModel, error: HotspaError) -> Tensor:
        """Removes the gradients, so that the optimizer's next step changes nothing. Returns the loss of the step for
        the Trainer, an fp32 scalar on the host: the mean of the finite losses since the last log, or NaN. Raises
        `HotspaError` if the limit is reached."""
        self._in_a_row += 1
        if self._in_a_row > self._limit:
            if not self._limit:
                raise error
            data = error.to_dict()
            data["why"] = f"{data['why']}; {self._limit} mini-batches were skipped just before it"
            raise HotspaError.from_dict(data) from error
        self.total += 1
        self._since_log += 1
        switched.zero_grad()
        if switched.engine.rank == 0:
            logger.warning("A mini-batch is skipped (%d of %d in a row): %s", self._in_a_row, self._limit, error)
        return torch.tensor(self._mean())

    def trained(self, loss: float) -> None:
        """Records a trained mini-batch with this loss; only needed if some may be skipped."""
        self._in_a_row = 0
        self._loss_sum += loss
        self._num_losses += 1

    def correct(self, logs: dict[str, float], agreement: Agreement) -> None:
        """Logs the skipped mini-batches, if any, and the mean of the finite losses if some were skipped since the last
        log. Collective then."""
        if self._since_log:
            logs["loss"] = float(agreement.gather([self._mean()]).mean())
        if self.total:
            logs["hotspa/skipped_mini_batches"] = float(self.total)
        self._since_log = 0
        self._loss_sum, self._num_losses = 0.0, 0

    def _mean(self) -> float:
        return self._loss_sum / self._num_losses if self._num_losses else float("nan")


class NoLabelsError(DataError):
    """A mini-batch without a label token, which may be skipped."""


def no_labels(step: int) -> NoLabelsError:
    return NoLabelsError(
        "none of the rows of the mini-batch has a label token",
        where=f"mini-batch {step + 1}",
        why="the loss is a mean over label tokens",
        fix="use larger mini-batches, drop rows without labels, or skip such mini-batches with hotspa_skip_non_finite=2, say",
    )


def unreadable(error: Exception, rank: int) -> HotspaError:
    """Any error of a data loader as a `HotspaError`, which can travel to all ranks."""
    if isinstance(error, HotspaError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    failure = DataError(
        f"the dataset failed to give rows: {type(error).__name__}: {error}",
        where=f"rank {rank}, at {last.filename}:{last.lineno}",
        fix="iterate over trainer.get_train_dataloader() without training to see the complete traceback",
    )
    failure.__cause__ = error
    return failure
