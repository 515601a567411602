"""Finds the checkpoint that a run resumes from, and restores it. All ranks verify it together, and compare it with the
run's data. Any error is raised by all ranks, before anything is changed.
"""

import dataclasses
import hashlib
import json
import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from tqdm import tqdm
from transformers import PreTrainedModel, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length

from hf_hotspa.checkpoint import tensors
from hf_hotspa.checkpoint.format import manifest as manifests
from hf_hotspa.checkpoint.format.disk import read_object
from hf_hotspa.checkpoint.format.folder import check_step, checkpoints, latest_first
from hf_hotspa.checkpoint.format.manifest import Manifest
from hf_hotspa.checkpoint.model_files import acting, check_rewritten
from hf_hotspa.checkpoint.rng import set_random_state
from hf_hotspa.checkpoint.stock import StockCheckpoint, adapter_folder, is_stock, read_frozen, restore_adapter
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import load_weights
from hf_hotspa.errors import DamagedCheckpointError, HotspaError, ResumeError, printable
from hf_hotspa.model.model_check import frozen_digest
from hf_hotspa.model.weight_files import WeightFiles
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.wrapped_model import bare_model, is_wrapped
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.switched.model_object import structure_only
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Resumption:
    """A verified checkpoint to resume from."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]


def find_checkpoint(
    asked: Any, folder: Path, args: HotSPaTrainingArguments, agreement: Agreement, model: PreTrainedModel
) -> Resumption | StockCheckpoint:
    """The checkpoint to resume from, the same on all ranks; the main process decides. Collective. `asked`: True for the
    one with the highest step that verifies, as transformers orders them, or a path. `model`: the model object of the
    run; its weights are not read. Raises `ResumeError` on every rank if there is none; `DamagedCheckpointError` on
    every rank if the named one does not verify."""
    if asked is True:
        chosen = _newest(folder, args, agreement, model)
    else:
        chosen = agreement.run("resume", lambda: _verified(Path(asked), agreement, args.world_size, model))
    if args.process_index == 0:
        state = TrainerState.load_from_json(str(chosen.path / TRAINER_STATE_NAME))
        tqdm.write(printable(f"Resuming from {chosen.path}: after step {state.global_step} of {state.max_steps}"))
    return chosen


def _newest(
    folder: Path, args: HotSPaTrainingArguments, agreement: Agreement, model: PreTrainedModel
) -> Resumption | StockCheckpoint:
    names = json.loads(agreement.texts(json.dumps([path.name for path in checkpoints(folder)]))[0])
    for path in (folder / name for name in names):
        resumption, reason = None, ""
        try:
            resumption = _verified(path, agreement, args.world_size, model)
        except HotspaError as error:  # not raised: another checkpoint may verify
            reason = str(error)
        reasons = [text for text in agreement.texts(reason) if text]
        if resumption is not None and not reasons:
            if args.process_index == 0 and (latest := latest_first(checkpoints(folder))[0]) != path:
                logger.warning("%s has the highest step and is resumed from; %s was written later", path, latest.name)
            return resumption
        if args.process_index == 0:
            logger.warning("%s is skipped: %s", path, reasons[0])
    raise ResumeError(
        f"No valid checkpoint found in output directory ({folder})",  # the stock Trainer's text, as below
        why=f"none of {len(names)} can be used; see the warnings" if names else None,
        fix="start without resume_from_checkpoint, or check output_dir",
    )


def _verified(
    path: Path, agreement: Agreement, world_size: int, model: PreTrainedModel
) -> Resumption | StockCheckpoint:
    """Opens a checkpoint that can be resumed from. The ranks share the hashing; each may find another error."""
    if not path.is_dir():
        raise ResumeError(
            f"Can't find a valid checkpoint at {path}",
            why="there is no such folder",
            fix="check the path; resume_from_checkpoint=True takes the newest of output_dir",
        )
    if is_stock(path):
        return StockCheckpoint.open(path, _adapter(model))
    manifest = _verified_manifest(path, agreement, world_size, model)
    if not manifest.resumable:  # the model only (save_only_model), as the stock Trainer writes it
        return StockCheckpoint.open(path, _adapter(model))
    return Resumption(path, manifest, read_object(path, manifest.located(manifests.STATE)))


def _adapter(model: Any) -> str | None:
    return acting(model) if is_wrapped(model) else None


def _verified_manifest(path: Path, agreement: Agreement, world_size: int, model: PreTrainedModel) -> Manifest:
    """The manifest of a checkpoint of ours whose files are complete. The ranks share the hashing."""
    manifest = manifests.read_manifest(path)
    check_step(path, manifest)
    with structure_only():
        rewritten = partial(check_rewritten, path, manifest, model)
        manifests.verify_files(path, manifest, agreement.rank, world_size, rewritten)
    return manifest


def next_pass(place: Mapping[str, Any], epoch: int, ended: bool = False) -> dict[str, Any]:
    """The state of a stream at the beginning of a pass: `epoch`, the `batches` read in it, and for each earlier pass
    how many batches were `read`, or asked for (None: all), because the order of a stream may depend on that. `place`:
    the previous state; empty at the start. `ended`: whether one more batch was asked for than the pass had."""
    read = [*place["read"], place["batches"] + ended] if place else []
    return {"epoch": epoch, "batches": 0, "read": read}


@dataclasses.dataclass
class Progress:
    """Where a training is."""

    is_ours: bool = False  # whether `train()` of ours is running
    resumption: Resumption | StockCheckpoint | None = None
    given_state: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # of `load_hotspa_state`, until an engine takes it
    order: dict[str, Any] = dataclasses.field(default_factory=dict)  # `data_order`
    place: dict[str, Any] = dataclasses.field(default_factory=lambda: next_pass({}, 0))
    steps_of_pass: int = 1
    pass_has_ended: bool = False  # one more batch was asked for than the pass had
    saves_were_tried: bool = False
    read_for: int = -1  # the step whose batches were read last
    skips: bool = False  # whether the current mini-batch is skipped
    loss: float = 0.0  # of the current mini-batch, if some may be skipped
    written: Path | None = None  # the checkpoint, while overrides may add files to it


def data_order(
    args: HotSPaTrainingArguments, mini_batch_size: int, table: SequenceTable | None, longest: int
) -> dict[str, Any]:
    """The facts that decide which sequences make up which mini-batch, as plain data. `mini_batch_size`: rows of an
    optimizer step, over all ranks. `longest`: the longest sequence of the buckets."""
    order: dict[str, Any] = {
        "mini_batch_size": mini_batch_size,
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "train_sampling_strategy": str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy)),
        "dataloader_drop_last": args.dataloader_drop_last,
        "hotspa_overlong": args.hotspa_overlong,
    }
    if table is not None:
        arrays = (table.lengths, table.label_counts, table.cuts)
        digest = hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in arrays)).hexdigest()
        order |= {"rows of the dataset": len(table), "lengths and labels of the rows": digest[:16]}
    if args.hotspa_overlong != "error":
        order["longest sequence of the buckets"] = longest
    return order


def check_data_order(
    resumption: Resumption | StockCheckpoint, order: dict[str, Any], loader: Any, args: HotSPaTrainingArguments
) -> None:
    """Checks that a run has the same mini-batches as the checkpoint that it resumes from. Raises `ResumeError` if it
    has others. `order`: the run's (`data_order`). `loader`: its train data loader."""
    if isinstance(resumption, StockCheckpoint):
        if has_length(loader):  # of a stream it is unknown
            accumulation: int = vars(args)["gradient_accumulation_steps"]
            size, of_step = args.per_device_train_batch_size, order["mini_batch_size"]
            rows, drop_last = _rows_of_pass(loader, size), order["dataloader_drop_last"]
            resumption.check_order(rows, len(loader), accumulation, size, of_step, drop_last)
        return
    saved = resumption.state.get("data", {}).get("order") or {}
    changed = [key for key in {**order, **saved} if order.get(key) != saved.get(key)]
    if changed:
        key = changed[0]
        raise ResumeError(
            f"{key} is {order.get(key)!r}, and was {saved.get(key)!r} when the checkpoint was written",
            where=str(resumption.path),
            why="sequences would be trained twice or not at all",
            fix=f"{_as_it_was(key, saved.get(key), args)}, or set hotspa_allow_data_order_change=True ({len(changed)} such changes)",
        )


