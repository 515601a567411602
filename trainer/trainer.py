"""`HotSPaTrainer`: Hugging Face calls in, engine calls out, and nothing else.

A handful of overrides of `transformers.Trainer`; its loop, schedules, callbacks and logging are untouched. What makes
that possible: `_wrap_model` returns something that is not `trainer.model`, so accelerate wraps nothing, and one batch
of the data loader is one whole mini-batch.
"""

import atexit
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from hf_hotspa.callbacks.progress import PhaseProgressCallback, is_watched
from hf_hotspa.callbacks.report import ReportCallback
from hf_hotspa.callbacks.settings import SettingsCallback
from hf_hotspa.callbacks.switch_overhead import SwitchOverheadCallback
from hf_hotspa.callbacks.trace import TraceCallback
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import HotspaError, NonFiniteError, UnsupportedError
from hf_hotspa.parallel.adapters import bare_model, refuse_quantized
from hf_hotspa.parallel.own_loss import SequenceLoss, TokenSlice
from hf_hotspa.report import StepReport
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.trainer.accumulation import AccumulationMixin
from hf_hotspa.trainer.agreed_facts import argument_facts, data_facts
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.auto import AutoStrategies, check_given, prepare_auto
from hf_hotspa.trainer.checkpointing import CheckpointingMixin
from hf_hotspa.trainer.checkpoints import Checkpoints
from hf_hotspa.trainer.collators import CollatorMixin, check_collator
from hf_hotspa.trainer.control_flags import ControlFlagsMixin
from hf_hotspa.trainer.data_sets import DataSets
from hf_hotspa.trainer.dataloader import MiniBatchLoader, loader_arguments
from hf_hotspa.trainer.engine_options import engine_options, given_buckets
from hf_hotspa.trainer.evaluation import EvaluationMixin
from hf_hotspa.trainer.evaluation_sets import EvaluationSets
from hf_hotspa.trainer.events import CallbackEvents, PhaseDispatcher
from hf_hotspa.trainer.hub import HubMixin
from hf_hotspa.trainer.model_source import ModelSource, ModelSourceMixin
from hf_hotspa.trainer.optimization import OptimizationMixin
from hf_hotspa.trainer.optimizers import check_elementwise
from hf_hotspa.trainer.out_of_memory import warn_of_known
from hf_hotspa.trainer.overrides import OverridesMixin, refuse_overrides
from hf_hotspa.trainer.own_loss import OwnLossMixin
from hf_hotspa.trainer.plain_arguments import completed, named
from hf_hotspa.trainer.predictions import Predictions, find_calibration
from hf_hotspa.trainer.preemption import Preemption, PreemptionMixin
from hf_hotspa.trainer.restoring import BaseDigest
from hf_hotspa.trainer.row_order import order_seed
from hf_hotspa.trainer.rows import is_stream
from hf_hotspa.trainer.run_facts import run_facts
from hf_hotspa.trainer.skipping import SkippedMiniBatches
from hf_hotspa.trainer.slow_devices import DeviceWatch, watch_devices
from hf_hotspa.trainer.streaming import StreamLoader, StreamProgress
from hf_hotspa.trainer.views import ViewsMixin


class _MasterModule(nn.Module):
    """What the Trainer's loop takes for the wrapped model: its parameters are this rank's share of the master store."""

    def __init__(self, engine: HotSPaEngine) -> None:
        super().__init__()
        self.shares = nn.ParameterList([p for _, p in engine.named_parameters()])

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise HotspaError(
            "the wrapped model has no forward of its own", fix="call trainer.model, or train with trainer.train()"
        )


