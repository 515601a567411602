"""Public reports about the Trainer, most of them of transformers and accelerate."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import EarlyStoppingCallback, TrainerCallback, get_linear_schedule_with_warmup
from transformers.loss.loss_utils import ForCausalLMLoss

from tests import trl_runs
from tests.lora import tiny_lora
from tests.moves import Kit, Move, Seen, losing, on, padded
from tests.moves.checkpoints import everyone, folders, loaded
from tests.public_reports.runs import (
    ARGMAX,
    BY_STEPS,
    EACH,
    LORA,
    OWN_READING,
    SAVES,
    evaluated,
    of_trl,
    run,
    stream,
    with_loss,
)


def short_stream_resumed(kit: Kit) -> Seen:
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **OWN_READING}
    rows = stream(kit.rows(12))
    seen = run(kit, rows=rows, **options)
    if not kit.stock:
        seen = run(kit, rows=rows, given={"model": kit.model(seed=5)}, resume="checkpoint-3", **options)
    return {name: seen[name] for name in ("logs", "weights")}


def metrics_by_batches(kit: Kit) -> Seen:
    calls: list[bool] = []
    sums = {"hits": 0.0, "labels": 0.0}

    def metric(predicted: Any, compute_result: bool) -> dict[str, float]:
        calls.append(compute_result)
        logits, labels = torch.as_tensor(predicted.predictions), torch.as_tensor(predicted.label_ids)
        real = labels[:, 1:] != -100
        sums["hits"] += float(((logits[:, :-1].argmax(-1) == labels[:, 1:]) & real).sum())
        sums["labels"] += float(real.sum())
        return {"hits": sums["hits"] / sums["labels"]} if compute_result else {}

    options = {**BY_STEPS, "per_device_eval_batch_size": 3, "batch_eval_metrics": True}
    return {
        **run(kit, rows=kit.rows(18), others=kit.rows(18), given={"compute_metrics": metric}, **options),
        "calls": calls,
    }


def losses_in_metrics(kit: Kit) -> Seen:
    def metric(predicted: Any) -> dict[str, float]:
        return {"mean": float(numpy.mean(predicted.losses)), "rows": float(len(predicted.losses))}

    options = {"per_device_eval_batch_size": 20 // kit.world_size, "include_for_metrics": ["loss"]}
    return run(kit, given={"compute_metrics": metric}, **BY_STEPS, **options)


def checkpointing_after_peft(kit: Kit) -> Seen:
    model = LORA()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.config.use_cache = False
    return run(kit, given={"model": model})


def use_reentrant(kit: Kit) -> Seen:
    options = {"gradient_checkpointing": True, "max_steps": 2}
    return {
        str(flag): run(kit, gradient_checkpointing_kwargs={"use_reentrant": flag}, **options) for flag in (True, False)
    }


def add_adapter(kit: Kit) -> Seen:
    model = kit.model()
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))
    return run(kit, given={"model": model})


def more_epochs(kit: Kit) -> Seen:
    options = {"max_steps": -1, "save_strategy": "epoch"}
    rows = kit.rows(18)
    run(kit, rows=rows, num_train_epochs=1, **options)
    return run(kit, rows=rows, given={"model": kit.model(seed=5)}, resume=True, num_train_epochs=2, **options)


def evaluate_a_dictionary(kit: Kit) -> Seen:
    trainer = kit.trainer()
    seen = kit.train(trainer)
    found = trainer.evaluate({"rows": kit.rows(), "others": kit.rows(10, seed=4)}, metric_key_prefix="test")
    return {**seen, "found": {name: value for name, value in found.items() if not name.endswith(("runtime", "second"))}}


def unknown_metric(kit: Kit) -> Seen:
    try:
        run(kit, load_best_model_at_end=True, metric_for_best_model="accuracy", **EACH)
    except KeyError as error:
        return {"names them": "eval_accuracy" in str(error) and "eval_loss" in str(error)}
    return {}


def modules_to_save_resumed(kit: Kit) -> Seen:
    given = {"model": LORA(modules_to_save=["lm_head"], target_modules=["q_proj"])}
    run(kit, given=given, max_steps=2, **SAVES)
    given = {"model": LORA(modules_to_save=["lm_head"], target_modules=["q_proj"])}
    return run(kit, given=given, resume="checkpoint-2", **SAVES)


def columns_kept(kit: Kit) -> Seen:
    def loss(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
        weight, labels = inputs.pop("weight"), inputs["labels"]
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        each = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        return (each.view(len(labels), -1).sum(-1) * weight).sum() / items, {"logits": logits}

    class Own(losing(kit.trainer_class, loss)):  # type: ignore[misc]
        def _set_signature_columns_if_needed(self) -> None:
            self._signature_columns = ["input_ids", "labels", "attention_mask", "weight"]

    def collate(examples: Any) -> Any:
        return {**padded(examples), "weight": torch.tensor([e["weight"] for e in examples])}

    rows = Dataset.from_list([{**row, "weight": 1.0 + i % 3, "source": "web"} for i, row in enumerate(kit.rows())])
    return run(kit, Own, rows=rows, others=rows, given={"data_collator": collate})


def collator_tokenizes(kit: Kit) -> Seen:
    rows = Dataset.from_list([{"text": "".join(chr(97 + i % 26) for i in row["input_ids"])} for row in kit.rows()])

    def collate(examples: Any) -> Any:
        ids = [[ord(c) for c in e["text"]] for e in examples]
        return padded([{"input_ids": row, "labels": row} for row in ids])

    return run(kit, rows=rows, others=rows, given={"data_collator": collate}, remove_unused_columns=False)


def rates_by_groups(kit: Kit) -> Seen:
    model = kit.model()
    groups = [{"params": model.model.parameters()}, {"params": model.lm_head.parameters(), "lr": 0.03}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    return run(kit, given={"model": model, "optimizers": (optimizer, get_linear_schedule_with_warmup(optimizer, 2, 4))})


def layers_trained_later(kit: Kit) -> Seen:
    model = kit.model()
    groups = [{"params": model.model.parameters(), "lr": 0.0}, {"params": model.lm_head.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)

    def later(state: Any, lr_scheduler: Any, **_: Any) -> None:
        if state.epoch:
            lr_scheduler.base_lrs[0] = 1e-3

    schedule = LambdaLR(optimizer, lambda step: 1 - step / 5)
    given = {"model": model, "optimizers": (optimizer, schedule), "callbacks": [on(on_epoch_begin=later)]}
    return run(kit, rows=kit.rows(18), given=given, max_steps=5)


def patience(first: int, then: int, resume: Any, **options: Any) -> Callable[[Kit], Seen]:
    """Ends early, and resumes with another patience."""

    def resumed(kit: Kit) -> Seen:
        for count, place in ((first, None), (then, resume)):
            stop = EarlyStoppingCallback(early_stopping_patience=count, early_stopping_threshold=0.5)
            given = {"callbacks": [stop]}
            seen = run(
                kit,
                given=given,
                resume=place,
                load_best_model_at_end=True,
                max_steps=8,
                learning_rate=1e-9,
                **EACH,
                **options,
            )
        return seen

    return resumed


class Shuffled(torch.utils.data.IterableDataset):
    """A stream with a different order in each epoch."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([self.rows[i] for i in order])


