"""`MasterOptimizer`: a trainer's optimizer on this rank's shares of the weights; and what ranks compare of it."""

import logging
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_utils import SaveStrategy

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.master import bare_optimizer
from hf_hotspa.errors import UnsupportedError
from hf_hotspa.trainer.cpu_adam import cpu_adam_class, load_cpu_adam
from hf_hotspa.trainer.deepspeed_config import DeepSpeedSchedule
from hf_hotspa.trainer.described import text_of
from hf_hotspa.trainer.optimizers import library_of, release, take_over
from hf_hotspa.trainer.protocol import HasRun
from hf_hotspa.trainer.step_hooks import attached, check_attached
from hf_hotspa.versions import version_of

logger = logging.getLogger(__name__)

_CPU_ADAM_TAKES = ("lr", "betas", "eps", "weight_decay")


class DeepSpeedLR(LRScheduler):
    """The learning rates of a DeepSpeed scheduler, which are the same for all groups."""

    def __init__(self, optimizer: Optimizer, schedule: DeepSpeedSchedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [self.schedule.rate(self.last_epoch) for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}


class MasterOptimizer:
    """A trainer's `optimizer` (and `lr_scheduler`) on this rank's shares of the weights."""

    def __init__(self, trainer: HasRun) -> None:
        self._trainer = trainer
        self.watched: weakref.ref[Optimizer] | None = None  # the optimizer that this engine took over last
        self._made: weakref.ref[Optimizer] | None = None  # from the arguments
        self._attached = list[object]()  # and elementwise
        self._left: tuple[weakref.ref[Optimizer], dict[str, object]] | None = None  # by a closed engine, and its shares

    def made(self, optimizer: Optimizer) -> Optimizer:
        """Remembers the optimizer that was made from the arguments: it ends with the engine."""
        self._made = weakref.ref(optimizer)
        return optimizer

    def let_go(self, engine: HotSPaEngine, module: nn.Module, restarts: bool) -> None:
        """Called before the engine is closed. The optimizer is kept, as with the stock Trainer, if a new engine is
        about to start or the user gave it; otherwise its memory is freed with the engine's. Not collective."""
        trainer, optimizer, watched = self._trainer, self._trainer.optimizer, self.watched
        self.watched = None
        if optimizer is None:
            return
        if restarts or self._made is None or self._made() is not bare_optimizer(optimizer):
            release(optimizer, engine, module)
            if watched is not None and watched() is bare_optimizer(optimizer):
                self._left = watched, _places(engine)
        else:
            trainer.optimizer = trainer.lr_scheduler = None

    def take_over(self) -> None:
        """Puts the optimizer onto the master store. Collective; called before the first step."""

        def taken_over() -> Optimizer:
            optimizer = self._trainer.optimizer
            if optimizer is None:
                raise UnsupportedError(
                    "create_optimizer was overridden and sets no optimizer",
                    why="the Trainer ignores what it returns",
                    fix="set self.optimizer in it",
                )
            self.put_on_master_store(optimizer)
            return optimizer

        facts = lambda made: optimizer_facts(made, self._trainer.lr_scheduler)  # noqa: E731
        self._engine.agreement.run("optimizer", taken_over, facts=facts)

    @property
    def _engine(self) -> HotSPaEngine:
        engine = self._trainer.engine
        assert engine is not None
        return engine

    def put_on_master_store(self, optimizer: Optimizer) -> None:
        """Takes over an optimizer. Not collective; the same on all ranks."""
        args = self._trainer.args
        saved = args.save_strategy != SaveStrategy.NO and not args.save_only_model
        library = library_of(type(bare_optimizer(optimizer)))
        if saved and library is not None and args.hotspa_stock_checkpoints:
            raise UnsupportedError(
                f"hotspa_stock_checkpoints with the optimizer {type(bare_optimizer(optimizer)).__name__} of {library}",
                why="the master store has some weights transposed, so that other elements share a scale than in optimizer.pt",
                fix="leave hotspa_stock_checkpoints out; checkpoints hold the weights in transformers' format anyway",
            )
        bare, engine = bare_optimizer(optimizer), self._engine
        if self._left is not None and self._left[0]() is bare and self._left[1] != _places(engine):
            raise UnsupportedError(
                f"the parameters of the model, or which are trained, have changed since the optimizer {type(bare).__name__} was used",
                why="its groups and its state are of the earlier parameters: new ones would not be trained",
                fix="make a new trainer for the changed model",
            )
        take_over(optimizer, engine, self._trainer.model, saved)
        self.watched = weakref.ref(bare_optimizer(optimizer))
        self._trainer.callback_handler.before_step = self.check_attached
        # groups that are added during training have parameters of the model
        self._trainer.switched.on_other_parameters = self._take_over_added

    def check_attached(self) -> None:
        """Checks what is attached to the optimizer: step hooks, a replaced `step`. Before each step. Raises
        `UnsupportedError` if it would act on shares in another way than on complete weights."""
        optimizer = self._trainer.optimizer
        for when, function in attached(optimizer):
            if not any(function == known for known in self._attached):
                check_attached(optimizer, when, function)
                self._attached.append(function)

    def _take_over_added(self, optimizer: Optimizer) -> None:
        if self.watched is not None and self.watched() is bare_optimizer(optimizer):
            take_over(optimizer, self._engine, self._trainer.model)

    def settings(self) -> dict[str, str]:
        optimizer = self._trainer.optimizer
        assert optimizer is not None
        return group_facts(optimizer) | {"max_grad_norm": text_of(self._trainer.args.max_grad_norm)}

    def on_host(self, kind: type[Optimizer], options: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
        """With the master store in host memory, uses DeepSpeed's CPU Adam for torch's AdamW, if all ranks have it."""
        args, engine = self._trainer.args, self._engine
        if args.hotspa_offload != "master" or kind is not torch.optim.AdamW:
            return kind, options
        reason = None
        if any(p.dtype != torch.float32 for _, p in engine.named_parameters()):
            reason = "it steps on fp32 weights only"
        for first in (True, False):  # one process of a machine compiles, and the others use the result
            if reason is None and (args.local_process_index == 0) == first:
                reason = load_cpu_adam()
            missing = engine.any_rank(reason is not None)
            if missing:
                break
        if not missing:
            return cpu_adam_class(), {key: options[key] for key in _CPU_ADAM_TAKES if key in options}
        if args.process_index == 0:
            logger.warning(
                "hotspa_offload=master: the optimizer is torch's AdamW, which takes longer than DeepSpeed's CPU Adam: %s",
                reason or "another rank does not have it",
            )
        return kind, options


def _places(engine: HotSPaEngine) -> dict[str, object]:
    """What this rank's share of each trained parameter is."""
    shares, dtype = engine.master.shares, engine.description.compute_dtype
    return {
        name: (tuple(spec.shape), dtype, spec.shard_dim, start, stop)
        for name in engine.master.trained
        for spec, start, stop, *_ in [shares[name]]
    }


# -- what ranks agree on ----------------------------------------------------------------------------------------------


def optimizer_facts(optimizer: Optimizer, scheduler: LRScheduler | None) -> dict[str, str]:
    state = {} if scheduler is None else scheduler.state_dict() | {"functions": vars(scheduler).get("lr_lambdas")}
    bare = bare_optimizer(optimizer)
    kind, plain = type(bare), {k: v for k, v in vars(bare).items() if isinstance(v, bool | int | float | str)}
    library = library_of(kind)
    return {
        "the optimizer": text_of(kind) if library is None else f"{kind.__name__} of {library} {version_of(library)}",
        "attributes of the optimizer": text_of(plain),
        "the scheduler": type(scheduler).__name__,
        **group_facts(optimizer),
        **{f"{key} of the scheduler": text_of(value) for key, value in state.items()},
    }


def group_facts(optimizer: Optimizer) -> dict[str, str]:
    return {
        f"{key} of parameter group {number}": text_of(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
