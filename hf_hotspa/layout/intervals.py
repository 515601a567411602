"""Intervals of one segment over all ranks, as arrays. Layouts and plans are built from them.

numpy int64; sizes are in elements.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hf_hotspa.errors import PlanError

Numbers = NDArray[np.int64]


@dataclass(frozen=True, order=True)
class Interval:
    """Elements `[start, stop)` of the vector, held at `offset` of a rank's buffer for `segment`."""

    start: int
    stop: int
    segment: int
    offset: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Placement:
    """The intervals of one segment on all ranks: sorted by rank and start, adjacent ones joined (see `place`).

    Args:
        starts: First element of each interval, relative to the segment.
        stops: One past its last element.
        offsets: Its position in the rank's buffer.
        sizes: Elements of each rank's buffer, [world size].
    """

    ranks: Numbers
    starts: Numbers
    stops: Numbers
    offsets: Numbers
    sizes: Numbers

    @cached_property
    def key(self) -> bytes:
        """SHA-256 digest; equal for equal placements."""
        arrays = (self.ranks, self.starts, self.stops, self.offsets, self.sizes)
        return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def rows(self, low: int = 0, high: int | None = None) -> Iterator[tuple[int, int, int, int]]:
        """Yields `(rank, start, stop, offset)` of intervals `[low, high)`."""
        columns = (self.ranks, self.starts, self.stops, self.offsets)
        return zip(*(column[low:high].tolist() for column in columns), strict=True)

    def check(self, name: str, segment: int, base: int = 0) -> None:
        """Checks that no rank holds an element twice, and that intervals neither overlap in a buffer nor exceed it.

        Args:
            base: Start of the segment in the vector.

        Raises:
            PlanError: naming the layout, the rank and the interval.
        """

        def interval(i: int) -> Interval:
            row = [int(column[i]) for column in (self.starts, self.stops, self.offsets)]
            return Interval(base + row[0], base + row[1], segment, row[2])

        same = self.ranks[1:] == self.ranks[:-1]
        twice = np.flatnonzero(same & (self.starts[1:] < self.stops[:-1]))
        if len(twice):
            i = int(twice[0]) + 1
            raise PlanError(
                f"layout {name!r} holds element {base + int(self.starts[i])} twice",
                where=f"rank {self.ranks[i]}, {interval(i)}",
            )
        order = np.lexsort((self.offsets, self.ranks))
        ranks, offsets, lengths = self.ranks[order], self.offsets[order], (self.stops - self.starts)[order]
        overlaps = np.flatnonzero((ranks[1:] == ranks[:-1]) & (offsets[:-1] + lengths[:-1] > offsets[1:]))
        if len(overlaps):
            a, b = (int(order[overlaps[0] + i]) for i in (0, 1))
            raise PlanError(
                f"layout {name!r}: {interval(a)} and {interval(b)} overlap in the buffer", where=f"rank {self.ranks[a]}"
            )
        leaves = np.flatnonzero((offsets < 0) | (offsets + lengths > self.sizes[ranks]))
        if len(leaves):
            i = int(order[leaves[0]])
            size = int(self.sizes[self.ranks[i]])
            raise PlanError(
                f"layout {name!r}: {interval(i)} leaves its buffer of {size} elements", where=f"rank {self.ranks[i]}"
            )


def place(rows: Numbers | Sequence[tuple[int, int, int, int]], sizes: Numbers | Sequence[int]) -> Placement:
    """Builds a placement from `(rank, start, stop, offset)` rows in any order. Drops empty intervals."""
    table = np.asarray(rows, dtype=np.int64).reshape(-1, 4)
    table = table[table[:, 2] > table[:, 1]]
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    if len(table) > 1:
        before, after = table[:-1], table[1:]
        continues = (
            (before[:, 0] == after[:, 0])
            & (before[:, 2] == after[:, 1])
            & (before[:, 3] + before[:, 2] - before[:, 1] == after[:, 3])
        )
        first = np.flatnonzero(np.concatenate(([True], ~continues)))
        last = np.append(first[1:], len(table)) - 1
        table = np.column_stack((table[first, 0], table[first, 1], table[last, 2], table[first, 3]))
    ranks, starts, stops, offsets = (np.ascontiguousarray(table[:, i]) for i in range(4))
    return Placement(ranks, starts, stops, offsets, np.asarray(sizes, dtype=np.int64))
