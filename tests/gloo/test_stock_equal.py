"""`HotSPaTrainer` against the stock Trainer under DDP on as many ranks, in fp64, for what users write around a Trainer
and `tests/trainer_fuzz.py` does not draw.

A case is a subclass (or none), training arguments, what the constructor is given, and the strategies of ours. All cases of a
kind run in one world, each with both classes, one after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hotspa.errors import HotspaError
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import Outputs
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests import token_heads
from tests.families import MIXTURE, tiny_model
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows, relative_error
from tests.switched import batch_of

pytestmark = pytest.mark.gloo

DENSE, LONGEST, EXACT, PREDICTIONS = "llama_gqa_bias", 40, 1e-11, 1e-6
"""Predictions are gathered in fp32."""
COMMON = {
    "per_device_train_batch_size": 3, "per_device_eval_batch_size": 3, "learning_rate": 5e-3, "weight_decay": 0.1,
    "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 1, "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "use_cpu": True, "seed": 3, "disable_tqdm": True, "max_steps": 3,
}  # fmt: skip


def as_it_is(base: type) -> type:
    """No subclass."""
    return base


@dataclass
class Case:
    """What a user writes.

    Args:
        pools: Strategies on 2 ranks, and on 4.
        cls: Makes the user's class of `Trainer` or `HotSPaTrainer`.
        arguments: Training arguments.
        given: Makes what the constructor is given.
        family: Of the model, unless `model` makes it.
        seen: What of the trainer is compared beside losses, norms and weights.
        wide: Whether it runs among the slow tests only, on 4 ranks: others show on 2 ranks nearly all of it.
    """

    pools: tuple[str, str]
    cls: Callable[[type], type] = as_it_is
    arguments: dict[str, Any] = field(default_factory=dict)
    given: Callable[[], dict[str, Any]] = dict
    family: str = DENSE
    model: Callable[[], Any] | None = None
    seen: Callable[[Any], Any] = lambda trainer: None
    wide: bool = False


def fetched_in_double():
    """Within an operation on lazy logits the patch for fp64 is off, so it is put on again while they are computed."""
    fetch = Outputs.logits

    def fetched(self, *args):
        with exact_in_double(torch.float64):
            return fetch(self, *args)

    Outputs.logits = fetched


# -- losses -----------------------------------------------------------------------------------------------------------


def nll_of(logits, labels):
    """[B, L - 1] and the mask of labels."""
    mask = labels[:, 1:] != -100
    log_p = logits[:, :-1].log_softmax(-1)
    return -log_p.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * mask, mask


def with_margin(base):
    """The model's own loss, and one of its logits that is no sum over tokens: it squares the means of rows."""

    class Margin(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**{**inputs, "num_items_in_batch": num_items_in_batch})
            nll, mask = nll_of(outputs.logits, inputs["labels"])
            of_row = nll.sum(1) / mask.sum(1).clamp(min=1)
            loss = outputs.loss * self.accelerator.num_processes + 0.3 * of_row.square().mean()
            return (loss, outputs) if return_outputs else loss

    return Margin


