"""Idle packs: what a replica runs that has no pack left, where ranks of others exchange tokens with it (`ep`)."""

from collections.abc import Mapping

import torch

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.rows.features import IGNORED_LABEL


def idle_micro_batch(columns: Mapping[str, torch.Tensor]) -> MicroBatch:
    """One token of padding: its loss, and its part of every gradient, is 0.

    Args:
        columns: Those of another pack, for their names and dtypes.
    """
    token = torch.zeros((1, 1), dtype=torch.int64)
    ends = torch.tensor([0, 1], dtype=torch.int32)
    beside = {name: c.new_zeros((1, 1) if c.dim() == 2 else 1) for name, c in columns.items()}
    return MicroBatch(token, token, token + IGNORED_LABEL, ends, (1,), 0, ((-1, 0),), beside)


def is_idle(micro_batch: MicroBatch) -> bool:
    """Whether a pack is nothing but padding."""
    return bool(micro_batch.keys) and all(row < 0 for row, _ in micro_batch.keys)
