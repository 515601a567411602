"""`HotSPaTrainer`: a `transformers.Trainer` over a `SwitchedModel`.

`SwitchedMixin` stands directly in front of a library's Trainer ("the class behind", next in the method resolution
order), behind the overrides of a program. It replaces the model by a `SwitchedModel`, as accelerate would by
`DistributedDataParallel`. Everything else comes from the class behind. Overrides are in the order of the loop's calls;
each calls `super()`, and nothing else if the class behind trains alone (`Backing`). Methods in place of
`transformers.Trainer`'s are in `Replaced`, directly in front of it. `self._hotspa` is the `Run`, the only attribute of
ours that is not public.
"""

import atexit
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from itertools import chain, islice, product, starmap
from operator import is_not
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import SaveStrategy, TrainOutput

from hf_hotspa.data import collator as collating
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import has_weights
from hf_hotspa.engine.master import bare_optimizer
from hf_hotspa.errors import HotspaError, NonFiniteError
from hf_hotspa.exchanges import set_once
from hf_hotspa.model.model_check import check_hooks
from hf_hotspa.model.model_kind import refuse_other_models
from hf_hotspa.parallel.loss import TokenSlice
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.report import StepReport
from hf_hotspa.switched.model import CUT, SwitchedModel
from hf_hotspa.switched.model_object import as_built, structure_only
from hf_hotspa.trainer import events, preemption, resuming, start
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments, completed, named
from hf_hotspa.trainer.checkpoints import try_files
from hf_hotspa.trainer.events import CallbackEvents
from hf_hotspa.trainer.master_optimizer import DeepSpeedLR
from hf_hotspa.trainer.replaced import Replaced, inserted, library_of, passed_over
from hf_hotspa.trainer.resuming import Resumption
from hf_hotspa.trainer.run import Run
from hf_hotspa.trainer.run_facts import run_facts

_Base: Any = Trainer if TYPE_CHECKING else object
_MISSED = 2  # after so many announced steps for which other batches came, no more steps are announced


