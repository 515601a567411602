"""Counts what the engine will allocate on a rank, and raises an error if the device cannot hold it.

Layouts and plans decide it: the master store, the active strategy's weights and gradients, the switch buffers.
Activations and optimizer state are not included.
"""

import gc
from dataclasses import dataclass, fields

import torch

from hf_hotspa.errors import DeviceMemoryError

_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes on one rank."""

    master_weights: int  # the rank's share of the master store
    master_gradients: int  # of the same share
    # in the largest strategy of the pool; of two strategies with a second source. Includes all versions if stages
    # update by themselves.
    weights: int
    gradients: int  # in the largest strategy
    switch: int  # staging and relay buffers: everything beside source and target

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = ", ".join(f"{f.name.replace('_', ' ')} {getattr(self, f.name) / _MIB:,.1f}" for f in fields(self))
        return f"{self.total / _MIB:,.1f} MiB ({parts})"

    def check(self, limit_bytes: int | None, rank: int) -> None:
        """Raises `DeviceMemoryError`, with the parts of the total, if it is above the limit; None for no limit."""
        if limit_bytes is not None and self.total > limit_bytes:
            raise DeviceMemoryError(
                f"the strategies need {self} and the device has {limit_bytes / _MIB:,.1f} MiB",
                where=f"rank {rank}",
                why="activations and optimizer state come on top",
                fix="use strategies with more tp or pp, a smaller hotspa_staging_mb, no second source, or on GPUs hotspa_offload=master",
            )


def device_limit(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on an accelerator; None on the CPU, where the limit is unknown.

    First returns torch's cached memory (of a calibration, say) to the device: otherwise a plan made after a calibration
    would have less memory than one that reads its file.
    """
    if device.type != "cuda":
        return None
    gc.collect()  # a model has reference cycles
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
