"""DeepSpeed's learning rates: WarmupLR, WarmupDecayLR and WarmupCosineLR, the same numbers at the same steps.

The formulas are those of `deepspeed/runtime/lr_schedules.py` (0.19), against which the tests compare them. They are no
schedule of transformers': the default warm-up is logarithmic, the cosine starts a step further on, and DeepSpeed's
engine sets the rate of iteration 0 only after the first step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOG, LINEAR = "log", "linear"

TYPES: dict[str, dict[str, float | str | None]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": LOG},
    "WarmupDecayLR": {
        "total_num_steps": None, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000,
        "warmup_type": LOG,
    },
    "WarmupCosineLR": {
        "total_num_steps": None, "warmup_min_ratio": 0.0, "warmup_num_steps": 1000, "cos_min_ratio": 0.0001,
        "warmup_type": LOG,
    },
}  # fmt: skip
"""Type of a scheduler -> its params with DeepSpeed's defaults; None has no default of its own."""


@dataclass(frozen=True)
class DeepSpeedSchedule:
    """A schedule with nothing left open.

    Args:
        type: One of `TYPES`.
        params: Those of its type, all of them.
        peak: The learning rate after the warm-up.
    """

    type: str
    params: Mapping[str, Any]
    peak: float

    def rate(self, step: int) -> float:
        """The learning rate of an optimizer step, of which `step` came before."""
        iteration = step - 1  # DeepSpeed counts from the end of the first step
        cosine = self.type == "WarmupCosineLR"
        low = 0.0 if cosine else self.params["warmup_min_lr"]
        if iteration < 0:
            return low
        warmup = max(2, self.params["warmup_num_steps"])
        if iteration < warmup:
            linear = self.params["warmup_type"] == LINEAR
            share = iteration / warmup if linear else 1.0 / math.log(warmup) * math.log(iteration + 1)
        else:
            share = self._after(iteration, warmup)
        if not cosine:
            return low + (self.peak - low) * share
        begin = self.params["warmup_min_ratio"]
        return self.peak * (begin + share * (1.0 - begin) if iteration < warmup else share)

    def _after(self, iteration: int, warmup: int) -> float:
        """The share of the peak when the warm-up is over."""
        if self.type == "WarmupLR":
            return 1.0
        total = self.params["total_num_steps"]
        if self.type == "WarmupDecayLR":
            return max(0.0, float(total - iteration) / float(max(1.0, total - warmup)))
        progress = min(1.0, (iteration - warmup + 1) / max(1, total - warmup))
        share, end = (1 + math.cos(math.pi * progress)) / 2, self.params["cos_min_ratio"]
        return max(0.0, end + (1.0 - end) * share)
