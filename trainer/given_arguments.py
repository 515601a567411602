"""Checks of given arguments: each that is unknown, invalid, unsupported, without effect, or another trainer's is
reported, with an alternative. Also the launcher's settings in the environment (how many processes, and how they train).

Launchers fail quietly: `accelerate launch` starts one process if `--multi_gpu` is missing, whatever its
`--num_processes`, and torchrun's processes train alone if the script does not ask for the CPU on a machine without
accelerators. Both are errors here, with given strategies and with auto.
"""

import inspect
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from itertools import chain
from numbers import Integral, Real
from typing import Any

import psutil  # type: ignore[import-untyped]
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from transformers import TrainingArguments
from transformers.utils.generic import strtobool

from hf_hotspa.data.collator import is_stream
from hf_hotspa.errors import DataError, HotspaConfigError, LaunchError, UnsupportedError
from hf_hotspa.model.options import LONGEST_TIMEOUT_S
from hf_hotspa.nearest import nearest, plain, unknown_flag
from hf_hotspa.rows.formats import format_of
from hf_hotspa.rows.table import SequenceTable

OWN_LAYOUTS = "hf_hotspa lays out the model itself (hotspa_strategies)"  # why the launcher may not lay out the model

_LAYOUTS = {  # variable of accelerate -> what it was told to start, and the fix beside another distributed_type
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", ", and give the JSON file as deepspeed= to the arguments"),
    "ACCELERATE_USE_FSDP": ("FSDP", ", and give fsdp=True to the arguments, or strategies such as dp8+z3"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", ", and give the degrees as hotspa_strategies"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        "a parallelism_config",
        ", and give the degrees as hotspa_strategies, such as dp4tp2:4096",
    ),
}

_WORLDS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_ONE_PROCESS = ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "MASTER_PORT")
"""Variables that accelerate's launcher of one process sets when it was told to start several."""
_LAUNCHES = re.compile(r"accelerate\S*[ ./-]launch")
"""The command line of `accelerate launch`, of `accelerate-launch`, or of the module."""
_DTYPES = ("no", "fp32", "bf16")


def refuse_launcher_settings() -> None:
    """Rejects settings of accelerate's configuration that would lay out or compile the model. Raises
    `UnsupportedError`, naming the variable, and what to use instead."""
    for variable, (name, more) in _LAYOUTS.items():
        if strtobool(os.environ.get(variable, "false")):
            raise UnsupportedError(
                f"accelerate was told to start {name} ({variable})",
                why=OWN_LAYOUTS,
                fix=f"use distributed_type: MULTI_GPU without its section{more}",
            )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        raise UnsupportedError(
            f"accelerate was told to compile the model (dynamo_backend {backend})",
            why="replicas are rebound to other storage for every phase",
            fix="leave dynamo_config out of the configuration, and --dynamo_backend out of the launch line",
        )
    precision = mixed_precision()
    if precision not in _DTYPES:
        raise UnsupportedError(
            f"accelerate was told to train in mixed precision {precision}",
            why="loss scaling and fp8 are not supported",
            fix="use mixed_precision: bf16, or no",
        )


def mixed_precision() -> str:
    """What accelerate's configuration asks for: no, bf16 (which is `bf16=True` to the Trainer), or another one."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()


def check_processes(world_size: int) -> None:
    """Checks that as many processes train together as were started and requested. `world_size`: processes that train
    together, according to transformers. Raises `LaunchError` if they are fewer; the message has the launch line."""
    if world_size > 1:
        return
    started = max((int(os.environ[name]) for name in _WORLDS if os.environ.get(name, "").isdigit()), default=1)
    if started > 1:
        raise LaunchError(
            f"{started} processes were started, and each of them would train alone",
            why="without an accelerator, transformers joins processes only where use_cpu=True",
            fix=f"give SCRIPT the flag --use_cpu (use_cpu=True in its arguments): torchrun --nproc_per_node {started} SCRIPT "
            "--use_cpu; or, to train alone, unset WORLD_SIZE",
        )
    if all(name in os.environ for name in _ONE_PROCESS) and (meant := _meant()) != 1:
        raise LaunchError(
            f"accelerate was told to start {meant or 'several'} processes, and has started one",
            why="without --multi_gpu (distributed_type: MULTI_GPU) `accelerate launch` starts one process, also with --cpu",
            fix=f"accelerate launch --multi_gpu --num_processes {meant or 'N'} SCRIPT (on CPU give SCRIPT the flag --use_cpu, "
            "and accelerate no --cpu)",
        )


def _meant() -> int | None:
    """The processes that accelerate's command line or configuration asks for; None if these cannot be read."""
    for parent in psutil.Process().parents():
        try:
            words = parent.cmdline()
            if not _LAUNCHES.search(" ".join(words)):
                continue
            if (number := _option(words, "num_processes")) is not None:
                return int(number)
            config = _option(words, "config_file") or (default_config_file if "--cpu" not in words else "")
            path = os.path.join(parent.cwd(), config)
            if os.path.isfile(path):
                return int(load_config_from_file(path).num_processes)
            return 1 if int(_option(words, "num_machines") or 1) == 1 else None  # its default
        except (psutil.Error, OSError, ValueError, TypeError):
            continue  # not readable, or ended
    return None


