"""How `HotSPaTrainer` goes on from a checkpoint, and loads the best one.

`ResumeMixin` replaces the methods of `transformers.Trainer` that read pickles. It promises: what is resumed from was
verified; the same layout goes on bit for bit, another one from the same bits; nothing that would change the order of
the data goes unnoticed; a finished run stays as it is. Checkpoints of the stock Trainer are gone on from, too.
"""

import dataclasses
import json
import logging
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hf_hotspa.checkpoint.format.disk import read_object
from hf_hotspa.checkpoint.format.folder import check_step, checkpoints
from hf_hotspa.checkpoint.format.manifest import STATE, Manifest, rank_state, read_manifest, verify_files
from hf_hotspa.checkpoint.rng import set_random_state
from hf_hotspa.checkpoint.stock import StockCheckpoint, is_stock
from hf_hotspa.checkpoint.tensors import bare_optimizer, check_model, restore, restore_buffers, saved_vector
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import DamagedCheckpointError, HotspaError, ResumeError
from hf_hotspa.parallel import backends
from hf_hotspa.parallel.adapters import frozen_digest
from hf_hotspa.parallel.agreement import Agreement, Mailbox
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.resuming_stock import StockResumeMixin
from hf_hotspa.trainer.row_order import order_seed
from hf_hotspa.trainer.same_data import table_facts
from hf_hotspa.trainer.stream_place import StreamProgress

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Resumption:
    """A verified checkpoint to go on from."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]


def data_order(args: HotSPaTrainingArguments, loader: Any, longest: int) -> dict[str, Any]:
    """What decides which sequences make up which mini-batch, as plain data.

    Args:
        loader: The train data loader; of a stream nothing is known beforehand.
        longest: The longest sequence of the buckets.
    """
    order: dict[str, Any] = {
        "mini_batch_size": args.hotspa_mini_batch_size,
        "seed": order_seed(args),
        "train_sampling_strategy": str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy)),
        "dataloader_drop_last": args.dataloader_drop_last,
        "hotspa_overlong": args.hotspa_overlong,
    }
    planner = getattr(loader, "planner", None)
    if planner is not None:
        order |= table_facts(planner.table)
    if args.hotspa_overlong != "error":
        order["longest sequence of the buckets"] = longest
    return order


def _damaged(failure: Exception, path: Path) -> HotspaError:
    """For what a state.json of somebody else's making leads to; any other failure is raised as it is."""
    if not isinstance(failure, KeyError | TypeError | ValueError | RuntimeError):
        raise failure
    return DamagedCheckpointError(f"{type(failure).__name__}: {failure}", where=str(path))


