"""Differences between ranks, drawn by seed: fields of every config, rows, models, functions, versions and environment.

All draws of a world are tried one after the other: rank 1 is given something else. Each has to be found before the first
update, by name and on all ranks alike, or is on the list of what may differ (`same_run`).
"""

import copy
import dataclasses
import enum
import functools
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import datasets
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import DataCollatorWithPadding, TrainerCallback

from hf_hotspa import versions
from hf_hotspa.errors import HotspaError
from tests.families import tiny_model
from tests.trl_runs import ROWS, small, tokenizer

ODD = 1
KINDS = ("Trainer", "SFT", "DPO", "KTO", "GRPO", "RLOO")
_DATA = {"SFT": "text", "DPO": "pairs", "KTO": "judged", "GRPO": "prompts", "RLOO": "prompts"}
_FIELDS = {
    "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "max_steps": 1, "save_strategy": "no",
    "per_device_train_batch_size": 4, "hotspa_strategies": "dp2:64@128,tp2:256@512", "hotspa_report": False,
    "logging_strategy": "no", "gradient_checkpointing": False,
}  # fmt: skip
_OF_THE_GROUP = {"use_cpu", "ddp_backend", "local_rank", "parallelism_config"}
"""Fields that make the process group, over which ranks compare."""
_ONLINE = {"num_generations": 4, "max_completion_length": 4, "beta": 0.0}
_OTHER: dict[str, tuple[Any, ...]] = {
    "loss_type": ("dft", "ipo", "hinge", "apo_zero_unpaired", "dr_grpo"),
    "lr_scheduler_type": ("cosine",), "optim": ("sgd",), "eval_strategy": ("epoch",), "save_strategy": ("epoch",),
    "logging_strategy": ("steps",), "scale_rewards": ("batch", "none"), "hotspa_strategies": ("tp2:256@512",),
    "importance_sampling_level": ("sequence",), "truncation_mode": ("keep_end",), "reward_weights": ([2.0],),
    "loss_weights": ([2.0],), "generation_kwargs": ({"top_k": 3},), "model_init_kwargs": ({"dtype": "float32"},),
    "chat_template_kwargs": ({"x": 1},), "label_names": (["labels", "x"],), "warmup_steps": (3,),
    "lr_scheduler_kwargs": ({"num_cycles": 2},), "optim_args": ("x=1",), "include_for_metrics": (["loss"],),
}  # fmt: skip


# -- what differs -----------------------------------------------------------------------------------------------------


def reward(completion_ids=None, **_):
    return [float(sum(ids) % 5) / 4 for ids in completion_ids]


SCALE = 2.0


def scaled(completion_ids=None, by=1.0, **_):
    return [SCALE * by * len(ids) for ids in completion_ids]


def closed_over(factor):
    return lambda completion_ids=None, **_: [factor * len(ids) for ids in completion_ids]


class Scorer:
    __name__ = "scorer"

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completion_ids=None, **_):
        return [self.factor * len(ids) for ids in completion_ids]

    def judge(self, completion_ids=None, **_):
        return [self.factor / len(ids) for ids in completion_ids]


def loss_of_power(power):
    def loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.pow(power).mean()

    return loss


