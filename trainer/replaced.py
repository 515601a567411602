"""What a trainer does with weights, gradients and checkpoints in place of `transformers.Trainer`.

`Replaced` stands directly in front of `Trainer` in every class of ours, so overrides of these methods, of a program or
of TRL, stand in front of it and reach it by `super()`.
"""

import os
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import new_class
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_hotspa.checkpoint.stock import StockCheckpoint
from hf_hotspa.engine.loading import has_weights
from hf_hotspa.errors import HotspaConfigError, NonFiniteError, UnsupportedError
from hf_hotspa.parallel.agreement import same_outcome
from hf_hotspa.trainer.checkpoints import CheckpointContents, tokenizer_of
from hf_hotspa.trainer.events import SAVE, WRITERS, is_overridden
from hf_hotspa.trainer.model_source import argument_files, save_whole, tokenizer_files
from hf_hotspa.trainer.resuming import Restorer, load_random_state

_Base: Any = Trainer


def unless_stock(mixin: Any) -> None:
    """Makes the overrides of a mixin call the class behind if that class trains alone."""

    def aside(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer._hotspa_refusal is None:
                return own(trainer, *args, **kwargs)
            return getattr(super(mixin, trainer), name)(*args, **kwargs)

        return method

    for name, own in list(vars(mixin).items()):
        if callable(own) and hasattr(Trainer, name) and not name.startswith("__"):
            setattr(mixin, name, aside(name, own))


class Replaced(_Base):
    """Methods of `Trainer` that do not call it: weights, gradients and optimizer states are spread over the ranks."""

    _hotspa_skips: bool
    _hotspa_step_loss: float
    _hotspa_written: Path | None = None  # the checkpoint, while overrides may add files to it

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: see `place_model_on_device` of the arguments."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        switched: nn.Module = self._hotspa_start()
        if training:
            self._hotspa_optimizer.take_over()
        return switched

    # -- a step -------------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module, max_norm: float | None = None) -> Tensor:
        """The norm of the complete gradients; clips them to `max_norm`, or else to `max_grad_norm`."""
        if not self._hotspa_skips:
            try:
                most: float = self.args.max_grad_norm if max_norm is None else max_norm
                return self.switched.clip_grad_norm_(most)
            except NonFiniteError as failure:
                self._hotspa_skip(failure)
        return torch.tensor(float("nan"))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm, clipped or not; passes the step's report to choice of strategies, features and callbacks."""
        if grad_norm is None:
            grad_norm = Replaced._clip_grad_norm(self, model, float("inf"))
        skips, loss = self._hotspa_skips, self._hotspa_step_loss
        self._hotspa_skips, self._hotspa_step_loss = False, 0.0
        if skips:
            return grad_norm
        if self.args.hotspa_skip_non_finite:
            self._hotspa_skipped.trained(loss)
        switched, watchers = self.switched, self._hotspa_watchers
        report = switched.report
        if report is not None:
            if watchers.parts or not watchers.plan.is_idle:
                report = watchers.trained(self.state.global_step, switched.passes, report)
            if next(self.model.parameters()).is_meta:  # all are, or none
                self._hotspa_source.trained()
            self.last_report = report
            self.callback_handler.dispatch("on_step_report", self.args, self.state, self.control, report=report)
        return grad_norm

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the weights go into the master store, together with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restores weights, optimizer, scheduler, and the state of the choice of strategies."""
        if checkpoint is None:
            return
        resumption, restorer = self._hotspa_resumption, Restorer(self.switched, self.model, self._hotspa_base)
        assert resumption is not None
        assert self.optimizer is not None
        with restorer.naming_other_settings(self.optimizer, self.is_world_process_zero()):
            if isinstance(resumption, StockCheckpoint):
                restorer.stock(resumption, self.optimizer, self.lr_scheduler, self._hotspa_ranks.agreement())
            else:
                restorer.checkpoint(resumption.path, resumption.manifest, resumption.state, self.optimizer)
                self.switched.engine.agreement.run("resume", lambda: self._hotspa_load(resumption))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            assert self._hotspa_resumption is not None
            load_random_state(self._hotspa_resumption, self.args.process_index, self._hotspa_ranks.agreement())

    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint into the master store and the model. Collective."""
        best = self.state.best_model_checkpoint
        assert best is not None
        restorer = Restorer(self.switched, self.model, self._hotspa_base)
        restorer.weights(Path(best), self._hotspa_ranks.agreement(), self.args.world_size)
        self.switched.show()

    # -- saving -------------------------------------------------------------------------------------------------------

    @property
    def _hotspa_saves_at_once(self) -> bool:
        """Whether code in front of `_save_checkpoint` may expect the folder when it returns."""
        return is_overridden(self, "_save_checkpoint")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes `checkpoint-<step>`. A failure is logged; too many in a row are raised. Then calls the overrides that
        the stock Trainer calls with the folder."""
        checkpoints = self._hotspa_checkpoints
        checkpoints.finish(self.state)
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        writers = any(is_overridden(self, name) for name in WRITERS)
        seen = self.switched.engine.agreement.gather([float(writers), float(writers or self._hotspa_saves_at_once)])
        any_writes, at_once = map(bool, seen.amax(dim=0).tolist())
        folder, more = Path(self._get_output_dir(trial)), self._hotspa_write_more if any_writes else None
        checkpoints.save(folder, self.state, lambda run: CheckpointContents(self, run), at_once, more)
        self._hotspa_show(SAVE)

    def _hotspa_write_more(self, folder: Path) -> None:
        """Lets overrides write into a committed checkpoint, in the order of the stock Trainer."""
        self._hotspa_show(SAVE)
        self._hotspa_written = folder
        try:
            if any(is_overridden(self, name) for name in WRITERS[:2]):  # the first calls the second
                self.save_model(str(folder), _internal_call=True)
            for name in () if self.args.save_only_model else WRITERS[2:]:
                if is_overridden(self, name):
                    getattr(self, name)(str(folder))
        finally:
            self._hotspa_written = None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._hotspa_is_written("_save_optimizer_and_scheduler", output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        self._hotspa_is_written("_save_scaler", output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        self._hotspa_is_written("_save_rng_state", output_dir)

    def _hotspa_is_written(self, name: str, output_dir: str) -> None:
        """Nothing in a checkpoint, which holds it already. Raises `UnsupportedError` outside of one."""
        if not self._hotspa_writes(output_dir):
            raise UnsupportedError(
                f"{type(self).__name__} calls {name}({str(output_dir)!r}) itself",
                why="each rank holds a share of the optimizer's state, and writes it when a checkpoint is due",
                fix="leave that to super()._save_checkpoint(model, trial), which a call of Trainer._save_checkpoint by class passes over",
            )

    def _hotspa_writes(self, output_dir: str | None) -> bool:
        """Whether a folder is the checkpoint that overrides may add files to now."""
        if (written := self._hotspa_written) is None or output_dir is None:
            return False
        return os.path.abspath(written) == os.path.abspath(output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._hotspa_pushes.begin(Path(checkpoint_folder))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves the model in Hugging Face's format, and the arguments as JSON (the stock Trainer pickles them). Without
        weights in the model, collective, from the master store.

        May be called on the main process alone; if all call it, all raise its error.
        """
        target = Path(output_dir if output_dir is not None else self.args.output_dir)
        if state_dict is None and self._hotspa_writes(output_dir):
            return
        if self._hotspa_model is not None and not self._hotspa_model.is_current and has_weights(self.model):
            raise passed_over(type(self), "save_model")
        if not has_weights(self.model):
            self._hotspa_source.save(self.model, self.switched.engine, target, tokenizer_of(self))
            return

        def save() -> None:
            if self.args.should_save:
                beside = tokenizer_files(tokenizer_of(self)) | argument_files(self.args)
                save_whole(self.model, target, state_dict, beside)

        same_outcome(f"the model saved in {target}", save, self.is_world_process_zero(), float(self.args.ddp_timeout))


unless_stock(Replaced)

# -- the order of classes ---------------------------------------------------------------------------------------------


def passed_over(cls: type, method: str) -> UnsupportedError:
    """The error for a method of ours that a program has not called."""
    return UnsupportedError(
        f"{cls.__name__} passes over HotSPaTrainer.{method}",
        why=f"a call by class, such as Trainer.{method}(self, ...), or an override without super(), does not reach it",
        fix=f"call super().{method}(...)",
    )


def library_of(base: type) -> type:
    """The trainer of TRL or transformers that a class derives from. Raises `HotspaConfigError` if there is none."""
    if not (isinstance(base, type) and issubclass(base, Trainer)):
        fix = "give a subclass of transformers.Trainer, or the class itself"
        raise HotspaConfigError(f"switched({base!r})", fix=fix)
    return next((c for c in base.__mro__ if c.__module__.partition(".")[0] == "trl"), Trainer)


def inserted(base: type, bases: tuple[type, ...]) -> type:
    """A class of these bases that looks like `base`, and is pickled as it. Raises `UnsupportedError` if Python cannot
    make it."""
    own: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    if not any("__reduce_ex__" in vars(cls) or "__reduce__" in vars(cls) for cls in base.__mro__[:-1]):
        own["__reduce_ex__"] = _pickled
    try:
        return new_class(base.__name__, bases, exec_body=lambda body: body.update(own))
    except Exception as failure:  # whatever a metaclass, or __init_subclass__ of the program, raises
        raise UnsupportedError(
            f"switched({base.__name__}) cannot be made: {type(failure).__name__}: {failure}",
            why=f"it is a subclass of {base.__name__} (a {type(base).__name__}) and of HotSPaTrainer's classes",
            fix=f"write it: class Mine({base.__name__}, HotSPaTrainer), or derive from HotSPaTrainer instead of Trainer",
        ) from failure


def _unfilled(base: type) -> Any:
    """A trainer without attributes. Module-level, because pickles call it."""
    made = import_module("hf_hotspa.trainer.trainer").switched(base)
    return made.__new__(made)


def _pickled(trainer: Any, protocol: Any) -> Any:
    """Pickles name the program's class, as this one was made at run time."""
    kind = type(trainer)
    if vars(kind).get("__reduce_ex__") is not _pickled:  # a subclass of it
        return object.__reduce_ex__(trainer, protocol)
    return _unfilled, (kind.__bases__[0],), trainer.__getstate__()


def replaced_behind(cls: type) -> None:
    """Moves `Replaced` behind the Trainer classes of a program that a subclass names after ours, as in
    `class Mine(HotSPaTrainer, Other)`."""
    order = cls.__mro__
    if Trainer not in order or order[order.index(Trainer) - 1] is Replaced:
        return

    def over(base: type) -> type:
        if not issubclass(base, Trainer) or issubclass(base, Replaced):
            return base
        fill = lambda body: body.update(__module__=base.__module__)  # noqa: E731
        return new_class(base.__name__, (base, Replaced), exec_body=fill)

    cls.__bases__ = tuple(map(over, cls.__bases__))
