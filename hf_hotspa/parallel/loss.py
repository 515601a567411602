"""Log-probabilities of labels, and their cross entropy, over a vocabulary cut by tp: logits are never gathered.

The loss of a micro-batch is `sum(CE) / N` with N the label tokens of the whole mini-batch, so plain sums over micro-batches,
replicas and buckets give the token mean. With label smoothing e, CE equals the `LabelSmoother` of transformers:
`(1 - e) * -log p[label] + e * mean over the vocabulary of -log p`.

Custom losses are sums, too: over tokens (`TokenLoss`, called on any slice of a pack, so it costs as much as the cross entropy,
and the vocabulary may be cut), or over sequences with their whole logits, gathered from a cut vocabulary (`SequenceLoss`, as
the stock Trainer's `compute_loss_func`). Both are checked before the first step (`engine.loss_check`).
Shapes: T tokens of a pack or slice, L tokens of a sequence, V (local) rows of the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.parallel.collectives import CLOCK, Context, with_gradient

IGNORE = -100  # the label of a position without a target


class _VocabParallelLogProbabilities(torch.autograd.Function):
    """Per position `z[label] - log(sum(exp(z)))`, from one small exchange; the backward needs none.

    With smoothing e the mean of z over the vocabulary joins the exchange: the result is
    `(1 - e) * z[label] + e * mean(z) - log(sum(exp(z)))`. Positions without a label have 0.
    Every rank of the group must use the result in the same way: the gradient is of a value that all of them have.

    Megatron-LM (Shoeybi et al., 2019, section 3) computes the loss of a parallel output embedding from two reductions,
    the peak and then the sum. Here every shard sums relative to its own peak, and the sums are rescaled when they meet, as
    online softmax does with blocks (Milakov and Gimelshein, 2018): half the latency.
    """

    @staticmethod
    def forward(
        ctx: Context,
        logits: Tensor,
        labels: Tensor,
        first_row: int,
        group: dist.ProcessGroup | None,
        smoothing: float,
        vocab_size: int,
    ) -> Tensor:
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        local = labels - first_row
        mine = (local >= 0) & (local < z.shape[-1]) & (labels != IGNORE)
        row = torch.where(mine, local, 0)
        if z.shape[-1]:
            # this shard's peak; finite even if all its rows are masked
            peak = z.amax(-1).clamp_(min=torch.finfo(z.dtype).min)
            target = torch.where(mine, z.gather(-1, row[:, None])[:, 0], 0.0)
        else:  # a shard without vocabulary rows
            peak, target = z.new_full(z.shape[:-1], torch.finfo(z.dtype).min), z.new_zeros(z.shape[:-1])
        if smoothing:
            target = (1 - smoothing) * target + smoothing / vocab_size * z.sum(-1)
        # a converted copy may be overwritten, the logits may not
        probability = (z - peak[:, None] if z is logits else z.sub_(peak[:, None])).exp_()
        total, own_peak = probability.sum(-1), peak
        if group is not None:
            peaks, totals, targets = _gathered([peak, total, target], group)
            peak, target = peaks.amax(0), targets.sum(0)
            total = (totals * (peaks - peak).exp_()).sum(0)
        target = target - peak
        valid = labels != IGNORE
        probability.mul_(((own_peak - peak).exp_() / total)[:, None])
        ctx.save_for_backward(probability, row, mine, valid)
        ctx.dtype, ctx.smoothing, ctx.vocab_size = logits.dtype, smoothing, vocab_size
        return torch.where(valid, target - total.log(), 0.0)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        probability, row, mine, valid = ctx.saved_tensors
        if probability.shape[-1]:
            probability.scatter_add_(-1, row[:, None], (ctx.smoothing - 1) * mine.to(probability.dtype)[:, None])
            if ctx.smoothing:
                probability.sub_(ctx.smoothing / ctx.vocab_size)
        weight = torch.where(valid, -grad.to(probability.dtype), 0.0)
        return probability.mul_(weight[:, None]).to(ctx.dtype), None, None, None, None, None


def _gathered(values: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """[values, shards, T]: some [T] of every shard, in the same order on all."""
    own = torch.stack(values)
    shards = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with CLOCK.waiting:
        dist.all_gather(shards, own, group=group)
    return torch.stack(shards, dim=1)


def vocab_parallel_log_probabilities(
    logits: Tensor,  # [T, V], this rank's rows of the vocabulary, in any floating dtype; computed in fp32 or wider
    labels: Tensor,  # int64 [T], already shifted: the target of each position, or `IGNORE`
    first_row: int = 0,  # the vocabulary row of `logits[:, 0]`
    group: dist.ProcessGroup | None = None,  # the tensor-parallel group, or None when the vocabulary is whole
    *,
    smoothing: float = 0.0,  # label smoothing, from 0 to 1; the result is then the smoothed targets' log-probability
    # rows of the whole vocabulary; the width of `logits` when None. Needed by smoothing over a group.
    vocab_size: int | None = None,
) -> Tensor:
    """The log-probability of each position's label. Its backward may run once. Returns [T], fp32 or wider, equal on all
    ranks of the group; 0 for positions without a label."""
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    log_probabilities: Tensor = _VocabParallelLogProbabilities.apply(
        logits, labels, first_row, group, smoothing, vocab_size
    )
    return log_probabilities


def of_nothing(logits: Tensor, tokens: slice) -> Tensor:
    """The loss 0, with gradient 0, of any logits [t, V] of idle tokens."""
    zeros = partial(torch.zeros, logits.shape, dtype=logits.dtype, device=logits.device)
    return with_gradient(lambda x: torch.zeros((), dtype=torch.float64, device=x.device), lambda _: zeros(), logits)


@dataclass(frozen=True)
class TokenSlice:
    """Some label tokens of a pack, of one or several sequences; positions without a label are left out.

    Args:
        log_probs: [T], fp32 or wider: the log-probability of each label, with gradient.
        labels: int64 [T], the label tokens.
        rows: int64 [T], the row of each, counted within the mini-batch over all ranks.
        positions: int64 [T], each label token's position in its row; a row's first token is at 0 and never a label.
        columns: [T] each, by name: the data set's number for this label token, or for its row. Of the dtype of `log_probs`,
            or int64.
    """

    log_probs: Tensor
    labels: Tensor
    rows: Tensor
    positions: Tensor
    columns: Mapping[str, Tensor]

    def __getitem__(self, part: slice | Tensor) -> "TokenSlice":
        """The tokens of a slice, a mask or an index."""
        columns = {name: column[part] for name, column in self.columns.items()}
        return TokenSlice(self.log_probs[part], self.labels[part], self.rows[part], self.positions[part], columns)


@dataclass(frozen=True)
class WholeSequence:
    """One sequence with its logits.

    Args:
        logits: [1, L, V], fp32 or wider, with gradient.
        input_ids: int64 [1, L].
        labels: int64 [1, L], as in the data set, not shifted; -100 for no label, and at the first token.
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
    """The common part of both kinds of loss."""

    def __init__(
        self,
        function: Callable[..., Tensor],  # the loss
        columns: Sequence[str] = (),  # the columns of the data set that it reads
        *,
        name: str | None = None,  # its name in messages; the function's own name when None
        # values of the columns for the check at the start, [length of a row] or []; None: made-up fractions
        example: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise HotspaConfigError(f"the loss is a {type(function).__name__}", fix="pass a function")
        self.function, self.columns = function, tuple(columns)
        self.name = name or getattr(function, "__qualname__", type(function).__name__)
        self.example = example
        self.of_model = False  # whether the model's own forward must return this loss, too

    def __repr__(self) -> str:  # compared between ranks
        return f"{type(self).__name__}({self.name}, {self.columns})"


class TokenLoss(_OwnLoss):
    """A loss that is a sum over tokens: `function(TokenSlice) -> scalar`, the sum over its tokens, not divided."""

    def of(self, log_probs: Tensor, pack: TokenSlice, tokens: slice, scale: float) -> Tensor:
        """The fp64 loss of the slice `tokens` of a micro-batch's `tokens_of`, from its `vocab_parallel_log_probabilities`
        [t]; scaled by 1 / (label tokens of the mini-batch)."""
        part = pack[tokens]
        labelled = (part.labels != IGNORE).nonzero()[:, 0]
        if not labelled.numel():
            return log_probs.sum(dtype=torch.float64) * 0.0
        columns = {n: c.to(log_probs.dtype) if c.is_floating_point() else c for n, c in part.columns.items()}
        given = TokenSlice(log_probs, part.labels, part.rows, part.positions, columns)[labelled]
        return self.function(given).double() * scale


def tokens_of(micro_batch: MicroBatch) -> TokenSlice:
    """All positions of a pack, also without a label, without log-probabilities: [T] each."""
    labels = micro_batch.labels[0]
    lengths = torch.tensor(micro_batch.lengths)
    keys = torch.tensor(micro_batch.keys or [(-1, 0)] * len(micro_batch.lengths))
    rows, starts = keys.repeat_interleave(lengths, 0).to(labels.device).unbind(1)
    columns = {}
    for name, column in micro_batch.columns.items():
        if column.dim() == 1:
            column = column.repeat_interleave(lengths.to(column.device))
        else:  # the label is the next token; a sequence's last token has none
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
            micro_batch: The pack; padding (sequences that the collator did not name) is left out.
            tokens: The place of the logits in the pack, from the beginning of a sequence to the end of one.
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
        if not total.requires_grad:  # nothing but padding
            total = total + logits.sum(dtype=torch.float64) * 0.0
        return total
