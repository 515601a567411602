"""Strategies with context parallelism (`cp`) in a search: which of them can pay.

Dividing packs over cp ranks does what replicas (dp) do, at the price of exchanges in each layer. So it pays in two cases
only: a replica does not hold the longest sequence, or that sequence alone takes longer than the share of a mini-batch that
every replica has, so that the others would wait for the one that trains it. Plain data.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hf_hotspa.costs.context import runs_context
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Strategy


def context_strategies(strategies: Iterable[Strategy], model: ModelShape) -> list[Strategy]:
    """The strategies that divide the tokens of packs over some or all of the replicas of given ones: every cp above 1 that
    divides their dp and runs the model, with their other degrees and options.

    Their weights lie as those of the given ones, see `Strategy.layout`.
    """
    candidates = (
        replace(strategy, dp=strategy.dp // cp, cp=cp)
        for strategy in strategies
        for cp in range(2, strategy.dp + 1)
        if strategy.cp == 1 and strategy.dp % cp == 0
    )
    return [strategy for strategy in candidates if strategy.unsupported_reason(model) is None]


def divided(
    strategies: Sequence[Strategy],
    shape: ModelShape,
    *,
    way: str = "auto",
    schedule: str = "auto",
    device_type: str = "cuda",
    flexible: bool = False,
) -> list[Strategy]:
    """Every strategy with cp that the given ones come to when their replicas share packs, and that can run.

    Args:
        strategies: Without cp.
        shape: The model.
        way: See `costs.context.check_context`, for the others, too.
    """
    options = way, schedule, device_type, flexible
    return [s for s in context_strategies(strategies, shape) if runs_context(s, shape, *options)]


def that_pay(
    strategies: Sequence[Strategy],
    lengths: Sequence[int],
    mini_batch_size: int,
    longest: int,
    tokens: Callable[[Strategy], int],
    quadratic_cost: float,
) -> list[Strategy]:
    """The strategies without those with cp that cannot pay beside the others; one whose layout has no other stays.

    Args:
        strategies: What could run.
        lengths: Of sequences that are drawn, one at least.
        mini_batch_size: Sequences of a mini-batch.
        longest: Tokens of the longest sequence that must fit.
        tokens: The longest sequence that a strategy holds.
        quadratic_cost: See `ModelShape.quadratic_cost`.
    """

    def cost(length: int) -> float:
        return length * (1 + quadratic_cost * length)

    share = cost(longest) * len(lengths) / (sum(map(cost, lengths)) * mini_batch_size)
    families: dict[Strategy, list[Strategy]] = {}
    for strategy in strategies:
        whole = replace(strategy, dp=strategy.dp * strategy.cp, cp=1)
        families.setdefault(whole, []).append(strategy)
    kept = set[Strategy]()
    for whole, family in families.items():
        most = _most(whole, sorted(family, key=lambda s: s.cp), share, longest, tokens)
        kept.update(s for s in family if s.cp <= most)
    # beside cp, pipelines, units that come and go and layers that recompute are for where nothing else holds the sequence
    holding = {s for s in kept if tokens(s) >= longest}
    if not holding:  # what comes nearest to it is said of all
        return list(strategies)
    has_plain, has_whole = any(s.pp == 1 for s in holding), any(not s.z for s in holding)

    def may_pay(s: Strategy) -> bool:
        if s.cp == 1:
            return True
        is_last_resort = (s.pp > 1 and has_plain) or (s.z and has_whole) or (s.rc and replace(s, rc=0) in holding)
        return not is_last_resort

    return [strategy for strategy in strategies if strategy in kept and may_pay(strategy)]


def _most(
    whole: Strategy, family: Sequence[Strategy], share: float, longest: int, tokens: Callable[[Strategy], int]
) -> int:
    """The largest cp of a family that can pay: with it no replica waits for the longest sequence, and that sequence fits with
    room for one more division; the largest there is where it never fits, as others may that run beside it.

    Args:
        whole: The family's member without cp.
        family: Strategies of one layout and the same options, in ascending order of cp.
        share: Cost of the longest sequence over that of a mini-batch.
        longest: Its tokens.
        tokens: See `that_pay`.
    """
    degrees = [s.cp for s in family]
    if degrees[0] > 1 or len(degrees) == 1:
        return degrees[-1]
    waiting = share * whole.dp
    most = next((cp for cp in degrees if cp >= waiting), degrees[-1]) if waiting > 1 else 1
    if tokens(whole) >= longest:
        return most
    holding = [s.cp for s in family if tokens(s) >= longest]
    return max(most, *holding[:2]) if holding else degrees[-1]
