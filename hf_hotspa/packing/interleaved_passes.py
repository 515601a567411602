"""Which interleaved schedule runs the packs of a replica whose ranks have several stages each (`+v2`), and in which order.

Owns the choice between ours (`interleaved_order`) and `ScheduleInterleaved1F1B` of `torch.distributed.pipelining`, and the
order of the latter, for the ranks that run it and for the cost model that predicts it.

torch's (Narayanan et al., SC'21, section 2.2) sends packs of one shape round in groups of equal size: m packs on p ranks in
m // p groups, so m must be a multiple of that number. A rank r begins with (v - 1) g + 2 (p - 1 - r) forward passes for groups
of g, then one forward and one backward pass in turn. As with torch's plain 1F1B, packs are padded to the longest, and ours
runs in its place for fewer packs than ranks, for a number of packs that makes no equal groups, and where the padded packs in
flight would be more than the limit.

Promises: a pure function; equal to what torch makes (`tests/unit/test_interleaved_order.py`); no rank holds more than the limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hf_hotspa.packing.interleaved_order import Turn, at_a_time, interleaved_order


@dataclass(frozen=True)
class InterleavedPasses:
    """How the packs of a replica run.

    Args:
        kind: The schedule: `own` or `1f1b` (torch's).
        tokens: Of each unit as it runs, padding included.
        order: All passes, in one order in which each comes behind what it needs; of each rank in the order that it runs them.
        replaced: Whether it is ours because the one that was asked for would pass the limit.
    """

    kind: str
    tokens: tuple[int, ...]
    order: tuple[Turn, ...]
    replaced: bool = False


def choose_interleaved(
    schedule: str,
    tokens: Sequence[int],
    num_ranks: int,
    rounds: int,
    most_tokens: int | None = None,
    chains: Sequence[int] = (),
) -> InterleavedPasses:
    """How the packs of a replica will run, forward and backward.

    Args:
        schedule: One of `pipeline_order.SCHEDULES` that `check_runs` allows.

    The others are those of `interleaved_order`.
    """
    total, replaced = len(tokens), False
    if schedule == "1f1b" and total >= num_ranks and total % (total // num_ranks) == 0:
        longest = max(tokens)
        held = min(_ahead(total, num_ranks, rounds, 0) + 1, total * rounds)  # passes, 1 / rounds of a pack each
        if most_tokens is None or held * longest <= rounds * most_tokens:
            return InterleavedPasses("1f1b", (longest,) * total, torch_order(total, num_ranks, rounds))
        replaced = True
    order = interleaved_order(tokens, num_ranks, rounds, most_tokens, chains)
    return InterleavedPasses("own", tuple(tokens), order, replaced)


def _group(num_packs: int, num_ranks: int) -> int:
    """Packs that go round together."""
    return num_packs // max(1, num_packs // num_ranks)


def _ahead(num_packs: int, num_ranks: int, rounds: int, rank: int) -> int:
    """Forward passes of a rank before the first one that a backward pass follows."""
    return min((rounds - 1) * _group(num_packs, num_ranks) + 2 * (num_ranks - 1 - rank), num_packs * rounds)


@lru_cache(maxsize=256)
def torch_order(num_packs: int, num_ranks: int, rounds: int) -> tuple[Turn, ...]:
    """All passes of torch's schedule, in one order in which each comes behind what it needs.

    Args:
        num_packs: A multiple of `num_packs // num_ranks`, which is at least 1.
    """
    orders = [_of_rank(num_packs, num_ranks, rounds, rank) for rank in range(num_ranks)]
    return tuple(turn for turns in at_a_time(orders, num_ranks * rounds) for turn in turns)


def _of_rank(num_packs: int, num_ranks: int, rounds: int, rank: int) -> list[Turn]:
    group, ahead = _group(num_packs, num_ranks), _ahead(num_packs, num_ranks, rounds, rank)
    passes = [
        (index, first + unit)
        for first in range(0, num_packs, group)
        for index in range(rounds)
        for unit in range(group)
    ]
    forward = [Turn(index * num_ranks + rank, unit, False) for index, unit in passes]
    backward = [Turn((rounds - 1 - index) * num_ranks + rank, unit, True) for index, unit in passes]
    turns = forward[:ahead]
    for here, back in zip(forward[ahead:], backward, strict=False):
        turns += [here, back]
    return [*turns, *backward[len(forward) - ahead :]]
