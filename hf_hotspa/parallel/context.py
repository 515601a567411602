"""Context parallelism: the tokens of each pack are divided over the ranks of cp, and only attention sees them all.

Owns what a rank has of a pack (`ContextParallel.divide`) and the exchanges of tokens between ranks, with their gradients.
How attention runs on top of them is in `context_attention.py`; everything else in a model works token by token and does
not notice. Positions, targets, and what dropout and noise draw from are those of whole sequences; each rank's loss is the
sum over its own tokens.

Shapes: T tokens of the pack, t of this rank's row, P ranks, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.costs.divided import ULYSSES, choose_way
from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.cuts import Shares, cut_for, share_by_cost, share_by_tokens
from hf_hotspa.parallel.collectives import CLOCK, gather_rows, start_gather, with_gradient
from hf_hotspa.parallel.mesh import StrategyMesh


@dataclass
class ContextGroup:
    """The ranks of cp that share a pack.

    Args:
        size: P.
        index: This rank's place among them.

    Attributes:
        sent_bytes: What this rank has sent to the others so far; each exchange adds to it where it begins.
    """

    group: dist.ProcessGroup
    size: int
    index: int
    sent_bytes: int = 0

    def count(self, x: Tensor, elements: int) -> None:
        """Counts elements of a tensor that are sent; one for each rank that gets them."""
        self.sent_bytes += elements * x.element_size()


class Division:
    """One pack, divided: where the tokens of the whole pack and of this rank's row are. Equal on all ranks but for `index`.

    Args:
        device: Where index tensors are needed.
    """

    def __init__(self, shares: Shares, context: ContextGroup, device: torch.device) -> None:
        self.shares, self.context, self.device = shares, context, device

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank's row that are of the pack."""
        return self.shares.rows[self.context.index] - self.shares.pads[self.context.index]

    @property
    def pads(self) -> tuple[int, ...]:
        """The lengths of all padding, of those ranks that have any."""
        return tuple(pad for pad in self.shares.pads if pad)

    @cached_property
    def _order(self) -> list[int]:
        """For each token of the pack, and then of all padding, its place in the rows of all ranks one after the other."""
        begins = [0, *accumulate(self.shares.lengths)]
        order, pads, place = [0] * begins[-1], list[int](), 0
        for pieces, pad in zip(self.shares.pieces, self.shares.pads, strict=True):
            for sequence, first, stop in pieces:
                order[begins[sequence] + first : begins[sequence] + stop] = range(place, place + stop - first)
                place += stop - first
            pads += range(place, place + pad)
            place += pad
        return order + pads

    @cached_property
    def to_pack(self) -> Tensor | None:
        """int64 [T + padding]: see `_order`; None where the rows one after the other are the pack."""
        if self._order == list(range(len(self._order))):
            return None
        return torch.tensor(self._order).to(self.device, non_blocking=True)

    @cached_property
    def to_rows(self) -> Tensor | None:
        """The inverse of `to_pack`."""
        return None if self.to_pack is None else torch.argsort(self.to_pack)


class ContextParallel:
    """What a replica's rank needs to know of cp.

    Args:
        mesh: Of a strategy with cp.
        way: How it attends, as the options of the engine say.
        pair_costs: See the options of the engine: what chunks are cut by.

    Attributes:
        way: How it attends, see `costs.divided`.
        context: The ranks that share each pack.

    Raises:
        StrategyError: the way cannot run the model, see `choose_way`.
    """

    def __init__(
        self, mesh: StrategyMesh, shape: ModelShape, way: str, pair_costs: Mapping[int, float], device: torch.device
    ) -> None:
        assert mesh.context is not None
        self._strategy = strategy = mesh.strategy
        self.way, self.device = choose_way(strategy, shape, way), device
        self.context = ContextGroup(mesh.context, strategy.cp, mesh.coord.cp)
        self._quadratic_cost = shape.quadratic_cost
        self._pair_cost = pair_costs.get(strategy.tp, shape.quadratic_cost)
        self._multiple = strategy.tp if strategy.sp else 1

    def shares(self, lengths: Sequence[int]) -> Shares:
        """What each rank has of a pack."""
        return _shares(tuple(lengths), self.context.size, self.way, self._quadratic_cost, self._multiple)

    def parts(self, lengths: Sequence[int]) -> list[Shares]:
        """What each rank has of a pack, or of each of its chunks, in the order in which these run forward."""
        if not self._strategy.ck:
            return [self.shares(lengths)]
        ends = list(accumulate(lengths))
        chunks = [chunk for chain in cut_for(self._strategy, lengths, self._pair_cost) for chunk in chain]
        divisions = []
        for first, stop in chunks:
            inside = [min(end, stop) - max(end - own, first) for end, own in zip(ends, lengths, strict=True)]
            divisions.append(self.shares([tokens for tokens in inside if tokens > 0]))
        return divisions

    def divide(self, lengths: Sequence[int]) -> Division:
        """A pack, divided."""
        return Division(self.shares(lengths), self.context, self.device)

    def row_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of this rank's row of a pack, with padding."""
        return self.shares(lengths).rows[self.context.index]

    def tokens_kept(self, num_tokens: int) -> int:
        """Of a chunk of one sequence, the tokens whose keys and values this rank keeps: all, of some heads, or its own."""
        if self.way == ULYSSES:
            return num_tokens
        return sum(stop - first for _, first, stop in self.shares((num_tokens,)).pieces[self.context.index])

    def row_of(self, micro_batch: MicroBatch) -> MicroBatch:
        """What this rank has of a pack, with padding."""
        shares = self.shares(micro_batch.lengths)
        own = micro_batch.pieces(shares.pieces[self.context.index])
        return own.padded_to(shares.rows[self.context.index], 0)


