"""Matrix products that a slow rank computes in part: the paper's ZERO-resizing (arXiv 2401.11469, section III-A). Not exact.

A column is an index of the contraction, of input and weight alike. The columns P are left out of all three products of a
linear; outside of it every tensor has its usual size, so the gradients of columns P are imputed, and nothing of the weight is
forgotten. The lineage, which columns were kept, comes from forward to backward with the call; the kept part of the input is not
saved but taken again.
Shapes: T tokens, L columns, K kept columns, N local outputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_hotspa.parallel.waiting import PRODUCTS
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
class Resized:
    """How a product is resized.

    Args:
        kept: int64 [K], ascending: among the columns that this rank would compute itself.
        imputation: What the others' gradients are: one of `IMPUTATIONS`.
        memory: Of the weight's gradient, for "same".
    """

    kept: Tensor
    imputation: str = IMPUTATIONS[0]
    memory: GradientMemory | None = None

    def take(self, x: Tensor) -> Tensor:
        """[rows, K] of [rows, L]."""
        return x.index_select(1, self.kept)

    def of_input(self, product: Tensor, columns: int) -> Tensor:
        """[rows, L], the gradient of an input: see `imputed`."""
        return imputed(product, self.kept, columns, self.imputation)

    def of_weight(self, product: Tensor, columns: int) -> Tensor:
        """[N, L], the gradient of a weight."""
        before = self.memory.columns_left() if self.memory is not None else None
        return imputed(product, self.kept, columns, self.imputation, before)


class ResizedProduct(torch.autograd.Function):
    """`x[:, K] @ w[:, K].T`. x [T, L], w [N, L]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, resized: Resized) -> Tensor:
        """`resized`: which columns, and what becomes of the others."""
        ctx.save_for_backward(x, w)
        ctx.resized = resized
        return PRODUCTS.of(resized.take(x), resized.take(w).t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        resized = ctx.resized
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = resized.of_input(PRODUCTS.of(grad, resized.take(w)), x.shape[1])
        if ctx.needs_input_grad[1]:
            dw = resized.of_weight(PRODUCTS.of(grad.t(), resized.take(x)), w.shape[1])
            if resized.memory is not None:
                resized.memory.add(dw)
        return dx, dw, None


def imputed(product: Tensor, kept: Tensor, columns: int, imputation: str, before: Tensor | None = None) -> Tensor:
    """A gradient of usual size.

    Args:
        product: [rows, K], of the kept columns.
        kept: int64 [K].
        columns: L.
        imputation: One of `IMPUTATIONS`.
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
