"""How callbacks are called: Hugging Face's events and ours, timed, and without leaving ranks waiting in a collective.

Owns `CallbackEvents`, which stands in for the Trainer's `CallbackHandler`. Beside the events of transformers it
dispatches these, on every rank, to the callbacks that define them:

* `on_run_begin(args, state, control, run=RunFacts)`: engine and data are ready;
* `on_phase_begin(args, state, control, phase=PhaseEvent)`, `on_phase_end(..., phase=PhaseEvent)`: inside a mini-batch;
* `on_switch(args, state, control, switch=SwitchEvent)`: twice per phase, when it has ended;
* `on_step_report(args, state, control, report=StepReport)`: before the optimizer step;
* `on_gain_measured(args, state, control, gain=MeasuredGain)`: after training, by `measure_gain`;
* `on_train_interrupted(args, state, control)`: Ctrl-C has ended training; on the main process only.

They return nothing. `state.global_step` counts the completed optimizer steps. Promises:

* A callback that raises does so on all ranks: the error, naming class, event and step, waits until all ranks agree on
  the next mini-batch (or on the end of training), so that no rank is left inside a collective. On one process, an error
  of a user's callback in an event of transformers is raised immediately, as in the stock Trainer. No event
  communicates, except the work before `COLLECTIVE_EVENTS`.
* The seconds inside callbacks are known per class.
* The Trainer's own callbacks (`add_own`) come after the user's, and are not in `callbacks`, which users and their tests
  read; `pop_callback` and `remove_callback` find them nevertheless.
* A log of training is printed as one line (`LogLine`), unless `hotspa_log_all`. Trackers (`report_to`) get all but the
  six most important numbers below `hotspa_debug/`. Every other reader has the logs unchanged.

The weights are spread over the ranks, and bringing them into the model object after every step costs as much as a load of
all weights. It is left out if no callback can look (`may_look`), which is decided before training: its methods, and the
functions that they use, name no model, pass their keyword arguments on to nobody, and none has a module, parameter or
trainer.
"""

import dis
import logging
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, PrinterCallback, ProgressCallback

from hf_hotspa.errors import CallbackError, HotspaError, UnsupportedError, printable
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.report import PhaseEvent, PhaseMeasure, SwitchEvent
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.trainer.protocol import HasRun

logger = logging.getLogger(__name__)

_COUNTS = ("truncated", "split", "dropped", "empty", "skipped_mini_batches")
_SHOWN = ("hotspa/tokens_per_s", "hotspa/switch_share", "hotspa/memory_share")
_OF_TRAINER = (  # numbers of TRL's trainers that say whether a run learns
    "reward", "reward_std", "kl", "completions/mean_length", "rewards/margins", "rewards/accuracies", "mean_token_accuracy",
    "entropy",
)  # fmt: skip
_NOT_SHOWN = {  # shown in another form, or no news
    "loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "num_input_tokens_seen", "step_time", "total_flos",
    "frac_reward_zero_std", "policy_loss", "entropy_coef",
}  # fmt: skip
_MOST_OF_TRAINER = 6
_SMALL = 5e-4
_OF_ROWS = tuple(f"hotspa/{name}" for name in _COUNTS)


def memory_share() -> float | None:
    """The most memory that torch has reserved on this GPU, as a share of its total; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.max_memory_reserved() / torch.cuda.mem_get_info()[1]


def for_trackers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The logs for TensorBoard, Weights & Biases and others: six numbers first (loss, gradient norm, learning rate, and three
    of `hotspa/`), then row counts that are not zero, and all other numbers of ours below `hotspa_debug/`."""
    return {
        name if not name.startswith("hotspa/") or name in _SHOWN + _OF_ROWS else f"hotspa_debug/{name[7:]}": value
        for name, value in logs.items()
    }


