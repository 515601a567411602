"""How the ranks of a calibration measure, and what goes between ranks: links, hops of pipelines, exchanges of cp.

All ranks begin at the same time, and everything runs in turn, round after round, so that what disturbs the machine for a while
disturbs all alike. What is sent goes over the transport that switches use: in `measure_link` every rank sends to one
neighbour and receives from the other at the same time, as in a switch; in `measure_hop` a message goes to the neighbour and back
while nobody else talks, as in a pipeline. The exchanges of cp are the engine's own (`parallel.context`), all groups of a strategy at
the same time, as replicas have them in training.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hf_hotspa.costs.calibration import ExchangeSample, Link
from hf_hotspa.costs.coefficients import Hop
from hf_hotspa.engine.phase import moment
from hf_hotspa.engine.transport import ProcessGroupTransport
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.context import ContextGroup, gathered, scattered_sum
from hf_hotspa.parallel.mesh import ProcessGroups
from hf_hotspa.strategy import Strategy

_TIMES = 5


@dataclass(frozen=True)
class Measuring:
    """What every measurement needs. Its methods are collective.

    Args:
        agreement: Host-side barrier and gathering.
        device: Where this rank computes.
        share: Cores for each rank. From 1 on, waiting is part of a cost; below, ranks take turns on a core.
        rounds: How often everything is measured, after one round that warms up.
        say: Told what is being done.
        until: When this rank should have finished, on the clock of `time.perf_counter`; infinite where that does not matter.
    """

    agreement: Agreement
    device: torch.device
    share: float
    rounds: int
    say: Callable[[str], object]
    until: float = math.inf

    def is_late(self) -> bool:
        """Whether any rank should have finished: then nothing is measured that something else can stand for."""
        return self.until < math.inf and bool((self.agreement.gather([time.perf_counter() - self.until]) > 0).any())

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds of this rank by the clock, and those that its threads spent on a core."""
        self.agreement.barrier()
        begin, on_core = time.perf_counter(), time.process_time()
        run()
        return moment(self.device) - begin, time.process_time() - on_core

    def repeated(self, run: Callable[[], object]) -> Tensor:
        """Seconds by the clock of what runs a few times, after one that warms up: [rank, time]."""
        return self.agreement.gather([self.timed(run)[0] for _ in range(_TIMES + 1)][1:])


# -- links and hops ------------------------------------------------------------------------------------------------

_SIZES = (4 << 10, 256 << 10, 4 << 20, 16 << 20)
_TOKENS = (16, 512, 4096)


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """`(seconds of nothing, seconds a byte)`: least squares on relative errors, neither below zero.

    Args:
        sizes: Bytes of each message.
    """
    measured = np.asarray(seconds)
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, np.float64)], 1) / measured[:, None]
    latency, each = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0].tolist()
    if latency < 0:
        latency, each = 0.0, float(np.median(measured / np.asarray(sizes)))
    return latency, max(each, 1e-15)


def measure_link(transport: ProcessGroupTransport, world_size: int, apart: int, measuring: Measuring) -> Link:
    """Latency and bandwidth while every rank sends to the rank `apart` after it. Collective.

    Args:
        apart: 1 for the neighbour on the node, the devices of a node for a neighbour on the next one.
    """
    rank = transport.rank
    peer, source = (rank + apart) % world_size, (rank - apart) % world_size
    out, into = (torch.zeros(max(_SIZES), dtype=torch.uint8, device=measuring.device) for _ in range(2))

    def both(size: int) -> None:
        transport.send(out[:size], peer, 0)
        transport.recv(into[:size], source, 0)
        transport.start().wait()

    latency, each = line(_SIZES, [float(measuring.repeated(partial(both, n)).amax(0).min()) for n in _SIZES])
    return Link(latency, 1 / each)


def measure_hop(transport: ProcessGroupTransport, apart: int, token_bytes: int, measuring: Measuring) -> Hop:
    """Half of the time to the rank `apart` after rank 0 and back. Collective.

    Args:
        token_bytes: Bytes of the hidden state of one token.
    """
    buffer = torch.zeros(max(_TOKENS) * token_bytes, dtype=torch.uint8, device=measuring.device)

    def there_and_back(count: int) -> None:
        message = buffer[: count * token_bytes]
        if transport.rank == 0:
            transport.send(message, apart, 0)
            transport.start().wait()
            transport.recv(message, apart, 1)
            transport.start().wait()
        elif transport.rank == apart:
            transport.recv(message, 0, 0)
            transport.start().wait()
            transport.send(message, 0, 1)
            transport.start().wait()

    taken = [float(measuring.repeated(partial(there_and_back, n))[0].min()) / 2 for n in _TOKENS]
    return Hop(*line(_TOKENS, taken))


# -- exchanges of cp -----------------------------------------------------------------------------------------------

_EXCHANGES: tuple[Literal["all_to_all", "gather"], ...] = ("all_to_all", "gather")
_EXCHANGED = (64 << 10, 4 << 20)
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
        for size in _EXCHANGED:
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
