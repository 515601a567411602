"""The plan behind `hotspa_strategies=auto`: from scanned lengths and cost models to a pool of buckets.

Decides which sequences must fit, which lengths the search uses, and the pool of mini-batches: the buckets of the
search, and the best static strategy if the pool's memory allows it, so that a mini-batch may choose not to switch. A
pure function of plain data, equal on all ranks. No torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.hardware import Hardware
from hf_hotspa.costs.memory import MemoryBreakdown
from hf_hotspa.errors import DataError, DeviceMemoryError, OverlongError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.bucketing import check_lengths, cut_rows
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.search.baselines import Baseline, DataParallel
from hf_hotspa.search.bucket_plan import Plan, all_buckets
from hf_hotspa.search.capacities import Capacities
from hf_hotspa.search.offers import choose
from hf_hotspa.search.question import Question
from hf_hotspa.search.search import Choice, SearchOptions
from hf_hotspa.strategy import Bucket, Strategy

PACK_MARGIN = 0.01
"""How much slower, by the time model, a bucket may be with packs of at most half the size, which use less memory."""
NEAR = 0.5
"""Up to how much slower than the chosen plan others are raced. Their weights take memory from its packs, and a race
tries what is predicted to be farther behind only in long runs."""
_PACK_SHARE = 0.75
"""The share of their tokens that the chosen plan's packs keep when a plan with more weights on a rank is raced."""
SCALES = (0.25, 4.0)
"""Factors on the lengths of plans that are kept ready, if longer or shorter rows than the scanned ones may come."""
_SEQUENCES = 2048
_COMPARED = 4  # mini-batches on which others' settings are priced


@dataclass(frozen=True)
class RunQuestion:
    """What a run is planned for, and within which limits."""

    table: SequenceTable  # the scan of the data set
    mini_batch_size: int  # rows
    limit_bytes: float | None = None  # memory of a device for this program; None for no limit
    limit_source: str = ""  # its origin, in words
    longest: int | None = None  # tokens that must fit; None: the longest row, or with a policy what memory allows
    policy: str = "error"  # one of `OVERLONG_POLICIES`
    # of packs that ran out of memory, see `Capacities`
    most_tokens: Mapping[Strategy, int] = field(default_factory=dict)
    evaluated: Sequence[SequenceTable] = ()  # the scans of evaluation sets: their longest rows must fit, too
    # whether longer rows than the scanned ones may come: all that model and memory allow must fit
    sampled: bool = False
    beside: Sequence[Strategy] = ()  # strategies that share the arena
    max_phases: int = 3  # the most buckets
    raced: bool = False  # whether other plans are raced, see `Plan.raced`
    may_go_round: bool = False  # whether the ranks of a pipeline may have two stages
    may_chunk: bool = True  # whether a sequence may be trained in chunks
    has_host_memory: bool = True  # whether their keys and values may go to host memory


def make_auto_plan(asked: RunQuestion, strategies: Sequence[Strategy], cost: CostModel) -> Plan:
    """Plans a run. Raises `DataError`: there is nothing to train on. Raises `OverlongError`, `DeviceMemoryError`: see
    `longest_wanted`; no strategy holds the longest sequence."""
    arena = max(map(cost.memory.arena_bytes, asked.beside), default=0)
    capacities = Capacities(cost.memory, asked.limit_bytes, asked.most_tokens, arena)
    top = _longest(asked, cost.sizes.shape, max(map(capacities.tokens, strategies)))
    sample, size = _sample(asked.table, top, asked.policy, asked.mini_batch_size)
    options = SearchOptions(asked.max_phases, pack_margin=PACK_MARGIN, may_go_round=asked.may_go_round)

    def chosen(lengths: Sequence[int], raced: bool = False) -> Choice:
        question = Question(cost, capacities, lengths, size, top)
        return choose(
            question, strategies, replace(options, raced=raced),
            may_chunk=asked.may_chunk, has_host_memory=asked.has_host_memory,
        )  # fmt: skip

    try:
        choice = chosen(sample, asked.raced)
        scales = SCALES if asked.sampled and not asked.beside else ()
        others = [chosen([min(max(1, int(n * by)), top) for n in sample]).buckets for by in scales]
    except DeviceMemoryError as error:
        where = f"hotspa_memory_limit_mb: {asked.limit_source}"
        raise DeviceMemoryError(error.what, where=where, why=error.why, fix=error.fix) from None
    near = [plan.buckets for plan in choice.near if plan.seconds <= choice.seconds * (1 + NEAR)]
    pool = pool_of(choice, capacities)
    (smaller,), raced = fitting_beside([pool], near, capacities, _PACK_SHARE)
    if smaller != pool:
        pool, choice = smaller, choice.with_packs_of(smaller)
    _, ready = fitting_beside([pool, *raced], others, capacities)
    return Plan(
        choice, pool, _fullest_memory(cost, [pool, *raced, *ready]), asked.mini_batch_size, asked.limit_bytes,
        asked.limit_source, raced=tuple(raced), ready=tuple(ready),
    )  # fmt: skip


