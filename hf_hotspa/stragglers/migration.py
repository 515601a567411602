"""Who computes which of the columns that a slow task gives away (arXiv 2401.11469, section IV-A).

The tasks that give nothing away are helpers. They are renumbered from the slow task on, `r' = (r + e - r_slow) % e` in
the paper's words for one slow task, and take consecutive columns in that order, so that each knows its part without a
message. Where the columns do not divide evenly, the first helpers take one more.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Migration:
    """The columns of one product that one task gives away.

    Args:
        giver: The slow task.
        num_columns: L, the columns of its product.
        first: The first column that goes away; all behind it do, so that what stays and what goes are slices.
        parts: For each task `(start, stop)` among the columns of the product; empty where it takes none.
    """

    giver: int
    num_columns: int
    first: int
    parts: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How many columns go away."""
        return self.num_columns - self.first


def renumbered(tasks: int, giver: int, givers: Collection[int] = ()) -> tuple[int, ...]:
    """The helpers of a slow task in their new order: r' = 1, 2, ..."""
    around = ((giver + i) % tasks for i in range(1, tasks))
    return tuple(task for task in around if task not in givers)


def migrate(tasks: int, giver: int, num_columns: int, share: float, givers: Collection[int] = ()) -> Migration | None:
    """Divides the last columns of a slow task over its helpers.

    Args:
        tasks: e.
        giver: The slow task.
        num_columns: L of its product.
        share: gamma, of its columns; one at least stays.
        givers: All tasks that give columns away.

    Returns:
        None where nothing goes.
    """
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
