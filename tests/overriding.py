"""Subclasses of a Trainer that override what people override, and note each call: its arguments, the weights that it
sees, the files that it writes.
"""

import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from hf_hotspa.errors import HotspaError
from hf_hotspa.trainer.trainer import switched
from tests.moves import Kit, differences

Change = Callable[[Any, Any], Any]
"""Changes what `super()` has returned: called with the trainer and the result."""


def _half(trainer: Any, result: Any) -> Any:
    return (result[0] * 0.5, *result[1:]) if isinstance(result, tuple) else result * 0.5


def _faster(trainer: Any, optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        group["lr"] *= 1.5
    return optimizer


def _reversed(trainer: Any, sampler: Any) -> Any:
    return torch.utils.data.SequentialSampler(trainer.train_dataset)


def _more(trainer: Any, metrics: dict[str, float]) -> dict[str, float]:
    return {**metrics, "eval_more": 1.0}


CHANGES: dict[str, Change | None] = {
    "_save_checkpoint": None, "save_model": None, "_save": None, "_save_optimizer_and_scheduler": None, "_save_rng_state": None,
    "_save_scaler": None, "log": None, "evaluate": _more, "_evaluate": None, "_get_train_sampler": _reversed,
    "_get_eval_sampler": None, "get_batch_samples": None, "create_optimizer": _faster, "create_scheduler": None,
    "training_step": None, "compute_loss": _half, "prediction_step": None, "_prepare_inputs": None, "get_decay_parameter_names": None,
    "_maybe_log_save_evaluate": None, "_load_best_model": None, "_get_output_dir": None, "store_flos": None,
    "get_total_train_batch_size": None, "_clip_grad_norm": None, "_get_grad_norm": None, "_inner_training_loop": None,
}  # fmt: skip
"""The methods, each with what an override does to its result."""

WRITERS = ("_save_checkpoint", "save_model", "_save", "_save_optimizer_and_scheduler", "_save_rng_state")
"""Overrides that write a file beside the checkpoint's."""

UNCOUNTED = ("_get_output_dir", "_prepare_inputs")
"""Helpers without an effect, which we may call at other times."""


def shown(value: Any, folder: Path) -> Any:
    """An argument of a call, as it may be compared: paths below the run's folder, plain values, otherwise a type."""
    if isinstance(value, str | Path):
        return os.path.relpath(value, folder) if os.path.isabs(value) else str(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, dict):
        return sorted(name for name in value if not str(name).startswith(("hotspa/", "eval_", "train_")))
    return "number" if isinstance(value, float | torch.Tensor) else "object"


class Notes:
    """The calls of one run.

    Attributes:
        calls: Of each method, what each call was given, in order.
        weights: The sum of the weights that each writer saw, before and after `super()`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: dict[str, list[Any]] = {}
        self.weights: list[float] = []

    def add(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if name not in UNCOUNTED:
            given = (
                [shown(arg, self.folder) for arg in args],
                {key: shown(arg, self.folder) for key, arg in kwargs.items()},
            )
            self.calls.setdefault(name, []).append(given)

    def look(self, trainer: Any) -> None:
        self.weights.append(
            float(sum(parameter.detach().double().abs().sum() for parameter in trainer.model.parameters()))
        )


def override(name: str, notes: Notes, mark: str, when: str = "around") -> Callable[[list[Any]], Any]:
    """Returns a maker of an override, which gets a list that will hold its class: it notes the call, and calls `super()`.

    Args:
        mark: Names the files that it writes.
        when: Whether it writes before or after `super()`, or both (`around`).
    """

    def bound(owner: list[Any]) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            notes.add(name, args, kwargs)
            writes = name in WRITERS
            given = args[0] if args and isinstance(args[0], str) else None
            if writes and when != "after":
                notes.look(self)
                if given is not None:
                    _write(self, Path(given), f"{mark}-{name}-before")
            result = getattr(super(owner[0], self), name)(*args, **kwargs)
            if writes and when != "before":
                notes.look(self)
                folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
                _write(self, folder if given is None else Path(given), f"{mark}-{name}-after")
            change = CHANGES[name]
            return result if change is None else change(self, result)

        method.__module__ = __name__
        return method

    return bound


def _write(trainer: Any, folder: Path, name: str) -> None:
    if trainer.args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(str(trainer.state.global_step))


def overriding(base: type, names: Sequence[str], notes: Notes, mark: str = "own", when: str = "around") -> type:
    """A subclass of a Trainer, or of a mixin, that overrides these methods."""
    owner: list[Any] = []
    body = {name: override(name, notes, mark, when)(owner) for name in names}
    owner.append(type("Own", (base,), {**body, "__module__": __name__}))
    made: type = owner[0]
    return made


def drawn(number: int, notes: Notes, trainer: type = Trainer) -> type:
    """A subclass of a trainer drawn by a number: up to two mixins, derived from it or not, and a class over them."""
    draw = random.Random(number)

    def some() -> list[str]:
        return draw.sample(sorted(CHANGES), draw.randint(1, 6))

    def part(base: type, mark: str) -> type:
        return overriding(base, some(), notes, mark, draw.choice(("before", "after", "around")))

    mixins = [part(draw.choice((trainer, object)), f"mixin{index}") for index in range(draw.randint(0, 2))]
    plain = [mixin for mixin in mixins if not issubclass(mixin, trainer)]
    trainers = [mixin for mixin in mixins if issubclass(mixin, trainer)]
    order = [*plain, *trainers] if draw.random() < 0.7 else [*trainers, *plain]
    base = type("Base", (*order, *(() if trainers else (trainer,))), {"__module__": __name__})
    return part(base, "top")


def outcome(number: int, stock: bool, world_size: int, folder: Path) -> Any:
    """What the class of a number shows of a run, or the error of ours that rejects it before the first step."""
    kit, notes = Kit(stock, world_size, folder), Notes(folder / "out")
    # ours is inserted, or what they derive from
    cls = switched(drawn(number, notes)) if number % 2 and not stock else drawn(number, notes, kit.trainer_class)
    rows = kit.rows(12)
    args = kit.arguments(max_steps=3, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    try:
        seen = kit.train(kit.trainer(cls, args=args, train_dataset=rows, eval_dataset=rows))
        if world_size > 1:
            torch.distributed.barrier()
        return {**seen, "calls": notes.calls, "weights seen": notes.weights, "written": files_of(folder / "out")}
    except HotspaError as failure:
        assert not kit.counter.made
        return str(failure)
    finally:
        kit.close()


def wrong_with(found: Any, expected: Any) -> list[str]:
    """What of an outcome is neither that of the stock Trainer, nor a rejection by name."""
    if isinstance(found, str):
        return [] if re.search(r"HSP-0\d\d.*(" + "|".join(CHANGES) + ")", found) else [found]
    return differences(found, expected, 2e-5)


def files_of(output: Path) -> dict[str, str]:
    """The files that overrides have written into the checkpoints of a run, with their texts."""
    return {str(path.relative_to(output)): path.read_text() for path in sorted(output.rglob("checkpoint-*/*-*.txt"))}
