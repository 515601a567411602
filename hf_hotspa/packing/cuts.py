"""Cuts packs: into chunks of tokens (`+ck`), and into shares for the ranks of cp. Plain numbers, the same on all ranks.

Chunks: sequences no longer than a chunk stay in one, and several share one. A longer sequence is cut; its chunks are a
*chain*: each needs the keys and values of the earlier ones. The short sequences that follow fill a chain's last chunk,
so at most one sequence's keys and values are kept at a time, as in Huang et al. (2025, "ChunkFlow").

On one stage memory decides, and chunks have equal tokens. In a pipeline stages wait for one another, and chunks have
equal *time* (Li et al., 2021, "TeraPipe", section 3.3): later tokens attend to more, so later chunks are shorter.

Shares of cp have two forms. By tokens: stretches of equal length, for attention that divides heads (Ulysses). By cost:
sequences stay on one rank if that is balanced; the others are cut into 2 * cp slices, and rank r has the r-th and the
r-th from the end, for an equal share of tokens and of token pairs (the zigzag of Llama 3: Grattafiori et al., 2024,
section 3.3.2).

Promises: every token is in one piece; a rank's pieces keep the order of the pack; no row is empty; each row is padded
at its end to the required multiple; by cost, the fullest rank exceeds the mean cost and tokens by at most `SLACK`,
apart from one token of each cut slice.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from hf_hotspa.packing.bucketing import sequence_cost
from hf_hotspa.strategy import Strategy

Chain = tuple[tuple[int, int], ...]
"""Chunks as tokens `[first, last + 1)` of their pack: a single one, or the chunks of one cut sequence."""


def cut_into_chains(lengths: Sequence[int], most: int, pair_cost: float | None = None) -> list[Chain]:
    """Cuts a pack into chunks of at most `most` tokens. Returns chains in the order of the row, which their chunks make
    up. Only the last chunk of a chain holds several sequences. `lengths`: tokens of each sequence, each at least 1.
    `pair_cost`: cost of a pair of tokens relative to the cost of one token: chunks of a sequence then cost the same,
    and none more than `most` tokens that begin a sequence. None for chunks of equal tokens."""
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
    """Cuts a pack under a strategy with `+ck`: chunks of equal tokens on one stage, of equal time in a pipeline."""
    return cut_into_chains(lengths, strategy.ck, pair_cost if strategy.pp > 1 else None)


def num_chunks(length: int, most: int, pair_cost: float = 0.0) -> int:
    """Returns the number of chunks of a sequence (`cut_into_chains`)."""
    _, shared, alone_from = _shares(length, most, pair_cost)
    return shared + 1 + length - alone_from


def _cost(length: int, pair_cost: float | None) -> float:
    return length + (pair_cost or 0.0) * length * length


def _shares(length: int, most: int, pair_cost: float) -> tuple[float, int, int]:
    """The cost of each chunk of a sequence, how many chunks end where it is reached, and the first token from which on
    each is a chunk by itself (the length if none is).

    Each token costs more than the previous one. A token above the cost of a chunk is a chunk by itself; before those,
    at most one token crosses a chunk's end.
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

    Tokens `[a, b)` cost `_cost(b) - _cost(a)`, so a chunk ends where `_cost` reaches its share, rounded down: no chunk
    is longer than `most` before rounding, so none is after.
    """
    share, shared, alone_from = _shares(length, most, pair_cost)
    ends, end = [], 0
    for index in range(1, shared + 1):
        cost = share * index
        # the root of pair_cost * y**2 + y = cost, in the form that also holds for pair_cost = 0
        root = int(2 * cost / (1 + math.sqrt(1 + 4 * pair_cost * cost)) + 1e-9)
        end = min(max(root, end + 1), alone_from - 1 - (shared - index))  # each keeps at least one token
        ends.append(end)
    return [*ends, *range(alone_from, length + 1)]


SLACK = 0.02  # how much more than the mean a rank may have before another sequence is cut
Piece = tuple[int, int, int]  # `(sequence, first, stop)`: the tokens `[first, stop)` of a sequence of the pack


@dataclass(frozen=True)
class Shares:
    """Each rank's share of a pack with sequences of these lengths: pieces, and tokens of padding behind them."""

    lengths: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    pads: tuple[int, ...]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Tokens of each rank's row, including padding."""
        own = (sum(stop - first for _, first, stop in pieces) for pieces in self.pieces)
        return tuple(tokens + pad for tokens, pad in zip(own, self.pads, strict=True))

    @cached_property
    def cut(self) -> frozenset[int]:
        """The sequences that are on more than one rank."""
        ranks = Counter(chain.from_iterable({sequence for sequence, _, _ in pieces} for pieces in self.pieces))
        return frozenset(sequence for sequence, number in ranks.items() if number > 1)

    def costs(self, quadratic_cost: float) -> list[float]:
        """The cost of each rank's pieces, in units of the linear cost of a token (see `sequence_cost`)."""
        return [
            sum(sequence_cost(stop, quadratic_cost) - sequence_cost(first, quadratic_cost) for _, first, stop in pieces)
            for pieces in self.pieces
        ]


