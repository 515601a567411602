"""`HotSPaTrainingArguments`: a few flags on top of Hugging Face's, and a refusal by name of what cannot be honoured.

A setting that would be ignored silently, or that would make training inexact, raises `UnsupportedError` with what to
use instead. Everything else of `TrainingArguments` works as it is.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames

from hf_hotspa.data.bucketing import OVERLONG_POLICIES, check_policy
from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.runtime.pipeline import SCHEDULES, check_schedule
from hf_hotspa.strategy import Bucket, check_launch, parse_buckets
from hf_hotspa.switch.planner import PLANNERS, check_planner

ELEMENTWISE_OPTIMIZERS = (
    OptimizerNames.ADAMW_TORCH,
    OptimizerNames.ADAMW_TORCH_FUSED,
    OptimizerNames.SGD,
    OptimizerNames.ADAGRAD,
    OptimizerNames.RMSPROP,
)
"""The values of `--optim` whose update of an element depends on that element only, so that it is exact on shards."""

ON_OFF: dict[str, bool | None] = {"auto": None, "on": True, "off": False}
"""The values of the flags that may also decide themselves, as the engine takes them."""

_CHECKPOINTS = "checkpoints do not exist yet; save the model at the end with trainer.save_model()"
_EVALUATION = "evaluation does not exist yet; evaluate the saved model with the stock Trainer"
_OWN_LAYOUTS = "hf_hotspa lays out the model itself (hotspa_strategies)"

# name -> (values that are fine, why another one is refused or what to use instead)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), "loss scaling is not supported; use bf16 or fp32"),
    "fp16_full_eval": ((False,), _EVALUATION),
    "bf16_full_eval": ((False,), _EVALUATION),
    "torch_compile": ((False,), "replicas are rebound to other storage for every phase; leave it off"),
    "fsdp": ((None, False, "", []), _OWN_LAYOUTS),
    "deepspeed": ((None,), _OWN_LAYOUTS),
    "parallelism_config": ((None,), _OWN_LAYOUTS),
    "ddp_find_unused_parameters": ((None,), "there is no DistributedDataParallel; drop the option"),
    "ddp_bucket_cap_mb": ((None,), "there is no DistributedDataParallel; drop the option"),
    "ddp_broadcast_buffers": ((None,), "there is no DistributedDataParallel; drop the option"),
    "ddp_static_graph": ((None,), "there is no DistributedDataParallel; drop the option"),
    "use_liger_kernel": ((False,), "its fused loss does not know a vocabulary that is cut over ranks"),
    "neftune_noise_alpha": ((None,), "its noise depends on the row, and a row here is a pack of many sequences"),
    "label_smoothing_factor": ((0, 0.0), "the vocabulary-parallel loss has no smoothing"),
    "activation_checkpointing": ((False, None), "recomputation does not exist yet; lower the tokens per pack"),
    "auto_find_batch_size": ((False,), "memory is bounded by the tokens per pack: strategy:longest@tokens"),
    "average_tokens_across_devices": ((True,), "the loss is always the mean over all tokens of the mini-batch"),
    "torch_empty_cache_steps": ((None,), "the engine keeps its memory between phases; drop the option"),
    "save_strategy": ((SaveStrategy.NO,), _CHECKPOINTS),
    "load_best_model_at_end": ((False,), _CHECKPOINTS),
    "enable_jit_checkpoint": ((False,), _CHECKPOINTS),
    "resume_from_checkpoint": ((None, False), _CHECKPOINTS),
    "push_to_hub": ((False,), "push the saved model with model.push_to_hub()"),
    "eval_strategy": ((IntervalStrategy.NO,), _EVALUATION),
    "eval_on_start": ((False,), _EVALUATION),
    "train_sampling_strategy": (
        ("random", "sequential"),
        "lengths are grouped inside each mini-batch, without changing which sequences it holds; use random",
    ),
    "optim_target_modules": ((None,), "layer-wise optimizers need whole matrices"),
    "debug": (([], "", None), "the debug hooks sit on a model that does not run; drop the option"),
}


@dataclass
class HotSPaTrainingArguments(TrainingArguments):
    """The arguments of `HotSPaTrainer`.

    Raises:
        HotspaConfigError: a `hotspa_*` flag does not parse, or the number of processes does not fit.
        UnsupportedError: another setting cannot be honoured; the message says what to use instead.
    """

    save_strategy: SaveStrategy | str = field(
        default="no", metadata={"help": "Only 'no': checkpoints do not exist yet. Save with trainer.save_model()."}
    )
    hotspa_strategies: str | None = field(
        default=None,
        metadata={
            "help": "Which strategy trains which lengths, shortest first: strategy:longest sequence[@tokens per pack],... "
            "such as dp4:1024@4096,dp2tp2:4096,tp2pp2:8192."
        },
    )
    hotspa_mini_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Sequences of one optimizer step, over all processes. Default: per_device_train_batch_size * "
            "processes * gradient_accumulation_steps."
        },
    )
    hotspa_overlong: str = field(
        default="error",
        metadata={
            "help": "What happens to sequences longer than the longest bucket: error, truncate, split or drop. "
            "Every use is counted in the log.",
            "choices": list(OVERLONG_POLICIES),
        },
    )
    hotspa_pipeline_schedule: str = field(
        default="auto",
        metadata={
            "help": "Schedule of pipelines: auto, own (1F1B for packs of any shapes), 1f1b or gpipe (torch's, which pad "
            "the packs of a phase to one shape).",
            "choices": list(SCHEDULES),
        },
    )
    hotspa_staging_mb: int = field(
        default=16, metadata={"help": "Size of each of the two staging buffers of a switch, in MiB."}
    )
    hotspa_overlap_load: str = field(
        default="auto",
        metadata={
            "help": "Whether a phase starts to compute when the weights of its first layers have arrived: on, off, or auto "
            "(on with accelerators, off on CPU, where a switch takes the cores from the computation).",
            "choices": list(ON_OFF),
        },
    )
    hotspa_overlap_return: str = field(
        default="auto",
        metadata={
            "help": "Whether gradients leave while earlier layers still run backward: on, off, or auto (as above).",
            "choices": list(ON_OFF),
        },
    )
    hotspa_planner: str = field(
        default="relay",
        metadata={
            "help": "How switches are planned: relay (what a node lacks enters it once), or, to compare, algorithm1 (the "
            "paper's), round_robin, first_owner.",
            "choices": list(PLANNERS),
        },
    )
    hotspa_second_source: str = field(
        default="auto",
        metadata={
            "help": "Whether a phase also loads from the weights of the phase before, kept for it: on, off, or auto (on with "
            "accelerators where a second copy of the weights is small beside the memory).",
            "choices": list(ON_OFF),
        },
    )
    hotspa_memory_limit_mb: int | None = field(
        default=None,
        metadata={
            "help": "MiB that weights, gradients, master store and switch buffers may take on a device; what is free on an "
            "accelerator when left out. Strategies that need more are refused at the start."
        },
    )
    hotspa_switch_timeout: float = field(
        default=120.0,
        metadata={
            "help": "Seconds that a switch may wait for a peer before it fails. With overlapped gradient returns, where "
            "waiting for a peer is waiting for its computation, ddp_timeout holds instead."
        },
    )
    hotspa_phase_table: bool = field(
        default=False, metadata={"help": "Print a table of the phases at every logging step, on the main process."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hotspa_strategies:
            raise HotspaConfigError(
                "hotspa_strategies is not set",
                fix="give strategy:longest sequence[@tokens per pack], shortest first, such as "
                f"dp{self.world_size}:2048@8192 for plain data parallelism on these {self.world_size} processes",
            )
        check_launch(self.hotspa_buckets, self.world_size)
        check_policy(self.hotspa_overlong)
        check_schedule(self.hotspa_pipeline_schedule)
        if self.hotspa_staging_mb < 1:
            raise HotspaConfigError(f"hotspa_staging_mb is {self.hotspa_staging_mb}", fix="use at least 1; 16 is fast")
        check_planner(self.hotspa_planner)
        if self.hotspa_memory_limit_mb is not None and self.hotspa_memory_limit_mb < 1:
            raise HotspaConfigError(
                f"hotspa_memory_limit_mb is {self.hotspa_memory_limit_mb}", fix="leave it out for no limit"
            )
        for name in ("hotspa_overlap_load", "hotspa_overlap_return", "hotspa_second_source"):
            if getattr(self, name) not in ON_OFF:
                raise HotspaConfigError(f"{name} is {getattr(self, name)!r}", fix=f"use one of {', '.join(ON_OFF)}")
        if not self.hotspa_switch_timeout > 0:
            raise HotspaConfigError(
                f"hotspa_switch_timeout is {self.hotspa_switch_timeout}", fix="use some minutes; 120 is the default"
            )
        self._refuse()
        if self.hotspa_mini_batch_size is None:
            accumulation: int = vars(self)["gradient_accumulation_steps"]  # untyped in transformers
            self.hotspa_mini_batch_size = self.per_device_train_batch_size * self.world_size * accumulation
        if self.hotspa_mini_batch_size < 1:
            raise HotspaConfigError(f"hotspa_mini_batch_size is {self.hotspa_mini_batch_size}", fix="use at least 1")
        # accumulation is part of the mini-batch from here on; the Trainer's loop must not accumulate a second time
        self.gradient_accumulation_steps = 1

    @property
    def hotspa_buckets(self) -> tuple[Bucket, ...]:
        """`hotspa_strategies`, parsed."""
        return parse_buckets(self.hotspa_strategies or "")

    @property
    def place_model_on_device(self) -> bool:
        """False: the model object stays where it is; what runs on the devices are the engine's replicas."""
        return False

    def _refuse(self) -> None:
        for name, (fine, why) in _REFUSED.items():
            value = getattr(self, name, fine[0])
            if value not in fine:
                shown = getattr(value, "value", value)
                raise UnsupportedError(f"the training argument {name}={shown!r} cannot be honoured", fix=why)
        if self.optim not in ELEMENTWISE_OPTIMIZERS:
            names = ", ".join(o.value for o in ELEMENTWISE_OPTIMIZERS)
            raise UnsupportedError(
                f"the optimizer {self.optim.value!r} cannot be honoured",
                why="every rank updates a flat share of each weight, and only elementwise optimizers are exact on that",
                fix=f"use one of {names}",
            )
