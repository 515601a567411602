"""The lengths and labels of a data set's rows: the input of all planning.

Owns `SequenceTable`, and `TableBuilder`, which makes one from rows or columns. No torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_hotspa.rows.read_row import DEFAULT_RULES, IGNORED_LABEL, Row, RowRules, check_left_padding

_none: Any = partial(np.zeros, 0, np.int64)


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """Lengths and label counts of all rows of a dataset (N rows).

    A row is one sequence, or, if already packed, several documents, each a separate sequence.

    Args:
        lengths: [N] int64, tokens of each row without padding.
        label_counts: [N] int64, label tokens of each whole row (the first token of a document never counts).
        mask_offsets: [N] int64, the bit where a row's label mask begins in `mask_bits`; -1 if all tokens are labels.
        mask_bits: [B] uint8, one bit for each token of rows with masked tokens (`np.packbits` order), 1 = label. Other
            rows have no bits, so plain text costs nothing and a billion masked tokens cost 125 MB.
        cuts: [C] int64, where documents after the first begin in their row, row after row.
        cut_ends: [N] int64, how many entries of `cuts` belong to the rows up to this one; empty if C is 0.
    """

    lengths: NDArray[np.int64]
    label_counts: NDArray[np.int64]
    mask_offsets: NDArray[np.int64]
    mask_bits: NDArray[np.uint8]
    cuts: NDArray[np.int64] = field(default_factory=_none)
    cut_ends: NDArray[np.int64] = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """[S] int64, tokens of every sequence, row after row; `lengths` if no row is packed."""
        if not len(self.cuts):
            return self.lengths
        counts = np.diff(self.cut_ends, prepend=0)
        row_starts = np.cumsum(self.lengths) - self.lengths
        starts = np.sort(np.concatenate([row_starts, np.repeat(row_starts, counts) + self.cuts]), kind="stable")
        lengths: NDArray[np.int64] = np.diff(starts, append=self.num_tokens)
        return lengths

    @property
    def longest_of_rows(self) -> NDArray[np.int64]:
        """[N] int64, tokens of the longest sequence of each row."""
        if not len(self.cuts):
            return self.lengths
        firsts = np.cumsum(np.diff(self.cut_ends, prepend=0) + 1)
        longest: NDArray[np.int64] = np.maximum.reduceat(self.sequence_lengths, np.concatenate([[0], firsts[:-1]]))
        return longest

    def documents(self, row: int) -> list[tuple[int, int]]:
        """Returns the start and end of each sequence of a row that has tokens."""
        length = int(self.lengths[row])
        if not len(self.cuts):
            return [(0, length)]
        begin = int(self.cut_ends[row - 1]) if row else 0
        edges = [0, *self.cuts[begin : int(self.cut_ends[row])].tolist(), length]
        return list(pairwise(edges))

    def num_labels(self, row: int, start: int, stop: int) -> int:
        """Counts the labels of a separately trained slice of a document: ``labels[start + 1:stop] != -100``."""
        first = start + 1
        if stop <= first:
            return 0
        offset = int(self.mask_offsets[row])
        if offset < 0:
            return stop - first
        low, high = offset + first, offset + stop
        bits = np.unpackbits(self.mask_bits[low // 8 : (high + 7) // 8])
        return int(bits[low % 8 : low % 8 + high - low].sum())

    @classmethod
    def from_lengths(cls, lengths: ArrayLike) -> "SequenceTable":
        """Returns the table of rows that train on every token except the first."""
        array = np.asarray(lengths, dtype=np.int64)
        return cls(array, np.maximum(array - 1, 0), np.full(len(array), -1, np.int64), np.zeros(0, np.uint8))

    @classmethod
    def of_rows(cls, rows: Iterable[Row], rules: RowRules = DEFAULT_RULES) -> "SequenceTable":
        """Returns the table of rows that were read.

        Raises:
            UnsupportedError: see `check_left_padding`.
        """
        builder = TableBuilder()
        builder.add_rows(rows)
        return builder.table(rules)


class TableBuilder:
    """Collects rows chunk by chunk. A chunk's masks begin on a new byte, so that chunks can be concatenated."""

    def __init__(self) -> None:
        self._chunks = [(_none(),) * 5]  # lengths, label counts, mask offsets, cuts, cuts of each row
        self._bits: list[NDArray[np.uint8]] = [np.zeros(0, np.uint8)]
        self._num_bits = 0

    def add_rows(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        if not rows:
            return
        is_label = None
        if any(row.labels is not None for row in rows):
            masks = [np.ones(len(r.ids), np.bool_) if r.labels is None else r.labels != IGNORED_LABEL for r in rows]
            is_label = np.concatenate(masks)
        lengths = np.array([len(row.ids) for row in rows], np.int64)
        num_cuts = np.array([len(row.cuts) for row in rows], np.int64)
        self._add(lengths, is_label, np.concatenate([row.cuts for row in rows]), num_cuts)

    def add(self, lengths: NDArray[np.int64], is_label: NDArray[np.bool_] | None) -> None:
        """Adds rows of one document each; `is_label` has one entry for each token, None if all count."""
        self._add(lengths, is_label, _none(), np.zeros(len(lengths), np.int64))

    def _add(
        self,
        lengths: NDArray[np.int64],
        is_label: NDArray[np.bool_] | None,
        cuts: NDArray[np.int64],
        num_cuts: NDArray[np.int64],
    ) -> None:
        num_firsts = (lengths > 0) + num_cuts
        if is_label is None:
            counts, offsets = lengths - num_firsts, np.full(len(lengths), -1, np.int64)
        else:
            ends = np.cumsum(lengths)
            starts = ends - lengths
            is_label = is_label.copy()
            # The first token of a document never counts, so it must not make its row a masked one.
            is_label[starts[lengths > 0]] = True
            is_label[np.repeat(starts, num_cuts) + cuts] = True
            sums = np.concatenate([[0], np.cumsum(is_label)])
            counts = sums[ends] - sums[starts] - num_firsts
            masked = counts < lengths - num_firsts
            mask_sizes = np.where(masked, lengths, 0)
            offsets = np.where(masked, self._num_bits + np.cumsum(mask_sizes) - mask_sizes, -1)
            bits = np.packbits(is_label[np.repeat(masked, lengths)])
            self._bits.append(bits)
            self._num_bits += 8 * len(bits)
        self._chunks.append((lengths, counts, offsets, cuts, num_cuts))

    def table(self, rules: RowRules) -> SequenceTable:
        columns = (np.concatenate(parts).astype(np.int64) for parts in zip(*self._chunks, strict=True))
        lengths, counts, offsets, cuts, num_cuts = columns
        check_left_padding(rules, lengths)
        cut_ends = np.cumsum(num_cuts) if len(cuts) else _none()
        return SequenceTable(lengths, counts, offsets, np.concatenate(self._bits), cuts, cut_ends)
