"""`ReportCallback`: one page of HTML at the end of training, made from the record that `TraceCallback` writes."""

import logging
import os
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_hotspa.callbacks.step_reports import TraceCallback
from hf_hotspa.errors import HotspaError
from hf_hotspa.reporting.measured import MeasuredGain
from hf_hotspa.reporting.page import PAGE_NAME, report_page, save_pictures
from hf_hotspa.reporting.run_log import RunLog, read_run_log
from hf_hotspa.reporting.summary import verdict
from hf_hotspa.whole_file import write_whole

logger = logging.getLogger(__name__)


class ReportCallback(TraceCallback):
    """A `TraceCallback` that also writes `report.html`, and says where it is. The default of `HotSPaTrainer`.

    Args:
        path: The folder; `hotspa_report` in the output directory when None.
        steps: See `TraceCallback`.
        pictures: Also SVG files of the main charts.

    Attributes:
        gain_follows: Whether what switching gained is measured after training (`measure_gain`); false at first. Nothing is
            claimed of it before.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, steps: int = 3, pictures: bool = False) -> None:
        super().__init__(path, steps)
        self.pictures, self.gain_follows = pictures, False

    @property
    def page(self) -> Path | None:
        """Where the page is, or will be at the end of training; None where no record is kept."""
        return None if self.folder is None else self.folder / PAGE_NAME

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the record and writes the page."""
        had_record = self._writer is not None
        super().on_train_end(args, state, control, **kwargs)
        if had_record and (run := self._make_page(self.gain_follows)) is not None:
            tqdm.write(f"{verdict(run, self.gain_follows)[0]}. The run in one page: {self.page}")

    def on_gain_measured(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, gain: MeasuredGain, **kwargs: Any
    ) -> None:
        """Writes the page anew, with what was measured after training."""
        super().on_gain_measured(args, state, control, gain, **kwargs)
        if self._make_page() is not None:
            tqdm.write(f"The run in one page: {self.page}")

    def on_train_interrupted(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes the page of a run that Ctrl-C has ended; its record has no end."""
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
