"""What the product exchanges of objects that are somebody else's: a class, a method, a hook of the process; and why.

Each exchange goes through a function of this module, with its row of `REASONS`. The modules of replicas are
ours. `torch` and `transformers` themselves are never changed, but in the processes of `hf-hotspa run`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

REASONS = {
    "sampler": "a sampler gives the order of rows of all ranks, and nothing else sees it: its class notes what it gives",
    "stream": "accelerate has no way to choose the shard of a stream, which is to give each rank the rows of one reader",
    "parameter": "code that reads a weight of the model object would read an old value: its class raises an error instead",
    "optimizer": "low-bit optimizers decide by the size of a parameter, and ranks have shares: its class knows the whole",
    "packed": "a library chooses the class of a wrapper by the class of the weight inside, which a replica holds as codes",
    "bases": "a program may name Trainer classes behind HotSPaTrainer, and `Replaced` must be directly before `Trainer`",
    "configs": "`save_pretrained` writes configs first, and an error there would lose the weights",
    "log": "the loop's call of `trainer.log` is made by all ranks, and others are not: it is answered once by ours",
    "uncaught": "an error that all ranks raise is to be printed once, by the rank that had it",
    "signals": "SIGTERM and Ctrl-C are to save and stop on all ranks at the same step, during `train()` only",
    "steps": "a step of any optimizer of the process must have the gradients of the switched model (torch's own hook)",
}
"""Name -> reason. `signals` is `trainer/preemption.py`, `steps` torch's `register_optimizer_step_pre_hook`, which are
public ways to do it; all others have a function here. What `hf-hotspa run` changes in a program is in `hf_hotspa/commands/front`."""


def set_class(thing: Any, kind: type, reason: str) -> None:
    """Gives an object another class, derived from its own or the one that it had. Raises `TypeError`: it can have no
    other one, such as a list."""
    assert reason in REASONS
    thing.__class__ = kind


def set_bases(kind: type, bases: tuple[type, ...]) -> None:
    """Changes the bases of a class that is being made (`bases`)."""
    kind.__bases__ = bases


def set_once(thing: object, name: str, method: Callable[..., Any]) -> None:
    """Puts a method in front of the one of an object's class, unless it has its own; `take_back` ends that (`log`)."""
    vars(thing).setdefault(name, method)  # type: ignore[attr-defined]


def take_back(thing: object, name: str) -> None:
    """The inverse of `set_once`."""
    vars(thing).pop(name, None)  # type: ignore[attr-defined]


@contextmanager
def without_effect(kinds: Iterable[type], name: str) -> Iterator[None]:
    """Inside, a method of these classes does nothing (`configs`)."""
    own: dict[Any, Any] = {kind: vars(kind).get(name) for kind in kinds}
    for kind in own:
        setattr(kind, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for kind, method in own.items():
            if method is None:
                delattr(kind, name)
            else:
                setattr(kind, name, method)


def set_uncaught(hook: Callable[..., Any]) -> None:
    """Sets what prints the error that ends the process (`uncaught`)."""
    sys.excepthook = hook
