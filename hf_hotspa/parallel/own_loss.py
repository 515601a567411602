"""Losses of the user's own, as a part of the exact sum over the mini-batch.

Two kinds, both summed over packs, replicas and phases and divided by the N label tokens of the whole mini-batch:

* `TokenLoss`: a sum over tokens of something that the log-probability of the label, the label, and numbers of the data
  set say. Called on any slice of a pack, so it costs what the cross entropy costs, and the vocabulary may be cut.
* `SequenceLoss`: a sum over sequences of something that needs their logits, as the stock Trainer's `compute_loss_func`.
  Called once for each sequence with its whole logits; a cut vocabulary is gathered first.

Both are checked before the first step (`check`) with random numbers: the value and the gradient on a whole must be the
sums of those on its parts, or the result would depend on the packing.
Shapes: T tokens of a slice, L tokens of a sequence, V rows of the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.parallel.loss import IGNORE


@dataclass(frozen=True)
class TokenSlice:
    """Some label tokens of a pack, of one or several sequences; positions without a label are left out.

    Args:
        log_probs: [T], fp32 or wider: the log-probability of each label, with gradient.
        labels: int64 [T], the label tokens themselves.
        rows: int64 [T], the row of each, counted within the mini-batch over all ranks.
        positions: int64 [T], where in its row each label token stands; the first token of a row is 0 and never a label.
        columns: [T] each, by name: the number that the data set gives this label token, or its row. Of the dtype of
            `log_probs`, or int64.
    """

    log_probs: Tensor
    labels: Tensor
    rows: Tensor
    positions: Tensor
    columns: Mapping[str, Tensor]

    def __getitem__(self, part: Any) -> "TokenSlice":
        """The tokens of a slice, a mask or an index."""
        columns = {name: column[part] for name, column in self.columns.items()}
        return TokenSlice(self.log_probs[part], self.labels[part], self.rows[part], self.positions[part], columns)


@dataclass(frozen=True)
class WholeSequence:
    """One sequence with its logits.

    Args:
        logits: [1, L, V], fp32 or wider, with gradient.
        input_ids: int64 [1, L].
        labels: int64 [1, L], as in the data set, not shifted; -100 where there is none, and at the first token.
        attention_mask: int64 [1, L], all 1.
        row: The data set row.
        columns: By name, [1, L] with the numbers of the tokens or [1] with the number of the row.
    """

    logits: Tensor
    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor
    row: int
    columns: Mapping[str, Tensor]


class _OwnLoss:
    """What both kinds have.

    Args:
        function: The loss.
        columns: The columns of the data set that it reads.
        name: What it is called in messages; the function's own name when None.
        example: For the check at the start, values of the columns, [length of a row] or []; when None, fractions for
            each token are made up.

    Attributes:
        of_model: Whether it is the loss that the model's own forward must return, too.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        columns: Sequence[str] = (),
        *,
        name: str | None = None,
        example: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise HotspaConfigError(f"the loss is a {type(function).__name__}", fix="pass a function")
        self.function, self.columns = function, tuple(columns)
        self.name = name or getattr(function, "__qualname__", type(function).__name__)
        self.example = example
        self.of_model = False

    def __repr__(self) -> str:  # compared between ranks
        return f"{type(self).__name__}({self.name}, {self.columns})"


class TokenLoss(_OwnLoss):
    """A loss that is a sum over tokens: `function(TokenSlice) -> scalar`, the sum over its tokens, not divided."""

    def of(self, log_probs: Tensor, pack: TokenSlice, tokens: slice, scale: float) -> Tensor:
        """The scaled loss of a slice, an fp64 scalar.

        Args:
            log_probs: [t] of `vocab_parallel_log_probabilities`.
            pack: `tokens_of` the micro-batch.
            tokens: Which of its tokens these are.
            scale: 1 / (label tokens of the mini-batch).
        """
        part = pack[tokens]
        labelled = (part.labels != IGNORE).nonzero()[:, 0]
        if not labelled.numel():
            return log_probs.sum(dtype=torch.float64) * 0.0
        columns = {n: c.to(log_probs.dtype) if c.is_floating_point() else c for n, c in part.columns.items()}
        given = TokenSlice(log_probs, part.labels, part.rows, part.positions, columns)[labelled]
        return self.function(given).double() * scale


def tokens_of(micro_batch: MicroBatch) -> TokenSlice:
    """All positions of a pack, those without a label too, and without log-probabilities: [T] each."""
    labels = micro_batch.labels[0]
    lengths = torch.tensor(micro_batch.lengths)
    keys = torch.tensor(micro_batch.keys or [(-1, 0)] * len(micro_batch.lengths))
    rows, starts = keys.repeat_interleave(lengths, 0).to(labels.device).unbind(1)
    columns = {}
    for name, column in micro_batch.columns.items():
        if column.dim() == 1:
            column = column.repeat_interleave(lengths.to(column.device))
        else:  # of the label: the next token; the last one of a sequence has none
            column = column[0] if micro_batch.cuts else column[0].roll(-1)
        columns[name] = column
    return TokenSlice(labels.new_empty(len(labels), 0), labels, rows, micro_batch.position_ids[0] + starts + 1, columns)


class SequenceLoss(_OwnLoss):
    """A loss that is a sum over whole sequences: `function(WholeSequence, num_items) -> scalar`.

    `num_items` is an int64 scalar tensor, N, and the function divides by it.
    """

    def of(self, logits: Tensor, micro_batch: MicroBatch, tokens: slice, scale: float) -> Tensor:
        """The loss of the sequences in a slice, an fp64 scalar.

        Args:
            logits: [t, V], of the whole vocabulary.
            micro_batch: The pack; its sequences are those that the collator named, padding is left out.
            tokens: Which of its tokens these are, from the beginning of a sequence to the end of one.
            scale: 1 / (label tokens of the mini-batch).
        """
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        num_items = torch.tensor(round(1 / scale), device=logits.device)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        begin = 0
        for index, length in enumerate(micro_batch.lengths):
            place = slice(begin, begin + length)
            begin += length
            if place.start < tokens.start or place.start >= tokens.stop or micro_batch.keys[index][0] < 0:
                continue
            shifted = micro_batch.labels[:, place]
            sequence = WholeSequence(
                logits[None, place.start - tokens.start : place.stop - tokens.start],
                micro_batch.input_ids[:, place],
                torch.cat([torch.full_like(shifted[:, :1], IGNORE), shifted[:, :-1]], 1),
                torch.ones_like(shifted),
                micro_batch.keys[index][0],
                {n: c[index : index + 1] if c.dim() == 1 else c[:, place] for n, c in micro_batch.columns.items()},
            )
            total = total + self.function(sequence, num_items).double()
        if not total.requires_grad:  # padding alone
            total = total + logits.sum(dtype=torch.float64) * 0.0
        return total
