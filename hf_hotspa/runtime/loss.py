"""Cross entropy over a vocabulary that is cut over the tensor-parallel group: logits are never gathered.

The loss of a micro-batch is `sum(CE) / N` with N the label tokens of the whole mini-batch, so that plain sums over
micro-batches, replicas and buckets give the token mean. With label smoothing e, CE becomes what the `LabelSmoother` of
transformers computes: `(1 - e) * -log p[label] + e * mean over the vocabulary of -log p`.
Shapes: T packed tokens, V local vocabulary rows.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

IGNORE = -100
"""The label of a position without a target."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Per position `log(sum(exp(z))) - z[label]`, from two small reductions; the backward needs none.

    With smoothing e the mean of z over the vocabulary joins the second reduction: the loss is
    `log(sum(exp(z))) - (1 - e) * z[label] - e * mean(z)`.

    Megatron-LM (Shoeybi et al., 2019, section 3) computes the loss of a parallel output embedding in this way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        first_row: int,
        group: dist.ProcessGroup | None,
        scale: float,
        smoothing: float,
        vocab_size: int,
    ) -> Tensor:
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if z.shape[-1]:
            peak = z.amax(-1)
        else:  # a shard without vocabulary rows
            peak = z.new_full(z.shape[:-1], -torch.inf)
        if group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        # a converted copy is ours to overwrite; the logits themselves are not
        shifted = z - peak[:, None] if z is logits else z.sub_(peak[:, None])
        local = labels - first_row
        mine = (local >= 0) & (local < z.shape[-1]) & (labels != IGNORE)
        row = torch.where(mine, local, 0)
        target = torch.where(mine, shifted.gather(-1, row[:, None])[:, 0], 0.0) if z.shape[-1] else peak * 0
        if smoothing:
            target = (1 - smoothing) * target + smoothing / vocab_size * shifted.sum(-1)
        probability = shifted.exp_()
        both = torch.stack([probability.sum(-1), target])
        if group is not None:
            dist.all_reduce(both, group=group)
        total, target = both
        valid = labels != IGNORE
        loss = torch.where(valid, total.log() - target, 0.0).sum(dtype=torch.float64) * scale
        probability.div_(total[:, None])
        ctx.save_for_backward(probability, row, mine, valid)
        ctx.scale, ctx.dtype = scale, logits.dtype
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        probability, row, mine, valid = ctx.saved_tensors
        if probability.shape[-1]:
            probability.scatter_add_(-1, row[:, None], (ctx.smoothing - 1) * mine.to(probability.dtype)[:, None])
            if ctx.smoothing:
                probability.sub_(ctx.smoothing / ctx.vocab_size)
        weight = valid.to(probability.dtype) * (grad * ctx.scale).to(probability.dtype)
        return probability.mul_(weight[:, None]).to(ctx.dtype), None, None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    scale: float,
    first_row: int = 0,
    group: dist.ProcessGroup | None = None,
    *,
    smoothing: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """`scale * sum(CE)` over the positions that have a label.

    Args:
        logits: [T, V], this rank's rows of the vocabulary, in any floating dtype; computed in fp32 or wider.
        labels: int64 [T], already shifted: the target of each position, `IGNORE` where there is none.
        scale: Factor on the sum, 1 / (label tokens of the mini-batch).
        first_row: The vocabulary row of `logits[:, 0]`.
        group: The tensor-parallel group, or None when the vocabulary is whole.
        smoothing: Label smoothing, from 0 to 1.
        vocab_size: Rows of the whole vocabulary; those of `logits` when None. Needed by smoothing over a group.

    Returns:
        An fp64 scalar, equal on all ranks of the group.
    """
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    return _VocabParallelCrossEntropy.apply(logits, labels, first_row, group, scale, smoothing, vocab_size)