class TableOfRows(torch.utils.data.Dataset):
    """A data set of a script's own class."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return self.rows[place]


class ChangesRows(TrainerCallback):
    """Changes a list of rows when training has begun."""

    def __init__(self, rows):
        self.rows = rows

    def on_train_begin(self, args, state, control, **kwargs):
        self.rows[:] = _labels_of(self.rows)


class OfThisRank(SequentialSampler):
    """Each rank has an order, seeded by its number, without telling."""

    def __iter__(self):
        places = list(range(len(self.data_source)))
        random.Random(torch.distributed.get_rank()).shuffle(places)
        return iter(places)


def _labels_of(rows: list[Any]) -> list[Any]:
    changed = []
    for row in rows:
        row = dict(row)
        for name in ("label", "labels", "completion", "chosen", "text", "prompt"):
            if name in row:
                value = row[name]
                row[name] = not value if isinstance(value, bool) else value[::-1]
                break
        changed.append(row)
    return changed


ROW_CHANGES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "backwards": lambda rows: rows[::-1],
    "fewer": lambda rows: rows[:-4],
    "more": lambda rows: [*rows, *rows[:4]],
    "one replaced": lambda rows: [*rows[:5], rows[7], *rows[6:]],
    "two swapped": lambda rows: [rows[1], rows[0], *rows[2:]],
    "labels": _labels_of,
    "another column": lambda rows: [{**row, "weight": float(place)} for place, row in enumerate(rows)],
}
FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "another function": ([reward], [scaled]),
    "one more": ([reward], [reward, scaled]),
    "a closure": ([closed_over(1.0)], [closed_over(2.0)]),
    "a default": ([functools.partial(scaled, by=1.0)], [functools.partial(scaled, by=2.0)]),
    "an object": ([Scorer(1.0)], [Scorer(3.0)]),
    "a method": ([Scorer(1.0).judge], [Scorer(3.0).judge]),
    "a lambda": ([lambda completion_ids=None, **_: [1.0 for _ in completion_ids]],
                 [lambda completion_ids=None, **_: [2.0 for _ in completion_ids]]),
}  # fmt: skip
GIVEN: dict[str, tuple[Any, Any]] = {
    "compute_metrics": (None, lambda predicted: {}),
    "compute_loss_func": (loss_of_power(1), loss_of_power(2)),
    "preprocess_logits_for_metrics": (lambda logits, labels: logits, lambda logits, labels: logits * 2),
    "optimizer_cls_and_kwargs": ((torch.optim.AdamW, {"lr": 1e-3}), (torch.optim.AdamW, {"lr": 2e-3})),
    "data_collator": (DataCollatorWithPadding(tokenizer()), DataCollatorWithPadding(tokenizer(), pad_to_multiple_of=8)),
}
ATTRIBUTES: dict[str, tuple[str, Any]] = {
    "DPO": ("beta", 0.7), "KTO": ("desirable_weight", 5.0), "GRPO": ("temperature", 0.4), "RLOO": ("beta", 0.3),
    "SFT": ("_own_factor", 0.5), "Trainer": ("compute_loss_func", loss_of_power(3)),
}  # fmt: skip
ENVIRONMENT = {"ACCELERATE_MIXED_PRECISION": "bf16", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "NVIDIA_TF32_OVERRIDE": "0"}


@dataclass(frozen=True)
class Difference:
    """What rank 1 is given.

    Args:
        kind: Of the trainer.
        subject: field, rows, functions, given, attribute, model, version or environment.
        name: What of it; a part of the message has to be `named`.
    """

    kind: str
    subject: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.subject} {self.name}"


def all_differences() -> list[Difference]:
    """Everything that can be drawn."""
    found = list[Difference]()
    for kind in KINDS:
        fields = [field.name for field in dataclasses.fields(_config(kind)) if field.init]
        found += [Difference(kind, "field", name) for name in fields if name not in _OF_THE_GROUP]
        found += [Difference(kind, "rows", name) for name in ROW_CHANGES]
        found += [Difference(kind, "rows of evaluation", name) for name in ROW_CHANGES]
        found += [Difference(kind, "attribute", ATTRIBUTES[kind][0]), Difference(kind, "code", "override")]
        libraries = [*versions.COMPARED, *(["trl"] if kind != "Trainer" else [])]
        found += [Difference(kind, "version", name) for name in libraries if name != "hf-hotspa"]
        found += [Difference(kind, "environment", name) for name in (*ENVIRONMENT, "float64", "matmul")]
        if kind in ("GRPO", "RLOO"):
            found += [Difference(kind, "functions", name) for name in (*FUNCTIONS, "a constant")]
        if kind in ("Trainer", "SFT"):
            found += [Difference(kind, "given", name) for name in GIVEN if kind == "Trainer" or name != "data_collator"]
        if kind in ("DPO", "KTO"):
            found.append(Difference(kind, "model", "reference"))
    found += [Difference("Trainer", "list", name) for name in ROW_CHANGES]
    found += [Difference("Trainer", "table", name) for name in ("backwards", "one replaced", "two swapped", "labels")]
    found += [Difference("Trainer", "sampler", "order"), Difference("Trainer", "model", "config")]
    found.append(Difference("Trainer", "later", "rows"))
    return found


def drawn(seed: int, number: int) -> list[Difference]:
    """Some of them; every subject comes early."""
    generator, known = random.Random(seed), all_differences()
    generator.shuffle(known)
    by_subject: dict[str, list[Difference]] = {"sampler": [], "later": []}  # first, as the rarest
    for difference in known:
        by_subject.setdefault(difference.subject, []).append(difference)
    of_fields = by_subject.pop("field")
    chosen = list[Difference]()
    while len(chosen) < number:
        for others in by_subject.values():
            chosen += [*others[:1], *of_fields[:1]]
            del others[:1], of_fields[:1]
        if not of_fields:
            break
    return chosen[:number]


# -- how it is tried --------------------------------------------------------------------------------------------------


def _config(kind: str) -> Any:
    if kind == "Trainer":
        return import_module("hf_hotspa.trainer").HotSPaTrainingArguments
    return getattr(import_module("hf_hotspa.trl"), f"{kind}Config")


def _fields(kind: str, folder: str) -> dict[str, Any]:
    return {**_FIELDS, **(_ONLINE if kind in ("GRPO", "RLOO") else {}), "output_dir": folder}


def _others(name: str, value: Any) -> list[Any]:
    """Other values to try for a field."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, enum.Enum):
        return [*_OTHER.get(name, ()), *(member for member in type(value) if member is not value)]
    if isinstance(value, int | float):
        return [value + 1, value * 2, value / 2 + 0.01]
    if isinstance(value, str):
        return [*_OTHER.get(name, ()), f"{value}x"]
    return [*_OTHER.get(name, ()), 2, 0.5, "other", True, {"a": 1}]


