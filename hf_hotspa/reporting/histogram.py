"""How long the sequences of a data set are, in bins that double every second one. Plain numbers, no torch."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np


def bin_edges(longest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to the first edge that is not below `longest`."""
    edges, power = [1], 2
    while edges[-1] < longest:
        edges += [power, power + power // 2] if power > 1 else [power]
        power *= 2
    while len(edges) > 1 and edges[-2] >= longest:
        edges.pop()
    return edges


def length_histogram(lengths: Any) -> dict[str, list[int]]:
    """Counts of sequences and tokens by length.

    Args:
        lengths: [N] integers, tokens of each row; rows without tokens are left out.

    Returns:
        `edges` [B + 1]: bin i holds the lengths in `(edges[i], edges[i + 1]]`, the first begins at 0; `sequences` [B];
        `tokens` [B]. Empty bins at the short end are left out.
    """
    array = np.asarray(lengths, dtype=np.int64)
    array = array[array > 0]
    if not len(array):
        return {"edges": [0, 1], "sequences": [0], "tokens": [0]}
    edges = bin_edges(int(array.max()))
    index = np.searchsorted(edges, array, side="left")
    sequences = np.bincount(index, minlength=len(edges))
    tokens = np.bincount(index, weights=array, minlength=len(edges))
    first = int(index.min())
    return {
        "edges": [0, *edges][first:],
        "sequences": sequences[first:].tolist(),
        "tokens": tokens[first:].astype(np.int64).tolist(),
    }


def is_histogram(data: Any) -> bool:
    """Whether plain data has the form that `length_histogram` gives."""
    if not isinstance(data, dict):
        return False
    columns: list[Sequence[Any]] = [data.get(name, ()) for name in ("edges", "sequences", "tokens")]
    if not all(isinstance(c, list) and all(type(n) is int and n >= 0 for n in c) for c in columns):
        return False
    edges, sequences, tokens = columns
    ordered = all(a < b for a, b in pairwise(edges))
    return ordered and len(sequences) == len(tokens) == len(edges) - 1 > 0
