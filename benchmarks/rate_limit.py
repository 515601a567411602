"""A transport with slow links between nodes, for benchmarks and tests on one machine.

`RateLimitedTransport` wraps any transport. Messages inside a node pass freely; a message between nodes keeps the
sender's NIC and the receiver's NIC busy for `bytes / rate` each, full duplex: bytes out and bytes in do not compete. A
NIC works off what is started in order (a token bucket without burst), and `wait` returns when the inner transport is
done *and* the rank's NIC has released everything of that start, in both directions. Each end accounts its own side; a
receiver does not learn that its sender was busy with others, so a single start can look faster than on real links to
some ranks. The slowest rank, which is what a switch takes, is right.

A NIC belongs to one device (kept in memory), or to a whole node (`NodePorts`: a small file that its processes share).
"""

import fcntl
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from hf_hotspa.cluster import Cluster
from hf_hotspa.engine.transport import TransferHandle, Transport
from hf_hotspa.errors import HotspaConfigError

OUT, IN = 0, 1
"""The two directions of a port."""


class Ports(Protocol):
    """The NIC of a rank: when each direction is free again."""

    def charge(self, direction: int, now: float, seconds: float) -> float:
        """Keeps a direction busy for some seconds, after what it has to do already; returns when it is free again."""
        ...


class DevicePorts:
    """A NIC that only this rank uses."""

    def __init__(self) -> None:
        self._free_at = [0.0, 0.0]

    def charge(self, direction: int, now: float, seconds: float) -> float:
        self._free_at[direction] = max(now, self._free_at[direction]) + seconds
        return self._free_at[direction]


class NodePorts:
    """A NIC that the ranks of a node share, as processes of one machine; the clock must be the machine's monotonic one.

    Args:
        path: A file of the node, the same for its ranks; made when it is missing.
    """

    _FORMAT = struct.Struct("dd")

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)

    def charge(self, direction: int, now: float, seconds: float) -> float:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._file.seek(0)
            text = self._file.read(self._FORMAT.size)
            free_at = list(self._FORMAT.unpack(text)) if text else [0.0, 0.0]
            free_at[direction] = max(now, free_at[direction]) + seconds
            self._file.truncate(0)  # the file is open for appending
            self._file.write(self._FORMAT.pack(*free_at))
            return free_at[direction]
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the file; it stays where it is."""
        self._file.close()


class RateLimitedTransport:
    """A transport whose messages between nodes pass NICs of a given speed.

    Args:
        inner: What moves the bytes.
        rank: This rank.
        cluster: Which ranks share a node.
        bytes_per_second: The speed of one NIC, per direction.
        ports: The NIC of this rank; a new one when None.
        clock: Seconds, monotonic.
        sleep: Waits for some seconds.

    Raises:
        HotspaConfigError: the speed is not a positive number.
    """

    def __init__(
        self,
        inner: Transport,
        rank: int,
        cluster: Cluster,
        bytes_per_second: float,
        ports: Ports | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 < bytes_per_second < float("inf"):
            raise HotspaConfigError(f"a NIC of {bytes_per_second} bytes per second is impossible")
        self.inner, self.rank, self.cluster, self.bytes_per_second = inner, rank, cluster, bytes_per_second
        self._ports = ports or DevicePorts()
        self._clock, self._sleep = clock, sleep
        self._submitted = [0, 0]  # bytes since the last start, by direction

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self.inner.send(tensor, dst, tag)
        self._count(OUT, dst, tensor)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self.inner.recv(tensor, src, tag)
        self._count(IN, src, tensor)

    def start(self) -> TransferHandle:
        now, sizes, self._submitted = self._clock(), self._submitted, [0, 0]
        handle = self.inner.start()
        released = [
            self._ports.charge(direction, now, num_bytes / self.bytes_per_second)
            for direction, num_bytes in enumerate(sizes)
            if num_bytes
        ]
        return _RateLimitedHandle(handle, max(released, default=now), self._clock, self._sleep)

    def _count(self, direction: int, peer: int, tensor: torch.Tensor) -> None:
        if self.cluster.node(peer) != self.cluster.node(self.rank):
            self._submitted[direction] += tensor.numel() * tensor.element_size()


class _RateLimitedHandle:
    def __init__(
        self, inner: TransferHandle, released: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._inner, self._released, self._clock, self._sleep = inner, released, clock, sleep

    def wait(self) -> None:
        self._inner.wait()
        if (left := self._released - self._clock()) > 0:
            self._sleep(left)
