"""Measures links: what switches send over, and what a pipeline passes from stage to stage.

Owns two measurements, both collective and both made by the transport that switches use: `measure_link`, in which every
rank sends to one neighbour and receives from the other at the same time, as in a switch; and `measure_hop`, in which a
message goes to the neighbour and back while nobody else talks, as in a pipeline.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from hf_hotspa.calibrate.measuring import Measuring
from hf_hotspa.costs.coefficients import Hop
from hf_hotspa.costs.measurements import Link
from hf_hotspa.engine.transport import ProcessGroupTransport

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
