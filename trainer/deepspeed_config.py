"""DeepSpeed's JSON configs: every field becomes an argument, has no effect here, or raises an error that names it.

ZeRO stage 1 is always on: fp32 weights, optimizer state and the gradient sums over phases and ranks are spread over
all ranks. Stages 2 and 3 are `+z2` and `+z3` of the strategies. Nothing here imports DeepSpeed,
torch or transformers.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_hotspa.errors import HotspaConfigError, UnsupportedError

AUTO = "auto"  # DeepSpeed's word for the value of the training arguments

ARGUMENTS: dict[str, tuple[str, type]] = {  # field -> the argument that it sets, and the type of its value
    "train_batch_size": ("hotspa_mini_batch_size", int),
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", int),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", int),
    "gradient_clipping": ("max_grad_norm", float),
    "dataloader_drop_last": ("dataloader_drop_last", bool),
    "bf16.enabled": ("bf16", bool),
    "bfloat16.enabled": ("bf16", bool),
    "optimizer.params.lr": ("learning_rate", float),
    "optimizer.params.eps": ("adam_epsilon", float),
    "optimizer.params.weight_decay": ("weight_decay", float),
}

UNUSED: dict[str, tuple[str, ...]] = {
    section: tuple(names.split())
    for section, names in {
        "": """
            steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level disable_python_gc
            disable_allgather prescale_gradients gradient_predivide_factor check_overflow vocabulary_size
            zero_allow_untested_optimizer zero_force_ds_cpu_optimizer seq_parallel_communication_data_type
        """,
        "zero_optimization.": """
            contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
            allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights sub_group_size
            cpu_offload_use_pin_memory ignore_unused_parameters legacy_stage1 round_robin_gradients
            parameter_alignment compute_grad_norm zero_hpz_partition_size memory_efficient_linear
            pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
            elastic_checkpoint stage3_prefetch_bucket_size stage3_param_persistence_threshold
            stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
            stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
            stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
        """,
        "zero_optimization.offload_optimizer.": """
            nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init cpuadam_cores_perc super_offload
            buffer_size
        """,
        "zero_optimization.offload_param.": "nvme_path buffer_count buffer_size max_in_cpu pin_memory",
        "bf16.": "immediate_grad_update check_grad_overflow",
        "bfloat16.": "immediate_grad_update check_grad_overflow",
        "optimizer.": "legacy_fusion",
        "optimizer.params.": "torch_adam foreach freeze_step",
        "checkpoint.": "tag_validation parallel_write",
        "checkpoint.parallel_write.": "pipeline_stage",
        "aio.": "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
        "tensor_parallel.": "tp_overlap_comm tp_grain_size",
    }.items()
}
"""Section -> fields that change neither what is computed nor where it is stored; the engine decides these things."""

_SUMS = "gradients are summed in fp32 and the optimizer's state is fp32; leave it out"
_MEAN = "the loss is the mean over the label tokens of the mini-batch; leave it out"
_TENSOR_PARALLEL = "write the degree into hotspa_strategies, such as dp4tp2:4096"
_RECOMPUTE = "use activation_checkpointing=True, or strategies such as tp2+rc"
_PARAMETERS = (
    "weights are held as hotspa_strategies say: use more tp or pp, or hotspa_strategies=auto, and leave it out"
)

ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "communication_data_type": ((None, "fp32", "float32"), _SUMS),
    "gradient_allreduce_op": (("mean",), _MEAN),
    "managed_gradient_accumulation": ((True,), "the Trainer's loop does it; leave it out"),
    "sparse_gradients": ((False,), "gradients are dense here; leave it out"),
    "data_types.grad_accum_dtype": ((None, "fp32", AUTO), _SUMS),
    "data_types.param_dtype": ((None, AUTO), "use bf16, or load the model in the dtype that you want"),
    "data_types.buffer_dtype": ((None, AUTO), "buffers keep their dtype; leave it out"),
    "data_types.keep_in_fp32_modules": ((AUTO,), "the model's class decides; leave it out"),
    **dict.fromkeys(("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"), ((False,), _SUMS)),
    "zero_optimization.cpu_offload": ((False,), 'use "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": ((False,), _PARAMETERS),
    "zero_optimization.offload_param.device": (("none", None), _PARAMETERS),
    "zero_optimization.offload_optimizer.device": (
        ("none", None),
        "the master store is in memory, on the devices or on the host: use cpu or none",
    ),
    "zero_optimization.offload_optimizer.ratio": ((1, 1.0), "the master store is offloaded completely, or not at all"),
    "zero_optimization.zero_quantized_weights": ((False,), "switches move the bits; leave it out"),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), "switches move the bits; leave it out"),
    "zero_optimization.zero_quantized_gradients": ((False,), _SUMS),
    "zero_optimization.mics_shard_size": ((-1, 0), "the master store is spread over all ranks; leave it out"),
    "zero_optimization.mics_hierarchical_params_gather": ((False,), "leave it out"),
    "zero_optimization.zenflow": ((None,), "every step uses all gradients; leave it out"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": ((False,), "Muon needs whole matrices; use AdamW"),
    "optimizer.params.bias_correction": ((True,), "Adam's bias correction is always on"),
    "optimizer.params.amsgrad": ((False,), "leave it out, or use optim=adamw_torch without a DeepSpeed optimizer"),
    "optimizer.params.adam_w_mode": ((True,), "decay is decoupled (AdamW); leave it out"),
    "optimizer.params.fp32_optimizer_states": ((True,), _SUMS),
    "optimizer.params.max_grad_norm": ((0,), "use gradient_clipping"),
    "activation_checkpointing.number_checkpoints": ((None, 0), _RECOMPUTE),
    **{
        f"activation_checkpointing.{name}": ((False,), _RECOMPUTE)
        for name in ("partition_activations", "cpu_checkpointing", "synchronize_checkpoint_boundary")
    },
    "activation_checkpointing.contiguous_memory_optimization": ((False,), _RECOMPUTE),
    "activation_checkpointing.profile": ((False,), "look at the report of the run (hotspa_report)"),
    "tensor_parallel.autotp_size": ((0, 1), _TENSOR_PARALLEL),
    **dict.fromkeys(("tensor_parallel.tp_size", "tensor_parallel.tp.tp_size"), ((1,), _TENSOR_PARALLEL)),
    "sequence_parallel_size": ((1,), "use strategies such as tp2+sp"),
    "checkpoint.load_universal": ((False,), "checkpoints here are loaded in any layout; leave it out"),
    "checkpoint.use_node_local_storage": ((False,), "all ranks write into one directory; use a shared file system"),
    "use_data_before_expert_parallelism": ((False,), "leave it out"),
}
"""Field -> the accepted values, and why another one is not supported or what to use instead."""

OFF: dict[str, str] = {
    "fp16": "loss scaling is not supported; use bf16",
    "amp": "use bf16",
    "torch_autocast": "use bf16, which keeps fp32 masters",
    **dict.fromkeys(("flops_profiler", "comms_logger"), "look at the report of the run (hotspa_report)"),
    **dict.fromkeys(("tensorboard", "wandb", "comet", "csv_monitor"), "use report_to"),
    "compile": "replicas are rebound to other storage for every phase",
    "elasticity": "a checkpoint is resumed on any number of processes; no setting is needed",
    "autotuning": "use hotspa_strategies=auto",
    **dict.fromkeys(("curriculum_learning", "data_efficiency"), "the order of the data is the Trainer's"),
    "progressive_layer_drop": "all layers are trained",
    "eigenvalue": "nothing is quantized",
    "hybrid_engine": "there is no generation in training",
    **dict.fromkeys(("nebula", "datastates_ckpt"), "use hotspa_async_save"),
    "expert_parallel": "experts are cut by tp of a strategy",
    "quantize_training": "training is not quantized",
    "sparse_attention": "attention is the model's own",
    "compression_training": "the model is trained uncompressed",
    "weight_quantization": "switches move the bits",
    "pipeline": "write the degree into hotspa_strategies, such as dp4pp2:4096",
}
"""Section -> why it is not supported, or what to use instead. Accepted if its `enabled` is false, auto, or left out."""

NO_SWITCH = ("expert_parallel", "sparse_attention", "compression_training", "weight_quantization", "pipeline")
"""Sections without `enabled`, which are accepted if empty."""

SPECIAL = (  # fields that `deepspeed_config` reads itself
    "zero_optimization.stage", "optimizer.type", "optimizer.params.betas",
    "scheduler.type", "scheduler.params",
)  # fmt: skip

_WITHOUT_EFFECT = frozenset(section + name for section, names in UNUSED.items() for name in names)
KNOWN = _WITHOUT_EFFECT.union(ARGUMENTS, ONLY, OFF, SPECIAL)  # all fields of the tables
LOG, LINEAR = "log", "linear"

TYPES: dict[str, dict[str, float | str | None]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": LOG},
    "WarmupDecayLR": {
        "total_num_steps": None, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000,
        "warmup_type": LOG,
    },
    "WarmupCosineLR": {
        "total_num_steps": None, "warmup_min_ratio": 0.0, "warmup_num_steps": 1000, "cos_min_ratio": 0.0001,
        "warmup_type": LOG,
    },
}  # fmt: skip
"""Type of a scheduler -> its params with DeepSpeed's defaults; None if DeepSpeed has no default."""


