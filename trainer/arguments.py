"""`HotSPaTrainingArguments`: a few checked flags on top of Hugging Face's, documented at their fields.

Settings that cannot be honoured raise an error that names them (`refuse_arguments`). A DeepSpeed config is mapped
(`deepspeed_config`). Everything else of `TrainingArguments` works unchanged.
"""

import copy
import dataclasses
import functools
import inspect
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from transformers import TrainingArguments

from hf_hotspa.callbacks.progress import is_watched
from hf_hotspa.costs.divided import WAYS
from hf_hotspa.costs.memory import UNLIMITED_TOKENS
from hf_hotspa.costs.terms import Scoring
from hf_hotspa.data.collator import EMPTY_POLICIES, ERROR, SKIP
from hf_hotspa.errors import HotspaConfigError, HotspaError, StrategyError, UnsupportedError, check_choice
from hf_hotspa.layout.vector import ACCUMULATION_DTYPES, FP32, WIRE_DTYPES, GradientDtypes
from hf_hotspa.layout.vector import AUTO as AUTO_DTYPE
from hf_hotspa.packing.bucketing import OVERLONG_POLICIES
from hf_hotspa.packing.pipeline_order import SCHEDULES
from hf_hotspa.parallel.agreement import typed_failures
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.plan.planner import PLANNERS
from hf_hotspa.run_flags import given_flags, is_active
from hf_hotspa.seam import Options, argument_classes
from hf_hotspa.search.search import MOST_PHASES
from hf_hotspa.strategy import Bucket, Strategy, check_launch, parse_buckets
from hf_hotspa.trainer import given_arguments
from hf_hotspa.trainer.deepspeed_config import DeepSpeedMapping, map_config, read_config, take_fsdp, with_batch_size
from hf_hotspa.trainer.given_arguments import SECONDS, Number, flag, flags_of
from hf_hotspa.trainer.optimizers import check_optimizer_name
from hf_hotspa.uncaught import show_errors_once
from hf_hotspa.versions import warn_of_untried_versions

logger = logging.getLogger(__name__)

OFFLOADS = ("none", "master")  # the values of `hotspa_offload`
AUTO = "auto"  # the value of `hotspa_strategies` that leaves the choice to the program
MEASURE = "measure"  # the value of `hotspa_calibration` that measures if the cache holds nothing
ON_OFF: dict[str, bool | None] = {"auto": None, "on": True, "off": False}
"""The values of three-state flags, as the engine takes them."""


