"""Moves: overrides."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from transformers import Trainer

from tests.moves import Kit, Move, Seen, on, padded
from tests.overriding import CHANGES, Notes, files_of, overriding


class _Backwards(Sampler[int]):
    """From the last row to the first; reversed in every other epoch."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        order = range(len(self.rows))
        return iter(order if self.epoch % 2 else reversed(order))


def _sampler(kit: Kit, make: Any, **changes: Any) -> Seen:
    class Own(kit.trainer_class):  # type: ignore[name-defined]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return make(self.train_dataset)

    return kit.train(kit.trainer(Own, args=kit.arguments(**changes)))


def _weighted(rows: Any) -> Any:
    weights = [1.0 + number % 4 for number in range(len(rows))]
    return WeightedRandomSampler(weights, len(rows), generator=torch.Generator().manual_seed(11))


def _train_loader(kit: Kit) -> Seen:
    asked: list[int] = []

    class Own(kit.trainer_class):  # type: ignore[name-defined]
        def get_train_dataloader(self) -> Any:
            asked.append(1)
            return super().get_train_dataloader()

    return {**kit.train(kit.trainer(Own)), "asked": asked}


def _own_train_loader(kit: Kit) -> Seen:
    class Own(kit.trainer_class):  # type: ignore[name-defined]
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=6, collate_fn=padded)  # the same on each rank

    return kit.train(kit.trainer(Own))


def _eval_loader(kit: Kit) -> Seen:
    class Own(kit.trainer_class):  # type: ignore[name-defined]
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return super().get_eval_dataloader(self.eval_dataset[:7])

    return _evaluated(kit, Own)


def _evaluated(kit: Kit, cls: Any) -> Seen:
    rows = kit.rows()
    args = kit.arguments(eval_strategy="steps", eval_steps=2)
    return kit.train(kit.trainer(cls, args=args, train_dataset=rows, eval_dataset=rows))


def _own_eval_loader(kit: Kit) -> Seen:
    class Own(kit.trainer_class):  # type: ignore[name-defined]
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(self.eval_dataset, batch_size=6, collate_fn=padded)

    return _evaluated(kit, Own)


def _step(kit: Kit) -> Seen:
    losses: list[float] = []

    class Own(kit.trainer_class):  # type: ignore[name-defined]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            losses.append(float(loss))
            return loss * 2  # what is logged; the gradient is there already

    return {**kit.train(kit.trainer(Own)), "losses": losses}


def _own_step(kit: Kit) -> Seen:
    class Own(kit.trainer_class):  # type: ignore[name-defined]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = model(**inputs).loss
            self.accelerator.backward(loss)
            return loss.detach()

    return kit.train(kit.trainer(Own))


def _overridden(name: str) -> Any:
    def run(kit: Kit) -> Seen:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(kit.trainer_class, name)(self, *args, **kwargs)

        return kit.train(kit.trainer(type("Own", (kit.trainer_class,), {name: method})))

    return run


def _logs(kit: Kit) -> Seen:
    class Own(kit.trainer_class):  # type: ignore[name-defined]
        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            logs["twice"] = 2 * logs.get("loss", 0.0)
            super().log(logs, *args, **kwargs)

    trainer = kit.trainer(Own)
    return {**kit.train(trainer), "twice": [log["twice"] for log in trainer.state.log_history]}


def _no_decay(kit: Kit) -> Seen:
    class Own(kit.trainer_class):  # type: ignore[name-defined]
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return [name for name, _ in model.named_parameters() if "mlp" in name]

    return kit.train(kit.trainer(Own, args=kit.arguments(weight_decay=0.5)))


def _gradient_hook(kit: Kit) -> Seen:
    model = kit.model()
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))
    return kit.train(kit.trainer(model=model))


def _watch(model: Any, **_: Any) -> None:
    model.get_input_embeddings().register_forward_hook(lambda *_: None)


def _insert(kit: Kit, cls: type) -> type:
    """A subclass of `Trainer` itself, or over a switched model."""
    if kit.stock:
        return cls
    from hf_hotspa.trainer import switched

    return switched(cls)


_SAVES = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def _all(make: Callable[[Kit, Notes], type], by_number: bool = False, **changes: Any) -> Callable[[Kit], Seen]:
    """The move of a class that overrides methods: how often they are called, with what, and which files they write.

    Args:
        by_number: Leaves out with what.
    """

    def run(kit: Kit) -> Seen:
        notes, rows = Notes(kit.folder / "out"), kit.rows()
        args = kit.arguments(**{**_SAVES, **changes})
        trainer = kit.trainer(make(kit, notes), args=args, train_dataset=rows, eval_dataset=rows)
        seen = kit.train(trainer)
        trainer.accelerator.wait_for_everyone()
        written = files_of(Path(args.output_dir))
        calls = {name: len(given) for name, given in notes.calls.items()} if by_number else notes.calls
        return {**seen, "calls": calls, "weights seen": notes.weights, "written": written}

    return run


def _second(kit: Kit, notes: Notes) -> type:
    """A Trainer class of the program behind ours."""
    other = overriding(Trainer, sorted(CHANGES), notes)
    return other if kit.stock else type("Mine", (kit.trainer_class, other), {"__module__": __name__})


def _with_mixin(kit: Kit, notes: Notes) -> type:
    mixin, other = (
        overriding(object, ["save_model", "log"], notes, "mixin"),
        overriding(Trainer, ["_save", "log"], notes, "other"),
    )
    return _insert(kit, type("Mine", (mixin, other), {"__module__": __name__}))


