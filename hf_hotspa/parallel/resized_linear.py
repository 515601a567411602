"""Matrix products that a slow rank computes in part: the paper's ZERO-resizing (arXiv 2401.11469, section III-A). Not exact.

A column is an index of the contraction, of input and weight alike. The columns P are left out of all three products of a
linear; outside of it every tensor has its usual size, so the gradients of columns P are imputed, and nothing of the weight is
forgotten. The lineage, which columns were kept, comes from forward to backward with the call; the kept part of the input is not
saved but taken again.
Shapes: T tokens, L columns, K kept columns, N local outputs.
"""

from typing import Any

import torch
from torch import Tensor

from hf_hotspa.parallel.waiting import PRODUCTS

IMPUTATIONS = ("zero", "average")
"""What the gradient of a column is that was left out: 0, or the mean of those that were not."""


class ResizedProduct(torch.autograd.Function):
    """`x[:, K] @ w[:, K].T`. x [T, L], w [N, L]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, kept: Tensor, imputation: str) -> Tensor:
        """`kept`: int64 [K], ascending. `imputation`: one of `IMPUTATIONS`."""
        ctx.save_for_backward(x, w, kept)
        ctx.imputation = imputation
        return PRODUCTS.of(x.index_select(1, kept), w.index_select(1, kept).t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w, kept = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = imputed(PRODUCTS.of(grad, w.index_select(1, kept)), kept, x.shape[1], ctx.imputation)
        if ctx.needs_input_grad[1]:
            dw = imputed(PRODUCTS.of(grad.t(), x.index_select(1, kept)), kept, w.shape[1], ctx.imputation)
        return dx, dw, None, None


def imputed(found: Tensor, kept: Tensor, columns: int, imputation: str) -> Tensor:
    """A gradient of usual size.

    Args:
        found: [rows, K], of the kept columns.
        kept: int64 [K].
        columns: L.
        imputation: One of `IMPUTATIONS`.

    Returns:
        [rows, L]; column `kept[n]` is column n of what was found.
    """
    whole = found.new_zeros(found.shape[0], columns)
    if imputation == "average":
        whole += found.mean(1, keepdim=True)
    return whole.index_copy_(1, kept, found)
