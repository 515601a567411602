"""Reused memory for the buffers of whichever strategy is active.

Only one strategy has storage at a time, so one allocation per dtype, as large as the largest strategy needs, serves
them all. It is kept between phases: on CPU the page faults of fresh memory cost ten times what clearing reused memory
does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Buffers start on multiples of this many elements, so that vector loads and sends are aligned in every dtype."""


class Arena:
    """Hands out flat buffers by segment.

    Args:
        device: Where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[torch.dtype, Tensor] = {}

    def take(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
        """Buffers of the given sizes with undefined contents; those handed out before are no longer valid.

        Args:
            sizes: Elements of each segment.
            dtypes: The dtype of each segment; None for a segment that needs no buffer.

        Returns:
            1-D tensors; None for a segment of size 0 or without a dtype.
        """
        needed: dict[torch.dtype, int] = {}
        places: list[tuple[torch.dtype, int, int] | None] = []
        for size, dtype in zip(sizes, dtypes, strict=True):
            if not size or dtype is None:
                places.append(None)
                continue
            start = needed.get(dtype, 0)
            places.append((dtype, start, size))
            needed[dtype] = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        for dtype, total in needed.items():
            if dtype not in self._memory or self._memory[dtype].numel() < total:
                self._memory.pop(dtype, None)  # free before allocating, or both exist at once
                self._memory[dtype] = torch.empty(total, dtype=dtype, device=self.device)
        return [None if p is None else self._memory[p[0]][p[1] : p[1] + p[2]] for p in places]

    def clear(self) -> None:
        """Gives the memory back."""
        self._memory.clear()
