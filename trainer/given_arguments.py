"""Arguments that a script gives and that are unknown, no values, cannot be honoured, ask for nothing, or are another trainer's: each is
said, with what to use instead."""

import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import chain
from numbers import Integral, Real
from typing import Any

from transformers import TrainingArguments

from hf_hotspa.data.collator import is_stream
from hf_hotspa.errors import DataError, HotspaConfigError, UnsupportedError
from hf_hotspa.model.options import LONGEST_TIMEOUT_S
from hf_hotspa.rows.formats import format_of
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.trainer.launcher import OWN_LAYOUTS

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def unknown_flag(flag: str, known: Collection[str]) -> str:
    """A sentence about a flag that is not known, with the nearest one that is.

    Args:
        flag: As it was written, such as ``--hotspa-overlnog``.
        known: The names that are known, without hyphens before them.
    """
    near = nearest(flag, known)
    return f"there is no flag {flag}" + (f"; did you mean --{near}?" if near else "")


def nearest(flag: str, known: Collection[str]) -> str | None:
    """The name that is most like a flag; None where none is."""
    return next(iter(get_close_matches(_name(flag), sorted(known), n=1, cutoff=0.6)), None)


def warn_of_misspelt(fields: Collection[str]) -> None:
    """Warns of flags of the command line that begin as ours do and are none: a parser that a script has made may call them
    unused, or drop them. Each is told once, by one process.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for word in sys.argv[1:]:
        flag = word.partition("=")[0]
        if not flag.startswith(("--hotspa_", "--hotspa-")) or flag in _warned:
            continue
        if any(name.startswith(_name(flag)) for name in fields):  # argparse takes a beginning for the whole
            continue
        if nearest(flag, fields) is not None:
            _warned.add(flag)
            logger.warning("%s", unknown_flag(flag, fields))


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def refuse_misspelt(cls: Any, given: Mapping[str, Any]) -> None:
    """Refuses keyword arguments that a class of arguments does not take.

    Raises:
        TypeError: as Python would, with the name that was meant.
    """
    known = inspect.signature(cls.__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in given:
        if name not in known:
            near = nearest(name, known)
            meant = f"; did you mean {near}?" if near else ""
            raise TypeError(f"{cls.__name__} got an unexpected keyword argument {name!r}{meant}")


@dataclass(frozen=True)
class Number:
    """What an argument may be.

    Args:
        least: The least value.
        most: The largest; infinite values are only taken where it is infinite.
        whole: Whether it is an int.
        fix: What to use, where the numbers do not say it.
    """

    least: float = -sys.float_info.max
    most: float = sys.float_info.max
    whole: bool = False
    fix: str = ""

    def takes(self, value: Any) -> bool:
        """Whether the value is one, perhaps of numpy or torch; NaN never is."""
        number = value.item() if getattr(value, "ndim", None) == 0 else value
        kind: Any = Integral if self.whole else Real
        return isinstance(number, kind) and bool(self.least <= number <= self.most)

    def __str__(self) -> str:
        bounds = [
            f"at least {self.least:.15g}" if self.least > -sys.float_info.max else "",
            f"at most {self.most:.15g}" if self.most < sys.float_info.max else "",
        ]
        text = f"use a {'whole' if self.whole else 'finite'} number"
        range_ = " and ".join(filter(None, bounds))
        return f"{text} of {range_}" if range_ else text


_FROM_0, _FINITE = Number(0), Number()
_BETA = Number(0, math.nextafter(1, 0), fix="use a number of at least 0 and below 1")
_COUNT, _WHOLE = Number(1, whole=True), Number(whole=True)
SECONDS = Number(math.nextafter(0, 1), LONGEST_TIMEOUT_S, fix="use some minutes, in seconds")

# the values that train; where the stock Trainer can do with a value that looks odd (max_grad_norm=-1 clips nothing), so can this one
_NUMBERS: dict[str, Number] = {
    "learning_rate": _FROM_0,
    "weight_decay": _FROM_0,
    "adam_beta1": _BETA,
    "adam_beta2": _BETA,
    "adam_epsilon": _FROM_0,
    "max_grad_norm": Number(-math.inf, math.inf, fix="use the largest norm, or 0 to clip nothing"),
    "num_train_epochs": _FROM_0,
    "max_steps": _WHOLE,
    "warmup_steps": _FROM_0,
    "warmup_ratio": Number(0, 1),
    "label_smoothing_factor": Number(0, 1),
    "neftune_noise_alpha": Number(0, fix="use 5, say, or leave it out"),
    "logging_steps": _FINITE,
    "eval_steps": _FINITE,
    "save_steps": _FINITE,
    "eval_delay": Number(-math.inf, math.inf, fix="use the steps or epochs before the first evaluation"),
    "save_total_limit": _WHOLE,
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "eval_accumulation_steps": _COUNT,
    "dataloader_num_workers": Number(0, whole=True),
    "dataloader_prefetch_factor": _COUNT,
    "seed": Number(0, 2**32 - 1, whole=True),
    "data_seed": _WHOLE,
    "ddp_timeout": SECONDS,
}


@dataclass(frozen=True)
class Flag:
    """What a flag is beside what its field says: its name, type, default, help and choices. Lists of flags follow from this.

    Args:
        number: What its value may be; None where it is no number.
        option: The option of the engine (`EngineOptions`) that it sets.
        made: What that option is, of a value.
        recorded: Whether the record of a run has it among its settings.
        of_one_rank: Whether ranks may have different values.
        as_stock: Whether it asks for nothing else than what the stock Trainer does.
    """

    number: Number | None = None
    option: str = ""
    made: Callable[[Any], Any] = lambda value: value
    recorded: bool = False
    of_one_rank: bool = False
    as_stock: bool = False


class _Help(str):
    """The help of a flag, with the rest: `HfArgumentParser` gives all metadata of a field to argparse, which knows no more."""

    flag: Flag


def flag(text: str, choices: Iterable[str] = (), **known: Any) -> dict[str, Any]:
    """The metadata of a field that is a flag.

    Args:
        text: Its help.
        choices: Its values, where it has few.
        known: As for `Flag`.
    """
    help_ = _Help(text)
    help_.flag = Flag(**known)
    return {"help": help_, "choices": list(choices)} if choices else {"help": help_}


def flags_of(kind: type) -> dict[str, Flag]:
    """The flags of a class of arguments, by name; also where a class of a script's gives one another default."""
    inherited = chain.from_iterable(
        vars(part).get("__dataclass_fields__", {}).items() for part in reversed(kind.__mro__)
    )
    helps = ((name, known.metadata.get("help")) for name, known in inherited)
    return {name: help_.flag for name, help_ in helps if isinstance(help_, _Help)}


