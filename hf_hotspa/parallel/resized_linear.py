"""Matrix products that a slow rank computes in part: the paper's ZERO-resizing (arXiv 2401.11469, section III-A). Not exact.

A column is an index of the contraction, of input and weight alike. The columns P are left out of all three products of a
linear; outside of it every tensor has its usual size, so the gradients of columns P are imputed, and nothing of the weight is
forgotten. The lineage, which columns were kept, comes from forward to backward with the call; the kept part of the input is not
saved but taken again.
Shapes: T tokens, L columns, K kept columns, N local outputs.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from hf_hotspa.stragglers.columns import IMPUTATIONS


class GradientMemory:
    """What the gradient of a weight was in the mini-batch before: the paper's imputation "same".

    A mini-batch has many packs, whose gradients are added up; so the columns that are left out have theirs in the first
    product, and nothing in the others. Of the input there is no memory: its rows are other tokens each time.

    Attributes:
        now: [N, L], the sum of this mini-batch so far; None before its first product.
        before: The sum of the one before.
    """

    def __init__(self) -> None:
        self.now: Tensor | None = None
        self.before: Tensor | None = None

    def begin_step(self) -> None:
        """A mini-batch begins."""
        if self.now is not None:
            self.before, self.now = self.now, None

    def add(self, gradient: Tensor) -> None:
        """Takes the gradient of a product, imputed where it was not computed."""
        self.now = gradient.detach().clone() if self.now is None else self.now.add_(gradient)

    def columns_left(self) -> Tensor | None:
        """What columns that are left out have in the next product; None for zeros."""
        return self.before if self.now is None else None


@dataclass(frozen=True)
class OwnColumns:
    """The columns of a product that this rank computes: the first ones, or some of these.

    Args:
        count: How many columns it does not give away: the first ones.
        columns: L.
        kept: int64 [K], ascending: of the first ones those that are not left out; None for all.
        imputation: What the gradients of those left out are: one of `IMPUTATIONS`.
        memory: Of the weight's gradient, for "same".
    """

    count: int
    columns: int
    kept: Tensor | None = None
    imputation: str = IMPUTATIONS[0]
    memory: GradientMemory | None = None

    def take(self, x: Tensor) -> Tensor:
        """Of [rows, L] what is computed here."""
        return x[:, : self.count] if self.kept is None else x.index_select(1, self.kept)

    def of_input(self, product: Tensor) -> Tensor:
        """[rows, L]: the gradient of an input, imputed where columns were left out, and 0 where they were given away."""
        return self._whole(product, None)

    def of_weight(self, product: Tensor) -> Tensor:
        """[N, L]: the same of a weight."""
        return self._whole(product, None if self.memory is None else self.memory.columns_left())

    def _whole(self, product: Tensor, before: Tensor | None) -> Tensor:
        if self.kept is not None:
            product = imputed(product, self.kept, self.count, self.imputation, before)
        return (
            product
            if product.shape[1] == self.columns
            else functional.pad(product, (0, self.columns - product.shape[1]))
        )


def imputed(product: Tensor, kept: Tensor, columns: int, imputation: str, before: Tensor | None = None) -> Tensor:
    """A gradient of usual size.

    Args:
        product: [rows, K], of the kept columns.
        kept: int64 [K].
        columns: L.
        before: [rows, at least L], the gradient of the iteration before, for "same"; None for zeros.

    Returns:
        [rows, L]; column `kept[n]` is column n of `product`.
    """
    whole = product.new_zeros(product.shape[0], columns)
    if imputation == "average":
        whole += product.mean(1, keepdim=True)
    elif imputation == "same" and before is not None:
        whole.copy_(before[:, :columns])
    return whole.index_copy_(1, kept, product)
