"""Strategies with expert parallelism (`ep`) in a search: which there are. Plain data."""

from collections.abc import Iterable
from dataclasses import replace

from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Strategy


def expert_strategies(strategies: Iterable[Strategy], model: ModelShape) -> list[Strategy]:
    """The strategies that divide experts over the ranks of a stage of given ones: every ep above 1 that divides these ranks
    and runs the model, with their other degrees and options.

    Those whose chunks or units of layers do not go with ep are left as they are.
    """
    found = (
        replace(strategy, ep=ep)
        for strategy in strategies
        for ep in range(2, min(strategy.stage_size, model.num_experts) + 1)
        if strategy.ep == 1 and not strategy.z and not strategy.ck and strategy.stage_size % ep == 0
    )
    return [strategy for strategy in found if strategy.unsupported_reason(model) is None]