@dataclass(frozen=True)
class DeepSpeedSchedule:
    """A schedule with all values set."""

    type: str  # one of `TYPES`
    params: Mapping[str, Any]  # all params of its type
    peak: float  # the learning rate after the warm-up

    def rate(self, step: int) -> float:
        """The learning rate of an optimizer step after `step` earlier ones."""
        iteration = step - 1  # DeepSpeed counts from the end of the first step
        cosine = self.type == "WarmupCosineLR"
        low = 0.0 if cosine else self.params["warmup_min_lr"]
        if iteration < 0:
            return low
        warmup = max(2, self.params["warmup_num_steps"])
        if iteration < warmup:
            linear = self.params["warmup_type"] == LINEAR
            share = iteration / warmup if linear else 1.0 / math.log(warmup) * math.log(iteration + 1)
        else:
            share = self._after(iteration, warmup)
        if not cosine:
            return low + (self.peak - low) * share
        begin = self.params["warmup_min_ratio"]
        return self.peak * (begin + share * (1.0 - begin) if iteration < warmup else share)

    def _after(self, iteration: int, warmup: int) -> float:
        if self.type == "WarmupLR":
            return 1.0
        total = self.params["total_num_steps"]
        if self.type == "WarmupDecayLR":
            return max(0.0, float(total - iteration) / float(max(1.0, total - warmup)))
        progress = min(1.0, (iteration - warmup + 1) / max(1, total - warmup))
        share, end = (1 + math.cos(math.pi * progress)) / 2, self.params["cos_min_ratio"]
        return max(0.0, end + (1.0 - end) * share)