def _other_order(kit: Kit) -> Seen:
    class Own(Trainer):
        def __init__(self, factor: float, args: Any, model: Any, **kwargs: Any) -> None:
            self.factor = factor
            super().__init__(model, args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return self.factor * super().compute_loss(*args, **kwargs)

    cls = _insert(kit, Own)
    return kit.train(kit.trainer(lambda model, args, **kwargs: cls(0.5, args, model, **kwargs)))


def _on_main_alone(kit: Kit) -> Seen:
    class Own(Trainer):
        def log(self, *args: Any, **kwargs: Any) -> None:
            if self.is_world_process_zero():
                super().log(*args, **kwargs)

        def save_model(self, *args: Any, **kwargs: Any) -> None:
            if self.is_world_process_zero():
                super().save_model(*args, **kwargs)

    return kit.train(kit.trainer(_insert(kit, Own), args=kit.arguments(save_strategy="steps", save_steps=2)))


def _by_class(name: str) -> Callable[[Kit], Seen]:
    def run(kit: Kit) -> Seen:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(Trainer, name)(self, *args, **kwargs)

        cls = _insert(kit, type("Own", (Trainer,), {name: method}))
        args = kit.arguments(save_strategy="steps", save_steps=1)
        return kit.train(kit.trainer(lambda model, args, **kwargs: cls(model=model, args=args, **kwargs), args=args))

    return run


_SUPER = "`super()` instead of `Trainer`"

MOVES: tuple[Move, ...] = (
    Move("`switched(MyTrainer)` with overrides of everything that saves, logs, evaluates and steps",
         _all(lambda kit, notes: _insert(kit, overriding(Trainer, sorted(CHANGES), notes)))),
    Move("the same as `class Mine(HotSPaTrainer)`", _all(lambda kit, notes: overriding(kit.trainer_class, sorted(CHANGES), notes))),
    Move("the same as `class Mine(HotSPaTrainer, Other)`", _all(_second, by_number=True)),
    Move("the same with `load_best_model_at_end` and `save_only_model`",
         _all(lambda kit, notes: _insert(kit, overriding(Trainer, sorted(CHANGES), notes)),
              load_best_model_at_end=True, save_only_model=True, metric_for_best_model="loss"), tolerance=1e-4),
    Move("`switched(MyTrainer)` with a mixin in front, and `hotspa_async_save`", _all(_with_mixin, hotspa_async_save=True)),
    Move("`switched(MyTrainer)`, whose constructor takes other arguments, in another order", _other_order),
    Move("`log` and `save_model` overridden, which call `super()` on the main process alone", _on_main_alone),
    Move("`Trainer.__init__` called by class in `switched(MyTrainer)`", _by_class("__init__"),
         error=r"passes over HotSPaTrainer.__init__", instead=_SUPER),
    Move("`Trainer.train` called by class", _by_class("train"), error=r"passes over HotSPaTrainer.train", instead=_SUPER),
    Move("`Trainer.get_batch_samples` called by class", _by_class("get_batch_samples"),
         error=r"passes over HotSPaTrainer.get_batch_samples", instead=_SUPER),
    *(Move(f"`Trainer.{name}` called by class", _by_class(name))
      for name in ("compute_loss", "log", "create_optimizer", "create_scheduler", "save_model", "training_step", "evaluate")),
    Move(
        "`_get_train_sampler` overridden: a custom order, by epoch",
        lambda kit: _sampler(kit, _Backwards, max_steps=8),
    ),
    Move("`_get_train_sampler` overridden: `RandomSampler`", lambda kit: _sampler(kit, RandomSampler)),
    Move("`_get_train_sampler` overridden: `WeightedRandomSampler`, which repeats rows", lambda kit: _sampler(kit, _weighted)),
    Move(
        "`_get_train_sampler` overridden: some of the rows",
        lambda kit: _sampler(
            kit, lambda rows: SubsetRandomSampler(range(2, 14), torch.Generator().manual_seed(5)), max_steps=3
        ),
    ),
    Move("`_get_train_sampler` overridden: `None`", lambda kit: _sampler(kit, lambda rows: None)),
    Move("`get_train_dataloader` overridden, calls `super()`", _train_loader),
    Move("`get_eval_dataloader` overridden: `super()` of other rows", _eval_loader),
    Move("`training_step` overridden, calls `super()`", _step),
    Move("`log` overridden", _logs),
    Move("`get_decay_parameter_names` overridden", _no_decay),
    Move(
        "`get_train_dataloader` overridden: a custom `DataLoader`", _own_train_loader,
    ),
    Move(
        "`get_eval_dataloader` overridden: a custom `DataLoader`", _own_eval_loader,
    ),
    Move(
        "`training_step` overridden with a custom forward pass", _own_step,
    ),
    Move(
        "`_get_eval_sampler` overridden", _overridden("_get_eval_sampler"),
    ),
    Move(
        "`_prepare_inputs` overridden", _overridden("_prepare_inputs"),
    ),
    Move(
        "`compute_loss_context_manager` overridden", _overridden("compute_loss_context_manager"),
    ),
    Move(
        "a gradient hook on a parameter", _gradient_hook, left=True, error="gradient hook",
        instead="`trainer.engine.full_gradients()`; a custom loss",
    ),
    Move(
        "a callback hangs a forward hook on the model in `on_train_begin`", lambda kit: kit.train(kit.trainer(callbacks=[on(on_train_begin=_watch)])),
        error="has forward hooks", instead="the hooked model object does not run",
    ),
)  # fmt: skip
