"""Collectives inside of a graph: what goes forward, and what their gradients do backward.

torch's collectives have no gradients of their own. All that move, copy or add up tensors are one autograd function here
(`with_gradient`): the gradient of such a map is a map of the same kind.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.parallel.waiting import CLOCK

# torch before 2.13 has these collectives under their older names only
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.of_gradients = backward
        return forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        made = ctx.of_gradients(*gradients)
        return None, None, *(made if isinstance(made, tuple) else (made,))


def with_gradient(forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor) -> Any:
    """What `forward` makes of the tensors: one, or a tuple; `backward` makes their gradients of its gradients alike.

    The graph keeps `backward`, and what that holds, until it has run.
    """
    return _WithGradient.apply(forward, backward, *tensors)


def start_gather(x: Tensor, most: int, group: dist.ProcessGroup) -> tuple[Any, Tensor]:
    """Starts to gather [m, ...] of every rank, m at most `most`: what to wait for, and [ranks, most, ...] of all then."""
    own = x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
    size = dist.get_world_size(group)
    whole = x.new_empty(size * most, *x.shape[1:])
    work = _all_gather(whole, own.contiguous(), group=group, async_op=True)
    return work, whole.view(size, most, *x.shape[1:])


def gather_rows(x: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[sum of rows, ...] of all ranks, of which rank i has `rows[i]`."""
    work, whole = start_gather(x, max(rows), group)
    CLOCK.wait(work)
    return torch.cat([part[:own] for part, own in zip(whole, rows, strict=True)])


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[P * n, ...] of all P ranks, which have [n, ...] each."""
    whole = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
    with CLOCK.waiting:
        _all_gather(whole, x.contiguous(), group=group)
    return whole


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...], this rank's part of the sum of [P * n, ...] over P ranks."""
    mine = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    with CLOCK.waiting:
        _reduce_scatter(mine, x.contiguous(), group=group)
    return mine