_STAGES = {
    0: "masters and optimizer state are spread over all ranks with this stage, too",
    1: "masters and optimizer state are spread over all ranks",
    2: "strategies that do not set it are run with +z2: gradients leave layer by layer; auto weighs that anyway",
    3: "strategies that do not set it are run with +z3: weights come layer by layer, too; auto weighs that anyway",
}
_MAX_SHOWN = 60


@dataclass(frozen=True)
class DeepSpeedMapping:
    """The result of mapping a config. `scheduler`: type and params of its scheduler, some may be `auto`; None for the
    arguments' scheduler."""

    arguments: dict[str, Any]  # the training arguments that it sets
    rows: tuple[tuple[str, str], ...]  # `(field and value, its meaning here)`
    unused: tuple[str, ...] = ()  # fields about things that the engine does in another way
    scheduler: dict[str, Any] | None = None
    stage: int = 0  # 2 or 3 for that stage of ZeRO, else 0

    def schedule(self, learning_rate: float, num_steps: int, warmup_steps: int) -> DeepSpeedSchedule:
        """The learning rates; values that the config leaves open come from the training arguments."""
        assert self.scheduler is not None
        kind = self.scheduler["type"]
        known = TYPES[kind]
        of_arguments = {
            "warmup_num_steps": max(1, warmup_steps),
            "total_num_steps": num_steps,
            "warmup_max_lr": learning_rate,
            "warmup_min_lr": 0.0,
        }
        given = {name: self.scheduler.get(name, default) for name, default in known.items()}
        params: dict[str, Any] = {
            n: of_arguments.get(n, known[n]) if value in (None, AUTO) else value for n, value in given.items()
        }
        return DeepSpeedSchedule(kind, params, params.get("warmup_max_lr", learning_rate))

    def __str__(self) -> str:
        width = max((len(left) for left, _ in self.rows), default=0)
        lines = [f"  {left:<{width}}  {right}" for left, right in self.rows]
        if self.unused:
            lines.append(f"  not used here (the engine decides how it moves and stores): {', '.join(self.unused)}")
        return "\n".join(["the DeepSpeed config:", *lines])


