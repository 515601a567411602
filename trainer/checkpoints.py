"""The checkpoints of a run: their contents, their rotation, and the handling of failed saves.

`transformers.Trainer` decides when a checkpoint is due and which one is the best; here they are committed, perhaps some
steps later. A failed save is a warning; only several in a row end training, and a run of which no save succeeded ends
with an error. Content that no disk could store, and a disk without room for one checkpoint, raise an error before the
first step (`try_files`).

A save over all ranks: every rank writes its own files at the same time, and rank 0 commits when all are done.

    rank 0   takes the run lock, makes the temporary directory                            agree
    all      write and sync their files, send names, sizes and hashes, or an error        gather
    rank 0   writes the manifest, syncs, renames: from here on the checkpoint exists      agree
    rank 0   removes older ones

An error of any rank is raised by all, and nothing is left of the checkpoint. In a background save a thread of each rank
writes the files, from copies in host memory. The ranks commit together at the first `poll` after all have written, or
in `finish`. At most one save is in progress.
"""

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from transformers import TrainerState
from transformers import trainer as stock
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy
from transformers.utils import PushInProgress

from hf_hotspa.checkpoint import stock as of_stock
from hf_hotspa.checkpoint import tensors
from hf_hotspa.checkpoint.format import manifest
from hf_hotspa.checkpoint.format.disk import DTYPES, Disk, FileRecord, TensorRecord, tensor_file
from hf_hotspa.checkpoint.format.folder import RunFolder, checkpoint_name, unsavable, write_error
from hf_hotspa.checkpoint.format.manifest import WEIGHT, Manifest, rank_tensors
from hf_hotspa.checkpoint.model_files import ModelWeights, export, saved_state
from hf_hotspa.checkpoint.rng import random_state
from hf_hotspa.checkpoint.tensors import Share
from hf_hotspa.costs.memory import size
from hf_hotspa.engine.master import bare_optimizer
from hf_hotspa.errors import CheckpointError, HotspaError, UnsavableError
from hf_hotspa.model.specs import dtype_name
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.mesh import nodes_of
from hf_hotspa.parallel.wrapped_model import bare_model, is_wrapped, saved_model
from hf_hotspa.switched.model_object import structure_only
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.batches import Rows
from hf_hotspa.trainer.model_source import argument_files, side_files, write_each
from hf_hotspa.trainer.protocol import HasRun
from hf_hotspa.trainer.resuming import BaseDigest, Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")
WriteFiles = Callable[[Path], list[FileRecord]]
"""Writes a rank's files into a directory, synced, and returns their records."""

MakeManifest = Callable[[tuple[FileRecord, ...]], Manifest]


@dataclass
class _Pending:
    """A save in progress on this rank."""

    step: int
    temporary: Path
    make_manifest: MakeManifest
    keep: Callable[[], Collection[Path]]
    limit: int | None
    records: list[FileRecord] = field(default_factory=list)
    error: HotspaError | None = None
    thread: threading.Thread | None = None

    def write(self, write_files: WriteFiles) -> None:
        """Stores an error: it is raised where all ranks are together."""
        try:
            self.records = write_files(self.temporary)
        except HotspaError as error:
            self.error = error
        except Exception as error:  # any error of a serialiser or the disk makes only the save fail
            self.error = write_error(f"the checkpoint of step {self.step} was not written", self.temporary, error)


