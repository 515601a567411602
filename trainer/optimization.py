"""The optimizer and the learning rates of `HotSPaTrainer`: on the master store, or on one that lies in host memory."""

import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer

from hf_hotspa.runtime.cpu_adam import cpu_adam_class, load_cpu_adam
from hf_hotspa.runtime.engine import HotSPaEngine
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.deepspeed_schedule import DeepSpeedSchedule

logger = logging.getLogger(__name__)

_CPU_ADAM_TAKES = ("lr", "betas", "eps", "weight_decay")


class DeepSpeedLR(LRScheduler):
    """The learning rates of a DeepSpeed scheduler, the same for all groups, as those are that it sets.

    Args:
        optimizer: The optimizer.
        schedule: The rates.
    """

    def __init__(self, optimizer: Optimizer, schedule: DeepSpeedSchedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [self.schedule.rate(self.last_epoch) for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Where it is; the rates themselves are the config's."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}


class OptimizationMixin(Trainer):
    """Which optimizer steps on the master store, and by which learning rates."""

    args: HotSPaTrainingArguments
    engine: HotSPaEngine | None
    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The optimizer of `--optim` on this rank's share of the master store, with Hugging Face's parameter groups."""
        if self.optimizer is None:
            assert self.engine is not None
            chosen = self.optimizer_cls_and_kwargs or self._on_host(
                *self.get_optimizer_cls_and_kwargs(self.args, self.model)
            )
            decayed = set(self.get_decay_parameter_names(self.model))
            self.optimizer = chosen[0](self.engine.parameter_groups(self.args.weight_decay, decayed), **chosen[1])
        return self.optimizer

    def _on_host(self, kind: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """With the master store in host memory, DeepSpeed's CPU Adam for torch's AdamW, if all ranks have it."""
        if self.args.hotspa_offload != "master" or kind is not torch.optim.AdamW:
            return kind, options
        assert self.engine is not None
        reason = None
        if any(p.dtype != torch.float32 for _, p in self.engine.named_parameters()):
            reason = "it steps on fp32 weights only"
        for first in (True, False):  # one process of a machine compiles, and the others find it compiled
            if reason is None and (self.args.local_process_index == 0) == first:
                reason = load_cpu_adam()
            missing = self.engine.any_rank(reason is not None)
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
