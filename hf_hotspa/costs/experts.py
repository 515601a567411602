"""What expert parallelism (`ep`) costs; no torch.

A rank sends each of its tokens to the ranks of its k experts, and gets k rows back: twice forward, twice backward. Loads are
taken as equal, as the balance losses of families make them: how unequal a router is shows in the report of a step only.
"""

import math

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Strategy

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
