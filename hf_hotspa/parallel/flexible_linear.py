"""Matrix products of which a slow rank gives columns away: lightweight migration in the linears that tp cuts.

A rank may also leave columns out among those that it keeps (`resized_linear`): the paper's SEMI-migration does both.

Source: Wang et al., arXiv 2401.11469, section IV-A. A column is an index of the contraction: of the input and the weight
of a linear alike. A rank that is slow (a giver) leaves its last columns to the others of its group (helpers), who are
numbered from it on (`stragglers/migration.py`), so that nobody sends who takes what. Exact: every product is computed once.

* Column-parallel, `Y = X W^T`, X on all ranks. Forward: the giver broadcasts the weights of its columns, and the helpers'
  parts of Y are summed to it. Backward: it broadcasts the gradient G of Y. A helper adds `G W[:, c]` to the columns c of its
  *own* gradient of X, which the existing all-reduce sums over the group anyway (reduce merging): one collective less. The
  gradient of the weights' columns is collected by the giver.
* Row-parallel, each rank its own columns of X and W. Forward: the giver broadcasts both, and a helper adds its part to its
  own partial Y: merged with the existing all-reduce. Backward: G is everywhere; the gradients of the columns of X and W
  are collected by the giver.

To compare, `Exchange.SCATTER` scatters and gathers from the giver alone, and merges nothing. In evaluations, and where no rank
gives anything, products are plain; the gradients are then those of `torch.nn.functional.linear`, bit for bit.
Shapes: T tokens, L columns, N local outputs, C columns given away, c those of one helper.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.parallel.adapters import base_layer
from hf_hotspa.parallel.flexible_work import Exchange, FlexibleWork, Part, Product
from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.resized_linear import OwnColumns
from hf_hotspa.parallel.tensor_parallel import COLWISE, ROWWISE
from hf_hotspa.parallel.waiting import PRODUCTS


class _WholeProduct(torch.autograd.Function):
    """A linear of which nothing is given away: the operations of `functional.linear` and its backward, timed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, own: OwnColumns) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.own = own
        return PRODUCTS.linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx = PRODUCTS.of(grad, w) if needs_x else None
        dw = _weight_gradient(grad, x, w) if needs_w else None
        _remember(ctx.own, dw)
        return dx, dw, grad.sum(0) if needs_bias else None, None


