"""Random training runs, against the stock `transformers.Trainer` or TRL's trainers in one process, in fp64.

A seed draws a model, rows and their collator, the loss, the size of mini-batches and their accumulation, the optimizer and its
schedule, evaluations, callbacks and overrides, where the run is interrupted and under which strategies it is resumed, the number
of ranks and the strategies. Ours must log the same losses, norms, rates and metrics, and leave the same weights, or refuse the
run by name before the first step. The oracle computes the micro-batches of all ranks one after the other, as more accumulation.
`python -m tests.trainer_fuzz 0-39` runs the seeds 0 to 39.
"""

import hashlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hotspa.errors import HotspaError
from tests import trl_runs
from tests.families import MIXTURE, tiny_model
from tests.fuzzing import VOID, Fuzzer, in_a_world, outcomes, simpler_pools, with_defaults
from tests.gloo.test_stock_equal import fetched_in_double
from tests.lora import tiny_lora
from tests.moves import StepCounter, padded
from tests.moves.checkpoints import StopAt
from tests.moves.collators import PAD, tokenizer
from tests.moves.losses import focal, log_probs
from tests.oracle import relative_error
from tests.strategy_fuzz import drawn_strategy
from tests.switched import batch_of

EXACT, SUMMED = 1e-9, 2e-6
"""Relative errors in fp64: of weights, norms and metrics (first steps of Adam amplify gradients that are nearly zero), and of
losses, which the stock Trainer sums in fp32."""
_in_double = cache(fetched_in_double)
REASONS = ("has variance_epsilon=0.1",)
"""Why a run may be refused, as its message says."""
KEYS = ("loss", "eval_loss", "eval_hits", "grad_norm", "learning_rate", "step")
"""What of a log is compared."""
COMMON: dict[str, Any] = {
    "learning_rate": 5e-3, "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
    "seed": 3, "per_device_eval_batch_size": 2,
}  # fmt: skip
CHOICES: dict[str, tuple[float, tuple[Any, ...]]] = {
    "trainer": (0.25, ("SFT", "DPO")), "family": (0.7, ("qwen3_qk_norm_tied", "phi3_fused", "gemma2_soft_caps", MIXTURE)),
    "stop": (0.35, (1, 2, 3)), "begun": (0.3, (True,)),
    "loss": (0.5, ("focal", "margin", "scaled", "two forwards", "zero terms", "other inputs")),
    "collator": (0.6, ("ours", "left", "completions", "language", "flattened")), "data": (0.4, ("arrow", "stream")),
    "batch": (0.7, (2, 3)), "accumulation": (0.5, (2, 3)), "steps": (0.5, (5, 6)), "epochs": (0.2, (1, 2)),
    "evaluates": (0.4, ("loss", "loss", "hits")), "adapters": (0.2, (True,)), "frozen": (0.2, (1, 3)),
    "prepared": (0.2, ("input gradients", "input gradients", "another epsilon")),
    "callback": (0.3, ("decay", "scales", "stops", "freezes", "generates")),
    "override": (0.3, ("sampler", "groups")),
}  # fmt: skip
"""How often a field is not at its default, and what it is then."""
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "lr_scheduler_type": ("cosine", "constant_with_warmup", "polynomial"), "warmup_steps": (1, 2), "max_grad_norm": (0.0, 0.3),
    "weight_decay": (0.1,), "label_smoothing_factor": (0.1,), "gradient_checkpointing": (True,), "dataloader_num_workers": (1,),
    "dataloader_drop_last": (True,), "data_seed": (5,), "optim": ("sgd", "adagrad", "rmsprop"),
}  # fmt: skip
"""One of five is given."""
_OF_TRAINER = ("begun", "loss", "collator", "data", "evaluates", "prepared", "override")
"""Fields that a run of TRL leaves at their defaults."""


