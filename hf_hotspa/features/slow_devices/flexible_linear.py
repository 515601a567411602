"""Matrix products of linears cut by tp, from which a slow rank offloads or leaves out columns.

Source: Wang et al., arXiv 2401.11469. A column is an index of the contraction, of the input and the weight of a linear.

Migration (section IV-A) is exact: every product is computed once. A slow rank (the giver) offloads its last columns to the
others of its group (helpers), numbered from it on (`features/slow_devices/columns.py`), so that no rank has to send the assignment.

* Column-parallel, `Y = X W^T`, X on all ranks. Forward: the giver broadcasts the weights of its columns, and the helpers'
  parts of Y are summed to it. Backward: it broadcasts the gradient G of Y. A helper adds `G W[:, c]` to the columns c of its
  *own* gradient of X, which the existing all-reduce sums over the group anyway (reduce merging): one collective less. The
  giver collects the gradient of the weights' columns.
* Row-parallel, each rank its own columns of X and W. Forward: the giver broadcasts both, and a helper adds its part to its
  own partial Y: merged with the existing all-reduce. Backward: G is on all ranks; the giver collects the gradients of the
  columns of X and W.

For comparison, `Exchange.SCATTER` scatters and gathers from the giver alone, and merges nothing.

ZERO-resizing (section III-A) is not exact: a resized rank leaves out some of the columns that it keeps, chosen by the paper's
Rd, Pri or PriDiff (`features/slow_devices/columns.py`), in all three products of a linear. Outside the linear every tensor has its usual
size, so the gradients of these columns are imputed, and the weight stays complete. The forward passes its lineage (the columns
it kept) to the backward, which selects the kept part of the input again instead of saving it.

A rank may do both (the paper's SEMI-migration). In evaluations, and if no rank does either, products are plain, with the
gradients of `torch.nn.functional.linear`, bit for bit.

Shapes: T tokens, L columns, N local outputs, C offloaded columns, c columns of one helper, K kept columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.features.slow_devices.columns import (
    IMPUTATIONS,
    LayerColumns,
    Migration,
    Resizing,
    choose_columns,
    migrate,
)
from hf_hotspa.model.replica import Attachment, Replica
from hf_hotspa.parallel.collectives import CLOCK, WaitClock
from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.tensor_parallel import COLWISE, ROWWISE
from hf_hotspa.parallel.wrapped_model import base_layer
from hf_hotspa.seam import settings
from hf_hotspa.strategy import Strategy


class ProductClock(WaitClock):
    """Counts the seconds of matrix products made through it."""

    def of(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b` of two matrices."""
        with self.waiting:
            return a @ b

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """`torch.nn.functional.linear`, bit for bit."""
        with self.waiting:
            return functional.linear(x, w, bias)


PRODUCTS = ProductClock()  # counts the matrix products that can migrate or be resized, in this process


class GradientMemory:
    """A weight's gradient in the previous mini-batch, for the paper's imputation "same".

    A mini-batch has many packs, whose gradients are summed; so left-out columns get theirs in the first product only. The
    input has no memory: its rows are other tokens each time.
    """

    def __init__(self) -> None:
        self.now: Tensor | None = None  # [N, L], the sum of this mini-batch so far; None before its first product
        self.before: Tensor | None = None  # the sum of the previous mini-batch

    def begin_step(self) -> None:
        if self.now is not None:
            self.before, self.now = self.now, None

    def add(self, gradient: Tensor) -> None:
        """Adds the gradient of a product, with left-out columns imputed."""
        self.now = gradient.detach().clone() if self.now is None else self.now.add_(gradient)

    def columns_left(self) -> Tensor | None:
        """The gradient of left-out columns in the next product; None for zeros."""
        return self.before if self.now is None else None


@dataclass(frozen=True)
class OwnColumns:
    """The columns of a product that this rank computes."""

    count: int  # how many columns it does not offload: the first ones
    columns: int  # L
    kept: Tensor | None = None  # int64 [K], ascending: the columns among these that are not left out; None for all
    imputation: str = IMPUTATIONS[0]  # how gradients of left-out columns are imputed
    memory: GradientMemory | None = None  # of the weight's gradient, for "same"

    def take(self, x: Tensor) -> Tensor:
        """The columns of [rows, L] that are computed here."""
        return x[:, : self.count] if self.kept is None else x.index_select(1, self.kept)

    def of_input(self, product: Tensor) -> Tensor:
        """[rows, L]: the gradient of an input, with left-out columns imputed and offloaded ones 0."""
        return self._whole(product, None)

    def of_weight(self, product: Tensor) -> Tensor:
        """[N, L]: likewise of a weight."""
        return self._whole(product, None if self.memory is None else self.memory.columns_left())

    def _whole(self, product: Tensor, before: Tensor | None) -> Tensor:
        if self.kept is not None:
            product = imputed(product, self.kept, self.count, self.imputation, before)
        missing = self.columns - product.shape[1]
        return functional.pad(product, (0, missing)) if missing else product


