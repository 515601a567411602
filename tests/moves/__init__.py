"""User actions on a `Trainer`, one move each: the result must equal the stock Trainer's, or an error must name the cause
before the first step. There is no third outcome.

A `Move` builds a trainer from a `Kit`, which holds either the stock classes or ours, and returns the observable results
of its run. `tests/gloo/test_moves.py` runs every move with both and compares, but for those that fuzzers draw; `python -m tests.moves` writes
docs/moves.md and its table. Add a move to the file of its group for each new feature, argument or hook.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from tests.families import tiny_model
from tests.oracle import random_rows

ROWS, MINI_BATCH, LONGEST = 20, 6, 60
STRATEGIES = {1: "dp1:64@128", 2: "dp2:16@32,tp2:64@64"}
"""The strategies of ours, by number of processes."""

COMMON: dict[str, Any] = {
    "max_steps": 4, "learning_rate": 5e-3, "seed": 7, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True,
    "report_to": "none", "save_strategy": "no", "per_device_train_batch_size": MINI_BATCH,
    "per_device_eval_batch_size": ROWS,
}  # fmt: skip
"""The arguments of every move; the move's own arguments override them."""

GROUPS = (
    "arguments", "data", "collators", "losses", "optimizers", "overrides", "callbacks", "checkpoints", "models",
)  # fmt: skip
"""The files of moves, in the order of the page; each has a tuple `MOVES`."""

Seen = dict[str, Any]
"""The observable results of a run, by name: numbers, texts, tensors, or lists and mappings of them."""


class StepCounter(TrainerCallback):
    """Counts optimizer steps: an expected error must be raised before the first step has changed a weight."""

    made = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.made += 1


def on(**events: Callable[..., Any]) -> TrainerCallback:
    """A user's callback with functions for events, each of the arguments that it takes by name."""

    def method(event: Callable[..., Any]) -> Any:
        return lambda self, args, state, control, **kwargs: (
            event(args=args, state=state, control=control, **kwargs) and None
        )

    return type("Own", (TrainerCallback,), {name: method(event) for name, event in events.items()})()


