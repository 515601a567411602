"""`HotSPaTrainer`: a `transformers.Trainer` over a `SwitchedModel`.

`SwitchedMixin` stands directly in front of a library's Trainer ("the class behind", next in the method resolution
order), behind the overrides of a program. It replaces the model by a `SwitchedModel`, as accelerate would by
`DistributedDataParallel`. Everything else comes from the class behind. Overrides are in the order of the loop's calls;
each calls `super()`. Methods that cannot are in `Replaced`, directly in front of `transformers.Trainer`.
"""

import atexit
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from importlib import import_module
from itertools import islice
from operator import is_not
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import SaveStrategy, TrainOutput

from hf_hotspa.callbacks.progress import PhaseProgressCallback, SettingsCallback, is_watched
from hf_hotspa.callbacks.step_reports import ReportCallback, SwitchOverheadCallback, TraceCallback
from hf_hotspa.checkpoint.format.manifest import rank_columns
from hf_hotspa.checkpoint.stock import StockCheckpoint
from hf_hotspa.checkpoint.tensors import saved_tensors
from hf_hotspa.data import collator as collating
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import has_weights
from hf_hotspa.engine.master import bare_optimizer
from hf_hotspa.errors import HotspaError, NonFiniteError, printable
from hf_hotspa.model.model_check import check_hooks
from hf_hotspa.model.model_kind import refuse_other_models
from hf_hotspa.parallel.loss import TokenSlice
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.report import StepReport
from hf_hotspa.switched.model import CUT, SwitchedModel
from hf_hotspa.switched.model_object import as_built, structure_only
from hf_hotspa.trainer import events, preemption, resuming, start
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments, completed, named
from hf_hotspa.trainer.batches import Rows
from hf_hotspa.trainer.checkpoints import CheckpointPushes, Checkpoints, hub_error, try_files
from hf_hotspa.trainer.events import CallbackEvents
from hf_hotspa.trainer.given_arguments import check_values, refuse_longer_rows
from hf_hotspa.trainer.model_source import ModelSource
from hf_hotspa.trainer.optimizers import DeepSpeedLR, MasterOptimizer
from hf_hotspa.trainer.preemption import Preemption, SkippedMiniBatches
from hf_hotspa.trainer.replaced import Replaced, inserted, library_of, passed_over, replaced_behind, unless_stock
from hf_hotspa.trainer.resuming import Resumption
from hf_hotspa.trainer.run_facts import run_facts
from hf_hotspa.trainer.same_run import SameRun

_Base: Any = Trainer if TYPE_CHECKING else object


