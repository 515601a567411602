"""The capacity of experts in a run, and which strategies it allows."""

import math
from dataclasses import dataclass

from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.pipeline_order import wants_one_shape
from hf_hotspa.seam import Options
from hf_hotspa.strategy import Strategy


@dataclass(frozen=True)
class Capacity(Options):
    """The most tokens of a pack that an expert computes, as a multiple of the mean (`expert_parallel.ExpertCapacity`).
    Raises `HotspaConfigError`: the factor is not a finite number above 0."""

    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise HotspaConfigError(
                f"the capacity factor of experts is {self.factor}",
                where="hotspa_expert_capacity",
                fix="use a number such as 1.25, or leave it out: no token is dropped",
            )

    def check_strategy(self, strategy: Strategy, shape: ModelShape, schedule: str) -> None:
        if shape.ep_unsupported_reason or not shape.num_experts:
            raise UnsupportedError(
                "a capacity of experts (hotspa_expert_capacity)",
                why=(shape.ep_unsupported_reason or f"{shape.family} has no experts").removesuffix(", so ep must be 1"),
                fix="leave hotspa_expert_capacity out",
            )
        parts = {"cp": strategy.cp > 1, "+sp": strategy.sp, "+ck": strategy.ck > 0}
        cutting = next((name for name, is_there in parts.items() if is_there), None)
        if cutting or (strategy.pp > 1 and wants_one_shape(schedule)):
            raise UnsupportedError(
                f"a capacity of experts (hotspa_expert_capacity) under {strategy}"
                + ("" if cutting else f" with the pipeline schedule {schedule!r}"),
                why="which tokens are dropped is decided for a complete pack, and "
                + (f"{cutting} computes parts of packs" if cutting else "it pads packs to one shape"),
                fix=f"leave {cutting} out" if cutting else "leave the schedule at 'auto' (hotspa_pipeline_schedule)",
            )
