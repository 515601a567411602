"""Machines as the cost model sees them.

Owns `Device` (memory and speed of one device) and `Hardware` (devices, nodes and links), which yields the
`hf_hotspa.cluster.Cluster` that planners use, and how sizes and clusters are written. `cards` has named ones and files.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hf_hotspa.cluster import Cluster
from hf_hotspa.errors import HotspaConfigError

_UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}} | {
    f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)
}


@dataclass(frozen=True)
class Device:
    """One device.

    Args:
        peak_flops: Floating-point operations per second of matrix products, by dtype name.
        memory_bandwidth: Bytes per second of its memory.
    """

    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bandwidth: float

    def flops(self, dtype: str) -> float:
        """Peak speed in a dtype.

        Raises:
            HotspaConfigError: the description has no speed for it.
        """
        if dtype not in self.peak_flops:
            raise HotspaConfigError(
                f"the device has no peak speed for {dtype!r}",
                fix=f"use one of {', '.join(sorted(self.peak_flops))} (--dtype), or add it to peak_flops",
            )
        return self.peak_flops[dtype]


@dataclass(frozen=True)
class Hardware:
    """A kind of machine.

    Args:
        name: For tables and messages.
        intra_bandwidth: Bytes per second, per direction, of a device's port inside its node.
        inter_bandwidth: Bytes per second, per direction, of one NIC.
        nics_per_node: NICs of a node; None for one a device.
        intra_latency_s: Seconds that one collective inside a node takes beside its bytes.
        inter_latency_s: The same across nodes.
    """

    name: str
    device: Device
    devices_per_node: int
    intra_bandwidth: float
    inter_bandwidth: float
    nics_per_node: int | None = None
    intra_latency_s: float = 25e-6
    inter_latency_s: float = 150e-6

    def ring_bandwidth(self, num_ranks: int) -> float:
        """Bytes per second of the slowest link that a ring of so many neighbours passes; across nodes every NIC carries its
        share."""
        if num_ranks <= self.devices_per_node:
            return self.intra_bandwidth
        return min(self.intra_bandwidth, self.inter_bandwidth * (self.nics_per_node or self.devices_per_node))

    def cluster(self, world_size: int) -> Cluster:
        """The links of `world_size` devices."""
        one_node = world_size <= self.devices_per_node
        return Cluster(
            world_size,
            self.devices_per_node,
            self.intra_bandwidth,
            self.inter_bandwidth,
            self.nics_per_node,
            self.intra_latency_s if one_node else self.inter_latency_s,
        )


def parse_bytes(value: str | float, name: str = "memory", where: str | None = None) -> int:
    """Bytes from a number, or from text such as ``70GiB``, ``80 GB``, ``512MiB``.

    Raises:
        HotspaConfigError: it is neither, or not positive.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", str(value).lower())
    try:
        num_bytes = float(match[1]) * _UNITS[match[2]] if match else math.nan
    except (KeyError, ValueError):
        num_bytes = math.nan
    if isinstance(value, bool) or not 0 < num_bytes < math.inf:
        raise HotspaConfigError(
            f"{name} is {value!r}", where=where, fix="give a number of bytes, or text such as 70GiB or 512MiB"
        )
    return int(num_bytes)


def parse_nodes(text: str) -> tuple[int, int]:
    """`(nodes, devices a node)` of ``4x8``.

    Raises:
        HotspaConfigError: it is something else.
    """
    match = re.fullmatch(r"\s*([1-9][0-9]{0,6})\s*x\s*([1-9][0-9]{0,6})\s*", text.lower())
    if not match:
        raise HotspaConfigError(f"{text!r} is no cluster", fix="write nodes x devices, such as 4x8 or 1x8")
    return int(match[1]), int(match[2])
