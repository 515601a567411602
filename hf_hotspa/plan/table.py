"""Tables of transfers: the rows that switch plans are made of. No torch; numpy int64 throughout."""

from typing import NamedTuple

import numpy as np

from hf_hotspa.layout.intervals import Numbers

TARGET, RELAY, SOURCE, SECOND = range(4)
"""Stores: where the elements of a transfer lie. The buffers of the target layout, the relay buffers of the switch, the
buffers of the (first) source layout, and those of a second one."""

SRC_STORE, SRC, SRC_OFFSET, DST_STORE, DST, DST_OFFSET, START, LENGTH = range(8)
"""The columns of a table of transfers; `START` counts from the beginning of the segment."""

COLUMNS = 8


class Transfer(NamedTuple):
    """A stretch of one segment that moves from one rank's buffer to another's, or inside a rank (`src == dst`).

    Attributes:
        src_offset: First element in the sender's buffer of the segment.
        dst_offset: First element in the receiver's buffer of the segment.
        start: Position of the first element in the parameter vector.
        hop: In which hop it moves.
        src_store: Which of the sender's buffers: `SOURCE`, `SECOND`, `RELAY` or `TARGET`.
        dst_store: Which of the receiver's buffers.
    """

    segment: int
    length: int
    src: int
    src_offset: int
    dst: int
    dst_offset: int
    start: int
    hop: int = 0
    src_store: int = SOURCE
    dst_store: int = TARGET

    @property
    def stop(self) -> int:
        return self.start + self.length


def canonical(table: Numbers) -> Numbers:
    """A table in canonical order (source rank, destination rank, start), transfers that continue each other joined."""
    if len(table) == 0:
        return np.empty((0, COLUMNS), np.int64)
    table = table[np.lexsort((table[:, START], table[:, DST], table[:, SRC]))]
    before, after = table[:-1], table[1:]
    length = before[:, LENGTH]
    continues = (before[:, [SRC, DST, SRC_STORE, DST_STORE]] == after[:, [SRC, DST, SRC_STORE, DST_STORE]]).all(1)
    for column in (START, SRC_OFFSET, DST_OFFSET):
        continues &= before[:, column] + length == after[:, column]
    first = np.flatnonzero(np.concatenate(([True], ~continues)))
    merged = table[first]
    merged[:, LENGTH] = np.add.reduceat(table[:, LENGTH], first)
    return np.ascontiguousarray(merged)


class SegmentPlan(NamedTuple):
    """The transfers of one kind of segment.

    Attributes:
        hops: A table of transfers for each hop, [transfers, 8] int64, in canonical order.
        relay_sizes: Elements that each rank's relay buffer needs for one such segment, [world size].
    """

    hops: tuple[Numbers, ...]
    relay_sizes: Numbers


def adjoint(table: Numbers) -> Numbers:
    """The table of the way back, in canonical order: ends and stores swapped."""
    swapped = table[:, [DST_STORE, DST, DST_OFFSET, SRC_STORE, SRC, SRC_OFFSET, START, LENGTH]]
    for column in (SRC_STORE, DST_STORE):
        stores = swapped[:, column]
        swapped[:, column] = np.where(stores == TARGET, SOURCE, np.where(stores == SOURCE, TARGET, stores))
    return np.ascontiguousarray(swapped[np.lexsort((swapped[:, START], swapped[:, DST], swapped[:, SRC]))])