class ResumeMixin(StockResumeMixin):
    """The reading side of the checkpoints of `HotSPaTrainer`."""

    args: HotSPaTrainingArguments
    engine: HotSPaEngine | None
    _resumption: Resumption | StockCheckpoint | None = None
    _data_order: dict[str, Any] | None = None
    _stream_progress: StreamProgress | None
    _steps_a_pass = sys.maxsize
    """The most optimizer steps of a pass over the data set."""
    _base_known: tuple[tuple[weakref.ref[HotSPaEngine], int], str] | None = None

    if TYPE_CHECKING:

        def _update_model(self) -> None: ...

    def _agreement(self) -> Agreement:
        """Over the host, also before the engine exists."""
        if self.args.world_size == 1 or not dist.is_initialized():
            return Agreement(None, 0)
        if not hasattr(self, "_host_group"):
            self._host_group = backends.world_for_host_tensors()
            self._host_mailbox = Mailbox(self.args.process_index, self.args.world_size)
        return Agreement(self._host_group, self.args.process_index, self._host_mailbox)

    def _init_training_state(self, max_steps: int, num_update_steps_per_epoch: int, *args: Any) -> tuple[int, int]:
        """The pass to go on in, and the mini-batches that were trained in it. Of a stream, whose length nobody may know,
        as the checkpoint says. Collective where a stream is resumed."""
        self._steps_a_pass = num_update_steps_per_epoch
        begin: tuple[int, int] = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args)
        if self._stream_progress is None or self._resumption is None:
            return begin
        progress, resumption = self._stream_progress, self._resumption
        state = resumption.state if isinstance(resumption, Resumption) else {}
        return self._agreement().run(
            "resume",
            lambda: progress.go_on(
                state.get("hotspa", {}).get("stream"),
                skip=not self.args.ignore_data_skip,
                compare=not self.args.hotspa_allow_data_order_change,
            ),
        )

    def _run_epoch(self, **kwargs: Any) -> None:
        if self._resumption is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # a finished run: stock Trainer makes one step more
            return
        super()._run_epoch(**kwargs)

    def _find_checkpoint(self, asked: Any) -> Resumption | StockCheckpoint:
        """The checkpoint to go on from, the same on all ranks."""
        agreement = self._agreement()
        if asked is not True:
            return agreement.run("resume", lambda: self._verified(Path(asked), agreement))
        folder = Path(self._get_output_dir(None))
        names = json.loads(agreement.texts(json.dumps([path.name for path in checkpoints(folder)]))[0])
        for path in (folder / name for name in names):
            resumption, reason = None, ""
            try:
                resumption = self._verified(path, agreement)
            except HotspaError as error:  # raised by nobody: another checkpoint may do
                reason = str(error)
            reasons = [text for text in agreement.texts(reason) if text]
            if resumption is not None and not reasons:
                if self.is_world_process_zero():
                    logger.info("resuming from %s", path)
                return resumption
            if self.is_world_process_zero():
                logger.warning("%s is skipped: %s", path, reasons[0])
        raise ResumeError(
            f"No valid checkpoint found in output directory ({folder})",  # the stock Trainer's words, as below
            why=f"none of {len(names)} can be used; see the warnings" if names else None,
            fix="start without resume_from_checkpoint, or check output_dir",
        )

    def _verified(self, path: Path, agreement: Agreement) -> Resumption | StockCheckpoint:
        """A checkpoint that can be gone on from. The ranks share the hashing; each may find something else wrong."""
        if not path.is_dir():
            raise ResumeError(
                f"Can't find a valid checkpoint at {path}",
                why="there is no such folder",
                fix="check the path; resume_from_checkpoint=True takes the newest of output_dir",
            )
        if is_stock(path):
            return StockCheckpoint.open(path)
        manifest = read_manifest(path)
        check_step(path, manifest)
        verify_files(path, manifest, agreement.rank, self.args.world_size)
        if not manifest.resumable:
            raise ResumeError(
                "the checkpoint holds the model only (save_only_model)",
                where=str(path),
                fix="start a new run with it as the model, and no resume_from_checkpoint",
            )
        return Resumption(path, manifest, read_object(path, manifest.located(STATE)))

    def _check_data_order(self, loader: Any) -> None:
        """Called with every new train data loader; raises on every rank when a resumed run would see other data."""
        assert self.engine is not None
        self._data_order = data_order(self.args, loader, max(bucket.longest for bucket in self.engine.buckets))
        if self._resumption is None or self.args.hotspa_allow_data_order_change:
            return
        if isinstance(self._resumption, StockCheckpoint):
            self._check_stock_order(self._resumption, loader)
            return
        saved = self._resumption.state.get("data", {}).get("order") or {}
        changed = [key for key in {**self._data_order, **saved} if self._data_order.get(key) != saved.get(key)]
        if changed:
            key = changed[0]
            raise ResumeError(
                f"{key} is {self._data_order.get(key)!r}, and was {saved.get(key)!r} when the checkpoint was written",
                where=str(self._resumption.path),
                why="sequences would be trained twice or not at all",
                fix=f"set it as it was, or say hotspa_allow_data_order_change=True ({len(changed)} such changes)",
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the weights go into the master store, together with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Weights, optimizer, scheduler, and what the strategies' choice has learned."""
        if checkpoint is None:
            return
        resumption, engine = self._resumption, self.engine
        assert resumption is not None
        assert engine is not None
        assert self.optimizer is not None
        before = [dict(group) for group in self.optimizer.param_groups]
        if isinstance(resumption, StockCheckpoint):
            self._restore_stock(resumption)
        else:
            self._read(resumption.path, resumption.manifest, resumption.state)
            engine.agreement.run("resume", lambda: self._load_states(resumption))
        for old, group in zip(before, self.optimizer.param_groups, strict=True):
            other = {k for k in old if k not in ("params", "lr") and old[k] != group[k]}
            if other and self.is_world_process_zero():
                text = ", ".join(f"{key} {group[key]} (not {old[key]})" for key in sorted(other))
                logger.warning("the checkpoint's optimizer settings go on, as in the stock Trainer: %s", text)

    def _load_states(self, resumption: Resumption) -> None:
        self._load_scheduler(resumption)
        load_state = getattr(self, "load_hotspa_state", None)
        if load_state is not None:
            load_state(resumption.state.get("hotspa", {}))

    def _load_scheduler(self, resumption: Resumption) -> None:
        try:
            saved = resumption.state["scheduler"]
            name, state = saved["class"], saved["state"]
            if name != type(self.lr_scheduler).__name__:
                raise ResumeError(
                    f"the checkpoint holds the state of a {name}, and the run has a {type(self.lr_scheduler).__name__}",
                    where=str(resumption.path),
                    fix="go on with the same lr_scheduler_type",
                )
            self.lr_scheduler.load_state_dict(state)
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"{STATE!r} holds no scheduler state: {type(error).__name__}: {error}", where=str(resumption.path)
            ) from error

    def _read(self, path: Path, manifest: Manifest, state: dict[str, Any] | None) -> None:
        """Fills the master store and, given the state, the optimizer. Raises on all ranks."""
        engine = self.engine
        assert engine is not None
        engine.agreement.run(
            "resume",
            lambda: self._read_here(engine, path, manifest, state),
            otherwise=lambda failure: _damaged(failure, path),
        )
        self._source.goes_stale(self.model)

    def _read_here(self, engine: HotSPaEngine, path: Path, manifest: Manifest, state: dict[str, Any] | None) -> None:
        """What this rank reads of a checkpoint."""
        adapted = engine.description.adapters is not None
        check_model(manifest, saved_vector(engine.description.vector, adapted), str(path))
        if state is not None and adapted and self.is_world_process_zero():
            self._check_base(state.get("base model"), str(path))  # the main process's is the one that counts
        optimizer = bare_optimizer(self.optimizer) if state is not None and self.optimizer is not None else None
        restore(path, manifest, engine.master, optimizer, state["optimizer"] if state is not None else None)
        restore_buffers(path, manifest, [self.model, *(p.replica.model for p in engine.phases.values())])

    def _base_digest(self) -> str:
        """The digest of the frozen weights beside an adapter; computed once for every engine. Main process."""
        assert self.engine is not None
        now = weakref.ref(self.engine), self.engine.master.frozen_version
        if self._base_known is None or self._base_known[0] != now:
            self._base_known = now, frozen_digest(self.model)
        return self._base_known[1]

    def _check_base(self, saved: Any, where: str) -> None:
        """Refuses an adapter's checkpoint beside another base model: it holds a digest of that only."""
        if saved != self._base_digest():
            raise ResumeError(
                "the frozen weights of the model are not those that the checkpoint's adapter was trained beside",
                where=where,
                why="a checkpoint of an adapter holds the trained weights, and of the base model a digest",
                fix="load the same base model in the same dtype, and make the adapter with the same config and seed",
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The generators of this rank, or, with another number of ranks, of rank `r mod saved ranks`."""
        if checkpoint is None:
            return
        resumption = self._resumption
        assert resumption is not None
        if isinstance(resumption, StockCheckpoint):
            self._set_stock_random_state(resumption)
            return
        world = resumption.manifest.world_size
        name = resumption.manifest.located(rank_state(self.args.process_index % world, world))
        set_random_state(read_object(resumption.path, name), str(resumption.path / name))

    def _load_best_model(self) -> None:
        """The weights of the best checkpoint, into the master store and the model. Collective."""
        best = self.state.best_model_checkpoint
        assert best is not None
        agreement, path = self._agreement(), Path(best)
        logger.info("loading the best model from %s (score: %s)", best, self.state.best_metric)

        def verified() -> Manifest | None:
            if is_stock(path):
                return None
            manifest = read_manifest(path)
            verify_files(path, manifest, agreement.rank, self.args.world_size)
            return manifest

        manifest = agreement.run("load_best_model_at_end", verified)
        if manifest is not None and manifest.has_masters:
            self._read(path, manifest, None)
        else:
            self._read_model_files(path)
        self._update_model()