def check_values(args: Any, kind: type | None = None) -> None:
    """Refuses numbers that are none, or that no training can use, before anything is made of them.

    Args:
        args: `TrainingArguments`, or what a command line gives for them.
        kind: Their class; its flags are checked, too.

    Raises:
        HotspaConfigError: naming the argument, its value and what to use.
    """
    numbers = _NUMBERS | {name: known.number for name, known in flags_of(kind or type(args)).items() if known.number}
    for name, rule in numbers.items():
        value = getattr(args, name, None)
        if value is None and getattr(type(args), name, None) is None:  # its default, or there is no such argument
            continue
        if name == "num_train_epochs" and _NUMBERS["max_steps"].takes(args.max_steps) and args.max_steps > 0:
            continue  # which nothing reads
        if not rule.takes(value):
            text = "; this is text (YAML reads 1e-3 so: write 0.001)" if isinstance(value, str) else ""
            raise HotspaConfigError(f"{name} is {value!r:.200}", fix=f"{rule.fix or rule}{text}")
    options = vars(args)["lr_scheduler_kwargs"]
    for name, value in options.items() if isinstance(options, dict) else ():
        if isinstance(value, float) and not math.isfinite(value):
            raise HotspaConfigError(f"lr_scheduler_kwargs has {name}={value}", fix="give a finite number")
    if args.output_dir == "":
        raise HotspaConfigError("output_dir is ''", fix="name a folder, or leave it out")


_EVALUATION = "evaluation runs in the dtype of training; use bf16 for both, or leave it off"