@dataclass
class HotSPaTrainingArguments(*argument_classes(), TrainingArguments):  # type: ignore[misc]
    """The arguments of `HotSPaTrainer`.

    Accumulated batches are one mini-batch, packed and trained together.

    Raises:
        HotspaConfigError: a `hotspa_*` flag does not parse, or the number of processes does not fit.
        UnsupportedError: another setting cannot be honoured; the message names an alternative.
    """

    hotspa_strategies: str | None = flag(
        "auto", "Which strategy trains which lengths, shortest first: strategy:longest sequence[@tokens per pack],... "
        "such as dp4:1024@4096,dp2tp2:4096,tp2pp2:8192. Or auto: strategies and lengths are chosen at the start by "
        "measured speed and memory, and then again for each mini-batch from the chosen set.",
        recorded=True,
    )  # fmt: skip
    hotspa_model_path: str | None = flag(
        None, "Folder of a saved model (safetensors). Each process reads only its share, for models that no process "
        "can hold. The same as passing the folder as the model; a config may be passed beside it, and its dtype is "
        "then the dtype of the model.",
        of_one_rank="a path; the files of weights are compared",
    )  # fmt: skip
    hotspa_longest: int | None = flag(
        None, "With auto: the longest sequence that must fit, in tokens. Default: the longest of the data; if "
        "hotspa_overlong handles longer ones, the longest that model and memory allow.",
        number=Number(1, UNLIMITED_TOKENS - 1, whole=True),
    )  # fmt: skip
    hotspa_max_buckets: int = flag(
        3, "With auto: the most buckets, each with its own strategy. 1 never switches.",
        number=Number(1, MOST_PHASES, whole=True, fix=f"use 3, say, and at most {MOST_PHASES}"),
    )  # fmt: skip
    hotspa_calibration: str | None = flag(
        None, "Where predicted seconds are from: a calibration file of hf-hotspa calibrate, or measure (at the start, "
        "as thoroughly, kept in the cache for this machine, model and these versions). Default with auto: about 20 s "
        "of measuring before the nearest plans are raced, none on one process. Default with given strategies: the "
        "contents of the cache, if any, which decide nothing and are shown in the log and the report.",
    )  # fmt: skip
    hotspa_mini_batch_size: int | None = flag(
        None, "Rows of one optimizer step, over all processes. It overrides per_device_train_batch_size, need not "
        "divide evenly, and each row comes once per pass. Default: per_device_train_batch_size * processes * "
        "gradient_accumulation_steps, distributed as by the stock Trainer.",
        number=Number(1, 2**31 - 1, whole=True),
    )  # fmt: skip
    hotspa_overlong: str = flag(
        "error", "What happens to sequences longer than the longest bucket: error, truncate, split or drop. Every use "
        "is counted in the log.",
        choices=OVERLONG_POLICIES, recorded=True,
    )  # fmt: skip
    hotspa_empty_rows: str = flag(
        ERROR, "What happens to rows that are null, or have nothing to learn (an empty text, no messages, no "
        "input_ids): error (on null), or skip. A mini-batch then has fewer rows, and the log counts them.",
        choices=EMPTY_POLICIES,
    )  # fmt: skip
    hotspa_pipeline_schedule: str = flag(
        "auto", "Schedule of pipelines: auto, own (the same: 1F1B for packs of any shapes), 1f1b (interleaved with "
        "+v2) or gpipe (torch's, which pad packs to one shape). None holds more tokens than a bucket allows.",
        choices=SCHEDULES, option="pipeline_schedule", recorded=True,
    )  # fmt: skip
    hotspa_context_parallel: str = flag(
        "auto", "How the ranks of cp attend; auto moves the least data.",
        choices=WAYS, option="context_parallel", recorded=True,
    )  # fmt: skip
    hotspa_staging_mb: int = flag(
        16, "Size of each of the two staging buffers of a switch, in MiB.",
        number=Number(1, whole=True, fix="use at least 1; 16 is fast"), option="staging_bytes",
        made=lambda mib: mib << 20,
    )  # fmt: skip
    hotspa_overlap_load: str = flag(
        "auto", "Whether a phase starts to compute once the weights of its first layers have arrived: on, off, or auto "
        "(on with accelerators, off on CPU, where a switch takes cores from the computation).",
        choices=ON_OFF, option="overlap_load", made=ON_OFF.get,
    )  # fmt: skip
    hotspa_overlap_return: str = flag(
        "auto", "Whether gradients leave during the backward pass: on, off, or auto, as for hotspa_overlap_load.",
        choices=ON_OFF, option="overlap_return", made=ON_OFF.get,
    )  # fmt: skip
    hotspa_planner: str = flag(
        "relay", "How switches are planned: relay (data that a node lacks enters it once), or, to compare, algorithm1 "
        "(the paper's), round_robin, first_owner.",
        choices=PLANNERS, option="planner", recorded=True,
    )  # fmt: skip
    hotspa_second_source: str = flag(
        "auto", "Whether a phase also loads from the previous phase's weights, kept for it: on, off, or auto (on with "
        "accelerators if a second copy of the weights is small relative to the memory).",
        choices=ON_OFF, option="second_source", made=ON_OFF.get,
    )  # fmt: skip
    hotspa_grad_accum_dtype: str = flag(
        FP32, "The dtype in which the packs of a phase add up their gradients: fp32, or bf16 (half the memory; small "
        "late contributions are rounded away). The sums over phases and ranks are always fp32.",
        choices=ACCUMULATION_DTYPES,
    )  # fmt: skip
    hotspa_grad_wire_dtype: str = flag(
        AUTO_DTYPE, "The dtype in which gradients travel to the rank that sums them: fp32, bf16 (half the bytes, "
        "rounded once before the transfer), or auto (the dtype in which they add up).",
        choices=WIRE_DTYPES,
    )  # fmt: skip
    hotspa_memory_limit_mb: int | None = flag(
        None, "MiB that a run may use on a device: weights, gradients, master store, optimizer state, switch buffers "
        "and activations, whoever chose the strategies. Strategies that need more raise an error at the start. "
        "Default: auto plans with nine tenths of the free memory, on CPU shared by the processes of a machine.",
        number=Number(1, whole=True, fix="leave it out for no limit"), option="memory_limit",
        made=lambda mib: mib << 20 if mib else None,
    )  # fmt: skip
    hotspa_offload: str = flag(
        "none", "master keeps the master store in host memory: fp32 weights, gradient sums, optimizer state. AdamW is "
        "DeepSpeed's CPU Adam there, if DeepSpeed (the extra deepspeed) and a C++ compiler are installed.",
        choices=OFFLOADS, option="offload_master", made=lambda where: where == "master",
    )  # fmt: skip
    hotspa_switch_timeout: float = flag(
        120.0, "Seconds that a switch may wait for a peer before it fails. With overlapped gradient returns, where "
        "waiting for a peer means waiting for its computation, ddp_timeout applies instead.",
        number=replace(SECONDS, fix="use some minutes; 120 is the default"), option="switch_timeout_s",
    )  # fmt: skip
    hotspa_async_save: bool = flag(
        False, "Write checkpoints in the background, from a copy of the master store and the optimizer state in host "
        "memory. A checkpoint exists from the first step at which all ranks have written it.",
    )  # fmt: skip
    hotspa_stock_checkpoints: bool = flag(
        False, "Checkpoints also hold the files that the stock Trainer resumes from: optimizer.pt, scheduler.pt, "
        "rng_state*.pth and training_args.bin. With AdamW 8 more bytes per parameter, which rank 0 gathers in host "
        "memory and writes.",
        as_stock=True,
    )  # fmt: skip
    hotspa_max_failed_saves: int = flag(
        3, "How many saves in a row may fail (full disk, ...), with a warning each, before training stops.",
        number=Number(0, whole=True, fix="use 0 to stop at the first one"),
    )  # fmt: skip
    hotspa_allow_data_order_change: bool = flag(
        False, "Resume although seed, mini-batch size or data set changed, so that sequences may be trained twice or "
        "not at all.",
    )  # fmt: skip
    hotspa_attention_dropout: float | None = flag(
        None, "0 disables dropout of attention probabilities, whatever the model's config says (attention_dropout, "
        "attn_pdrop): dropout needs a slower attention. Default: as the config says.",
        number=Number(0, 0, fix="use 0 for none, or leave it out and set the probability in the model's config"),
        option="attention_dropout", made=lambda probability: probability is None,
    )  # fmt: skip
    hotspa_eval_strategy: str = flag(
        "longest", "What evaluate() and predict() run under: longest (all lengths under the strategy of the longest "
        "bucket, which fits them all), buckets (each length as it is trained), or one of hotspa_strategies, such as "
        "dp4.",
    )  # fmt: skip
    hotspa_skip_non_finite: int = flag(
        0, "How many mini-batches in a row may be skipped because their loss or gradient is not finite. A skipped one "
        "changes no weight, counts as a step and is counted in the log. With 0 the first one is an error.",
        number=Number(0, whole=True, fix="use 0 to skip none, or a small number"),
    )  # fmt: skip
    hotspa_phase_table: bool = flag(
        False, "Print a table of the phases at every logging step, on the main process.",
        as_stock=True, of_one_rank="the main process prints it",
    )  # fmt: skip
    hotspa_log_all: bool = flag(
        False, "Print all hotspa/ numbers of a log, not one line.",
        as_stock=True, of_one_rank="the main process prints them",
    )  # fmt: skip
    hotspa_report: bool = flag(
        True, "Write what the steps did into output_dir/hotspa_report: a record (hotspa_trace.jsonl), and at the end a "
        "page of it (report.html). hf-hotspa report makes the page of a run that was stopped.",
        as_stock=True,
    )  # fmt: skip
    hotspa_trace_steps: int = flag(
        3, "Steps in perfetto_trace.json beside the record, starting with the second; 0 for none.",
        number=Number(0, whole=True, fix="use 0 for no trace, or some; 3 is the default"), as_stock=True,
    )  # fmt: skip

    model_recomputes = False  # whether `gradient_checkpointing_enable` was called on the model
    fsdp_stage = 0  # the ZeRO stage that `fsdp` is mapped to
    scoring = Scoring()  # what a step of its trainer runs beside its training pass

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        """Checks the keyword arguments; here because a user's dataclass that derives from this one replaces `__init__`."""
        given_arguments.refuse_misspelt(cls, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        show_errors_once()
        warn_of_untried_versions()
        if getattr(self, "disable_tqdm", None) is None and not is_watched():
            self.disable_tqdm = True  # bars fill log files; lines stay
        given_arguments.warn_of_misspelt([f.name for f in fields(self)])
        self._check_types()
        given_arguments.check_values(self)  # before transformers compares them and connects to other processes
        given_arguments.refuse_launcher_settings()
        with launch_taken(self), typed_failures(int(os.environ.get("RANK", "0")), "connecting to the other processes"):
            super().__post_init__()
        self.complete()

    def complete(self) -> None:
        """Checks everything and derives the remaining values, once the attributes of `TrainingArguments` are set up."""
        given_arguments.check_values(self)
        self.bf16 = bool(vars(self)["bf16"]) or given_arguments.mixed_precision() == "bf16"  # untyped in transformers
        given_arguments.check_processes(self.world_size)
        self._check_strategies()
        for own in flag_fields(type(self)):
            if "choices" in own.metadata:
                check_choice(own.name, getattr(self, own.name), own.metadata["choices"])
        try:
            given_arguments.refuse_arguments(self)
            check_optimizer_name(self.optim)
        except UnsupportedError as unsupported:
            self.leave_to_stock(unsupported)
            return
        self._given = {name: vars(self)[name] for name in given_arguments.CHANGED}
        given_arguments.explain_arguments(self)
        _ = self.hotspa_recompute_every
        for part in argument_classes():
            if hasattr(part, "check_feature"):
                part.check_feature(self, self.hotspa_buckets)
        if (mapping := self.hotspa_deepspeed) is not None:
            self._deepspeed = with_batch_size(mapping, vars(self), self.world_size)
        if self.hotspa_mini_batch_size is not None:
            shares = self.world_size * vars(self)["gradient_accumulation_steps"]  # untyped in transformers
            self.per_device_train_batch_size = -(-self.hotspa_mini_batch_size // shares)

    def _check_strategies(self) -> None:
        if not self.hotspa_strategies:
            raise HotspaConfigError(
                "hotspa_strategies is not set",
                fix="use auto, or give strategy:longest sequence[@tokens per pack], shortest first, such as "
                f"dp{self.world_size}:2048@8192 for plain data parallelism on these {self.world_size} processes",
            )
        evaluating = evaluation_strategy(self.hotspa_eval_strategy)
        if not self.hotspa_auto:
            check_launch(self.hotspa_buckets, self.world_size)
            evaluation_buckets(self.hotspa_eval_strategy, given_buckets(self))
        # auto chooses among the strategies of this world size
        elif evaluating is not None and evaluating.world_size != self.world_size:
            raise HotspaConfigError(
                f"hotspa_eval_strategy is {self.hotspa_eval_strategy!r}, which needs {evaluating.world_size} processes, and "
                f"{self.world_size} are running",
                fix=_EVALUATED_BY,
            )

    def leave_to_stock(self, reason: HotspaError) -> None:
        """Leaves the run to the stock Trainer, and restores the arguments as they were given.

        Raises:
            HotspaError: `reason`, if a flag asks for something that the stock Trainer does not have.
        """
        asks = {own.name for own in flag_fields(type(self)) if getattr(self, own.name) != own.default}
        asks -= given_flags().keys()  # they are for what can be trained
        as_stock = {name for name, known in flags_of(type(self)).items() if known.as_stock}
        if asks - as_stock or self.hotspa_deepspeed is not None or self.fsdp_stage:
            raise reason
        for name, value in vars(self).get("_given", {}).items():
            setattr(self, name, value)
        self._refusal = reason

    @property
    def stock_reason(self) -> HotspaError | None:
        """Why the stock Trainer trains a run with these arguments; None if it does not."""
        return vars(self).get("_refusal")

    @property
    def hotspa_deepspeed(self) -> DeepSpeedMapping | None:
        """The mapped `deepspeed` config; None without one."""
        return vars(self).get("_deepspeed")

    @property
    def hotspa_auto(self) -> bool:
        """Whether the program chooses the strategies."""
        return (self.hotspa_strategies or "").strip() == AUTO

    @property
    def hotspa_buckets(self) -> tuple[Bucket, ...]:
        """`hotspa_strategies`, parsed; empty for `auto` (see `trainer.engine.buckets`)."""
        return () if self.hotspa_auto else parse_buckets(self.hotspa_strategies or "")

    @property
    def hotspa_rows_a_step(self) -> int:
        """Rows of one optimizer step, over all processes."""
        if self.hotspa_mini_batch_size is not None:
            return self.hotspa_mini_batch_size
        accumulation: int = vars(self)["gradient_accumulation_steps"]  # untyped in transformers
        return self.per_device_train_batch_size * self.world_size * accumulation

    @property
    def hotspa_skips_empty(self) -> bool:
        """Whether rows that are null or empty are left out and counted."""
        return self.hotspa_empty_rows == SKIP

    @property
    def hotspa_features(self) -> tuple[Options, ...]:
        made = (part.feature_settings(self) for part in argument_classes() if hasattr(part, "feature_settings"))
        return tuple(settings for settings in made if settings is not None)

    @property
    def hotspa_gradients(self) -> GradientDtypes:
        return GradientDtypes(self.hotspa_grad_accum_dtype, self.hotspa_grad_wire_dtype)

    def _check_types(self) -> None:
        """Flags may come from Python or YAML, with values that cannot be compared with a number."""
        # not the types of the dataclass fields, which HfArgumentParser rewrites
        parts = (*argument_classes(), HotSPaTrainingArguments)
        own = {name: kind for part in parts for name, kind in part.__annotations__.items()}
        for name, kind in own.items():
            value, wanted = getattr(self, name), int | float if kind is float else kind
            if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
                shown = getattr(kind, "__name__", str(kind))
                what = f"{name} is {value!r:.200}, which is not of type {shown}"
                raise HotspaConfigError(what, fix=f"give a value of type {shown}")

    @property
    def place_model_on_device(self) -> bool | None:
        """False: the model object stays where it is; the engine's replicas run on the devices."""
        return False if self.stock_reason is None else super().place_model_on_device

    @property
    def hotspa_recompute_every(self) -> int:
        """`activation_checkpointing`: every n-th layer of a stage is recomputed; 0 for none. All, where the model was told so.

        Raises:
            UnsupportedError: an option of `activation_checkpointing_kwargs` cannot be honoured.
        """
        if not getattr(self, name := given_arguments.recompute_argument(self)):
            return int(self.model_recomputes)
        given = getattr(self, f"{name}_kwargs") or {}
        # the same numbers either way
        options = {key: value for key, value in given.items() if key != "use_reentrant" or not isinstance(value, bool)}
        every = options.pop("every_n_layers", 1)
        if options or not isinstance(every, int) or every < 1:
            raise UnsupportedError(
                f"{name}_kwargs={given!r} cannot be honoured",
                why="complete layers are recomputed, by torch's checkpoint without re-entrance",
                fix="use every_n_layers and use_reentrant, or nothing",
            )
        return every


def argument_options(args: HotSPaTrainingArguments) -> dict[str, Any]:
    flags = flags_of(type(args)).items()
    return {known.option: known.made(getattr(args, name)) for name, known in flags if known.option}


def flag_fields(kind: type[HotSPaTrainingArguments] = HotSPaTrainingArguments) -> list[dataclasses.Field[Any]]:
    return [field for field in fields(kind) if field.name.startswith("hotspa_")]


@contextmanager
def launch_taken(args: Any) -> Iterator[None]:
    """Inside, `TrainingArguments.__post_init__` starts neither DeepSpeed nor FSDP: their settings are mapped onto arguments.

    Flags of ours that `args` do not have get the value that `hf-hotspa run` was given, else their default. Raises
    `HotspaError` if a setting cannot be honoured."""
    values, ours = vars(args), {own.name: own.default for own in flag_fields()}
    for name, value in given_flags().items():
        if values.get(name, ours[name]) == ours[name]:
            setattr(args, name, value)
    for name, default in ours.items():
        values.setdefault(name, default)
    given, mapping = values["deepspeed"], None
    if given:
        mapping = map_config(read_config(given), values, ours | {f.name: f.default for f in fields(args)})
        for name, value in mapping.arguments.items():
            setattr(args, name, value)
    args._deepspeed, args.deepspeed = mapping, None
    take_fsdp(args)
    yield
    args.deepspeed = given


# -- which strategies run which lengths -------------------------------------------------------------------------------

LONGEST, PER_BUCKET = "longest", "buckets"  # values of `hotspa_eval_strategy` beside a strategy of the pool
_EVALUATED_BY = f"use {LONGEST}, {PER_BUCKET}, or one of the strategies of the run, such as dp4"


def evaluation_strategy(choice: str) -> Strategy | None:
    """The strategy that `hotspa_eval_strategy` names; None if it names none. Raises `HotspaConfigError` if it is not a
    strategy."""
    if choice in (LONGEST, PER_BUCKET):
        return None
    try:
        return Strategy.parse(choice)
    except StrategyError as error:
        raise HotspaConfigError(f"hotspa_eval_strategy is {choice!r:.200}", why=error.what, fix=_EVALUATED_BY) from None


def evaluation_buckets(choice: str, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Which strategy evaluates which lengths. `choice`: `longest`: all lengths under the strategy of the longest
    bucket, which fits them all; `buckets`: each length as trained; or one strategy of the pool for all lengths. Raises
    `HotspaConfigError`: `choice` is none of these."""
    last, strategy = max(buckets, key=lambda bucket: bucket.longest), evaluation_strategy(choice)
    if choice == PER_BUCKET:
        return tuple(buckets)
    if strategy is None:
        return (Bucket(last.strategy, last.longest, last.pack_tokens),)
    # the options that the arguments add to all strategies of the engine may be left out
    own = next((b for b in buckets if b.strategy == strategy.recomputing(b.strategy.rc).sharded(b.strategy.z)), None)
    if own is None:
        pool = ", ".join(dict.fromkeys(str(bucket.strategy) for bucket in buckets))
        raise HotspaConfigError(
            f"hotspa_eval_strategy is {choice!r}, which is not in hotspa_strategies",
            why="weights can only be loaded into strategies whose plans were made at the start",
            fix=f"use {LONGEST}, {PER_BUCKET}, or one of {pool}",
        )
    return (Bucket(own.strategy, last.longest, max(own.pack_tokens, last.longest)),)


def given_buckets(args: HotSPaTrainingArguments, model: object = None) -> tuple[Bucket, ...]:
    """The buckets of `hotspa_strategies`.

    Unless they set these options themselves, they recompute (`+rc`) with `activation_checkpointing`, and are sharded
    (`+z2`, `+z3`) with stages 2 and 3 of a DeepSpeed config, or `fsdp`. Neighbours with the same strategy become one.
    `model`: if known, bounds the n of "every n-th layer" of `activation_checkpointing` by its number of layers. Raises
    `StrategyError` if buckets that are not neighbours become the same strategy."""
    every, deepspeed = args.hotspa_recompute_every, args.hotspa_deepspeed
    if every and model is not None:
        every = min(every, getattr(bare_model(model)[0].config.get_text_config(), "num_hidden_layers", every))
    stage = max(args.fsdp_stage, deepspeed.stage if deepspeed is not None else 0)
    buckets = list[Bucket]()
    for bucket in args.hotspa_buckets:
        strategy = bucket.strategy.recomputing(every).sharded(stage)
        low = buckets.pop().low if buckets and buckets[-1].strategy == strategy else bucket.low
        if any(other.strategy == strategy for other in buckets):
            raise StrategyError(
                f"two length ranges of hotspa_strategies are trained under {strategy}",
                why="activation_checkpointing adds +rc to all strategies, and a sharded optimizer +z",
                fix="join these ranges, or leave the argument out and write the options into hotspa_strategies",
            )
        buckets.append(replace(bucket, strategy=strategy, low=low))
    return tuple(buckets)


# -- what a script passes to a Trainer --------------------------------------------------------------------------------


def named(
    rest: tuple[Any, ...], by_name: dict[str, Any], base: Any, first: Sequence[str] = ("model", "args")
) -> dict[str, Any]:
    """The arguments of a Trainer by name, also those given by position, without the `first` ones. `base`: the
    constructor of the class behind ours. Raises `TypeError` if there are too many, or one is given twice."""
    places = [p.name for p in inspect.signature(base).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = [name for name in places if name not in ("self", *first)]
    if len(rest) > len(names):
        more = len(first)
        raise TypeError(f"the trainer takes {len(names) + more} arguments by place, but {len(rest) + more} were given")
    placed = dict(zip(names, rest, strict=False))
    if twice := sorted(placed.keys() & by_name.keys()):
        raise TypeError(f"the trainer got multiple values for argument {twice[0]!r}")
    return {**placed, **by_name}


@functools.cache
def arguments_of(base: type, home: str) -> Any:
    """A class of arguments like `base`, a library's, with the `hotspa_*` flags and the defaults of `base`. `home`: the
    module that has it under the same name."""
    own, types = {field.name: copy.copy(field) for field in fields(base)}, get_type_hints(base)  # which may be texts
    namespace = {"__module__": home, "__doc__": base.__doc__, "__annotations__": {name: types[name] for name in own}}
    return dataclass(type(base.__name__, (HotSPaTrainingArguments, base), {**namespace, **own}))


@functools.cache
def _with_flags(kind: Any) -> Any:
    namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce_ex__": _pickled}
    made = type(kind.__name__, (HotSPaTrainingArguments, kind), namespace)
    return dataclasses.dataclass(init=False, repr=False, eq=False)(made)


def _unfilled(kind: object) -> Any:
    """An object of that class without attributes. Module-level, because pickles call it."""
    return object.__new__(HotSPaTrainingArguments if kind is TrainingArguments else _with_flags(kind))


def _pickled(args: object, protocol: object) -> tuple[Any, ...]:
    """Pickles (`training_args.bin`) name the user's class, the base of this one, which was made at run time."""
    return _unfilled, (type(args).__bases__[1],), vars(args)


def completed(args: TrainingArguments | None) -> HotSPaTrainingArguments:
    """The arguments of `HotSPaTrainer` for the `args` of a `Trainer`, with every `hotspa_*` flag at its default. Raises
    `HotspaConfigError`: `args` are not training arguments, or do not fit; `UnsupportedError` if a setting cannot be
    honoured."""
    show_errors_once()
    if isinstance(args, HotSPaTrainingArguments):
        return args  # its values are checked with the other ranks
    if args is None:
        return HotSPaTrainingArguments(output_dir="tmp_trainer")  # the stock Trainer's default
    if not isinstance(args, TrainingArguments):
        fix = "pass HotSPaTrainingArguments(..., hotspa_strategies=...)"
        raise HotspaConfigError(f"args is a {type(args).__name__}", fix=fix)
    if vars(args).get("deepspeed") and vars(args).get("_deepspeed") is None:
        raise UnsupportedError(
            "TrainingArguments(deepspeed=...) has started DeepSpeed already",
            why="here its config is mapped onto arguments, field by field",
            fix="give deepspeed= to HotSPaTrainingArguments",
        )
    kind: Any = type(args)
    own: HotSPaTrainingArguments = _unfilled(kind)
    own.__dict__ = vars(args)
    for ours in flag_fields():
        own.__dict__.setdefault(ours.name, ours.default)
    given_arguments.refuse_launcher_settings()
    own.complete()
    if own.process_index == 0 and not is_active():
        text = "%s: every hotspa_* flag is at its default (hotspa_strategies=%s); HotSPaTrainingArguments set them"
        logger.warning(text, kind.__name__, own.hotspa_strategies)
    return own