@dataclass(frozen=True)
class Run:
    """What one seed draws.

    Attributes:
        trainer: `Trainer`, `SFT` or `DPO`.
        strategies: In the user's grammar; by default dp over all ranks.
        stop: The step after which the run is interrupted and resumed; 0: never.
        resumed: The strategies after that; by default those of before.
        begun: Whether the stock Trainer runs up to there.
        batch: Rows of a micro-batch.
        epochs: Instead of `steps`, where it is not 0.
        evaluates: The metrics of an evaluation after every second step; `loss`: none but the loss.
        frozen: How many of every five parameters are frozen.
        arguments: Further training arguments.
    """

    world_size: int = 1
    trainer: str = "Trainer"
    family: str = "llama_gqa_bias"
    strategies: str = ""
    stop: int = 0
    resumed: str = ""
    begun: bool = False
    loss: str = "model"
    collator: str = "padded"
    data: str = "list"
    rows: int = 24
    batch: int = 1
    accumulation: int = 1
    steps: int = 4
    epochs: int = 0
    evaluates: str = ""
    adapters: bool = False
    frozen: int = 0
    prepared: str = ""
    callback: str = ""
    override: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def pool(self) -> str:
        return self.strategies or f"dp{self.world_size}:96"

    def simpler(self) -> Iterator["Run"]:
        """A default in the place of one field, an argument less, one bucket of several, or a strategy option less."""
        yield from with_defaults(self, [("stop", "resumed", "begun")])
        for name in self.arguments:
            yield replace(self, arguments={key: value for key, value in self.arguments.items() if key != name})
        yield from (replace(self, strategies=pool) for pool in simpler_pools(self.strategies))
        yield from (replace(self, resumed=pool) for pool in simpler_pools(self.resumed))


# -- what is drawn ----------------------------------------------------------------------------------------------------


def _pool(rng: random.Random, world_size: int, experts: bool) -> str:
    first, second = (drawn_strategy(rng, world_size, experts) for _ in range(2))
    return f"{first}:96" if first == second or world_size == 1 else f"{first}:14@64,{second}:96"


def draw(seed: int) -> Run:
    rng = random.Random(seed)
    world_size = rng.choice((1, 2, 2, 4))
    drawn = {name: rng.choice(values) for name, (share, values) in CHOICES.items() if rng.random() < share}
    arguments = {name: rng.choice(values) for name, values in ARGUMENTS.items() if rng.random() < 0.2}
    run = Run(world_size=world_size, arguments=arguments, seed=seed, **drawn)
    own, resumed = (_pool(rng, world_size, run.family == MIXTURE) for _ in range(2))
    whole, rest = rng.randint(2, 5), rng.randint(0, run.accumulation - 1)
    rows = run.batch * world_size * (run.accumulation * whole + rest)  # an epoch may end with an incomplete step
    return _legal(replace(run, strategies=own, resumed=resumed if run.stop and rng.random() < 0.7 else "", rows=rows))


def _legal(run: Run) -> Run:
    """The draw without what the stock Trainer does not do."""
    arguments = dict(run.arguments)
    changes: dict[str, Any] = {"arguments": arguments}
    changes |= {f.name: f.default for f in fields(run) if f.name in _OF_TRAINER and run.trainer != "Trainer"}
    if run.loss != "model" or run.trainer != "Trainer":
        arguments.pop("label_smoothing_factor", None)  # the model's own loss is smoothed
    if run.data == "stream":
        changes |= {"epochs": 0, "override": "" if run.override == "sampler" else run.override}
        for name in ("dataloader_num_workers", "dataloader_drop_last"):
            arguments.pop(name, None)
    if run.adapters:
        changes |= {"frozen": 0, "prepared": "" if run.prepared != "input gradients" else run.prepared}
    if run.callback in ("stops", "freezes") or run.epochs or not run.stop:
        changes |= {"stop": 0, "resumed": "", "begun": False}
    return replace(run, **changes)


# -- what a user writes -----------------------------------------------------------------------------------------------


