"""How many columns of an MLP each rank of a tensor-parallel group has, where a device of the group is slow.

Owns the one rule by which layouts, replicas, and models of time and memory come to the same shares. The columns between an
MLP's projections (`Part.by_step_time`) are given out so that the rank of the group which is done last is done as early as it can
be; attention and the vocabulary stay divided evenly, so a slow rank gets few enough columns to make up for its heads, too.
Costs are counted in parameters, as stages are cut where nothing was measured. A group has a rule of its own: the groups of
other replicas stay even. Integers alone: all ranks come to the same shares. No torch.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from hf_hotspa.layout.stages import USUAL_STEP_TIME
from hf_hotspa.layout.vector import ParameterSpec, ParameterVector, UnitCosts
from hf_hotspa.strategy import Strategy

_LARGEST_STEP = 128
"""Columns are given out in powers of two of at most so many, as matrix products run best on whole tiles."""
_LEAST_STEPS = 16
"""Steps that a rank has in the mean at least, so that shares are fine enough."""


def step_times_of_group(vector: ParameterVector, strategy: Strategy, rank: int) -> tuple[int, ...]:
    """The relative step times of a rank's tensor-parallel group in the order of its shards; empty where all are the same."""
    if not vector.step_times or strategy.tp == 1:
        return ()
    first = rank - strategy.coord(rank).tp
    step_times_by_shard = [USUAL_STEP_TIME] * strategy.tp
    for tp_coord, step_time in enumerate(vector.step_times[first : first + strategy.tp]):
        step_times_by_shard[strategy.shard_index(tp_coord)] = step_time
    return tuple(step_times_by_shard) if len(set(step_times_by_shard)) > 1 else ()


def is_uneven(vector: ParameterVector, strategy: Strategy) -> bool:
    """Whether some group of a strategy has uneven shares."""
    if not vector.step_times or not any(costs.by_step_time for costs in vector.unit_costs.values()):
        return False
    return any(step_times_of_group(vector, strategy, rank) for rank in range(0, strategy.world_size, strategy.tp))


def have_same_shards(before: ParameterVector, after: ParameterVector, strategy: Strategy) -> bool:
    """Whether two divisions of the same parameters give each rank the same columns under a strategy."""
    if before.step_times == after.step_times or strategy.tp == 1:
        return True
    return all(
        shard_rows(before, strategy, spec, rank) == shard_rows(after, strategy, spec, rank)
        for spec in before.specs
        if any(part.by_step_time for part in spec.parts)
        for rank in range(strategy.world_size)
    )


def shard_rows(
    vector: ParameterVector, strategy: Strategy, spec: ParameterSpec, rank: int, shard: int | None = None
) -> tuple[tuple[int, int], ...]:
    """The row ranges that a rank holds of a parameter along its `shard_dim`, in the order in which it stores them.

    Args:
        shard: Another shard of the rank's group; its own when None.
    """
    shard = strategy.shard_index(strategy.coord(rank).tp) if shard is None else shard
    step_times = step_times_of_group(vector, strategy, rank) if any(part.by_step_time for part in spec.parts) else ()
    costs = vector.unit_costs.get(spec.unit) if step_times else None
    if costs is None or not costs.by_step_time:
        return spec.shard_rows(strategy.tp, shard)
    ranges, start = [], 0
    for part in spec.parts:
        low, high = part.cut(strategy.tp, shard)
        if part.by_step_time and (cuts := cut_columns(part.rows, beside(costs, part.rows, strategy.tp), step_times)):
            low, high = cuts[shard : shard + 2]
        ranges.append((start + low, start + high))
        start += part.rows
    return tuple(ranges)


