"""One hidden state for each row."""

import torch
from torch import Tensor, nn

from hf_hotspa.errors import check_choice

MEAN, LAST = "mean", "last"


class Pooling(nn.Module):
    """The mean, or the last, of the hidden states of each row's tokens. In a switched model the ranks that compute them pool
    them, and no rank has a table of all tokens.

    Args:
        kind: `mean` or `last`.
    """

    def __init__(self, kind: str = MEAN) -> None:
        super().__init__()
        check_choice("a pooling", kind, (MEAN, LAST))
        self.kind = kind

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, h] of hidden states [B, L, h]; `attention_mask` [B, L] is 1 for tokens."""
        if self.kind == MEAN:
            mask = attention_mask[..., None].to(hidden.dtype)
            return (hidden * mask).sum(1) / mask.sum(1)
        last = attention_mask.shape[1] - 1 - attention_mask.flip(1).argmax(1)
        return hidden[torch.arange(len(last), device=last.device), last]
