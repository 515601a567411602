"""Which columns resized products leave out, and who computes the columns that slow tasks hand over.

Resizing: the paper's Rd, Pri and PriDiff (arXiv 2401.11469, section III-B). A column is one index of a product's
contraction, of both input and weight. Per layer and column the mean of `|w(t) - w(t-1)|` over the rows is kept, between
the ends of two epochs; columns that vary least are left out first. Columns that were left out keep their old value:
without a gradient they would vary least forever. Follows algorithm 1 except for one slip: its list `pri_list` is the
*kept* columns (its lines 12-13; its text calls them yet to be pruned), and old values are put back before sorting
(lines 5-8).

Migration (section IV-A): tasks that hand nothing over are helpers. They are renumbered from the slow task on,
`r' = (r + e - r_slow) % e` in the paper's notation for one slow task, and take consecutive columns in that order, so
each knows its part without a message. If the columns do not divide evenly, the first helpers take one more.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

IMPUTATIONS = ("zero", "same", "average")
"""Gradients of columns that were not computed: 0, the previous iteration's, or the mean of the others."""

CHOICES = ("rd", "pri", "pridiffr", "pridiffe")
"""Columns at random; by variation; by variation with a ratio per layer (from equation 1, or from 1/2)."""

EMPIRICAL_RATIO = 0.5
THETA_OF_ITERATION, ALPHA = 1e-3, 0.8


@dataclass(frozen=True)
class Resizing:
    """How a run resizes products."""

    columns: str = CHOICES[0]  # which columns to leave out
    imputation: str = IMPUTATIONS[0]  # their gradients
    # mini-batches between two measurements of the weights' variation: the paper's epoch; 0 for a pass over the data
    period: int = 0


def kept_variation(
    new: Sequence[float], old: Sequence[float] | None, kept: Collection[int] | None
) -> tuple[float, ...]:
    """Statistics of a layer's columns after an epoch (lines 6-8): new for columns that were kept, and so trained (None:
    all), else the old value; the first epoch has none."""
    if old is None or kept is None:
        return tuple(new)
    trained = frozenset(kept)
    return tuple(value if i in trained else old[i] for i, value in enumerate(new))


def layer_ratio(variation: Sequence[float], gamma: float, num_iterations: int) -> float:
    """PriDiff's ratio of one layer (lines 9-11): the share of columns that vary by less than 1e-3 per iteration, but at
    least `ALPHA * gamma`, with gamma of equation 1 (PriDiffR) or 1/2 (PriDiffE)."""
    theta = num_iterations * THETA_OF_ITERATION
    moving = sum(value > theta for value in variation)
    return max(1.0 - moving / len(variation), ALPHA * gamma)


def num_kept(num_columns: int, ratio: float) -> int:
    """Columns to compute, at least one."""
    return max(1, num_columns - round(num_columns * ratio))


def most_varying(variation: Sequence[float], count: int) -> tuple[int, ...]:
    """The columns that vary most (lines 5, 12-14), ascending; the first among equal ones."""
    order = sorted(range(len(variation)), key=lambda i: (-variation[i], i))
    return tuple(sorted(order[:count]))


def random_columns(num_columns: int, count: int, seed: str) -> tuple[int, ...]:
    """`count` random columns, ascending; the same for the same seed on every machine."""
    return tuple(sorted(random.Random(seed).sample(range(num_columns), count)))


@dataclass(frozen=True)
class LayerColumns:
    """The lineage of one product of L columns: `kept`, K, are computed; ascending."""

    num_columns: int
    kept: tuple[int, ...]

    @property
    def pruned(self) -> tuple[int, ...]:
        """P: the columns that are left out, ascending."""
        kept = frozenset(self.kept)
        return tuple(i for i in range(self.num_columns) if i not in kept)


def choose_columns(
    choice: str, num_columns: int, gamma: float, *, variation: Sequence[float] | None, num_iterations: int, seed: str
) -> LayerColumns:
    """Algorithm 1 for one layer. `gamma` is equation 1 of this rank; 0 keeps all columns. Without the layer's `variation`,
    in the first epoch (of `num_iterations`), columns are drawn at random."""
    if gamma <= 0.0:
        return LayerColumns(num_columns, tuple(range(num_columns)))
    ratio = EMPIRICAL_RATIO if choice == "pridiffe" else gamma
    if choice == "rd" or variation is None:
        return LayerColumns(num_columns, random_columns(num_columns, num_kept(num_columns, ratio), seed))
    if choice != "pri":
        ratio = layer_ratio(variation, ratio, num_iterations)
    return LayerColumns(num_columns, most_varying(variation, num_kept(num_columns, ratio)))


@dataclass(frozen=True)
class Migration:
    """The columns of one product that a task, the giver, hands over: all from `first` on, so that both parts are
    slices. `parts` has each task's `(start, stop)`, empty if it takes none."""

    giver: int
    num_columns: int
    first: int
    parts: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return self.num_columns - self.first


def renumbered(tasks: int, giver: int, givers: Collection[int] = ()) -> tuple[int, ...]:
    """A slow task's helpers in their new order: r' = 1, 2, ..."""
    around = ((giver + i) % tasks for i in range(1, tasks))
    return tuple(task for task in around if task not in givers)


def migrate(tasks: int, giver: int, num_columns: int, share: float, givers: Collection[int] = ()) -> Migration | None:
    """Divides the last columns of a slow task, one of the `givers` among e `tasks`, over its helpers: a share gamma of the L
    columns of its product, of which at least one stays. None if nothing is handed over."""
    helpers = renumbered(tasks, giver, givers)
    count = min(round(num_columns * share), num_columns - 1)
    if count <= 0 or not helpers:
        return None
    each, more = divmod(count, len(helpers))
    parts = [(num_columns, num_columns)] * tasks
    at = num_columns - count
    for place, helper in enumerate(helpers):
        stop = at + each + (place < more)
        parts[helper] = (at, stop)
        at = stop
    return Migration(giver, num_columns, num_columns - count, tuple(parts))
