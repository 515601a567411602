"""What a trainer does with weights, gradients, checkpoints and the hub in place of `transformers.Trainer`.

`Replaced` stands directly in front of `Trainer` in every class of ours, so overrides of these methods, of a program or
of TRL, stand in front of it and reach it by `super()`.
"""

import json
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from types import new_class
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_hotspa.checkpoint.stock import StockCheckpoint
from hf_hotspa.engine.loading import has_weights
from hf_hotspa.errors import HotspaConfigError, HotspaError, NonFiniteError, PeerError, UnsupportedError
from hf_hotspa.exchanges import set_bases
from hf_hotspa.parallel.agreement import typed_failures
from hf_hotspa.report import StepReport
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.checkpoints import CheckpointContents, hub_error, tokenizer_of
from hf_hotspa.trainer.events import SAVE, WRITERS, CallbackEvents, is_overridden
from hf_hotspa.trainer.model_source import argument_files, save_whole, tokenizer_files
from hf_hotspa.trainer.resuming import Restorer, load_random_state
from hf_hotspa.trainer.run import Run

_Base: Any = Trainer


class Replaced(_Base):
    """Methods in place of `Trainer`'s: weights, gradients and optimizer states are spread over the ranks."""

    args: HotSPaTrainingArguments
    callback_handler: CallbackEvents
    hub_model_id: str | None
    last_report: StepReport | None
    _hotspa: Run

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        replaced_behind(cls)
        for name in ("_load_from_checkpoint", "_load_best_model", "_push_from_checkpoint"):
            if (theirs := getattr(cls, name)).__module__.startswith(
                "sentence_transformers."
            ):  # they read a whole model
                setattr(cls, name, _unless_stock(theirs, vars(Replaced)[name]))

    # -- the constructor ----------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As in `Trainer`, which calls it in its constructor. Raises `UnsupportedError`: ours has not run."""
        if "_hotspa" not in vars(self):
            raise passed_over(type(self), "__init__")
        super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self._hotspa.backing.is_stock:
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: object = None) -> nn.Module:
        if self._hotspa.backing.is_stock:
            return super()._wrap_model(model, training, dataloader)
        switched = self._hotspa.start()
        if training:
            self._hotspa.optimizer.take_over()
        return switched

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows of one optimizer step, over all processes."""
        if self.args.hotspa_mini_batch_size is not None:
            return self.args.hotspa_mini_batch_size
        return super().get_total_train_batch_size(args)

    # -- a step -------------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module, max_norm: float | None = None) -> Tensor:
        """The norm of the complete gradients; clips them to `max_norm`, or else to `max_grad_norm`."""
        run = self._hotspa
        if run.backing.is_stock:
            return super()._clip_grad_norm(model)
        if not run.now.skips:
            try:
                most: float = self.args.max_grad_norm if max_norm is None else max_norm
                assert run.model is not None
                return run.model.clip_grad_norm_(most)
            except NonFiniteError as failure:
                run.skip(failure)
        return torch.tensor(float("nan"))

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> Any:
        """The norm, clipped or not; passes the step's report to choice of strategies, features and callbacks."""
        run = self._hotspa
        if run.backing.is_stock:
            return super()._get_grad_norm(model, grad_norm)
        if grad_norm is None:
            grad_norm = Replaced._clip_grad_norm(self, model, float("inf"))
        now = run.now
        skips, loss = now.skips, now.loss
        now.skips, now.loss = False, 0.0
        if skips:
            return grad_norm
        if self.args.hotspa_skip_non_finite:
            run.skipped.trained(loss)
        switched, watchers = run.model, run.watchers
        if switched is not None and (report := switched.report) is not None:
            if not watchers.idle:
                report = watchers.trained(self.state.global_step, switched.passes, report)
            if next(self.model.parameters()).is_meta:  # all are, or none
                run.source.trained()
            self.last_report = report
            self.callback_handler.dispatch("on_step_report", self.args, self.state, self.control, report=report)
        return grad_norm

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        """Nothing: the weights go into the master store, together with the optimizer's state."""
        if self._hotspa.backing.is_stock:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restores weights, optimizer, scheduler, and the state of the choice of strategies."""
        run = self._hotspa
        if run.backing.is_stock:
            return super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return None
        resumption, restorer = run.now.resumption, Restorer(self.switched, self.model, run.base)
        assert resumption is not None
        assert self.optimizer is not None
        with restorer.naming_other_settings(self.optimizer, self.is_world_process_zero()):
            if isinstance(resumption, StockCheckpoint):
                restorer.stock(resumption, self.optimizer, self.lr_scheduler, run.ranks.agreement())
            else:
                restorer.checkpoint(resumption.path, resumption.manifest, resumption.state, self.optimizer)
                self.switched.engine.agreement.run("resume", lambda: run.load(resumption))
        return None

    def _load_rng_state(self, checkpoint: str | None) -> None:
        run = self._hotspa
        if run.backing.is_stock:
            super()._load_rng_state(checkpoint)
        elif checkpoint is not None:
            assert run.now.resumption is not None
            load_random_state(run.now.resumption, self.args.process_index, run.ranks.agreement())

    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint into the master store and the model. Collective."""
        run, best = self._hotspa, self.state.best_model_checkpoint
        if run.backing.is_stock:
            return super()._load_best_model()
        assert best is not None
        restorer = Restorer(self.switched, self.model, run.base)
        restorer.weights(Path(best), run.ranks.agreement(), self.args.world_size)
        self.switched.show()
        return None

    # -- saving -------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: object, trial: object) -> None:
        """Writes `checkpoint-<step>`. A failure is logged; too many in a row are raised. Then calls the overrides that
        the stock Trainer calls with the folder."""
        run = self._hotspa
        if run.backing.is_stock:
            return super()._save_checkpoint(model, trial)
        run.checkpoints.finish(self.state)
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        writers = any(is_overridden(self, name) for name in WRITERS)
        seen = self.switched.engine.agreement.gather([float(writers), float(writers or run.saves_at_once)])
        any_writes, at_once = map(bool, seen.amax(dim=0).tolist())
        folder, more = Path(self._get_output_dir(trial)), run.write_more if any_writes else None
        run.checkpoints.save(folder, self.state, lambda into: CheckpointContents(self, run, into), at_once, more)
        run.show(SAVE)
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._hotspa.backing.is_stock:
            return super()._save_optimizer_and_scheduler(output_dir)
        return self._hotspa.is_written("_save_optimizer_and_scheduler", output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        if self._hotspa.backing.is_stock:
            return super()._save_scaler(output_dir)
        return self._hotspa.is_written("_save_scaler", output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        if self._hotspa.backing.is_stock:
            return super()._save_rng_state(output_dir)
        return self._hotspa.is_written("_save_rng_state", output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves the model in Hugging Face's format, and the arguments as JSON (the stock Trainer pickles them). Without
        weights in the model, collective, from the master store.

        May be called on the main process alone; if all call it, all raise its error.
        """
        run = self._hotspa
        if run.backing.is_stock:
            return super()._save(output_dir, state_dict)
        target = Path(output_dir if output_dir is not None else self.args.output_dir)
        if state_dict is None and run.writes(output_dir):
            return None
        if run.model is not None and not run.model.is_current and has_weights(self.model):
            raise passed_over(type(self), "save_model")
        if not has_weights(self.model):
            run.source.save(self.model, self.switched.engine, target, tokenizer_of(self))
            return None

        def save() -> None:
            if self.args.should_save:
                beside = tokenizer_files(tokenizer_of(self)) | argument_files(self.args)
                save_whole(self.model, target, state_dict, beside)

        same_outcome(f"the model saved in {target}", save, self.is_world_process_zero(), float(self.args.ddp_timeout))
        return None

    # -- the hub ------------------------------------------------------------------------------------------------------

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._hotspa.backing.is_stock:
            super()._push_from_checkpoint(checkpoint_folder)
        else:
            self._hotspa.pushes.begin(Path(checkpoint_folder))

    def init_hf_repo(self, *args: object, **kwargs: object) -> None:
        """As in `Trainer`. Collective: the hub's error on the main process is raised by all ranks."""
        made = partial(super().init_hf_repo, *args, **kwargs)
        if self._hotspa.backing.is_stock:
            return made()
        self._hotspa.ranks.agreement().run("hub", made, otherwise=hub_error)
        if self.hub_model_id is None:  # only the main process knows it, and `push_to_hub` requires it on every rank
            self.hub_model_id = ""
        return None

    def push_to_hub(self, *args: object, **kwargs: object) -> Any:
        """As in `Trainer`. Collective, as above."""
        pushed = partial(super().push_to_hub, *args, **kwargs)
        if self._hotspa.backing.is_stock:
            return pushed()
        return self._hotspa.ranks.agreement().run("hub", pushed, otherwise=hub_error)


def _unless_stock(theirs: Callable[..., object], ours: Callable[..., object]) -> Callable[..., object]:
    @wraps(ours)
    def method(trainer: Replaced, *args: object) -> object:
        return (theirs if trainer._hotspa.backing.is_stock else ours)(trainer, *args)

    return method


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


def _pickled(trainer: object, protocol: SupportsIndex) -> tuple[Any, ...] | str:
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

    set_bases(cls, tuple(map(over, cls.__bases__)))


# -- the outcome of a step that one rank decides for all -------------------------------------------------------------

# One rank publishes the outcome of a step in the rendezvous store; the others wait for it.
#
# For calls that scripts may make on every rank or on the first one alone, as the stock Trainer's `save_model`: a
# collective would hang, but here only the ranks that call wait.


_FIRST_POLL_S, _LAST_POLL_S = 0.005, 1.0

_announced: weakref.WeakKeyDictionary[dist.Store, int] = weakref.WeakKeyDictionary()
"""How many outcomes this process has published or read, by the store that all ranks share."""


def same_outcome(what: str, function: Callable[[], object], decides: bool, timeout_s: float) -> None:
    """Runs a step, and publishes or reads its outcome. The n-th calls of all ranks belong together. Raises
    `HotspaError`: the error, on every rank that calls; or `PeerError`, if the deciding rank never calls. `what`:
    what is done, such as the path of a file. An error reaches only ranks that did the same. `function`: what this
    rank does; it may raise a `HotspaError`. `decides`: whether this rank's outcome counts for all. `timeout_s`: how
    long to wait for the deciding rank."""
    error: HotspaError | None = None
    try:
        function()
    except HotspaError as failure:
        error = failure
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # the store behind the default group: private in torch, and the only channel that needs no partner
        store = dist.distributed_c10d._get_default_store()
        number = _announced[store] = _announced.get(store, 0) + 1
        key = f"hotspa_verdict/{number}"
        with typed_failures(dist.get_rank(), what):
            if decides:
                store.set(key, json.dumps([what, error.to_dict() if error is not None else None]))
            else:
                _await(store, key, what, timeout_s)
                published_what, data = json.loads(store.get(key))
                if error is None and data is not None and published_what == what:
                    error = HotspaError.from_dict(data)
    if error is not None:
        raise error


def _await(store: dist.Store, key: str, what: str, timeout_s: float) -> None:
    deadline, pause = time.monotonic() + timeout_s, _FIRST_POLL_S
    while not store.check([key]):  # not store.wait: nothing could interrupt it
        if time.monotonic() > deadline:
            raise PeerError(
                f"the main process did not report within {timedelta(seconds=timeout_s)} how this ended: {what}",
                fix="look at its log; call this on every rank, or on the main process alone",
            )
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_S)