def stored_rows(
    vector: ParameterVector, strategy: Strategy, spec: ParameterSpec, rank: int
) -> tuple[tuple[int, int], ...] | None:
    """The same along the `storage_dim` of what is stored; None where a rank holds all of it: what is packed is cut at borders of
    its blocks alone."""
    if spec.shard_dim is None or strategy.tp == 1:
        return None
    rows, step = shard_rows(vector, strategy, spec, rank), 1 if spec.packed is None else spec.packed.step
    if not step or any(end % step for range_ in rows for end in range_):
        return None
    return tuple((start // step, stop // step) for start, stop in rows)


def shard_widths(vector: ParameterVector, strategy: Strategy, spec: ParameterSpec, rank: int) -> tuple[int, ...]:
    """How many rows of a parameter each shard of a rank's group has, in the order of shards."""
    shards = range(strategy.tp)
    return tuple(sum(b - a for a, b in shard_rows(vector, strategy, spec, rank, shard)) for shard in shards)


def beside(costs: UnitCosts, columns: int, tp: int) -> int:
    """What each rank of a group computes in a layer beside its columns of the MLP, in columns."""
    return columns * (costs.cut + tp * costs.whole) // (tp * costs.by_step_time)


@lru_cache(maxsize=256)
def cut_columns(columns: int, beside: int, step_times: tuple[int, ...]) -> tuple[int, ...]:
    """Cuts columns so that `max over ranks of step_time * (beside + columns)` is least, in steps that matrix products like.

    Steps are given out one by one, each to the rank that will be done first with it, which is best for a maximum of times
    that each grow with their own columns. Each rank has a step at least. Ranks of one relative step time differ by a step at most.

    Args:
        columns: To be cut.
        beside: What each rank computes in any case, in columns.
        step_times: Of each rank, see `USUAL_STEP_TIME`.

    Returns:
        The ends of the shares, from 0 on; empty where there are fewer columns than ranks.
    """
    ranks, step = len(step_times), _LARGEST_STEP
    while step > 1 and (columns % step or columns < _LEAST_STEPS * step * ranks):
        step //= 2
    if columns < ranks:
        return ()
    held = [step] * ranks
    for _ in range(columns // step - ranks):
        # of two that are done at a time the faster one, whatever the order of ranks
        _, _, best = min(
            (step_time * (beside + held[r] + step), step_time, r) for r, step_time in enumerate(step_times)
        )
        held[best] += step
    ends = [0]
    for share in held:
        ends.append(ends[-1] + share)
    return tuple(ends)


def _shares(vector: ParameterVector, strategy: Strategy, costs: UnitCosts, rank: int) -> tuple[int, ...]:
    step_times = step_times_of_group(vector, strategy, rank) if costs.by_step_time else ()
    ends = cut_columns(costs.columns, beside(costs, costs.columns, strategy.tp), step_times) if step_times else ()
    return tuple(stop - start for start, stop in pairwise(ends))


def works(vector: ParameterVector, strategy: Strategy) -> tuple[float, ...]:
    """What each rank computes, by what it would with even shares: over all layers, with their parts of the head."""
    tp, total, usual = strategy.tp, [0.0] * strategy.world_size, 0.0
    for costs in vector.unit_costs.values():
        even = costs.cut / tp + costs.whole
        usual += even + costs.by_step_time / tp
        for first in range(0, strategy.world_size, tp):
            shares = _shares(vector, strategy, costs, first)
            for tp_coord in range(tp):
                part = shares[strategy.shard_index(tp_coord)] / costs.columns if shares else 1 / tp
                total[first + tp_coord] += even + costs.by_step_time * part
    return tuple(own / usual for own in total) if usual else (1.0,) * strategy.world_size


def largest_share(vector: ParameterVector, strategy: Strategy) -> float:
    """The largest part of an MLP's columns on a rank, at least that of an even division."""
    if not is_uneven(vector, strategy):
        return 1 / strategy.tp
    groups = range(0, strategy.world_size, strategy.tp)
    layers = [costs for costs in vector.unit_costs.values() if costs.by_step_time]
    shares = [max(_shares(vector, strategy, c, g), default=0) / c.columns for c in layers for g in groups]
    return max(1 / strategy.tp, *shares)


def step_times_of_groups(vector: ParameterVector, strategy: Strategy, ranks: Sequence[int]) -> tuple[int, ...]:
    """How long each rank's tensor-parallel group takes for its part of a layer, by the division in force and the relative step time of each
    rank; of usual relative step times and even shares it is `USUAL_STEP_TIME`."""
    taken = [step_time * work for step_time, work in zip(ranks, works(vector, strategy), strict=True)]
    groups = [max(taken[first : first + strategy.tp]) for first in range(0, strategy.world_size, strategy.tp)]
    return tuple(max(round(groups[rank // strategy.tp]), 1) for rank in range(strategy.world_size))


def fastest_stages(strategy: Strategy, step_times: Sequence[int]) -> tuple[int, ...]:
    """The relative step time of each place of a pipeline in its fastest replica; in a replica that of the slowest rank there."""
    slowest = [[0] * strategy.dp for _ in range(strategy.pp)]
    for rank, step_time in enumerate(step_times):
        coord = strategy.coord(rank)
        slowest[coord.pp][coord.dp] = max(slowest[coord.pp][coord.dp], step_time)
    return tuple(map(min, slowest))