def read_config(given: Mapping[str, Any] | str | Path, name: str = "the DeepSpeed config") -> dict[str, Any]:
    """A config as a dict. `given`: a dict, JSON text, or the path of a JSON file. Raises `HotspaConfigError` if there
    is no such file, or it does not hold a JSON object."""
    if isinstance(given, Mapping):
        return dict(given)
    text, where = str(given), name
    try:
        if not text.lstrip().startswith("{"):
            where, text = text, Path(text).read_text()
        config = json.loads(text, object_pairs_hook=_without_repeats)
    except (OSError, ValueError, RecursionError) as error:
        raise HotspaConfigError(
            f"{name} cannot be read: {error}", where=where, fix="give the path of a JSON file, or a dict"
        ) from error
    if not isinstance(config, dict):
        raise HotspaConfigError(f"{name} is not a JSON object: {text[:_MAX_SHOWN]!r}", where=where)
    return config


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    if len(section) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return section


def map_config(
    config: Mapping[str, Any], arguments: Mapping[str, Any], defaults: Mapping[str, Any]
) -> DeepSpeedMapping:
    """Maps a config, field by field. `arguments`: the training arguments as they were given. `defaults`: their
    defaults: an argument with another value was set, and must not contradict the config. Raises `UnsupportedError`,
    naming every field that cannot be honoured, and what to use instead."""
    return _Mapper(config, arguments, defaults).result()