def keep_rows_a_step(resumption: Any, args: HotSPaTrainingArguments, dataset: Any) -> None:
    """With another number of processes than the checkpoint's and the same rows per process, accumulates more or fewer
    batches, so that each step has the rows that it would have had. Does nothing if no number of batches gives that.

    Not where a process depends on how many there are or on what it accumulates: streams, batches sorted by length,
    generation (`steps_per_generation`) and KTO's estimates (`desirable_weight`).
    """
    if not isinstance(resumption, Resumption) or args.hotspa_mini_batch_size is not None or not has_length(dataset):
        return
    order = resumption.state.get("data", {}).get("order") or {}
    saved, before = order.get("mini_batch_size"), resumption.manifest.world_size
    of_batch, now = args.per_device_train_batch_size, args.world_size
    strategy = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
    divided = args.accelerator_config.split_batches or args.accelerator_config.dispatch_batches
    own = hasattr(args, "steps_per_generation") or hasattr(args, "desirable_weight")
    if before == now or not isinstance(saved, int) or strategy not in ("random", "sequential") or divided or own:
        return
    accumulation, rest = divmod(saved, of_batch * now)
    count = len(dataset) // of_batch if args.dataloader_drop_last else -(-len(dataset) // of_batch)
    whole = count % before == count % now == 0  # else the end of a pass has other rows
    if rest or not accumulation or saved == args.hotspa_rows_a_step or not whole:
        return
    if args.process_index == 0:
        logger.warning(
            "resuming a run of %d processes on %d: gradient_accumulation_steps is now %d, so that each step has its %d rows",
            before, now, accumulation, saved,
        )  # fmt: skip
    args.gradient_accumulation_steps = accumulation