# name -> (values that are fine, why another one is refused or what to use instead)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), "loss scaling is not supported; use bf16 or fp32"),
    "fp16_full_eval": ((False,), _EVALUATION),
    "torch_compile": ((False,), "replicas are rebound to other storage for every phase; leave it off"),
    "fsdp": ((None, False, "", []), "give it to HotSPaTrainingArguments, where full_shard is +z3 of the strategies"),
    "parallelism_config": ((None,), OWN_LAYOUTS),
    "use_liger_kernel": ((False,), "its fused loss does not know a vocabulary that is cut over ranks"),
    "save_on_each_node": (
        (False,),
        "a checkpoint is one directory that all ranks write into; use a shared file system",
    ),
    "optim_target_modules": ((None,), "layer-wise optimizers need whole matrices"),
    "debug": (([], "", None), "the debug hooks sit on a model that does not run; drop the option"),
}

_NO_DDP = "there is no DistributedDataParallel; it has no effect"

# name -> (the value that asks for nothing, what becomes of another one)
_NO_EFFECT: dict[str, tuple[Any, str]] = {
    "bf16_full_eval": (False, "evaluation runs in the dtype of training, bf16 with bf16=True"),
    "auto_find_batch_size": (False, "the tokens of a pack bound the memory, not the batch size; it reads False"),
    "enable_jit_checkpoint": (False, "SIGTERM saves and stops on all ranks alike without it"),
    "ddp_find_unused_parameters": (None, _NO_DDP),
    "ddp_bucket_cap_mb": (None, _NO_DDP),
    "ddp_broadcast_buffers": (None, _NO_DDP),
    "ddp_static_graph": (None, _NO_DDP),
}


CHANGED = ("auto_find_batch_size", "bf16_full_eval", "accelerator_config", "gradient_accumulation_steps")
"""What `explain_arguments` may change."""


def explain_arguments(args: TrainingArguments) -> None:
    """Accepts what has no effect here and none on numbers, and says so in a line each on the main process."""
    for name, (nothing, text) in _NO_EFFECT.items():
        if getattr(args, name, nothing) != nothing and args.process_index == 0:
            logger.warning("%s=%r: %s", name, getattr(args, name), text)
    args.auto_find_batch_size = False  # transformers would start training again where memory ran out
    args.bf16_full_eval = False  # and evaluate another model
    read_accelerator_config(args)


def refuse_arguments(args: TrainingArguments) -> None:
    """Refuses what cannot be honoured.

    Raises:
        UnsupportedError: naming the argument, its value and what to use instead.
    """
    for name, (fine, why) in _REFUSED.items():
        value = getattr(args, name, fine[0])
        if value not in fine:
            shown = getattr(value, "value", value)
            raise UnsupportedError(f"the training argument {name}={shown!r} cannot be honoured", fix=why)
    if vars(args).get("hotspa_stock_checkpoints") and vars(args).get("hotspa_offload") == "master":
        raise UnsupportedError(
            "hotspa_stock_checkpoints=True and hotspa_offload='master' do not go together",
            why="the optimizer is DeepSpeed's CPU Adam then, whose settings are not those of the stock Trainer's",
            fix="leave one of them out; hf-hotspa export gives the weights of any checkpoint",
        )


def read_accelerator_config(args: TrainingArguments) -> None:
    """Accumulation is that of the arguments: accelerate has nothing to accumulate.

    Raises:
        HotspaConfigError: both give a number of steps.
    """
    values: dict[str, Any] = vars(args)
    config = values["accelerator_config"]
    given = config.gradient_accumulation_kwargs
    if not given:
        return
    steps: int = values["gradient_accumulation_steps"]
    if given.get("num_steps", 1) != 1 and steps != 1:
        raise HotspaConfigError(
            f"The `AcceleratorConfig`'s `num_steps` is set but gradient_accumulation_steps={steps}, too",
            fix="set one of them",
        )
    values["gradient_accumulation_steps"] = steps if steps != 1 else given.get("num_steps", 1)
    values["accelerator_config"] = copy(config)  # not the user's object
    values["accelerator_config"].gradient_accumulation_kwargs = None


