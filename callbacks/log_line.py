"""One line for each log of training: what a person reads while it runs.

Owns `LogLine`, which stands in for the dictionaries that transformers prints, and `for_trackers`, which sorts the numbers for
TensorBoard, Weights & Biases and the like. Numbers of other logs (evaluation, the end) are printed as transformers does.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerState

_COUNTS = ("truncated", "split", "dropped", "empty", "skipped_mini_batches")
_SHOWN = ("hotspa/tokens_per_s", "hotspa/switch_share", "hotspa/memory_share")
_OF_ROWS = tuple(f"hotspa/{name}" for name in _COUNTS)


def memory_share() -> float | None:
    """The most memory that torch has reserved on this GPU, as a share of all of it; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.max_memory_reserved() / torch.cuda.mem_get_info()[1]


def for_trackers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The logs for TensorBoard, Weights & Biases and others: six numbers first (loss, gradient norm, learning rate, and three
    of `hotspa/`), what was done to rows where there is any, and all other numbers of ours below `hotspa_debug/`."""
    return {
        name if not name.startswith("hotspa/") or name in _SHOWN + _OF_ROWS else f"hotspa_debug/{name[7:]}": value
        for name, value in logs.items()
    }


class LogLine:
    """Makes the lines of one run, and estimates the time that is left from its own logs."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def text(self, logs: Mapping[str, Any], state: TrainerState) -> str:
        """The line.

        Args:
            logs: With `loss`.
        """
        step, now = state.global_step, time.perf_counter()
        if self._first is None or step <= self._first[0]:
            self._first = step, now
        parts = [f"step {step}/{state.max_steps}", f"loss {float(logs['loss']):.4f}"]
        for name, short, form in (
            ("grad_norm", "grad_norm", ".3g"),
            ("learning_rate", "lr", ".2e"),
            ("hotspa/tokens_per_s", "tokens/s", ",.0f"),
            ("hotspa/memory_share", "memory", ".0%"),
            ("hotspa/switch_share", "switching", ".1%"),
            ("hotspa/mfu", "MFU", ".1%"),
        ):
            if logs.get(name) is not None:
                parts.append(f"{short} {float(logs[name]):{form}}")
        parts += [f"{name} {int(logs[f'hotspa/{name}'])}" for name in _COUNTS if logs.get(f"hotspa/{name}")]
        first, began = self._first
        if step > first:
            parts.append(f"left {_clock((state.max_steps - step) * (now - began) / (step - first))}")
        return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