def epoch_by_a_callback(kit: Kit) -> Seen:
    seen = []

    def shuffle(train_dataloader: Any, **_: Any) -> None:
        data = train_dataloader.dataset
        seen.append(type(data).__name__)
        if isinstance(data, IterableDataset):
            data.set_epoch(data._epoch + 1)

    rows = stream(kit.rows(12)).shuffle(seed=3, buffer_size=12)
    return {
        **run(kit, rows=rows, given={"callbacks": [on(on_epoch_begin=shuffle)]}, max_steps=6, **OWN_READING),
        "seen": seen,
    }


def only_some_saved(kit: Kit) -> Seen:
    base: Any = kit.trainer_class

    class Own(base):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if self.state.global_step % 2 == 0:
                super()._save_checkpoint(model, trial)

    return run(kit, Own, **SAVES)


def older_signature(kit: Kit) -> Seen:
    base: Any = kit.trainer_class

    class Own(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    try:
        run(kit, Own)
    except TypeError as error:
        return {"names it": "num_items_in_batch" in str(error)}
    return {}


def mean_of_means(kit: Kit) -> Seen:
    trainer = kit.trainer(args=kit.arguments(per_device_train_batch_size=2, gradient_accumulation_steps=3))
    trainer.model_accepts_loss_kwargs = False
    return kit.train(trainer)


def more_tokens(kit: Kit) -> Seen:
    model = kit.model(tie_word_embeddings=True)
    torch.manual_seed(0)
    model.resize_token_embeddings(170, pad_to_multiple_of=64, mean_resizing=False)
    seen = run(kit, given={"model": model}, save_strategy="steps", save_steps=4)
    return {**seen, "loaded": loaded(kit.folder / "out" / "checkpoint-4"), "vocabulary": model.config.vocab_size}


def skipped_by_the_script(kit: Kit) -> Seen:
    options = {"save_strategy": "steps", "save_steps": 2, "ignore_data_skip": True, **OWN_READING}
    rows = stream(kit.rows(40))
    run(kit, rows=rows, **options)
    return run(kit, rows=rows.skip(12), given={"model": kit.model(seed=5)}, resume="checkpoint-2", **options)


def losses_only(kit: Kit) -> Seen:
    trainer = kit.trainer(args=kit.arguments(prediction_loss_only=True, **BY_STEPS), eval_dataset=kit.rows())
    return {
        **kit.train(trainer),
        "evaluated": evaluated(trainer),
        "kept": trainer.predict(kit.rows()).predictions is not None,
    }


def checkpointing_by_the_script(kit: Kit) -> Seen:
    model = kit.model()
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    return run(kit, given={"model": model})


def gradients_read(kit: Kit) -> Seen:
    norms: list[float] = []

    def read(model: Any, **_: Any) -> None:
        own = (
            kit.trainers[0].engine.full_gradients()
            if not kit.stock
            else {name: p.grad for name, p in model.named_parameters()}
        )
        norms.extend(float(own[name].norm()) for name, _ in kit.trainers[0].model.named_parameters())

    return {**run(kit, given={"callbacks": [on(on_pre_optimizer_step=read)]}), "norms": norms}


def hidden_term(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    outputs = model(**inputs, output_hidden_states=True, num_items_in_batch=items)
    term = 1e-3 * (outputs.hidden_states[-1] * inputs["attention_mask"][..., None]).pow(2).sum() / items
    trainer.log({"first": outputs.loss.item(), "second": term.item()})
    return outputs.loss + term, outputs


def terms_logged(kit: Kit) -> Seen:
    base: Any = kit.trainer_class

    class Own(base):
        entropies: list[float] = []

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
            shares = outputs.logits.log_softmax(-1)
            entropy = -(shares.exp() * shares).sum(-1)[inputs["labels"] != -100].sum() / num_items_in_batch
            self.entropies.append(float(entropy))
            loss = loss - 0.1 * entropy
            return (loss, outputs) if return_outputs else loss

        def log(self, logs: Any, start_time: Any = None) -> None:
            if self.entropies:
                logs["entropy"] = sum(self.entropies) / len(self.entropies)
                self.entropies.clear()
            super().log(logs, start_time)

    trainer = kit.trainer(Own, args=kit.arguments(logging_steps=2), data_collator=padded)
    return {
        **kit.train(trainer),
        "entropies": [log["entropy"] for log in trainer.state.log_history if "entropy" in log],
    }


def hidden_states_predicted(kit: Kit) -> Seen:
    first = {**ARGMAX, "preprocess_logits_for_metrics": lambda logits, labels: logits[0].argmax(-1)}
    return run(kit, given={"model": kit.model(output_hidden_states=True), **first}, **BY_STEPS)


def memory_metrics(kit: Kit) -> Seen:
    trainer = kit.trainer(args=kit.arguments(skip_memory_metrics=False), eval_dataset=kit.rows())
    return {"names": sorted(name for name in {**trainer.train().metrics, **trainer.evaluate()} if "mem" in name)}


class Changeable(torch.utils.data.Dataset):
    """Rows that a callback may change."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def rows_by_a_callback(kit: Kit) -> Seen:
    def other(state: Any, train_dataloader: Any, **_: Any) -> None:
        if state.epoch:
            train_dataloader.dataset.rows = kit.rows(18, seed=9)

    return run(kit, rows=Changeable(kit.rows(18)), given={"callbacks": [on(on_epoch_begin=other)]}, max_steps=6)


def logs_changed(kit: Kit) -> Seen:
    seen: list[float] = []

    def halve(logs: Any, **_: Any) -> None:
        if "loss" in logs:
            logs["loss"] /= 2
            logs["grad_norm"] = float(logs["grad_norm"]) / 2
            seen.append(logs["loss"])

    return {**run(kit, given={"callbacks": [on(on_log=halve)]}), "seen": seen}


def logged_by_epochs(kit: Kit) -> Seen:
    ends = on(on_epoch_end=lambda control, **_: setattr(control, "should_log", True))
    return run(
        kit, rows=kit.rows(18), given={"callbacks": [ends]}, logging_strategy="no", max_steps=-1, num_train_epochs=2
    )


def penalty(parameters: Any) -> Tensor:
    """The L1 norm of weights, scaled."""
    return 1e-2 * torch.stack([p.abs().sum() for p in parameters]).sum()


def norm_of_weights(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    outputs = model(**inputs, num_items_in_batch=items)
    return outputs.loss + penalty(model.parameters()), outputs


def norm_in_a_function(kit: Kit) -> Seen:
    model = kit.model()

    def function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits, after = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        return cross_entropy(logits, after, reduction="sum") / num_items_in_batch + penalty(model.parameters())

    return run(kit, given={"model": model, "compute_loss_func": function, "data_collator": padded})


def trained_twice(kit: Kit) -> Seen:
    trainer = kit.trainer()
    return {"first": kit.train(trainer), "second": kit.train(trainer)}


def epochs_of_events(kit: Kit) -> Seen:
    seen: list[Any] = []
    names = [
        name
        for name in vars(TrainerCallback)
        if name.startswith("on_") and name not in ("on_substep_end", "on_push_begin")
    ]

    def event(name: str) -> Any:
        return lambda state, **_: seen.append([name, state.epoch or 0.0, state.global_step])

    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}
    run(kit, rows=kit.rows(18), given={"callbacks": [on(**{name: event(name) for name in names})]}, **options)
    return {"seen": seen}


def losses_by_process(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = ForCausalLMLoss(outputs.logits, labels, trainer.model.config.vocab_size, num_items_in_batch=items)
    trainer.accelerator.gather(loss.detach().reshape(1))
    return loss * trainer.accelerator.num_processes, outputs


class Trial:
    """A trial of `Study`; `trial.FixedTrial` of optuna, too."""

    def __init__(self, params: dict[str, float], number: int) -> None:
        self.params, self.number = params, number

    def suggest_float(self, name: str, low: float, high: float) -> float:
        return self.params.setdefault(name, low if self.number else high)


class Study:
    """The optuna API that transformers uses."""

    def optimize(self, objective: Any, n_trials: int, **options: Any) -> None:
        self.trials: Any = [Trial({}, number) for number in range(n_trials)]
        for trial in self.trials:
            trial.value = objective(trial)

    def _is_multi_objective(self) -> bool:
        return False

    @property
    def best_trial(self) -> Any:
        return min(self.trials, key=lambda trial: trial.value)


@contextmanager
def optuna() -> Iterator[None]:
    """Pretends that it is installed."""
    module: Any = ModuleType("optuna")
    module.__spec__, module.Trial, module.create_study = ModuleSpec("optuna", None), Trial, lambda **options: Study()
    module.trial = SimpleNamespace(FixedTrial=Trial, BaseTrial=Trial)
    sys.modules["optuna"] = module
    try:
        yield
    finally:
        del sys.modules["optuna"]


def hyperparameter_search(kit: Kit) -> Seen:
    args = kit.arguments(max_steps=3, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3)
    trainer = kit.trainer(model_init=lambda: kit.model(), args=args, eval_dataset=kit.rows())
    with optuna():
        best = trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)}, n_trials=2
        )
    everyone(kit)
    chosen = [best.run_id, best.hyperparameters["learning_rate"], best.objective] if best else []
    return {"best": chosen, "folders": [folders(kit, f"out/run-{number}") for number in (0, 1)]}


def text_stream() -> dict[str, Any]:
    return {"train_dataset": stream([trl_runs.ROWS["text"](i) for i in range(60)])}


def text_and_source() -> dict[str, Any]:
    return {"train_dataset": Dataset.from_list([{**trl_runs.ROWS["text"](i), "source": "web"} for i in range(40)])}


def with_lengths(kit: Kit) -> Any:
    return Dataset.from_list([{**row, "tokens": len(row["input_ids"])} for row in kit.rows()])


def named_data_sets(kit: Kit) -> Any:
    return {"rows": kit.rows(), "others": kit.rows(10, seed=4)}


def of_one_length(kit: Kit) -> Any:
    rows = [(row["input_ids"] * 12)[:12] for row in kit.rows(13)]
    return stream([{"input_ids": row, "labels": row} for row in rows])


REPORTS: tuple[tuple[str, Move], ...] = (
    ("transformers 27161", Move(
        "label smoothing with a LoRA adapter: labels are shifted",
        lambda kit: run(kit, given={"model": LORA()}, label_smoothing_factor=0.1))),
    ("transformers 26413", Move(
        "a stream of fewer rows than `max_steps` needs, resumed in its second pass", short_stream_resumed,
        ours="like the uninterrupted run; the stock `Trainer` begins another pass")),
    ("transformers 10909", Move(
        "sampling by length with lengths in a separate column",
        lambda kit: run(
            kit, rows=with_lengths(kit), per_device_train_batch_size=20, train_sampling_strategy="group_by_length",
            length_column_name="tokens"))),
    ("transformers 15418", Move(
        "sampling by length over a stream, where it has no effect",
        lambda kit: run(kit, rows=stream(kit.rows(40)), train_sampling_strategy="group_by_length", **OWN_READING))),
    ("transformers 26209", Move(
        '`lr_scheduler_type="cosine_with_min_lr"` with `lr_scheduler_kwargs` as a text',
        lambda kit: run(kit, warmup_steps=1, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs='{"min_lr": 1e-3}'))),
    ("transformers 31667", Move(
        "`preprocess_logits_for_metrics` takes the arg-max, with `eval_accumulation_steps`",
        lambda kit: run(kit, given=ARGMAX, **BY_STEPS, per_device_eval_batch_size=4, eval_accumulation_steps=1))),
    ("transformers 39842", Move("`batch_eval_metrics`: a metric that keeps sums until `compute_result`", metrics_by_batches)),
    ("transformers 32307", Move('`include_for_metrics=["loss"]`: the losses in `compute_metrics`', losses_in_metrics)),
    ("transformers 26334", Move("`model.gradient_checkpointing_enable()` after `get_peft_model`", checkpointing_after_peft)),
    ("transformers 26969", Move('`gradient_checkpointing_kwargs={"use_reentrant": ...}`', use_reentrant)),
    ("transformers 25841", Move(
        "an adapter by `model.add_adapter`, without `get_peft_model`", add_adapter,
        left=True, error="is an adapter inside a", instead="`peft.get_peft_model(model, config)`")),
    ("transformers 33336", Move("a finished run resumed with more epochs, after its rate had come to 0", more_epochs)),
    ("transformers 24248", Move(
        "`auto_find_batch_size` with `eval_steps`, `save_steps` and `logging_steps` as parts of a run",
        lambda kit: run(kit, auto_find_batch_size=True, **{**EACH, "eval_steps": 0.5, "save_steps": 0.5}, logging_steps=0.25))),
    ("transformers 25127", Move(
        "a dictionary of evaluation data sets, one of whose losses chooses the best model",
        lambda kit: run(
            kit, others=named_data_sets(kit), load_best_model_at_end=True, metric_for_best_model="eval_others_loss",
            save_total_limit=1, **EACH))),
    ("transformers 24832", Move("`trainer.evaluate` of a dictionary, with a custom prefix", evaluate_a_dictionary)),
    ("transformers 19957", Move("`metric_for_best_model` that no evaluation reports: an error that lists the available ones", unknown_metric)),
    ("transformers 24252", Move(
        "LoRA with `modules_to_save`, resumed from a checkpoint", modules_to_save_resumed)),
    ("peft 2864", Move(
        "new tokens trained by `trainable_token_indices`, with tied embeddings",
        lambda kit: run(kit, given={"model": tiny_lora("qwen3_qk_norm_tied", target_modules=["q_proj"], trainable_token_indices=[5, 6])}))),
    ("transformers 43598", Move(
        "a column that the model does not take, kept by `_set_signature_columns_if_needed` for a `compute_loss`", columns_kept)),
    ("transformers 7823", Move("rows of text, which the collator tokenizes, with `remove_unused_columns=False`", collator_tokenizes)),
    ("transformers 10140", Move("an optimizer with a rate for each part of the model, and a schedule, both in `optimizers`", rates_by_groups)),
    ("transformers 20029", Move(
        "layers that are trained from the second epoch on: a callback sets `base_lrs` of the schedule", layers_trained_later)),
    ("transformers 28544", Move(
        "early stopping whose patience continues after a resume (`restore_callback_states_from_checkpoint`)",
        patience(4, 7, "checkpoint-3", restore_callback_states_from_checkpoint=True))),
    ("transformers 10290", Move("resuming a run that early stopping had ended", patience(2, 2, True))),
    ("transformers 23934", Move(
        '`lr_scheduler_type="reduce_lr_on_plateau"`',
        lambda kit: run(
            kit, lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "threshold": 0.9},
            metric_for_best_model="loss", **{**BY_STEPS, "eval_steps": 1}))),
    ("transformers 26541", Move(
        "a stream with `set_epoch`, in another order in each epoch",
        lambda kit: run(kit, rows=Shuffled(kit.rows(12)), max_steps=6, **OWN_READING))),
    ("transformers 27962", Move("a callback that sets the epoch of `train_dataloader.dataset`, a shuffled stream", epoch_by_a_callback)),
    ("transformers 15089", Move(
        "`save_total_limit=1` with `load_best_model_at_end`: the best one stays",
        lambda kit: run(
            kit, load_best_model_at_end=True, greater_is_better=True, metric_for_best_model="loss", save_total_limit=1, **EACH))),
    ("transformers 35070", Move("`_save_checkpoint` overridden: not every checkpoint is written", only_some_saved)),
    ("transformers 26548", Move(
        "a stream of rows of unequal lengths, padded by the collator, with `dispatch_batches=False`",
        lambda kit: run(kit, rows=stream(kit.rows(40)), given={"data_collator": padded}, **OWN_READING))),
    ("transformers 39392", Move(
        "`average_tokens_across_devices=False`: each process counts its own labels",
        lambda kit: run(kit, average_tokens_across_devices=False, given={"data_collator": padded}))),
    ("transformers 37766", Move("`compute_loss` of an older release, without `num_items_in_batch`: a `TypeError`", older_signature)),
    ("transformers 43595", Move("`trainer.model_accepts_loss_kwargs = False`: the mean of the means of micro-batches", mean_of_means)),
    ("transformers 32689", Move("`eval_on_start` with `compute_metrics`", lambda kit: run(kit, given=ARGMAX, eval_on_start=True, **BY_STEPS))),
    ("accelerate 2708", Move(
        "`split_batches=True`, and how many steps an epoch has",
        lambda kit: run(
            kit, given={"data_collator": padded}, per_device_train_batch_size=6 * kit.world_size, max_steps=-1, num_train_epochs=1,
            accelerator_config={"split_batches": True}))),
    ("accelerate 961", Move(
        "a stream with `dispatch_batches=True` and a last batch of fewer rows than processes, evaluated, too",
        lambda kit: run(
            kit, rows=of_one_length(kit), others=of_one_length(kit), max_steps=6, **BY_STEPS, per_device_eval_batch_size=3,
            accelerator_config={"dispatch_batches": True}))),
    ("transformers 32852", Move("`resize_token_embeddings` to a multiple of 64, with tied embeddings; the files load", more_tokens)),
    ("transformers 11389", Move(
        "`data_seed`: another order, epoch by epoch",
        lambda kit: run(kit, rows=kit.rows(18), data_seed=11, max_steps=-1, num_train_epochs=2))),
    ("transformers 27386", Move("`ignore_data_skip=True`: a script that skips the rows of a stream itself", skipped_by_the_script)),
    ("transformers 12878", Move("`prediction_loss_only=True`: evaluation keeps no logits", losses_only)),
    ("transformers 31391", Move("`gradient_checkpointing_enable()` and `use_cache = False` by the script", checkpointing_by_the_script)),
    ("transformers 31033", Move(
        "norms of each parameter's gradient, read in `on_pre_optimizer_step`", gradients_read,
        ours="by `trainer.engine.full_gradients()`; `p.grad` raises an error that names it")),
    ("transformers 29972", Move(
        "a `compute_loss` that adds a term of the hidden states and logs both terms with `self.log`",
        lambda kit: with_loss(kit, hidden_term), error="output_hidden_states", instead="a term of the logits")),
    ("transformers 12379", Move("a loss of two terms, whose sums an override of `log` adds to what is logged", terms_logged)),
    ("transformers 30104", Move(
        "`output_hidden_states=True` in the config: predictions are a tuple", hidden_states_predicted,
        left=True, error="output_hidden_states=True", instead="set `model.config.output_hidden_states = False`")),
    ("transformers 17729", Move(
        '`debug="underflow_overflow"`', lambda kit: run(kit, debug="underflow_overflow"),
        left=True, error="debug", instead="leave it out")),
    ("transformers 27181", Move("`skip_memory_metrics=False`: memory in what `train` returns", memory_metrics)),
    ("transformers 30943", Move(
        "`dataloader_persistent_workers` with `compute_metrics` over two data sets",
        lambda kit: run(
            kit, others=named_data_sets(kit), given=ARGMAX, dataloader_num_workers=1, dataloader_persistent_workers=True, **BY_STEPS))),
    ("transformers 25925", Move("a callback that gives the data set of `train_dataloader` other rows for the second epoch", rows_by_a_callback)),
    ("transformers 35651", Move("a callback that changes the logs in `on_log`", logs_changed)),
    ("transformers 9359", Move('`control.should_log = True` in `on_epoch_end`, with `logging_strategy="no"`', logged_by_epochs)),
    ("transformers 33130", Move(
        "the L1 norm of the model's weights as a second term, in `compute_loss`", lambda kit: with_loss(kit, norm_of_weights),
        error="the loss is a function of the weight", instead="leave it out; `weight_decay` stands for an L2 norm")),
    ("transformers 33130", Move(
        "the same in a `compute_loss_func` that knows the model", norm_in_a_function,
        error="the weights in trainer.model are not the weights of this training step", instead="as above")),
    ("transformers 11710", Move("`train()` a second time, as in a notebook", trained_twice)),
    ("transformers 21494", Move("`state.epoch` and `state.global_step` as each event of a callback sees them", epochs_of_events)),
    ("transformers 37110", Move(
        "a `compute_loss` with transformers' own `ForCausalLMLoss`, which gathers the losses of all processes",
        lambda kit: with_loss(kit, losses_by_process))),
    ("transformers 31923", Move("`hyperparameter_search` with optuna and a `model_init`, with saves", hyperparameter_search)),
    ("trl 5324", Move(
        "SFT on prompts and completions with `completion_only_loss=True`", of_trl("SFT", "completions", completion_only_loss=True),
        tolerance=1e-4)),
    ("trl 3927", Move(
        "SFT with `assistant_only_loss` and a `max_length` that cuts off the answers of some rows",
        of_trl("SFT", "chats", assistant_only_loss=True, max_length=26), tolerance=1e-4)),
    ("trl 3728", Move(
        "SFT with `assistant_only_loss` and `packing`",
        of_trl("SFT", "chats", assistant_only_loss=True, packing=True, max_length=60, max_steps=2), tolerance=1e-4)),
    ("trl 1343", Move(
        "SFT with `packing` for training alone (`eval_packing=False`)",
        of_trl("SFT", "text", packing=True, eval_packing=False, max_length=60, max_steps=2, **{**BY_STEPS, "eval_steps": 1}),
        tolerance=1e-4)),
    ("trl 1455", Move(
        "SFT with `packing` over a stream", of_trl("SFT", "text", text_stream, packing=True, max_length=60, max_steps=2, **OWN_READING),
        tolerance=1e-4)),
    ("trl 1186", Move(
        "SFT with `remove_unused_columns=False` and a column that nobody reads",
        of_trl("SFT", "text", text_and_source, remove_unused_columns=False), tolerance=1e-4)),
    ("trl 2423", Move("DPO with `precompute_ref_log_probs=True`", of_trl("DPO", "pairs", precompute_ref_log_probs=True), tolerance=1e-4)),
    ("trl 4010", Move(
        "GRPO with `eval_on_start=True`",
        of_trl("GRPO", "prompts", dict, **trl_runs.RL, eval_on_start=True, eval_strategy="steps", eval_steps=3, max_steps=2), tolerance=1e-4)),
)  # fmt: skip
