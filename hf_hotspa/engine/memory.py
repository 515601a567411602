"""What the engine will allocate on a rank, counted before it does; and the refusal when the device cannot hold it.

Counts what layouts and plans decide: the master store, the weights and gradients of the active strategy, the buffers of
switches. Activations and optimizer state come on top.
"""

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from hf_hotspa.engine.arena import arena_bytes
from hf_hotspa.errors import DeviceMemoryError
from hf_hotspa.layout.units import Rooms
from hf_hotspa.layout.vector import ParameterVector

_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes on one rank.

    Args:
        master_weights: Its share of the master store.
        master_gradients: The gradients of that share.
        weights: Weights in the largest strategy of the pool; of two strategies with a second source. Where stages update by
            themselves, with all versions of them.
        gradients: Gradients in the largest strategy.
        switch: Staging and relay buffers: all that a switch needs beside source and target.
    """

    master_weights: int
    master_gradients: int
    weights: int
    gradients: int
    switch: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = ", ".join(f"{f.name.replace('_', ' ')} {getattr(self, f.name) / _MIB:,.1f}" for f in fields(self))
        return f"{self.total / _MIB:,.1f} MiB ({parts})"

    def check(self, limit_bytes: int | None, rank: int) -> None:
        """Refuses what does not fit.

        Args:
            limit_bytes: What the engine may take on this rank; None for no limit.
            rank: This rank, for the message.

        Raises:
            DeviceMemoryError: the total is above the limit; the message says what it is made of.
        """
        if limit_bytes is not None and self.total > limit_bytes:
            raise DeviceMemoryError(
                f"the strategies need {self} and the device has {limit_bytes / _MIB:,.1f} MiB",
                where=f"rank {rank}",
                why="activations and optimizer state come on top",
                fix="use strategies with more tp or pp, a smaller hotspa_staging_mb, no second source, or on GPUs hotspa_offload=master",
            )


def forecast(
    vector: ParameterVector,
    master_sizes: Sequence[int],
    strategy_sizes: Iterable[Sequence[int]],
    switch_bytes: int,
    copies: int = 1,
    gradient_dtypes: Sequence[torch.dtype | None] | None = None,
    rooms: Sequence[Rooms] | None = None,
    versions: int = 1,
) -> MemoryForecast:
    """Counts what a rank will allocate.

    Args:
        master_sizes: Elements of this rank's share of the master store, by segment.
        strategy_sizes: For each strategy the elements of this rank's weight buffers, by segment.
        switch_bytes: Staging and relay buffers of the largest switch.
        copies: How many strategies' weights are kept at a time.
        gradient_dtypes: In which dtype each segment's gradients accumulate; in that of the masters when None.
        rooms: For each strategy, which segments share memory; none do when None.
        versions: How many versions of the trained weights are kept at a time.
    """
    masters = [getattr(torch, segment.master_dtype) for segment in vector.segments]
    weights = [getattr(torch, segment.dtype) for segment in vector.segments]
    trained = [dtype if s.trainable else None for dtype, s in zip(masters, vector.segments, strict=True)]
    strategies = list(strategy_sizes)

    def size(sizes: Sequence[int], dtypes: Sequence[torch.dtype | None]) -> int:
        return sum(n * dtype.itemsize for n, dtype in zip(sizes, dtypes, strict=True) if dtype)

    changing = [dtype if s.trainable else None for dtype, s in zip(weights, vector.segments, strict=True)]
    more = (versions - 1) * max((size(sizes, changing) for sizes in strategies), default=0)

    return MemoryForecast(
        size(master_sizes, masters),
        size(master_sizes, trained),
        more + copies * arena_bytes(strategies, weights, [room.weights for room in rooms] if rooms else None),
        arena_bytes(
            strategies,
            trained if gradient_dtypes is None else gradient_dtypes,
            [room.gradients for room in rooms] if rooms else None,
        ),
        switch_bytes,
    )


def device_limit(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on an accelerator; None on the CPU, where nobody can say what is.

    What torch keeps of tensors that are gone (of a calibration, say) is given back to the device first, else a plan made
    after a calibration would have less memory than one that reads it.
    """
    if device.type != "cuda":
        return None
    gc.collect()  # a model refers to itself
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