class SwitchedMixin(_Base):
    """Makes the Trainer class behind it train a `SwitchedModel`. See `HotSPaTrainer`."""

    args: HotSPaTrainingArguments
    callback_handler: CallbackEvents
    data_collator: Any
    lr_scheduler: Any
    hub_model_id: str | None
    last_report: StepReport | None = None
    _hotspa_prepares = True  # opens a model folder, and prepares rows of text; else the class behind does
    _hotspa_refusal: HotspaError | None = None
    _hotspa_model: SwitchedModel | None = None
    _hotspa_trains = False
    _hotspa_read_for = -1  # the step whose batches were read last

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        replaced_behind(cls)

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, *rest: Any,
        token_loss: Callable[[TokenSlice], Tensor] | None = None, loss_columns: Sequence[str] = (), **kwargs: Any,
    ) -> None:  # fmt: skip
        kwargs = named(rest, kwargs, super().__init__)
        self.args = args = completed(args)
        self._hotspa_watchers, self._hotspa_ranks, self._hotspa_run = start.Watchers(), start.Ranks(args), SameRun(self)
        agreement = self._hotspa_ranks.agreement()
        given = {**kwargs, "model": model, "token_loss": token_loss, "loss_columns": loss_columns}
        self._hotspa_loss = start.check_given(self, given, agreement)
        self._hotspa_ranks.make_output_dir()
        self._hotspa_source, self._hotspa_base = ModelSource(args), resuming.BaseDigest()
        self._hotspa_pushes, self._hotspa_optimizer = CheckpointPushes(self), MasterOptimizer(self)
        self._hotspa_checkpoints = Checkpoints(args, self._hotspa_ranks.agreement, self._hotspa_pushes)
        self._hotspa_flags, self._hotspa_rows = events.Flags(self), Rows(self, loss_columns)
        self._hotspa_skipped = SkippedMiniBatches(args.hotspa_skip_non_finite)
        self._hotspa_preemption = Preemption(args)
        self._hotspa_resumption: Resumption | StockCheckpoint | None = None
        self._hotspa_state, self._hotspa_order = dict[str, Any](), dict[str, Any]()
        self._hotspa_place, self._hotspa_pass = resuming.next_pass({}, 0), 1
        self._hotspa_has_ended = self._hotspa_skips = self._hotspa_began = self._hotspa_tried = False
        self._hotspa_step_loss = 0.0
        model = start.opened(self, model, kwargs, agreement)
        with self._hotspa_ranks.telling(self, "making the trainer"):
            super().__init__(model, args, **kwargs)
        atexit.register(start.leave_default_group)
        if self._hotspa_refusal is not None:
            return
        if kwargs.get("data_collator") is None and collating.is_stock(self.data_collator):
            self._hotspa_rows.default_collator = self.data_collator
        self._hotspa_add_callbacks()
        self.neftune_noise_alpha = None  # the engine adds the noise; a hook on the model object has no effect

    def create_accelerator_and_postprocess(self) -> None:
        """As in the class behind, which calls it in its constructor.

        Raises:
            UnsupportedError: ours has not run.
        """
        if "_hotspa_ranks" not in vars(self):
            raise passed_over(type(self), "__init__")
        super().create_accelerator_and_postprocess()

    def _hotspa_check(self, given: Mapping[str, Any]) -> None:
        """Rejects what a trainer of a library cannot be given. Not collective."""

    def _hotspa_add_callbacks(self) -> None:
        args = self.args
        if args.hotspa_deepspeed is not None and args.process_index == 0:
            print(printable(str(args.hotspa_deepspeed)), flush=True)
        preemption.take_sigterm_from(self.callback_handler.callbacks)
        handler = self.callback_handler = CallbackEvents(self.callback_handler, self._hotspa_show, self._hotspa_apart)
        handler.after = self._hotspa_take
        handler.add_own(SettingsCallback())
        handler.add_own(SwitchOverheadCallback(print_table=args.hotspa_phase_table))
        if args.hotspa_report:
            handler.add_own(ReportCallback(steps=args.hotspa_trace_steps), instead=TraceCallback)
        if is_watched() and not args.disable_tqdm:
            handler.add_own(PhaseProgressCallback())

    # -- the model ----------------------------------------------------------------------------------------------------

    @property
    def switched(self) -> SwitchedModel:
        """The `SwitchedModel` that is trained; made now if missing. Collective then."""
        switched = self._hotspa_model
        return switched if switched is not None and switched.module is self.model else self._hotspa_start()

    @property
    def engine(self) -> HotSPaEngine | None:
        """The `HotSPaEngine`; None before the start of `train()`."""
        return self._hotspa_model.engine if self._hotspa_model is not None else None

    @property
    def preempted(self) -> bool:
        """Whether the last `train()` ended because of SIGTERM or Ctrl-C, with training left to do."""
        return self._hotspa_preemption.agreed

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The model of `model_init`.

        Raises:
            HotspaError: it cannot be trained.
        """
        model: nn.Module = super().call_model_init(trial)
        try:
            refuse_other_models(model)
        except start.STOCK_TRAINS as reason:
            start.leave_to_stock(self, reason)
        return model

    def _hotspa_apart(self) -> AbstractContextManager[None]:
        """Inside, `trainer.model` computes by itself: code may run on one rank alone."""
        return nullcontext() if self._hotspa_model is None else self._hotspa_model.routed(False)

    def materialize(self) -> PreTrainedModel:
        """Gives `trainer.model` the current weights, which it otherwise has at certain events only. A model of a folder
        gets memory for them, on the CPU of every rank. Collective.

        Returns:
            `trainer.model`; a model of a folder is a normal model from now on.

        Raises:
            HotspaError: on every rank: the engine cannot be started.
        """
        if not has_weights(self.model):
            self._hotspa_source.materialize(self.model, self.switched)
        if self._hotspa_model is not None:
            self._hotspa_model.show()
        return self.model

    def close_engine(self) -> None:
        """Frees the engine's memory and process groups. `trainer.model` keeps its weights, if any; a user's optimizer
        stays. Collective."""
        self._hotspa_close()

    def _hotspa_close(self, restarts: bool = False) -> None:
        switched = self._hotspa_model
        if switched is None:
            return
        switched.refresh()
        self._hotspa_source.warn_of_unsaved_weights()
        self._hotspa_optimizer.let_go(restarts)
        switched.close()
        self._hotspa_model, self.model_wrapped = None, self.model

    def _hotspa_start(self, loader: Any = None) -> SwitchedModel:
        """The switched model; made now if missing, or if the model is another one, or built differently. Outside of
        training, takes over what has changed in the model. Collective."""
        if self._hotspa_refusal is not None:
            raise self._hotspa_refusal
        switched = self._hotspa_model
        if switched is not None:
            between = not switched.trains and not switched.is_routed
            if switched.module is not self.model or (between and switched.take_changes(anew=True)):
                self._hotspa_close(restarts=True)
        if self._hotspa_model is None:
            self._hotspa_model, self._hotspa_watchers = start.start(self, loader)
        return self._hotspa_model

    # -- around training ----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains.

        Args:
            resume_from_checkpoint: True for the newest checkpoint of `output_dir` that verifies, or a path; written by
                any number of ranks under any strategies. `args.resume_from_checkpoint` when None.
            *args: As for `Trainer.train`.
            **kwargs: As for `Trainer.train`.

        Raises:
            ResumeError: there is no checkpoint, or the run cannot resume exactly from it.
            DamagedCheckpointError: the named checkpoint does not verify.
            CheckpointLockError: another run writes into `output_dir`.
        """
        return start.or_stock(
            self,
            lambda: self._hotspa_train(resume_from_checkpoint, *args, **kwargs),
            lambda: self.train(resume_from_checkpoint, *args, **kwargs),
        )

    def _hotspa_train(self, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> TrainOutput:
        self._hotspa_flags.begin()
        asked = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        if isinstance(asked, str) and asked.lower() in ("true", "false"):  # from a command line
            asked = asked.lower() == "true"
        # before collective calls that depend on arguments, which may have changed since the Trainer was made
        agreement, facts = self._hotspa_ranks.agreement(), partial(self._hotspa_run.training_facts, asked)
        agreement.run("start of training", lambda: check_values(self.args), facts=lambda _: facts())
        folder, checkpoints = Path(self._get_output_dir(None)), self._hotspa_checkpoints
        try:
            if self.args.save_strategy != SaveStrategy.NO or asked is True:
                checkpoints.into(folder).lock()
            resumed = resuming.find_checkpoint(asked, folder, self.args, agreement, self.model) if asked else None
            self._hotspa_resumption, path = resumed, str(resumed.path) if resumed else None
            self._hotspa_trains = True
            if not self.args.hotspa_allow_data_order_change:
                resuming.keep_rows_a_step(resumed, self.args, self.train_dataset)
            checkpoints.begin()
            output: TrainOutput = super().train(path, *args, **kwargs)
            checkpoints.check_written()
            return output
        finally:
            self._hotspa_resumption, self._hotspa_trains = None, False
            checkpoints.close()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        if not self._hotspa_trains:
            raise passed_over(type(self), "train")
        alone = self.args.world_size == 1
        try:
            telling = self._hotspa_ranks.telling(self, "training")
            with self.callback_handler.deferring_errors(alone), self._hotspa_preemption, telling:
                output: TrainOutput = super()._inner_training_loop(*args, **kwargs)
                if self.engine is not None:
                    self.engine.agreement.check({}, self.callback_handler.error, "end of training")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                preemption.say_interrupted(self)
            if alone and self._hotspa_model is not None:  # on several ranks some may be gone
                self._hotspa_model.show()
            raise
        finally:
            if self._hotspa_model is not None:
                self._hotspa_model.in_training(False)
        return output

    # -- data ---------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """As in the class behind. `RowCollator` handles rows of text, loss masks and padding."""
        rows, dataset = self._hotspa_rows, self.train_dataset
        if dataset is not None and rows.can_scan(dataset):
            self._hotspa_ranks.agreement().run("data set", lambda: rows.scan(dataset))
        return super().get_train_dataloader()

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        args, given, rows = self.args, self.data_collator, self._hotspa_rows
        if not is_training:
            rows.evaluated = dataset
        dataset = rows.tokens_of(dataset)
        collator = rows.collator(dataset, is_training)
        if is_training and args.hotspa_mini_batch_size is not None:
            sampler_fn = rows.dealt_out(dataset, args.hotspa_mini_batch_size, sampler_fn)
        with rows.reading(dataset, is_training) as read:  # which reads the user's collator
            self.data_collator = collator
            try:
                loader = super()._get_dataloader(
                    read, description, batch_size, sampler_fn, is_training=is_training, **kwargs
                )
                loader = rows.of_older_release(loader, is_training)
                if is_training and args.world_size > 1:
                    rows.order.watch(loader, dataset)
                return loader
            finally:
                self.data_collator = given

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        collator = self.data_collator
        if not isinstance(collator, collating.RowCollator):
            return super()._remove_unused_columns(dataset, description)
        if not self.args.remove_unused_columns or dataset.format["type"] == "custom":
            return dataset  # a transform may read any column
        return dataset.select_columns([name for name in dataset.column_names if name in collator.kept])

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        if isinstance(data_collator, collating.RowCollator):  # it removes columns itself
            return data_collator
        return super()._get_collator_with_removed_columns(data_collator, description)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of one optimizer step, over all processes."""
        if self.args.hotspa_mini_batch_size is not None:
            return self.args.hotspa_mini_batch_size
        return super().get_total_train_batch_size(args)

    # -- the beginning of training ------------------------------------------------------------------------------------

    def _init_training_state(self, max_steps: int, num_update_steps_per_epoch: int, *args: Any) -> tuple[int, int]:
        """The pass to resume in, and the batches trained in it; of a stream from the checkpoint."""
        self._hotspa_pass = num_update_steps_per_epoch
        begin: tuple[int, int] = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args)
        self._hotspa_place = {"epoch": begin[0], "batches": begin[1], "read": [None] * begin[0]}
        resumption = self._hotspa_resumption
        if isinstance(resumption, Resumption) and collating.is_stream(self.train_dataset):
            saved = resumption.state.get("hotspa", {}).get("stream")
            if isinstance(saved, dict) and {"epoch", "batches"} <= saved.keys():
                skipped = 0 if self.args.ignore_data_skip else int(saved["batches"])
                self._hotspa_place = {"read": [None] * saved["epoch"], **saved, "batches": skipped}
        return self._hotspa_place["epoch"], self._hotspa_place["batches"]

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        switched = self._hotspa_start(train_dataloader)
        switched.in_training(True)
        self._hotspa_tried = False
        watchers = self._hotspa_watchers
        watchers.begin(max_steps)
        self.load_hotspa_state(self._hotspa_state)
        self._hotspa_rows.begin(train_dataloader, self._hotspa_place.pop("parts", ()))
        counts = {"number of steps": str(max_steps)} | collating.length_facts(train_dataloader)
        switched.engine.agreement.check({}, None, "start of training", facts=counts)
        table = self._hotspa_check_rows(switched, train_dataloader)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        switched.step = self.state.global_step
        if not hasattr(self.train_dataset, "set_epoch") and collating.is_stream(self.train_dataset):
            for number in self._hotspa_place["read"]:  # the order of a stream may depend on how often it was read
                deque(islice(train_dataloader, number), maxlen=0)
        if table is not None:
            watchers.plan.compare_with_single(table, self.args.hotspa_rows_a_step)
        self._hotspa_began = True
        facts = run_facts(switched.engine, self, table, watchers.plan)
        self.callback_handler.dispatch(
            "on_run_begin", self.args, self.state, self.control, run=facts,
            callback_seconds=lambda: dict(self.callback_handler.seconds),
        )  # fmt: skip
        return prepared

    def _hotspa_check_rows(self, switched: SwitchedModel, loader: Any) -> Any:
        """Checks for rows that no bucket takes, and another order than a checkpoint's, as far as lengths are known.
        Collective. Returns the scan of the training data, or None."""
        rows, args, given = self._hotspa_rows, self.args, self.eval_dataset
        evaluates = args.eval_strategy != "no" or args.eval_on_start
        evaluated = list(given.values()) if isinstance(given, dict) else [given]
        if not evaluates or events.is_users(type(self).get_eval_dataloader):
            evaluated = []

        def checked() -> Any:
            table = rows.table(self.train_dataset, switched.longest) if rows.collates_for(loader) else None
            tables = [rows.table(dataset, switched.longest) for dataset in evaluated if dataset is not None]
            refuse_longer_rows(args, type(self), [table, *tables])
            self._hotspa_order = resuming.data_order(args, args.hotspa_rows_a_step, table, switched.longest)
            if self._hotspa_resumption is not None and not args.hotspa_allow_data_order_change:
                resuming.check_data_order(self._hotspa_resumption, self._hotspa_order, loader, args)
            return table

        return switched.engine.agreement.run("data set", checked)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The optimizer of `--optim` with Hugging Face's parameter groups. When training starts, this rank's shares
        replace the parameters of `trainer.model` in it."""
        if self.optimizer is not None:
            return super().create_optimizer(model)
        self._hotspa_start()
        chosen: Any = vars(self)["optimizer_cls_and_kwargs"]
        if chosen is None:
            default = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer_cls_and_kwargs = self._hotspa_optimizer.on_host(*default)
        try:
            return self._hotspa_optimizer.made(super().create_optimizer(model))
        finally:
            self.optimizer_cls_and_kwargs = chosen

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of `--lr_scheduler_type`, or of a DeepSpeed config."""
        mapping = self.args.hotspa_deepspeed
        if self.lr_scheduler is None and mapping is not None and mapping.scheduler is not None:
            warmup_steps = self.args.get_warmup_steps(num_training_steps)
            schedule = mapping.schedule(self.args.learning_rate, num_training_steps, warmup_steps)
            self.lr_scheduler = DeepSpeedLR(optimizer or self.optimizer, schedule)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _hotspa_load(self, resumption: Resumption) -> None:
        resuming.load_scheduler(resumption, self.lr_scheduler)
        self.load_hotspa_state(resumption.state.get("hotspa", {}))
        parts, args = self._hotspa_watchers.parts, self.args
        if parts and resumption.manifest.world_size == args.world_size:
            name = rank_columns(args.process_index, args.world_size)
            tensors = saved_tensors(resumption.path, resumption.manifest, name)
            for part in parts:
                part.load_rank_tensors(tensors)

    def hotspa_state(self) -> dict[str, Any]:
        """The state of strategies and stream that a resumed run needs, JSON-ready."""
        state = self._hotspa_watchers.state() | {"losses": self.switched.assumptions.state_dict()}
        place = dict(self._hotspa_place)
        if self.control.should_epoch_stop:  # a callback ends the pass here
            place = resuming.next_pass(place, place["epoch"] + 1)
        if collating.is_stream(self.train_dataset):
            state["stream"] = place | self._hotspa_rows.parts.state()
        return state

    def load_hotspa_state(self, state: dict[str, Any]) -> None:
        """Resumes from `hotspa_state` before the first mini-batch; the engine may not have been started yet.

        Raises:
            HotspaConfigError: the state is damaged.
        """
        self._hotspa_state = {} if self._hotspa_model is not None else dict(state)
        if self._hotspa_model is not None:
            self._hotspa_watchers.load(state)
            if "losses" in state:
                self._hotspa_model.assumptions.load_state_dict(state["losses"])

    # -- a step -------------------------------------------------------------------------------------------------------

    def _run_epoch(self, **kwargs: Any) -> None:
        if self._hotspa_resumption is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # a finished run: the stock Trainer makes one more step
            return
        epoch = kwargs["epoch"]
        if self._hotspa_rows.sampler is not None:  # wrappers of the data loader do not pass it on
            self._hotspa_rows.sampler.set_epoch(epoch)
        if self._hotspa_place["epoch"] != epoch:
            self._hotspa_place = resuming.next_pass(self._hotspa_place, epoch, self._hotspa_has_ended)
        self._hotspa_has_ended = False
        self._hotspa_rows.parts.begin(epoch)

        def check() -> None:
            with structure_only(), as_built(bare_model(self.model)[0]):  # earlier hooks were checked with the model
                check_hooks(self.model)

        self.switched.engine.agreement.run("beginning of an epoch", check)
        if not self._hotspa_tried and self.args.save_strategy != SaveStrategy.NO:  # callbacks have begun by now
            self.switched.engine.agreement.run("start of training", lambda: try_files(self))
            self._hotspa_tried = True
        super()._run_epoch(**kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """As in the class behind. An error of one rank is raised by all; batches of one step are announced."""
        if self._hotspa_has_ended:
            return [], None
        switched, batches, handler = self.switched, list[Any](), self.callback_handler
        engine, error = switched.engine, handler.error
        try:
            if (parts := self._hotspa_rows.parts).apart:
                batches = parts.read(epoch_iterator, num_batches, engine.agreement)
            else:
                batches = list(islice(epoch_iterator, num_batches))
        except Exception as failure:  # of a data set, or a collator
            error = error or preemption.unreadable(failure, self.args.process_index)
            collating.release_others(handler.train_dataloader)
        read = [*map(collating.without_padded_from, batches)]
        changed, order = any(map(is_not, read, batches)), self._hotspa_rows.order
        if switched.same_batches(len(batches), error, changed, order.words() if order.watches else ""):
            collating.say_left_out()
        batches, self._hotspa_has_ended = read, not read
        self._hotspa_place["batches"] += len(batches)
        batches, num_items = super().get_batch_samples(iter(batches), len(batches), device)
        if num_items is not None and not self.args.average_tokens_across_devices:  # each rank counts its own labels
            num_items = num_items * (not engine.any_rank(float(num_items) == 0.0))
        cut: Any = 0
        for batch in batches:
            if isinstance(batch, dict) and collating.COUNTS in batch:
                cut = cut + batch.pop(collating.COUNTS)
        switched.cut = dict(zip(CUT, cut.tolist() if isinstance(cut, Tensor) else [0] * len(CUT), strict=True))
        switched.step = self._hotspa_read_for = self.state.global_step
        # else each batch is scored separately
        models_own = self.label_smoother is None and self.compute_loss_func is None
        first = batches[0] if len(batches) > 1 and models_own and switched.missed < _MISSED else None
        if isinstance(first, dict) and "labels" in first:
            given = self.model_accepts_loss_kwargs and self._hotspa_prepares  # TRL's losses divide by it themselves
            switched.announce(batches, num_items if given else None)
        for part in self._hotspa_watchers.parts if batches else ():
            part.begin_step(self.state.global_step, self._hotspa_pass)
        if (optimizer := self.optimizer) is not None:
            bare, of_master = bare_optimizer(optimizer), self._hotspa_optimizer
            if of_master.watched is None or of_master.watched() is not bare:  # it was set after training started
                of_master.put_on_master_store(optimizer)
            if engine.updates is not None:  # stages step separately
                of_master.check_attached()
                engine.updates.step = bare.step
        engine.observer = events.PhaseDispatcher(self) if handler.defined(events.PHASE_EVENTS) else None
        return batches, num_items

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As in the class behind, without the labels that `get_batch_samples` leaves out in training."""
        if (read := collating.without_padded_from(inputs)) is not inputs:
            collating.say_left_out()
        return super()._prepare_inputs(read)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As in the class behind, over the switched model. A mini-batch that cannot be trained may be skipped."""
        if self.is_in_train and self._hotspa_read_for != self.state.global_step:
            raise passed_over(type(self), "get_batch_samples")
        if self._hotspa_skips:  # because of an earlier batch of the mini-batch
            return torch.zeros((), device=self.args.device)
        try:
            if num_items_in_batch is not None and float(num_items_in_batch) == 0.0:
                raise preemption.no_labels(self.state.global_step)
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        except HotspaError as failure:
            if not isinstance(failure, NonFiniteError | preemption.NoLabelsError):
                raise
            return self._hotspa_skip(failure).to(self.args.device)
        if self.args.hotspa_skip_non_finite:
            self._hotspa_step_loss += float(loss)
        return loss

    def _hotspa_skip(self, failure: HotspaError) -> Tensor:
        mean = self._hotspa_skipped.skip(self.switched, failure)
        self._hotspa_skips = True
        return mean

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds our callbacks' measurements since the last log, so that every `report_to` receives them."""
        if "loss" in logs:
            logs.update(self.callback_handler.pop_metrics(self.state.global_step))
        super().log(logs, start_time)

    def _hotspa_log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """`log` as the loop calls it once: on all ranks, while an override may call `super()` on one alone."""
        self.__dict__.pop("log", None)
        self._hotspa_skipped.correct(logs, self._hotspa_ranks.agreement())
        self.log(logs, start_time)
        self._hotspa_flags.agree_in_loop()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._hotspa_checkpoints.writer is not None:
            self._hotspa_checkpoints.poll(self.state)
        if self._hotspa_model is not None and self._hotspa_model.engine.stop_ranks:
            preemption.stop_where_told(self, self._hotspa_preemption)
        with self._hotspa_flags.in_loop() if self.args.world_size > 1 else nullcontext(), self._hotspa_apart():
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                self._hotspa_show(events.LOG)
                self.__dict__.setdefault("log", self._hotspa_log)
            if self.control.should_save:  # an overridden _save_checkpoint may read the model before it calls ours
                self._hotspa_show(events.SAVE)
            super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._hotspa_checkpoints.writer is not None:
            self._hotspa_checkpoints.amend(self.state)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in the class behind. Collective."""
        run = lambda: super(SwitchedMixin, self).evaluate(*args, **kwargs)  # noqa: E731
        return start.or_stock(self, run, run)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As in the class behind. Collective."""
        run = lambda: super(SwitchedMixin, self).predict(*args, **kwargs)  # noqa: E731
        return start.or_stock(self, run, run)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._hotspa_show(events.EVALUATION)  # an overridden evaluate() may read the model before it calls ours
        metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        if self.args.save_strategy == SaveStrategy.BEST:  # as before other saves
            self._hotspa_show(events.SAVE)
        self._hotspa_flags.agree()
        return metrics

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As in the class behind, under `hotspa_eval_strategy`. Collective; logits are only computed if read."""
        switched = self._hotspa_start()
        self._hotspa_show(events.EVALUATION)
        with self._hotspa_ranks.telling(self, "evaluation"), switched.routed(), start.metrics_apart(self):
            asked = self._hotspa_run.evaluation_facts(self._hotspa_rows.evaluated) | collating.length_facts(dataloader)
            switched.engine.agreement.check({}, None, "evaluation", facts=asked)
            switched.runs_by(evaluated=self._hotspa_watchers.evaluated(self.args))
            if switched.trains:  # else the start has taken them
                switched.take_changes()
            looks, switched.looks = switched.looks, False  # once is enough
            try:
                return super().evaluation_loop(dataloader, *args, **kwargs)
            finally:
                switched.looks = looks

    # -- saving -------------------------------------------------------------------------------------------------------

    def _hotspa_show(self, occasion: str) -> None:
        """Updates `trainer.model` if code on any rank may read it now. Collective."""
        switched, handler = self._hotspa_model, self.callback_handler
        if switched is None or not has_weights(self.model):
            return
        if occasion in events.STARTS:
            looks = switched.engine.agreement.run("callbacks", handler.may_look)
            looks = switched.engine.agreement.gather(looks).amax(0)
            handler.looked_at = frozenset(e for e, looks_at in zip(events.STEP_EVENTS, looks, strict=True) if looks_at)
        if occasion in handler.looked_at or switched.engine.any_rank(handler.is_looked_at(occasion, self)):
            switched.show()

    def _hotspa_take(self, event: str) -> None:
        """Applies what callbacks have changed in the model in an event of a step. Collective."""
        self.switched.take_changes(inside=event == "on_substep_end")

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self.switched.show()  # before on_train_end: callbacks see the trained model, unless it has no weights
        self._hotspa_checkpoints.finish(self.state)
        self._finish_current_push()  # as the Trainer does later; a checkpoint in a push must not be removed
        self._hotspa_checkpoints.leave_best(self.state)
        return super()._finalize_training(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model in plain Hugging Face format. A collective call during training: every rank must make it."""
        if self._hotspa_model is not None and self._hotspa_written is None:  # in a checkpoint, the model is current
            self._hotspa_model.refresh()
        super().save_model(output_dir, _internal_call)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """As in the class behind. Collective: the hub's error on the main process is raised by all ranks."""
        made = lambda: super(SwitchedMixin, self).init_hf_repo(*args, **kwargs)  # noqa: E731
        self._hotspa_ranks.agreement().run("hub", made, otherwise=hub_error)
        if self.hub_model_id is None:  # only the main process knows it, and `push_to_hub` requires it on every rank
            self.hub_model_id = ""

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As in the class behind. Collective, as above."""
        pushed = lambda: super(SwitchedMixin, self).push_to_hub(*args, **kwargs)  # noqa: E731
        return self._hotspa_ranks.agreement().run("hub", pushed, otherwise=hub_error)


unless_stock(SwitchedMixin)


class HotSPaTrainer(SwitchedMixin, Replaced):
    """A `transformers.Trainer` that trains each length range of a mini-batch under its own parallel strategy.

    Takes the arguments of `Trainer`; with plain `TrainingArguments`, or none, the `hotspa_*` flags are at their
    defaults. `model` may be a `PeftModel` with a LoRA adapter, or the folder of a saved model, of which each rank reads
    only its share. Training and evaluation call a `SwitchedModel`; overrides of `compute_loss`, `training_step` and
    `prediction_step`, data loaders, samplers, collators and callbacks work as with `Trainer`. Without a
    `data_collator`, rows may have `input_ids` (and `labels`), or, with a tokenizer as `processing_class`, one of the
    columns `text`, `messages`, `prompt` + `completion`.

    `trainer.model` holds the trained weights after `train()` and `save_model()`, and in the events of callbacks that
    may look at them. Otherwise its weights cannot be read in training (`materialize()` brings them).

    Args:
        model: As above; the rest are arguments of `Trainer`.
        token_loss: A custom loss, summed over a `TokenSlice`, instead of the cross entropy (docs/losses.md).
        loss_columns: Columns of the data sets that it reads.

    Attributes:
        switched: The `SwitchedModel`.
        engine: Its `HotSPaEngine`; None before the start of `train()`.
        last_report: The `StepReport` of the last mini-batch.
        preempted: Whether SIGTERM or Ctrl-C ended the last `train()`.

    Raises:
        HotspaError: on every rank, naming what cannot be honoured and what to do.
    """


@lru_cache
def switched(base: type) -> type:
    """A class like `base`, a `Trainer` of any library, that trains a `SwitchedModel`: `switched(MyTrainer)(...)`.

    It has the methods of `base`, with ours directly in front of the library's `Trainer`: overrides of `base` run, and
    their `super()` reaches ours. The constructor is the one of `base`; `args` may be the arguments of `base`, and the
    `hotspa_*` flags are at their defaults then.

    Raises:
        UnsupportedError: such a class cannot be made.
    """
    library = library_of(base)
    if issubclass(base, SwitchedMixin):
        return base
    if base is library:
        # a trainer of TRL needs a mixin that is derived from `SwitchedMixin`
        mixin = None if base is Trainer else import_module("hf_hotspa.trl").in_front_of(base)
        return inserted(base, (HotSPaTrainer,) if mixin is None else (mixin, base, Replaced))
    return inserted(base, (base, HotSPaTrainer if library is Trainer else switched(library)))


_MISSED = 2  # after so many announced steps for which other batches came, no more steps are announced
