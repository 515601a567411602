"""Measures what ranks of cp exchange: an all-to-all, and gathering, on every group of cp that the world can have.

Owns `measure_exchanges`. The exchanges are the engine's own (`parallel.context`), all groups of a strategy at the same
time, as replicas have them in training.
"""

import time
from collections.abc import Iterable

import torch
import torch.distributed as dist

from hf_hotspa.costs.measurements import ExchangeSample
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.context import ContextGroup, gathered, scattered_sum
from hf_hotspa.parallel.mesh import ProcessGroups
from hf_hotspa.strategy import Strategy

_SIZES = (64 << 10, 4 << 20)
"""Bytes of the tensor that a rank takes part with in an all-to-all, and that it has after gathering."""
_ROUNDS = 5


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
    groups: ProcessGroups, layouts: Iterable[Strategy], share: float, agreement: Agreement
) -> tuple[ExchangeSample, ...]:
    """Seconds of both exchanges in two sizes, the slowest rank's; the fastest of a few rounds counts. Collective.

    Args:
        groups: Makes the groups of cp, and keeps them.
        layouts: Strategies of the whole world with cp above 1.
        share: Cores for each rank. Below 1 a rank's share of the seconds is counted, as if it had a core to itself: the
            time model adds up the ranks that share one.
        agreement: Host-side barrier and gathering.

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
            most = max(1, size // 4 // layout.cp)
            own = torch.zeros(layout.cp, most, device=groups.device)
            for name in ("all_to_all", "gather"):
                rows = []
                for _ in range(_ROUNDS + 1):
                    context.sent_bytes = 0
                    agreement.barrier()
                    begin = time.perf_counter()
                    work, _ = scattered_sum(own, context) if name == "all_to_all" else gathered(own[0], most, context)
                    work.wait()
                    if groups.device.type == "cuda":
                        torch.cuda.current_stream(groups.device).synchronize()
                    rows.append(time.perf_counter() - begin)
                seconds = float(agreement.gather(rows[1:]).amax(0).min()) * min(1.0, share)
                samples.append(ExchangeSample(name, layout.cp, layout.tp, context.sent_bytes, seconds))
    return tuple(samples)
