"""How many MLP columns each rank of a tensor-parallel group has when one of them takes longer.

Layouts, replicas and the cost models share this rule. It assigns the columns between an MLP's projections
(`Part.by_step_time`) so that the last rank of the group finishes as early as possible. Attention and vocabulary stay
evenly divided; the columns compensate for them. Costs are in parameters, as for stages without measurements. Groups
without a difference stay even. Integer arithmetic, so all ranks compute the same shares.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from hf_hotspa.layout.stages import USUAL_STEP_TIME
from hf_hotspa.layout.vector import ParameterSpec, ParameterVector, UnitCosts
from hf_hotspa.strategy import Strategy

_LARGEST_STEP = 128  # largest step in columns; steps are powers of two, as matrix products run best on full tiles
_LEAST_STEPS = 16  # least mean number of steps of a rank, so that shares are fine enough


def step_times_of_group(vector: ParameterVector, strategy: Strategy, rank: int) -> tuple[int, ...]:
    """Returns the relative step times of a rank's tensor-parallel group in shard order; empty if all are equal."""
    if not vector.step_times or strategy.tp == 1:
        return ()
    first = rank - strategy.coord(rank).tp
    step_times_by_shard = [USUAL_STEP_TIME] * strategy.tp
    for tp_coord, step_time in enumerate(vector.step_times[first : first + strategy.tp]):
        step_times_by_shard[strategy.shard_index(tp_coord)] = step_time
    return tuple(step_times_by_shard) if len(set(step_times_by_shard)) > 1 else ()


def is_uneven(vector: ParameterVector, strategy: Strategy) -> bool:
    """Whether any tensor-parallel group of a strategy has uneven shares."""
    if not vector.step_times or not any(costs.by_step_time for costs in vector.unit_costs.values()):
        return False
    return any(step_times_of_group(vector, strategy, rank) for rank in range(0, strategy.world_size, strategy.tp))


def have_same_shards(before: ParameterVector, after: ParameterVector, strategy: Strategy) -> bool:
    """Whether two divisions of the same parameters give each rank the same columns."""
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
    """Returns a rank's row ranges of a parameter along its `shard_dim`, in storage order. `shard`: a shard of the
    rank's group; the rank's own shard when None."""
    shard = strategy.shard_index(strategy.coord(rank).tp) if shard is None else shard
    step_times = step_times_of_group(vector, strategy, rank) if any(part.by_step_time for part in spec.parts) else ()
    costs = vector.unit_costs.get(spec.unit) if step_times else None
    if costs is None or not costs.by_step_time:
        return spec.shard_rows(strategy.tp, shard)
    tp, known = strategy.tp, costs
    return spec.shard_rows(
        tp, shard, lambda p: cut_columns(p.rows, beside(known, p.rows, tp), step_times) if p.by_step_time else ()
    )


def stored_rows(
    vector: ParameterVector, strategy: Strategy, spec: ParameterSpec, rank: int
) -> tuple[tuple[int, int], ...] | None:
    """Like `shard_rows`, along `storage_dim`; None if the rank holds the complete tensor. Packed tensors are cut at
    block borders only."""
    if spec.shard_dim is None or strategy.tp == 1:
        return None
    rows, step = shard_rows(vector, strategy, spec, rank), 1 if spec.packed is None else spec.packed.step
    if not step or any(end % step for range_ in rows for end in range_):
        return None
    return tuple((start // step, stop // step) for start, stop in rows)


def shard_widths(vector: ParameterVector, strategy: Strategy, spec: ParameterSpec, rank: int) -> tuple[int, ...]:
    """Returns the number of rows of each shard of a rank's group, in shard order."""
    shards = range(strategy.tp)
    return tuple(sum(b - a for a, b in shard_rows(vector, strategy, spec, rank, shard)) for shard in shards)


def beside(costs: UnitCosts, columns: int, tp: int) -> int:
    """Returns what each rank of a group computes in a layer besides its MLP columns, in units of columns."""
    return columns * (costs.cut + tp * costs.whole) // (tp * costs.by_step_time)


@lru_cache(maxsize=256)
def cut_columns(columns: int, beside: int, step_times: tuple[int, ...]) -> tuple[int, ...]:
    """Cuts columns to minimise `max over ranks of step_time * (beside + columns)`, in steps that suit matrix products.

    Assigns steps one by one to the rank that would finish first with it, which is optimal for a maximum of increasing
    times. Each rank has at least one step. Ranks with equal relative step times differ by at most one. `beside` is the
    fixed work of each rank, in columns. Returns the ends of the shares, starting with 0; none for fewer columns than
    ranks.
    """
    ranks, step = len(step_times), _LARGEST_STEP
    while step > 1 and (columns % step or columns < _LEAST_STEPS * step * ranks):
        step //= 2
    if columns < ranks:
        return ()
    widths = [step] * ranks
    for _ in range(columns // step - ranks):
        # a tie goes to the faster rank, whatever the order of ranks
        _, _, best = min(
            (step_time * (beside + widths[r] + step), step_time, r) for r, step_time in enumerate(step_times)
        )
        widths[best] += step
    return (0, *accumulate(widths))


def _shares(vector: ParameterVector, strategy: Strategy, costs: UnitCosts, rank: int) -> tuple[int, ...]:
    step_times = step_times_of_group(vector, strategy, rank) if costs.by_step_time else ()
    ends = cut_columns(costs.columns, beside(costs, costs.columns, strategy.tp), step_times) if step_times else ()
    return tuple(stop - start for start, stop in pairwise(ends))


def works(vector: ParameterVector, strategy: Strategy) -> tuple[float, ...]:
    """Returns each rank's work relative to even shares, over all layers and their parts of the head."""
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
    """Returns the largest fraction of an MLP's columns on a rank, at least 1 / tp."""
    if not is_uneven(vector, strategy):
        return 1 / strategy.tp
    groups = range(0, strategy.world_size, strategy.tp)
    layers = [costs for costs in vector.unit_costs.values() if costs.by_step_time]
    shares = [max(_shares(vector, strategy, c, g), default=0) / c.columns for c in layers for g in groups]
    return max(1 / strategy.tp, *shares)


def step_times_of_groups(vector: ParameterVector, strategy: Strategy, ranks: Sequence[int]) -> tuple[int, ...]:
    """Returns the relative step time of each rank's tensor-parallel group under the vector's division of MLPs, from the
    relative step times of `ranks`. `USUAL_STEP_TIME` for usual devices and even shares."""
    taken = [step_time * work for step_time, work in zip(ranks, works(vector, strategy), strict=True)]
    groups = [max(taken[first : first + strategy.tp]) for first in range(0, strategy.world_size, strategy.tp)]
    return tuple(max(round(groups[rank // strategy.tp]), 1) for rank in range(strategy.world_size))