def _as_it_was(key: str, saved: object, args: HotSPaTrainingArguments) -> str:
    if key != "mini_batch_size" or not isinstance(saved, int):
        return "set it as it was"
    if args.hotspa_mini_batch_size is not None:
        return f"set hotspa_mini_batch_size={saved}"
    accumulation: int = vars(args)["gradient_accumulation_steps"]
    of_batch, rest = divmod(saved, args.world_size * accumulation)
    return f"set per_device_train_batch_size={of_batch}" if not rest else f"set hotspa_mini_batch_size={saved}"


def _rows_of_pass(loader: object, per_device: int) -> int | None:
    """Rows that a pass trains, by the loader's sampler, which may repeat or leave out rows; None if unknown.
    `per_device`: rows of a batch that a process trains; a loader of TRL reads the rows of several."""
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # in accelerate's, which divides batches over processes
    sampler = getattr(batches, "sampler", None)
    if sampler is None or not has_length(sampler):
        return None
    return len(sampler) * per_device // (getattr(batches, "batch_size", None) or per_device)


class BaseDigest:
    """The digest of the frozen weights beside an adapter, computed once per engine. Main process."""

    def __init__(self) -> None:
        self._known: tuple[tuple[weakref.ref[HotSPaEngine], int], str] | None = None

    def of(self, engine: HotSPaEngine, model: PreTrainedModel) -> str:
        now = weakref.ref(engine), engine.master.frozen_version
        if self._known is None or self._known[0] != now:
            # not by `requires_grad`: callbacks may have frozen some, whose values are old here
            specs = [spec for spec in engine.description.vector.specs if spec.trainable]
            trained = {name for spec in specs for name in (spec.name, *spec.tied_names)}
            self._known = now, engine.initial.base_digest or frozen_digest(model, trained)
        return self._known[1]


