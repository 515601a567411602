"""What a script passes to a `Trainer`: arguments by their place, and `TrainingArguments` of transformers, or none, where
`HotSPaTrainingArguments` are expected.

What is made of `TrainingArguments` shares their attributes: what a script sets on its own object later counts, as with the stock Trainer.
A class of the user's stays one of the bases, with its fields, properties and methods.
"""

import dataclasses
import functools
import inspect
import logging
from typing import Any

from transformers import Trainer, TrainingArguments

from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.launcher import refuse_launcher_settings
from hf_hotspa.uncaught import show_errors_once

logger = logging.getLogger(__name__)


# those after `model` and `args`, in the order in which the stock Trainer takes them
_REST = list(inspect.signature(Trainer.__init__).parameters)[3:]


def named(rest: tuple[Any, ...], by_name: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the Trainer after `model` and `args`, by name, where some are given by their place.

    Raises:
        TypeError: there are too many, or one is given twice.
    """
    if len(rest) > len(_REST):
        raise TypeError(f"HotSPaTrainer takes {len(_REST) + 2} arguments by place, but {len(rest) + 2} were given")
    placed = dict(zip(_REST, rest, strict=False))
    if twice := sorted(placed.keys() & by_name.keys()):
        raise TypeError(f"HotSPaTrainer got multiple values for argument {twice[0]!r}")
    return {**placed, **by_name}


@functools.cache
def _with_flags(kind: Any) -> Any:
    """A class of arguments of the user's, with the `hotspa_*` flags."""
    namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce_ex__": _pickled}
    made = type(kind.__name__, (HotSPaTrainingArguments, kind), namespace)
    return dataclasses.dataclass(init=False, repr=False, eq=False)(made)


def _unfilled(kind: Any) -> Any:
    """An object of that class without attributes. Module-level: pickles call it."""
    return object.__new__(HotSPaTrainingArguments if kind is TrainingArguments else _with_flags(kind))


def _pickled(args: Any, protocol: Any) -> tuple[Any, ...]:
    """The class was made here, so a pickle (`training_args.bin`) names the user's, which it is made of."""
    return _unfilled, (type(args).__bases__[1],), vars(args)


def completed(args: TrainingArguments | None) -> HotSPaTrainingArguments:
    """The arguments of `HotSPaTrainer` for what a script passes to a `Trainer`, with every `hotspa_*` flag at its default.

    Raises:
        HotspaConfigError: they are none, or do not fit.
        UnsupportedError: a setting cannot be honoured.
    """
    show_errors_once()
    if isinstance(args, HotSPaTrainingArguments):
        return args
    if args is None:
        return HotSPaTrainingArguments(output_dir="tmp_trainer")  # as the stock Trainer
    if not isinstance(args, TrainingArguments):
        raise HotspaConfigError(
            f"args is a {type(args).__name__}", fix="pass HotSPaTrainingArguments(..., hotspa_strategies=...)"
        )
    if vars(args).get("deepspeed"):
        raise UnsupportedError(
            "TrainingArguments(deepspeed=...) has started DeepSpeed already",
            why="here its config is mapped onto arguments, field by field",
            fix="give deepspeed= to HotSPaTrainingArguments",
        )
    kind: Any = type(args)
    own: HotSPaTrainingArguments = _unfilled(kind)
    own.__dict__ = vars(args)
    for field in dataclasses.fields(HotSPaTrainingArguments):
        if field.name.startswith("hotspa_"):
            own.__dict__.setdefault(field.name, field.default)
    own.hotspa_mini_batch_size = None  # anew from the batch size, which may have changed since another trainer
    refuse_launcher_settings()
    own.complete()
    if own.process_index == 0:
        logger.warning(
            "%s: every hotspa_* flag is at its default (hotspa_strategies=%s); HotSPaTrainingArguments set them",
            kind.__name__,
            own.hotspa_strategies,
        )
    return own
