"""Log-probabilities of labels, and their cross entropy, over a vocabulary that is cut over the tensor-parallel group:
logits are never gathered.

The loss of a micro-batch is `sum(CE) / N` with N the label tokens of the whole mini-batch, so that plain sums over
micro-batches, replicas and buckets give the token mean. With label smoothing e, CE becomes what the `LabelSmoother` of
transformers computes: `(1 - e) * -log p[label] + e * mean over the vocabulary of -log p`.
Shapes: T packed tokens, V local vocabulary rows.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.parallel.collectives import with_gradient
from hf_hotspa.parallel.waiting import CLOCK

IGNORE = -100
"""The label of a position without a target."""


class _VocabParallelLogProbabilities(torch.autograd.Function):
    """Per position `z[label] - log(sum(exp(z)))`, from one small exchange; the backward needs none.

    With smoothing e the mean of z over the vocabulary joins the exchange: the result is
    `(1 - e) * z[label] + e * mean(z) - log(sum(exp(z)))`. Positions without a label have 0.
    Every rank of the group must go on in the same way: what comes back is the gradient of a value that all of them have.

    Megatron-LM (Shoeybi et al., 2019, section 3) computes the loss of a parallel output embedding from two reductions,
    the peak and then the sum. Here every shard sums relative to a peak of its own, and the sums are rescaled when they
    meet, as online softmax does with blocks (Milakov and Gimelshein, 2018): half the latency.
    """

    @staticmethod
    def forward(
        ctx: Any,
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
            # of this shard; finite where it masks all its rows
            peak = z.amax(-1).clamp_(min=torch.finfo(z.dtype).min)
            target = torch.where(mine, z.gather(-1, row[:, None])[:, 0], 0.0)
        else:  # a shard without vocabulary rows
            peak, target = z.new_full(z.shape[:-1], torch.finfo(z.dtype).min), z.new_zeros(z.shape[:-1])
        if smoothing:
            target = (1 - smoothing) * target + smoothing / vocab_size * z.sum(-1)
        # a converted copy is ours to overwrite; the logits themselves are not
        probability = (z - peak[:, None] if z is logits else z.sub_(peak[:, None])).exp_()
        total, own_peak = probability.sum(-1), peak
        if group is not None:
            peaks, totals, targets = _of_all_shards([peak, total, target], group)
            peak, target = peaks.amax(0), targets.sum(0)
            total = (totals * (peaks - peak).exp_()).sum(0)
        target = target - peak
        valid = labels != IGNORE
        probability.mul_(((own_peak - peak).exp_() / total)[:, None])
        ctx.save_for_backward(probability, row, mine, valid)
        ctx.dtype, ctx.smoothing, ctx.vocab_size = logits.dtype, smoothing, vocab_size
        return torch.where(valid, target - total.log(), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        probability, row, mine, valid = ctx.saved_tensors
        if probability.shape[-1]:
            probability.scatter_add_(-1, row[:, None], (ctx.smoothing - 1) * mine.to(probability.dtype)[:, None])
            if ctx.smoothing:
                probability.sub_(ctx.smoothing / ctx.vocab_size)
        weight = torch.where(valid, -grad.to(probability.dtype), 0.0)
        return probability.mul_(weight[:, None]).to(ctx.dtype), None, None, None, None, None


def _of_all_shards(values: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """[values, shards, T]: some [T] of every shard, in the same order on all of them."""
    own = torch.stack(values)
    shards = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with CLOCK.waiting:
        dist.all_gather(shards, own, group=group)
    return torch.stack(shards, dim=1)


def vocab_parallel_log_probabilities(
    logits: Tensor,
    labels: Tensor,
    first_row: int = 0,
    group: dist.ProcessGroup | None = None,
    *,
    smoothing: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """The log-probability of each position's label. Its backward may run once.

    Args:
        logits: [T, V], this rank's rows of the vocabulary, in any floating dtype; computed in fp32 or wider.
        labels: int64 [T], already shifted: the target of each position, `IGNORE` where there is none.
        first_row: The vocabulary row of `logits[:, 0]`.
        group: The tensor-parallel group, or None when the vocabulary is whole.
        smoothing: Label smoothing, from 0 to 1: the smoothed targets' log-probability then.
        vocab_size: Rows of the whole vocabulary; those of `logits` when None. Needed by smoothing over a group.

    Returns:
        [T], fp32 or wider, equal on all ranks of the group; 0 where there is no label.
    """
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    log_probabilities: Tensor = _VocabParallelLogProbabilities.apply(
        logits, labels, first_row, group, smoothing, vocab_size
    )
    return log_probabilities


def of_nothing(logits: Tensor, tokens: slice) -> Tensor:
    """The loss 0 of logits [t, V] that are of no token of a pack; its gradient is 0, whatever they are."""
    zeros = partial(torch.zeros, logits.shape, dtype=logits.dtype, device=logits.device)
    return with_gradient(lambda x: torch.zeros((), dtype=torch.float64, device=x.device), lambda _: zeros(), logits)


# -- scores -----------------------------------------------------------------------------------------------------------

# What losses of whole sequences read of each token's logits, over a vocabulary that is cut over the tensor-parallel
# group.
#
# Of the distribution p of the logits z = logits / temperature of a token, and its label:
#
# * log_probs: log p[label], and entropy: -sum(p log p). Both have a gradient;
# * log_sum_sq_probs: log(sum(p^2)), mean_logits: the mean of z over the vocabulary, is_top1: whether the label has the
#   largest z. Without a gradient.
#
# These are the fields of TRL's `FusedCausalLMOutput`. All are 0 where there is no label. Shapes: T tokens, V local
# rows of the
# vocabulary.


FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class _Scores(torch.autograd.Function):
    """All of `FIELDS`; the first two with a gradient: dH/dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first_row: int, group: dist.ProcessGroup | None, vocab_size: int,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        tokens, width = z.shape
        lowest = torch.finfo(z.dtype).min

        def over_shards(x: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
            if group is not None:
                with CLOCK.waiting:
                    dist.all_reduce(x, operation, group=group)
            return x

        peak = z.amax(-1).clamp_(min=lowest) if width else z.new_full((tokens,), lowest)
        peak = over_shards(peak, dist.ReduceOp.MAX)
        log_total = over_shards((z - peak[:, None]).exp().sum(-1)).log()
        log_p = (z - (peak + log_total)[:, None]).clamp_(
            min=lowest
        )  # of a masked row it is -inf, and p * log_p not a number
        p = log_p.exp()
        local = labels - first_row
        mine = (local >= 0) & (local < width) & (labels != IGNORE)
        row = torch.where(mine, local, 0)
        own = torch.where(mine, z.gather(-1, row[:, None])[:, 0], 0.0) if width else z.new_zeros(tokens)
        sums = over_shards(torch.stack([own, -(p * log_p).sum(-1), (p * p).sum(-1), z.sum(-1) / vocab_size]))
        valid, is_top = labels != IGNORE, sums[0] >= peak
        entropy = sums[1]
        ctx.save_for_backward(log_p, p, row, mine, valid, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        values = torch.stack([sums[0] - peak - log_total, entropy, sums[2].log(), sums[3], is_top.to(z.dtype)])
        values = torch.where(valid, values, 0.0)
        ctx.mark_non_differentiable(values[2:])
        return values[0], values[1], values[2:]

    @staticmethod
    def backward(ctx: Any, of_log_p: Tensor, of_entropy: Tensor, _: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        log_p, p, row, mine, valid, entropy = ctx.saved_tensors
        of_log_p, of_entropy = torch.where(valid, of_log_p, 0.0), torch.where(valid, of_entropy, 0.0)
        gradient = p * -(of_log_p[:, None] + of_entropy[:, None] * (log_p + entropy[:, None]))
        if p.shape[-1]:
            gradient.scatter_add_(-1, row[:, None], (of_log_p * mine)[:, None])
        return (gradient / ctx.temperature).to(ctx.dtype), None, None, None, None, None


def token_scores(
    logits: Tensor,
    labels: Tensor,
    first_row: int,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    all_fields: bool = True,
) -> tuple[Tensor, ...]:
    """The numbers of each token, [T] each, fp32 or wider, equal on all ranks of the group; its backward may run once.

    Args:
        logits: [T, V], this rank's rows of the vocabulary, in any floating dtype.
        labels: int64 [T], already shifted; -100 where there is none.
        first_row: The vocabulary row of `logits[:, 0]`.
        group: The tensor-parallel group; None where the vocabulary is whole.
        vocab_size: Rows of the whole vocabulary.
        all_fields: Whether all of `FIELDS` are wanted; else the first one alone, which costs what a cross entropy costs.
    """
    if all_fields:
        log_probs, entropy, others = _Scores.apply(logits, labels, first_row, group, vocab_size, temperature)
        return log_probs, entropy, *others
    z = logits if temperature == 1.0 else logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return (vocab_parallel_log_probabilities(z, labels, first_row, group, vocab_size=vocab_size),)
