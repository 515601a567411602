"""Strategies offered to a search besides plain ones, which of them can pay, and the choice among those.

Dividing packs over the ranks of cp, or experts over the ranks of ep, does what replicas (dp) do, for exchanges in each
layer. So cp pays if a replica does not hold the longest sequence, or if that sequence alone takes longer than each
replica's share of a mini-batch, so that the others would wait. In a pipeline it also pays if a mini-batch has too few
packs to fill all replicas' pipelines: the layouts that could be the fastest are searched separately
(`sharing_layouts`). ep needs less memory. It pays if the longest sequence does not fit under a strategy that holds all
experts of its layers, or its columns of each, and then in the smallest degree that holds it.

Chunks of tokens (`+ck`) cost a second forward pass. So they are considered if a sequence does not fit otherwise, and as
single strategies if it fits only with more ranks to a replica, shards or recomputation (`chunks_alone`). Longer chunks
cost less, kept graphs save a forward pass, and host memory is the last resort. Plain data.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.pipeline_order import runs_chunks, runs_rounds
from hf_hotspa.search.question import Question
from hf_hotspa.search.search import Choice, SearchOptions, search
from hf_hotspa.strategy import Strategy, expert_strategies

CHUNK_SIZES = (16384, 8192, 4096, 2048, 1024, 512, 256)
"""Chunk sizes tried, in tokens: below, launches and the second pass over keys and values cost more than they save."""
_GRAPHS = (15, 7, 3, 1)
Held = Callable[[Strategy], int]  # the longest sequence that a strategy holds, in tokens


def with_chunks(
    strategies: Sequence[Strategy],
    longest: int,
    tokens: Held,
    shape: ModelShape,
    *,
    schedule: str = "auto",
    has_host_memory: bool = True,
) -> list[Strategy]:
    """Returns the strategies; if none of them holds a sequence, by `tokens`, also those in chunks that do, or that come
    nearest. Keys and values may go to host memory only if there is any."""
    if shape.ck_unsupported_reason or any(tokens(strategy) >= longest for strategy in strategies):
        return list(strategies)
    plain = _that_may_chunk(strategies, schedule)
    chunked = _that_hold(plain, longest, tokens, in_host=False)
    if not chunked and has_host_memory:
        chunked = _that_hold([s for s in plain if s.pp == 1], longest, tokens, in_host=True)
    if not chunked:  # the error then reports what the smallest ones lack
        chunked = [replace(s, ck=CHUNK_SIZES[-1], kh=has_host_memory and s.pp == 1) for s in plain]
    return [*strategies, *chunked]


def _that_may_chunk(strategies: Iterable[Strategy], schedule: str) -> list[Strategy]:
    may_pipeline = runs_chunks(schedule)
    return [s for s in strategies if not s.ck and s.cp == s.ep == 1 and (s.pp == 1 or may_pipeline)]


def chunks_alone(
    strategies: Sequence[Strategy], longest: int, tokens: Held, shape: ModelShape, *, schedule: str = "auto"
) -> list[Strategy]:
    """Returns strategies in chunks that could be faster than all that hold a sequence, by `tokens`, at once: chunked
    from those that do not hold it, unless a holding one has no more ranks to a replica or shards, and no
    recomputation."""
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
    asked: Strategy, shape: ModelShape, tokens: Held, *, schedule: str = "auto"
) -> list[tuple[Strategy, int]]:
    """Returns the longest sequence of some strategies: the requested one, dp alone, and the largest tp, cp and pp that
    divides the devices and runs the model. Each as it is, with `+rc`, and in the chunks that hold most, then with keys
    and values in host memory. `asked`: with its options, which its row has, too."""
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


def _shapes_beside(asked: Strategy, shape: ModelShape) -> list[Strategy]:
    """A strategy, and those that spread over one axis; the other devices are dp."""
    world, shapes = asked.world_size, [asked, Strategy(dp=asked.world_size)]
    degrees = [degree for degree in range(world, 1, -1) if world % degree == 0]
    for axis in ("tp", "cp", "pp"):
        for degree in degrees:
            strategy = replace(Strategy(dp=world // degree), **{axis: degree})  # type: ignore[arg-type]
            if strategy.unsupported_reason(shape) is None:
                shapes.append(replace(strategy, sp=axis == "tp" and not shape.sp_unsupported_reason))
                break
    return list(dict.fromkeys(shapes))


def _that_hold(strategies: Iterable[Strategy], longest: int, tokens: Held, *, in_host: bool) -> list[Strategy]:
    """For each strategy the longest chunks that hold the sequence, with as many graphs as fit."""
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
"""How much better than the best single strategy a pool must be. Less is within the error of a calibrated time model."""
_FAMILIES = 3  # how many layouts whose replicas share packs are searched separately: those that could be the fastest
_DEGREES = 2  # how many degrees of ep are tried beside one strategy: the smallest that holds the sequence, and one more


def context_strategies(strategies: Iterable[Strategy], model: ModelShape) -> list[Strategy]:
    """Returns the strategies that divide packs over some or all replicas of given ones: every cp above 1 that divides
    their dp and runs the model, with their other degrees and options.

    Their weights lie as under the given ones, see `Strategy.layout`.
    """
    candidates = (
        replace(strategy, dp=strategy.dp // cp, cp=cp)
        for strategy in strategies
        for cp in range(2, strategy.dp + 1)
        if strategy.cp == 1 and strategy.dp % cp == 0
    )
    return [strategy for strategy in candidates if strategy.unsupported_reason(model) is None]


def divided(strategies: Sequence[Strategy], shape: ModelShape, options: RunOptions) -> list[Strategy]:
    """Returns every runnable strategy in which a given one's replicas share packs (cp) or experts (ep), not both."""
    whole = [strategy for strategy in strategies if strategy.cp == 1]
    candidates = [*context_strategies(whole, shape), *expert_strategies(whole, shape)]
    return [strategy for strategy in candidates if options.runs(strategy, shape)]


