"""Packing: the views, copies and sums on this side of a message.

A round names slices of buffers; here they become tensors: what is sent (packed when it is several slices or needs
converting), where it lands, and what happens with it there. Local: no message travels here.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from hf_hotspa.plan.plan import SwitchPlan
from hf_hotspa.plan.schedule import Message, Round, Schedule, Slice, Wire

Views = dict[tuple[int, int], torch.Tensor]
"""The buffers that a plan touches, by (store, segment)."""


def wire_of(dtype: torch.dtype) -> Wire:
    """The wire that carries a dtype."""
    return Wire(str(dtype).removeprefix("torch."), dtype.itemsize)


def _dtype(wire: Wire) -> torch.dtype:
    return getattr(torch, wire.dtype)


class BoundRound:
    """A round and its tensors: made once for the buffers of a switch, used every time that the switch runs on them.

    Making a view costs more than copying a kilobyte.

    Args:
        buffers: The buffers, detached from autograd.
        send_staging: Where messages are packed, uint8.
        receive_staging: Where messages are received that do not land in place, uint8.
        accumulate: Whether the round is part of a gradient return: what is received is added.

    Attributes:
        outgoing: The tensor that each message sends, once it is packed.
        incoming: Where each message is received: in the target buffer itself when it can be.
        local_bytes: Bytes moved inside the rank, in the dtype of where they go.
    """

    def __init__(
        self,
        current: Round,
        buffers: Views,
        send_staging: torch.Tensor,
        receive_staging: torch.Tensor,
        accumulate: bool,
        rank: int,
    ) -> None:
        self.outgoing: list[torch.Tensor] = []
        self.incoming: list[torch.Tensor] = []
        self._staged: dict[int, torch.Tensor] = {}
        self._packs: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._converts: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._unpacks: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._adds: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []
        for message in current.sends:
            self._bind_send(message, buffers, send_staging)
        for message in current.receives:
            views = _views(message.slices, buffers)
            in_place = not accumulate and len(views) == 1 and views[0].dtype == _dtype(message.wire)
            landing = views[0] if in_place else _staged(receive_staging, message)
            self.incoming.append(landing)
            if accumulate:
                self._adds.append((message.peer, views, _split(landing, message)))
            elif not in_place:
                self._unpacks.append((views, _split(landing, message)))
        self._local = (
            [_view(local.target, buffers) for local in current.local],
            [_view(local.source, buffers) for local in current.local],
        )
        self.local_bytes = sum(view.numel() * view.itemsize for view in self._local[0])
        if accumulate and current.local:
            self._adds.append((rank, *self._local))
        self._adds.sort(key=lambda part: part[0])  # the order that makes sums repeatable
        # a master store in host memory beside an accelerator: what is added goes there first
        self._host_sums = any(v.device != c.device for _, *sides in self._adds for v, c in zip(*sides, strict=True))

    def _bind_send(self, message: Message, buffers: Views, staging: torch.Tensor) -> None:
        views = _views(message.slices, buffers)
        as_it_is = len(views) == 1 and views[0].dtype == _dtype(message.wire) and views[0].device == staging.device
        if message.staging_offset < 0 or as_it_is:
            self.outgoing.append(views[0])
            return
        if message.staging_offset not in self._staged:  # messages with one place in staging share it, packed once
            staged = self._staged[message.staging_offset] = _staged(staging, message)
            if all((view.dtype, view.device) == (staged.dtype, staged.device) for view in views):
                self._packs.append((staged, views))
            else:
                self._converts.append((_split(staged, message), views))
        self.outgoing.append(self._staged[message.staging_offset])

    def pack(self) -> None:
        """Packs, and converts, what is sent from staging."""
        for staged, views in self._packs:
            torch.cat(views, out=staged)
        for parts, views in self._converts:
            torch._foreach_copy_(parts, views)

    def copy_local(self) -> None:
        """The copies inside the rank of a load."""
        if self._local[0]:
            torch._foreach_copy_(*self._local)

    def unpack(self) -> None:
        """Copies what did not land in place to where it belongs."""
        for views, parts in self._unpacks:
            torch._foreach_copy_(views, parts)

    def add(self) -> None:
        """Adds the contributions of a return in ascending order of the source ranks, this rank's own among them."""
        for _, views, contributions in self._adds:
            if self._host_sums:
                contributions = [c.to(view.device) for c, view in zip(contributions, views, strict=True)]
            torch._foreach_add_(views, contributions)


Place = tuple[tuple[int, int], int, int, torch.dtype]
"""Which buffer a view was made of: (store, segment), address, elements, dtype."""


@dataclass(frozen=True)
class Binding:
    """The rounds of a schedule with the tensors of one set of buffers.

    Args:
        buffers: The buffers and the relay buffers, detached from autograd.
        rounds: None where a round is empty.
    """

    plan: SwitchPlan
    schedule: Schedule
    places: tuple[Place, ...]
    buffers: Views
    rounds: list[BoundRound | None]


class Bindings:
    """Bound schedules, kept for the sets of buffers used last: an arena gives the same ones again and again."""

    _KEPT = 2  # of a schedule: weights alternate between two arenas where there is a second source

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[Binding]] = {}

    def find(self, key: Hashable, buffers: Views) -> Binding | None:
        """The binding of a schedule to these buffers, if it was kept."""
        places = _places(buffers)
        return next((binding for binding in self._kept.get(key, ()) if binding.places == places), None)

    def add(
        self,
        key: Hashable,
        plan: SwitchPlan,
        schedule: Schedule,
        buffers: Views,
        relay: Views,
        stagings: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rank: int,
    ) -> Binding:
        """Binds a schedule and keeps it.

        Args:
            buffers: The buffers of its sources and its target.
            stagings: Slots of (send, receive) staging, used in turn by the rounds that are not empty.
        """
        detached = {place: buffer.detach() for place, buffer in buffers.items()} | relay
        slots = cycle(stagings)
        rounds = [
            None if current.is_empty else BoundRound(current, detached, *next(slots), plan.accumulate, rank)
            for current in schedule.rounds
        ]
        binding = Binding(plan, schedule, _places(buffers), detached, rounds)
        self._kept[key] = [*self._kept.get(key, ()), binding][-self._KEPT :]
        return binding

    def clear(self) -> None:
        """Lets go of all buffers."""
        self._kept.clear()


def _places(buffers: Views) -> tuple[Place, ...]:
    return tuple((place, b.data_ptr(), b.numel(), b.dtype) for place, b in buffers.items())


def _view(piece: Slice, buffers: Views) -> torch.Tensor:
    return buffers[piece.store, piece.segment].narrow(0, piece.offset, piece.length)


def _views(slices: Sequence[Slice], buffers: Views) -> list[torch.Tensor]:
    return [_view(piece, buffers) for piece in slices]


def _staged(staging: torch.Tensor, message: Message) -> torch.Tensor:
    """The message's place in a staging buffer, as a tensor of its dtype."""
    return staging.narrow(0, message.staging_offset, message.num_bytes).view(_dtype(message.wire))


def _split(tensor: torch.Tensor, message: Message) -> list[torch.Tensor]:
    return list(tensor.split([piece.length for piece in message.slices]))
