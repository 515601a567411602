"""What enters packs beside the tokens of a row with images, and how it travels: features as leaves, and their gradients back.

Shapes: L tokens of a row, n of these are image tokens, K tables of features (the first enters behind the embedding, each
further one behind a layer), h hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.parallel.agreement import replica_ranks
from hf_hotspa.strategy import Strategy
from hf_hotspa.switched.passes import Documents, Exchange, Move, places

ONE_WAY, BOTH_WAYS, BOTH_WAYS_IN_WINDOWS = range(3)
"""How consecutive image tokens attend to each other: as text; in both directions; in layers with a window only."""


@dataclass(eq=False)
class Encoded:
    """The features of a call's images, on the rank that has read its rows. The graph of the towers is kept until the step ends, or
    they run again then, which takes their memory for one call at a time."""

    again: Callable[[], list[Tensor]]  # runs the towers: [K, n, h] of each picture, with their graph
    live: list[Tensor] | None  # these, if they are kept
    num_bytes: int = 0  # of the graph


@dataclass(eq=False)
class Picture:
    """The images of a row."""

    features: Tensor | None  # [K, n, h], a leaf; None where no layer takes them
    places: Tensor  # int64 [n], the image tokens
    positions: Tensor | None  # int64 [3, L]; None if each token's position is its place
    ways: int  # one of the three above
    patches: int = 0  # that the towers encoded for it
    encoded: Encoded | None = None  # of its call, on the rank that has read the row, if it is trained
    gradient: Tensor | None = None  # by the features, there

    def blocks(self) -> Tensor:
        """int64 [n]: the number of each image token's run of consecutive ones."""
        begins = torch.ones_like(self.places)
        begins[1:] = self.places.diff() != 1
        return begins.cumsum(0)


@dataclass(frozen=True)
class Wire:
    """How pictures travel between ranks, over host memory."""

    image_id: int
    tables: int  # K
    hidden: int  # h
    has_positions: bool  # whether they have three of them
    dtype: str  # of the features

    def takes(self, strategy: Strategy, rank: int) -> bool:
        """Whether a rank may have a layer that features enter; other stages need positions and blocks."""
        return self.tables > 1 or strategy.coord(rank).pp == 0

    def fetch(self, of: Documents, exchange: Exchange, requires_grad: bool) -> None:
        """Sends pictures to the ranks that have just received the tokens of their rows."""
        dtype, moves = getattr(torch, self.dtype), [move for move in of.moved if of.side[move.document]]
        mine = {move.document for move in moves if move.source == exchange.rank}
        sent = {number: self._numbers(of.beside[number]) for number in mine}
        sized = [move._replace(size=2 + 3 * of.lengths[move.document] * self.has_positions) for move in moves]
        for move, numbers in exchange.deliver("rows", sized, sent, torch.int32):
            places = torch.from_numpy((of.rows[move.document].ids == self.image_id).nonzero()[0])
            positions = numbers[2:].view(3, -1).long() if self.has_positions else None
            of.beside[move.document] = Picture(None, places, positions, int(numbers[0]), int(numbers[1]))
        sized = [move._replace(size=self.tables * of.side[move.document] * self.hidden) for move in moves]
        features = {number: of.beside[number].features.detach().to("cpu", dtype).flatten() for number in mine}
        for move, numbers in exchange.deliver("rows", sized, features, dtype):
            of.beside[move.document].features = (
                numbers.view(self.tables, -1, self.hidden).clone().requires_grad_(requires_grad)
            )

    def _numbers(self, picture: Picture) -> Tensor:
        head = torch.tensor([picture.ways, picture.patches], dtype=torch.int32)
        if not self.has_positions:
            return head
        assert picture.positions is not None
        return torch.cat([head, picture.positions.to("cpu", torch.int32).flatten()])

    def collect(self, of: Documents, plan: MiniBatchPlan, exchange: Exchange) -> None:
        """Adds the gradients of features up, on the rank that has read the row. Without sequence parallelism all ranks of tp have
        the same gradient; other ranks have parts."""
        moves, gradients, dtype = list[Move](), dict[int, Tensor](), getattr(torch, self.dtype)
        for number, strategy, replica in places(plan):
            if not of.side[number]:
                continue
            size, owner = self.tables * of.side[number] * self.hidden, of.owners[number]
            for rank in replica_ranks(strategy, replica):
                if not self.takes(strategy, rank) or (strategy.coord(rank).tp and not strategy.sp):
                    continue
                moves.append(Move(number, rank, owner, size))
                if rank == exchange.rank:
                    features = of.beside[number].features
                    own = features.grad if features.grad is not None else torch.zeros_like(features)
                    gradients[number] = own.to("cpu", dtype).flatten()
        for move, numbers in exchange.deliver("seeds", moves, gradients, dtype):
            picture = of.beside[move.document]
            part = numbers.view(self.tables, -1, self.hidden)
            picture.gradient = part.clone() if picture.gradient is None else picture.gradient + part
        for picture in of.beside.values():
            if picture is not None and picture.features is not None:
                picture.features.grad = None


def backward(pictures: Sequence[Picture]) -> None:
    """The towers' backward, call by call, from the gradients of their features."""
    calls = dict[Encoded, list[Picture]]()
    for picture in pictures:
        if picture.encoded is not None:
            calls.setdefault(picture.encoded, []).append(picture)
            picture.encoded = None
    while calls:
        encoded = next(iter(calls))
        own = calls.pop(encoded)
        if all(picture.gradient is None for picture in own):
            continue
        with torch.enable_grad():
            live = encoded.again() if encoded.live is None else encoded.live
        pairs = [
            (x, p.gradient.to(x.device, x.dtype)) for x, p in zip(live, own, strict=True) if p.gradient is not None
        ]
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        encoded.live = None
        for picture in own:
            picture.gradient = None
