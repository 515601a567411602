"""The slow links that benchmarks emulate: what a NIC is charged, and that bytes still arrive."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from benchmarks.rate_limit import IN, OUT, DevicePorts, NodePorts, RateLimitedTransport  # type: ignore[import-not-found]
from hf_hotspa.cluster import Cluster
from hf_hotspa.errors import HotspaConfigError, TransferError
from tests.loopback import LoopbackHub

CLUSTER = Cluster(4, 2)


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds


def world(hub: LoopbackHub, rate: float) -> tuple[list[RateLimitedTransport], list[Clock]]:
    """A transport and a clock for every rank."""
    clocks = [Clock() for _ in range(hub.world_size)]
    transports = [
        RateLimitedTransport(hub.transport(r), r, CLUSTER, rate, clock=clocks[r], sleep=clocks[r].sleep)
        for r in range(hub.world_size)
    ]
    return transports, clocks


def exchange(transports: list[RateLimitedTransport], sizes: dict[tuple[int, int], int]) -> None:
    """Messages of some bytes from rank to rank, in one start on every rank."""
    for (src, dst), size in sizes.items():
        transports[src].send(torch.full((size,), src, dtype=torch.uint8), dst, 7)
    received = {}
    for (src, dst), size in sizes.items():
        received[src, dst] = torch.zeros(size, dtype=torch.uint8)
        transports[dst].recv(received[src, dst], src, 7)
    handles = [transport.start() for transport in transports]
    for handle in handles:
        handle.wait()
    assert all((tensor == src).all() for (src, _), tensor in received.items())


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ({(0, 1): 500, (3, 2): 900}, [0, 0, 0, 0]),  # inside nodes
        ({(0, 2): 500}, [5, 0, 5, 0]),
        ({(0, 2): 500, (0, 3): 200, (0, 1): 900}, [7, 0, 5, 2]),  # one sender, one NIC
        ({(0, 3): 100, (1, 3): 300}, [1, 3, 0, 4]),
        ({(0, 2): 500, (2, 0): 300}, [5, 0, 5, 0]),  # full duplex: the busier direction
    ],
)
def test_each_nic_is_busy_for_its_bytes_between_nodes(sizes: dict[tuple[int, int], int], seconds: list[int]) -> None:
    hub = LoopbackHub(4)
    transports, clocks = world(hub, 100.0)
    exchange(transports, sizes)
    assert [clock.now - 100.0 for clock in clocks] == pytest.approx(seconds)
    hub.close()


def test_errors_pass_and_impossible_speeds_are_refused() -> None:
    (transport, *_), (clock, *_) = world(LoopbackHub(4), 100.0)
    with pytest.raises(TransferError, match="is to itself"):
        transport.send(torch.zeros(4), 0, 0)
    transport.recv(torch.zeros(1), 2, 0)
    with pytest.raises(TransferError, match="found no message"):
        transport.start().wait()
    assert clock.slept == []
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(HotspaConfigError, match="impossible"):
            RateLimitedTransport(LoopbackHub(4).transport(0), 0, CLUSTER, speed)


def _charge_often(path: Path) -> None:
    ports = NodePorts(path)
    for _ in range(200):
        ports.charge(OUT, 0.0, 1.0)
    ports.close()


def test_processes_of_a_node_share_its_nic(tmp_path: Path) -> None:
    path = tmp_path / "node0"
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_charge_often, args=(path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    ports = NodePorts(path)
    assert ports.charge(OUT, 10.0, 5.0) == 605.0
    assert ports.charge(IN, 10.0, 5.0) == 15.0
    ports.close()
    own = DevicePorts()
    assert own.charge(OUT, 10.0, 5.0) == own.charge(IN, 10.0, 5.0) == 15.0
