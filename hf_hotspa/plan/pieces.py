"""Atomic pieces: a segment cut at every boundary of all layouts, so that no rank holds or needs a part of a piece.

What every planner starts from. No torch; numpy int64 throughout; positions count from the beginning of the segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_hotspa.layout.intervals import Numbers, Placement
from hf_hotspa.plan.table import SECOND, SOURCE


@dataclass(frozen=True, eq=False)
class Holders:
    """Who has which piece: rows by piece, then rank.

    Args:
        rank: A rank that has it.
        offset: Where it lies in the rank's buffer.
        store: In which of the rank's buffers.
        first: The rows of piece p are `first[p]` to `first[p + 1]`.
    """

    piece: Numbers
    rank: Numbers
    offset: Numbers
    store: Numbers
    first: Numbers
    world_size: int

    @cached_property
    def _key(self) -> Numbers:
        return self.piece * self.world_size + self.rank

    def find(self, piece: Numbers, rank: Numbers) -> Numbers:
        """The row of each (piece, rank); -1 where the rank does not have the piece."""
        if len(self._key) == 0:
            return np.full(len(piece), -1, np.int64)
        wanted = piece * self.world_size + rank
        row = np.minimum(np.searchsorted(self._key, wanted), len(self._key) - 1)
        return np.where(self._key[row] == wanted, row, -1)

    def between(self, piece: Numbers, low: Numbers, high: Numbers) -> tuple[Numbers, Numbers]:
        """The first row, and the one after the last, of the holders of each piece from rank `low` to before `high`."""
        base = piece * self.world_size
        return (
            np.searchsorted(self._key, base + low),
            np.searchsorted(self._key, base + np.minimum(high, self.world_size)),
        )

    @cached_property
    def counts(self) -> Numbers:
        """How many ranks have each piece."""
        return np.diff(self.first)

    def of(self, piece: int) -> list[int]:
        """The ranks that have a piece, ascending."""
        return self.rank[self.first[piece] : self.first[piece + 1]].tolist()

    @cached_property
    def groups(self) -> tuple[Numbers, list[tuple[int, ...]]]:
        """Pieces by who has them: the index of each piece's set of ranks, and the sets."""
        known: dict[bytes, int] = {}
        sets: list[tuple[int, ...]] = []
        index = np.empty(len(self.first) - 1, np.int64)
        bounds = self.first.tolist()
        for piece in range(len(index)):
            ranks = self.rank[bounds[piece] : bounds[piece + 1]]
            key = ranks.tobytes()
            if key not in known:
                known[key] = len(sets)
                sets.append(tuple(ranks.tolist()))
            index[piece] = known[key]
        return index, sets


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of one kind of segment that somebody needs.

    Args:
        starts: First element of each piece.
        held: Who has it in a source layout; where a rank has it in both, the second source.
    """

    starts: Numbers
    lengths: Numbers
    held: Holders
    needed: Holders


def cut_pieces(sources: Sequence[tuple[Placement, int]], target: tuple[Placement, int], world_size: int) -> Pieces:
    """Cuts one segment.

    Args:
        sources: One or two source placements, each with what is to be added to its positions.
        target: The same for the target.
    """
    sides = [*sources, target]
    bounds = [column + shift for placement, shift in sides for column in (placement.starts, placement.stops)]
    cuts = np.unique(np.concatenate(bounds)) if bounds else np.empty(0, np.int64)
    stores = (SOURCE, SECOND)
    rows = [_rows(placement, shift, cuts, store) for (placement, shift), store in zip(sources, stores, strict=False)]
    held = np.concatenate(rows)
    needed = _rows(*target, cuts, 0)
    wanted = np.zeros(max(len(cuts) - 1, 0), bool)
    wanted[needed[:, 0]] = True
    number = np.cumsum(wanted) - 1
    held = held[wanted[held[:, 0]]]
    count = int(wanted.sum())
    return Pieces(
        cuts[:-1][wanted],
        np.diff(cuts)[wanted],
        _holders(held, number, count, world_size),
        _holders(needed, number, count, world_size),
    )


def _rows(placement: Placement, shift: int, cuts: Numbers, store: int) -> Numbers:
    """`(piece, rank, offset, store)` of all pieces of all intervals."""
    first = np.searchsorted(cuts, placement.starts + shift)
    count = np.searchsorted(cuts, placement.stops + shift) - first
    interval = np.repeat(np.arange(len(first)), count)
    piece = first[interval] + np.arange(len(interval)) - np.repeat(np.cumsum(count) - count, count)
    offset = placement.offsets[interval] + cuts[piece] - shift - placement.starts[interval]
    return np.column_stack((piece, placement.ranks[interval], offset, np.full(len(piece), store, np.int64)))


def _holders(rows: Numbers, number: Numbers, count: int, world_size: int) -> Holders:
    """Rows sorted by piece and rank; of a rank with two copies the later store stays."""
    rows = rows[np.lexsort((-rows[:, 3], rows[:, 1], rows[:, 0]))]
    if len(rows) > 1:
        double = (rows[1:, :2] == rows[:-1, :2]).all(1)
        rows = rows[np.concatenate(([True], ~double))]
    piece = number[rows[:, 0]] if len(rows) else np.empty(0, np.int64)
    first = np.searchsorted(piece, np.arange(count + 1))
    rank, offset, store = (np.ascontiguousarray(rows[:, i]) for i in (1, 2, 3))
    return Holders(piece, rank, offset, store, first, world_size)