def two_backwards(base):
    """A step that goes backward twice: the Trainer's own, and one with another loss of the same batch."""

    class Two(base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            inputs = self._prepare_inputs(inputs)
            nll, mask = nll_of(model(**inputs).logits, inputs["labels"])
            extra = (nll.sum(1) / mask.sum(1).clamp(min=1)).exp().mean() / 50
            self.accelerator.backward(extra)
            return loss + extra.detach()

    return Two


def own_step(base):
    """A step without `super()`, which leaves out every second backward."""

    class Own(base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = model(**self._prepare_inputs(inputs)).loss * 0.5
            if self.state.global_step % 2 == 0:
                self.accelerator.backward(loss)
            return loss.detach()

    return Own


# -- data -------------------------------------------------------------------------------------------------------------


def with_loader(base):
    """A data loader of the user's own, handed to accelerate."""

    class Loaded(base):
        def get_train_dataloader(self):
            order = torch.Generator().manual_seed(9)
            loader = DataLoader(
                self.train_dataset, batch_size=2, shuffle=True, generator=order, collate_fn=batch_of, drop_last=True
            )
            return self.accelerator.prepare(loader)

    return Loaded


def to_one_width(rows):
    """One rank reads the stream for all, and cuts its batches into those of ranks."""
    return batch_of([*rows, {"input_ids": [3] * LONGEST, "labels": [-100] * LONGEST}]) | {}


class Stream(IterableDataset):
    """Rows that can only be read one after the other; each worker its part."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        rows = random_rows(40, 163, longest=LONGEST, seed=11)
        yield from rows[worker.id :: worker.num_workers] if worker is not None else rows


# -- around the loop --------------------------------------------------------------------------------------------------


def with_prediction_step(base):
    """Its own loss in evaluation, and a few of the logits as predictions."""

    class Own(base):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                outputs = model(**inputs)
                nll, mask = nll_of(outputs.logits, inputs["labels"])
            loss = outputs.loss + (nll.sum(1) / mask.sum(1).clamp(min=1)).max()
            return loss, outputs.logits[..., :7].contiguous(), inputs["labels"]

    return Own


class Steering(TrainerCallback):
    """Notes each event; asks for an evaluation and a log, changes the rate, and ends the training early."""

    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self.seen.append(("begin", state.global_step, optimizer.param_groups[0]["lr"]))

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.3 if state.global_step else 0.0

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(("end", state.global_step))
        control.should_evaluate = state.global_step == 2
        control.should_training_stop = state.global_step == 4

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(("log", state.global_step))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.seen.append(("evaluate", state.global_step))

    def on_prediction_step(self, args, state, control, **kwargs):
        self.seen.append(("prediction", state.global_step))

    def on_epoch_end(self, args, state, control, **kwargs):
        self.seen.append(("epoch", state.global_step, round(state.epoch, 6)))


class Phases(TrainerCallback):
    """The strategies that steps ran under."""

    def __init__(self):
        self.strategies = set()

    def on_step_report(self, args, state, control, report):
        self.strategies.update(phase.strategy for phase in report.phases)


def noted(trainer):
    [callback] = [c for c in trainer.callback_handler.callbacks if isinstance(c, Steering)]
    return callback.seen


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}
LOSSES = {
    "no sum over tokens": Case(
        ("cp2:14@64,tp2+sp:64@96", "cp2tp2:14@64,tp4+sp:64@96"), with_margin, EVALUATES | {"max_steps": 4}
    ),
    "two backwards": Case(("dp2:14@64,tp2+rc:64@96", "tp2pp2:14@64,dp2tp2+rc:64@96"), two_backwards),
    "passes of a step that need other strategies": Case(
        ("dp2:14@64,cp2:64@96", "dp4:14@64,dp2cp2:64@96"),
        own_step,
        {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1, "max_steps": 6},
    ),
    "experts without a sum over tokens": Case(
        ("tp2ep2+sp:14@64,dp2ep2+rc:64@96", "dp2pp2ep2:14@64,tp4ep4:64@96"), with_margin, family=MIXTURE, wide=True
    ),
}
DATA = {
    "a metric of what is left of logits": Case(
        ("dp2:14@64,cp2:64@96", "dp4:14@64,cp4:64@96"),
        arguments=EVALUATES | {"include_for_metrics": ["inputs", "loss"], "batch_eval_metrics": False},
        given=lambda: {
            "compute_metrics": lambda p: {"first": float(p.predictions[0].sum()), "losses": float(p.losses.sum())},
            "preprocess_logits_for_metrics": lambda logits, labels: logits[..., :5] * 2,
        },
        wide=True,
    ),
    "callbacks": Case(
        ("dp2:14@64,tp2+z3:64@96", "dp4:14@64,dp2tp2+z3:64@96"),
        arguments={"max_steps": 9, "logging_steps": 2},
        given=lambda: {"callbacks": [Steering()]},
        seen=noted,
    ),
    "a data loader": Case(("cp2+rc:14@64,tp2:64@96", "cp4+rc:14@64,tp4:64@96"), with_loader),
    "a stream that one rank reads": Case(
        ("dp2:14@64,tp2:64@96", "dp4:14@64,tp4:64@96"),
        arguments={"dataloader_num_workers": 1, "accelerator_config": {"dispatch_batches": True}, "max_steps": 2},
        given=lambda: {"train_dataset": Stream(), "data_collator": to_one_width},
        wide=True,
    ),
    "prediction_step": Case(
        ("dp2+z2:14@64,pp2:64@96", "dp4+z2:14@64,dp2pp2:64@96"),
        with_prediction_step,
        EVALUATES,
        given=lambda: {"compute_metrics": lambda p: {"sum": float(p.predictions[p.label_ids != -100].sum())}},
    ),
}
LABELLED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **EVALUATES}


def labelled(kind, left=False, labels=3):
    """Rows with labels of a kind, and their collator."""
    some = token_heads.rows(26, kind, labels, seed=1)
    collate = partial(token_heads.batch_of, left=left)
    return {"train_dataset": some, "eval_dataset": some[:11], "data_collator": collate, "compute_metrics": near}


def near(prediction):
    numbers, labels = prediction
    best = numbers.argmax(-1)
    return {
        "sum": float(np.abs(numbers[labels != -100]).sum()),
        "same": int((best == labels).sum() if best.shape == labels.shape else 0),
    }


HEADS = {
    "classes of rows": Case(
        ("dp2:16@64,tp2+sp:64@128", "cp2tp2:16@64,tp4+sp:64@128"), arguments=LABELLED,
        given=partial(labelled, "single_label_classification"),
        model=partial(token_heads.headed, DENSE, "single_label_classification", 3), wide=True,
    ),
    "several classes of a row": Case(
        ("dp2+z3:16@64,pp2:64@128", "dp4+z3:16@64,tp2pp2:64@128"), arguments=LABELLED,
        given=partial(labelled, "multi_label_classification"),
        model=partial(token_heads.headed, "qwen3_qk_norm_tied", "multi_label_classification", 3), wide=True,
    ),
    "classes of tokens, padded on the left": Case(
        ("dp2:16@64,cp2+ck9:64@128", "dp4:16@64,cp2dp2+rc:64@128"), arguments=LABELLED,
        given=partial(labelled, "tokens", left=True), model=partial(token_heads.headed, DENSE, "tokens", 3),
    ),
}  # fmt: skip
KINDS = {"losses": LOSSES, "data": DATA, "heads": HEADS}
NOT_COMPARED = ("runtime", "per_second", "total_flos", "preparation_time", "hotspa/")


def run(case, cls, folder, world_size):
    """Losses of steps, logs, predictions, weights, and what else is seen."""
    model = tiny_model(case.family, torch.float64) if case.model is None else case.model()
    rows = random_rows(26, model.config.vocab_size, longest=LONGEST, seed=5)
    arguments = {**COMMON, **case.arguments, "output_dir": folder}
    if cls is Trainer:
        args = TrainingArguments(**arguments)
    else:
        pool = case.pools[0 if world_size == 2 else 1]
        args = HotSPaTrainingArguments(**arguments, hotspa_strategies=pool, hotspa_report=False)
    losses, phases = [], Phases()

    class Noted(case.cls(cls)):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    given = {"train_dataset": rows, "eval_dataset": rows[:11], "data_collator": batch_of, **case.given()}
    trainer = Noted(model=model, args=args, **given)
    trainer.add_callback(phases)
    with exact_in_double(torch.float64):
        trainer.train()
        predicted = trainer.predict(given["eval_dataset"]) if case.arguments.get("eval_strategy") else None
    if cls is not Trainer:
        assert phases.strategies == {str(bucket.strategy) for bucket in parse_buckets(pool)}
        trainer.close_engine()
    logs = [
        {name: value for name, value in log.items() if not any(part in name for part in NOT_COMPARED)}
        for log in trainer.state.log_history
    ]
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    arrays = (predicted.predictions[..., :7], predicted.label_ids) if predicted is not None else None
    metrics = {n: v for n, v in predicted.metrics.items() if "_per_" not in n and "time" not in n} if predicted else {}
    return losses, [*logs, metrics], arrays, weights, case.seen(trainer)


def distance(found, expected):
    """Relative; of something near 0 absolute."""
    if found != found and expected != expected:  # a rank's batch without labels: the stock loss is not a number either
        return 0.0
    return abs(found - expected) / max(abs(expected), 1e-6)


def compared(found, expected):
    """By name the largest difference, and all of it that is no number."""
    losses, logs, arrays, weights, seen = expected
    own_losses, own_logs, own_arrays, own_weights, own_seen = found
    same = {
        "steps": len(own_losses) == len(losses) > 1,
        "logs": [sorted(log) for log in own_logs] == [sorted(log) for log in logs],
        "seen": own_seen == seen,
        "labels": arrays is None or np.array_equal(own_arrays[1], arrays[1]),
    }
    if not all(same.values()):
        return same, {}
    errors = {"loss": max(distance(a, b) for a, b in zip(own_losses, losses, strict=True))}
    for log, own in zip(logs, own_logs, strict=True):
        for name, value in log.items():
            errors[name] = max(errors.get(name, 0.0), distance(own[name], value))
    errors["weights"] = max(relative_error(own_weights[name], weight) for name, weight in weights.items())
    if arrays is not None:
        real = arrays[1] != -100
        errors["predictions"] = float(np.abs(own_arrays[0][real] - arrays[0][real]).max())
    return same, errors


def cases_of(kind, world_size):
    return {name: case for name, case in KINDS[kind].items() if world_size > 2 or not case.wide}


def both(rank, world_size, kind, folder):
    fetched_in_double()
    found = {}
    for name, case in cases_of(kind, world_size).items():
        expected = run(case, Trainer, f"{folder}/stock", world_size)
        try:
            found[name] = compared(run(case, HotSPaTrainer, f"{folder}/{name}", world_size), expected)
        except HotspaError as error:
            found[name] = {str(error): False}, {}
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_is_the_stock_trainer_under_ddp(world_size, kind, tmp_path):
    wrong = []
    for rank, cases in enumerate(run_ranks(world_size, both, kind, str(tmp_path), timeout=500)):
        assert list(cases) == list(cases_of(kind, world_size))
        for name, (same, errors) in cases.items():
            limits = {key: PREDICTIONS if key in ("predictions", "eval_sum", "test_sum") else EXACT for key in errors}
            too_far = {key: value for key, value in errors.items() if not value <= limits[key]}
            differs = [key for key, value in same.items() if not value]
            if too_far or differs:
                wrong.append(f"{name}, rank {rank}: {differs} {too_far}")
    assert not wrong, "\n".join(wrong)
