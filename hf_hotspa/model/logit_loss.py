"""What makes of logits the loss of a micro-batch: the cross entropy, or a loss of the user's own, over vocabulary shards."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_hotspa.data.collator import MicroBatch, is_idle
from hf_hotspa.parallel.loss import SequenceLoss, TokenLoss, of_nothing, tokens_of, vocab_parallel_log_probabilities
from hf_hotspa.parallel.mesh import TensorGroup
from hf_hotspa.parallel.tensor_parallel import gather_shards

LossOfLogits = Callable[[Tensor, slice], Tensor]
"""Of logits [t, V] of some tokens of a micro-batch their scaled loss, an fp64 scalar."""


class Objective(Protocol):
    """What a last stage computes of the logits of its packs."""

    @property
    def logit_widths(self) -> tuple[int, ...]:
        """Logits that each tensor-parallel shard has, in the order of shards."""

    def of(self, micro_batch: MicroBatch, whole: MicroBatch, scale: float) -> LossOfLogits:
        """What makes of the logits of some tokens of a micro-batch their scaled loss.

        Args:
            micro_batch: This rank's tokens of a pack.
            whole: The pack.
            scale: 1 / (label tokens of the mini-batch).
        """


@dataclass(frozen=True)
class LogitLoss:
    """The loss on a last stage.

    Args:
        tensor: The tensor-parallel group, over which the vocabulary is cut; None where it is whole.
        own: A loss of the user's own; None for the cross entropy.
        smoothing: Label smoothing of the cross entropy.
        vocab_size: Logits of a token.
        widths: Rows of the vocabulary in each shard, in the order of shards.
    """

    tensor: TensorGroup | None
    own: TokenLoss | SequenceLoss | None
    smoothing: float
    vocab_size: int
    widths: tuple[int, ...]

    def of(self, micro_batch: MicroBatch, whole: MicroBatch, scale: float) -> LossOfLogits:
        """What makes of the logits of some tokens of a micro-batch their scaled loss; 0 where its `whole` pack is idle."""
        tensor, own, labels = self.tensor, self.own, micro_batch.labels[0]
        if is_idle(whole):
            return of_nothing
        first_row, group = (sum(self.widths[: tensor.shard]), tensor.group) if tensor is not None else (0, None)
        if isinstance(own, SequenceLoss):
            widths = self.logit_widths

            def of_sequences(logits: Tensor, tokens: slice) -> Tensor:
                of_all_rows = logits if tensor is None else gather_shards(logits, widths, tensor)
                return own.of(of_all_rows, micro_batch, tokens, scale)

            return of_sequences

        def log_probabilities(logits: Tensor, tokens: slice) -> Tensor:
            return vocab_parallel_log_probabilities(
                logits, labels[tokens], first_row, group, smoothing=self.smoothing, vocab_size=self.vocab_size
            )

        if own is None:
            return lambda logits, tokens: log_probabilities(logits, tokens).sum(dtype=torch.float64) * -scale
        pack = tokens_of(micro_batch)
        return lambda logits, tokens: own.of(log_probabilities(logits, tokens), pack, tokens, scale)

    @property
    def logit_widths(self) -> tuple[int, ...]:
        """Logits that each tensor-parallel shard has, in the order of shards: its rows, without those that are dropped."""
        widths, left = [], self.vocab_size
        for width in self.widths:
            widths.append(min(width, max(left, 0)))
            left -= width
        return tuple(widths)