def other_config(kind: str, name: str, folder: str) -> Any:
    """Arguments in which one field has another value; None if the class takes no other."""
    made, fields = _config(kind), _fields(kind, folder)
    default = getattr(made(**fields), name)
    for value in _others(name, default):
        try:
            changed = made(**{**fields, name: value})
            changed._validate_args() if hasattr(changed, "_validate_args") else None
        except Exception:  # of transformers, TRL, or ours: not a value
            continue
        if repr(getattr(changed, name)) != repr(default):
            return changed
    return None


def rows_of(kind: str) -> list[Any]:
    if kind == "Trainer":
        ids = [[(7 * i + j) % 160 for j in range(4 + i % 9)] for i in range(16)]
        return [{"input_ids": row, "labels": list(row)} for row in ids]
    return [ROWS[_DATA[kind]](i) for i in range(16)]


@functools.cache
def _models() -> dict[str, Any]:
    return {"Trainer": tiny_model("llama_gqa_bias"), "TRL": small("llama_gqa_bias", torch.float32)}


def _given(kind: str, difference: Difference, odd: bool) -> tuple[dict[str, Any], Any]:
    """Arguments of the trainer's constructor, and its class."""
    subject, name = difference.subject, difference.name
    rows = rows_of(kind)
    changed = ROW_CHANGES[name](rows) if odd and subject in ("rows", "list", "table") else rows
    given: dict[str, Any] = {"model": _models()["Trainer" if kind == "Trainer" else "TRL"]}
    if subject in ("attribute", "sampler", "table", "model"):  # these are trained, or at least built
        given["model"] = copy.deepcopy(given["model"])
    makes = {"list": list, "later": list, "table": TableOfRows}.get(subject, Dataset.from_list)
    given["train_dataset"] = makes(changed)
    if subject == "later" and odd:
        given["callbacks"] = [ChangesRows(given["train_dataset"])]
    if subject == "rows of evaluation":
        given["eval_dataset"] = Dataset.from_list(ROW_CHANGES[name](rows) if odd else rows)
    if kind != "Trainer":
        given["processing_class"] = tokenizer()
    if kind in ("GRPO", "RLOO"):
        given["reward_funcs"] = [reward]
    if subject == "functions":
        given["reward_funcs"] = [scaled] if name == "a constant" else FUNCTIONS[name][odd]
    if subject == "given":
        given[name] = GIVEN[name][odd]
    if kind in ("DPO", "KTO") or subject == "model":
        given |= {} if kind == "Trainer" else {"ref_model": copy.deepcopy(given["model"])}
    if subject == "model" and odd:
        if name == "reference":
            next(given["ref_model"].parameters()).data[0, 0] += 1.0
        else:
            given["model"] = tiny_model("llama_gqa_bias", rms_norm_eps=1e-3)
    home = import_module("hf_hotspa.trainer" if kind == "Trainer" else "hf_hotspa.trl")
    trainer = getattr(home, f"{'HotSPa' if kind == 'Trainer' else kind}Trainer")
    own = {
        "code": {"training_step": _doubled_step if odd else _plain_step},
        "sampler": {"_get_train_sampler": _own_sampler},
    }
    return given, type("Own", (trainer,), own[subject]) if subject in own else trainer


