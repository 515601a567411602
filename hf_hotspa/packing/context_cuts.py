"""Which tokens of a pack each rank of cp has: plain numbers, the same on all ranks.

Two ways to divide a pack. By tokens: the row is cut into stretches of equal length, for attention whose heads are divided
instead (Ulysses). By cost: sequences stay whole on one rank where that is balanced, and the others are cut into 2 * cp
slices of which rank r has the r-th and the r-th from the end, so that each rank has as many pairs of tokens to look at as
tokens (the zigzag of Llama 3: Grattafiori et al., 2024, section 3.3.2).

Promises: every token is in one piece; a rank's pieces stand in the order of the pack; no row is empty, and each is a
multiple of what it must be a multiple of, with padding at its end where it has to be; by cost, the fullest rank has at
most `SLACK` more cost and more tokens than the mean, but for what one token more or less of each cut slice makes.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_hotspa.packing.bucketing import sequence_cost

SLACK = 0.02
"""How much more than the mean a rank may have before another sequence is cut."""

Piece = tuple[int, int, int]
"""`(sequence, first, stop)`: the tokens `[first, stop)` of a sequence of the pack."""


@dataclass(frozen=True)
class Shares:
    """What each rank has of a pack.

    Args:
        lengths: Tokens of each sequence of the pack.
        pieces: For each rank its pieces.
        pads: For each rank the tokens of padding behind them.
    """

    lengths: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    pads: tuple[int, ...]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Tokens of each rank's row, padding included."""
        own = (sum(stop - first for _, first, stop in pieces) for pieces in self.pieces)
        return tuple(tokens + pad for tokens, pad in zip(own, self.pads, strict=True))

    @cached_property
    def cut(self) -> frozenset[int]:
        """The sequences that are on more than one rank."""
        seen: dict[int, set[int]] = {}
        for rank, pieces in enumerate(self.pieces):
            for sequence, _, _ in pieces:
                seen.setdefault(sequence, set()).add(rank)
        return frozenset(sequence for sequence, ranks in seen.items() if len(ranks) > 1)

    def costs(self, quadratic_cost: float) -> list[float]:
        """The cost of each rank's pieces, in units of the linear cost of a token (see `packs.sequence_cost`)."""
        return [
            sum(sequence_cost(stop, quadratic_cost) - sequence_cost(first, quadratic_cost) for _, first, stop in pieces)
            for pieces in self.pieces
        ]


def share_by_tokens(lengths: Sequence[int], cp: int, multiple: int = 1) -> Shares:
    """Divides a pack into stretches of equal length.

    Args:
        lengths: Tokens of each sequence, each at least 1.
        multiple: What the length of each rank's row must be a multiple of.
    """
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

    The longest sequences are cut, as few as it takes; each of the others goes to the rank with the least cost so far.
    Arguments as for `share_by_tokens`, and

    Args:
        quadratic_cost: Cost of a pair of tokens relative to the cost of one token.
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
            # slices differ by a token: in turns, so that not always the same ranks have more
            rank = place if turn % 2 == 0 else cp - 1 - place
            for slice_ in (place, 2 * cp - 1 - place):
                if bounds[slice_ + 1] > bounds[slice_]:
                    pieces[rank].append((i, bounds[slice_], bounds[slice_ + 1]))
    return _padded(lengths, [_joined(sorted(own)) for own in pieces], multiple)


def _whole_on_ranks(order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], cp: int) -> list[list[int]]:
    """Longest first to the rank with the least cost, then the fewest tokens, so far."""
    owners: list[list[int]] = [[] for _ in range(cp)]
    heap = [(0.0, 0, rank) for rank in range(cp)]
    for i in order:
        cost, tokens, rank = heap[0]
        owners[rank].append(i)
        heapq.heapreplace(heap, (cost + costs[i], tokens + lengths[i], rank))
    return owners


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that follow one another in a sequence, as one."""
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
