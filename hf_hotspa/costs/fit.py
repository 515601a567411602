"""The fit of the time model's coefficients to measurements: non-negative least squares on relative errors.

Errors are relative, so that short packs count as much as long ones. With few unknowns the non-negative problem is
solved exactly: solve for every set of non-zero unknowns and take the best feasible solution.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from hf_hotspa.costs.terms import Cost
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.typed import Positive, PositiveCount

Array = npt.NDArray[np.float64]


def fit_relative(rows: Sequence[Sequence[float]], measured: Sequence[float]) -> list[float]:
    """Returns the x >= 0 that minimises the relative errors of `rows x`."""
    target = np.array(measured)
    return [float(v) for v in nonnegative_least_squares(np.array(rows) / target[:, None], np.ones(len(target)))]


@dataclass(frozen=True)
class Sample:
    """Seconds of `num_layers` decoder layers, forward and backward; `with_ends`: plus embedding, head and loss."""

    tp: PositiveCount
    num_layers: PositiveCount
    lengths: tuple[PositiveCount, ...]
    seconds: Positive
    with_ends: bool = False


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """Returns the x >= 0 that minimises `|matrix x - target|`, exactly, for up to about ten unknowns.

    The optimum is the unconstrained solution on its support, so trying all supports finds it. Columns are scaled first:
    token squares and constants differ by ten orders of magnitude.
    """
    count = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    best, best_error = np.zeros(count), float(target @ target)
    for size in range(1, count + 1):
        for support in map(list, combinations(range(count), size)):
            solution = np.linalg.lstsq(scaled[:, support], target, rcond=None)[0]
            if (solution < 0).any():
                continue
            residual = scaled[:, support] @ solution - target
            if (error := float(residual @ residual)) < best_error * (1 - 1e-12):
                best_error = error
                best = np.zeros(count)
                best[support] = solution
    return best / scale


def fit_costs(
    samples: Iterable[Sample], depth: Callable[[int], float] = float
) -> tuple[dict[int, Cost], dict[int, Cost]]:
    """Fits the costs of one layer, and of embedding, head and loss together (the ends), by tp.

    Ends are separable from layers only with samples of different numbers of layers, or samples without ends. A tp
    without such samples is absent from the second result. Raises `HotspaConfigError`: no sample, an impossible sample,
    or fewer than three different packs for a tp. `depth`: converts a sample's number of layers to a multiple of the
    fitted layer, if layers differ.
    """
    by_tp: dict[int, list[Sample]] = {}
    for sample in samples:
        if not (0 < sample.seconds < float("inf") and sample.num_layers >= 1 and sample.lengths and sample.tp >= 1):
            raise HotspaConfigError(f"{sample} is not a measurement", fix="measure again")
        by_tp.setdefault(sample.tp, []).append(sample)
    if not by_tp:
        raise HotspaConfigError("there are no measurements to fit", fix="measure at least three lengths for each tp")
    layers, ends = {}, {}
    for tp, samples_of_tp in sorted(by_tp.items()):
        layers[tp], end = _fit(tp, samples_of_tp, depth)
        if end is not None:
            ends[tp] = end
    return layers, ends


def _fit(tp: int, samples: Sequence[Sample], depth: Callable[[int], float]) -> tuple[Cost, Cost | None]:
    if len({s.lengths for s in samples}) < 3:
        raise HotspaConfigError(
            f"tp{tp} was measured with {len({s.lengths for s in samples})} different packs",
            why="a quadratic has three coefficients",
            fix="measure at least three lengths for each tp",
        )
    rows = []
    for s in samples:
        squares, tokens = float(sum(length * length for length in s.lengths)), float(sum(s.lengths))
        end = [tokens, 1.0] if s.with_ends else [0.0, 0.0]
        deep = depth(s.num_layers)
        rows.append([deep * squares, deep * tokens, deep, *end])
    has_ends = any(s.with_ends for s in samples)
    separable = has_ends and len({(s.num_layers, s.with_ends) for s in samples}) > 1
    x = fit_relative([row if separable else row[:3] for row in rows], [s.seconds for s in samples])
    return Cost(*x[:3]), Cost(0.0, *x[3:]) if separable else None