def stock_settings(asked: RunQuestion, plan: Plan, cost: CostModel, hardware: Hardware) -> tuple[Baseline, ...]:
    """Returns what one would run instead of a plan, see `DataParallel.settings`; empty if the cost model does not know
    replicas alone."""
    if not cost.time.knows(Strategy(cost.memory.world_size)):
        return ()
    capacities = Capacities(cost.memory, asked.limit_bytes)
    lengths, size = _sample(asked.table, plan.longest, asked.policy, asked.mini_batch_size)
    question = Question(cost, capacities, lengths[: _COMPARED * size], size, plan.longest)
    return DataParallel(cost.memory, cost.time, hardware).settings(question)


def _fullest_memory(cost: CostModel, pools: Sequence[Sequence[Bucket]]) -> tuple[MemoryBreakdown, ...]:
    """For each of `all_buckets`, the memory of its fullest rank in the pool whose packs need most."""
    every = [bucket for pool in pools for bucket in pool]
    needs = list(zip(every, cost.rank_bytes(every), strict=True))
    return tuple(
        max((need for own, need in needs if own.strategy == bucket.strategy), key=lambda need: need.total)
        for bucket in all_buckets(pools)
    )


def fitting_beside(
    pools: Sequence[tuple[Bucket, ...]], plans: Sequence[tuple[Bucket, ...]], capacities: Capacities, least: float = 1.0
) -> tuple[list[tuple[Bucket, ...]], list[tuple[Bucket, ...]]]:
    """Returns the pools, and the plans that fit beside them in one arena, with smaller packs if necessary. If the arena
    must grow, the pools' packs keep at least the share `least` of their tokens."""
    arena = max(capacities.arena(bucket.strategy) for pool in pools for bucket in pool)
    kept, fitting = list(pools), list[tuple[Bucket, ...]]()
    there = {frozenset(bucket.strategy for bucket in pool) for pool in pools}
    for plan in plans:
        own = max(arena, *(capacities.arena(bucket.strategy) for bucket in plan))
        buckets = _within(plan, capacities, own, 0.0)
        known = [_within(pool, capacities, own, least) for pool in (*kept, *fitting)] if own > arena else []
        if buckets is None or None in known or (strategies := frozenset(b.strategy for b in buckets)) in there:
            continue
        if known:
            smaller = [pool for pool in known if pool is not None]
            kept, fitting, arena = smaller[: len(pools)], smaller[len(pools) :], own
        there.add(strategies)
        fitting.append(buckets)
    return kept, fitting


def _within(pool: Sequence[Bucket], capacities: Capacities, arena: int, least: float) -> tuple[Bucket, ...] | None:
    """The buckets with packs that fit in that arena; None if one cannot hold its sequences or keep that share."""
    buckets = []
    for bucket in pool:
        tokens = min(bucket.pack_tokens, capacities.pack_tokens(bucket.strategy, arena, bucket.longest))
        holds = bucket.longest <= max(tokens, capacities.tokens(bucket.strategy, arena))
        if not tokens or tokens < least * bucket.pack_tokens or not holds:
            return None
        if tokens < bucket.longest and bucket.strategy.pp == 1:
            return None
        buckets.append(replace(bucket, pack_tokens=tokens))
    return tuple(buckets)


