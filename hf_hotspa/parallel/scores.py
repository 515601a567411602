"""What losses of whole sequences read of each token's logits, over a vocabulary that is cut over the tensor-parallel group.

Of the distribution p of the logits z = logits / temperature of a token, and its label:

* log_probs: log p[label], and entropy: -sum(p log p). Both have a gradient;
* log_sum_sq_probs: log(sum(p^2)), mean_logits: the mean of z over the vocabulary, is_top1: whether the label has the
  largest z. Without a gradient.

These are the fields of TRL's `FusedCausalLMOutput`. All are 0 where there is no label. Shapes: T tokens, V local rows of the
vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.parallel.loss import IGNORE, vocab_parallel_log_probabilities
from hf_hotspa.parallel.waiting import CLOCK

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