def imputed(product: Tensor, kept: Tensor, columns: int, imputation: str, before: Tensor | None = None) -> Tensor:
    """Extends a gradient [rows, K] of the kept columns (int64 [K]) to its usual size [rows, L]; `before`, [rows, at least L],
    is the previous iteration's, for "same", or None for zeros."""
    whole = product.new_zeros(product.shape[0], columns)
    if imputation == "average":
        whole += product.mean(1, keepdim=True)
    elif imputation == "same" and before is not None:
        whole.copy_(before[:, :columns])
    return whole.index_copy_(1, kept, product)


class Exchange(Enum):
    """How columns get to the helpers, and results back."""

    BROADCAST = "broadcast and reduce, merged into the existing all-reduce"
    UNMERGED = "broadcast and reduce, each a separate collective"
    SCATTER = "scatter and gather"


@dataclass(frozen=True)
class Product:
    """The columns and outputs of a linear's product on each position of the group; row-parallel outputs are summed over
    it."""

    columns: tuple[int, ...]
    outputs: tuple[int, ...]
    is_row: bool


class FlexibleWork(Attachment):
    """What the ranks of a tensor-parallel group offload, for all its linears, and what this one leaves out."""

    def __init__(self, tensor_group: TensorGroup, device: torch.device) -> None:
        self._device = device
        self.group, self.size = tensor_group.group, tensor_group.size
        self.ranks = tuple(dist.get_process_group_ranks(tensor_group.group))  # by position
        self.position = tensor_group.order[tensor_group.shard]
        self.products: dict[str, Product] = {}  # of this rank, by the linear's name, as all dictionaries below
        # of its columns that each position offloads; the same on all ranks
        self.shares: tuple[float, ...] = (0.0,) * self.size
        self.exchange = Exchange.BROADCAST  # the same on all ranks
        self.resized, self.resizing, self._seed = 0.0, Resizing(), ""  # the share that this rank leaves out, and which
        self.variation: dict[str, tuple[float, ...]] = {}  # the column statistics (`choose_columns`)
        self.lineage: dict[str, LayerColumns] = {}  # kept, for this mini-batch, or until shares or statistics change
        self.left_out: dict[str, set[int]] = {}  # since the statistics were made
        self.memories: dict[str, GradientMemory] = {}  # for the imputation "same"
        self._drawn: tuple[float, float] = (0.0, 0.0)
        self._all, self._left = 0.0, 0.0

    def give(self, shares: tuple[float, ...]) -> None:
        """Sets the shares of columns that are offloaded from the next forward on."""
        assert len(shares) == self.size
        self.shares = shares

    def begin_step(self, step: int) -> None:
        """Begins a mini-batch. Random columns are drawn for each; others stay until shares or statistics change."""
        drawn = (self.resized, self.shares[self.position])
        stays = self.resizing.columns != "rd" and drawn == self._drawn
        self.lineage = {name: columns for name, columns in self.lineage.items() if stays and name in self.variation}
        self._drawn, self._seed = drawn, f"{step} {self.ranks[self.position]}"
        self._all, self._left = 0.0, 0.0
        for memory in self.memories.values():
            memory.begin_step()

    def bind(self) -> None:
        PRODUCTS.restart(self._device)

    def measures(self) -> dict[str, float]:
        """Of the phase that is over; see `feature.measures`."""
        return {"products_s": PRODUCTS.seconds(), "left_out": self.left_share}

    @property
    def left_share(self) -> float:
        """The part of its share of the products that this rank left out in this mini-batch."""
        return self._left / self._all if self._all else 0.0

    def take_statistics(self, variation: dict[str, tuple[float, ...]]) -> None:
        self.variation, self.lineage, self.left_out = variation, {}, {}

    def own_columns(self, name: str, x: Tensor, outputs: int, parts: "Sequence[Part]") -> OwnColumns:
        """This rank's columns of a product with input [T, L], of which `parts` are offloaded. The left-out share is a share
        of L."""
        columns = x.shape[1]
        own = OwnColumns(
            next((part.migration.first for part in parts if part.gives), columns),
            columns,
            imputation=self.resizing.imputation,
            memory=self.memory(name),
        )
        if self.resized <= 0.0:
            return own
        kept = self.kept(name, own.count, columns).kept
        self._all += float(x.numel() * outputs)
        self._left += float(x.shape[0] * (own.count - len(kept)) * outputs)
        return replace(own, kept=torch.tensor(kept, device=x.device))

    def kept(self, name: str, own: int, columns: int) -> LayerColumns:
        """The columns kept among a product's first `own`; the left-out share counts on all `columns`."""
        if name not in self.lineage:
            known = self.variation.get(name)
            self.lineage[name] = choose_columns(
                self.resizing.columns,
                own,
                min(self.resized * columns / own, 1.0),
                variation=known[:own] if known is not None else None,
                num_iterations=self.resizing.period,
                seed=f"{name} {self._seed}",
            )
            self.left_out.setdefault(name, set()).update(self.lineage[name].pruned)
        return self.lineage[name]

    def memory(self, name: str) -> GradientMemory | None:
        """The memory of a weight's gradient between mini-batches, if the imputation needs one."""
        return self.memories.setdefault(name, GradientMemory()) if self.resizing.imputation == "same" else None

    def migrations(self, columns: tuple[int, ...]) -> list[Migration]:
        """The migrations, by giver, of a product with these columns on each position."""
        givers = [position for position, share in enumerate(self.shares) if share > 0.0]
        planned = [migrate(self.size, giver, columns[giver], self.shares[giver], givers) for giver in givers]
        return [migration for migration in planned if migration is not None]


