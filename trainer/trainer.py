"""`HotSPaTrainer`: Hugging Face calls in, engine calls out, and nothing else.

A handful of overrides of `transformers.Trainer`; its loop, schedules, callbacks and logging are untouched. What makes
that possible: `_wrap_model` returns something that is not `trainer.model`, so accelerate wraps nothing, and one batch
of the data loader is one whole mini-batch.
"""

import atexit
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer
from transformers.data.data_collator import DataCollatorWithFlattening, DefaultDataCollator
from transformers.trainer_utils import TrainOutput

from hf_hotspa.callbacks.switch_overhead import SwitchOverheadCallback
from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.data.prepare import prepare_dataset
from hf_hotspa.data.scan import scan_dataset
from hf_hotspa.errors import DataError, HotspaConfigError, HotspaError, UnsupportedError
from hf_hotspa.report import StepReport
from hf_hotspa.runtime.engine import HotSPaEngine
from hf_hotspa.runtime.model_check import weights_digest
from hf_hotspa.trainer.arguments import ON_OFF, HotSPaTrainingArguments
from hf_hotspa.trainer.dataloader import MiniBatchLoader

_COLLATORS = (PackedBucketCollator, DataCollatorWithFlattening, DefaultDataCollator)
"""Collators that only arrange rows, which packing replaces."""


class _MasterModule(nn.Module):
    """What the Trainer's loop takes for the wrapped model: its parameters are this rank's share of the master store."""

    def __init__(self, engine: HotSPaEngine) -> None:
        super().__init__()
        self.shares = nn.ParameterList([p for _, p in engine.named_parameters()])

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise HotspaError(
            "the wrapped model has no forward of its own", fix="call trainer.model, or train with trainer.train()"
        )