def _option(words: Sequence[str], name: str) -> str | None:
    """The value of an option of `accelerate launch`, written with underscores or hyphens, `=` or a space."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            return value if equals else next(iter(words[at + 1 :]), None)
    return None


def recompute_argument(args: TrainingArguments) -> str:
    """The name of the argument for recomputation: `activation_checkpointing`, in older releases
    `gradient_checkpointing`.

    If both exist, transformers keeps them equal.
    """
    return "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"


def recomputes(model: Any) -> bool:
    """Whether the layers of a model were told to recompute (`gradient_checkpointing_enable`)."""
    name = "is_activation_checkpointing"  # in older releases
    return bool(getattr(model, name if hasattr(type(model), name) else "is_gradient_checkpointing"))


def workers_context(args: TrainingArguments) -> Any:
    """How loader workers are started; None, the platform's rule, if the argument does not exist."""
    return getattr(args, "dataloader_multiprocessing_context", None)


# -- given arguments --------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

_warned: set[str] = set()


def warn_of_misspelt(fields: Collection[str]) -> None:
    """Warns of unknown command line flags that begin like ours, which a script's own parser may ignore. Each is
    reported once, by one process."""
    if os.environ.get("RANK", "0") != "0":
        return
    for word in sys.argv[1:]:
        flag = word.partition("=")[0]
        if not flag.startswith(("--hotspa_", "--hotspa-")) or flag in _warned:
            continue
        if any(name.startswith(plain(flag)) for name in fields):  # argparse accepts a prefix
            continue
        if nearest(flag, fields) is not None:
            _warned.add(flag)
            logger.warning("%s", unknown_flag(flag, fields))


def refuse_misspelt(cls: Any, given: Mapping[str, Any]) -> None:
    """Rejects keyword arguments that a class of arguments does not have. Raises `TypeError`: as in Python, with the
    nearest known name."""
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
    """The values that an argument accepts."""

    least: float = -sys.float_info.max
    most: float = sys.float_info.max  # the largest; infinite values are only accepted if it is infinite
    whole: bool = False  # whether it is an int
    fix: str = ""  # what to use, if the bounds do not say it

    def takes(self, value: Any) -> bool:
        """Whether the value, also of numpy or torch, is accepted; NaN never is."""
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

# odd values that the stock Trainer supports are accepted here, too (max_grad_norm=-1 clips nothing)
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
    """The properties of a flag beside its field's name, type, default, help and choices. Lists of flags derive from it."""

    number: Number | None = None  # the numbers that it accepts; None if it is not a number
    option: str = ""  # the option of the engine (`EngineOptions`) that it sets
    made: Callable[[Any], Any] = lambda value: value  # converts its value to that option's
    recorded: bool = False  # whether the record of a run has it among its settings
    of_one_rank: str = ""  # why ranks may have different values; empty if they may not
    as_stock: bool = False  # whether the stock Trainer can honour it


class _Help(str):
    """The help of a flag, with its `Flag`, because `HfArgumentParser` passes all metadata of a field to argparse."""

    flag: Flag


def flag(default: Any, text: str, choices: Iterable[str] = (), **known: Any) -> Any:
    help_ = _Help(text)
    help_.flag = Flag(**known)
    return field(default=default, metadata={"help": help_} | ({"choices": list(choices)} if choices else {}))


def flags_of(kind: type) -> dict[str, Flag]:
    """The flags of a class of arguments, by name; also if a script's class changes a default."""
    parts = (vars(part).get("__dataclass_fields__", {}) for part in reversed(kind.__mro__))
    inherited = chain.from_iterable(fields_.items() for fields_ in parts)
    helps = ((name, known.metadata.get("help")) for name, known in inherited)
    return {name: help_.flag for name, help_ in helps if isinstance(help_, _Help)}


