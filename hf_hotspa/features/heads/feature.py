"""Models whose head is not a vocabulary's: classes of sequences and tokens, rewards, and others of single tokens.

Its hooks; see `hf_hotspa.seam`.
"""

from typing import TYPE_CHECKING, Any

from hf_hotspa.seam import Described

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_hotspa.features.heads.token_heads import TokenHeads


def describe(model: "nn.Module", compute_dtype: "torch.dtype | None") -> Described:
    """Which modules make numbers of the hidden states of tokens, and which model is in a chain of modules."""

    def readout() -> "TokenHeads | None":
        from hf_hotspa.features.heads.token_heads import read_heads

        return read_heads(model)

    def in_chain() -> tuple[Any, str] | None:
        from hf_hotspa.features.heads.model_in_chain import find

        return find(model)

    return Described(readout=readout, in_chain=in_chain)