@dataclass(frozen=True)
class Part:
    """One migration on this rank, there and back. Shapes: C offloaded columns, c columns of one helper."""

    migration: Migration
    work: FlexibleWork

    @property
    def gives(self) -> bool:
        return self.migration.giver == self.work.position

    @property
    def span(self) -> slice:
        """This helper's columns among all columns of the product; empty if the rank takes none."""
        return slice(*self.migration.parts[self.work.position])

    @property
    def own(self) -> slice:
        """The same among the offloaded columns."""
        first = self.migration.first
        return slice(self.span.start - first, self.span.stop - first)

    @property
    def _scatters(self) -> bool:
        return self.work.exchange is Exchange.SCATTER

    def _at(self) -> dict[str, Any]:
        return {"group": self.work.group, "group_src": self.migration.giver}

    def whole(self, tensor: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Sends the giver's tensor to every rank."""
        received = like.new_empty(shape) if tensor is None else tensor.contiguous()
        with CLOCK.waiting:
            if self._scatters:
                copies = [received] * self.work.size if self.gives else None
                dist.scatter(received.clone() if self.gives else received, copies, **self._at())
            else:
                dist.broadcast(received, **self._at())
        return received

    def columns(self, tensor: Tensor | None, rows: int, like: Tensor) -> Tensor:
        """This helper's columns of the giver's [rows, C]; others pass None."""
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
        """The sum over all ranks on the giver; elsewhere meaningless."""
        tensor = tensor.contiguous()
        if not self._scatters:
            with CLOCK.waiting:
                dist.reduce(tensor, group=self.work.group, group_dst=self.migration.giver)
            return tensor
        parts = self._gathered(tensor)
        return torch.stack(parts).sum(0) if parts is not None else tensor

    def _gathered(self, tensor: Tensor) -> list[Tensor] | None:
        parts = [torch.empty_like(tensor) for _ in range(self.work.size)] if self.gives else None
        with CLOCK.waiting:
            dist.gather(tensor, parts, group=self.work.group, group_dst=self.migration.giver)
        return parts

    def collect(self, tensor: Tensor | None, rows: int, like: Tensor) -> Tensor:
        """[rows, C] on the giver (which passes None): the helpers' [rows, c] side by side."""
        if self._scatters:
            mine = like.new_zeros(rows, self._widest())
            if tensor is not None:
                mine[:, : tensor.shape[1]] = tensor
            parts = self._gathered(mine)
            if parts is None:
                return mine
            sizes = [stop - start for start, stop in self.migration.parts]
            by_column = sorted(range(len(sizes)), key=lambda i: self.migration.parts[i])
            return torch.cat([parts[i][:, : sizes[i]] for i in by_column], 1)
        mine = like.new_zeros(rows, self.migration.count)
        if tensor is not None:
            mine[:, self.own] = tensor
        return self.sum_to_giver(mine)


class _WholeProduct(torch.autograd.Function):
    """A linear without offloaded columns: the operations of `functional.linear` and its backward, timed."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, w: Tensor, bias: Tensor | None, own: OwnColumns) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.own = own
        return PRODUCTS.linear(x, w, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx = PRODUCTS.of(grad, w) if needs_x else None
        dw = _weight_gradient(grad, x, w) if needs_w else None
        _remember(ctx.own, dw)
        return dx, dw, grad.sum(0) if needs_bias else None, None


def _weight_gradient(grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """`grad.T @ x` in the order of the weight's storage, like autograd."""
    return PRODUCTS.of(x.t(), grad).t() if w.stride(0) == 1 and w.shape[0] > 1 else PRODUCTS.of(grad.t(), x)


def _remember(own: OwnColumns, dw: Tensor | None) -> None:
    if dw is not None and own.memory is not None:
        own.memory.add(dw)


class _ColumnProduct(torch.autograd.Function):
    """`x @ w.T` of a column-parallel linear. x [T, L] on all ranks, w [N, L]."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, w: Tensor, parts: list[Part], own: OwnColumns, outputs: tuple[int, ...]
    ) -> Tensor:
        """`outputs`: N on each position."""
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
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
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
    """Adds a helper's [T, c] to the gradient of X: by its own gradient, summed over the group, or by a collective."""
    if part.work.exchange is Exchange.BROADCAST:
        if mine is not None:
            dx[:, part.span] += mine
        return
    collected = part.collect(mine, dx.shape[0], dx)
    if part.gives:
        dx[:, part.migration.first :] = collected


class RowProduct(torch.autograd.Function):
    """This rank's part of a row-parallel linear's sum: `x @ w.T`. x [T, L], w [N, L], each rank its own L.

    With columns only left out, and none offloaded, it serves any linear.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, w: Tensor, parts: list[Part], own: OwnColumns) -> Tensor:
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
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w, *taken = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad[:2]
        own, tokens = ctx.own, x.shape[0]
        dx = own.of_input(PRODUCTS.of(grad, own.take(w))) if needs_x else None
        dw = own.of_weight(PRODUCTS.of(grad.t(), own.take(x))) if needs_w else None
        for part, columns, weights in zip(ctx.parts, taken[::2], taken[1::2], strict=True):
            mine = []  # [T + N, c]: both gradients for the giver, in one message
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
    """The product of one linear, whose weight is this rank's shard, without its bias."""

    def __init__(self, name: str, linear: nn.Linear, work: FlexibleWork) -> None:
        self._name, self._linear, self._work, self._product = name, linear, work, work.products[name]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., L] to [..., N], plus the bias if given."""
        weight = self._linear.weight
        if not torch.is_grad_enabled():
            return functional.linear(x, weight, bias)
        parts = [Part(migration, self._work) for migration in self._work.migrations(self._product.columns)]
        rows = x.reshape(-1, x.shape[-1])
        own = self._work.own_columns(self._name, rows, weight.shape[0], parts)
        added = bias
        if parts and not self._product.is_row:
            y = _ColumnProduct.apply(rows, weight, parts, own, self._product.outputs)
        elif parts or own.kept is not None:
            y = RowProduct.apply(rows, weight, parts, own)
        else:
            added = None
            y = _WholeProduct.apply(rows, weight, bias, own)
        whole: Tensor = y.view(*x.shape[:-1], y.shape[-1])
        return whole if added is None else whole + added

    def with_bias(self, x: Tensor) -> Tensor:
        return self(x, self._linear.bias)


def make_flexible(replica: Replica) -> FlexibleWork:
    """Gives the column- and row-parallel linears of a replica with shards products that can migrate. Call before their
    forwards are wrapped for tp."""
    tensor_group, modules = replica.mesh.tensor, dict(replica.model.named_modules())
    assert tensor_group is not None
    work = FlexibleWork(tensor_group, replica.device)
    for name, style in replica.shards.styles.items():
        module = modules.get(name) if style in (COLWISE, ROWWISE) else None
        linear = base_layer(module) if module is not None else None
        if not isinstance(linear, nn.Linear):
            continue
        by_position = [0] * tensor_group.size
        for shard, position in enumerate(tensor_group.order):
            by_position[position] = replica.shards.widths[name][shard]
        cut, is_row = tuple(by_position), style == ROWWISE
        whole = (linear.out_features if is_row else linear.in_features,) * tensor_group.size
        work.products[name] = Product(cut, whole, is_row) if is_row else Product(whole, cut, is_row)
        product = FlexibleLinear(name, linear, work)
        if is_row:
            linear.hotspa_product = product  # type: ignore[assignment]
        else:
            linear.forward = product.with_bias
    return work


def flexible_works(engine: HotSPaEngine) -> dict[Strategy, FlexibleWork]:
    """What this rank need not compute, by strategy; empty without the option `HandOver`. Not collective."""
    works = {s: settings(runner.replica.attachments, FlexibleWork) for s, runner in engine.phases.items()}
    return {strategy: work for strategy, work in works.items() if work is not None}


def give(
    engine: HotSPaEngine,
    shares: Mapping[str, Sequence[float]],  # by strategy, for each rank
    resized: Mapping[str, Sequence[float]] | None = None,  # likewise, of columns that are left out, which is not exact
) -> None:
    """From the next mini-batch on, makes ranks give shares of their product columns to their tensor-parallel groups. Not
    collective; the same on all ranks. Needs the option `HandOver`."""
    for strategy, work in flexible_works(engine).items():
        if str(strategy) in shares:
            work.give(tuple(shares[str(strategy)][rank] for rank in work.ranks))
            work.resized = resized[str(strategy)][engine.rank] if resized is not None else 0.0