def _weight_gradient(grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """`grad.T @ x` in the order of the weight's storage, as autograd does it."""
    return PRODUCTS.of(x.t(), grad).t() if w.stride(0) == 1 and w.shape[0] > 1 else PRODUCTS.of(grad.t(), x)


def _remember(own: OwnColumns, dw: Tensor | None) -> None:
    if dw is not None and own.memory is not None:
        own.memory.add(dw)


class _ColumnProduct(torch.autograd.Function):
    """`x @ w.T` of a column-parallel linear. x [T, L] on all ranks, w [N, L]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, parts: list[Part], own: OwnColumns, outputs: tuple[int, ...]) -> Tensor:
        """`outputs`: N of each position."""
        taken = [
            part.columns(w[:, part.migration.first :] if part.gives else None, outputs[part.migration.giver], w)
            for part in parts
        ]
        y = PRODUCTS.of(own.take(x), own.take(w).t())
        for part, columns in zip(parts, taken, strict=True):
            if part.gives:
                y = y + part.sum_to_giver(torch.zeros_like(y))
            else:
                part.sum_to_giver(PRODUCTS.of(x[:, part.span], columns.t()))
        ctx.save_for_backward(x, w, *[columns.contiguous() for columns in taken])
        ctx.parts, ctx.outputs, ctx.own = parts, outputs, own
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w, *taken = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad[:2]
        own, tokens = ctx.own, x.shape[0]
        grad = grad.contiguous()
        grads = [
            part.whole(grad if part.gives else None, (tokens, ctx.outputs[part.migration.giver]), grad)
            for part in ctx.parts
        ]
        dx = own.of_input(PRODUCTS.of(grad, own.take(w))) if needs_x else None
        dw = own.of_weight(PRODUCTS.of(grad.t(), own.take(x))) if needs_w else None
        for part, given, columns in zip(ctx.parts, grads, taken, strict=True):
            if dx is not None:
                mine = None if part.gives else PRODUCTS.of(given, columns)
                _merge(part, dx, mine)
            if dw is not None:
                mine = None if part.gives else PRODUCTS.of(given.t(), x[:, part.span])
                collected = part.collect(mine, ctx.outputs[part.migration.giver], w)
                if part.gives:
                    dw[:, part.migration.first :] = collected
        _remember(own, dw)
        return dx, dw, None, None, None


def _merge(part: Part, dx: Tensor, mine: Tensor | None) -> None:
    """Brings a helper's [T, c] into the gradient of X: by its own one, which is summed over the group, or by itself."""
    if part.work.exchange is Exchange.BROADCAST:
        if mine is not None:
            dx[:, part.span] += mine
        return
    collected = part.collect(mine, dx.shape[0], dx)
    if part.gives:
        dx[:, part.migration.first :] = collected


class RowProduct(torch.autograd.Function):
    """This rank's part of the sum of a row-parallel linear: `x @ w.T`. x [T, L], w [N, L], each rank its own L.

    Where nothing is given away, and columns are left out alone, it is the product of any linear.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, parts: list[Part], own: OwnColumns) -> Tensor:
        taken = []
        for part in parts:
            first = part.migration.first
            taken.append(part.columns(x[:, first:] if part.gives else None, x.shape[0], x).contiguous())
            taken.append(part.columns(w[:, first:] if part.gives else None, w.shape[0], w).contiguous())
        y = PRODUCTS.of(own.take(x), own.take(w).t())
        for part, columns, weights in zip(parts, taken[::2], taken[1::2], strict=True):
            merged = part.work.exchange is Exchange.BROADCAST
            mine = torch.zeros_like(y) if part.gives else PRODUCTS.of(columns, weights.t())
            if not merged:
                mine = part.sum_to_giver(mine)
            if merged != part.gives:
                y = y + mine
        ctx.save_for_backward(x, w, *taken)
        ctx.parts, ctx.own = parts, own
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w, *taken = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad[:2]
        own, tokens = ctx.own, x.shape[0]
        dx = own.of_input(PRODUCTS.of(grad, own.take(w))) if needs_x else None
        dw = own.of_weight(PRODUCTS.of(grad.t(), own.take(x))) if needs_w else None
        for part, columns, weights in zip(ctx.parts, taken[::2], taken[1::2], strict=True):
            mine = []  # [T + N, c]: what the giver needs of both, in one message
            if dx is not None:
                mine.append(x.new_zeros(0, 0) if part.gives else PRODUCTS.of(grad, weights))
            if dw is not None:
                mine.append(x.new_zeros(0, 0) if part.gives else PRODUCTS.of(grad.t(), columns))
            rows = tokens * needs_x + w.shape[0] * needs_w
            collected = part.collect(None if part.gives else torch.cat(mine), rows, x)
            if part.gives:
                if dx is not None:
                    dx[:, part.migration.first :] = collected[:tokens]
                if dw is not None:
                    dw[:, part.migration.first :] = collected[rows - w.shape[0] :]
        _remember(own, dw)
        return dx, dw, None, None


class FlexibleLinear:
    """The product of one linear without its bias.

    Args:
        linear: The layer; its weight is this rank's shard.
        work: What the group's ranks give away and leave out.
        columns: Columns of the product on each position.
        outputs: Its outputs on each position, where they differ: column-parallel; None for row-parallel.
    """

    def __init__(
        self,
        name: str,
        linear: nn.Linear,
        work: FlexibleWork,
        columns: tuple[int, ...],
        outputs: tuple[int, ...] | None,
    ) -> None:
        self._name, self._linear, self._work, self._columns, self._outputs = name, linear, work, columns, outputs
        work.products[name] = Product(
            columns, outputs if outputs is not None else (linear.out_features,) * work.size, outputs is None
        )

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., L] to [..., N], with a bias where it has been given."""
        weight = self._linear.weight
        if not torch.is_grad_enabled():
            return functional.linear(x, weight, bias)
        parts = [Part(migration, self._work) for migration in self._work.migrations(self._columns)]
        rows = x.reshape(-1, x.shape[-1])
        own = self._work.own_columns(self._name, rows, weight.shape[0], parts)
        added = bias
        if parts and self._outputs is not None:
            y = _ColumnProduct.apply(rows, weight, parts, own, self._outputs)
        elif parts or own.kept is not None:
            y = RowProduct.apply(rows, weight, parts, own)
        else:
            added = None
            y = _WholeProduct.apply(rows, weight, bias, own)
        whole: Tensor = y.view(*x.shape[:-1], y.shape[-1])
        return whole if added is None else whole + added

    def with_bias(self, x: Tensor) -> Tensor:
        """The linear's own forward."""
        return self(x, self._linear.bias)


def make_flexible(
    modules: Mapping[str, nn.Module],
    styles: Mapping[str, str],
    widths: Mapping[str, tuple[int, ...]],
    tensor_group: TensorGroup,
) -> FlexibleWork:
    """Gives the column- and row-parallel linears of a group products that can migrate. Before their forwards are wrapped for tp.

    Arguments as for `apply_tensor_parallel`.
    """
    work = FlexibleWork(tensor_group)
    for name, style in styles.items():
        module = modules.get(name) if style in (COLWISE, ROWWISE) else None
        linear = base_layer(module) if module is not None else None
        if not isinstance(linear, nn.Linear):
            continue
        by_position = [0] * tensor_group.size
        for shard, position in enumerate(tensor_group.order):
            by_position[position] = widths[name][shard]
        cut = tuple(by_position)
        if style == ROWWISE:
            linear.hotspa_product = FlexibleLinear(name, linear, work, cut, None)  # type: ignore[assignment]
        else:
            linear.forward = FlexibleLinear(
                name, linear, work, (linear.in_features,) * tensor_group.size, cut
            ).with_bias
    return work