class CheckpointWriter:
    """Saves checkpoints of a run into one directory. All methods are collective. `folder`: the directory; only rank 0's
    is used to commit."""

    def __init__(self, folder: RunFolder, agreement: Agreement) -> None:
        self.folder, self.agreement = folder, agreement
        self._pending: _Pending | None = None
        self.committed_step: int | None = None  # the step of the last checkpoint that this writer committed

    @property
    def pending_step(self) -> int | None:
        return self._pending.step if self._pending is not None else None

    def lock(self) -> None:
        """Takes the run lock. Raises `CheckpointLockError` if another run holds it; `CheckpointError` if the directory
        cannot be written to."""
        self._on_first(self.folder.lock)

    def save(
        self,
        step: int,
        write_files: WriteFiles,  # writes this rank's files; in a thread with `background`
        make_manifest: MakeManifest,  # the manifest of all ranks' files; called on rank 0
        *,
        limit: int | None = None,  # how many checkpoints stay, see `RunFolder.rotate`
        keep: Callable[[], Collection[Path]] = lambda: (),  # which ones stay in any case; called before removing any
        background: bool = False,  # whether to return before the files are written
        num_bytes: int = 0,  # the least bytes of this rank's files, for which there must be room
    ) -> None:
        """Writes a checkpoint. On return it exists, or a background save has started. Raises `CheckpointError` if it
        could not be written; nothing is left of it. Also the error of an earlier background save, which is finished
        first."""
        self.finish()
        needed = int(self.agreement.gather([float(num_bytes)]).sum())

        def begin() -> Path:
            self.folder.lock()  # which removes what dead runs left
            check_room(self.folder.path, needed, f"the checkpoint of step {step} has no room on the disk")
            return self.folder.begin(step)

        begun = self._on_first(begin)
        temporary = Path(self.agreement.texts(str(begun))[0])
        pending = self._pending = _Pending(step, temporary, make_manifest, keep, limit)
        if background:
            # a daemon: a run that dies does not wait for a checkpoint that no rank will commit
            written = (write_files,)
            pending.thread = threading.Thread(None, pending.write, "hotspa-checkpoint", written, daemon=True)
            pending.thread.start()
            return
        pending.write(write_files)
        self.finish()

    def poll(self) -> None:
        """Commits a background save when all ranks have written their files. Call it once per step. Raises
        `CheckpointError` if it failed on some rank."""
        pending = self._pending
        if pending is None:
            return
        done = pending.thread is None or not pending.thread.is_alive()
        if bool(self.agreement.gather([float(done)]).all()):
            self.finish()

    def finish(self) -> None:
        """Waits for a save in progress, and commits it. Raises `CheckpointError` if it failed on some rank."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.thread is not None:
            pending.thread.join()
        try:
            self.agreement.check({}, pending.error, f"step {pending.step}")
        except HotspaError:
            if self.agreement.rank == 0:
                self.folder.abandon(pending.temporary)
            raise
        texts = self.agreement.texts(json.dumps([asdict(record) for record in pending.records]))
        records = tuple(FileRecord(**file) for text in texts for file in json.loads(text))
        self._on_first(lambda: self._commit(pending, records))
        self.committed_step = pending.step

    def close(self) -> None:
        """Releases the run lock. Not collective; a save in progress is not committed."""
        self._pending = None
        self.folder.unlock()

    def _commit(self, pending: _Pending, records: tuple[FileRecord, ...]) -> None:
        try:
            committed = self.folder.commit(pending.temporary, pending.make_manifest(records))
        except Exception:
            self.folder.abandon(pending.temporary)
            raise
        self.folder.rotate(committed, pending.limit, pending.keep())

    def _on_first(self, action: Callable[[], T]) -> T | None:
        """Runs `action` on rank 0, and raises its error on all ranks. None on the others."""
        return self.agreement.run(
            "checkpoint",
            lambda: action() if self.agreement.rank == 0 else None,
            otherwise=lambda failure: write_error("no checkpoint was written", self.folder.path, failure),
        )


# -- for the trainer --------------------------------------------------------------------------------------------------


class SavedRun(Protocol):
    """What a checkpoint holds of a `Run`."""

    rows: Rows
    base: BaseDigest
    now: Progress

    def rank_tensors(self) -> dict[str, Tensor]: ...


class CheckpointContents:
    """The contents of a checkpoint of a trainer, captured now and written later, perhaps by a thread. Collective."""

    def __init__(self, trainer: HasRun, run: SavedRun, folder: RunFolder) -> None:
        args, model, engine = trainer.args, trainer.model, trainer.switched.engine
        run.rows.parts.gather(engine.agreement, trainer.control.should_epoch_stop)
        optimizer: Optimizer | None = None if args.save_only_model else trainer.optimizer
        # tensors that only this rank needs to resume, in host memory: of a trainer that generates, and of features
        self._rank_tensors = run.rank_tensors()
        self._folder, self._step, self._engine, self._model = folder, trainer.state.global_step, engine, model
        self._args: HotSPaTrainingArguments = args
        self._optimizer, self._scheduler, self._tokenizer = optimizer, trainer.lr_scheduler, tokenizer_of(trainer)
        self._rank, self._world = args.process_index, args.world_size
        self._adapted = engine.description.added is not None
        self._vector = tensors.saved_vector(engine.description.vector, self._adapted)
        if engine.updates is not None and optimizer is not None:
            tensors.drop_unstepped(engine.master, optimizer, engine.agreement)
        share = tensors.share_of(engine.master, optimizer, self._vector)
        self._share = share.copy() if args.hotspa_async_save else share
        with structure_only():
            self._files = ModelWeights(model, self._vector.specs, self._adapted)
        copies = args.hotspa_async_save
        self._copies = self._files.hold(self._weights(), self._rank, self._world) if copies else None
        self._random = json.dumps(random_state())
        self._stock = self._stock_files() if args.hotspa_stock_checkpoints else {}
        self._texts, self._failure = dict[str, str](), None
        try:
            self._texts = _texts(trainer, run, self._share) if self._rank == 0 else {}
        except Exception as error:  # such as a callback's state that JSON cannot hold: raised where all are together
            self._failure = error

    @property
    def num_bytes(self) -> int:
        return rank_bytes(self._share, self._files, self._optimizer, self._rank, self._world)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._engine.weights(frozen=not self._adapted)

    def write(self, temporary: Path) -> list[FileRecord]:
        """Writes this rank's files. Collective if weights were not copied."""
        disk, rank, world = self._folder.disk, self._rank, self._world
        weights = iter(()) if self._copies is not None else self._weights()
        try:
            if self._failure is not None:
                raise self._failure
            records = []
            if rank == 0:
                of_others = {name for name, _ in self._files.shards}
                of_others |= {of_stock.random_file(r, world) for r in range(world)}
                records += self._write_model_files(temporary, of_others)
                records += [disk.write(temporary, name, [text.encode()]) for name, text in self._texts.items()]
            records += [disk.write(temporary, name, [of_stock.pickled(value)]) for name, value in self._stock.items()]
            if self._optimizer is not None:
                records.append(disk.write(temporary, rank_tensors(rank, world), self._share.file()))
                records.append(disk.write(temporary, manifest.rank_state(rank, world), [self._random.encode()]))
                if self._rank_tensors:
                    own = tensors.named_tensors(self._rank_tensors)
                    written = tensor_file(own, tensors.tensor_bytes)
                    records.append(disk.write(temporary, manifest.rank_columns(rank, world), written))
            of_model = weights if self._copies is None else self._copies
            return records + self._files.write(disk, temporary, of_model, rank, world)
        finally:
            for _ in weights:  # also after a failure: the other ranks wait for the rest
                pass

    def manifest(self, files: tuple[FileRecord, ...]) -> Manifest:
        """The manifest of the files of all ranks. Called on rank 0."""
        model, engine = self._model, self._engine
        dtypes = {name: dtype_name(p.dtype) for name, p in model.named_parameters(remove_duplicate=False)}
        exported, (inside, prefix) = set[str](), saved_model(model)  # an adapter ties nothing
        if not self._adapted:
            with structure_only():
                exported = set(saved_state(inside))
        parameters = tensors.saved_parameters(self._vector, self._share.states, dtypes, exported, prefix)
        return Manifest(
            step=self._step, world_size=self._world, strategies=",".join(map(str, engine.buckets)),
            resumable=self._optimizer is not None, run=self._folder.run, versions=tensors.versions(), files=files,
            segments=tensors.saved_segments(self._vector, engine.master), parameters=parameters,
            schema_version=manifest.format_of(parameters),
        )  # fmt: skip

    def _stock_files(self) -> dict[str, Any]:
        engine, optimizer, rank, world = self._engine, self._optimizer, self._rank, self._world
        states = dict[str, dict[str, Tensor]]()
        files: dict[str, Any] = {of_stock.PICKLED_ARGUMENTS: self._args} if rank == 0 else {}
        if optimizer is None:
            return files
        for key in of_stock.state_names(engine.master, optimizer):
            states[key] = {}
            for name, whole in engine.weights(False, of_stock.state_buffers(engine.master, optimizer, key)):
                if rank == 0 and name in engine.master.parameters:  # a tied name is not a parameter itself
                    states[key][name] = whole.to("cpu", copy=True).contiguous()
        if rank == 0:
            files[of_stock.OPTIMIZER] = of_stock.optimizer_state(optimizer, engine.master, states)
            files[of_stock.SCHEDULER] = deepcopy(self._scheduler.state_dict())
        return files | {of_stock.random_file(rank, world): of_stock.random_states(world)}

    def _write_model_files(self, temporary: Path, weights: set[str]) -> list[FileRecord]:
        """Writes config, generation config and tokenizer as transformers does, and the model's buffers. Other ranks may
        write weights at the same time."""
        model, disk = self._model, self._folder.disk
        write_each(side_files(model, self._tokenizer), temporary)
        records = disk.adopt(temporary, {manifest.STATE_FOLDER, *weights})
        if is_wrapped(model) or self._args.save_only_model:  # an adapter's buffers are the base model's
            return records
        model = bare_model(model)[0]  # which names buffers as replicas do
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        with structure_only():
            buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
        if buffers:
            written = tensor_file(tensors.named_tensors(buffers), tensors.tensor_bytes)
            records.append(disk.write(temporary, manifest.BUFFERS, written))
        return records