class Restorer:
    """Restores saved state into a run: its `SwitchedModel` and model object. Collective."""

    def __init__(self, switched: SwitchedModel, model: PreTrainedModel, base: BaseDigest) -> None:
        self._engine, self._switched, self._model, self._base = switched.engine, switched, model, base

    @contextmanager
    def naming_other_settings(self, optimizer: Optimizer, speaks: bool) -> Iterator[None]:
        """Warns if the checkpoint's settings of the optimizer differ from the run's."""
        before = [dict(group) for group in optimizer.param_groups]
        yield
        for old, group in zip(before, optimizer.param_groups, strict=True):
            other = {k for k in old if k not in ("params", "lr") and old[k] != group[k]}
            if other and speaks:
                text = ", ".join(f"{key} {group[key]} (not {old[key]})" for key in sorted(other))
                logger.warning("the checkpoint's optimizer settings are used, as in the stock Trainer: %s", text)

    def weights(self, path: Path, agreement: Agreement, world_size: int) -> None:
        """Restores the weights of any kind of checkpoint. Raises `HotspaError` on every rank if it is damaged, or of
        another model."""

        def verified() -> Manifest | None:
            return None if is_stock(path) else _verified_manifest(path, agreement, world_size, self._model)

        manifest = agreement.run("load_best_model_at_end", verified)
        if manifest is not None and manifest.has_masters:
            self.checkpoint(path, manifest)
        else:
            self._model_files(path, agreement)

    def checkpoint(
        self, path: Path, manifest: Manifest, state: dict[str, Any] | None = None, optimizer: Optimizer | None = None
    ) -> None:
        """Restores the master store and, given the state, the optimizer. Raises `HotspaError` on every rank if the
        checkpoint is damaged, or of another model."""
        self._engine.agreement.run(
            "resume",
            lambda: self._read(path, manifest, state, optimizer),
            otherwise=lambda failure: _damaged(failure, path),
        )
        self._switched.weights_are(current=False)

    def _read(self, path: Path, manifest: Manifest, state: dict[str, Any] | None, optimizer: Optimizer | None) -> None:
        engine = self._engine
        adapted = engine.description.added is not None
        tensors.check_model(manifest, tensors.saved_vector(engine.description.vector, adapted), str(path))
        if state is None:
            tensors.restore(path, manifest, engine.master, None, None)
        else:
            # the checkpoint holds a digest of an adapter's base; only the main process compares it
            base = adapted and engine.agreement.rank == 0
            if base and state.get("base model") != self._base.of(self._engine, self._model):
                raise ResumeError(
                    "the frozen weights of the model are not those that the checkpoint's adapter was trained beside",
                    where=str(path),
                    why="a checkpoint of an adapter holds the trained weights, and of the base model a digest",
                    fix="load the same base model in the same dtype, and make the adapter with the same config and seed",
                )
            tensors.restore(path, manifest, engine.master, optimizer, state["optimizer"])
        buffers = tensors.saved_tensors(path, manifest, manifests.BUFFERS)
        tensors.copy_buffers(buffers, [bare_model(self._model)[0], *engine.part_models])

    def _model_files(self, folder: Path, agreement: Agreement) -> None:
        """Restores the master store and the buffers from a Hugging Face model or adapter folder."""
        engine = self._engine
        if (added := engine.description.added) is not None:
            saved, master = adapter_folder(folder, added.name), engine.master
            engine.agreement.run(
                "resume", lambda: restore_adapter(WeightFiles(saved, manifests.ADAPTER_WEIGHTS), master)
            )
            frozen = engine.agreement.run("resume", lambda: read_frozen(self._model, folder, added.name))
            if frozen:
                master.fill(frozen)
        else:
            with structure_only():
                load_weights(folder, self._model, engine.master, agreement)
            tensors.copy_buffers(dict(bare_model(self._model)[0].named_buffers()), engine.part_models)
        self._switched.weights_are(current=False)

    def stock(self, stock: StockCheckpoint, optimizer: Optimizer, scheduler: Any, agreement: Agreement) -> None:
        """Restores weights, optimizer and scheduler from a checkpoint of the stock Trainer. Raises `ResumeError` on
        every rank if the run cannot resume exactly from it."""
        self._model_files(stock.path, agreement)
        if not stock.optimizer:
            if agreement.rank == 0:
                logger.warning("%s has no state of the optimizer: optimizer and scheduler start anew", stock.path)
            return

        def restored() -> None:
            stock.restore_optimizer(optimizer, self._engine.master)
            stock.check_scheduler(scheduler)
            scheduler.load_state_dict(dict(stock.scheduler))

        self._engine.agreement.run("resume", restored)


def _damaged(failure: Exception, path: Path) -> HotspaError:
    if not isinstance(failure, KeyError | TypeError | ValueError | RuntimeError):
        raise failure
    return DamagedCheckpointError(f"{type(failure).__name__}: {failure}", where=str(path))


def load_scheduler(resumption: Resumption, scheduler: Any) -> None:
    """Restores the learning rates. Raises `ResumeError` if the checkpoint has the state of another kind of scheduler;
    `DamagedCheckpointError` if it has none."""
    try:
        saved = resumption.state["scheduler"]
        name, state = saved["class"], saved["state"]
        if name != type(scheduler).__name__:
            raise ResumeError(
                f"the checkpoint holds the state of a {name}, and the run has a {type(scheduler).__name__}",
                where=str(resumption.path),
                fix="resume with the same lr_scheduler_type",
            )
        scheduler.load_state_dict(tensors.state_from_json(state))
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{manifests.STATE!r} holds no scheduler state: {type(error).__name__}: {error}", where=str(resumption.path)
        ) from error


def load_random_state(resumption: Resumption | StockCheckpoint, rank: int, agreement: Agreement) -> None:
    """Restores the generators of this rank, or, with another number of ranks, of rank `r mod saved ranks`. Raises
    `HotspaError` on every rank for a checkpoint of the stock Trainer: they cannot be read."""
    if isinstance(resumption, StockCheckpoint):
        if not agreement.run("resume", lambda: resumption.set_random_state(rank)) and rank == 0:
            text = "%s holds no random states: random numbers differ from an uninterrupted run"
            logger.warning(text, resumption.path)
        return
    world = resumption.manifest.world_size
    name = resumption.manifest.located(manifests.rank_state(rank % world, world))
    set_random_state(read_object(resumption.path, name), str(resumption.path / name))
