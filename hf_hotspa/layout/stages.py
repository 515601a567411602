"""Which pipeline stage holds which layer: the one function that layouts, replicas and checkpoints all call."""

from collections.abc import Sequence
from functools import lru_cache

from hf_hotspa.errors import StrategyError


def cut_stages(layer_costs: Sequence[int], head_cost: int, num_stages: int) -> tuple[range, ...]:
    """Cuts the layers in consecutive stages so that the slowest stage is as fast as it can be.

    The dynamic programme `A(j, m) = min over i of max(A(i, m - 1), cost of layers i..j)` over the first j layers and m
    stages; among equally fast cuts, the one with the smallest sum of squared stage costs, then the earliest cut points.
    The last stage also pays the head; the embedding is a table look-up and costs nothing. Each stage gets a layer.

    Args:
        layer_costs: Relative cost of each layer.
        head_cost: Relative cost of the head.

    Returns:
        The layer indices of each stage.

    Raises:
        StrategyError: more stages than layers.
    """
    if not 1 <= num_stages <= len(layer_costs):
        raise StrategyError(
            f"{num_stages} pipeline stages cannot share {len(layer_costs)} layers",
            fix=f"use pp between 1 and {len(layer_costs)}",
        )
    return _cut(tuple(layer_costs), head_cost, num_stages)


@lru_cache(maxsize=64)
def _cut(layer_costs: tuple[int, ...], head_cost: int, num_stages: int) -> tuple[range, ...]:
    num_layers = len(layer_costs)
    prefix = [0]
    for cost in layer_costs:
        prefix.append(prefix[-1] + cost)
    # best[j]: (slowest stage, sum of squares, cut points) of the first j layers in the stages placed so far
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(num_stages):
        extra = head_cost if stage == num_stages - 1 else 0
        best = {
            j: min(
                (max(slowest, cost), squares + cost * cost, (*cuts, j))
                for i, (slowest, squares, cuts) in best.items()
                if i < j
                for cost in [prefix[j] - prefix[i] + extra]
            )
            for j in range(stage + 1, num_layers - (num_stages - stage - 1) + 1)
        }
    cuts = best[num_layers][2]
    return tuple(range(start, stop) for start, stop in zip((0, *cuts[:-1]), cuts, strict=True))