def longest_wanted(
    tables: Sequence[SequenceTable], shape: ModelShape, asked: int | None = None, policy: str = "error"
) -> int | None:
    """Returns the longest sequence that must fit, in tokens; None if the policy handles longer ones. `asked` is the
    user's value. Raises `DataError`: there is no token. Raises `OverlongError`: it exceeds the model's positions or the
    user's value, and no policy handles it."""
    data = max(int(table.longest_of_rows.max(initial=0)) for table in tables)
    positions = shape.max_position_embeddings
    if not data:
        raise DataError("the data set has no row with a token", fix="look at its input_ids")
    if asked is None and policy != "error":
        return None
    needed = data if asked is None else asked
    if positions is not None and needed > positions:
        rows, longest = f"the longest row has {data} tokens", f"hotspa_longest is {asked}"
        policies = "set hotspa_overlong to truncate, split or drop"
        raise OverlongError(
            f"{rows if asked is None else longest}, and the model has {positions} positions",
            why="positions beyond would be trained with encodings that the model was not made for",
            fix=(policies if asked is None else f"set hotspa_longest to {positions} or less")
            + ", or raise max_position_embeddings in the model's config",
        )
    for table in tables:
        check_lengths(table, needed, policy, chosen=True)
    return needed


def _longest(asked: RunQuestion, shape: ModelShape, capacity: int) -> int:
    tables = [asked.table, *asked.evaluated]
    wanted = longest_wanted(tables, shape, asked.longest, asked.policy)
    if asked.sampled and asked.longest is None:
        return min((n for n in (shape.max_position_embeddings, capacity) if n), default=_longest_of(tables))
    if wanted is not None:
        return wanted
    # the policy handles what fits nowhere; without any capacity the search reports what is missing
    data = _longest_of(tables)
    return max(1, min(data, shape.max_position_embeddings or data, capacity or data))


def _longest_of(tables: Sequence[SequenceTable]) -> int:
    return max(int(table.longest_of_rows.max()) for table in tables)


def _sample(table: SequenceTable, longest: int, policy: str, mini_batch_size: int) -> tuple[list[int], int]:
    """Lengths of random rows as the policy cuts them, at least several mini-batches; and how many a mini-batch has."""
    rows = np.random.default_rng(0).permutation(len(table))[: max(_SEQUENCES, mini_batch_size)]
    sequences, _ = cut_rows(rows.tolist(), table, longest, policy)
    if not sequences:
        what = f"none of {len(rows)} rows is left by the policy {policy!r} for rows of more than {longest} tokens"
        raise DataError(what, fix="raise hotspa_longest, or choose another hotspa_overlong")
    size = round(min(mini_batch_size, len(rows)) * len(sequences) / len(rows))
    return [sequence.num_tokens for sequence in sequences], max(1, size)


def pool_of(choice: Choice, capacities: Capacities) -> tuple[Bucket, ...]:
    """Returns a search's buckets, and the best static strategy (for any sequence) if it needs no more memory."""
    arena = max(capacities.arena(bucket.strategy) for bucket in choice.buckets)
    static, longest = choice.static, choice.buckets[-1].longest
    # strategies that differ in `+sp` only are one: the bucket has it for the capacity
    plain = replace(static.strategy, sp=False)
    same = next((bucket for bucket in choice.buckets if replace(bucket.strategy, sp=False) == plain), None)
    if same is not None:
        static = replace(static, strategy=same.strategy)
    if capacities.arena(static.strategy) > arena or capacities.tokens(static.strategy, arena) < longest:
        return choice.buckets
    capacity = min(capacities.pack_tokens(static.strategy, arena, longest), static.pack_tokens)
    spare = replace(static, pack_tokens=capacity)
    others = [bucket for bucket in choice.buckets if bucket is not same]
    # packs that hold any sequence serve both; in a pipeline the smaller ones may be necessary
    if same is not None and capacity >= longest:
        spare = replace(same, pack_tokens=max(same.pack_tokens, capacity))
    elif same is not None:
        spare = replace(spare, low=same.low, pack_tokens=min(same.pack_tokens, capacity))
    return tuple(sorted([*others, spare], key=lambda bucket: (bucket.longest, bucket.pack_tokens)))