class LogLine:
    """Formats the lines of one run, and estimates the remaining time from its own logs.

    Behind loss, gradient norm and learning rate stand the numbers that the trainer itself logs, at most
    `_MOST_OF_TRAINER` of them: `_OF_TRAINER` first, then others without a slash in their name. A column that has been
    zero so far is left out.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._columns = {"reward"}  # shown when zero, too

    def text(self, logs: Mapping[str, Any], state: TrainerState) -> str:
        step, now = state.global_step, time.perf_counter()
        if self._first is None or step <= self._first[0]:
            self._first = step, now
        loss = float(logs["loss"])
        parts = [f"step {step}/{state.max_steps}", f"loss {loss:{'.2e' if 0 < abs(loss) < _SMALL else '.4f'}}"]
        for name, short, form in (("grad_norm", "grad_norm", ".3g"), ("learning_rate", "lr", ".2e")):
            if logs.get(name) is not None:
                parts.append(f"{short} {float(logs[name]):{form}}")
        parts += [f"{name} {value:.4g}" for name, value in self._of_trainer(logs)]
        for name, short, form in (
            ("hotspa/tokens_per_s", "tokens/s", ",.0f"),
            ("hotspa/memory_share", "memory", ".0%"),
            ("hotspa/switch_share", "switching", ".1%"),
            ("hotspa/mfu", "MFU", ".1%"),
        ):
            if logs.get(name) is not None and self._is_shown(name, text := f"{float(logs[name]):{form}}"):
                parts.append(f"{short} {text}")
        parts += [f"{name} {int(logs[f'hotspa/{name}'])}" for name in _COUNTS if logs.get(f"hotspa/{name}")]
        first, began = self._first
        if step > first:
            parts.append(f"left {_clock((state.max_steps - step) * (now - began) / (step - first))}")
        return "  ".join(parts)

    def _is_shown(self, name: str, text: str) -> bool:
        if text.strip("0.%-"):
            self._columns.add(name)
        return name in self._columns

    def _of_trainer(self, logs: Mapping[str, Any]) -> list[tuple[str, float]]:
        names = [name for name in logs if "/" not in name and name not in _NOT_SHOWN | set(_OF_TRAINER)]
        values = [(name, logs[name]) for name in (*_OF_TRAINER, *names) if name in logs]
        numbers = [(name, float(value)) for name, value in values if isinstance(value, int | float)]
        return [(name, value) for name, value in numbers if self._is_shown(name, f"{value:.4g}")][:_MOST_OF_TRAINER]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


# -- events -----------------------------------------------------------------------------------------------------------

COLLECTIVE_EVENTS = ("on_train_begin", "on_epoch_begin", "on_epoch_end")
"""The events before which ranks may communicate: the Trainer gets to them on all ranks."""

STARTS = ("on_train_begin", "on_epoch_begin")
"""The events at which ranks agree on `looked_at`: callbacks may have been added."""

STEP_EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
"""The events of a step; ranks communicate before and after those in which a callback may look at the model."""

_SHARED = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_shared = attrgetter(*_SHARED)
_OF_STEP = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_ALL = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
PHASE_EVENTS = ("on_phase_begin", "on_phase_end", "on_switch")  # the events inside a mini-batch
_OF_TRANSFORMERS = frozenset(name for name in vars(TrainerCallback) if name.startswith("on_"))
_PRINTERS = (ProgressCallback, PrinterCallback)  # the callbacks of transformers that print all logs
LOG, EVALUATION, SAVE = "log", "evaluation", "save"
WRITERS = ("save_model", "_save", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
"""Methods that write into the folder of a checkpoint, in the order in which the stock Trainer calls them."""

_LOOKERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    LOG: (("on_log",), ("log",)),
    EVALUATION: (
        ("on_evaluate", "on_predict", "on_prediction_step"),
        ("evaluate", "_evaluate", "evaluation_loop", "predict", "compute_metrics", "preprocess_logits_for_metrics"),
    ),
    SAVE: (("on_save",), ("_save_checkpoint", *WRITERS)),
}
"""Occasion -> the events of callbacks and the attributes of the trainer that belong to it; any other is an event itself."""


def is_users(function: object) -> bool:
    """Whether a function or method comes from neither transformers, TRL nor this package."""
    if function is None:
        return False
    return (getattr(function, "__module__", None) or "").split(".")[0] not in ("transformers", "trl", "hf_hotspa")


def is_overridden(trainer: object, name: str) -> bool:
    """Whether a program has set a method of a trainer: on the object, in its class, or in the class of a library. A
    function may have the module of the one that it wraps. A checkpoint holds what sentence-transformers writes."""
    kinds = type(trainer).__mro__
    if name in WRITERS:
        kinds = tuple(cls for cls in kinds if not cls.__module__.startswith("sentence_transformers."))
    set_by = [(cls, vars(cls)[name]) for cls in kinds if name in vars(cls)]
    own = vars(trainer).get(name)  # or a function that the constructor took
    return is_users(own) or any(is_users(cls) or is_users(method) or own is not None for cls, method in set_by)


class CallbackEvents(CallbackHandler):
    """A `CallbackHandler` that takes over the state of another one. `before`: called with the name of every event of
    `COLLECTIVE_EVENTS` before the callbacks are, and of `looked_at`. `after`: called with the name of each of the latter
    after them. `switched`: callbacks run beside it: perhaps on this rank alone. `before_step`: called after the callbacks of `on_pre_optimizer_step`, if others are attached to the
    optimizer than before. `looked_at`: the events of a step in which a callback of any rank may look at the model."""

    looked_at: frozenset[str] = frozenset()
    switched: SwitchedModel | None = None

    def __init__(
        self,
        handler: CallbackHandler,
        before: Callable[[str], None] = lambda event: None,
        after: Callable[[str], None] = lambda event: None,
    ) -> None:
        # not super().__init__: it would add the callbacks again, with warnings about duplicates
        self.__dict__.update(handler.__dict__)
        self._before, self._after = before, after
        self.before_step: Callable[[], None] = lambda: None
        self._attached: tuple[Any, ...] = ()
        self.own: dict[type[TrainerCallback], TrainerCallback] = {}
        self.seconds: dict[str, float] = defaultdict(float)  # seconds inside the callbacks of this rank, by class name
        self._logged_s, self._steps_since_log = 0.0, 0
        self._defers = self._alone = False
        self._line = LogLine()
        self.error: HotspaError | None = None  # the error that ranks have yet to agree on; it then ends training
        self._cause: Exception | None = None

    # -- whom to call ---------------------------------------------------------------------------------------------

    @property
    def every(self) -> list[TrainerCallback]:
        return [*self.callbacks, *self.own.values()]

    def add_own(self, callback: TrainerCallback, instead: type[TrainerCallback] | None = None) -> None:
        """Adds one of the Trainer's own callbacks, unless the user gave one of its class (or the class `instead`)."""
        kind = instead or type(callback)
        if not any(isinstance(given, kind) for given in self.callbacks):
            self.own[kind] = callback

    def leave_to_stock(self) -> None:
        self.own, self._before, self.before_step = {}, lambda event: None, lambda: None
        self.looked_at = frozenset()

    def add_callback(self, callback: object) -> None:
        """Adds a callback of the user, a class or an object; it replaces the Trainer's own callback of its class."""
        super().add_callback(callback)
        added = self.callbacks[-1]
        self.own = {kind: own for kind, own in self.own.items() if not isinstance(added, kind)}

    def pop_callback(self, callback: object) -> TrainerCallback | None:
        """Removes a callback, the user's or our own, by its class or itself, and returns it; None if it is missing."""
        popped: TrainerCallback | None = super().pop_callback(callback)
        if popped is None:
            kind = callback if isinstance(callback, type) else None
            own = [own for own in self.own.values() if (own is callback if kind is None else isinstance(own, kind))]
            popped = own[0] if own else None
            self.own = {kind: own for kind, own in self.own.items() if own is not popped}
        return popped

    def remove_callback(self, callback: object) -> None:
        """As `pop_callback`. Raises `ValueError` for a missing callback, as in transformers."""
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(f"{type(callback).__name__} is not among the callbacks")

    # -- errors ---------------------------------------------------------------------------------------------------

    @contextmanager
    def deferring_errors(self, alone: bool = False) -> Iterator[None]:
        """Inside, errors wait to be agreed on (`error`); outside, callbacks raise immediately. `alone`: there are no
        other ranks. Only errors in our own events, which come in the middle of a mini-batch, and in our own callbacks
        wait."""
        self._defers, self._alone, self.error, self._cause = True, alone, None, None
        try:
            yield
        except CallbackError as error:
            if self._cause is not None:
                raise error from self._cause
            raise
        finally:
            self._defers = False

    def _call(self, callback: TrainerCallback, event: str, step: int, *args: object, **kwargs: object) -> Any:
        """Calls one callback; its error waits for the next agreement, if one will follow."""
        as_it_is = self._alone and event in _OF_TRANSFORMERS and callback not in self.own.values()
        begin = time.perf_counter()
        name = type(callback).__name__
        try:
            with nullcontext() if self.switched is None else self.switched.routed(False):
                return getattr(callback, event)(*args, **kwargs)
        except Exception as error:
            if not self._defers or as_it_is:
                raise
            logger.exception("%s.%s raised; training ends when all ranks know", name, event)
            if self.error is None:
                self._cause = error
                self.error = CallbackError(
                    f"{name}.{event} raised {type(error).__name__}: {error}",
                    where=f"step {step}",
                    why="callbacks run on every rank, and an error in one of them ends training on all",
                    fix=f"repair {name}, or leave it out of the callbacks",
                )
            return None
        finally:
            self.seconds[name] += time.perf_counter() - begin

    # -- events ---------------------------------------------------------------------------------------------------

    def call_event(self, event: str, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        is_looked_at = event in self.looked_at
        if event in COLLECTIVE_EVENTS or is_looked_at:
            self._before(event)
        shared = dict(zip(_SHARED, _shared(self), strict=True))
        for callback in chain(self.callbacks, self.own.values()):
            given = kwargs
            if event == "on_log" and (logs := kwargs.get("logs")) is not None:
                if (shown := self._logs_for(callback, logs, args, state)) is None:
                    continue
                given = {**kwargs, "logs": shown}
            result = self._call(callback, event, state.global_step, args, state, control, **shared, **given)
            if result is not None:
                control = result
        if is_looked_at:
            self._after(event)
        if event == "on_pre_optimizer_step":
            bare = getattr(self.optimizer, "optimizer", self.optimizer)
            tables = getattr(bare, _OF_STEP[0], ()), getattr(bare, _OF_STEP[1], ()), *_OF_ALL
            attached = vars(self.optimizer).get("step"), vars(bare).get("step"), *map(tuple, tables)
            if attached != self._attached:  # keys of hooks are used once
                self.before_step()
                self._attached = attached
        return control

    def _logs_for(
        self, callback: TrainerCallback, logs: dict[str, float], args: TrainingArguments, state: TrainerState
    ) -> dict[str, float] | None:
        """The logs that a callback gets; None for a line that is printed here in its place."""
        if type(callback) in _PRINTERS and not getattr(args, "hotspa_log_all", False):
            if "loss" not in logs:
                return {name: value for name, value in logs.items() if not name.startswith("hotspa/")}
            if state.is_world_process_zero:
                tqdm.write(printable(self._line.text(logs, state)))
            return None
        is_tracker = type(callback).__module__.startswith("transformers.integrations")
        return for_trackers(logs) if is_tracker else logs

    def may_look(self) -> list[float]:
        """For each event of `STEP_EVENTS` whether a callback may look at the model in it. Raises an error for callbacks
        that read gradients (`refuse_gradients`)."""
        refuse_gradients(self.callbacks)
        return [float(any(may_look(callback, event) for callback in self.callbacks)) for event in STEP_EVENTS]

    def is_looked_at(self, occasion: str, trainer: object) -> bool:
        """Whether user code may look at the model on an occasion: an event, or log, evaluation and save."""
        events, attributes = _LOOKERS.get(occasion, ((occasion,), ()))
        functions = [getattr(callback, event, None) for callback in self.callbacks for event in events]
        if any(map(is_users, functions)) or any(is_overridden(trainer, name) for name in attributes):
            return True
        return any(may_look(callback, event) for callback in self.callbacks for event in events)

    def dispatch(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: object
    ) -> None:
        for callback in chain(self.callbacks, self.own.values()):
            if hasattr(callback, event):
                self._call(callback, event, state.global_step, args, state, control, **facts)
        self._steps_since_log += event == "on_step_report"

    def pop_metrics(self, step: int) -> dict[str, float]:
        """The callbacks' measurements since the last log, and the mean seconds per step inside callbacks."""
        metrics: dict[str, float] = {}
        for callback in self.every:
            if hasattr(callback, "pop_metrics"):
                metrics.update(self._call(callback, "pop_metrics", step) or {})
        total_s = sum(self.seconds.values())
        if self._steps_since_log:
            metrics["hotspa/callback_s"] = round((total_s - self._logged_s) / self._steps_since_log, 6)
        if (share := memory_share()) is not None:
            metrics["hotspa/memory_share"] = round(share, 6)
        self._logged_s, self._steps_since_log = total_s, 0
        return metrics


class PhaseDispatcher:
    """Passes the phases of a running mini-batch on to the callbacks of a trainer's `CallbackEvents`."""

    def __init__(self, trainer: HasRun) -> None:
        self._trainer = trainer

    def _dispatch(self, name: str, **facts: object) -> None:
        trainer = self._trainer
        trainer.callback_handler.dispatch(name, trainer.args, trainer.state, trainer.control, **facts)

    def phase_begins(self, step: int, plan: MiniBatchPlan, order: Sequence[int], index: int) -> None:
        self._phase("on_phase_begin", step, plan, order, index)

    def phase_ended(
        self, step: int, plan: MiniBatchPlan, order: Sequence[int], index: int, measured: PhaseMeasure
    ) -> None:
        strategy = str(plan.phases[order[index]].bucket.strategy)
        for act in ("load", "return"):
            seconds, moved = (measured[f"{act}_s"], measured[f"{act}_busy_s"]), int(measured[f"{act}_bytes"])
            self._dispatch("on_switch", switch=SwitchEvent(step, act, strategy, *seconds, moved))
        self._phase("on_phase_end", step, plan, order, index, dict(measured))

    def _phase(
        self, name: str, step: int, plan: MiniBatchPlan, order: Sequence[int], index: int,
        seconds: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        phase = plan.phases[order[index]]
        event = PhaseEvent(
            step,
            index,
            len(order),
            str(phase.bucket.strategy),
            num_packs=phase.num_packs,
            num_sequences=phase.num_sequences,
            num_tokens=phase.num_tokens,
            seconds=seconds,
        )
        self._dispatch(name, phase=event)


FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Flags:
    """The requests of callbacks through `TrainerControl`, agreed on by all ranks.

    All ranks save, evaluate, log and end training together. A callback may see something on one rank alone (the
    remaining time, a file, a memory limit). Its request is then executed on all ranks; the stock Trainer's ranks would
    wait for each other. Costs one small collective per step (more at steps that log, save or evaluate), and none if no
    rank has user code that could set a flag. `trainer`: its `control` is read and set."""

    def __init__(self, trainer: HasRun, agreement: Callable[[], Agreement]) -> None:
        self._trainer, self._agreement = trainer, agreement
        self._may_differ: bool | None = None
        self._acts = False

    def begin(self) -> None:
        self._may_differ = None

    def agree(self) -> None:
        """Sets on all ranks every flag that any rank has set. Collective."""
        trainer = self._trainer
        if trainer.args.world_size == 1:
            return
        agreement = self._agreement()
        if self._may_differ is None:
            kinds = [type(trainer), *map(type, trainer.callback_handler.every)]
            self._may_differ = bool(agreement.gather([float(any(map(is_users, kinds)))]).any())
        if not self._may_differ:
            return
        asked = agreement.gather([float(getattr(trainer.control, name)) for name in FLAGS]).amax(dim=0)
        for name, value in zip(FLAGS, asked.tolist(), strict=True):
            setattr(trainer.control, name, bool(value))

    def agree_in_loop(self) -> None:
        self.agree()
        self._acts = self._trainer.control.should_evaluate or self._trainer.control.should_save

    @contextmanager
    def in_loop(self) -> Iterator[None]:
        """Around the loop's work after a step: agrees on flags before it, and after callbacks that may set others."""
        self.agree()
        control = self._trainer.control
        self._acts = control.should_save or control.should_evaluate or control.should_log
        yield
        if self._acts:  # on_log, on_evaluate and on_save may have set flags, too
            self.agree()


# -- which callbacks may look at the model -----------------------------------------------------------------------------

_NAMES = frozenset(("model", "model_wrapped", "trainer", "optimizer"))
_OF_GRADIENTS = frozenset(("grad", "clip_grad_norm_", "clip_grad_value_"))
_OF_OURS = frozenset(("engine", "switched", "full_gradients"))
_LIBRARIES = ("transformers", "hf_hotspa", "torch", "numpy", "logging", "builtins")
_MOST = 1000
GRADIENT_EVENTS = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
"""The events at which parameters have gradients."""


def may_look(callback: TrainerCallback, event: str) -> bool:
    """Whether a callback, of neither transformers nor this package, defines an event and may look at the model."""
    return _defines(callback, event) and _Walk(callback).looks


def refuse_gradients(callbacks: Iterable[TrainerCallback]) -> None:
    """Rejects callbacks that read gradients of the model, which are spread over the ranks. Raises `UnsupportedError`,
    naming the callback and its event."""
    for callback in callbacks:
        event = next((event for event in GRADIENT_EVENTS if _defines(callback, event)), None)
        names = _Walk(callback).names if event is not None else set()
        if names & _OF_GRADIENTS and not names & _OF_OURS:
            raise UnsupportedError(
                f"{type(callback).__name__}.{event} reads gradients of the model ({min(names & _OF_GRADIENTS)})",
                why="gradients are spread over the ranks, in the master store, and parameters of the model never get any",
                fix="call trainer.engine.full_gradients() there on every rank, or read grad_norm in the log",
            )


def _defines(callback: TrainerCallback, event: str) -> bool:
    own = getattr(callback, event, None)
    is_inherited = getattr(type(callback), event, None) is getattr(TrainerCallback, event, None)
    if own is None or _package(type(callback)) in _LIBRARIES:
        return False
    return not is_inherited or event in vars(callback)


def _package(value: object) -> str:
    return (getattr(value, "__module__", None) or "").split(".")[0]


class _Walk:
    """Goes through an object's methods and attributes, and the functions that they use. `looks`: whether it may look at
    a model. `names`: the names that its code uses."""

    def __init__(self, value: object) -> None:
        self.looks, self.names, self._seen = False, set[str](), dict[int, Any]()
        self._of(value)

    def _of(self, value: object) -> None:
        if value is None or isinstance(value, str | bytes | int | float | types.ModuleType) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module | nn.Parameter | Trainer | Optimizer) or len(self._seen) > _MOST:
            self.looks = True
        elif isinstance(value, types.MethodType):
            self._all((value.__func__, value.__self__))
        elif isinstance(value, types.FunctionType):
            self._of_function(value)
        elif isinstance(value, staticmethod | classmethod | property):
            self._of(getattr(value, "__func__", None) or getattr(value, "fget", None))
        elif isinstance(value, Mapping):
            self._all([*value.values()])
        elif isinstance(value, list | tuple | set | frozenset):
            self._all([*value])
        else:
            self._of_object(value)

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._of(value)

    def _of_object(self, value: object) -> None:
        cls = value if isinstance(value, type) else type(value)
        if _package(cls) in _LIBRARIES:
            return
        if not isinstance(value, type):
            self._all([*getattr(value, "__dict__", {}).values()])
        for base in cls.__mro__:
            if _package(base) not in _LIBRARIES:
                self._all([one for one in vars(base).values() if hasattr(one, "__get__") or callable(one)])

    def _of_function(self, function: Any) -> None:
        if _package(function) in _LIBRARIES:
            return
        names = set[str]()
        self._of_code(function.__code__, names)
        self.names |= names
        self._of(getattr(function, "__wrapped__", None))
        for cell in function.__closure__ or ():
            try:
                self._of(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
        self._all([function.__globals__[name] for name in names if name in function.__globals__])

    def _of_code(self, code: types.CodeType, names: set[str]) -> None:
        constants = {constant for constant in code.co_consts if isinstance(constant, str)}
        names |= {*code.co_names, *(_OF_GRADIENTS & constants)}
        if _NAMES & {*code.co_names, *code.co_varnames, *code.co_freevars, *constants}:
            self.looks = True
        if code.co_flags & 0x08:  # it takes any keyword argument
            keywords = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04)]
            for instruction in dis.get_instructions(code):
                value = instruction.argval
                is_it = value == keywords or (isinstance(value, tuple) and keywords in value)
                self.looks |= instruction.opname.startswith("LOAD") and is_it
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._of_code(inner, names)
