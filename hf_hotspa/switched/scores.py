"""Per-token values of the logits that losses of whole sequences read, over a vocabulary cut over the tensor-parallel group.

For a token's label, and the distribution p of its logits z = logits / temperature:

* log_probs: log p[label], and entropy: -sum(p log p). Both have a gradient;
* log_sum_sq_probs: log(sum(p^2)), mean_logits: the mean of z over the vocabulary, is_top1: whether the label has the
  largest z. Without a gradient.

These are the fields of TRL's `FusedCausalLMOutput`; 0 without a label. Shapes: T tokens, V local vocabulary rows.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.parallel.collectives import CLOCK, Context
from hf_hotspa.parallel.loss import IGNORE

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
WITH_ARG_MAX = len(FIELDS) + 1
"""The number of fields of which the last is the token with the largest z, also without a label. Exact below 2**24."""


def over_shards(
    x: Tensor, group: dist.ProcessGroup | None, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduces over the shards of the vocabulary, in place; `group` is None if it is whole."""
    if group is not None:
        with CLOCK.waiting:
            dist.all_reduce(x, operation, group=group)
    return x


class _Scores(torch.autograd.Function):
    """All of `FIELDS`; the first two with a gradient: dH/dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Context, logits: Tensor, labels: Tensor, first_row: int, group: dist.ProcessGroup | None, vocab_size: int,
        temperature: float, with_arg_max: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        tokens, width = z.shape
        lowest = torch.finfo(z.dtype).min
        own_peak = z.amax(-1).clamp_(min=lowest) if width else z.new_full((tokens,), lowest)
        peak = over_shards(own_peak.clone(), group, dist.ReduceOp.MAX)
        log_total = over_shards((z - peak[:, None]).exp().sum(-1), group).log()
        log_p = (z - (peak + log_total)[:, None]).clamp_(
            min=lowest
        )  # -inf for a masked row, where p * log_p would be NaN
        p = log_p.exp()
        local = labels - first_row
        mine = (local >= 0) & (local < width) & (labels != IGNORE)
        row = torch.where(mine, local, 0)
        own = torch.where(mine, z.gather(-1, row[:, None])[:, 0], 0.0) if width else z.new_zeros(tokens)
        sums = over_shards(torch.stack([own, -(p * log_p).sum(-1), (p * p).sum(-1), z.sum(-1) / vocab_size]), group)
        valid, is_top = labels != IGNORE, sums[0] >= peak
        entropy = sums[1]
        ctx.save_for_backward(log_p, p, row, mine, valid, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        values = torch.stack([sums[0] - peak - log_total, entropy, sums[2].log(), sums[3], is_top.to(z.dtype)])
        values = torch.where(valid, values, 0.0)
        if with_arg_max:  # the first shard's of several equal ones, as of one process
            best = z.argmax(-1) + first_row if width else labels.new_zeros(tokens)
            best = over_shards(torch.where(own_peak == peak, best, vocab_size), group, dist.ReduceOp.MIN)
            values = torch.cat([values, best[None].to(z.dtype)])
        ctx.mark_non_differentiable(values[2:])
        return values[0], values[1], values[2:]

    @staticmethod
    def backward(ctx: Context, of_log_p: Tensor, of_entropy: Tensor, _: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        log_p, p, row, mine, valid, entropy = ctx.saved_tensors
        of_log_p, of_entropy = torch.where(valid, of_log_p, 0.0), torch.where(valid, of_entropy, 0.0)
        gradient = p * -(of_log_p[:, None] + of_entropy[:, None] * (log_p + entropy[:, None]))
        if p.shape[-1]:
            gradient.scatter_add_(-1, row[:, None], (of_log_p * mine)[:, None])
        return (gradient / ctx.temperature).to(ctx.dtype), None, None, None, None, None, None


def token_scores(
    logits: Tensor,  # [T, V], this rank's rows of the vocabulary, in any floating dtype
    labels: Tensor,  # int64 [T], already shifted; -100 for no label
    first_row: int,  # the vocabulary row of `logits[:, 0]`
    group: dist.ProcessGroup | None,  # the tensor-parallel group; None if the vocabulary is whole
    vocab_size: int,  # rows of the whole vocabulary
    temperature: float = 1.0,
    with_arg_max: bool = False,  # one more field, see `WITH_ARG_MAX`
) -> tuple[Tensor, ...]:
    """All `FIELDS` of each token, [T] each, fp32 or wider, equal on all ranks of the group; its backward may run
    once."""
    log_probs, entropy, others = _Scores.apply(logits, labels, first_row, group, vocab_size, temperature, with_arg_max)
    return log_probs, entropy, *others
