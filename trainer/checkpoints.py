"""The checkpoints of a run: which of them are there, what a save that fails means, and which ones stay.

`transformers.Trainer` says when a checkpoint is due and which one is the best; here they are committed, perhaps a few steps
later. A save that fails is a warning; only several in a row end training.
"""

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from transformers import TrainerState

from hf_hotspa.checkpoint.format.folder import RunFolder, checkpoint_name
from hf_hotspa.checkpoint.saving import CheckpointWriter
from hf_hotspa.errors import CheckpointError
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.checkpoint_contents import CheckpointContents

logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves. Collective.

    Args:
        in_use: Gives the checkpoints that must not be removed now, beside the best one.
        committed: Told of the folder of each checkpoint that is complete.

    Attributes:
        writer: What writes into the present folder; None before the first.
    """

    def __init__(
        self,
        args: HotSPaTrainingArguments,
        agreement: Callable[[], Agreement],
        in_use: Callable[[], Collection[Path]],
        committed: Callable[[Path], None],
    ) -> None:
        self._args, self._agreement, self._in_use, self._committed = args, agreement, in_use, committed
        self.writer: CheckpointWriter | None = None
        self._failed = 0  # saves in a row
        self._best_before: str | None = None

    def into(self, folder: Path) -> CheckpointWriter:
        """The writer for a folder; that of another one is closed."""
        if self.writer is not None and self.writer.folder.path != folder:
            self.writer.close()
            self.writer = None
        if self.writer is None:
            self.writer = CheckpointWriter(RunFolder(folder), self._agreement())
        return self.writer

    def close(self) -> None:
        """Ends the writing, and lets go of the run lock."""
        if self.writer is not None:
            self.writer.close()

    def poll(self, state: TrainerState) -> None:
        """Commits a save in the background that all ranks have written."""
        self._try(state, lambda writer: writer.poll())

    def finish(self, state: TrainerState) -> None:
        """Waits for a save in the background."""
        self._try(state, lambda writer: writer.finish())

    def leave_best(self, state: TrainerState) -> None:
        """At the end of training under `save_total_limit=1`, as the stock Trainer does afterwards, but so that nothing half
        removed can be taken for a checkpoint."""
        best, writer = state.best_model_checkpoint, self.writer
        if best and writer is not None and writer.folder.held and self._args.save_total_limit == 1:
            writer.folder.rotate(Path(best), 1)

    def save(self, folder: Path, state: TrainerState, contents: Callable[[RunFolder], CheckpointContents]) -> None:
        """Writes `checkpoint-<step>`. A failure is logged, and raised only after too many in a row."""
        self._best_before = state.best_model_checkpoint
        if state.best_global_step:
            best = folder / checkpoint_name(state.best_global_step)
            exists = state.best_global_step == state.global_step or best.is_dir()
            if json.loads(self._agreement().texts(json.dumps(exists))[0]):
                state.best_model_checkpoint = str(best)
        self.into(folder)

        def kept() -> Collection[Path]:
            best = [Path(state.best_model_checkpoint)] if state.best_model_checkpoint else []
            return [*best, *self._in_use()]

        def save(writer: CheckpointWriter) -> None:
            taken = contents(writer.folder)
            writer.save(
                state.global_step,
                taken.write,
                taken.manifest,
                limit=self._args.save_total_limit,
                keep=kept,
                background=self._args.hotspa_async_save,
            )

        self._try(state, save)

    def _try(self, state: TrainerState, action: Callable[[CheckpointWriter], None]) -> None:
        """The failure of a save does not end training, unless it happens again and again."""
        writer = self.writer
        if writer is None:
            return
        before = writer.committed_step
        try:
            action(writer)
        except CheckpointError as error:
            state.best_model_checkpoint = self._best_before
            self._failed += 1
            if self._failed > self._args.hotspa_max_failed_saves:
                raise
            if self._args.process_index == 0:
                logger.warning("%s | training goes on; failed saves in a row: %d", error, self._failed)
        else:
            if writer.committed_step is not None and writer.committed_step != before:
                self._failed = 0
                self._committed(writer.folder.path / checkpoint_name(writer.committed_step))
