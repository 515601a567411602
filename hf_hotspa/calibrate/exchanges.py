"""Measures what ranks of cp exchange: an all-to-all, and gathering, on every group of cp that the world can have.

The exchanges are the engine's own (`parallel.context`), all groups of a strategy at the same time, as replicas have them in
training.
"""

from collections.abc import Iterable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.calibrate.measuring import Measuring
from hf_hotspa.costs.measurements import ExchangeSample
from hf_hotspa.parallel.context import ContextGroup, gathered, scattered_sum
from hf_hotspa.parallel.mesh import ProcessGroups
from hf_hotspa.strategy import Strategy

_EXCHANGES: tuple[Literal["all_to_all", "gather"], ...] = ("all_to_all", "gather")
_SIZES = (64 << 10, 4 << 20)
"""Bytes of the tensor that a rank takes part with in an all-to-all, and that it has after gathering."""


def context_layouts(world_size: int, degrees: Iterable[int]) -> list[Strategy]:
    """The strategies whose groups of cp are measured: every cp beside each tp, the other ranks being replicas.

    Args:
        degrees: Tensor-parallel degrees that divide the world.
    """
    return [
        Strategy(world_size // (tp * cp), tp, cp=cp)
        for tp in sorted(set(degrees))
        for cp in range(2, world_size // tp + 1)
        if world_size // tp % cp == 0
    ]


def measure_exchanges(
    groups: ProcessGroups, layouts: Iterable[Strategy], measuring: Measuring
) -> tuple[ExchangeSample, ...]:
    """Seconds of both exchanges in two sizes, the slowest rank's; the fastest of a few rounds counts. Collective.

    Where ranks share cores, a rank's share of the seconds is counted, as if it had a core to itself: the time model adds up
    the ranks that share one.

    Args:
        groups: Makes the groups of cp, and keeps them.
        layouts: Strategies of the whole world with cp above 1.

    Returns:
        Four samples for each layout, the same on every rank.
    """
    samples = []
    for layout in layouts:
        made = {ranks: groups.of(ranks) for ranks in layout.groups("cp")}
        group = made[layout.group_of(groups.rank, "cp")]
        assert group is not None
        context = ContextGroup(group, layout.cp, dist.get_rank(group))
        for size in _SIZES:
            own = torch.zeros(layout.cp, max(1, size // 4 // layout.cp), device=groups.device)
            for name in _EXCHANGES:
                seconds = measuring.repeated(partial(_exchange, name, own, context))
                seconds_each = float(seconds.amax(0).min()) * min(1.0, measuring.share)
                samples.append(ExchangeSample(name, layout.cp, layout.tp, context.sent_bytes, seconds_each))
    return tuple(samples)


def _exchange(name: str, own: Tensor, context: ContextGroup) -> None:
    """One exchange; afterwards `context` has counted its bytes alone."""
    context.sent_bytes = 0
    work, _ = scattered_sum(own, context) if name == "all_to_all" else gathered(own[0], own.shape[1], context)
    work.wait()
