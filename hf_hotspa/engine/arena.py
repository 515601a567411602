"""Reused memory for the buffers of whichever strategy is active.

Only one strategy has storage at a time, so one allocation per dtype, as large as the largest strategy needs, serves
them all. It is kept between phases: on CPU the page faults of fresh memory cost ten times what clearing reused memory
does. What an arena holds is written down, so that a strategy that comes back to its own weights need not be given the
frozen ones again.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from hf_hotspa.layout.units import Room, Rooms, sizes_of_neighbours

_ALIGNMENT = 64
"""Buffers start on multiples of this many elements, so that vector loads and sends are aligned in every dtype."""


_Place = tuple[torch.dtype, int, int]
"""`(dtype, start, size)` of a buffer, in elements."""

Shared = Sequence[Room | None]
"""Which segments share memory (`layout.units.Rooms`); None for one that has its own."""


def _place(
    sizes: Sequence[int], dtypes: Sequence[torch.dtype | None], rooms: Shared
) -> tuple[dict[torch.dtype, int], list[_Place | None]]:
    """Elements needed of each dtype, and the place of each buffer."""
    inside: list[_Place | None] = []  # of a unit that shares memory: from the begin of the unit
    needed: dict[torch.dtype, int] = {}
    filled: dict[torch.dtype, dict[Room, int]] = {}
    for size, dtype, room in zip(sizes, dtypes, rooms, strict=True):
        if not size or dtype is None:
            inside.append(None)
            continue
        start = needed.get(dtype, 0) if room is None else filled.setdefault(dtype, {}).get(room, 0)
        end = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        inside.append((dtype, start, size))
        if room is None:
            needed[dtype] = end
        else:
            filled[dtype][room] = end
    first: dict[tuple[torch.dtype, Room], int] = {}
    for dtype, units in filled.items():
        begin = needed.get(dtype, 0)
        end = needed[dtype] = begin + max(sizes_of_neighbours(units))
        first |= {(dtype, room): end - size if room % 2 else begin for room, size in units.items()}
    places: list[_Place | None] = []
    for place, room in zip(inside, rooms, strict=True):
        if place is not None and room is not None:
            dtype, start, size = place
            place = dtype, first[dtype, room] + start, size
        places.append(place)
    return needed, places


def arena_bytes(
    strategies: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype | None], rooms: Sequence[Shared]
) -> int:
    """Bytes that an arena ends up with when it has served buffers of all these sizes (by segment, one list each)."""
    largest: dict[torch.dtype, int] = {}
    for sizes, shared in zip(strategies, rooms, strict=True):
        for dtype, numel in _place(sizes, dtypes, shared)[0].items():
            largest[dtype] = max(largest.get(dtype, 0), numel)
    return sum(numel * dtype.itemsize for dtype, numel in largest.items())


class Arenas:
    """The memory of the active strategy: its gradients, and its weights beside those of the one before.

    Args:
        copies: How many strategies' weights are kept at a time: 1, or 2 for a second source.
    """

    def __init__(self, device: torch.device, copies: int = 1) -> None:
        self.gradients = Arena(device)
        self._weights = [Arena(device) for _ in range(copies)]

    def reserve(
        self,
        sizes: Sequence[int],
        weights: Sequence[torch.dtype | None],
        gradients: Sequence[torch.dtype | None],
        rooms: Rooms,
    ) -> None:
        """Allocates what a strategy needs, where those before it needed less.

        Args:
            sizes: Elements of each segment.
            weights: The dtype of each segment's weights.
            gradients: The dtype of each segment's gradients; None for a segment that needs none.
        """
        self.gradients.take(sizes, gradients, rooms.gradients)
        for arena in self._weights:
            arena.take(sizes, weights, rooms.weights)

    def take_weights(
        self,
        sizes: Sequence[int],
        dtypes: Sequence[torch.dtype | None],
        holder: Hashable,
        rooms: Shared,
    ) -> tuple[list[Tensor | None], bool]:
        """Buffers for the weights of the next strategy; with two copies those of the last one stay valid.

        Args:
            sizes: Elements of each segment.
            holder: What was given to `loaded` when these very weights were loaded before; None for nothing.

        Returns:
            As `Arena.take`; and whether the buffers still hold what they held at that `loaded`, untouched since. The
            arena counts as empty until the next `loaded`.
        """
        held = [holder is not None and arena.holder == holder for arena in self._weights]
        self._weights.append(self._weights.pop(held.index(True) if any(held) else 0))
        arena = self._weights[-1]
        arena.holder = None
        return arena.take(sizes, dtypes, rooms), any(held)

    def loaded(self, holder: Hashable) -> None:
        """The buffers taken last are filled; `holder` says with what."""
        self._weights[-1].holder = holder

    def forget(self) -> None:
        """Nothing is known of what the arenas hold."""
        for arena in self._weights:
            arena.holder = None

    @property
    def holders(self) -> str:
        """What is known of what the arenas hold; must be the same on all ranks before a switch."""
        return repr([arena.holder for arena in self._weights])

    @property
    def keeps_last(self) -> bool:
        """Whether the weights of the last strategy are still there while the next ones are loaded."""
        return len(self._weights) > 1

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(arena.num_bytes for arena in (self.gradients, *self._weights))

    def clear(self) -> None:
        """Gives the memory back."""
        for arena in (self.gradients, *self._weights):
            arena.clear()
        self.forget()


class Arena:
    """Hands out flat buffers by segment.

    Attributes:
        holder: What its buffers hold, in the words of its user; None when not known.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.holder: Hashable = None
        self._memory: dict[torch.dtype, Tensor] = {}

    def take(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype | None], rooms: Shared) -> list[Tensor | None]:
        """Buffers of the given sizes with undefined contents; those handed out before are no longer valid.

        Args:
            sizes: Elements of each segment.
            dtypes: The dtype of each segment; None for a segment that needs no buffer.

        Returns:
            1-D tensors; None for a segment of size 0 or without a dtype.
        """
        needed, places = _place(sizes, dtypes, rooms)
        for dtype, total in needed.items():
            if dtype not in self._memory or self._memory[dtype].numel() < total:
                self._memory.pop(dtype, None)  # free before allocating, or both exist at once
                self._memory[dtype] = torch.empty(total, dtype=dtype, device=self.device)
        return [None if p is None else self._memory[p[0]][p[1] : p[1] + p[2]] for p in places]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(memory.nbytes for memory in self._memory.values())

    def clear(self) -> None:
        """Gives the memory back."""
        self._memory.clear()
