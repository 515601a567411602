"""The costs of expert parallelism (ep): bytes of returned rows, seconds of exchanges.

A rank sends each token to the ranks of its k experts and gets k rows back: twice forward, twice backward. Loads count
as equal, as the balance losses of families aim for; only the report of a step shows how unequal a router is. The memory
of the experts does not change on average when ep divides them.
"""

from hf_hotspa.costs.memory import MemoryStage
from hf_hotspa.costs.terms import Cost, MemoryTerm, Rate, Terms, TimeTerm
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.strategy import Strategy

_EXCHANGES = 4
_MESSAGES = _EXCHANGES + 1  # and the counts, forward


def _returned_rows(stage: MemoryStage) -> Rate | None:
    """A layer keeps what experts returned until its backward pass."""
    if stage.strategy.ep == 1:
        return None
    of_layer = stage.shape.experts_per_token * stage.hidden / stage.strategy.tp
    return Rate(of_layer * (1 if stage.recomputes else stage.num_layers))


def exchanges(time: TimeModel, strategy: Strategy) -> Cost:
    """Cost of a layer's exchanges, forward and backward."""
    if strategy.ep == 1 or time.shape is None:
        return Cost()
    away = (strategy.ep - 1) / strategy.ep * time.shape.experts_per_token / (strategy.cp * strategy.tp)
    link = time.hop_within(strategy.ep)
    return Cost(b=_EXCHANGES * away * link.token_s, c=_MESSAGES * link.latency_s)


TERMS = Terms(
    memory=(MemoryTerm("rows from experts", "activations", _returned_rows),),
    time=(TimeTerm("exchanges of experts", exchanges),),
)
