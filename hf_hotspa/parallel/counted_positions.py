"""Positions of families that count them from the ids: RoBERTa and its kin number the tokens that are no padding.

Such an embedding computes its positions itself when it is given none: the first token is at `padding_idx + 1`, and a token
with the id of padding is at `padding_idx` and not counted (fairseq's `make_positions`). A pack must give every token the
position that it has where its sequence stands alone.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import UnsupportedError

_METHOD = "create_position_ids_from_input_ids"


def counting_from(base: nn.Module, family: str) -> int | None:
    """The id of padding from which a base model counts positions; None where it takes them from 0.

    Raises:
        UnsupportedError: it computes positions from the ids in an unknown way.
    """
    counting = next((module for module in base.modules() if hasattr(module, _METHOD)), None)
    if counting is None:
        return None
    padding = getattr(counting, "padding_idx", None)
    if type(padding) is int:
        ids = torch.tensor([[padding + 1, padding, padding + 2, padding + 1]], device="cpu")
        expected = [[padding + 1, padding, padding + 2, padding + 3]]
        try:
            positions = getattr(counting, _METHOD)(ids, padding).tolist()
        except Exception:  # whatever the family's code raises when it is asked in this way
            positions = None
        if positions == expected:
            return padding
    raise UnsupportedError(
        f"{type(counting).__name__} of {family} computes the positions of tokens from their ids in a way of its own",
        why="the sequences of a pack would get other positions than alone",
    )


def counted_positions(micro_batch: MicroBatch, padding: int) -> Tensor:
    """[1, T] int64: the positions of the tokens of whole sequences, counted from the id of padding."""
    counts = micro_batch.input_ids[0] != padding
    upto = counts.long().cumsum(0)
    ends = micro_batch.cu_seqlens.long()
    before = torch.cat([upto.new_zeros(1), upto])[ends[:-1]]
    of_sequence = torch.repeat_interleave(before, ends.diff(), output_size=micro_batch.num_tokens)
    return ((upto - of_sequence) * counts + padding)[None]


def with_counted_positions(micro_batch: MicroBatch, padding: int) -> MicroBatch:
    """The same pack of whole sequences with the positions of `counted_positions`."""
    return replace(micro_batch, position_ids=counted_positions(micro_batch, padding))
