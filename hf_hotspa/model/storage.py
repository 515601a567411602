"""How a parameter lies in the parameter vector: 1-D, its sharded dim outermost. The only functions that know it."""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from hf_hotspa.layout.placement import Slot


def to_storage(tensor: Tensor, shard_dim: int | None) -> Tensor:
    """A parameter as the vector stores it; a view where that is possible."""
    return (tensor if shard_dim is None else tensor.movedim(shard_dim, 0)).reshape(-1)


def from_storage(flat: Tensor, shape: Sequence[int], shard_dim: int | None) -> Tensor:
    """A view of stored elements with the Hugging Face shape: the inverse of `to_storage`.

    Args:
        flat: 1-D, contiguous.
        shape: The shape, of the whole parameter or of a shard.
        shard_dim: The dim that is outermost in storage; None for the natural order.
    """
    if shard_dim is None:
        return flat.view(shape)
    stored = [shape[shard_dim], *(size for i, size in enumerate(shape) if i != shard_dim)]
    return flat.view(stored).movedim(0, shard_dim)


def slot_view(buffer: Tensor | None, slot: Slot) -> Tensor:
    """A slot's part of a flat buffer, in the Hugging Face order of dims."""
    assert buffer is not None
    return from_storage(buffer[slot.offset : slot.offset + prod(slot.shape)], slot.shape, slot.spec.storage_dim)
