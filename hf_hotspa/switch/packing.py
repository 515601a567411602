"""Packing: the views, copies and sums on this side of a message.

A round names slices of buffers; here they become tensors: what is sent (packed when it is several slices or needs
converting), where it lands, and what happens with it there. Local: no message travels here.
"""

from collections.abc import Sequence

import torch

from hf_hotspa.switch.schedule import Message, Round, Slice, Wire

Views = dict[tuple[int, int], torch.Tensor]
"""The buffers that a plan touches, by (store, segment)."""


def wire_of(dtype: torch.dtype) -> Wire:
    """The wire that carries a dtype."""
    return Wire(str(dtype).removeprefix("torch."), dtype.itemsize)


def _dtype(wire: Wire) -> torch.dtype:
    return getattr(torch, wire.dtype)


def pack(current: Round, buffers: Views, staging: torch.Tensor) -> list[torch.Tensor]:
    """The tensor that each message sends; messages with one place in staging share it, packed once."""
    packed: dict[int, torch.Tensor] = {}
    outgoing = []
    for message in current.sends:
        views, dtype = _views(message.slices, buffers), _dtype(message.wire)
        if message.staging_offset < 0 or (len(views) == 1 and views[0].dtype == dtype):
            outgoing.append(views[0])
            continue
        if message.staging_offset not in packed:
            staged = _staged(staging, message)
            if all(view.dtype == dtype for view in views):
                torch.cat(views, out=staged)
            else:
                torch._foreach_copy_(_split(staged, message), views)
            packed[message.staging_offset] = staged
        outgoing.append(packed[message.staging_offset])
    return outgoing


def landings(current: Round, buffers: Views, staging: torch.Tensor, accumulate: bool) -> list[torch.Tensor]:
    """Where each message is received: in the target buffer itself when it can be."""
    return [
        _views(message.slices, buffers)[0]
        if not accumulate and _lands_in_place(message, buffers)
        else _staged(staging, message)
        for message in current.receives
    ]


def unpack(current: Round, incoming: Sequence[torch.Tensor], buffers: Views) -> None:
    """Copies what did not land in place to where it belongs."""
    for message, tensor in zip(current.receives, incoming, strict=True):
        if not _lands_in_place(message, buffers):
            torch._foreach_copy_(_views(message.slices, buffers), _split(tensor, message))


def add(current: Round, incoming: Sequence[torch.Tensor], buffers: Views, rank: int) -> None:
    """Adds a round's contributions in ascending order of the source ranks: the order that makes sums repeatable."""
    parts = [
        (message.peer, _views(message.slices, buffers), _split(tensor, message))
        for message, tensor in zip(current.receives, incoming, strict=True)
    ]
    if current.local:
        parts.append((rank, *_local_views(current, buffers)))
    for _, into, contributions in sorted(parts, key=lambda part: part[0]):
        torch._foreach_add_(into, contributions)


def copy_local(current: Round, buffers: Views) -> None:
    """The copies inside the rank of a load."""
    torch._foreach_copy_(*_local_views(current, buffers))


def local_bytes(current: Round, buffers: Views) -> int:
    """Bytes moved inside the rank, in the dtype of where they go."""
    return sum(
        local.target.length * buffers[local.target.store, local.target.segment].itemsize for local in current.local
    )


def _view(piece: Slice, buffers: Views) -> torch.Tensor:
    return buffers[piece.store, piece.segment].narrow(0, piece.offset, piece.length)


def _views(slices: Sequence[Slice], buffers: Views) -> list[torch.Tensor]:
    return [_view(piece, buffers) for piece in slices]


def _staged(staging: torch.Tensor, message: Message) -> torch.Tensor:
    """The message's place in a staging buffer, as a tensor of its dtype."""
    return staging.narrow(0, message.staging_offset, message.num_bytes).view(_dtype(message.wire))


def _split(tensor: torch.Tensor, message: Message) -> list[torch.Tensor]:
    return list(tensor.split([piece.length for piece in message.slices]))


def _lands_in_place(message: Message, buffers: Views) -> bool:
    first = message.slices[0]
    return len(message.slices) == 1 and buffers[first.store, first.segment].dtype == _dtype(message.wire)


def _local_views(current: Round, buffers: Views) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Target and source views of the local transfers."""
    return (
        [_view(local.target, buffers) for local in current.local],
        [_view(local.source, buffers) for local in current.local],
    )
