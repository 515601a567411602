"""How much memory of a device this process may fill."""

import gc
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # comes with accelerate
import torch

_CGROUP = Path("/sys/fs/cgroup")


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


def free_memory(device: torch.device, local: int) -> tuple[float, str]:
    """Bytes that this process may fill, one of `local` on its machine, and the source of the number."""
    if (on_device := device_limit(device)) is not None:
        return float(on_device), "of what is free on the device"
    return _free_host_memory() / local, f"of the free memory of the machine, for each of {local} processes"


def _free_host_memory() -> float:
    free = float(psutil.virtual_memory().available)
    try:
        allowed = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, float(allowed) - used) if allowed.isdecimal() else free
