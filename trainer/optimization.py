"""The optimizer and the learning rates of `HotSPaTrainer`: on the master store, or on one that lies in host memory."""

import logging
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_utils import SaveStrategy

from hf_hotspa.checkpoint.tensors import bare_optimizer
from hf_hotspa.engine.cpu_adam import cpu_adam_class, load_cpu_adam
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import UnsupportedError
from hf_hotspa.trainer.agreed_facts import group_facts, optimizer_facts, text_of
from hf_hotspa.trainer.base import TrainerBase
from hf_hotspa.trainer.deepspeed_schedule import DeepSpeedSchedule
from hf_hotspa.trainer.user_optimizer import release, take_over

logger = logging.getLogger(__name__)

_CPU_ADAM_TAKES = ("lr", "betas", "eps", "weight_decay")


class DeepSpeedLR(LRScheduler):
    """The learning rates of a DeepSpeed scheduler, the same for all groups, as those are that it sets."""

    def __init__(self, optimizer: Optimizer, schedule: DeepSpeedSchedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [self.schedule.rate(self.last_epoch) for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Where it is; the rates themselves are the config's."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}


class OptimizationMixin(TrainerBase):
    """Which optimizer steps on the master store, and by which learning rates."""

    lr_scheduler: LRScheduler | None
    _watched: weakref.ref[Optimizer] | None = None
    """The optimizer that was taken over last."""
    _made: weakref.ref[Optimizer] | None = None
    """The one that was made from the arguments."""

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The optimizer of `--optim` with Hugging Face's parameter groups, on the parameters of `trainer.model`; when
        training starts, `take_over` puts the shares of the master store in their place."""
        if self.optimizer is not None:
            return self.optimizer
        chosen: Any = vars(self)["optimizer_cls_and_kwargs"]
        if chosen is None and self.engine is not None:
            self.optimizer_cls_and_kwargs = self._on_host(*self.get_optimizer_cls_and_kwargs(self.args, self.model))
        try:
            made = super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = chosen
        self._made = weakref.ref(made)
        return made

    def _let_go_of_optimizer(self, restarts: bool) -> None:
        """Before the engine is closed. The optimizer goes on with a new engine, as with the stock Trainer, if one is
        about to start or the user gave it; else its memory is freed with the engine's. Not collective."""
        optimizer, engine = self.optimizer, self.engine
        if optimizer is None or engine is None:
            return
        if restarts or self._made is None or self._made() is not bare_optimizer(optimizer):
            release(optimizer, engine, self.model)
        else:
            self.optimizer = self.lr_scheduler = None

    def _take_over_optimizer(self) -> None:
        """Puts the optimizer, whoever made it, onto the master store. Collective; called before the first step."""

        def taken_over() -> Optimizer:
            if self.optimizer is None:
                raise UnsupportedError(
                    "create_optimizer was overridden and sets no optimizer",
                    why="the Trainer does not look at what it returns",
                    fix="set self.optimizer in it",
                )
            self._on_master_store(self.optimizer)
            return self.optimizer

        self._running.agreement.run(
            "optimizer", taken_over, facts=lambda optimizer: optimizer_facts(optimizer, self.lr_scheduler)
        )

    def _is_watched(self, optimizer: Optimizer) -> bool:
        return self._watched is not None and self._watched() is bare_optimizer(optimizer)

    def _on_master_store(self, optimizer: Optimizer) -> None:
        saved = self.args.save_strategy != SaveStrategy.NO and not self.args.save_only_model
        take_over(optimizer, self._running, self.model, saved)
        if not self._is_watched(optimizer):
            bare = bare_optimizer(optimizer)
            # groups that are added in the course of training come with parameters of the model
            bare.register_step_pre_hook(lambda stepped, *_: self._take_over_added(stepped))
            self._watched = weakref.ref(bare)

    def _take_over_added(self, optimizer: Optimizer) -> None:
        if self.engine is not None and self._is_watched(optimizer):
            take_over(optimizer, self.engine, self.model)

    def _settings(self) -> dict[str, str]:
        """What is the optimizer's and may be changed at any time: by a scheduler, a callback, the user."""
        assert self.optimizer is not None
        return group_facts(self.optimizer) | {"max_grad_norm": text_of(self.args.max_grad_norm)}

    def _give_optimizer(self, engine: HotSPaEngine) -> None:
        """Where stages update by themselves, it is they who step."""
        if engine.updates is not None:
            assert self.optimizer is not None
            engine.updates.step = bare_optimizer(self.optimizer).step

    def _clip_grad_norm(self, model: nn.Module) -> float:
        if self._running.updates is not None:  # each stage has clipped, or none
            return self._running.grad_norm
        return self._running.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        return self._running.grad_norm

    def _check_optimizer_stays(self) -> None:
        """An optimizer that was put in its place since training started is taken over, too."""
        if self.optimizer is not None and not self._is_watched(self.optimizer):
            self._on_master_store(self.optimizer)

    def _on_host(self, kind: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """With the master store in host memory, DeepSpeed's CPU Adam for torch's AdamW, if all ranks have it."""
        if self.args.hotspa_offload != "master" or kind is not torch.optim.AdamW:
            return kind, options
        reason = None
        if any(p.dtype != torch.float32 for _, p in self._running.named_parameters()):
            reason = "it steps on fp32 weights only"
        for first in (True, False):  # one process of a machine compiles, and the others find it compiled
            if reason is None and (self.args.local_process_index == 0) == first:
                reason = load_cpu_adam()
            missing = self._running.any_rank(reason is not None)
            if missing:
                break
        if not missing:
            return cpu_adam_class(), {key: options[key] for key in _CPU_ADAM_TAKES if key in options}
        if self.is_world_process_zero():
            logger.warning(
                "hotspa_offload=master: the optimizer is torch's AdamW, which takes longer than DeepSpeed's CPU Adam: %s",
                reason or "another rank does not have it",
            )
        return kind, options

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """The schedule of `--lr_scheduler_type`, or that of a DeepSpeed config."""
        mapping = self.args.hotspa_deepspeed
        if self.lr_scheduler is None and mapping is not None and mapping.scheduler is not None:
            warmup_steps = self.args.get_warmup_steps(num_training_steps)
            schedule = mapping.schedule(self.args.learning_rate, num_training_steps, warmup_steps)
            self.lr_scheduler = DeepSpeedLR(optimizer or self.optimizer, schedule)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)