def check_values(args: Any, kind: type | None = None) -> None:
    """Rejects values that are not numbers, or that no training can use, before they are used. `args`:
    `TrainingArguments`, or a command line's values for them. `kind`: their class; its flags are checked, too. Raises
    `HotspaConfigError`, naming the argument, its value and what to use."""
    numbers = _NUMBERS | {name: known.number for name, known in flags_of(kind or type(args)).items() if known.number}
    for name, rule in numbers.items():
        value = getattr(args, name, None)
        if value is None and getattr(type(args), name, None) is None:  # its default, or there is no such argument
            continue
        if name == "num_train_epochs" and _NUMBERS["max_steps"].takes(args.max_steps) and args.max_steps > 0:
            continue  # not read
        if not rule.takes(value):
            text = "; this is text (YAML reads 1e-3 so: write 0.001)" if isinstance(value, str) else ""
            raise HotspaConfigError(f"{name} is {value!r:.200}", fix=f"{rule.fix or rule}{text}")
    options = vars(args)["lr_scheduler_kwargs"]
    for name, value in options.items() if isinstance(options, dict) else ():
        if isinstance(value, float) and not math.isfinite(value):
            raise HotspaConfigError(f"lr_scheduler_kwargs has {name}={value}", fix="give a finite number")
    if args.output_dir == "":
        raise HotspaConfigError("output_dir is ''", fix="name a folder, or leave it out")
    if kind is None:
        _refuse_unknown_flags(args)


def _refuse_unknown_flags(args: object) -> None:
    """Rejects fields and attributes that look like flags of ours: of a user's class, or set on the object."""
    ours, others = {*flags_of(type(args))}, set(vars(args))
    for cls in type(args).__mro__:
        (ours if _top(cls) == "hf_hotspa" else others).update(vars(cls), inspect.get_annotations(cls))
    for name in sorted(others - ours):
        if name.startswith("hotspa_"):
            near = nearest(name, [known for known in ours if known.startswith("hotspa_")])
            raise HotspaConfigError(
                f"{type(args).__name__} has {name}={getattr(args, name, None)!r:.80}, and there is no such flag",
                why="nothing reads it",
                fix=f"did you mean {near}? " * (near is not None) + "Names of other fields may not begin with hotspa_",
            )


_EVALUATION = "evaluation runs in the dtype of training; use bf16 for both, or leave it off"

# name -> (accepted values, why another one is not supported or what to use instead)
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), "loss scaling is not supported; use bf16 or fp32"),
    "fp16_full_eval": ((False,), _EVALUATION),
    "torch_compile": ((False,), "replicas are rebound to other storage for every phase; leave it off"),
    "fsdp": ((None, False, "", []), "give it to HotSPaTrainingArguments, where full_shard is +z3 of the strategies"),
    "parallelism_config": ((None,), OWN_LAYOUTS),
    "use_liger_kernel": ((False,), "its fused loss does not support a vocabulary that is cut over ranks"),
    "save_on_each_node": (
        (False,),
        "a checkpoint is one directory that all ranks write into; use a shared file system",
    ),
    "optim_target_modules": ((None,), "layer-wise optimizers need whole matrices"),
    "debug": (([], "", None), "the debug hooks are on a model that does not run; leave the option out"),
}

_OF_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")

# name -> (the value that asks for nothing, the effect of another one)
_NO_EFFECT: dict[str, tuple[Any, str]] = {
    "bf16_full_eval": (False, "evaluation runs in the dtype of training, bf16 with bf16=True"),
    "auto_find_batch_size": (False, "the tokens of a pack bound the memory, not the batch size; it reads False"),
    "enable_jit_checkpoint": (False, "SIGTERM saves and stops on all ranks without it"),
    **dict.fromkeys(_OF_DDP, (None, "there is no DistributedDataParallel; it has no effect")),
}


CHANGED = ("auto_find_batch_size", "bf16_full_eval", "accelerator_config", "gradient_accumulation_steps")
"""The arguments that `explain_arguments` may change."""


def explain_arguments(args: TrainingArguments) -> None:
    """Logs a line for each argument without effect on numbers here, on the main process."""
    for name, (nothing, text) in _NO_EFFECT.items():
        if getattr(args, name, nothing) != nothing and args.process_index == 0:
            logger.warning("%s=%r: %s", name, getattr(args, name), text)
    args.auto_find_batch_size = False  # transformers would restart training after running out of memory
    args.bf16_full_eval = False  # transformers would evaluate another model
    read_accelerator_config(args)


