"""One hidden state for each row."""

import torch
from torch import Tensor, nn

from hf_hotspa.errors import check_choice

MEAN, LAST, FIRST, ROOT, LATER = "mean", "last", "first", "root", "later"
KINDS = (MEAN, LAST, FIRST, ROOT, LATER)


def shares(kind: str, places: Tensor, lengths: Tensor | int) -> Tensor:
    """fp64: what the token at each place, from 0, of a row of so many tokens counts in the row's state."""
    number, here = torch.as_tensor(lengths, dtype=torch.float64, device=places.device), places.double()
    if kind == MEAN:
        return (1 / number).expand(here.shape)
    if kind == ROOT:
        return number.rsqrt().expand(here.shape)
    if kind == LATER:
        return 2 * (here + 1) / (number * (number + 1))
    return (here == (number - 1 if kind == LAST else 0)).double()


class Pooling(nn.Module):
    """One of the hidden states of each row's tokens, or a sum of them. In a switched model the ranks that compute them pool
    them, and no rank has a table of all tokens.

    Args:
        kind: `mean`; `last` or `first`; `root`, the sum over the root of their number; `later`, the mean with the weights
            1, 2, 3, ...
    """

    def __init__(self, kind: str = MEAN) -> None:
        super().__init__()
        check_choice("a pooling", kind, KINDS)
        self.kind = kind

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, h] of hidden states [B, L, h]; `attention_mask` [B, L] is 1 for tokens."""
        is_token = attention_mask == 1
        counts = shares(self.kind, is_token.cumsum(1) - 1, is_token.sum(1, keepdim=True)) * is_token
        wide = torch.promote_types(hidden.dtype, torch.float32)
        of_tokens = hidden.masked_fill(~is_token[..., None], 0).to(wide) * counts[..., None].to(wide)
        return of_tokens.sum(1).to(hidden.dtype)
