"""The lengths of what a run trains, where nobody knew them before: a plan was made for the first ones, and they may move.

Owns the last sequences and how far they are from those of the plan: half the sum of the differences of both histograms, tokens by
powers of the root of two. Promises: a pure function of what it was shown, in that order, equal on all ranks. No torch.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_hotspa.typed import reading_state

_KEPT, _LEAST = 2048, 256
"""Sequences that are looked at, the last ones, and how many there must be."""
_EVERY = 8
"""Mini-batches between two looks."""
_FAR = 0.3
"""A distance, of at most 1, that asks for another plan: two draws from one distribution are nearer."""
_BINS = 64


class LengthsSeen:
    """Watches the lengths of mini-batches.

    Args:
        planned_for: Those of the plan, in tokens.
    """

    def __init__(self, planned_for: Iterable[int]) -> None:
        self._basis = _histogram(planned_for)
        self._recent: list[int] = []
        self._mini_batches = 0

    @property
    def recent(self) -> list[int]:
        """The last ones, in the order in which they were trained."""
        return list(self._recent)

    def add(self, lengths: Iterable[int]) -> bool:
        """Takes a mini-batch; says whether another plan is due."""
        self._recent = [*self._recent, *map(int, lengths)][-_KEPT:]
        self._mini_batches += 1
        return self._mini_batches % _EVERY == 0 and len(self._recent) >= _LEAST and self.distance > _FAR

    @property
    def distance(self) -> float:
        """How far the last lengths are from those of the plan, from 0 to 1."""
        return float(np.abs(_histogram(self._recent) - self._basis).sum() / 2)

    def planned(self) -> None:
        """Another plan was made, of the last ones."""
        self._basis = _histogram(self._recent)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"basis": self._basis.tolist(), "recent": self._recent, "mini_batches": self._mini_batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state.

        Raises:
            HotspaConfigError: it is not one.
        """
        with reading_state("the lengths that were trained", "lengths are watched anew"):
            basis = np.array(state["basis"], np.float64)
            recent, number = [int(length) for length in state["recent"]], int(state["mini_batches"])
            if basis.shape != (_BINS,):
                raise ValueError(f"{basis.shape} bins")
        self._basis, self._recent, self._mini_batches = basis, recent, number


def _histogram(lengths: Iterable[int]) -> NDArray[np.float64]:
    """The share of the tokens in each bin; nothing of nothing."""
    tokens = np.maximum(np.array(list(lengths), np.float64), 1.0)
    bins = np.minimum((2 * np.log2(tokens)).astype(np.int64), _BINS - 1)
    sums = np.bincount(bins, tokens, _BINS)
    return sums / max(float(sums.sum()), 1.0)
