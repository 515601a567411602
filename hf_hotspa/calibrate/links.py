"""Measures links: what switches send over, and what a pipeline passes from stage to stage.

Owns two measurements, both collective and both made by the transport that switches use: `measure_link`, in which every
rank sends to one neighbour and receives from the other at the same time, as in a switch; and `measure_hop`, in which a
message goes to the neighbour and back while nobody else talks, as in a pipeline.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch

from hf_hotspa.costs.coefficients import Hop
from hf_hotspa.costs.measurements import Link
from hf_hotspa.engine.transport import ProcessGroupTransport
from hf_hotspa.parallel.agreement import Agreement

_SIZES = (4 << 10, 256 << 10, 4 << 20, 16 << 20)
_TOKENS = (16, 512, 4096)
_ROUNDS = 5


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


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


def measure_link(
    transport: ProcessGroupTransport,
    agreement: Agreement,
    world_size: int,
    apart: int,
    device: torch.device,
) -> Link:
    """Latency and bandwidth while every rank sends to the rank `apart` after it. Collective.

    Args:
        agreement: Host-side barrier and gathering.
        apart: 1 for the neighbour on the node, the devices of a node for a neighbour on the next one.
        device: Where the tensors lie.
    """
    rank = transport.rank
    peer, source = (rank + apart) % world_size, (rank - apart) % world_size
    out, into = (torch.zeros(max(_SIZES), dtype=torch.uint8, device=device) for _ in range(2))
    taken = []
    for size in _SIZES:
        rows = []
        for _ in range(_ROUNDS + 1):
            agreement.barrier()
            begin = time.perf_counter()
            transport.send(out[:size], peer, 0)
            transport.recv(into[:size], source, 0)
            transport.start().wait()
            _synchronize(device)
            rows.append(time.perf_counter() - begin)
        taken.append(float(agreement.gather(rows[1:]).amax(0).min()))
    latency, each = line(_SIZES, taken)
    return Link(latency, 1 / each)


def measure_hop(
    transport: ProcessGroupTransport,
    agreement: Agreement,
    world_size: int,
    apart: int,
    device: torch.device,
    token_bytes: int,
) -> Hop:
    """Half of the time to the rank `apart` after rank 0 and back. Collective.

    Args:
        transport: See `measure_link`.
        agreement: See `measure_link`.
        world_size: See `measure_link`.
        apart: See `measure_link`.
        device: Where the tensors lie.
        token_bytes: Bytes of the hidden state of one token.
    """
    rank = transport.rank
    buffer = torch.zeros(max(_TOKENS) * token_bytes, dtype=torch.uint8, device=device)
    taken = []
    for count in _TOKENS:
        message, rows = buffer[: count * token_bytes], []
        for _ in range(_ROUNDS + 1):
            agreement.barrier()
            begin = time.perf_counter()
            if rank == 0:
                transport.send(message, apart, 0)
                transport.start().wait()
                transport.recv(message, apart, 1)
                transport.start().wait()
            elif rank == apart:
                transport.recv(message, 0, 0)
                transport.start().wait()
                transport.send(message, 0, 1)
                transport.start().wait()
            _synchronize(device)
            rows.append((time.perf_counter() - begin) / 2)
        taken.append(float(agreement.gather(rows[1:])[0].min()))
    latency, each = line(_TOKENS, taken)
    return Hop(latency, each)
