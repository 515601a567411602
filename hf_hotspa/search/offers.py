"""Strategies that a search is offered beside plain ones, which of them can pay, and the choice among those that can.

Dividing packs over the ranks of cp, or experts over those of ep, does what replicas (dp) do, at the price of exchanges in each
layer. So cp pays in two cases: a replica does not hold the longest sequence, or that sequence alone takes longer than the
share of a mini-batch that every replica has, so that the others would wait for the one that trains it. In a pipeline it pays also
where a mini-batch has too few packs to fill the pipelines of all replicas: the layouts that could be fastest so are searched by
themselves (`sharing_layouts`). ep, which needs less memory, pays where a strategy that holds all experts of its layers, or its
columns of each, does not hold the longest sequence, and then as little of it as holds that sequence.

Chunks of tokens (`+ck`) cost a second forward pass, so they are looked at where a sequence would not fit otherwise, and as single
strategies where it fits only with more ranks to a replica, shards or recomputation (`chunks_alone`). Longer ones
cost less than shorter ones, graphs that are kept spare a forward pass, and host memory is the last resort. How long a sequence
each way holds says `longest_by_strategy`. Plain data.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from hf_hotspa.costs.model import CostModel
from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.pipeline_order import runs_chunks, runs_rounds
from hf_hotspa.search.capacities import Capacities
from hf_hotspa.search.estimate import Evaluator
from hf_hotspa.search.search import Choice, mini_batches, search
from hf_hotspa.strategy import Strategy, expert_strategies

CHUNK_SIZES = (16384, 8192, 4096, 2048, 1024, 512, 256)
"""Tokens of chunks that are looked at: below, launches and the second pass over keys and values cost more than they save."""
_GRAPHS = (15, 7, 3, 1)


def with_chunks(
    strategies: Sequence[Strategy],
    longest: int,
    tokens: Callable[[Strategy], int],
    shape: ModelShape,
    *,
    schedule: str = "auto",
    has_host_memory: bool = True,
) -> list[Strategy]:
    """The strategies, and where none of them holds a sequence, by `tokens`, those in chunks that do; or that come
    nearest to it. Keys and values may go to host memory only where there is some."""
    if shape.ck_unsupported_reason or any(tokens(strategy) >= longest for strategy in strategies):
        return list(strategies)
    plain = _that_may_chunk(strategies, schedule)
    chunked = _that_hold(plain, longest, tokens, in_host=False)
    if not chunked and has_host_memory:
        chunked = _that_hold([s for s in plain if s.pp == 1], longest, tokens, in_host=True)
    if not chunked:  # what is missing is said of those that need the least
        chunked = [replace(s, ck=CHUNK_SIZES[-1], kh=has_host_memory and s.pp == 1) for s in plain]
    return [*strategies, *chunked]


def _that_may_chunk(strategies: Iterable[Strategy], schedule: str) -> list[Strategy]:
    may_pipeline = runs_chunks(schedule)
    return [s for s in strategies if not s.ck and s.cp == s.ep == 1 and (s.pp == 1 or may_pipeline)]


def chunks_alone(
    strategies: Sequence[Strategy],
    longest: int,
    tokens: Callable[[Strategy], int],
    shape: ModelShape,
    *,
    schedule: str = "auto",
) -> list[Strategy]:
    """Strategies in chunks that could be faster than all that hold a sequence, by `tokens`, at once: of those that do not hold it,
    unless one does that has no more ranks to a replica, no more shards, and recomputes nothing."""
    holding = [s for s in strategies if tokens(s) >= longest]
    if shape.ck_unsupported_reason or not holding:
        return []
    whole = [s for s in holding if not s.rc]
    lighter = [
        s
        for s in _that_may_chunk(strategies, schedule)
        if not s.rc and not any(other.ranks_of_a_replica <= s.ranks_of_a_replica and other.z <= s.z for other in whole)
    ]
    return _that_hold(lighter, longest, tokens, in_host=False)


def longest_by_strategy(
    asked: Strategy, shape: ModelShape, tokens: Callable[[Strategy], int], *, schedule: str = "auto"
) -> list[tuple[Strategy, int]]:
    """The longest sequence of some strategies: of the one asked for, of dp alone, and of as much of tp, of cp and of pp as
    divides the devices and the model allows. Each as it is, with `+rc`, and in the chunks that hold most, then with keys
    and values in host memory.

    Args:
        asked: With its options, which its row has, too.
        tokens: The longest sequence that a strategy holds.
    """
    longest = []
    for strategy in _shapes_beside(asked, shape):
        ways = [strategy, replace(strategy, rc=strategy.rc or 1)]
        plain = replace(strategy, ck=0, kg=0, kh=False)
        may_pipeline = strategy.pp == 1 or runs_chunks(schedule)
        if not shape.ck_unsupported_reason and may_pipeline and strategy.ep == 1:
            again = list(dict.fromkeys((plain, replace(plain, rc=plain.rc or 1))))
            for in_host in (False, True) if plain.pp == plain.cp == 1 else (False,):
                tried = [replace(way, ck=size, kh=in_host) for size in CHUNK_SIZES for way in again]
                ways.append(max(tried, key=tokens))
        longest += [(way, tokens(way)) for way in dict.fromkeys(ways)]
    return longest


def pipelines_alone(strategies: Iterable[Strategy], longest: int, tokens: Callable[[Strategy], int]) -> list[Strategy]:
    """What is tried as a single strategy where plans are raced, although `that_pay` has it as a last resort: cp with a pipeline, not
    sharded. On busy cores it was the fastest, where its predicted seconds were 9 % behind."""
    return [s for s in strategies if s.cp > 1 and s.pp > 1 and s.is_common and tokens(s) >= longest]


def _shapes_beside(asked: Strategy, shape: ModelShape) -> list[Strategy]:
    """A strategy, and those that spread over one axis; the rest of the devices are dp."""
    world, shapes = asked.world_size, [asked, Strategy(dp=asked.world_size)]
    degrees = [degree for degree in range(world, 1, -1) if world % degree == 0]
    for axis in ("tp", "cp", "pp"):
        for degree in degrees:
            strategy = replace(Strategy(dp=world // degree), **{axis: degree})  # type: ignore[arg-type]
            if strategy.unsupported_reason(shape) is None:
                shapes.append(replace(strategy, sp=axis == "tp" and not shape.sp_unsupported_reason))
                break
    return list(dict.fromkeys(shapes))


def _that_hold(
    strategies: Iterable[Strategy], longest: int, tokens: Callable[[Strategy], int], *, in_host: bool
) -> list[Strategy]:
    """Of each strategy the longest chunks that hold the sequence, with as many graphs as do."""
    chunked = []
    for strategy in strategies:
        sized = (replace(strategy, ck=size, kh=in_host) for size in CHUNK_SIZES if size < longest)
        fitting = next((s for s in sized if tokens(s) >= longest), None)
        if fitting is not None:
            chunks = -(-longest // fitting.ck)
            kept = (replace(fitting, kg=graphs) for graphs in _GRAPHS if strategy.pp == 1 and graphs < chunks)
            chunked.append(next((s for s in kept if tokens(s) >= longest), fitting))
    return chunked


MARGIN = 0.03
"""How much better than the best single strategy a pool must be, in a run and in a plan, and in a run a single one than one with fewer
ranks to a replica: less is within the error of a calibrated time model."""
_FAMILIES = 3
"""Layouts whose replicas share packs that are searched by themselves: those that could be the fastest."""
_DEGREES = 2
"""How many degrees of ep are looked at beside one strategy: the smallest that holds the sequence, and one more."""


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


def divided(strategies: Sequence[Strategy], shape: ModelShape, options: RunOptions) -> list[Strategy]:
    """Every strategy that the given ones come to when their replicas share packs (cp) or experts (ep), not both, and that
    can run."""
    whole = [strategy for strategy in strategies if strategy.cp == 1]
    candidates = [*context_strategies(whole, shape), *expert_strategies(whole, shape)]
    return [strategy for strategy in candidates if options.runs(strategy, shape)]


def choose(
    lengths: Sequence[int],
    strategies: Sequence[Strategy],
    cost: CostModel,
    capacities: Capacities,
    *,
    mini_batch_size: int,
    longest: int,
    may_chunk: bool = True,
    has_host_memory: bool = True,
    may_go_round: bool = True,
    evaluator: Evaluator | None = None,
    **options: Any,
) -> Choice:
    """The answer of a search among those strategies that can pay, in chunks of tokens where nothing else holds the longest
    sequence.

    Args:
        may_chunk: Whether a sequence may be trained in chunks (`+ck`).
        has_host_memory: Whether there is memory beside that of the devices, for their keys and values (`+kh`).
        may_go_round: Whether the ranks of a pipeline may have two stages each (`+v2`), where the schedule runs them.
        evaluator: See `search`.
        options: And the other arguments: as for `search`.
    """
    shape, schedule, tokens = cost.sizes.shape, cost.memory.options.schedule, capacities.tokens
    evaluator = evaluator or make_evaluator(lengths, cost, mini_batch_size, longest)
    families = sharing_layouts(strategies, cost, longest, tokens, evaluator)
    pipelines = pipelines_alone(strategies, longest, tokens) if options.get("near", 0.0) > MARGIN else []
    strategies = that_pay(strategies, lengths, mini_batch_size, longest, tokens, shape.quadratic_cost)
    strategies = experts_that_pay(strategies, longest, tokens)
    alone = chunks_alone(strategies, longest, tokens, shape, schedule=schedule) if may_chunk else []
    alone += [s for s in pipelines if s not in strategies]
    if may_chunk:
        strategies = with_chunks(strategies, longest, tokens, shape, schedule=schedule, has_host_memory=has_host_memory)
    return search(
        lengths,
        strategies,
        cost.time,
        capacities,
        cost.switch_seconds([*strategies, *alone]),
        mini_batch_size=mini_batch_size,
        longest=longest,
        quadratic_cost=shape.quadratic_cost,
        may_go_round=may_go_round and runs_rounds(schedule),
        families=families,
        alone=alone,
        margin=MARGIN,
        evaluator=evaluator,
        **options,
    )


def make_evaluator(lengths: Sequence[int], cost: CostModel, mini_batch_size: int, longest: int) -> Evaluator:
    """What the search and all that is compared with it pack and simulate by, so that nothing is simulated twice."""
    batches, weights = mini_batches(lengths, mini_batch_size, longest)
    return Evaluator(batches, cost.time, {}, cost.sizes.shape.quadratic_cost, weights)


def sharing_layouts(
    strategies: Iterable[Strategy],
    cost: CostModel,
    longest: int,
    tokens: Callable[[Strategy], int],
    evaluator: Evaluator,
) -> list[list[Strategy]]:
    """The strategies of each layout whose replicas share the packs of long rows, and which could be the fastest of these: the
    way of Megatron and verl, who know neither fully sharded strategies nor chunks nor experts that replicas divide.

    Args:
        tokens: The longest sequence that a strategy holds.
    """
    layouts: dict[Strategy, list[Strategy]] = {}
    for strategy in strategies:
        if strategy.is_common and cost.time.knows(strategy):
            whole = replace(strategy, dp=strategy.dp * strategy.cp, cp=1)
            layouts.setdefault(whole, []).append(strategy)
    able = [own for own in layouts.values() if len(own) > 1 and any(tokens(s) >= longest for s in own)]
    evaluator.switch.update(cost.switch_seconds(s for own in able for s in own))
    least = [min(evaluator.bound(s, 0, longest, longest, shares=True) for s in own) for own in able]
    return [able[index] for index in sorted(range(len(able)), key=least.__getitem__)[:_FAMILIES]]


def that_pay(
    strategies: Sequence[Strategy],
    lengths: Sequence[int],
    mini_batch_size: int,
    longest: int,
    tokens: Callable[[Strategy], int],
    quadratic_cost: float,
) -> list[Strategy]:
    """The strategies without those with cp that cannot pay beside the others, for drawn lengths (at least one); one
    whose layout has no other stays. `tokens` gives the longest sequence that a strategy holds."""

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


def experts_that_pay(strategies: Sequence[Strategy], longest: int, tokens: Callable[[Strategy], int]) -> list[Strategy]:
    """The strategies without those with ep that cannot pay beside the others; one that has no other without ep stays.
    `tokens` gives the longest sequence that a strategy holds."""
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