class SwitchedMixin(_Base):
    """Makes the Trainer class behind it train a `SwitchedModel`. See `HotSPaTrainer`."""

    args: HotSPaTrainingArguments
    callback_handler: CallbackEvents
    data_collator: Any
    lr_scheduler: Any
    last_report: StepReport | None = None
    _hotspa: Run
    _hotspa_kind: ClassVar[type[Run]] = Run

    def __init__(
        self, model: object = None, args: TrainingArguments | None = None, *rest: object,
        token_loss: Callable[[TokenSlice], Tensor] | None = None, loss_columns: Sequence[str] = (), **kwargs: object,
    ) -> None:  # fmt: skip
        kwargs = named(rest, kwargs, super().__init__)
        self.args = args = completed(args)
        given = {**kwargs, "model": model, "token_loss": token_loss, "loss_columns": loss_columns}
        run = self._hotspa = self._hotspa_kind(self, given)
        model = run.backing.opened(run.source, model, kwargs, run.prepares)
        with run.ranks.telling(self, "making the trainer"):
            super().__init__(model, args, **kwargs)
        atexit.register(start.leave_default_group)
        if run.backing.is_stock:
            return
        if kwargs.get("data_collator") is None and collating.is_stock(self.data_collator):
            run.rows.default_collator = self.data_collator
        run.add_callbacks()
        self.neftune_noise_alpha = None  # the engine adds the noise; a hook on the model object has no effect

    @classmethod
    def hotspa_check_class(cls) -> None:
        """Raises `UnsupportedError` if no model of the class behind can be trained."""

    # -- the model ----------------------------------------------------------------------------------------------------

    @property
    def switched(self) -> SwitchedModel:
        """The `SwitchedModel` that is trained; made now if missing. Collective then."""
        switched = self._hotspa.model
        return switched if switched is not None and switched.module is self.model else self._hotspa.start()

    @property
    def engine(self) -> HotSPaEngine | None:
        """The `HotSPaEngine`; None before the start of `train()`."""
        run = vars(self).get("_hotspa")  # which is being made while arguments are checked
        return run.model.engine if run is not None and run.model is not None else None

    @property
    def preempted(self) -> bool:
        """Whether the last `train()` ended because of SIGTERM or Ctrl-C, with training left to do."""
        return self._hotspa.preemption.agreed

    def call_model_init(self, trial: object = None) -> nn.Module:
        """The model of `model_init`.

        Raises:
            HotspaError: it cannot be trained.
        """
        model: nn.Module = super().call_model_init(trial)
        backing = self._hotspa.backing
        if not backing.is_stock:
            backing.checked(lambda: refuse_other_models(model))
        return model

    def materialize(self) -> PreTrainedModel:
        """Gives `trainer.model` the current weights, which it otherwise has at certain events only. A model of a folder
        gets memory for them, on the CPU of every rank. Collective.

        Returns:
            `trainer.model`; a model of a folder is a normal model from now on.

        Raises:
            HotspaError: on every rank: the engine cannot be started.
        """
        if not has_weights(self.model):
            self._hotspa.source.materialize(self.model, self.switched)
        if self._hotspa.model is not None:
            self._hotspa.model.show()
        return self.model

    def close_engine(self) -> None:
        """Frees the engine's memory and process groups. `trainer.model` keeps its weights, if any; a user's optimizer
        stays. Collective."""
        self._hotspa.close()

    # -- around training ----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: object = None, *args: object, **kwargs: object) -> TrainOutput:
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
        run, train = self._hotspa, super().train
        if run.backing.is_stock:
            return train(resume_from_checkpoint, *args, **kwargs)

        def trained() -> TrainOutput:
            with run.training(resume_from_checkpoint) as path:
                return train(path, *args, **kwargs)

        return run.backing.run(trained, lambda: self.train(resume_from_checkpoint, *args, **kwargs))

    def _inner_training_loop(self, *args: object, **kwargs: object) -> TrainOutput:
        run, alone = self._hotspa, self.args.world_size == 1
        if run.backing.is_stock:
            return super()._inner_training_loop(*args, **kwargs)
        if not run.now.is_ours:
            raise passed_over(type(self), "train")
        try:
            telling = run.ranks.telling(self, "training")
            with self.callback_handler.deferring_errors(alone), run.preemption, telling:
                output: TrainOutput = super()._inner_training_loop(*args, **kwargs)
                if self.engine is not None:
                    self.engine.agreement.check({}, self.callback_handler.error, "end of training")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                preemption.say_interrupted(self)
            if alone and run.model is not None:  # on several ranks some may be gone
                run.model.show()
            raise
        finally:
            if run.model is not None:
                run.model.in_training(False)
        return output

    # -- data ---------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """As in the class behind. `RowCollator` handles rows of text, loss masks and padding."""
        run, dataset = self._hotspa, self.train_dataset
        if not run.backing.is_stock and dataset is not None and run.rows.can_scan(dataset):
            run.ranks.agreement().run("data set", lambda: run.rows.scan(dataset))
        return super().get_train_dataloader()

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if self._hotspa.backing.is_stock:
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, **kwargs)
        args, given, rows = self.args, self.data_collator, self._hotspa.rows
        if not is_training:
            rows.evaluated = dataset
        dataset = rows.tokens_of(dataset)
        collator = rows.collator(dataset, is_training)
        if is_training and args.hotspa_mini_batch_size is not None:
            sampler_fn = rows.dealt_out(dataset, args.hotspa_mini_batch_size, sampler_fn)
        with rows.reading(dataset, collator, is_training) as read:  # which reads the user's collator
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

    # -- the beginning of training ------------------------------------------------------------------------------------

    def _init_training_state(self, max_steps: int, num_update_steps_per_epoch: int, *args: object) -> tuple[int, int]:
        """The pass to resume in, and the batches trained in it; of a stream from the checkpoint."""
        begin: tuple[int, int] = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args)
        if self._hotspa.backing.is_stock:
            return begin
        now = self._hotspa.now
        now.steps_of_pass = num_update_steps_per_epoch
        now.place = {"epoch": begin[0], "batches": begin[1], "read": [None] * begin[0]}
        if isinstance(now.resumption, Resumption) and collating.is_stream(self.train_dataset):
            saved = now.resumption.state.get("hotspa", {}).get("stream")
            if isinstance(saved, dict) and {"epoch", "batches"} <= saved.keys():
                skipped = 0 if self.args.ignore_data_skip else int(saved["batches"])
                now.place = {"read": [None] * saved["epoch"], **saved, "batches": skipped}
        return now.place["epoch"], now.place["batches"]

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        run = self._hotspa
        if run.backing.is_stock:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        switched, now = run.start(train_dataloader), run.now
        switched.in_training(True)
        now.saves_were_tried = False
        run.watchers.begin(max_steps)
        self.load_hotspa_state(now.given_state)
        run.rows.begin(train_dataloader, now.place.pop("parts", ()))
        counts = {"number of steps": str(max_steps)} | collating.length_facts(train_dataloader)
        switched.engine.agreement.check({}, None, "start of training", facts=counts)
        table = run.check_rows(switched, train_dataloader)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        switched.step = self.state.global_step
        if not hasattr(self.train_dataset, "set_epoch") and collating.is_stream(self.train_dataset):
            for number in now.place["read"]:  # the order of a stream may depend on how often it was read
                deque(islice(train_dataloader, number), maxlen=0)
        if table is not None:
            run.watchers.plan.compare_with_single(table, self.args.hotspa_rows_a_step)
        run.backing.has_begun = True
        facts = run_facts(switched.engine, self, table, run.watchers.plan)
        self.callback_handler.dispatch(
            "on_run_begin", self.args, self.state, self.control, run=facts,
            callback_seconds=lambda: dict(self.callback_handler.seconds),
        )  # fmt: skip
        return prepared

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The optimizer of `--optim` with Hugging Face's parameter groups. When training starts, this rank's shares
        replace the parameters of `trainer.model` in it."""
        run = self._hotspa
        if run.backing.is_stock or self.optimizer is not None:
            return super().create_optimizer(model)
        run.start()
        chosen: Any = vars(self)["optimizer_cls_and_kwargs"]
        if chosen is None:
            default = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer_cls_and_kwargs = run.optimizer.on_host(*default)
        try:
            return run.optimizer.made(super().create_optimizer(model))
        finally:
            self.optimizer_cls_and_kwargs = chosen

    def create_scheduler(self, num_training_steps: int, optimizer: object = None) -> Any:
        """The schedule of `--lr_scheduler_type`, or of a DeepSpeed config."""
        mapping = self.args.hotspa_deepspeed
        if self.lr_scheduler is None and mapping is not None and mapping.scheduler is not None:
            warmup_steps = self.args.get_warmup_steps(num_training_steps)
            schedule = mapping.schedule(self.args.learning_rate, num_training_steps, warmup_steps)
            self.lr_scheduler = DeepSpeedLR(optimizer or self.optimizer, schedule)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def hotspa_state(self) -> dict[str, Any]:
        """The state of strategies and stream that a resumed run needs, JSON-ready."""
        run = self._hotspa
        state = run.watchers.state() | {"losses": self.switched.assumptions.state_dict()}
        place = dict(run.now.place)
        if self.control.should_epoch_stop:  # a callback ends the pass here
            place = resuming.next_pass(place, place["epoch"] + 1)
        if collating.is_stream(self.train_dataset):
            state["stream"] = place | run.rows.parts.state()
        return state

    def load_hotspa_state(self, state: dict[str, Any]) -> None:
        """Resumes from `hotspa_state` before the first mini-batch; the engine may not have been started yet.

        Raises:
            HotspaConfigError: the state is damaged.
        """
        run = self._hotspa
        run.now.given_state = {} if run.model is not None else dict(state)
        if run.model is not None:
            run.watchers.load(state)
            if "losses" in state:
                run.model.assumptions.load_state_dict(state["losses"])

    # -- a step -------------------------------------------------------------------------------------------------------

    def _run_epoch(self, **kwargs: Any) -> None:
        run = self._hotspa
        if run.backing.is_stock:
            return super()._run_epoch(**kwargs)
        epoch, now = kwargs["epoch"], run.now
        if now.resumption is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # a finished run: the stock Trainer makes one more step
            return None
        if run.rows.sampler is not None:  # wrappers of the data loader do not pass it on
            run.rows.sampler.set_epoch(epoch)
        if now.place["epoch"] != epoch:
            now.place = resuming.next_pass(now.place, epoch, now.pass_has_ended)
        now.pass_has_ended = False
        run.rows.parts.begin(epoch)

        def check() -> None:
            with structure_only(), as_built(bare_model(self.model)[0]):  # earlier hooks were checked with the model
                check_hooks(self.model)

        agreement = self.switched.engine.agreement
        agreement.run("beginning of an epoch", check)
        if not now.saves_were_tried and self.args.save_strategy != SaveStrategy.NO:  # callbacks have begun by now
            agreement.run("start of training", lambda: try_files(self, run))
            now.saves_were_tried = True
        return super()._run_epoch(**kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: object
    ) -> tuple[list[Any], Any]:
        """As in the class behind. An error of one rank is raised by all; batches of one step are announced."""
        run, switched = self._hotspa, self._hotspa.model
        if run.backing.is_stock:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if run.now.pass_has_ended:
            return [], None
        if switched is None or switched.module is not self.model:
            switched = run.start()
        batches, error = _read(self, switched, epoch_iterator, num_batches)
        batches = _agreed(self, switched, batches, error)
        batches, num_items = super().get_batch_samples(iter(batches), len(batches), device)
        num_items = _announced(self, switched, batches, num_items)
        _step_begins(self, switched.engine, bool(batches))
        return batches, num_items

    def _prepare_inputs(self, inputs: object) -> Any:
        """As in the class behind, without the labels that `get_batch_samples` leaves out in training."""
        if not self._hotspa.backing.is_stock and (read := self._hotspa.rows.cleaned(inputs)) is not inputs:
            collating.say_left_out()
            inputs = read
        return super()._prepare_inputs(inputs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As in the class behind, over the switched model. A mini-batch that cannot be trained may be skipped."""
        run = self._hotspa
        if run.backing.is_stock:
            return super().training_step(model, inputs, num_items_in_batch)
        now = run.now
        if self.is_in_train and now.read_for != self.state.global_step:
            raise passed_over(type(self), "get_batch_samples")
        if now.skips:  # because of an earlier batch of the mini-batch
            return torch.zeros((), device=self.args.device)
        try:
            if num_items_in_batch is not None and float(num_items_in_batch) == 0.0:
                raise preemption.no_labels(self.state.global_step)
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        except HotspaError as failure:
            if not isinstance(failure, NonFiniteError | preemption.NoLabelsError):
                raise
            return run.skip(failure).to(self.args.device)
        if self.args.hotspa_skip_non_finite:
            now.loss += float(loss)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds our callbacks' measurements since the last log, so that every `report_to` receives them."""
        if "loss" in logs and not self._hotspa.backing.is_stock:
            logs.update(self.callback_handler.pop_metrics(self.state.global_step))
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: object, **kwargs: object) -> None:
        run = self._hotspa
        if run.backing.is_stock:
            return super()._maybe_log_save_evaluate(*args, **kwargs)
        switched, checkpoints = run.model, run.checkpoints
        if checkpoints.writer is not None:
            checkpoints.poll(self.state)
        if switched is not None and switched.engine.stop_ranks:
            preemption.stop_where_told(self, run.preemption)
        apart = nullcontext() if switched is None else switched.routed(False)
        with run.flags.in_loop() if self.args.world_size > 1 else nullcontext(), apart:
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                run.show(events.LOG)
                set_once(self, "log", run.log)
            if self.control.should_save:  # an overridden _save_checkpoint may read the model before it calls ours
                run.show(events.SAVE)
            super()._maybe_log_save_evaluate(*args, **kwargs)
        if checkpoints.writer is not None:
            checkpoints.amend(self.state)
        return None

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """As in the class behind. Collective."""
        run = lambda: super(SwitchedMixin, self).evaluate(*args, **kwargs)  # noqa: E731
        return self._hotspa.backing.run(run, run)

    def predict(self, *args: object, **kwargs: object) -> Any:
        """As in the class behind. Collective."""
        run = lambda: super(SwitchedMixin, self).predict(*args, **kwargs)  # noqa: E731
        return self._hotspa.backing.run(run, run)

    def _evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        run = self._hotspa
        if run.backing.is_stock:
            return super()._evaluate(*args, **kwargs)
        run.show(events.EVALUATION)  # an overridden evaluate() may read the model before it calls ours
        metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        if self.args.save_strategy == SaveStrategy.BEST:  # as before other saves
            run.show(events.SAVE)
        run.flags.agree()
        return metrics

    def evaluation_loop(self, dataloader: object, *args: object, **kwargs: object) -> Any:
        """As in the class behind, under `hotspa_eval_strategy`. Collective; logits are only computed if read."""
        run = self._hotspa
        if run.backing.is_stock:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        switched = run.start()
        run.show(events.EVALUATION)
        with run.ranks.telling(self, "evaluation"), switched.routed(), start.metrics_apart(self, run.apart):
            asked = run.same.evaluation_facts(run.rows.evaluated) | collating.length_facts(dataloader)
            switched.engine.agreement.check({}, None, "evaluation", facts=asked)
            switched.runs_by(evaluated=run.watchers.evaluated(self.args))
            if switched.trains:  # else the start has taken them
                switched.take_changes()
            looks, switched.looks = switched.looks, False  # once is enough
            try:
                return super().evaluation_loop(dataloader, *args, **kwargs)
            finally:
                switched.looks = looks

    # -- saving -------------------------------------------------------------------------------------------------------

    def _finalize_training(self, *args: object, **kwargs: object) -> TrainOutput:
        run = self._hotspa
        if not run.backing.is_stock:
            self.switched.show()  # before on_train_end: callbacks see the trained model, unless it has no weights
            run.checkpoints.finish(self.state)
            self._finish_current_push()  # as the Trainer does later; a checkpoint in a push must not be removed
            run.checkpoints.leave_best(self.state)
        return super()._finalize_training(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model in plain Hugging Face format. A collective call during training: every rank must make it."""
        run = self._hotspa
        if run.model is not None and run.now.written is None:  # in a checkpoint, the model is current
            run.model.refresh()
        super().save_model(output_dir, _internal_call)


# -- the batches of a step ---------------------------------------------------------------------------------------------


def _read(
    trainer: SwitchedMixin, switched: SwitchedModel, iterator: Iterator[Any], number: int
) -> tuple[list[Any], HotspaError | None]:
    """The batches of this rank, and the error that all ranks are to know."""
    handler, parts = trainer.callback_handler, trainer._hotspa.rows.parts
    batches, error = list[Any](), handler.error
    try:
        if parts.apart:
            batches = parts.read(iterator, number, switched.engine.agreement)
        else:
            batches = list(islice(iterator, number))
    except Exception as failure:  # of a data set, or a collator
        error = error or preemption.unreadable(failure, trainer.args.process_index)
        collating.release_others(handler.train_dataloader)
    return batches, error


def _agreed(
    trainer: SwitchedMixin, switched: SwitchedModel, batches: list[Any], error: HotspaError | None
) -> list[Any]:
    """The batches as they are trained, when all ranks have as many, and none has an error. Collective."""
    now, rows = trainer._hotspa.now, trainer._hotspa.rows
    read, order = [*map(rows.cleaned, batches)], rows.order
    changed = any(map(is_not, read, batches))
    if switched.same_batches(len(batches), error, changed, order.words() if order.watches else ""):
        collating.say_left_out()
    now.pass_has_ended = not read
    now.place["batches"] += len(read)
    return read


def _announced(trainer: SwitchedMixin, switched: SwitchedModel, batches: list[Any], num_items: Any) -> Any:
    """Tells the switched model of the step's batches. Returns the number of labels that the loss is divided by."""
    run = trainer._hotspa
    if num_items is not None and not trainer.args.average_tokens_across_devices:  # each rank counts its own labels
        num_items = num_items * (not switched.engine.any_rank(float(num_items) == 0.0))
    cut: Any = 0
    for batch in batches:
        if isinstance(batch, dict) and collating.COUNTS in batch:
            cut = cut + batch.pop(collating.COUNTS)
    switched.cut = dict(zip(CUT, cut.tolist() if isinstance(cut, Tensor) else [0] * len(CUT), strict=True))
    switched.step = run.now.read_for = trainer.state.global_step
    # else each batch is scored separately
    models_own = trainer.label_smoother is None and trainer.compute_loss_func is None
    first = batches[0] if len(batches) > 1 and models_own and switched.missed < _MISSED else None
    if isinstance(first, dict) and ("labels" in first or run.rows.has_own_labels):
        given = trainer.model_accepts_loss_kwargs and run.prepares  # TRL's losses divide by it themselves
        switched.announce(batches, num_items if given else None)
    return num_items


def _step_begins(trainer: SwitchedMixin, engine: HotSPaEngine, has_batches: bool) -> None:
    """Tells the parts of the run, the optimizer and the observers of phases."""
    run, optimizer, handler = trainer._hotspa, trainer.optimizer, trainer.callback_handler
    for part in run.watchers.parts if has_batches else ():
        part.begin_step(trainer.state.global_step, run.now.steps_of_pass)
    if optimizer is not None:
        bare, of_master = bare_optimizer(optimizer), run.optimizer
        if of_master.watched is None or of_master.watched() is not bare:  # it was set after training started
            of_master.put_on_master_store(optimizer)
        if engine.updates is not None:  # stages step separately
            of_master.check_attached()
            engine.updates.step = bare.step
    every = chain(handler.callbacks, handler.own.values())
    observed = any(starmap(hasattr, product(every, events.PHASE_EVENTS)))
    engine.observer = events.PhaseDispatcher(trainer) if observed else None


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