@lru_cache(maxsize=256)
def _shares(lengths: tuple[int, ...], size: int, way: str, quadratic_cost: float, multiple: int) -> Shares:
    if way == ULYSSES:
        return share_by_tokens(lengths, size, multiple)
    return share_by_cost(lengths, size, quadratic_cost, multiple)


def in_order(rows: Sequence[Tensor], shares: Shares) -> Tensor:
    """[T, ...] of a pack, from what each rank has of its tokens, without padding."""
    begins = [0, *accumulate(shares.lengths)]
    whole = rows[0].new_empty(begins[-1], *rows[0].shape[1:])
    for row, pieces in zip(rows, shares.pieces, strict=True):
        at = 0
        for sequence, first, stop in pieces:
            whole[begins[sequence] + first : begins[sequence] + stop] = row[at : at + stop - first]
            at += stop - first
    return whole


# -- exchanges --------------------------------------------------------------------------------------------------------


def _start(out: Tensor, own: Tensor, received: list[int], sent: list[int], context: ContextGroup) -> Any:
    context.count(own, sum(sent) - sent[context.index])
    return dist.all_to_all_single(out, own, received, sent, group=context.group, async_op=True)


def _to_heads(*tensors: Tensor, division: Division) -> tuple[Tensor, ...]:
    """[1, h, t, D] of this rank's tokens to [1, h / P, T, D] of its heads, several at once; h may differ."""
    context, rows = division.context, division.shares.rows
    started = []
    for x in tensors:
        heads, width = x.shape[1] // context.size, x.shape[3]
        sizes = [heads * row * width for row in rows]
        out = x.new_empty(sum(sizes))
        own = x.contiguous()
        started.append(
            (_start(out, own.view(-1), sizes, [own.numel() // context.size] * context.size, context), out, own)
        )
    by_heads = []
    for (work, out, _), x in zip(started, tensors, strict=True):
        CLOCK.wait(work)
        heads, width = x.shape[1] // context.size, x.shape[3]
        parts = out.split([heads * row * width for row in rows])
        whole = torch.cat([part.view(heads, row, width) for part, row in zip(parts, rows, strict=True)], 1)
        order = division.to_pack
        by_heads.append((whole if order is None else whole.index_select(1, order))[None])
    return tuple(by_heads)


def _to_tokens(*tensors: Tensor, division: Division) -> tuple[Tensor, ...]:
    """The inverse of `_to_heads`."""
    context, rows = division.context, division.shares.rows
    started = []
    for x in tensors:
        order = division.to_rows
        own = x[0] if order is None else x[0].index_select(1, order)
        sent = torch.cat([part.reshape(-1) for part in own.split(rows, 1)])
        mine = own.shape[0] * rows[context.index] * own.shape[2]
        out = x.new_empty(mine * context.size)
        sizes = [own.shape[0] * row * own.shape[2] for row in rows]
        started.append((_start(out, sent, [mine] * context.size, sizes, context), out, sent))
    by_tokens = []
    for (work, out, _), x in zip(started, tensors, strict=True):
        CLOCK.wait(work)
        by_tokens.append(out.view(1, -1, rows[context.index], x.shape[3]))
    return tuple(by_tokens)


def tokens_to_heads(division: Division, *tensors: Tensor) -> tuple[Tensor, ...]:
    """All tokens of some heads for some tokens of all heads, with gradients. Collective in cp.

    Args:
        tensors: [1, h, t, D] each, of this rank's row; h a multiple of P, and may differ.

    Returns:
        [1, h / P, T + padding, D] each, in the order of the pack, padding at the end: the heads of the rank's place.
    """
    return with_gradient(partial(_to_heads, division=division), partial(_to_tokens, division=division), *tensors)


def heads_to_tokens(division: Division, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `tokens_to_heads`, with gradients."""
    return with_gradient(partial(_to_tokens, division=division), partial(_to_heads, division=division), *tensors)


def gathered(x: Tensor, most: int, context: ContextGroup) -> tuple[Any, Tensor]:
    """Starts to gather [m, ...] of every rank, m at most `most`: what to wait for, and [P, most, ...] of all then."""
    context.count(x, most * x.shape[1:].numel() * (context.size - 1))
    return start_gather(x, most, context.group)


def scattered_sum(x: Tensor, context: ContextGroup) -> tuple[Any, Tensor]:
    """Starts to give each rank its part [most, ...] of [P, most, ...]: what to wait for, and the parts of all ranks.

    The parts are [P, most, ...], for this rank to be summed. (Not a reduce-scatter: gloo knows none for each shape, and the
    sum is made in a wider dtype than that of the wire.)
    """
    out = torch.empty_like(x)
    context.count(x, x.numel() // context.size * (context.size - 1))
    return dist.all_to_all_single(out, x.contiguous(), group=context.group, async_op=True), out


def all_tokens(x: Tensor, division: Division) -> Tensor:
    """[t, ...] of this rank's row as [T, ...] of the pack, for something that every rank computes alike. Collective in cp.

    So the gradient of this rank's own tokens is whole already.
    """
    rows, context = division.shares.rows, division.context
    begin = sum(rows[: context.index])

    def in_order_of_pack(x: Tensor) -> Tensor:
        context.count(x, max(rows) * x.shape[1:].numel() * (context.size - 1))
        joined = gather_rows(x, rows, context.group)
        return joined if division.to_pack is None else joined.index_select(0, division.to_pack)

    def own(grad: Tensor) -> Tensor:
        in_rows = grad if division.to_rows is None else grad.index_select(0, division.to_rows)
        return in_rows[begin : begin + rows[context.index]]

    return with_gradient(in_order_of_pack, own, x)[: sum(division.shares.lengths)]
