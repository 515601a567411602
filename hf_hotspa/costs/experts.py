"""What expert parallelism (`ep`) costs, and which buckets cannot have it; no torch.

A rank sends each of its tokens to the ranks of its k experts, and gets k rows back: twice forward, twice backward. Loads are
taken as equal, as the balance losses of families make them: how unequal a router is shows in the report of a step only.
"""

from collections.abc import Iterable

from hf_hotspa.errors import UnsupportedError
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


def check_experts(buckets: Iterable[Bucket], schedule: str, flexible: bool = False) -> None:
    """Refuses strategies with ep that cannot run.

    Args:
        schedule: That of pipelines, see `packing.pipeline_order`.
        flexible: Whether ranks of tp may give work away.

    Raises:
        UnsupportedError: the schedule is not ours, or ranks give work away.
    """
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