# -- room for a checkpoint ---------------------------------------------------------------------------------------------


def rank_bytes(share: Share, files: ModelWeights, optimizer: Optimizer | None, rank: int, world_size: int) -> int:
    """The bytes of the tensors that one rank writes: a lower bound, because of an optimizer that has not stepped only the
    states that are known count. So an error of room is one that the disk would raise, too, after half a checkpoint."""
    of_model = _bytes(record for _, entries in files.shards[rank::world_size] for record, _ in entries)
    if optimizer is None:
        return of_model
    of_rank = _bytes(record for record, _ in share.tensors)
    has_stepped = any(states.keys() - {WEIGHT} for states in share.states.values())
    if not has_stepped and type(bare_optimizer(optimizer)) in (Adam, AdamW):
        of_rank *= 3  # two moments, in the dtype of the masters
    return of_model + of_rank


def _bytes(records: Iterable[TensorRecord]) -> int:
    return sum(DTYPES[record.dtype][1] * math.prod(record.shape) for record in records)


def check_room(folder: Path, needed: int, when: str) -> int:
    """Checks that a file system has room for one more checkpoint, of so many bytes over all ranks; returns the free
    bytes, or 0 if it does not say. The folder need not exist. Raises `CheckpointError`, naming both numbers."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    try:
        usage = shutil.disk_usage(there)
    except OSError:  # a save reports the error
        return 0
    if not usage.total:  # such as some network file systems
        return 0
    if needed <= usage.free:
        return usage.free
    raise CheckpointError(
        f"{when}: it needs {size(needed)} ({needed:,} bytes), and {size(usage.free)} ({usage.free:,} bytes) are free",
        where=str(folder),
        why="a checkpoint holds the weights, the masters and the optimizer state; older ones are removed only after a new "
        "one is complete",
        fix="free space, give an output_dir on another disk, or save less (save_only_model=True, save_strategy='no')",
    )


def check_run(args: HotSPaTrainingArguments, needed: int, num_steps: int) -> None:
    """Before the first step, on the main process: rejects a run without room for one checkpoint, and warns if there is
    not room for all that will be there. Raises `CheckpointError` if no checkpoint has room."""
    folder = Path(args.output_dir)
    free = check_room(folder, needed, "no checkpoint of this run has room on the disk")
    if not needed or not free or args.save_strategy != IntervalStrategy.STEPS or args.save_steps < 1:
        return
    saves = math.ceil(num_steps / args.save_steps)
    limit = args.save_total_limit
    most = min(saves, limit + 1) if limit is not None and limit > 0 else saves  # one more while it is written
    if most * needed > free:
        logger.warning(
            "%s has room for %d checkpoints of %s, and this run will have up to %d: later saves will fail; free space, or lower "
            "save_total_limit (now %s), which needs room for one more",
            folder, free // needed, size(needed), most, limit,
        )  # fmt: skip


class Checkpoints:
    """Saves the checkpoints of a run. Collective. `pushes`: gets the folder of each complete checkpoint if it is to be
    pushed; folders that are being pushed stay."""

    def __init__(
        self, args: HotSPaTrainingArguments, agreement: Callable[[], Agreement], pushes: "CheckpointPushes"
    ) -> None:
        self._args, self._agreement, self._pushes = args, agreement, pushes
        self.writer: CheckpointWriter | None = None  # the writer of the current folder; None before the first
        self._failed = 0  # saves in a row
        self._begun = self._written = 0
        self._last: CheckpointError | None = None
        self._best_before: str | None = None
        self._has_said = False

    def into(self, folder: Path) -> CheckpointWriter:
        if self.writer is not None and self.writer.folder.path != folder:
            self.writer.close()
            self.writer = None
        if self.writer is None:
            self.writer = CheckpointWriter(RunFolder(folder), self._agreement())
        return self.writer

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def poll(self, state: TrainerState) -> None:
        """Commits a background save that all ranks have written."""
        self._try(state, lambda writer: writer.poll())

    def finish(self, state: TrainerState) -> None:
        self._try(state, lambda writer: writer.finish())

    def leave_best(self, state: TrainerState) -> None:
        """At the end of training under `save_total_limit=1` removes all but the best, as the stock Trainer does
        afterwards, but safely: a partly removed folder cannot be taken for a checkpoint."""
        best, writer = state.best_model_checkpoint, self.writer
        if best and writer is not None and writer.folder.is_locked and self._args.save_total_limit == 1:
            writer.folder.rotate(Path(best), 1)

    def save(
        self,
        folder: Path,
        state: TrainerState,
        contents: Callable[[RunFolder], CheckpointContents],
        at_once: bool = False,  # whether the folder must exist on return, also with `hotspa_async_save`
        write_more: Callable[[Path], None] | None = None,
    ) -> None:
        """Writes `checkpoint-<step>`. A failure is logged, and raised only after too many in a row. `write_more`:
        called with the committed folder, to which it may add files (`at_once`)."""
        self._best_before = state.best_model_checkpoint
        if state.best_global_step:
            best = folder / checkpoint_name(state.best_global_step)
            exists = state.best_global_step == state.global_step or best.is_dir()
            if json.loads(self._agreement().texts(json.dumps(exists))[0]):
                state.best_model_checkpoint = str(best)
        self.into(folder)

        def kept() -> Collection[Path]:
            best = [Path(state.best_model_checkpoint)] if state.best_model_checkpoint else []
            return [*best, *self._pushes.under_way()]

        def save(writer: CheckpointWriter) -> None:
            taken = contents(writer.folder)
            writer.save(
                state.global_step, taken.write, taken.manifest, limit=self._args.save_total_limit, keep=kept,
                background=self._in_background(at_once), num_bytes=taken.num_bytes,
            )  # fmt: skip
            if write_more is not None:
                write_more(writer.folder.path / checkpoint_name(state.global_step))
                self.amend(state)

        self._begun += 1
        self._try(state, save)

    def begin(self) -> None:
        self._begun, self._written, self._last = 0, 0, None

    def check_written(self) -> None:
        """Raises the last error if checkpoints were due in this training, and none was written. The same on all ranks.
        Raises `CheckpointError`: as above."""
        if not self._begun or self._written or self._last is None:
            return
        raise CheckpointError(
            f"training has ended, and none of its {self._begun} saves succeeded; the last one: {self._last.what}",
            where=self._last.where,
            why="the run cannot be resumed; trainer.model holds the trained weights, but they are not on disk",
            fix=self._last.fix,
        )

    def _in_background(self, at_once: bool) -> bool:
        if not (self._args.hotspa_async_save and at_once):
            return self._args.hotspa_async_save
        if not self._has_said and self._args.process_index == 0:
            logger.warning("hotspa_async_save: methods of the trainer read or write the checkpoint, which is awaited")
        self._has_said = True
        return False

    def amend(self, state: TrainerState) -> None:
        """Takes the files of the checkpoint of this step as they are now, which overrides and callbacks may have
        changed. Does nothing except on rank 0."""
        writer = self.writer
        if writer is not None and self._args.process_index == 0 and writer.committed_step == state.global_step:
            writer.folder.amend(writer.folder.path / checkpoint_name(state.global_step))

    def _try(self, state: TrainerState, action: Callable[[CheckpointWriter], None]) -> None:
        writer = self.writer
        if writer is None:
            return
        before = writer.committed_step
        try:
            action(writer)
        except CheckpointError as error:
            state.best_model_checkpoint = self._best_before
            self._failed += 1
            self._last = error
            if isinstance(error, UnsavableError) or self._failed > self._args.hotspa_max_failed_saves:
                raise
            if self._args.process_index == 0:
                logger.warning("%s | training continues; failed saves in a row: %d", error, self._failed)
        else:
            if writer.committed_step is not None and writer.committed_step != before:
                self._failed = 0
                self._written += 1
                if self._args.push_to_hub:
                    self._pushes.push(writer.folder.path / checkpoint_name(writer.committed_step))


def tokenizer_of(trainer: HasRun) -> Any:
    return trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)


def _texts(trainer: HasRun, run: SavedRun, share: Share) -> dict[str, str]:
    """The JSON files that one rank writes for all; an error names what JSON cannot hold (`UnsavableError`)."""
    state, args = trainer.state, trainer.args

    def made(name: str, make: Callable[[], Any]) -> Any:
        try:
            json.dumps(value := make())
        except HotspaError:
            raise
        except Exception as failure:
            raise unsavable(name, Path(args.output_dir), failure) from failure
        return value

    callbacks: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            callbacks.setdefault(name, []).append(made(f"the state of the callback {name}", callback.state))
    state.stateful_callbacks = {n: states if len(states) > 1 else states[0] for n, states in callbacks.items()}
    of_trainer = made(manifest.TRAINER_STATE, lambda: dataclasses.asdict(state))
    texts = {
        manifest.TRAINER_STATE: json.dumps(of_trainer, indent=2, sort_keys=True) + "\n",
        manifest.TRAINING_ARGUMENTS: made(manifest.TRAINING_ARGUMENTS, args.to_json_string) + "\n",
    }
    if not args.save_only_model:
        assert trainer.optimizer is not None
        scheduler, kind = trainer.lr_scheduler, type(trainer.lr_scheduler).__name__

        saved: dict[str, Any] = {
            "optimizer": made(
                "the state of the optimizer", lambda: tensors.optimizer_to_json(trainer.optimizer, share)
            ),
            "scheduler": {
                "class": kind,
                "state": made(
                    f"the state of the scheduler {kind}", lambda: tensors.state_to_json(scheduler.state_dict())
                ),
            },
            "data": {"order": run.now.order, "epoch": state.epoch, "mini_batches": state.global_step},
            "hotspa": trainer.hotspa_state(),
        }
        if is_wrapped(trainer.model):
            saved["base model"] = run.base.of(trainer.switched.engine, trainer.model)
        texts[manifest.STATE] = json.dumps(saved) + "\n"
    return texts


def try_files(trainer: HasRun, run: SavedRun) -> None:
    """Writes the files of a save except tensors once, into a temporary folder, so that errors that would fail every
    save are raised before the first step. Collective. Raises `UnsavableError` if something cannot be written on any
    disk; it is named; `CheckpointError` if there is not room for one checkpoint; `HotspaError` if nodes do not share
    the output directory."""
    args, engine = trainer.args, trainer.switched.engine
    check_shared(Path(args.output_dir), engine.agreement)
    optimizer, adapted = None if args.save_only_model else trainer.optimizer, is_wrapped(trainer.model)
    vector = tensors.saved_vector(engine.description.vector, adapted)

    def measured() -> tuple[Share, int]:
        share = tensors.share_of(engine.master, optimizer, vector)
        with structure_only():
            files = ModelWeights(trainer.model, vector.specs, adapted)
        return share, rank_bytes(share, files, optimizer, args.process_index, args.world_size)

    share, own = engine.agreement.run("start of training", measured)
    needed = int(engine.agreement.gather([float(own)]).sum())
    if args.process_index:
        return
    check_run(args, needed, trainer.state.max_steps)
    _texts(trainer, run, share)
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_each(side_files(trainer.model, tokenizer_of(trainer)) | argument_files(args), Path(folder))
    except HotspaError:
        raise
    except Exception as failure:  # of the temporary folder's disk, which checkpoints may not use
        logger.info("files beside weights were not tried: %s", failure)


def check_shared(output: Path, agreement: Agreement) -> None:
    """Checks that all nodes see one output directory, into which each rank writes its share of a checkpoint.
    Collective. Raises `CheckpointError` on every rank if some do not."""
    nodes = nodes_of(agreement)
    if nodes.count == 1:
        return
    # a new name, so that no cache of a network file system reports it as missing
    mark = output / agreement.texts(f".hotspa-{uuid4().hex}")[0]
    with contextlib.suppress(OSError):  # a save reports the error
        if agreement.rank == 0:
            mark.touch()
    agreement.texts("it is there")
    seen = agreement.texts("yes" if mark.exists() else "no")
    agreement.texts("looked")
    if agreement.rank == 0:
        mark.unlink(missing_ok=True)
    blind = [rank for rank, sees in enumerate(seen) if sees == "no"]
    if seen[0] == "yes" and blind:
        names = ", ".join(map(str, blind))
        raise CheckpointError(
            f"output_dir is not one folder for all ranks: what rank 0 writes there is not seen by rank {names}{nodes.shown(blind)}",
            where=str(output),
            why="each rank writes its share of a checkpoint there, so that none could be saved",
            fix="name a folder of a file system that all nodes share, or give save_strategy=no",
        )


_WORK = ".hub"  # the folder in the output directory that holds the model of a checkpoint while it is pushed
_LAST = "last-checkpoint"


def hub_error(failure: Exception) -> HotspaError:
    return HotspaError(
        f"the hub cannot be reached, or returned an error: {type(failure).__name__}: {failure}",
        fix="check the network, hub_model_id and hub_token, or train with push_to_hub=False",
    )


class CheckpointPushes:
    """Pushes each checkpoint as `hub_strategy` says, in a thread of the main process; sets `push_in_progress`."""

    def __init__(self, trainer: HasRun) -> None:
        self._trainer = trainer
        self._pushed: Path | None = None

    @property
    def _is_pushing(self) -> bool:
        under_way = getattr(self._trainer, "push_in_progress", None)
        return under_way is not None and not under_way.is_done()

    def under_way(self) -> Collection[Path]:
        return [self._pushed] if self._pushed is not None and self._is_pushing else []

    def push(self, folder: Path) -> None:
        """Pushes an existing checkpoint by the trainer's method, which may be overridden."""
        self._trainer._push_from_checkpoint(str(folder))

    def begin(self, folder: Path) -> None:
        """Begins to push the parts of an existing checkpoint that `hub_strategy` names: its model, and perhaps the
        folder. As in the stock Trainer, a checkpoint is skipped while an earlier one is being pushed; `hub_always_push` waits
        for the earlier one. Not collective; only the main process does anything, and it never raises.
        """
        trainer = self._trainer
        if not trainer.is_world_process_zero() or trainer.args.hub_strategy == HubStrategy.END:
            return
        if self._is_pushing and not trainer.args.hub_always_push:
            return
        trainer._finish_current_push()
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        self._pushed = folder
        when = f"step {folder.name.rpartition('-')[2]}"  # an earlier step for a background save
        if trainer.args.save_strategy == SaveStrategy.EPOCH:
            when = f"epoch {int(trainer.state.epoch or 0)}"
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hotspa-hub")
        trainer.push_in_progress = PushInProgress([thread.submit(self._push, folder, f"Training in progress, {when}")])
        thread.shutdown(wait=False)

    def _push(self, checkpoint: Path, message: str) -> None:
        """In a thread: pushes the model of the checkpoint, in Hugging Face's format, and the checkpoint itself."""
        args, work = self._trainer.args, checkpoint.parent / _WORK
        upload = {"repo_id": self._trainer.hub_model_id, "token": args.hub_token, "revision": args.hub_revision}
        try:
            if work.exists():  # of a run that was killed
                Disk().remove(work)
            Disk().make_directory(work)
            export(checkpoint, work / "model", mode=0o700)
            # the card on the hub may be the user's; `push_to_hub` writes one at the end
            stock.hf_api().upload_folder(
                folder_path=str(work / "model"), commit_message=message, ignore_patterns=["README.md"], **upload
            )
            if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
                name = _LAST if args.hub_strategy == HubStrategy.CHECKPOINT else checkpoint.name
                # delete files of an earlier checkpoint under this name, which may be of other ranks
                stock.hf_api().upload_folder(
                    folder_path=str(checkpoint),
                    path_in_repo=name,
                    commit_message=f"{message}, checkpoint",
                    delete_patterns=["*"],
                    **upload,
                )
        except Exception as failure:  # any error of the disk, the network or the hub: training continues
            reason = f"{type(failure).__name__}: {failure}"
            logger.warning("checkpoint %s was not pushed to the hub: %s", checkpoint, reason)
        else:
            logger.info("%s was pushed to %s", checkpoint, self._trainer.hub_model_id)
        finally:
            shutil.rmtree(work, ignore_errors=True)