# -- fields of another trainer's arguments ----------------------------------------------------------------------------

_ROWS = "give rows that hold what is learned: 'input_ids' with 'labels', or a column 'text'"

# Field of TRL's SFTConfig -> (values that ask for nothing here, what to do instead of another one). One that does not stand here asks
# for something unless it is None, False, 0 or empty.
_OF_SFT: dict[str, tuple[tuple[Any, ...], str]] = {
    "loss_type": (("nll", "chunked_nll", None), "pass token_loss to the trainer (docs/losses.md; 'dft' is one line)"),
    "max_length": (
        (None,),
        "set max_length=None, and cut longer rows with HotSPaTrainingArguments(hotspa_overlong='truncate', ...), whose last bucket "
        "says how long, or before",
    ),
    "packing": ((False,), "leave it off: rows are always packed, and a batch counts sequences"),
    "eval_packing": ((None, False), "leave it off: rows are always packed, and a batch counts sequences"),
    "completion_only_loss": ((None, True), _ROWS),
    "assistant_only_loss": ((True,), f"set it to True, as what the assistant says is what is learned of conversations; or {_ROWS}"),
    "dataset_text_field": (("text",), "rename the column to 'text'"),
    "shuffle_dataset": ((False,), "leave it off: the sampler shuffles rows; or call dataset.shuffle(seed)"),
    "dataset_kwargs": ((None, {}, {"skip_prepare_dataset": False}), "give rows of 'input_ids' and 'labels', and leave it out"),
    "chat_template_path": ((None,), "set tokenizer.chat_template"),
    "eos_token": ((None,), "set tokenizer.eos_token"),
    "model_init_kwargs": ((None, {}), "call from_pretrained yourself, and pass the model"),
    "router_aux_loss_coef": ((None,), "set it in the config of the model, with output_router_logits=True"),
}  # fmt: skip
_CHANGE_NO_NUMBER = {
    "dataset_num_proc", "padding_free", "packing_strategy", "pad_to_multiple_of", "pad_token", "truncation_mode",
    "activation_offloading", "trust_remote_code",
}  # fmt: skip
_OWN = {"__main__", "__mp_main__", "builtins", "transformers", "hf_hotspa"}
_SUFFIXES = ("TrainingArguments", "TrainingArgs", "Arguments", "Config", "Args")


def refuse_fields_of_others(args: TrainingArguments, trainer: type, datasets: Iterable[Any]) -> None:
    """Refuses what a field asks for that another library's trainer reads, and this one would pass over.

    Fields of a user's own class are his: as with the stock Trainer, his callbacks and overrides read them.

    Args:
        trainer: The class of the trainer.
        datasets: What is trained and evaluated; None among them is left out.

    Raises:
        HotspaConfigError: naming the fields, and what to do instead.
    """
    names = _fields_of_others(type(args), trainer)
    if not names:
        return
    kinds = {kind for dataset in _each(datasets) for kind in _kinds(dataset)}
    asked = [name for name in names if name != "max_length" and _asks(name, getattr(args, name), kinds)]
    if asked:
        raise _of_another(args, asked)


def refuse_longer_rows(args: TrainingArguments, trainer: type, tables: Iterable[SequenceTable | None]) -> None:
    """Refuses a `max_length` of another trainer's arguments that would cut rows.

    Args:
        tables: The lengths of rows; None where nobody knows them.

    Raises:
        HotspaConfigError: naming it.
    """
    if "max_length" not in _fields_of_others(type(args), trainer):
        return
    longest: int | None = vars(args)["max_length"]
    if longest is None:
        return
    for table in tables:
        if table is None:
            raise _of_another(args, ["max_length"], "; how long rows are is not known before they are trained")
        if len(table) and int(table.lengths.max()) > longest:
            row = int(table.lengths.argmax())
            raise _of_another(args, ["max_length"], f"; row {row} has {int(table.lengths[row])} tokens")