def _rows(run: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows for training, and eight for evaluation, all of which have as many labels: then means of any batches are one mean."""
    rng = random.Random(run.seed)

    def row(labels: int) -> dict[str, Any]:
        length = rng.randint(14, 40) if rng.random() < 0.3 else rng.randint(6, 13)
        ids = [rng.randrange(5, 163) for _ in range(length)]
        masked = length - labels if labels else rng.choice((0, 0, length // 2))
        made = {"input_ids": ids, "labels": [-100] * masked + ids[masked:]}
        return made if run.collator != "language" else {"input_ids": ids[: labels + 1] if labels else ids}

    return [row(0) for _ in range(run.rows)], [row(5) for _ in range(8)]


def _model(run: Run) -> Any:
    model = tiny_lora(run.family, torch.float64) if run.adapters else tiny_model(run.family, torch.float64)
    for number, parameter in enumerate(model.parameters() if run.frozen else ()):
        parameter.requires_grad_(number % 5 >= run.frozen)
    if run.prepared == "input gradients":
        model.enable_input_require_grads()
    if run.prepared == "another epsilon":
        model.get_submodule("model.norm").variance_epsilon = 0.1
    return model


def _collator(name: str, stock: bool) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "padded": lambda: padded,
        "ours": lambda: padded if stock else None,
        "left": lambda: lambda rows: batch_of(rows, left=True),
        "completions": lambda: transformers.DataCollatorForSeq2Seq(tokenizer()),
        "language": lambda: transformers.DataCollatorForLanguageModeling(tokenizer(pad=PAD), mlm=False),
        "flattened": transformers.DataCollatorWithFlattening,
    }
    return made[name]()


def _dataset(name: str, rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    stored = Dataset.from_list(rows)
    return {"list": rows, "arrow": stored, "stream": stored.to_iterable_dataset()}[name]


def _with_loss(base: Any, loss: str) -> Any:
    """A subclass with a `compute_loss` of its own, which weighs a micro-batch by its labels: so it asks not how ranks divide them."""

    class Own(base):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
        ) -> Any:
            if loss == "other inputs":
                inputs["input_ids"] = (inputs["input_ids"] + 1) % 163
            if loss in ("scaled", "zero terms", "other inputs"):
                value, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
                value = value * 0.5 if loss == "scaled" else value
                value = value + sum(p.sum() for p in model.parameters()) * 0.0 if loss == "zero terms" else value
                return (value, outputs) if return_outputs else value
            outputs = model(**inputs)
            log_p, _ = log_probs(outputs.logits, inputs["labels"])
            other = log_p.mean().square() if loss == "margin" else outputs.loss * model(**inputs).loss
            value = outputs.loss + 0.3 * other
            if num_items_in_batch is not None:
                value = value * len(log_p) / num_items_in_batch * self.accelerator.num_processes
            return (value, outputs) if return_outputs else value

    return Own


def _sampler(self: Any, train_dataset: Any = None) -> Any:
    return SequentialSampler(self.train_dataset)


def _groups(self: Any, model: Any = None) -> Any:
    trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
    norms, rest = ([p for name, p in trained if ("norm" in name) == is_norm] for is_norm in (True, False))
    groups = [{"params": rest, "lr": 3e-3, "weight_decay": 0.1}, {"params": norms, "lr": 1e-2}]
    self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)
    return self.optimizer


_OVERRIDES: dict[str, dict[str, Any]] = {
    "": {}, "sampler": {"_get_train_sampler": _sampler}, "groups": {"create_optimizer": _groups},
}  # fmt: skip


class _Callback(TrainerCallback):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.kind == "decay":
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.3 if state.global_step else 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.kind == "stops":
            control.should_training_stop = control.should_training_stop or state.global_step >= 3
        if self.kind == "freezes" and state.global_step == 2:
            next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)
        if self.kind == "generates":  # which reads the weights and changes none
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
        if self.kind == "scales" and state.global_step % 2:
            for parameter in [p for p in model.parameters() if p.requires_grad][:3]:
                parameter.data *= 0.9


# -- what is run ------------------------------------------------------------------------------------------------------


def _arguments(run: Run, stock: bool) -> dict[str, Any]:
    given = {**COMMON, "max_steps": run.steps, "per_device_train_batch_size": run.batch, **run.arguments}
    given["gradient_accumulation_steps"] = run.accumulation * (run.world_size if stock else 1)
    if stock:
        given.pop("gradient_checkpointing", None)  # its recomputation, in a backward, would not be in fp64
    if run.epochs:
        given |= {"max_steps": -1, "num_train_epochs": run.epochs}
    if run.evaluates:
        given |= {"eval_strategy": "steps", "eval_steps": 2}
    given |= {"accelerator_config": {"dispatch_batches": False}} if run.data == "stream" else {}
    if run.stop and (not stock or run.begun):
        given |= {"save_strategy": "steps", "save_steps": run.stop}
    return given


def _trainer(run: Run, pool: str, folder: str, callbacks: Sequence[Any]) -> Any:
    """The trainer of a run; the stock one where there is no pool."""
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    arguments = {**_arguments(run, not pool), "output_dir": folder}
    own: dict[str, Any] = {"hotspa_strategies": pool, "hotspa_report": False} if pool else {}
    callbacks = [*callbacks, _Callback(run.callback)]
    if run.trainer != "Trainer":
        data, loss = {"SFT": ("completions", {}), "DPO": ("pairs", {"loss_type": ["sigmoid", "sft"]})}[run.trainer]
        case = trl_runs.Case(run.trainer, (pool, pool), data, lora=run.adapters, family=run.family)
        case.reference, case.given = run.trainer == "DPO" and not run.adapters, lambda: {"callbacks": callbacks}
        return trl_runs.made(case, folder, pool or None, **arguments, max_length=None, **loss, **own)
    model = _model(run)
    rows, evaluated = _rows(run)
    cls: Any = HotSPaTrainer if pool else Trainer
    cls = cls if run.loss in ("model", "focal") else _with_loss(cls, run.loss)
    return type("Own", (cls,), _OVERRIDES[run.override])(
        model=model,
        args=(HotSPaTrainingArguments if pool else TrainingArguments)(**arguments, **own),
        train_dataset=_dataset(run.data, rows),
        eval_dataset=evaluated if run.evaluates else None,
        data_collator=_collator(run.collator, not pool),
        compute_metrics=trl_runs.hits if run.evaluates == "hits" else None,
        compute_loss_func=focal if run.loss == "focal" else None,
        callbacks=callbacks,
    )


def _seen(trainer: Any) -> dict[str, Any]:
    logs = [{key: log[key] for key in KEYS if key in log} for log in trainer.state.log_history]
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"logs": [log for log in logs if len(log) > 1], "weights": weights}


def _place(run: Run, folder: str) -> Path:
    """Where the oracle leaves its results and checkpoints."""
    return Path(folder).parent / hashlib.sha256(repr(run).encode()).hexdigest()[:12]


def run_stock(rank: int, world_size: int, run: Run, folder: str) -> str:
    """The oracle's run, in one process; its results are a file beside the folder."""
    place = _place(run, folder)
    place.mkdir()
    try:
        with trl_runs.patched_head(torch.float64):
            trainer = _trainer(run, "", str(place), [])
            trainer.train()
    except Exception as error:  # of the stock Trainer
        return f"{VOID}{type(error).__name__}: {' '.join(str(error).split())[:900]}"
    torch.save(_seen(trainer), place / "seen.pt")
    return "exact"


def run_ours(rank: int, world_size: int, run: Run, folder: str) -> str:
    """Our run, compared with the oracle's."""
    _in_double()
    place = _place(run, folder)
    if not (place / "seen.pt").exists():
        return "exact"  # the oracle has failed
    expected, counter = torch.load(place / "seen.pt"), StepCounter()
    output, checkpoint = str(Path(folder) / place.name), ""
    try:
        with trl_runs.patched_head(torch.float64):
            if run.stop:
                checkpoint = f"{place if run.begun else output}/checkpoint-{run.stop}"
                if not run.begun:
                    first = _trainer(run, run.pool, output, [counter, StopAt(run.stop)])
                    first.train()
                    first.close_engine()
            trainer = _trainer(run, run.resumed or run.pool, output, [counter])
            trainer.train(resume_from_checkpoint=checkpoint or None)
            trainer.close_engine()
    except HotspaError as error:
        said = " ".join(str(error).split())
        late = f"WRONG: refused after {counter.made} steps: {said}"
        return late if counter.made and not checkpoint else f"refused: {said}"
    return _compared(_seen(trainer), expected)


def _compared(found: dict[str, Any], expected: dict[str, Any]) -> str:
    if [sorted(log) for log in found["logs"]] != [sorted(log) for log in expected["logs"]]:
        return f"WRONG: logs {found['logs']}, not {expected['logs']}"
    wrong = [
        f"{name} of step {log['step']}: {own[name]}, not {value}"
        for own, log in zip(found["logs"], expected["logs"], strict=True)
        for name, value in log.items()
        if not abs(own[name] - value) <= (SUMMED if name == "loss" else EXACT) * max(abs(value), 1e-3)
    ]
    errors = {name: relative_error(found["weights"][name], weight) for name, weight in expected["weights"].items()}
    worst = max(errors, key=lambda name: errors[name])
    wrong += [f"{worst} {errors[worst]:.1e}"] if not errors[worst] <= EXACT else []
    return f"WRONG: {'; '.join(wrong[:4])}" if wrong else "exact"


def found_of(runs: Sequence[Run], seconds: float) -> list[str]:
    """What became of each run."""
    with tempfile.TemporaryDirectory(prefix="hotspa-fuzz-") as folder:
        stock = in_a_world(run_stock, runs, Path(folder), 1, seconds)
        ours = outcomes(run_ours, runs, folder, seconds)
    return [of_stock if of_stock != "exact" else own for of_stock, own in zip(stock, ours, strict=True)]


FUZZER = Fuzzer(draw, found_of, REASONS)

if __name__ == "__main__":
    FUZZER.main()