def _plain_step(self, *args, **kwargs):
    return super(type(self), self).training_step(*args, **kwargs)


def _doubled_step(self, *args, **kwargs):
    return 2.0 * super(type(self), self).training_step(*args, **kwargs)


def _own_sampler(self, dataset=None):
    return OfThisRank(self.train_dataset)


@contextmanager
def _process(difference: Difference, odd: bool) -> Iterator[None]:
    """The process as it is in the difference."""
    name, real = difference.name, versions.version_of
    with ExitStack() as stack:
        if difference.subject == "version" and odd:
            other = lambda library: "0.0.1" if library == name else real(library)  # noqa: E731
            stack.enter_context(mock.patch.object(versions, "version_of", other))
        elif name == "a constant" and odd:
            stack.enter_context(mock.patch.dict(globals(), {"SCALE": 5.0}))
        elif difference.subject == "environment" and odd:
            if name in ENVIRONMENT:
                stack.enter_context(mock.patch.dict(os.environ, {name: ENVIRONMENT[name]}))
            elif name == "float64":
                torch.set_default_dtype(torch.float64)
                stack.callback(torch.set_default_dtype, torch.float32)
            else:
                before = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("medium")
                stack.callback(torch.set_float32_matmul_precision, before)
        yield


NAMED = {
    "rows": "of train_dataset", "list": "of train_dataset", "table": "rows of train_dataset", "sampler": "the order of rows",
    "later": "of the data set", "rows of evaluation": "of eval_dataset", "functions": "reward_funcs", "code": "class of the trainer",
}  # fmt: skip


def named(difference: Difference) -> str:
    """What the message has to name."""
    if difference.subject == "model":
        return "ref_model" if difference.name == "reference" else "rms_norm_eps"
    if difference.subject == "environment":
        return {"float64": "get_default_dtype", "matmul": "matmul_precision"}.get(difference.name, difference.name)
    return NAMED.get(difference.subject, difference.name)


def outcome(rank: int, difference: Difference, folder: str) -> tuple[str, int]:
    """The error that a difference gives, or a word for what else became of it; and the steps that were trained."""
    kind, odd, trainer = difference.kind, rank == ODD, None
    datasets.disable_progress_bars()  # one that outlives the draw would write to a closed stream
    with warnings.catch_warnings(action="ignore"):
        arguments = _config(kind)(**_fields(kind, folder))
        if difference.subject == "field":
            changed = other_config(kind, difference.name, folder)
            if changed is None:
                return "no other value", 0
            _config(kind)(**_fields(kind, folder))  # accelerate reads settings of the last arguments
            arguments = changed if odd else arguments
        if difference.subject == "field" and difference.name in may_differ():
            return "may differ", 0
        given, made = _given(kind, difference, odd)
        try:
            with _process(difference, odd):
                trainer = made(args=arguments, **given)
                if difference.subject == "attribute" and odd:
                    setattr(trainer, *ATTRIBUTES[kind])
                trainer.train()
        except Exception as error:
            kind = "" if isinstance(error, HotspaError) else f"{type(error).__name__}: "
            return f"{kind}{error}", trainer.state.global_step if trainer is not None else 0
        finally:
            if trainer is not None:
                trainer.close_engine()
    return "trained", trainer.state.global_step


def may_differ() -> dict[str, str]:
    found: dict[str, str] = import_module("hf_hotspa.trainer.same_run").ARGUMENTS_MAY_DIFFER
    return found


def wrong_ones(found: list[dict[str, tuple[str, int]]], tried: list[Difference]) -> list[str]:
    """What is neither found by name before the first step, with one error on all ranks, nor may differ."""
    wrong = []
    for difference in tried:
        texts = [of_rank[str(difference)] for of_rank in found]
        text, steps = texts[0]
        if text in ("no other value", "may differ") and len(set(texts)) == 1:
            continue
        if any(other != texts[0] for other in texts) or steps or named(difference) not in text or "HSP-" not in text:
            wrong.append(f"{difference}: {texts}")
    return wrong
