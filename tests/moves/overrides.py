"""Moves: overrides."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from transformers import TrainerCallback

from tests.moves import Kit, Move, Seen, padded


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

    rows = kit.rows()
    args = kit.arguments(eval_strategy="steps", eval_steps=2)
    return kit.train(kit.trainer(Own, args=args, train_dataset=rows, eval_dataset=rows))


def _own_eval_loader(kit: Kit) -> Seen:
    class Own(kit.trainer_class):  # type: ignore[name-defined]
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(self.eval_dataset, batch_size=6, collate_fn=padded)

    rows = kit.rows()
    args = kit.arguments(eval_strategy="steps", eval_steps=2)
    return kit.train(kit.trainer(Own, args=args, train_dataset=rows, eval_dataset=rows))


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


class _Watches(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.get_input_embeddings().register_forward_hook(lambda *_: None)


MOVES: tuple[Move, ...] = (
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
        "a callback hangs a forward hook on the model in `on_train_begin`", lambda kit: kit.train(kit.trainer(callbacks=[_Watches()])),
        error="has forward hooks", instead="the hooked model object does not run",
    ),
)  # fmt: skip