def share_by_tokens(lengths: Sequence[int], cp: int, multiple: int = 1) -> Shares:
    """Divides a pack into stretches of equal length, rows of multiples of `multiple` tokens."""
    total = sum(lengths)
    cuts = [total * rank // cp for rank in range(cp + 1)]
    pieces: list[list[Piece]] = [[] for _ in range(cp)]
    begin = 0
    for sequence, length in enumerate(lengths):
        for rank in range(cp):
            first, stop = max(cuts[rank], begin), min(cuts[rank + 1], begin + length)
            if stop > first:
                pieces[rank].append((sequence, first - begin, stop - begin))
        begin += length
    return _padded(lengths, pieces, multiple)


def share_by_cost(lengths: Sequence[int], cp: int, quadratic_cost: float, multiple: int = 1) -> Shares:
    """Divides a pack so that ranks have equal tokens and equal cost.

    Cuts the longest sequences, as few as necessary; each of the others goes to the rank with the least cost so far.
    `quadratic_cost`: cost of a pair of tokens relative to the cost of one token. `multiple`: see `share_by_tokens`.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    costs = [sequence_cost(length, quadratic_cost) for length in lengths]
    most_tokens, most_cost = ((1 + SLACK) * sum(values) / cp for values in (lengths, costs))
    num_cut = sum(length > most_tokens for length in lengths)
    while num_cut < len(order):
        owners = _whole_on_ranks(order[num_cut:], lengths, costs, cp)
        loads = [[sum(values[i] for i in own) for own in owners] for values in (lengths, costs)]
        cut = order[:num_cut]
        shared = [sum(values[i] for i in cut) / cp for values in (lengths, costs)]
        if max(loads[0]) + shared[0] <= most_tokens and max(loads[1]) + shared[1] <= most_cost:
            break
        num_cut += 1
    else:
        owners = [[] for _ in range(cp)]
    pieces: list[list[Piece]] = [[(i, 0, lengths[i]) for i in own] for own in owners]
    for turn, i in enumerate(order[:num_cut]):
        bounds = [lengths[i] * slice_ // (2 * cp) for slice_ in range(2 * cp + 1)]
        for place in range(cp):
            # slices differ by a token: alternates the ranks that have more
            rank = place if turn % 2 == 0 else cp - 1 - place
            for slice_ in (place, 2 * cp - 1 - place):
                if bounds[slice_ + 1] > bounds[slice_]:
                    pieces[rank].append((i, bounds[slice_], bounds[slice_ + 1]))
    return _padded(lengths, [_joined(sorted(own)) for own in pieces], multiple)


def _whole_on_ranks(order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], cp: int) -> list[list[int]]:
    owners: list[list[int]] = [[] for _ in range(cp)]
    heap = [(0.0, 0, rank) for rank in range(cp)]
    for i in order:
        cost, tokens, rank = heap[0]
        owners[rank].append(i)
        heapq.heapreplace(heap, (cost + costs[i], tokens + lengths[i], rank))
    return owners


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for sequence, first, stop in pieces:
        if joined and joined[-1][0] == sequence and joined[-1][2] == first:
            joined[-1] = sequence, joined[-1][1], stop
        else:
            joined.append((sequence, first, stop))
    return joined


def _padded(lengths: Sequence[int], pieces: Sequence[Sequence[Piece]], multiple: int) -> Shares:
    tokens = [sum(stop - first for _, first, stop in own) for own in pieces]
    pads = tuple(-(-max(own, 1) // multiple) * multiple - own for own in tokens)
    return Shares(tuple(lengths), tuple(map(tuple, pieces)), pads)
