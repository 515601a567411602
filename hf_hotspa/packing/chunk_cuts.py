"""Where a pack is cut into chunks of tokens (`+ck`): plain numbers.

A sequence that is no longer than a chunk stays whole, and several share one; a longer one is cut, and the chunks that it is
in are a *chain*: each needs the keys and values of those before it. A chain holds parts of one sequence only, and what is
left of its last chunk is filled with the short ones that follow, so that no more than one sequence's keys and values are
kept at a time. Huang et al. (2025, "ChunkFlow") cut and fill in this way.

On one stage memory decides, and chunks have equal tokens. In a pipeline stages wait for one another, and chunks have equal
*time* (Li et al., 2021, "TeraPipe", section 3.3): later tokens attend to more, so later chunks are shorter.
"""

import math
from collections.abc import Sequence

from hf_hotspa.strategy import Strategy

Chain = tuple[tuple[int, int], ...]
"""Chunks as tokens `[first, last + 1)` of their pack: one that stands alone, or those of a sequence that is cut."""


def cut_into_chains(lengths: Sequence[int], most: int, pair_cost: float | None = None) -> list[Chain]:
    """Cuts a pack into chunks of at most `most` tokens.

    Args:
        lengths: Tokens of each sequence, each at least 1.
        most: At least 1.
        pair_cost: Cost of a pair of tokens relative to the cost of one token: chunks of a sequence then cost the same, and
            none more than `most` tokens that begin a sequence. None for chunks of equal tokens.

    Returns:
        Chains in the order of the row: together their chunks are the row. Only the last chunk of a chain holds more than
        one sequence.
    """
    chains: list[list[tuple[int, int]]] = []
    end, cost, limit = 0, 0.0, _cost(most, pair_cost)
    for length in lengths:
        begin, end = end, end + length
        own = _cost(length, pair_cost)
        fits = chains and length <= most and end - chains[-1][-1][0] <= most
        if fits and (pair_cost is None or cost + own <= limit):
            chains[-1][-1] = chains[-1][-1][0], end
            cost += own
        elif pair_cost is None:
            chains.append([(at, min(at + most, end)) for at in range(begin, end, most)])
        else:
            ends = _ends_of_equal_cost(length, most, pair_cost)
            chains.append([(begin + a, begin + b) for a, b in zip([0, *ends], ends, strict=False)])
            cost = own / len(ends)
    return [tuple(chain) for chain in chains]


def cut_for(strategy: Strategy, lengths: Sequence[int], pair_cost: float) -> list[Chain]:
    """The chains of a pack under a strategy with `+ck`: of equal tokens on one stage, of equal time in a pipeline."""
    return cut_into_chains(lengths, strategy.ck, pair_cost if strategy.pp > 1 else None)


def num_chunks(length: int, most: int, pair_cost: float = 0.0) -> int:
    """How many chunks a sequence is cut into (`cut_into_chains`)."""
    _, shared, alone_from = _shares(length, most, pair_cost)
    return shared + 1 + length - alone_from


def squared_lengths(lengths: Sequence[int], chains: Sequence[Chain]) -> list[list[int]]:
    """For each chunk of each chain, by how much its tokens raise the sum of the squares of the sequences' lengths: what its
    attention costs, in pairs of tokens."""
    begins, total = [0], 0
    for length in lengths:
        total += length
        begins.append(total)
    squares, at = [], 0
    for chain in chains:
        of_chain = []
        for first, stop in chain:
            pairs, here = 0, first
            while here < stop:
                while begins[at + 1] <= here:
                    at += 1
                until = min(stop, begins[at + 1])
                pairs += (until - begins[at]) ** 2 - (here - begins[at]) ** 2
                here = until
            of_chain.append(pairs)
        squares.append(of_chain)
    return squares


def _cost(length: int, pair_cost: float | None) -> float:
    return length + (pair_cost or 0.0) * length * length


def _shares(length: int, most: int, pair_cost: float) -> tuple[float, int, int]:
    """How a sequence is divided: what each chunk costs, how many ends there are where that is reached, and the token from
    which on each is a chunk of its own; the length where none is.

    Tokens cost ever more. Those that cost more than a share are alone; up to there an end a share is a token's at most.
    """
    total = _cost(length, pair_cost)
    count = max(1, math.ceil(total / _cost(most, pair_cost) * (1 - 1e-12)))
    share = total / count
    # token t costs 1 + pair_cost * (2 * t - 1)
    if total - _cost(length - 1, pair_cost) <= share:
        return share, count - 1, length
    cheap = min(length - 1, int(((share - 1) / pair_cost + 1) / 2)) if pair_cost else 0
    if cheap < 1:
        return share, 0, 1
    return share, min(max(0, math.ceil(_cost(cheap, pair_cost) / share) - 1), cheap - 1), cheap


def _ends_of_equal_cost(length: int, most: int, pair_cost: float) -> list[int]:
    """Where the chunks of one sequence end: as few as cost no more than `most` tokens that begin it.

    A chunk of tokens `[a, b)` costs `_cost(b) - _cost(a)`, so an end is where `_cost` reaches its share. Ends are rounded
    down: as no chunk is longer than `most` before, none is after.
    """
    share, shared, alone_from = _shares(length, most, pair_cost)
    ends, end = [], 0
    for index in range(1, shared + 1):
        cost = share * index
        # the root of pair_cost * y**2 + y = cost, in the form that is right for pair_cost = 0, too
        root = int(2 * cost / (1 + math.sqrt(1 + 4 * pair_cost * cost)) + 1e-9)
        end = min(max(root, end + 1), alone_from - 1 - (shared - index))  # rounding leaves each a token
        ends.append(end)
    return [*ends, *range(alone_from, length + 1)]
