"""What the ranks of a tensor-parallel group do not compute themselves, and how what they give away travels.

A column is an index of the contraction of a product. A rank that gives leaves its last columns to the others
(`stragglers/migration.py`); a rank that is resized leaves columns out among those that it keeps, chosen by the paper's Rd, Pri
or PriDiff (`stragglers/columns.py`). A rank may do both. The products are in `flexible_linear`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.resized_linear import GradientMemory, OwnColumns
from hf_hotspa.parallel.waiting import CLOCK
from hf_hotspa.stragglers.columns import LayerColumns, Resizing, choose_columns
from hf_hotspa.stragglers.migration import Migration, migrate


class Exchange(Enum):
    """How columns get to the helpers and results back."""

    BROADCAST = "broadcast and reduce, merged into the all-reduce that is there"
    UNMERGED = "broadcast and reduce, each a collective of its own"
    SCATTER = "scatter and gather"


@dataclass(frozen=True)
class Product:
    """The shape of a linear's product.

    Args:
        columns: Columns on each position of the group.
        outputs: Outputs on each.
        is_row: Whether it is row-parallel: its outputs are summed over the group.
    """

    columns: tuple[int, ...]
    outputs: tuple[int, ...]
    is_row: bool


class FlexibleWork:
    """What the ranks of a tensor-parallel group give away, for all its linears, and what this one leaves out.

    Attributes:
        ranks: The global ranks of the group, by position.
        products: The linears of this rank, by name.
        shares: For each position in the group the share of its columns that it gives away; the same on all ranks.
        exchange: How; the same on all ranks.
        resized: The share of its columns that this rank leaves out, computed by nobody.
        resizing: Which ones, and what their gradients are.
        variation: The statistics of the columns of each product, by name of the linear (`choose_columns`).
        lineage: Which columns each product keeps; of this mini-batch, or for as long as nothing changes.
        left_out: The columns of each product that were left out at some time since the statistics were made.
        memories: Of the gradients of the weights, for the imputation "same".
    """

    def __init__(self, tensor_group: TensorGroup) -> None:
        self.group, self.size = tensor_group.group, tensor_group.size
        self.ranks = tuple(dist.get_process_group_ranks(tensor_group.group))
        self.position = tensor_group.order[tensor_group.shard]
        self.products: dict[str, Product] = {}
        self.shares: tuple[float, ...] = (0.0,) * self.size
        self.exchange = Exchange.BROADCAST
        self.resized, self.resizing, self._seed = 0.0, Resizing(), ""
        self.variation: dict[str, tuple[float, ...]] = {}
        self.lineage: dict[str, LayerColumns] = {}
        self.left_out: dict[str, set[int]] = {}
        self.memories: dict[str, GradientMemory] = {}
        self._drawn: tuple[float, float] = (0.0, 0.0)
        self._all, self._left = 0.0, 0.0

    def give(self, shares: tuple[float, ...]) -> None:
        """From the next forward on these shares of columns are given away."""
        assert len(shares) == self.size
        self.shares = shares

    def begin_step(self, step: int) -> None:
        """A mini-batch begins. Random columns are drawn anew for each; others stay until shares or statistics change."""
        drawn = (self.resized, self.shares[self.position])
        stays = self.resizing.columns != "rd" and drawn == self._drawn
        self.lineage = {name: columns for name, columns in self.lineage.items() if stays and name in self.variation}
        self._drawn, self._seed = drawn, f"{step} {self.ranks[self.position]}"
        self._all, self._left = 0.0, 0.0
        for memory in self.memories.values():
            memory.begin_step()

    @property
    def left_share(self) -> float:
        """The part of its share of the products that this rank left out in this mini-batch."""
        return self._left / self._all if self._all else 0.0

    def take_statistics(self, variation: dict[str, tuple[float, ...]]) -> None:
        """Columns are chosen by these statistics from now on."""
        self.variation, self.lineage, self.left_out = variation, {}, {}

    def own_columns(self, name: str, x: Tensor, outputs: int, parts: "Sequence[Part]") -> OwnColumns:
        """The columns that this rank computes of a product.

        Args:
            x: [T, L], its input. The share that is left out counts on L.
            parts: What is given away.
        """
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
        """What is kept of the first `own` of the columns of a product, where a share of all of them is left out."""
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
        """What keeps the gradient of a weight from one mini-batch to the next, where that is asked for."""
        return self.memories.setdefault(name, GradientMemory()) if self.resizing.imputation == "same" else None

    def migrations(self, columns: tuple[int, ...]) -> list[Migration]:
        """What is given away of a product, by giver.

        Args:
            columns: Of the product of each position.
        """
        givers = [position for position, share in enumerate(self.shares) if share > 0.0]
        planned = [migrate(self.size, giver, columns[giver], self.shares[giver], givers) for giver in givers]
        return [migration for migration in planned if migration is not None]


@dataclass(frozen=True)
class Part:
    """One migration as this rank sees it: what it sends, and what comes back.

    Shapes: C columns given away, c those of one helper.
    """

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
        received = like.new_empty(shape) if tensor is None else tensor.contiguous()
        with CLOCK.waiting:
            if self._scatters:
                copies = [received] * self.work.size if self.gives else None
                dist.scatter(received.clone() if self.gives else received, copies, **self._at())
            else:
                dist.broadcast(received, **self._at())
        return received

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
        parts = self._gathered(tensor)
        return torch.stack(parts).sum(0) if parts is not None else tensor

    def _gathered(self, tensor: Tensor) -> list[Tensor] | None:
        parts = [torch.empty_like(tensor) for _ in range(self.work.size)] if self.gives else None
        with CLOCK.waiting:
            dist.gather(tensor, parts, group=self.work.group, group_dst=self.migration.giver)
        return parts

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