class HotSPaTrainer(Trainer):
    """A `transformers.Trainer` that trains each length range of a mini-batch under its own parallel strategy.

    Takes the arguments of `Trainer`. `train_dataset` has `input_ids` (and perhaps `labels`), or, with a tokenizer as
    `processing_class`, one of the columns `text`, `messages`, `prompt` + `completion`. After `train()` and
    `save_model()`, `trainer.model` holds the trained weights.

    Attributes:
        engine: The `HotSPaEngine`, from the start of `train()` on.
        last_report: The `StepReport` of the last mini-batch.

    Raises:
        HotspaError: on every rank, naming what cannot be honoured and what to do.
    """

    args: HotSPaTrainingArguments
    optimizer: torch.optim.Optimizer | None

    def __init__(self, model: Any = None, args: HotSPaTrainingArguments | None = None, **kwargs: Any) -> None:
        if not isinstance(args, HotSPaTrainingArguments):
            raise HotspaConfigError(
                f"args is a {type(args).__name__}", fix="pass HotSPaTrainingArguments(..., hotspa_strategies=...)"
            )
        self._refuse(kwargs)
        self.engine: HotSPaEngine | None = None
        self.last_report: StepReport | None = None
        self._wrapped: _MasterModule | None = None
        self._model_is_current, self._model_digest = True, ""
        super().__init__(model, args, **kwargs)
        if not any(isinstance(c, SwitchOverheadCallback) for c in self.callback_handler.callbacks):
            self.add_callback(SwitchOverheadCallback(print_table=args.hotspa_phase_table))
        # gloo processes that leave with a live group abort now and then, after a correct run
        atexit.register(_destroy_default_group)

    def _refuse(self, kwargs: dict[str, Any]) -> None:
        collator = kwargs.get("data_collator")
        if collator is not None and not isinstance(collator, _COLLATORS):
            raise UnsupportedError(
                f"the data collator {type(collator).__name__} cannot be honoured",
                why="rows are packed by length here, and a collator of your own may change tokens or labels",
                fix="do its work in the dataset (columns input_ids and labels) and pass no data_collator",
            )
        overridden = type(self).compute_loss is not Trainer.compute_loss
        if kwargs.get("compute_loss_func") is not None or overridden:
            raise UnsupportedError(
                "a loss of your own "
                + ("(compute_loss is overridden)" if overridden else "(compute_loss_func)")
                + " cannot be honoured",
                why="the vocabulary and the mini-batch are spread over ranks; only the token mean of the cross entropy is exact",
                fix="use the model's own causal language-model loss",
            )
        if any(o is not None for o in kwargs.get("optimizers") or ()):
            raise UnsupportedError(
                "an optimizer or scheduler object cannot be honoured",
                why="the optimizer must be built on the master store, which exists only inside train()",
                fix="set --optim, --optim_args and --lr_scheduler_type, or pass optimizer_cls_and_kwargs",
            )
        for name in ("compute_metrics", "preprocess_logits_for_metrics"):
            if kwargs.get(name) is not None:
                raise UnsupportedError(f"{name} cannot be honoured", why="evaluation does not exist yet")

    # -- set-up -------------------------------------------------------------------------------------------------------

    def _start_engine(self) -> HotSPaEngine:
        args = self.args
        if self.engine is not None:
            changed = self._model_is_current and weights_digest(self.model) != self._model_digest
            if not self.engine.any_rank(changed or self.model_init is not None):
                return self.engine  # the optimizer goes on, too
            self._model_is_current = True  # somebody gave the model other weights: they count
            self.close_engine()
        self.engine = HotSPaEngine(
            self.model,
            args.hotspa_buckets,
            compute_dtype=torch.bfloat16 if args.bf16 else None,
            device=args.device,
            pipeline_schedule=args.hotspa_pipeline_schedule,
            staging_bytes=args.hotspa_staging_mb << 20,
            timeout_s=float(args.ddp_timeout),
            overlap_load=ON_OFF[args.hotspa_overlap_load],
            overlap_return=ON_OFF[args.hotspa_overlap_return],
            switch_timeout_s=args.hotspa_switch_timeout,
            planner=args.hotspa_planner,
            second_source=ON_OFF[args.hotspa_second_source],
            memory_limit=args.hotspa_memory_limit_mb << 20 if args.hotspa_memory_limit_mb else None,
        )
        self._wrapped = None
        self.model_wrapped = self.model
        return self.engine

    def get_train_dataloader(self) -> MiniBatchLoader:
        """Every rank walks through the same mini-batches. Called first in training, so the engine starts here."""
        engine = self._start_engine()
        loader, error = None, None
        try:
            loader = self._make_loader(engine)
        except HotspaError as found:
            error = found
        engine.agree(error, "data set")
        assert loader is not None
        return loader

    def _make_loader(self, engine: HotSPaEngine) -> MiniBatchLoader:
        args, dataset = self.args, self.train_dataset
        if dataset is None:
            raise DataError("there is no train_dataset", fix="pass train_dataset to HotSPaTrainer")
        # one rank scans, the others read its cache
        with args.main_process_first(desc="scan of the sequence lengths"):
            columns = getattr(dataset, "column_names", None)
            if columns and self.processing_class is not None and "input_ids" not in columns:
                dataset = prepare_dataset(dataset, self.processing_class)
            table = scan_dataset(dataset, disable_progress=args.disable_tqdm or args.process_index != 0)
        shape = engine.description.shape
        return MiniBatchLoader(
            dataset,
            table,
            args.hotspa_buckets,
            mini_batch_size=self.get_total_train_batch_size(args),
            rank=args.process_index,
            vocab_size=shape.vocab_size,
            quadratic_cost=shape.quadratic_cost,
            policy=args.hotspa_overlong,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random",
            drop_last=args.dataloader_drop_last,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            pin_memory=args.dataloader_pin_memory,
            multiprocessing_context=args.dataloader_multiprocessing_context,
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of `--optim` on this rank's share of the master store, with Hugging Face's parameter groups."""
        if self.optimizer is None:
            assert self.engine is not None
            chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            decayed = set(self.get_decay_parameter_names(self.model))
            self.optimizer = chosen[0](self.engine.parameter_groups(self.args.weight_decay, decayed), **chosen[1])
        return self.optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if self._wrapped is None:
            assert self.engine is not None
            self._wrapped = _MasterModule(self.engine)
        return self._wrapped

    def get_total_train_batch_size(self, args: HotSPaTrainingArguments) -> int:
        """Sequences of one optimizer step."""
        assert args.hotspa_mini_batch_size is not None
        return args.hotspa_mini_batch_size

    # -- a step -------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One mini-batch through the engine. Returns its loss, the same on all ranks."""
        assert self.engine is not None
        report = self.last_report = self.engine.forward_backward(inputs["mini_batch"])
        self._model_is_current = False
        for callback in self.callback_handler.callbacks:
            on_step_report = getattr(callback, "on_step_report", None)
            if on_step_report is not None:
                on_step_report(self.args, self.state, self.control, report=report)
        return torch.tensor(report.loss, dtype=torch.float32, device=self.args.device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> int | None:
        return sum(batch["mini_batch"].num_labels for batch in batch_samples) if batch_samples else None

    def _clip_grad_norm(self, model: nn.Module) -> float:
        assert self.engine is not None
        return self.engine.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        assert self.engine is not None
        return self.engine.grad_norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """6 FLOP per parameter and token of the whole mini-batch, counted by one rank (the Trainer sums over ranks)."""
        assert self.engine is not None
        if self.args.process_index != 0:
            return 0
        return 6.0 * self.engine.description.vector.numel * inputs["mini_batch"].plan.num_tokens

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += inputs["mini_batch"].plan.num_tokens

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what our callbacks measured since the last log, so that every `report_to` receives it."""
        if "loss" in logs:
            for callback in self.callback_handler.callbacks:
                pop_metrics = getattr(callback, "pop_metrics", None)
                if pop_metrics is not None:
                    logs.update(pop_metrics())
        super().log(logs, start_time)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _update_model(self) -> None:
        """Puts the trained weights into `self.model`. Collective, unless they are there already."""
        if self.engine is not None and not self._model_is_current:
            self.engine.write_back(self.model)
            self._model_is_current, self._model_digest = True, weights_digest(self.model)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self._update_model()  # before on_train_end: callbacks see the trained model
        return super()._finalize_training(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model in plain Hugging Face format. During training a collective call: every rank must make it."""
        self._update_model()
        super().save_model(output_dir, _internal_call)

    def close_engine(self) -> None:
        """Frees the engine's memory and process groups; `trainer.model` keeps the weights. Collective."""
        if self.engine is not None:
            self._update_model()
            self.engine.close()
            self.engine = self._wrapped = None
            self.optimizer = self.lr_scheduler = None

    # -- refused until they exist -------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains; `resume_from_checkpoint` is refused."""
        if resume_from_checkpoint:
            raise UnsupportedError("resuming from a checkpoint does not exist yet", fix="start from the saved model")
        return super().train(None, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "checkpoints do not exist yet",
            why="a callback asked for one",
            fix="save the model with trainer.save_model()",
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Refused."""
        raise UnsupportedError(
            "evaluation does not exist yet", fix="save the model and evaluate it with the stock Trainer"
        )

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise UnsupportedError("prediction does not exist yet", fix="save the model and predict with the stock Trainer")


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