class _Mapper:
    def __init__(self, config: Mapping[str, Any], arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._config, self._given, self._defaults = config, arguments, defaults
        self._set, self._rows = dict[str, Any](), list[tuple[str, str]]()
        self._unused, self._problems = list[str](), list[str]()
        self._scheduler: dict[str, Any] | None = None
        self._zero_stage = 0

    def result(self) -> DeepSpeedMapping:
        for section, content in self._config.items():
            if section in OFF:  # off by `enabled`, or, where that does not exist, by an empty section
                enabled = content
                if isinstance(content, Mapping):
                    enabled = content.get("enabled", bool(content) and section in NO_SWITCH)
                if enabled not in (False, AUTO, None):
                    self._refuse(section if section in NO_SWITCH else f"{section}.enabled", enabled, OFF[section])
                continue
            for field, value in _leaves({section: content}):
                self._field(field, value)
        self._read_optimizer()
        self._read_scheduler()
        if self._problems:
            what = f"{len(self._problems)} of the fields of the DeepSpeed config cannot be honoured: "
            raise UnsupportedError(what + "; ".join(self._problems), fix="change these fields, or leave them out")
        return DeepSpeedMapping(self._set, tuple(self._rows), tuple(self._unused), self._scheduler, self._zero_stage)

    def _field(self, field: str, value: object) -> None:
        if field.partition(".")[0] == "scheduler" or field in ("optimizer.type", "optimizer.params.betas"):
            return  # read together
        if field == "zero_optimization.stage":
            self._stage(value)
        elif field == "zero_optimization.offload_optimizer.device" and value == "cpu":
            self._argument(field, "master", "hotspa_offload", str, shown=value)
        elif field in ARGUMENTS:
            self._argument(field, value, *ARGUMENTS[field])
        elif field in _WITHOUT_EFFECT or (field in ONLY and _is_one_of(value, ONLY[field][0])):
            self._unused.append(field)
        elif field in ONLY:
            self._refuse(field, value, ONLY[field][1])
        elif value == {} and any(known.startswith(f"{field}.") for known in KNOWN):
            pass  # an empty section
        else:
            near = difflib.get_close_matches(field, KNOWN, 1, 0.75)
            self._refuse(field, value, f"no such field is known{f' (is it {near[0]}?)' if near else ''}")

    def _refuse(self, field: str, value: object, why: str) -> None:
        shown = json.dumps(value, default=repr)
        shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
        self._problems.append(f"{field}={shown}: {why}")

    def _stage(self, value: Any) -> None:
        if not _is_one_of(value, (0, 1, 2, 3)):
            self._refuse("zero_optimization.stage", value, "ZeRO has the stages 0, 1, 2 and 3")
            return
        self._zero_stage = value if value >= 2 else 0
        self._rows.append((f"zero_optimization.stage={value}", _STAGES[value]))

    def _argument(self, field: str, value: object, name: str, kind: type, shown: object = None) -> None:
        """Sets an argument, unless another value was given for it."""
        if value == AUTO:
            self._rows.append((f"{field}=auto", f"{name}, as the training arguments say"))
            return
        if not _is_a(value, kind):
            wanted = "true or false" if kind is bool else f"of type {kind.__name__}"
            self._refuse(field, value, f"{name} must be {wanted}")
            return
        value = kind(value)
        given = self._set.get(name, self._given[name])
        if given != value and (name in self._set or given != self._defaults[name]):
            self._refuse(field, value, f"{name} is {given}; make them equal, or write auto")
            return
        self._set[name] = value
        self._rows.append((f"{field}={json.dumps(value if shown is None else shown)}", f"{name}={value}"))

    def _read_optimizer(self) -> None:
        section = self._config.get("optimizer")
        if not isinstance(section, Mapping) or not section:
            return
        kind, optim = section.get("type"), getattr(self._given["optim"], "value", self._given["optim"])
        if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
            self._refuse("optimizer.type", kind, "leave the optimizer out, and set optim to an elementwise one")
        elif optim in ("adamw_torch", "adamw_torch_fused"):
            self._rows.append((f"optimizer.type={kind}", f"optim={optim}"))
        else:
            self._refuse("optimizer.type", kind, f"optim is {optim}; leave one of them out")
        params = section.get("params")
        betas = params.get("betas", AUTO) if isinstance(params, Mapping) else AUTO
        if betas == AUTO:
            return
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            self._refuse("optimizer.params.betas", betas, "give two numbers")
            return
        for index, beta in enumerate(betas):
            self._argument(f"optimizer.params.betas[{index}]", beta, f"adam_beta{index + 1}", float)

    def _read_scheduler(self) -> None:
        section = self._config.get("scheduler")
        if section in (None, {}):
            return
        kind = section.get("type") if isinstance(section, Mapping) else None
        if not isinstance(section, Mapping) or not isinstance(kind, str) or kind not in TYPES:
            others = f"leave it out and use lr_scheduler_type, or use one of {', '.join(TYPES)}"
            self._refuse("scheduler.type", kind, others)
            return
        params = section.get("params") or {}
        if not isinstance(params, Mapping):
            self._refuse("scheduler.params", params, "give an object")
            return
        if self._given["lr_scheduler_type"] != self._defaults["lr_scheduler_type"]:
            why = f"lr_scheduler_type is {self._given['lr_scheduler_type']}; leave one of them out"
            self._refuse("scheduler.type", kind, why)
        self._scheduler = {"type": kind, **params}
        for name in [name for name in section if name not in ("type", "params")]:
            self._refuse(f"scheduler.{name}", section[name], "no such field is known")
        for name, value in params.items():
            self._read_schedule(kind, name, value)
        shown = ", ".join(f"{name}={params.get(name, default)}" for name, default in TYPES[kind].items())
        self._rows.append((f"scheduler.type={kind}", f"the learning rates of {kind}({shown})"))

    def _read_schedule(self, kind: str, name: str, value: object) -> None:
        field, steps = f"scheduler.params.{name}", name.endswith("_steps")
        if name not in TYPES[kind]:
            self._refuse(field, value, f"{kind} takes {', '.join(TYPES[kind])}")
        elif name == "warmup_type":
            if value not in (LOG, LINEAR):
                self._refuse(field, value, f"use {LOG} or {LINEAR}")
        elif name == "warmup_max_lr":
            self._argument(field, value, "learning_rate", float)
        elif not (value == AUTO and name.endswith(("_steps", "_lr"))) and not _is_number(value, steps):
            self._refuse(field, value, f"give a number{' of steps' if steps else ''}")


def _is_number(value: Any, is_count: bool) -> bool:
    return _is_a(value, int) and value > 0 if is_count else _is_a(value, float) and value >= 0


def _is_a(value: object, kind: type) -> bool:
    if kind in (bool, str):
        return isinstance(value, kind)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return kind is float or float(value).is_integer()


def _is_one_of(value: object, fine: tuple[Any, ...]) -> bool:
    """Like `in`, but neither true nor false is a number."""
    return any(value is one or (value == one and isinstance(value, bool) == isinstance(one, bool)) for one in fine)


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def with_batch_size(mapping: DeepSpeedMapping, arguments: Mapping[str, Any], world_size: int) -> DeepSpeedMapping:
    """Checks DeepSpeed's three batch sizes against each other, once the number of processes is known. `arguments`: the
    training arguments, including those that the config sets. Returns the mapping, with the sequences per step in its
    table. Raises `UnsupportedError`: `train_batch_size` is not the product of the others and the processes."""
    given = mapping.arguments
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro, steps = (arguments[name] for name in names)
    total = given.get("hotspa_mini_batch_size")
    if total is None:
        return mapping
    factors = [arguments[name] for name in names if name in given]
    product = world_size * math.prod(factors)
    exact = len(factors) == len(names)
    if (exact and product != total) or total % product:
        raise UnsupportedError(
            f"the DeepSpeed config has train_batch_size={total}, and {world_size} processes with "
            f"train_micro_batch_size_per_gpu={micro} and gradient_accumulation_steps={steps} make {world_size * micro * steps}",
            fix="write auto for one of them, or leave train_batch_size out",
        )
    row = f"{total} sequences per step, over all processes and as many packs as their lengths need"
    return replace(mapping, rows=(*mapping.rows, ("", row)))


STAGES = {  # what is sharded -> its stage of ZeRO; `reshard_after_forward` is true or false, or one of the names
    "full_shard": 3, "true": 3, "1": 3, "shard_grad_op": 2, "false": 2, "2": 2, "no_shard": 0, "3": 0,
}  # fmt: skip

FSDP_UNUSED = frozenset(
    """version auto_wrap_policy transformer_layer_cls_to_wrap transformer_cls_names_to_wrap min_num_params
    forward_prefetch backward_prefetch backward_prefetch_policy limit_all_gathers use_orig_params sync_module_states
    cpu_ram_efficient_loading state_dict_type xla_fsdp_settings""".split()  # noqa: SIM905
)
"""Fields about things that the engine does in another way: units are embedding, layers and head, and the next one is
loaded while one computes."""

_OFF = {
    "activation_checkpointing": "use activation_checkpointing=True of the arguments, or strategies such as dp4+rc+z3",
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), "there is no XLA here; leave it out"),
}
_HYBRID = "the master store is spread over all ranks; use full_shard, or strategies with tp inside a node"


