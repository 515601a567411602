"""What `HotSPaTrainer` writes when Hugging Face's loop saves.

`CheckpointingMixin` replaces the methods of `transformers.Trainer` that write pickles by ones that go through
`hf_hotspa.checkpoint`, and writes pickles beside them only where they are asked for (`hotspa_stock_checkpoints`); when a checkpoint is due, how many stay, and what the trainer's state is remain the Trainer's. A
save that fails is a warning; only several in a row end training.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, TrainOutput

from hf_hotspa.checkpoint.format.disk import FileRecord, TensorRecord, tensor_file
from hf_hotspa.checkpoint.format.folder import RunFolder, checkpoint_name, write_error
from hf_hotspa.checkpoint.format.manifest import (
    BUFFERS,
    STATE,
    STATE_FOLDER,
    TRAINER_STATE,
    TRAINING_ARGUMENTS,
    Manifest,
    rank_state,
    rank_tensors,
)
from hf_hotspa.checkpoint.model_files import ModelWeights, saved_state
from hf_hotspa.checkpoint.rng import random_state
from hf_hotspa.checkpoint.saving import CheckpointWriter
from hf_hotspa.checkpoint.stock import OPTIMIZER, SCHEDULER
from hf_hotspa.checkpoint.stock_writing import (
    PICKLED_ARGUMENTS,
    optimizer_state,
    pickled,
    random_file,
    random_states,
    state_buffers,
    state_names,
)
from hf_hotspa.checkpoint.tensors import (
    Share,
    optimizer_to_json,
    saved_parameters,
    saved_segments,
    saved_vector,
    share_of,
    tensor_bytes,
    versions,
)
from hf_hotspa.errors import CheckpointError, HotspaError
from hf_hotspa.model.specs import dtype_name
from hf_hotspa.parallel.adapters import is_adapted
from hf_hotspa.parallel.verdict import settled
from hf_hotspa.trainer.failures import model_not_saved
from hf_hotspa.trainer.model_source import write_configs
from hf_hotspa.trainer.resuming import ResumeMixin
from hf_hotspa.trainer.same_settings import argument_facts, text_of
from hf_hotspa.trainer.stale_weights import structure_only

logger = logging.getLogger(__name__)


class CheckpointingMixin(ResumeMixin):
    """When and what `HotSPaTrainer` saves; and everything of `ResumeMixin`."""

    _checkpoint_writer: CheckpointWriter | None = None
    _failed_saves = 0
    _best_before: str | None = None
    _tokenizer: Any

    if TYPE_CHECKING:

        def _being_pushed(self) -> Collection[Path]: ...

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
        try:
            if self.args.save_strategy != SaveStrategy.NO or asked is True:
                self._writer().lock()
            self._resumption = self._find_checkpoint(asked) if asked else None
            path = str(self._resumption.path) if self._resumption else None
            return super().train(path, *args, **kwargs)
        finally:
            self._resumption = None
            if self._checkpoint_writer is not None:
                self._checkpoint_writer.close()

    def _make_output_dir(self) -> None:
        """Makes `output_dir`, which the stock Trainer would do on one rank alone. Collective.

        Raises:
            CheckpointError: on every rank: it cannot be made.
        """
        folder = Path(self.args.output_dir)
        self._agreement().run(
            "output_dir",
            lambda: folder.mkdir(parents=True, exist_ok=True) if self.args.should_save else None,
            otherwise=lambda failure: write_error("output_dir cannot be made", folder, failure),
        )

    def _writer(self, trial: Any = None) -> CheckpointWriter:
        folder = Path(self._get_output_dir(trial))
        if self._checkpoint_writer is not None and self._checkpoint_writer.folder.path != folder:
            self._checkpoint_writer.close()
            self._checkpoint_writer = None
        if self._checkpoint_writer is None:
            self._checkpoint_writer = CheckpointWriter(RunFolder(folder), self._agreement())
        return self._checkpoint_writer

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._try_saving(lambda writer: writer.poll())
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self._try_saving(lambda writer: writer.finish())
        self._finish_current_push()  # as the Trainer does afterwards; what is being pushed must not be removed
        best, writer = self.state.best_model_checkpoint, self._checkpoint_writer
        if best and writer is not None and writer.folder.held and self.args.save_total_limit == 1:
            # as the Trainer does afterwards, but so that nothing half removed can be taken for a checkpoint
            writer.folder.rotate(Path(best), 1)
        return super()._finalize_training(*args, **kwargs)

    # -- saving -------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes `checkpoint-<step>`. A failure is logged, and raised only after too many in a row."""
        self._try_saving(lambda writer: writer.finish())
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        folder, self._best_before = Path(self._get_output_dir(trial)), self.state.best_model_checkpoint
        if self.state.best_global_step:
            best = folder / checkpoint_name(self.state.best_global_step)
            exists = self.state.best_global_step == self.state.global_step or best.is_dir()
            if json.loads(self._agreement().texts(json.dumps(exists))[0]):
                self.state.best_model_checkpoint = str(best)
        writer = self._writer(trial)

        def kept() -> Collection[Path]:
            best = [Path(self.state.best_model_checkpoint)] if self.state.best_model_checkpoint else []
            return [*best, *self._being_pushed()]

        def save(writer: CheckpointWriter) -> None:
            write_files, make_manifest = self._contents(writer.folder)
            writer.save(
                self.state.global_step,
                write_files,
                make_manifest,
                limit=self.args.save_total_limit,
                keep=kept,
                background=self.args.hotspa_async_save,
            )

        self._try_saving(save, writer)

    def _try_saving(self, action: Callable[[CheckpointWriter], None], writer: CheckpointWriter | None = None) -> None:
        """The failure of a save does not end training, unless it happens again and again."""
        writer = writer or self._checkpoint_writer
        if writer is None:
            return
        committed = writer.committed_step
        try:
            action(writer)
        except CheckpointError as error:
            self.state.best_model_checkpoint = self._best_before
            self._failed_saves += 1
            if self._failed_saves > self.args.hotspa_max_failed_saves:
                raise
            if self.is_world_process_zero():
                logger.warning("%s | training goes on; failed saves in a row: %d", error, self._failed_saves)
        else:
            if writer.committed_step is not None and writer.committed_step != committed:
                self._failed_saves = 0
                if self.args.push_to_hub:
                    self._push_from_checkpoint(str(writer.folder.path / checkpoint_name(writer.committed_step)))

    def _contents(self, folder: RunFolder) -> tuple[Any, Any]:
        """What this rank writes, and what rank 0 says of all files. Everything that training changes is taken now."""
        engine, args = self.engine, self.args
        assert engine is not None
        optimizer = None if args.save_only_model else self.optimizer
        vector = saved_vector(engine.description.vector, engine.description.adapters is not None)
        share = share_of(engine.master, optimizer, vector)
        if args.hotspa_async_save:
            share = share.copy()
        rank, world = args.process_index, args.world_size
        with structure_only():
            files = ModelWeights(self.model, vector, engine.description.adapters is not None)
        held = files.hold(self._weights(), rank, world) if args.hotspa_async_save else None
        random_text = json.dumps(random_state())
        stock = self._stock_files(optimizer) if args.hotspa_stock_checkpoints else {}
        texts: dict[str, str] = {}
        failure: Exception | None = None
        try:
            texts = self._common_texts(share) if rank == 0 else {}
        except Exception as error:  # such as a callback's state that is no JSON: raised where all ranks are together
            failure = error

        def write_files(temporary: Path) -> list[FileRecord]:
            disk, weights = folder.disk, iter(()) if held is not None else self._weights()
            try:
                if failure is not None:
                    raise failure
                records = []
                if rank == 0:
                    of_others = {shard.name for shard in files.shards} | {random_file(r, world) for r in range(world)}
                    records += self._write_model_files(folder, temporary, of_others)
                    records += [disk.write(temporary, name, [text.encode()]) for name, text in texts.items()]
                records += [disk.write(temporary, name, [pickled(value)]) for name, value in stock.items()]
                if optimizer is not None:
                    records.append(disk.write(temporary, rank_tensors(rank, world), share.file()))
                    records.append(disk.write(temporary, rank_state(rank, world), [random_text.encode()]))
                return records + files.write(disk, temporary, weights if held is None else held, rank, world)
            finally:
                for _ in weights:  # also what is left after a failure: the other ranks are waiting for it
                    pass

        def make_manifest(files: tuple[FileRecord, ...]) -> Manifest:
            model = self.model
            dtypes = {name: dtype_name(p.dtype) for name, p in model.named_parameters(remove_duplicate=False)}
            exported = set[str]()  # an adapter ties nothing
            if engine.description.adapters is None:
                with structure_only():
                    exported = set(saved_state(model))
            return Manifest(
                step=step,
                world_size=world,
                strategies=",".join(map(str, engine.buckets)),
                resumable=optimizer is not None,
                run=folder.run,
                versions=versions(),
                files=files,
                segments=saved_segments(vector, world),
                parameters=saved_parameters(vector, share.states, dtypes, exported),
            )

        step = self.state.global_step
        return write_files, make_manifest

    def _stock_files(self, optimizer: Any) -> dict[str, Any]:
        """File -> what this rank pickles into it for the stock Trainer, taken now. Collective."""
        engine, args = self.engine, self.args
        assert engine is not None
        rank, world, states = args.process_index, args.world_size, dict[str, dict[str, Tensor]]()
        files: dict[str, Any] = {PICKLED_ARGUMENTS: args} if rank == 0 else {}
        if optimizer is None:
            return files
        for key in state_names(engine.master, optimizer):
            states[key] = {}
            for name, whole in engine.weights(False, state_buffers(engine.master, optimizer, key)):
                if rank == 0 and name in engine.master.parameters:  # a tied name is none of its own
                    states[key][name] = whole.to("cpu", copy=True).contiguous()
        if rank == 0:
            files[OPTIMIZER] = optimizer_state(optimizer, engine.master, states)
            files[SCHEDULER] = deepcopy(self.lr_scheduler.state_dict())
        return files | {random_file(rank, world): random_states(world)}

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
            own_state = getattr(self, "hotspa_state", None)
            state = {
                "optimizer": optimizer_to_json(self.optimizer, share),
                "scheduler": {"class": type(self.lr_scheduler).__name__, "state": self.lr_scheduler.state_dict()},
                "data": {"order": self._data_order, "epoch": self.state.epoch, "mini_batches": self.state.global_step},
                "hotspa": own_state() if own_state is not None else {},
            }
            if is_adapted(self.model):
                state["base model"] = self._base_digest()
            texts[STATE] = json.dumps(state) + "\n"
        return texts

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """What is saved of the model, as `HotSPaEngine.weights`. Collective."""
        assert self.engine is not None
        return self.engine.weights(frozen=self.engine.description.adapters is None)

    def _write_model_files(self, folder: RunFolder, temporary: Path, weights: set[str]) -> list[FileRecord]:
        """Config, generation config and tokenizer, as transformers writes them, and what a resumed run needs of the model's
        buffers. The other ranks may be writing files of weights meanwhile."""
        model = self.model
        write_configs(model, temporary, self._tokenizer)
        records = folder.disk.adopt(temporary, {STATE_FOLDER, *weights})
        if is_adapted(model) or self.args.save_only_model:  # an adapter's buffers are the base model's
            return records
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        with structure_only():
            tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
        buffers = [
            (TensorRecord(name, dtype_name(tensor.dtype), tuple(tensor.shape)), tensor)
            for name, tensor in tensors.items()
        ]
        if buffers:
            records.append(folder.disk.write(temporary, BUFFERS, tensor_file(buffers, tensor_bytes)))
        return records

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