class HotSPaTrainer(
    OverridesMixin, AccumulationMixin, ControlFlagsMixin, ViewsMixin, ModelSourceMixin, OwnLossMixin, OptimizationMixin,
    EvaluationMixin, HubMixin, PreemptionMixin, CheckpointingMixin, CollatorMixin, Trainer,
):  # fmt: skip
    """A `transformers.Trainer` that trains each length range of a mini-batch under its own parallel strategy.

    Takes the arguments of `Trainer`; plain `TrainingArguments`, or none, stand for the defaults of the `hotspa_*` flags. `model` may be a `PeftModel` with a LoRA adapter. It may also be the folder of a saved model, of which each rank then reads its
    share only. `train_dataset` has `input_ids` (and perhaps `labels`), or, with a tokenizer as `processing_class`, one of
    the columns `text`, `messages`, `prompt` + `completion`. After `train()` and `save_model()`, `trainer.model` holds the
    trained weights, and so does it in training for callbacks in `on_log`, `on_evaluate`, `on_save` and at both ends of epochs;
    else its weights cannot be looked at in training (`materialize()` brings them). That of a folder never holds any,
    unless `materialize()` is called.

    Args:
        model: As above, and as the rest: arguments of `Trainer`, `compute_loss_func` among them.
        token_loss: The sum of a loss of your own over a `TokenSlice`, instead of the cross entropy (docs/losses.md).
        loss_columns: Columns of the data sets that it, or a `compute_loss` override, reads.

    Attributes:
        engine: The `HotSPaEngine`, from the start of `train()` on.
        last_report: The `StepReport` of the last mini-batch.
        preempted: Whether the last `train()` was ended by SIGTERM.

    Raises:
        HotspaError: on every rank, naming what cannot be honoured and what to do.
    """

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, *rest: Any,
        token_loss: Callable[[TokenSlice], Tensor] | None = None, loss_columns: Sequence[str] = (), **kwargs: Any,
    ) -> None:  # fmt: skip
        kwargs = named(rest, kwargs)
        args = completed(args)
        check_collator(kwargs.get("data_collator"), args)
        refuse_overrides(type(self))
        if (chosen := kwargs.get("optimizer_cls_and_kwargs")) is not None:
            check_elementwise(*chosen)
        if isinstance(model, nn.Module):
            refuse_quantized(bare_model(model)[0])  # before the stock Trainer does, which names another fix
        self.engine = None
        self.last_report: StepReport | None = None
        self._wrapped: _MasterModule | None = None
        self._auto: AutoStrategies | None = None
        self._predictions: Predictions | None = None
        self._devices: DeviceWatch | None = None
        self._loaded_state: dict[str, Any] = {}
        self._stream_progress: StreamProgress | None = None
        self._source, self._base = ModelSource(args), BaseDigest()
        self._checkpoints = Checkpoints(args, self._agreement, self._being_pushed, self._committed)
        self._data = DataSets(args, lambda: self.processing_class, self._row_rules, self._per_row)
        self._evaluation_sets = EvaluationSets(args, self._data)
        self._skipped = SkippedMiniBatches(args.hotspa_skip_non_finite)
        self._preemption = Preemption()
        self.args = args
        self._takes_losses(token_loss, loss_columns, kwargs.get("compute_loss_func"))
        self._agreement().check({}, None, "arguments of the Trainer", facts=argument_facts(args))
        self._make_output_dir()
        opened = self._source.opened(model, kwargs.get("model_init") is not None, self._agreement())
        super().__init__(opened, args, **kwargs)
        if args.hotspa_deepspeed is not None and args.process_index == 0:
            print(args.hotspa_deepspeed, flush=True)
        self.neftune_noise_alpha = None  # the engine adds the noise; a hook on the model object would go unused
        self.callback_handler = CallbackEvents(self.callback_handler, self._show_model, self._arguments_as_given)
        self.callback_handler.add_own(SettingsCallback())
        self.callback_handler.add_own(SwitchOverheadCallback(print_table=args.hotspa_phase_table))
        if args.hotspa_report:
            self.callback_handler.add_own(ReportCallback(steps=args.hotspa_trace_steps), instead=TraceCallback)
        if is_watched() and not args.disable_tqdm:
            self.callback_handler.add_own(PhaseProgressCallback())
        # gloo processes that leave with a live group abort now and then, after a correct run
        atexit.register(_destroy_default_group)

    # -- set-up -------------------------------------------------------------------------------------------------------

    def _start_engine(self, training: bool = True) -> HotSPaEngine:
        args = self.args
        if self.engine is not None:
            if not self.engine.any_rank(
                self._source.was_changed(self.model) or (training and self.model_init is not None)
            ):
                return self.engine  # the optimizer goes on, too
            self._source.is_current = True  # somebody gave the model other weights: they count
            self._close_engine(restarts=True)
        weights = self._source.weights_folder(self.model)
        calibration = None if args.hotspa_auto else find_calibration(self.model, args, self._agreement())
        loss = self._own_loss()
        in_parts = not isinstance(loss, SequenceLoss)
        if args.hotspa_auto:
            size = self.get_total_train_batch_size(args)
            self._auto = prepare_auto(
                self.model, args, self._agreement(), self._tables_for_auto, size, may_chunk=in_parts
            )
        buckets = self._auto.plan.pool if self._auto is not None else given_buckets(args)
        known_costs = self._auto or calibration
        stage_costs = known_costs.stage_costs if known_costs is not None else None
        options = engine_options(args, loss, stage_costs, self._auto.time if self._auto is not None else None)
        self.engine = HotSPaEngine(self.model, buckets, options, weights=weights, device=args.device)
        self.engine.observer = PhaseDispatcher(self)
        self._predictions = Predictions(self.engine, calibration, args, in_parts) if calibration is not None else None
        known = calibration.calibration if calibration is not None else None
        fits = self._auto.fits if self._auto else lambda cut: check_given(buckets, cut, known, args, options)
        self._devices = watch_devices(self.engine, args, fits, self._predictions)
        if self._auto is not None:
            self.engine.failures.predicted_bytes = self._auto.predicted_bytes
        else:
            fits(self.engine.description)
            if args.process_index == 0:
                warn_of_known(args.output_dir, buckets)
        self._source.agrees(self.model, self.engine.model_digest)
        self._wrapped = self._num_parameters = None
        self.model_wrapped = self.model
        return self.engine

    def get_train_dataloader(self) -> MiniBatchLoader | StreamLoader:
        """Every rank walks through the same mini-batches. Called first in training, so the engine starts here."""
        if self.args.hotspa_recompute_every:
            self.model.disable_input_require_grads()  # a hook of the Trainer's on a model that does not run
        engine = self._start_engine()

        def made() -> tuple[MiniBatchLoader | StreamLoader, Any, SequenceTable | None]:
            loader = self._make_loader(engine)
            self._evaluation_sets.check(engine, self.eval_dataset)
            self._check_data_order(loader)
            dataset = self.train_dataset
            return loader, *((dataset, None) if is_stream(dataset) else self._data.train(dataset))

        loader, _, table = engine.agreement.run(
            "data set", made, facts=lambda made: data_facts(*made[1:], self._row_rules())
        )
        if self._predictions is not None and table is not None:
            self._predictions.compare_with_single(table, self.get_total_train_batch_size(self.args))
        facts = run_facts(engine, self.model, self.args, table, self._auto or self._predictions)
        self.callback_handler.dispatch(
            "on_run_begin", self.args, self.state, self.control, run=facts,
            callback_seconds=lambda: dict(self.callback_handler.seconds),
        )  # fmt: skip
        return loader

    def _make_loader(self, engine: HotSPaEngine) -> MiniBatchLoader | StreamLoader:
        args = self.args
        shape = engine.description.shape
        self._stream_progress = None
        speeds = self._devices.start() if self._devices is not None else None
        if is_stream(self.train_dataset):
            size = self.get_total_train_batch_size(args)
            rows = self._data.stream(
                engine, self.train_dataset, engine.buckets, size, args.dataloader_drop_last, speeds
            )
            self._stream_progress = StreamProgress(rows)
            return StreamLoader(rows, num_workers=args.dataloader_num_workers, pin_memory=args.dataloader_pin_memory)
        dataset, table = self._data.train(self.train_dataset)
        chooser = None
        if self._auto is not None:
            chooser = self._auto.start(table)
            self.load_hotspa_state(self._loaded_state)
        return MiniBatchLoader(
            dataset,
            table,
            engine.buckets,
            mini_batch_size=self.get_total_train_batch_size(args),
            rank=args.process_index,
            vocab_size=shape.vocab_size,
            quadratic_cost=shape.quadratic_cost,
            policy=args.hotspa_overlong,
            rules=self._row_rules(),
            seed=order_seed(args),
            shuffle=args.train_sampling_strategy != "sequential",
            row_sampler=self._row_sampler(dataset, table),
            drop_last=args.dataloader_drop_last,
            chooser=chooser,
            speeds=speeds,
            **loader_arguments(args),
        )

    def _tables_for_auto(self) -> list[SequenceTable]:
        """The lengths that strategies are chosen for, those that are trained or where none are, evaluated; and those that
        must fit as well."""
        if is_stream(self.train_dataset):
            raise UnsupportedError(
                "hotspa_strategies=auto cannot choose strategies for a stream",
                why="it looks at the lengths of all rows before training starts",
                fix="give hotspa_strategies, such as hf-hotspa plan prints them for a histogram of lengths, or use a "
                "data set with random access",
            )
        evaluated = self._evaluation_sets.tables(self.eval_dataset)
        if self.train_dataset is None and evaluated:
            return evaluated
        return [self._data.train(self.train_dataset)[1], *evaluated]

    def hotspa_state(self) -> dict[str, Any]:
        """What a resumed run needs beside the Trainer's own state, of strategies and stream; JSON-ready."""
        state: dict[str, Any] = {"auto": self._auto.state_dict()} if self._auto is not None else {}
        if self._devices is not None and self._devices.decides:
            state["devices"] = self._devices.state_dict()
        if self._stream_progress is not None:
            state["stream"] = self._stream_progress.state(self._steps_a_pass, self.control.should_epoch_stop)
        return state

    def load_hotspa_state(self, state: dict[str, Any]) -> None:
        """Goes on from `hotspa_state`; before the first mini-batch, the engine may not have been started yet.

        Raises:
            HotspaConfigError: the state is damaged.
        """
        if self._devices is not None and "devices" in state:
            self._devices.load_state_dict(state["devices"])
        if self._auto is None or self._auto.chooser is None:
            self._loaded_state = dict(state)
            return
        self._loaded_state = {}
        if "auto" in state:
            self._auto.load_state_dict(state["auto"])

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if self._wrapped is None:
            self._wrapped = _MasterModule(self._running)
        if training:
            self._take_over_optimizer()
        return self._wrapped

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: see `place_model_on_device`."""

    def get_total_train_batch_size(self, args: HotSPaTrainingArguments) -> int:
        """Sequences of one optimizer step."""
        assert args.hotspa_mini_batch_size is not None
        return args.hotspa_mini_batch_size

    # -- a step -------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One mini-batch through the engine. Returns its loss, the same on all ranks."""
        mini_batch, error = inputs["mini_batch"], self.callback_handler.take_error()
        if error is not None:  # of a callback since the last mini-batch; raised by all ranks
            mini_batch = replace(mini_batch, error=error)
        self._check_optimizer_stays()
        self._trained_mini_batch = True
        self._source.goes_stale(self.model)
        if self._stream_progress is not None:
            self._stream_progress.trained(inputs)
        if self._devices is not None:
            self._devices.begin(self.state.global_step, self._steps_a_pass)
        self._give_optimizer(self._running)
        try:
            report = self._running.forward_backward(mini_batch, self.state.global_step, self._settings())
        except NonFiniteError as failure:
            return self._skipped.skip(self._running, failure).to(self.args.device)
        self._skipped.trained(report.loss)
        steps: int | None = self.args.torch_empty_cache_steps
        if steps is not None and self.state.global_step % steps == 0:
            clear_device_cache()
        predictions = self._auto or self._predictions
        if predictions is not None:
            report = predictions.trained(self.state.global_step, inputs["mini_batch"].plan, report)
        if self._devices is not None:
            report = self._devices.trained(inputs["mini_batch"].plan, report)
        self.last_report = report
        self.callback_handler.dispatch("on_step_report", self.args, self.state, self.control, report=report)
        return torch.tensor(report.loss, dtype=torch.float32, device=self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what our callbacks measured since the last log, so that every `report_to` receives it."""
        if "loss" in logs:
            self._skipped.correct(logs)
            logs.update(self.callback_handler.pop_metrics(self.state.global_step))
        super().log(logs, start_time)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        try:
            alone = self.args.world_size == 1
            with self.callback_handler.deferring_errors(alone), self._preemption, self._broadcasting_errors("training"):
                output = super()._inner_training_loop(*args, **kwargs)
                if self.engine is not None:
                    self.engine.agreement.check({}, self.callback_handler.take_error(), "end of training")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._say_interrupted()
            if self.args.world_size == 1:  # on several ranks nobody knows who is still there
                self._update_model()
            raise
        return output

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self._update_model()  # before on_train_end: callbacks see the trained model, unless it has no weights
        return super()._finalize_training(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model in plain Hugging Face format. During training a collective call: every rank must make it."""
        self._update_model()
        super().save_model(output_dir, _internal_call)

    def close_engine(self) -> None:
        """Frees the engine's memory and process groups; `trainer.model` keeps the weights, if it has any, and an
        optimizer that the trainer was given stays. Collective."""
        self._close_engine()

    def _close_engine(self, restarts: bool = False) -> None:
        if self.engine is not None:
            self._update_model()
            self._source.warn_of_unsaved_weights()
            self._let_go_of_optimizer(restarts)
            self._evaluation_sets.close()
            self.engine.close()
            self.engine = self._wrapped = None


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