def choose(
    question: Question,
    strategies: Sequence[Strategy],
    options: SearchOptions,
    *,
    may_chunk: bool = True,  # whether a sequence may be trained in chunks (`+ck`)
    has_host_memory: bool = True,  # whether their keys and values may go to host memory (`+kh`)
) -> Choice:
    """Searches among those strategies that can pay, in chunks of tokens if nothing else holds the longest sequence. Two
    stages on a rank (`+v2`) only if the schedule runs them."""
    shape, schedule, tokens, longest = question.shape, question.schedule, question.capacities.tokens, question.longest
    families = sharing_layouts(question, strategies)
    size = question.mini_batch_size or len(question.lengths)
    strategies = that_pay(strategies, question.lengths, size, longest, tokens, shape.quadratic_cost)
    strategies = experts_that_pay(strategies, longest, tokens)
    alone = chunks_alone(strategies, longest, tokens, shape, schedule=schedule) if may_chunk else []
    if may_chunk:
        strategies = with_chunks(strategies, longest, tokens, shape, schedule=schedule, has_host_memory=has_host_memory)
    may_go_round = options.may_go_round and runs_rounds(schedule)
    options = replace(options, margin=MARGIN, families=families, alone=alone, may_go_round=may_go_round)
    return search(question, strategies, options)


def sharing_layouts(question: Question, strategies: Iterable[Strategy]) -> list[list[Strategy]]:
    """Returns the strategies of each layout whose replicas share the packs of long rows, for the layouts that could be
    the fastest. As in Megatron and verl: without fully sharded strategies, chunks, or divided experts."""
    layouts = _by_layout(s for s in strategies if s.is_common and question.cost.time.knows(s))
    able = [own for own in layouts.values() if len(own) > 1 and any(map(question.holds, own))]
    bound = partial(question.price([s for own in able for s in own]).bound, low=0, high=question.longest, shares=True)
    least = [min(bound(s, pack_tokens=question.longest) for s in own) for own in able]
    return [able[index] for index in sorted(range(len(able)), key=least.__getitem__)[:_FAMILIES]]


def _by_layout(strategies: Iterable[Strategy]) -> dict[Strategy, list[Strategy]]:
    layouts: dict[Strategy, list[Strategy]] = {}
    for strategy in strategies:
        layouts.setdefault(replace(strategy, dp=strategy.dp * strategy.cp, cp=1), []).append(strategy)
    return layouts


def that_pay(
    strategies: Sequence[Strategy],
    lengths: Sequence[int],
    mini_batch_size: int,
    longest: int,
    tokens: Held,
    quadratic_cost: float,
) -> list[Strategy]:
    """Drops strategies with cp that cannot pay, for drawn lengths (at least one); a strategy stays if its layout has no
    other."""

    def cost(length: int) -> float:
        return length * (1 + quadratic_cost * length)

    share = cost(longest) * len(lengths) / (sum(map(cost, lengths)) * mini_batch_size)
    kept = set[Strategy]()
    for whole, family in _by_layout(strategies).items():
        most = _most(whole, sorted(family, key=lambda s: s.cp), share, longest, tokens)
        kept.update(s for s in family if s.cp <= most)
    # with cp, pipelines, shards that come and go and recomputation are for when nothing else holds the sequence
    holding = {s for s in kept if tokens(s) >= longest}
    if not holding:  # the error then names what comes nearest of all
        return list(strategies)
    has_plain, has_whole = any(s.pp == 1 for s in holding), any(not s.z for s in holding)

    def last_resort(s: Strategy) -> object:
        return (s.pp > 1 and has_plain) or (s.z and has_whole) or (s.rc and replace(s, rc=0) in holding)

    return [s for s in strategies if s in kept and (s.cp == 1 or not last_resort(s))]


def _most(whole: Strategy, family: Sequence[Strategy], share: float, longest: int, tokens: Held) -> int:
    """The largest cp of a family that can pay: with it no replica waits for the longest sequence, and that sequence
    fits with room for one more division. If it never fits, the largest cp: others beside it may fit. `whole`: the
    family's member without cp. `family`: strategies of one layout and the same options, in ascending order of cp.
    `share`: cost of the longest sequence over the cost of a mini-batch."""
    degrees = [s.cp for s in family]
    if degrees[0] > 1 or len(degrees) == 1:
        return degrees[-1]
    waiting = share * whole.dp
    most = next((cp for cp in degrees if cp >= waiting), degrees[-1]) if waiting > 1 else 1
    if tokens(whole) >= longest:
        return most
    holding = [s.cp for s in family if tokens(s) >= longest]
    return max(most, *holding[:2]) if holding else degrees[-1]


def experts_that_pay(strategies: Sequence[Strategy], longest: int, tokens: Held) -> list[Strategy]:
    """Drops strategies with ep that cannot pay; a strategy stays if it has no counterpart without ep."""
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
    # with ep, pipelines and recomputation are for when nothing else holds the sequence
    plain = [own for own in holding if own[0].pp == 1 and not own[0].rc]
    if not holding and not any(tokens(s) >= longest for s in strategies):
        plain = [own[-1:] for own in wanting]  # the error then names what comes nearest of all
    kept = alone.union(*(plain or holding))
    return [strategy for strategy in strategies if strategy.ep == 1 or strategy in kept]
