"""SIGTERM, what a scheduler sends some seconds before it takes the machine away; and SIGINT, which is Ctrl-C.

Owns the handlers. That of SIGTERM only notes the signal. Ranks exchange their notes with the gather that ends each mini-batch
anyway, so whoever was told, all of them save and stop at the same step, and `train()` returns. Promises:

* The mini-batch under way is finished (or, during a save or an evaluation, the next one), then a checkpoint is written,
  unless `save_strategy` is `no`. A signal after the last mini-batch changes nothing: training has ended anyway.
* A signal within `REPEAT_S` of the first one is the same request: launchers pass on what schedulers send to everybody.
* A later one does what it did before training began: it usually ends the process at once. What is on disk stays whole.
* The handler is there during `train()` only, and only where `train()` runs in the main thread, which Python demands.
* Ctrl-C ends training at once and saves nothing, as with the stock Trainer: `train()` raises `KeyboardInterrupt`. What
  the launcher passes on of it is the same Ctrl-C.
* Either way the main process says in one line how to go on, and where the report of the run is.
"""

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from transformers.trainer_utils import SaveStrategy

from hf_hotspa.callbacks.report import ReportCallback
from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.trainer.base import TrainerBase
from hf_hotspa.uncaught import interrupt_is_announced, signal_came

logger = logging.getLogger(__name__)

REPEAT_S = 10.0
"""How long a signal counts as the first one come again."""


class Preemption:
    """Notes SIGTERM inside a `with` statement, and makes several SIGINT one.

    Attributes:
        requested: Whether this process has received it.
        agreed: Whether all ranks stop because of it; set by the trainer.
    """

    def __init__(self) -> None:
        self.requested = self.agreed = False
        self._first_at = self._interrupted_at = 0.0
        self._before: Any = None
        self._installed = self._takes_interrupts = False

    def __enter__(self) -> "Preemption":
        self.requested = self.agreed = False
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGTERM)
            if before is not None:  # a handler that was not set from Python could not be put back
                self._before, self._installed = before, True
                signal.signal(signal.SIGTERM, self._note)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._takes_interrupts, self._interrupted_at = True, 0.0
                signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        # a launcher passes on the Ctrl-C that this process has had already, while it is about to end
        if self._takes_interrupts and not (kind is KeyboardInterrupt and "TORCHELASTIC_RUN_ID" in os.environ):
            self._takes_interrupts = False
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._interrupted_at or now > self._interrupted_at + REPEAT_S:
            self._interrupted_at = now
            signal_came()
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self._first_at = True, time.monotonic()
            signal_came()
        elif time.monotonic() > self._first_at + REPEAT_S:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        if self._installed:
            self._installed = False
            signal.signal(signal.SIGTERM, self._before)


class PreemptionMixin(TrainerBase):
    """Saves and stops where the engine says that ranks were told to."""

    _preemption: Preemption

    @property
    def preempted(self) -> bool:
        """Whether the last `train()` ended because of SIGTERM, with training left to do."""
        return self._preemption.agreed

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.engine is not None and self.engine.stop_ranks:
            # a second time at the end of the epoch, where everything is on disk already
            first, self._preemption.agreed = not self._preemption.agreed, True
            saves = self.args.save_strategy != SaveStrategy.NO
            self.control.should_training_stop = True
            self.control.should_save = first and saves
            self.control.should_evaluate = False  # the time that is left is for the checkpoint
            if first and self.is_world_process_zero():
                logger.warning(
                    "SIGTERM on rank %s: training stops after step %d; %s%s",
                    ", ".join(map(str, self.engine.stop_ranks)),
                    self.state.global_step,
                    "train(resume_from_checkpoint=True) goes on from its checkpoint" if saves else "nothing is saved",
                    self._where_the_report_is(),
                )
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _say_interrupted(self) -> None:
        """Ctrl-C: the report is made of what there is, and the main process says how to go on."""
        if not self.is_world_process_zero():
            return
        with suppress(Exception):  # not over the interrupt
            self.callback_handler.dispatch("on_train_interrupted", self.args, self.state, self.control)
        saved = checkpoints(Path(self.args.output_dir)) if self.args.output_dir else []
        go_on = f"train(resume_from_checkpoint=True) goes on from {saved[0]}" if saved else "no checkpoint was saved"
        logger.warning(
            "Ctrl-C: training stopped after step %d; %s%s", self.state.global_step, go_on, self._where_the_report_is()
        )
        interrupt_is_announced()

    def _where_the_report_is(self) -> str:
        pages = [callback.page for callback in self.callback_handler.callbacks if isinstance(callback, ReportCallback)]
        return next((f"; the run in one page: {page}" for page in pages if page is not None), "")