@dataclass
class Kit:
    """The parts from which a move builds its trainer.

    Args:
        stock: Whether the classes are transformers' own.
        folder: A directory of this move, the same on all ranks.
        default: Whether every `hotspa_*` flag stays at its default.
    """

    stock: bool
    world_size: int
    folder: Path
    default: bool = False

    def __post_init__(self) -> None:
        self.counter = StepCounter()
        self.trainers: list[Any] = []

    @property
    def trainer_class(self) -> Any:
        """`Trainer` or `HotSPaTrainer`: also the base of a user's subclass."""
        if self.stock:
            return Trainer
        from hf_hotspa.trainer.trainer import HotSPaTrainer

        return HotSPaTrainer

    def arguments(self, **changes: Any) -> Any:
        """Training arguments: `COMMON` and the changes. `output_dir` is the folder of the move. The rows of a mini-batch are
        divided among the processes."""
        given = {**COMMON, "output_dir": str(self.folder / "out"), **changes}
        given["per_device_train_batch_size"] = max(1, given["per_device_train_batch_size"] // self.world_size)
        if self.stock:
            own = [name for name in given if name.startswith("hotspa_")]
            return TrainingArguments(**{name: value for name, value in given.items() if name not in own})
        from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

        ours = {"hotspa_report": False} | ({} if self.default else {"hotspa_strategies": STRATEGIES[self.world_size]})
        return HotSPaTrainingArguments(**{**ours, **given})

    def model(self, family: str = "llama_gqa_bias", **changes: Any) -> PreTrainedModel:
        """A tiny model, the same in every kit."""
        return tiny_model(family, **changes)

    def rows(self, count: int = ROWS, seed: int = 3) -> list[dict[str, Any]]:
        """Rows of `input_ids` and `labels`, of unequal lengths; every third has masked labels."""
        return random_rows(count, 163, longest=LONGEST, seed=seed)

    def trainer(self, cls: Any = None, **kwargs: Any) -> Any:
        """A trainer of the kit. Model, arguments and rows have defaults; if the stock class trains, so has the collator,
        which pads. `cls` is a subclass of `trainer_class`, or a factory."""
        given = {"model": None, "args": None, "train_dataset": None, **kwargs}
        if given["model"] is None and "model_init" not in given:
            given["model"] = self.model()
        given["args"] = given["args"] or self.arguments()
        if given["train_dataset"] is None:
            given["train_dataset"] = self.rows()
        if (self.stock or self.default) and given.get("data_collator") is None:
            given["data_collator"] = padded
        given["callbacks"] = [*(given.get("callbacks") or []), self.counter]
        self.trainers.append((cls or self.trainer_class)(**given))
        return self.trainers[-1]

    def train(self, trainer: Any, **kwargs: Any) -> Seen:
        """Trains, and returns losses, rates, norms, step and epoch of each log, and the weights."""
        result = trainer.train(**kwargs)
        keys = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch", "step")
        logs = [{key: log[key] for key in keys if key in log} for log in trainer.state.log_history]
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        return {"logs": logs, "weights": weights, "training loss": result.training_loss}

    def close(self) -> None:
        """Releases the resources of the trainers. Collective."""
        for trainer in self.trainers:
            if hasattr(trainer, "close_engine"):
                trainer.close_engine()
        self.trainers.clear()


@dataclass(frozen=True)
class Drawn:
    """In the place of a run: what `tests/trainer_fuzz.py` draws among its runs, which are compared in fp64."""

    field: str
    value: Any

    def __call__(self, kit: Kit) -> Seen:
        raise NotImplementedError("tests/trainer_fuzz.py runs it")


@dataclass(frozen=True)
class Move:
    """A user action.

    Args:
        name: The action, as on the page: short, plain, in the terms of the field.
        run: Performs it with a kit, and returns the observable results; or says which draws do.
        error: A regular expression that the error message must match; empty if ours must be equal. The error is a
            `HotspaError` on every rank, before the first step.
        instead: For the page, if it is not supported: the alternative.
        left: The error is raised only if a `hotspa_*` flag is set: without one the stock Trainer trains, so ours is equal.
        tolerance: The largest relative difference of numbers and tensors.
        ours: A remark for the page, if it is equal.
    """

    name: str
    run: Callable[[Kit], Seen]
    error: str = ""
    instead: str = ""
    left: bool = False
    tolerance: float = 2e-5
    ours: str = ""

    def __post_init__(self) -> None:
        assert not self.error or self.instead, f"{self.name}: an unsupported move names the alternative"


def losing(base: Any, loss: Callable[..., Any]) -> Any:
    """A user's subclass whose `compute_loss` is `loss(trainer, model, inputs, num_items_in_batch)`, perhaps with outputs."""

    class Own(base):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            out = loss(self, model, inputs, num_items_in_batch)
            value, outputs = out if isinstance(out, tuple) else (out, None)
            return (value, outputs) if return_outputs else value

    return Own


def with_arguments(**changes: Any) -> Callable[[Kit], Seen]:
    """The move of training with changed arguments, on rows that are also evaluated."""

    def run(kit: Kit) -> Seen:
        rows = kit.rows()
        return kit.train(kit.trainer(args=kit.arguments(**changes), train_dataset=rows, eval_dataset=rows))

    return run


def padded(examples: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A user's stock collator for rows with `input_ids` and `labels`: pads on the right, masks pads."""
    longest = max(len(e["input_ids"]) for e in examples)

    def column(key: str, value: int) -> Tensor:
        return torch.tensor([list(e[key]) + [value] * (longest - len(e[key])) for e in examples])

    mask = torch.tensor([[1] * len(e["input_ids"]) + [0] * (longest - len(e["input_ids"])) for e in examples])
    return {"input_ids": column("input_ids", 0), "labels": column("labels", -100), "attention_mask": mask}


def all_moves() -> dict[str, tuple[Move, ...]]:
    """Every move, by group."""
    from importlib import import_module

    return {group: import_module(f"tests.moves.{group}").MOVES for group in GROUPS}


def differences(found: Any, expected: Any, tolerance: float, place: str = "") -> list[str]:
    """The differences between the results of two runs, as texts; empty if they are equal."""
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            return [f"{place}: {sorted(found) if isinstance(found, Mapping) else found}, not {sorted(expected)}"]
        pairs = [(found[key], expected[key], f"{place}/{key}") for key in expected]
    elif isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return [f"{place}: {found!r:.200}, not {expected!r:.200}"]
        pairs = [(f, e, f"{place}[{i}]") for i, (f, e) in enumerate(zip(found, expected, strict=True))]
    elif isinstance(expected, Tensor):
        if found.shape != expected.shape:
            return [f"{place}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"]
        error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9)
        return [] if error <= tolerance else [f"{place}: relative difference {error:.2e}"]
    elif isinstance(expected, float):
        near = found == expected or abs(found - expected) <= 5 * tolerance * max(abs(expected), 1e-9)
        return [] if near or (found != found and expected != expected) else [f"{place}: {found}, not {expected}"]
    else:
        return [] if found == expected else [f"{place}: {found!r:.200}, not {expected!r:.200}"]
    return [text for f, e, where in pairs for text in differences(f, e, tolerance, where)]