def refuse_arguments(args: TrainingArguments) -> None:
    """Rejects arguments that cannot be honoured. Raises `UnsupportedError`, naming the argument, its value and what to
    use instead."""
    for name, (fine, why) in _UNSUPPORTED.items():
        value = getattr(args, name, fine[0])
        if value is not None and value not in fine:  # front ends give None for no
            shown = getattr(value, "value", value)
            raise UnsupportedError(f"the training argument {name}={shown!r} cannot be honoured", fix=why)
    if vars(args).get("hotspa_stock_checkpoints") and vars(args).get("hotspa_offload") == "master":
        raise UnsupportedError(
            "hotspa_stock_checkpoints=True and hotspa_offload='master' do not go together",
            why="the optimizer is DeepSpeed's CPU Adam then, whose settings differ from the stock Trainer's",
            fix="leave one of them out; hf-hotspa export gives the weights of any checkpoint",
        )


def read_accelerator_config(args: TrainingArguments) -> None:
    """Moves accelerate's accumulation steps to the arguments: accelerate has nothing to accumulate. Raises
    `HotspaConfigError` if both give a number of steps."""
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

# Field of TRL's SFTConfig -> (values without effect here, alternative to others). Other fields have no effect if None,
# False, 0 or empty.
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
    """Rejects requests in fields that another library's trainer reads, and this one would ignore.

    Fields of a user's class belong to the user: as with the stock Trainer, the user's callbacks and overrides read
    them. `datasets`: the training and evaluation sets, perhaps None. Raises `HotspaConfigError`, naming the fields, and
    what to do instead."""
    names = _fields_of_others(type(args), trainer)
    if not names:
        return
    kinds = {kind for dataset in _each(datasets) for kind in _kinds(dataset)}
    asked = [name for name in names if name != "max_length" and _asks(name, getattr(args, name), kinds)]
    if asked:
        raise _of_another(args, asked)


def refuse_longer_rows(args: TrainingArguments, trainer: type, tables: Iterable[SequenceTable | None]) -> None:
    """Rejects a `max_length` of another trainer's arguments that would cut rows. `tables`: the lengths of rows; None if
    they are unknown. Raises `HotspaConfigError`, naming it."""
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
        why=f"the trainer that these arguments are made for reads that, and this one would ignore it{more}",
        fix="; or ".join([advice[0], "; ".join(advice[1:])]),
    )


def _its_trainer(kind: type) -> str:
    of_trl = next((c for c in kind.__mro__ if _top(c) == "trl"), None)
    if of_trl is None:
        return "hf_hotspa.trainer.trainer.switched(ITS_CLASS)(model, args, ...)"
    stem = of_trl.__name__.removesuffix("Config")
    return f"from hf_hotspa.trl import {stem}Config, {stem}Trainer"


def _asks(name: str, value: object, kinds: Collection[str]) -> bool:
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
    known = {field.name for field in fields(TrainingArguments)}
    others = {_top(c) for c in kind.__mro__ if _is_library(c)} - {_top(c) for c in trainer.__mro__}
    if not others:
        return []
    annotated = [name for c in kind.__mro__ if _top(c) in others for name in inspect.get_annotations(c)]
    return [f.name for f in fields(kind) if f.name in set(annotated) - known]  # type: ignore[arg-type]


def _top(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_library(kind: type) -> bool:
    """Whether a class of arguments is installed together with its trainer, such as SFTConfig with SFTTrainer."""
    if _top(kind) in _OWN or not issubclass(kind, TrainingArguments):
        return False
    module = sys.modules.get(kind.__module__)
    if module is None:  # the class was not defined where its name says
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
    row: Any = {}
    if not is_stream(dataset):
        row = dataset[0] if len(dataset) else {}
    elif hasattr(dataset, "take"):  # a stream of `datasets`, which can be read again
        row = next(iter(dataset.take(1)), {})
    else:
        yield "unknown"
    if not isinstance(row, Mapping) or "input_ids" in row:
        if isinstance(row, Mapping) and row.get("completion_mask") is not None:
            yield "completion"
        return
    try:
        kind = format_of(list(row)).kind if row else "text"
    except DataError:  # unsupported, or read by a user's collator
        kind = "unknown"
    yield "conversation and answer" if kind == "completion" and isinstance(row["prompt"], list) else kind
