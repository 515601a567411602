"""When `HotSPaTrainer` saves, and under which of Hugging Face's names.

`CheckpointingMixin` replaces the methods of `transformers.Trainer` that write pickles by ones that go through
`hf_hotspa.checkpoint`; pickles are written beside them only where they are asked for (`hotspa_stock_checkpoints`). When a
checkpoint is due, how many stay, and what the trainer's state is remain the Trainer's.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, TrainOutput

from hf_hotspa.checkpoint.format.folder import RunFolder, write_error
from hf_hotspa.checkpoint.format.manifest import STATE, TRAINER_STATE, TRAINING_ARGUMENTS
from hf_hotspa.checkpoint.stock_writing import PICKLED_ARGUMENTS, pickled
from hf_hotspa.checkpoint.tensors import Share, optimizer_to_json
from hf_hotspa.errors import HotspaError
from hf_hotspa.parallel.adapters import is_adapted
from hf_hotspa.parallel.verdict import settled
from hf_hotspa.trainer.agreed_facts import argument_facts, text_of
from hf_hotspa.trainer.checkpoint_contents import CheckpointContents
from hf_hotspa.trainer.checkpoint_search import find_checkpoint
from hf_hotspa.trainer.checkpoints import Checkpoints
from hf_hotspa.trainer.model_source import model_not_saved
from hf_hotspa.trainer.resuming import ResumeMixin


class CheckpointingMixin(ResumeMixin):
    """When and what `HotSPaTrainer` saves; and everything of `ResumeMixin`."""

    _checkpoints: Checkpoints
    _tokenizer: Any

    # -- around training ----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains.

        Args:
            resume_from_checkpoint: True for the newest checkpoint of `output_dir` that verifies, or the path of one,
                written by any number of ranks under any strategies. `args.resume_from_checkpoint` when None.
            *args: As for `Trainer.train`.
            **kwargs: As for `Trainer.train`.

        Raises:
            ResumeError: there is no checkpoint, or the run cannot go on exactly from it.
            DamagedCheckpointError: the one that was named does not verify.
            CheckpointLockError: another run writes into `output_dir`.
        """
        asked = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        if isinstance(asked, str) and asked.lower() in ("true", "false"):  # from a command line
            asked = asked.lower() == "true"
        # before anything that ranks do together because of an argument: it may have been changed since the Trainer was made
        facts = argument_facts(self.args) | {"resume_from_checkpoint": text_of(asked)}
        self._agreement().check({}, None, "start of training", facts=facts)
        folder = Path(self._get_output_dir(None))
        try:
            if self.args.save_strategy != SaveStrategy.NO or asked is True:
                self._checkpoints.into(folder).lock()
            self._resumption = find_checkpoint(asked, folder, self.args, self._agreement()) if asked else None
            path = str(self._resumption.path) if self._resumption else None
            return super().train(path, *args, **kwargs)
        finally:
            self._resumption = None
            self._checkpoints.close()

    def _make_output_dir(self) -> None:
        """Makes `output_dir`, which the stock Trainer would do on one rank alone. Collective."""
        folder = Path(self.args.output_dir)
        self._agreement().run(
            "output_dir",
            lambda: folder.mkdir(parents=True, exist_ok=True) if self.args.should_save else None,
            otherwise=lambda failure: write_error("output_dir cannot be made", folder, failure),
        )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._checkpoints.poll(self.state)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self._checkpoints.finish(self.state)
        self._finish_current_push()  # as the Trainer does afterwards; what is being pushed must not be removed
        self._checkpoints.leave_best(self.state)
        return super()._finalize_training(*args, **kwargs)

    # -- saving -------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes `checkpoint-<step>`. A failure is logged, and raised only after too many in a row."""
        self._checkpoints.finish(self.state)
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._checkpoints.save(Path(self._get_output_dir(trial)), self.state, self._contents)

    def _contents(self, folder: RunFolder) -> CheckpointContents:
        optimizer = None if self.args.save_only_model else self.optimizer
        return CheckpointContents(
            folder, self.state.global_step, self._running, self.model, self.args, optimizer, self.lr_scheduler, self._tokenizer,
            {} if self._devices is None else self._devices.rank_tensors(), self._common_texts,
        )  # fmt: skip

    def _committed(self, folder: Path) -> None:
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def _common_texts(self, share: Share) -> dict[str, str]:
        """The JSON files that one rank writes for all."""
        callbacks: dict[str, Any] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                callbacks.setdefault(type(callback).__name__, []).append(callback.state())
        self.state.stateful_callbacks = {n: states if len(states) > 1 else states[0] for n, states in callbacks.items()}
        texts = {
            TRAINER_STATE: json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n",
            TRAINING_ARGUMENTS: self.args.to_json_string() + "\n",
        }
        if not self.args.save_only_model:
            assert self.optimizer is not None
            state: dict[str, Any] = {
                "optimizer": optimizer_to_json(self.optimizer, share),
                "scheduler": {"class": type(self.lr_scheduler).__name__, "state": self.lr_scheduler.state_dict()},
                "data": {"order": self._data_order, "epoch": self.state.epoch, "mini_batches": self.state.global_step},
                "hotspa": self.hotspa_state(),
            }
            if is_adapted(self.model):
                state["base model"] = self._base.of(self._running, self.model)
            texts[STATE] = json.dumps(state) + "\n"
        return texts

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The model in Hugging Face's format, and the arguments as JSON: the stock Trainer pickles them.

        May be called on the main process alone; where all call it, all raise what it raises.
        """
        target = Path(output_dir if output_dir is not None else self.args.output_dir)

        def save() -> None:
            if not self.args.should_save:
                return
            try:
                target.mkdir(parents=True, exist_ok=True)
                self.model.save_pretrained(target, state_dict=state_dict)
                if self._tokenizer is not None:
                    self._tokenizer.save_pretrained(target)
                (target / TRAINING_ARGUMENTS).write_text(self.args.to_json_string() + "\n")
                if self.args.hotspa_stock_checkpoints:
                    (target / PICKLED_ARGUMENTS).write_bytes(pickled(self.args))
            except HotspaError:
                raise
            except Exception as failure:  # of the disk, or of a tokenizer
                raise model_not_saved(target, failure) from failure

        settled(f"the model saved in {target}", save, self.is_world_process_zero(), float(self.args.ddp_timeout))
