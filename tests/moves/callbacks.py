"""Moves: callbacks."""

import contextlib
from typing import Any

import torch

from tests.moves import ROWS, Kit, Move, Seen, on


def _norms(model: Any) -> list[float]:
    """Norms of the parameters: they show whether the weights are current."""
    return [float(p.detach().double().norm()) for p in model.parameters()]


def _looking(kit: Kit, event: str, read_model: Any = _norms, **changes: Any) -> Seen:
    """Trains with a callback that reads the model at an event."""
    looks: list[Any] = []
    look = on(**{event: lambda state, model, **_: looks.append([state.global_step, read_model(model)])})
    rows = kit.rows()
    trainer = kit.trainer(args=kit.arguments(**changes), train_dataset=rows, eval_dataset=rows[:8], callbacks=[look])
    return {**kit.train(trainer), "looks": looks}


def _samples(model: Any) -> list[int]:
    model.eval()
    text = model.generate(torch.tensor([[5, 9, 13, 21]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    model.train()
    return text[0].tolist()


def _metrics(kit: Kit) -> Seen:
    rows, looks = kit.rows(), []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        looks.append(_norms(trainer.model))
        return {"rows": float(len(prediction.label_ids))}

    args = kit.arguments(eval_strategy="steps", eval_steps=2)
    trainer = kit.trainer(args=args, train_dataset=rows, eval_dataset=rows, compute_metrics=compute_metrics)
    return {**kit.train(trainer), "looks": looks}


def _evaluate_overridden(kit: Kit) -> Seen:
    rows, looks = kit.rows(), list[Any]()

    base: Any = kit.trainer_class

    class Own(base):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            looks.append(_samples(self.model))
            metrics = super().evaluate(*args, **kwargs)
            looks.append(_norms(self.model))
            return metrics

    args = kit.arguments(eval_strategy="steps", eval_steps=2, learning_rate=2e-2)
    return {**kit.train(kit.trainer(Own, args=args, train_dataset=rows, eval_dataset=rows)), "looks": looks}


def _raises(error: BaseException) -> Any:
    def end(state: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise error

    return on(on_step_end=end)


def _interrupted(kit: Kit) -> Seen:
    trainer = kit.trainer(callbacks=[_raises(KeyboardInterrupt())])
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    if kit.world_size > 1 and not kit.stock:
        trainer.materialize()
    return {"norms": _norms(trainer.model)}


def _resumed(kit: Kit) -> Seen:
    changes = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(kit.folder / "resumed")}
    kit.train(kit.trainer(args=kit.arguments(**changes)))
    looks: list[Any] = []
    look = on(on_train_begin=lambda state, model, **_: looks.append([state.global_step, _norms(model)]))
    trainer = kit.trainer(args=kit.arguments(**changes), callbacks=[look])
    return {**kit.train(trainer, resume_from_checkpoint=f"{changes['output_dir']}/checkpoint-2"), "looks": looks}


def _epsilon_changed(kit: Kit) -> Seen:
    """Changes a number on the object that the forward pass reads."""
    change = on(on_train_begin=lambda model, **_: setattr(model.model.norm, "variance_epsilon", 0.5))
    return kit.train(kit.trainer(callbacks=[change]))


class _Pruned(Exception):
    """Raised by a callback to end a run."""


def _pruned(kit: Kit) -> Seen:
    trainer, found = kit.trainer(callbacks=[_raises(_Pruned("trial 3"))]), None
    try:
        trainer.train()
    except Exception as error:
        found = error if kit.world_size == 1 or kit.stock else error.__cause__
    if kit.world_size > 1 and not kit.stock:
        trainer.materialize()
    return {"error": repr(found), "step": trainer.state.global_step, "norms": _norms(trainer.model)}


_EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": ROWS // 2}

MOVES: tuple[Move, ...] = (
    Move(
        "samples of `model.generate` in `on_evaluate`",
        lambda kit: _looking(kit, "on_evaluate", _samples, eval_strategy="steps", eval_steps=1, learning_rate=2e-2),
    ),
    Move("weights looked at in `on_log`", lambda kit: _looking(kit, "on_log")),
    Move("weights looked at in `on_save`", lambda kit: _looking(kit, "on_save", save_strategy="steps", save_steps=2)),
    Move("weights looked at in `on_epoch_end`", lambda kit: _looking(kit, "on_epoch_end", **_EPOCHS)),
    Move("weights looked at in `on_epoch_begin`", lambda kit: _looking(kit, "on_epoch_begin", **_EPOCHS)),
    Move("weights looked at in `on_train_end`", lambda kit: _looking(kit, "on_train_end")),
    Move("weights looked at in `on_step_end`", lambda kit: _looking(kit, "on_step_end")),
    Move("`compute_metrics` looks at `trainer.model`", _metrics),
    Move("`evaluate` overridden, which looks at `self.model`", _evaluate_overridden),
    Move("weights looked at in `on_train_begin` of a resumed run", _resumed),
    Move(
        "a number in a module (`variance_epsilon`, `scaling`, ...) changed in `on_train_begin`, or later",
        _epsilon_changed,
        error=r"'model.norm' has variance_epsilon=0.5, and 1e-0\d when the training had started",
        instead="set it in the config before training",
    ),
    Move(
        "a callback raises a custom exception, which the script catches",
        _pruned,
        ours="on several processes it is the cause of the `CallbackError` that all raise",
    ),
    Move(
        "`KeyboardInterrupt`, then reading the model",
        _interrupted,
        ours="on several processes after `trainer.materialize()`",
    ),
)
