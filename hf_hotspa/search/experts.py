"""Strategies with expert parallelism (`ep`) in a search: which of them can pay.

Dividing experts over ranks that hold all of them does what replicas (dp) do, for less memory, at the price of two exchanges of
tokens in each layer. So it pays where a strategy that holds all experts of its layers, or its columns of each, does not
hold the longest sequence, and then as little of it as holds that sequence. Plain data.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hf_hotspa.costs.experts import runs_experts
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Strategy

_DEGREES = 2
"""How many degrees of ep are looked at beside one strategy: the smallest that holds the sequence, and one more."""


def expert_strategies(strategies: Iterable[Strategy], model: ModelShape) -> list[Strategy]:
    """The strategies that divide experts over the ranks of a stage of given ones: every ep above 1 that divides these ranks
    and runs the model, with their other degrees and options.

    Those whose chunks or units of layers do not go with ep are left out.
    """
    candidates = (
        replace(strategy, ep=ep)
        for strategy in strategies
        for ep in range(2, min(strategy.stage_size, model.num_experts) + 1)
        if strategy.ep == 1 and not strategy.z and not strategy.ck and strategy.stage_size % ep == 0
    )
    return [strategy for strategy in candidates if strategy.unsupported_reason(model) is None]


def runnable_experts(
    strategies: Sequence[Strategy],
    shape: ModelShape,
    *,
    schedule: str = "auto",
    flexible: bool = False,
    capacity: float | None = None,
) -> list[Strategy]:
    """Every strategy with ep that the given ones come to, and that can run; none beside cp.

    Args:
        strategies: Without ep.
        shape: The model.
        schedule: See `costs.experts.check_experts`, for the others, too.
    """
    candidates = expert_strategies([s for s in strategies if s.cp == 1], shape)
    return [s for s in candidates if runs_experts(s, shape, schedule, flexible, capacity)]


def experts_that_pay(strategies: Sequence[Strategy], longest: int, tokens: Callable[[Strategy], int]) -> list[Strategy]:
    """The strategies without those with ep that cannot pay beside the others; one that has no other without ep stays.

    Args:
        strategies: What could run.
        longest: Tokens of the longest sequence that must fit.
        tokens: The longest sequence that a strategy holds.
    """
    divided: dict[Strategy, list[Strategy]] = {}
    for strategy in strategies:
        if strategy.ep > 1:
            divided.setdefault(replace(strategy, ep=1), []).append(strategy)
    there = set(strategies)
    alone = {s for whole, own in divided.items() if whole not in there for s in own}
    wanting = [
        sorted(own, key=lambda s: s.ep) for whole, own in divided.items() if whole in there and tokens(whole) < longest
    ]
    holding = [those for own in wanting if (those := [s for s in own if tokens(s) >= longest][:_DEGREES])]
    # beside ep, pipelines and layers that recompute are for where nothing else holds the sequence
    plain = [own for own in holding if own[0].pp == 1 and not own[0].rc]
    if not holding and not any(tokens(s) >= longest for s in strategies):
        plain = [own[-1:] for own in wanting]  # what comes nearest to it is said of all
    kept = alone.union(*(plain or holding))
    return [strategy for strategy in strategies if strategy.ep == 1 or strategy in kept]
