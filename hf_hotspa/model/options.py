"""The options of an engine: checked, passed on unchanged, and with their defaults resolved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from hf_hotspa.costs.divided import WAYS
from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.errors import HotspaConfigError, check_choice
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.layout.vector import IN_FP32, GradientDtypes
from hf_hotspa.packing.pipeline_order import SCHEDULES
from hf_hotspa.parallel.loss import SequenceLoss, TokenLoss
from hf_hotspa.plan.planner import PLANNERS
from hf_hotspa.seam import Options, Runner, hooks

LONGEST_TIMEOUT_S = 1e8  # three years: a longer one is a mistake, and overflows in process groups
_SECOND_SOURCE_SHARE = 8


def default_device() -> torch.device:
    """This process's CUDA device, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class Overlap:
    """Which switches run beside the computation."""

    load: bool = False  # a phase computes as soon as the weights of its first modules have arrived
    return_gradients: bool = False  # gradients leave while earlier layers still run backward

    def __bool__(self) -> bool:
        return self.load or self.return_gradients


@dataclass(frozen=True)
class EngineOptions:
    """How an engine trains. The same on all ranks. Options of one strategy (`+sp`, `+rc`) are in its name.

    Args:
        compute_dtype: The dtype of weights and activations in the strategies; the model's own when None.
        pipeline_schedule: One of `auto`, `own`, `1f1b`, `gpipe`.
        features: Settings of features (`hf_hotspa.seam`), such as `PipeDream()`.
        record_auxiliary: Whether replicas always record what an auxiliary loss reads; for a tape.
        context_parallel: The cp method: `auto`, `ulysses`, `allgather` or `ring` (`costs.divided`).
        staging_bytes: Bound of each of the two staging buffers of a switch.
        timeout_s: How long an operation may wait for a peer.
        devices_per_node: None: the ranks detect it.
        overlap_load: See `Overlap.load`. None: on accelerators.
        overlap_return: See `Overlap.return_gradients`. None: on accelerators.
        switch_timeout_s: How long a switch may wait for a peer. With `overlap_return` it waits for a peer's
            computation, and `timeout_s` applies.
        planner: One of `PLANNERS`.
        second_source: Whether a phase also loads from the previous phase's weights. None: if a second copy is small.
        memory_limit: The most bytes of weights, gradients, master store and switch buffers on this rank. None: the free
            memory of an accelerator; no limit on CPU.
        label_smoothing: As `label_smoothing_factor` of transformers.
        seed: Of random numbers.
        loss_chunk_tokens: Tokens of a pack whose logits exist at a time; None: as many as fit in 256 MiB.
        gradients: The dtypes in which gradients accumulate and travel.
        offload_master: Whether the master store (weights, gradients, optimizer state) is in host memory.
        loss: A custom loss instead of the cross entropy; the mini-batches must have its columns.
        pair_costs: By tp, the measured cost of a pair of tokens relative to one token, for chunks of equal time in
            pipelines; by default from the model's arithmetic.
        attention_dropout: Whether attention probabilities are dropped as the model's config says, or not at all.
        stage_costs: Measured seconds by which stages are cut; None: cut by parameters.

    Raises:
        HotspaConfigError: naming the option with an invalid value.
    """

    compute_dtype: torch.dtype | None = None
    pipeline_schedule: str = "auto"
    staging_bytes: int = 16 << 20
    timeout_s: float = 1800.0
    devices_per_node: int | None = None
    overlap_load: bool | None = None
    overlap_return: bool | None = None
    switch_timeout_s: float = 120.0
    planner: str = "relay"
    second_source: bool | None = None
    memory_limit: int | None = None
    label_smoothing: float = 0.0
    seed: int = 0
    loss_chunk_tokens: int | None = None
    gradients: GradientDtypes = IN_FP32
    offload_master: bool = False
    loss: TokenLoss | SequenceLoss | None = None
    attention_dropout: bool = True
    stage_costs: StageCosts | None = None
    pair_costs: Mapping[int, float] = field(default_factory=dict)
    context_parallel: str = "auto"
    features: tuple[Options, ...] = ()
    record_auxiliary: bool = False

    def __post_init__(self) -> None:
        check_choice("the pipeline schedule", self.pipeline_schedule, SCHEDULES)
        check_choice("the cp method", self.context_parallel, WAYS)
        check_choice("the planner", self.planner, PLANNERS)
        for what, seconds in (("the timeout of switches", self.switch_timeout_s), ("the timeout", self.timeout_s)):
            if not 0 < seconds <= LONGEST_TIMEOUT_S:
                raise HotspaConfigError(
                    f"{what} is {seconds} s", fix="use some minutes; 120 is the default of switches"
                )
        if self.memory_limit is not None and self.memory_limit < 1:
            raise HotspaConfigError(f"the memory limit is {self.memory_limit} bytes", fix="leave it out for no limit")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise HotspaConfigError(f"the label smoothing is {self.label_smoothing}", fix="use a number from 0 to 1")
        if self.loss is not None and self.label_smoothing:
            raise HotspaConfigError(
                f"the label smoothing is {self.label_smoothing}, and the loss is {self.loss.name}",
                why="a custom loss replaces the smoothed cross entropy",
                fix="leave label smoothing at 0",
            )
        for settings in self.features:
            settings.check_engine(self)
        if self.loss_chunk_tokens is not None and self.loss_chunk_tokens < 1:
            raise HotspaConfigError(
                f"the loss is computed in chunks of {self.loss_chunk_tokens} tokens", fix="leave it out, or use 1024"
            )

    def master_device(self, device: torch.device) -> torch.device:
        """Where the master store is, for a rank that computes on this device."""
        return torch.device("cpu") if self.offload_master else device

    def run_options(self, device_type: str) -> RunOptions:
        """The options that decide which strategies can run on such devices."""
        return RunOptions(self.pipeline_schedule, self.context_parallel, device_type, self.features)

    @property
    def runners(self) -> tuple[Runner, ...]:
        """Other ways to run phases or packs."""
        return tuple(made for hook in hooks("runner") if (made := hook(self)) is not None)

    @property
    def runner(self) -> Runner | None:
        """What runs phases in the place of the engine's own runner, if a feature has its own way."""
        return next((runner for runner in self.runners if runner.is_alone), None)

    def overlap(self, device: torch.device) -> Overlap:
        """Which switches run beside the computation."""
        if self.runner is not None:
            return Overlap()
        beside = device.type != "cpu"  # on CPU the copies of a switch would take cores from the computation
        load, gradients = self.overlap_load, self.overlap_return
        return Overlap(beside if load is None else load, beside if gradients is None else gradients)

    def timeouts(self, device: torch.device, streams: bool = False) -> tuple[timedelta, timedelta]:
        """The timeouts of all operations, and of switches: with overlapped returns these wait for computations, too.
        `streams`: whether a strategy loads or returns its units one at a time, which also waits for computations."""
        switch = self.timeout_s if self.overlap(device).return_gradients or streams else self.switch_timeout_s
        return timedelta(seconds=self.timeout_s), timedelta(seconds=switch)

    def uses_second_source(self, device: torch.device, num_strategies: int, copy_bytes: int) -> bool:
        """Whether the weights of two strategies are kept at a time. `num_strategies`: strategies of the pool with
        different places of weights. `copy_bytes`: bytes of the largest strategy's weights on the fullest rank."""
        if num_strategies < 2 or self.second_source is False:
            return False
        if self.second_source is None:
            if device.type != "cuda":
                return False
            return copy_bytes * _SECOND_SOURCE_SHARE <= torch.cuda.get_device_properties(device).total_memory
        return True
