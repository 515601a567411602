"""What expert parallelism (`ep`) costs, and which buckets cannot have it; no torch.

A rank sends each of its tokens to the ranks of its k experts, and gets k rows back: twice forward, twice backward. Loads are
taken as equal, as the balance losses of families make them: how unequal a router is shows in the report of a step only.
"""

import math
from collections.abc import Iterable

from hf_hotspa.errors import HotspaConfigError, HotspaError, UnsupportedError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Bucket, Strategy

_EXCHANGES = 4
_MESSAGES = _EXCHANGES + 1  # and the counts, forward


def exchange_seconds(strategy: Strategy, shape: ModelShape, token_s: float, latency_s: float) -> tuple[float, float]:
    """What a layer's exchanges add, forward and backward: seconds a token of the pack, and seconds a pack.

    Args:
        token_s: Seconds in which a hidden state of one token passes between two ranks.
        latency_s: Seconds of a message beside its bytes.
    """
    if strategy.ep == 1:
        return 0.0, 0.0
    away = (strategy.ep - 1) / strategy.ep * shape.experts_per_token / (strategy.cp * strategy.tp)
    return _EXCHANGES * away * token_s, _MESSAGES * latency_s


def returned_bytes(strategy: Strategy, shape: ModelShape, element_bytes: int) -> float:
    """Bytes that a layer keeps of a token of a rank's row until its backward: what came back from its experts.

    What the experts themselves keep is as much, in the mean, as where they are not divided.
    """
    if strategy.ep == 1:
        return 0.0
    return shape.experts_per_token * shape.hidden_size * element_bytes / strategy.tp


def check_capacity(factor: float | None) -> None:
    """Refuses a capacity factor that is none.

    Raises:
        HotspaConfigError: it is not a number above 0.
    """
    if factor is not None and not 0 < factor < math.inf:
        raise HotspaConfigError(
            f"the capacity factor of experts is {factor}",
            where="hotspa_expert_capacity",
            fix="use a number such as 1.25, or leave it out: no token is dropped",
        )


def runs_experts(
    strategy: Strategy,
    shape: ModelShape,
    schedule: str,
    flexible: bool = False,
    capacity: float | None = None,
) -> bool:
    """Whether `check_experts` lets a strategy pass; the arguments are described there."""
    try:
        check_experts([Bucket(strategy, 1, 1)], shape, schedule, flexible, capacity)
    except HotspaError:
        return False
    return True


def check_experts(
    buckets: Iterable[Bucket],
    shape: ModelShape,
    schedule: str,
    flexible: bool = False,
    capacity: float | None = None,
) -> None:
    """Refuses strategies with ep that cannot run, and a capacity of experts where it would not be that of whole packs.

    Args:
        schedule: That of pipelines, see `packing.pipeline_order`.
        flexible: Whether ranks of tp may give work away.
        capacity: The capacity factor; None for none.

    Raises:
        UnsupportedError: the schedule is not ours, ranks give work away, the model has no experts whose tokens can be
            counted, or a strategy computes parts of packs.
    """
    if capacity is not None:
        _check_capacity(buckets, shape, schedule)
    for strategy in (bucket.strategy for bucket in buckets):
        if strategy.ep == 1:
            continue
        if flexible:
            raise UnsupportedError(
                f"strategy {strategy} beside ranks that give work away (hotspa_stragglers)",
                why="they have not been made exact together",
                fix="use hotspa_stragglers=balance or watch",
            )
        if strategy.pp > 1 and schedule in ("1f1b", "gpipe"):
            raise UnsupportedError(
                f"the pipeline schedule {schedule!r} under {strategy}",
                why="ranks of several replicas exchange tokens, and must run their packs in one order",
                fix="leave the schedule at 'auto' (hotspa_pipeline_schedule)",
            )


def _check_capacity(buckets: Iterable[Bucket], shape: ModelShape, schedule: str) -> None:
    if shape.ep_unsupported_reason or not shape.num_experts:
        raise UnsupportedError(
            "a capacity of experts (hotspa_expert_capacity)",
            why=(shape.ep_unsupported_reason or f"{shape.family} has no experts").removesuffix(", so ep must be 1"),
            fix="leave hotspa_expert_capacity out",
        )
    for strategy in (bucket.strategy for bucket in buckets):
        parts = {"cp": strategy.cp > 1, "+sp": strategy.sp, "+ck": strategy.ck > 0}
        cutting = next((name for name, is_there in parts.items() if is_there), None)
        if cutting or (strategy.pp > 1 and schedule in ("1f1b", "gpipe")):
            raise UnsupportedError(
                f"a capacity of experts (hotspa_expert_capacity) under {strategy}"
                + ("" if cutting else f" with the pipeline schedule {schedule!r}"),
                why="which tokens are dropped is decided for a whole pack, and "
                + (f"{cutting} computes parts of packs" if cutting else "it pads packs to one shape"),
                fix=f"leave {cutting} out" if cutting else "leave the schedule at 'auto' (hotspa_pipeline_schedule)",
            )