def _of_another(args: TrainingArguments, names: Collection[str], more: str = "") -> HotspaConfigError:
    advice = [f"let that trainer read them ({_its_trainer(type(args))})"]
    if set(names) <= set(_OF_SFT):
        advice += [f"{name}: {_OF_SFT[name][1]}" for name in names]
    else:  # another objective
        advice += ["give HotSPaTrainingArguments, and rows for this trainer, which learns from answers"]
    shown = ", ".join(f"{name}={getattr(args, name)!r:.80}" for name in names)
    return HotspaConfigError(
        f"{type(args).__name__} has {shown}",
        why=f"the trainer that these arguments are made for reads that, and this one would pass it over{more}",
        fix="; or ".join([advice[0], "; ".join(advice[1:])]),
    )


def _its_trainer(kind: type) -> str:
    """How to have a class of arguments read by the trainer that it is made for."""
    of_trl = next((c for c in kind.__mro__ if _top(c) == "trl"), None)
    if of_trl is None:
        return "hf_hotspa.trainer.trainer.switched(ITS_CLASS)(model, args, ...)"
    stem = of_trl.__name__.removesuffix("Config")
    return f"from hf_hotspa.trl import {stem}Config, {stem}Trainer"


def _asks(name: str, value: Any, kinds: Collection[str]) -> bool:
    """Whether the value of a field asks for something that rows of these kinds would not get here."""
    if name in _CHANGE_NO_NUMBER:
        return False
    if name not in _OF_SFT:
        return bool(value)
    if name == "completion_only_loss" and not {"completion", "conversation and answer", "unknown"} & set(kinds):
        return False
    if name == "assistant_only_loss" and not {"chat", "conversation and answer", "unknown"} & set(kinds):
        return False
    return value not in _OF_SFT[name][0]


def _fields_of_others(kind: type, trainer: type) -> list[str]:
    """The fields of a class of arguments that another library's trainer reads, and no class of this trainer."""
    known = {field.name for field in fields(TrainingArguments)}
    others = {_top(c) for c in kind.__mro__ if _is_library(c)} - {_top(c) for c in trainer.__mro__}
    if not others:
        return []
    annotated = [name for c in kind.__mro__ if _top(c) in others for name in inspect.get_annotations(c)]
    return [f.name for f in fields(kind) if f.name in set(annotated) - known]  # type: ignore[arg-type]


def _top(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_library(kind: type) -> bool:
    """Whether a class of arguments is installed together with a trainer that reads it, as SFTConfig is with SFTTrainer."""
    if _top(kind) in _OWN or not issubclass(kind, TrainingArguments):
        return False
    module = sys.modules.get(kind.__module__)
    if module is None:  # it has not been defined where its name says
        return True
    folders = str(getattr(module, "__file__", None) or "").replace("\\", "/").split("/")
    if not {"site-packages", "dist-packages"} & set(folders):
        return False
    stem = next((kind.__name__.removesuffix(s) for s in _SUFFIXES if kind.__name__.endswith(s)), kind.__name__)
    parts = kind.__module__.split(".")
    packages = [sys.modules.get(".".join(parts[:end])) for end in range(1, len(parts) + 1)]
    return any(f"{stem}Trainer" in dir(package) for package in packages if package is not None)


def _each(datasets: Iterable[Any]) -> Iterator[Any]:
    for dataset in datasets:
        if isinstance(dataset, Mapping):
            yield from _each(dataset.values())
        elif dataset is not None:
            yield dataset


def _kinds(dataset: Any) -> Iterator[str]:
    """What the rows of a data set are, as `Format.kind` has it; completions of conversations, rows of tokens with a mask, and rows
    that cannot be looked at have kinds of their own."""
    row: Any = {}
    if not is_stream(dataset):
        row = dataset[0] if len(dataset) else {}
    elif hasattr(dataset, "take"):  # of `datasets`, which can be read again
        row = next(iter(dataset.take(1)), {})
    else:
        yield "unknown"
    if not isinstance(row, Mapping) or "input_ids" in row:
        if isinstance(row, Mapping) and row.get("completion_mask") is not None:
            yield "completion"
        return
    try:
        kind = format_of(list(row)).kind if row else "text"
    except DataError:  # refused, or read by a collator of the user's
        kind = "unknown"
    yield "conversation and answer" if kind == "completion" and isinstance(row["prompt"], list) else kind
