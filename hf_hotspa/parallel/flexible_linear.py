"""Matrix products of which a slow rank gives columns away: lightweight migration in the linears that tp cuts.

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
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.parallel.adapters import base_layer
from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.resized_linear import IMPUTATIONS, ResizedProduct
from hf_hotspa.parallel.tensor_parallel import COLWISE, ROWWISE
from hf_hotspa.parallel.waiting import CLOCK, PRODUCTS
from hf_hotspa.stragglers.columns import LayerColumns, choose_columns
from hf_hotspa.stragglers.migration import Migration, migrate


class Exchange(Enum):
    """How columns get to the helpers and results back."""

    BROADCAST = "broadcast and reduce, merged into the all-reduce that is there"
    UNMERGED = "broadcast and reduce, each a collective of its own"
    SCATTER = "scatter and gather"


class FlexibleWork:
    """What the ranks of a tensor-parallel group give away, for all its linears, and what this one leaves out.

    Args:
        tensor_group: The group.

    Attributes:
        ranks: The global ranks of the group, by position.
        shares: For each position in the group the share of its columns that it gives away; the same on all ranks.
        exchange: How; the same on all ranks.
        resized: The share of its columns that this rank leaves out, computed by nobody.
        imputation: What their gradients are: one of `IMPUTATIONS`.
        lineage: Which columns each product keeps, by name of the linear; of this mini-batch.
    """

    def __init__(self, tensor_group: TensorGroup) -> None:
        self.group, self.size = tensor_group.group, tensor_group.size
        self.ranks = tuple(dist.get_process_group_ranks(tensor_group.group))
        self.position = tensor_group.order[tensor_group.shard]
        self.shares: tuple[float, ...] = (0.0,) * self.size
        self.resized, self.imputation, self.seed = 0.0, IMPUTATIONS[0], ""
        self.lineage: dict[str, LayerColumns] = {}
        self.exchange = Exchange.BROADCAST

    def give(self, shares: tuple[float, ...]) -> None:
        """From the next forward on these shares of columns are given away."""
        assert len(shares) == self.size
        self.shares = shares

    def begin_step(self, step: int) -> None:
        """Columns that are left out are drawn anew for each mini-batch."""
        self.lineage, self.seed = {}, f"{step} {self.ranks[self.position]}"

    def kept(self, name: str, columns: int) -> LayerColumns:
        """The columns that this rank computes of a product; at random (the paper's ZERO-Rd)."""
        if name not in self.lineage:
            seed = f"{name} {self.seed}"
            drawn = choose_columns("rd", columns, self.resized, variation=None, num_iterations=1, seed=seed)
            self.lineage[name] = drawn
        return self.lineage[name]

    def migrations(self, columns: tuple[int, ...]) -> list[Migration]:
        """What is given away of a product, by giver.

        Args:
            columns: Of the product of each position.
        """
        givers = [position for position, share in enumerate(self.shares) if share > 0.0]
        found = [migrate(self.size, giver, columns[giver], self.shares[giver], givers) for giver in givers]
        return [migration for migration in found if migration is not None]


@dataclass(frozen=True)
class _Part:
    """One migration as this rank sees it."""

    migration: Migration
    work: FlexibleWork

    @property
    def gives(self) -> bool:
        return self.migration.giver == self.work.position

    @property
    def span(self) -> slice:
        """This helper's columns among those of the product; empty for a rank that takes none."""
        return slice(*self.migration.parts[self.work.position])

    @property
    def own(self) -> slice:
        """The same among those that are given away."""
        first = self.migration.first
        return slice(self.span.start - first, self.span.stop - first)

    @property
    def _scatters(self) -> bool:
        return self.work.exchange is Exchange.SCATTER

    def _at(self) -> dict[str, Any]:
        return {"group": self.work.group, "group_src": self.migration.giver}

    def whole(self, tensor: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """The giver's tensor, on every rank."""
        found = like.new_empty(shape) if tensor is None else tensor.contiguous()
        with CLOCK.waiting:
            if self._scatters:
                copies = [found] * self.work.size if self.gives else None
                dist.scatter(found.clone() if self.gives else found, copies, **self._at())
            else:
                dist.broadcast(found, **self._at())
        return found

    def columns(self, tensor: Tensor | None, rows: int, like: Tensor) -> Tensor:
        """This helper's columns of what the giver gives.

        Args:
            tensor: [rows, C] on the giver, None elsewhere.
        """
        if not self._scatters:
            return self.whole(tensor, (rows, self.migration.count), like)[:, self.own]
        widest = self._widest()
        mine, parts = like.new_empty(rows, widest), None
        if tensor is not None:
            first = self.migration.first
            spans = [tensor[:, start - first : stop - first] for start, stop in self.migration.parts]
            parts = [functional.pad(span, (0, widest - span.shape[1])).contiguous() for span in spans]
        with CLOCK.waiting:
            dist.scatter(mine, parts, **self._at())
        return mine[:, : self.own.stop - self.own.start]

    def _widest(self) -> int:
        return max(stop - start for start, stop in self.migration.parts)

    def sum_to_giver(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on the giver; elsewhere nothing that means anything."""
        tensor = tensor.contiguous()
        if not self._scatters:
            with CLOCK.waiting:
                dist.reduce(tensor, group=self.work.group, group_dst=self.migration.giver)
            return tensor
        found = self._gathered(tensor)
        return torch.stack(found).sum(0) if found is not None else tensor

    def _gathered(self, tensor: Tensor) -> list[Tensor] | None:
        found = [torch.empty_like(tensor) for _ in range(self.work.size)] if self.gives else None
        with CLOCK.waiting:
            dist.gather(tensor, found, group=self.work.group, group_dst=self.migration.giver)
        return found

    def collect(self, tensor: Tensor | None, rows: int, like: Tensor) -> Tensor:
        """What the helpers computed for their columns, side by side on the giver.

        Args:
            tensor: [rows, c] of a helper; None on the giver.

        Returns:
            [rows, C] on the giver.
        """
        if self._scatters:
            mine = like.new_zeros(rows, self._widest())
            if tensor is not None:
                mine[:, : tensor.shape[1]] = tensor
            found = self._gathered(mine)
            if found is None:
                return mine
            sizes = [stop - start for start, stop in self.migration.parts]
            by_column = sorted(range(len(sizes)), key=lambda i: self.migration.parts[i])
            return torch.cat([found[i][:, : sizes[i]] for i in by_column], 1)
        mine = like.new_zeros(rows, self.migration.count)
        if tensor is not None:
            mine[:, self.own] = tensor
        return self.sum_to_giver(mine)


class _WholeProduct(torch.autograd.Function):
    """A linear of which nothing is given away: the operations of `functional.linear` and its backward, timed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return PRODUCTS.linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad
        dx = PRODUCTS.of(grad, w) if needs_x else None
        return dx, _weight_gradient(grad, x, w) if needs_w else None, grad.sum(0) if needs_bias else None


def _weight_gradient(grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """`grad.T @ x` in the order of the weight's storage, as autograd does it."""
    return PRODUCTS.of(x.t(), grad).t() if w.stride(0) == 1 and w.shape[0] > 1 else PRODUCTS.of(grad.t(), x)


class _ColumnProduct(torch.autograd.Function):
    """`x @ w.T` of a column-parallel linear. x [T, L] on all ranks, w [N, L]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, parts: list[_Part], outputs: tuple[int, ...]) -> Tensor:
        """`outputs`: N of each position."""
        own = _own_columns(parts, x.shape[1])
        taken = [
            part.columns(w[:, part.migration.first :] if part.gives else None, outputs[part.migration.giver], w)
            for part in parts
        ]
        y = PRODUCTS.of(x[:, :own], w[:, :own].t())
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
        dx = _widened(PRODUCTS.of(grad, w[:, :own]), x.shape[1]) if needs_x else None
        dw = _widened(PRODUCTS.of(grad.t(), x[:, :own]), x.shape[1]) if needs_w else None
        for part, given, columns in zip(ctx.parts, grads, taken, strict=True):
            if dx is not None:
                mine = None if part.gives else PRODUCTS.of(given, columns)
                _merge(part, dx, mine)
            if dw is not None:
                mine = None if part.gives else PRODUCTS.of(given.t(), x[:, part.span])
                found = part.collect(mine, ctx.outputs[part.migration.giver], w)
                if part.gives:
                    dw[:, part.migration.first :] = found
        return dx, dw, None, None


def _merge(part: _Part, dx: Tensor, mine: Tensor | None) -> None:
    """Brings a helper's [T, c] into the gradient of X: by its own one, which is summed over the group, or by itself."""
    if part.work.exchange is Exchange.BROADCAST:
        if mine is not None:
            dx[:, part.span] += mine
        return
    found = part.collect(mine, dx.shape[0], dx)
    if part.gives:
        dx[:, part.migration.first :] = found


class _RowProduct(torch.autograd.Function):
    """This rank's part of the sum of a row-parallel linear: `x @ w.T`. x [T, L], w [N, L], each rank its own L."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, parts: list[_Part]) -> Tensor:
        own = _own_columns(parts, x.shape[1])
        taken = []
        for part in parts:
            first = part.migration.first
            taken.append(part.columns(x[:, first:] if part.gives else None, x.shape[0], x).contiguous())
            taken.append(part.columns(w[:, first:] if part.gives else None, w.shape[0], w).contiguous())
        y = PRODUCTS.of(x[:, :own], w[:, :own].t())
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
        dx = _widened(PRODUCTS.of(grad, w[:, :own]), x.shape[1]) if needs_x else None
        dw = _widened(PRODUCTS.of(grad.t(), x[:, :own]), x.shape[1]) if needs_w else None
        for part, columns, weights in zip(ctx.parts, taken[::2], taken[1::2], strict=True):
            mine = []  # [T + N, c]: what the giver needs of both, in one message
            if dx is not None:
                mine.append(x.new_zeros(0, 0) if part.gives else PRODUCTS.of(grad, weights))
            if dw is not None:
                mine.append(x.new_zeros(0, 0) if part.gives else PRODUCTS.of(grad.t(), columns))
            rows = tokens * needs_x + w.shape[0] * needs_w
            found = part.collect(None if part.gives else torch.cat(mine), rows, x)
            if part.gives:
                if dx is not None:
                    dx[:, part.migration.first :] = found[:tokens]
                if dw is not None:
                    dw[:, part.migration.first :] = found[rows - w.shape[0] :]
        return dx, dw, None


def _own_columns(parts: list[_Part], columns: int) -> int:
    """How many columns this rank keeps: the first ones."""
    return next((part.migration.first for part in parts if part.gives), columns)


def _widened(x: Tensor, columns: int) -> Tensor:
    return x if x.shape[1] == columns else functional.pad(x, (0, columns - x.shape[1]))


class FlexibleLinear:
    """The product of one linear without its bias.

    Args:
        name: Of the layer.
        linear: The layer; its weight is this rank's shard.
        work: What the group's ranks give away.
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

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., L] to [..., N], with a bias where it has been given."""
        weight = self._linear.weight
        if not torch.is_grad_enabled():
            return functional.linear(x, weight, bias)
        parts = [_Part(migration, self._work) for migration in self._work.migrations(self._columns)]
        rows = x.reshape(-1, x.shape[-1])
        added = bias
        if self._work.resized > 0.0:
            columns = self._work.kept(self._name, rows.shape[1])
            kept = torch.tensor(columns.kept, device=rows.device)
            y = ResizedProduct.apply(rows, weight, kept, self._work.imputation)
        elif not parts:
            added = None
            y = _WholeProduct.apply(rows, weight, bias)
        elif self._outputs is None:
            y = _RowProduct.apply(rows, weight, parts)
        else:
            y = _ColumnProduct.apply(rows, weight, parts, self._outputs)
        whole: Tensor = y.view(*x.shape[:-1], y.shape[-1])
        return whole if added is None else whole + added


def _with_bias(x: Tensor, *, flexible: FlexibleLinear, linear: nn.Linear) -> Tensor:
    return flexible(x, linear.bias)


def make_flexible(
    modules: Mapping[str, nn.Module],
    styles: Mapping[str, str],
    widths: Mapping[str, tuple[int, ...]],
    tensor_group: TensorGroup,
) -> FlexibleWork:
    """Gives the linears of a group products that can migrate. Before their forwards are wrapped for tp.

    Args:
        modules: The replica's modules by name.
        styles: Tensor-parallel style by module name; others than column- and row-parallel are left as they are.
        widths: By name, the size of every shard along the dim that is cut.
        tensor_group: The group and this rank's shard.
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
            flexible = FlexibleLinear(name, linear, work, (linear.in_features,) * tensor_group.size, cut)
            linear.forward = partial(_with_bias, flexible=flexible, linear=linear)
    return work