def read_fsdp(fsdp: Any, config: Any) -> tuple[int, bool]:
    """The stage and offload that FSDP's arguments ask for. `fsdp`: as `TrainingArguments.fsdp`: true, or options in one
    text or in a list. `config`: as `TrainingArguments.fsdp_config`: a dictionary, or the path of a JSON file. Returns
    the stage of ZeRO (3, 2, or 0 for none), and whether the master store is to be in host memory. Raises
    `HotspaConfigError` if the file cannot be read, or does not hold a JSON object; `UnsupportedError`, naming every
    field that cannot be honoured, and what to use instead."""
    if fsdp in (None, False, "", [], "false", "False"):
        return 0, False
    words = [] if fsdp is True else fsdp.replace(",", " ").split() if isinstance(fsdp, str) else list(fsdp)
    shown = [(f"fsdp={word!r}", "", word) for word in (_word(option) for option in words)]
    for name, value in read_config(config or {}, "fsdp_config").items():
        shown.append((f"fsdp_config.{name}={value!r}", name.removeprefix("fsdp_"), _word(value)))
    stage, offloads, problems = 3, False, list[str]()
    for setting, field, word in shown:
        if problem := _problem_of(field, word):
            problems.append(f"{setting}: {problem}")
        elif field in _SHARDED and word in STAGES:
            stage = STAGES[word]
        offloads |= (field in _OFFLOADS and word == "true") or (not field and word == "offload")
    if problems:
        what = f"{len(problems)} of the settings of FSDP cannot be honoured: "
        raise UnsupportedError(what + "; ".join(problems), fix="change them, or leave them out")
    return stage, offloads


_SHARDED = ("", "reshard_after_forward", "sharding_strategy")  # fields that say what is sharded; "": `fsdp` itself
_OFFLOADS = ("cpu_offload", "offload_params")


def _word(value: object) -> str:
    return str(getattr(value, "value", value)).lower()


def _problem_of(field: str, word: str) -> str:
    if field in _SHARDED:
        if word in STAGES or (not field and word in ("offload", "auto_wrap")):
            return ""
        unknown = f"use one of {', '.join(STAGES)}" if field else "no such option is known"
        return _HYBRID if word.startswith("hybrid") else unknown
    if field in _OFF:
        return "" if word in ("false", "none") else _OFF[field]
    return "" if field in FSDP_UNUSED or field in _OFFLOADS else "no such field is known"


def take_fsdp(args: Any) -> None:
    """Sets our arguments for the given `fsdp`, and clears it, because the stock arguments would start FSDP. `args`:
    `HotSPaTrainingArguments` before `TrainingArguments` is set up; gets `fsdp_stage`."""
    args.fsdp_stage, offloads = read_fsdp(vars(args)["fsdp"], vars(args)["fsdp_config"])
    args.fsdp = None
    if offloads:
        args.hotspa_offload = "master"
