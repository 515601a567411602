"""The fluid port model: how long a set of transfers keeps the ports of a cluster busy.

Every device has a full-duplex port to the devices of its node; traffic between nodes passes the device's share of its
node's network interfaces (NICs), or, if there are fewer NICs than devices, the node's shared interfaces. A set of
transfers takes the time of its busiest port: no latency, no protocol, perfect overlap. This compares plans; it does not
predict measured times. Pure functions of plain data (numpy, no torch).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_hotspa.cluster import Cluster

Bytes = npt.NDArray[np.float64]


@dataclass
class PortLoads:
    """Bytes through every port: four float64 arrays with one entry per rank.

    Args:
        devices_per_node: Ranks of a full node.
        sent_intra: Bytes sent to ranks of the same node.
        received_intra: Bytes received from ranks of the same node.
        sent_inter: Bytes sent to other nodes.
        received_inter: Bytes received from other nodes.
    """

    devices_per_node: int
    sent_intra: Bytes
    received_intra: Bytes
    sent_inter: Bytes
    received_inter: Bytes

    @classmethod
    def zero(cls, cluster: Cluster) -> "PortLoads":
        sent_intra, received_intra, sent_inter, received_inter = np.zeros((4, cluster.world_size))
        return cls(cluster.devices_per_node, sent_intra, received_intra, sent_inter, received_inter)

    def add(self, src: npt.ArrayLike, dst: npt.ArrayLike, num_bytes: npt.ArrayLike) -> None:
        """Adds transfers, as arrays of equal length or scalars; `src == dst` loads no port."""
        sources, targets, sizes = np.broadcast_arrays(
            np.atleast_1d(np.asarray(src, np.int64)),
            np.atleast_1d(np.asarray(dst, np.int64)),
            np.asarray(num_bytes, np.float64),
        )
        inter = sources // self.devices_per_node != targets // self.devices_per_node
        for chosen, sent, received in (
            (~inter & (sources != targets), self.sent_intra, self.received_intra),
            (inter, self.sent_inter, self.received_inter),
        ):
            sent += np.bincount(sources[chosen], sizes[chosen], len(sent))
            received += np.bincount(targets[chosen], sizes[chosen], len(received))

    def __add__(self, other: "PortLoads") -> "PortLoads":
        return PortLoads(
            self.devices_per_node,
            self.sent_intra + other.sent_intra,
            self.received_intra + other.received_intra,
            self.sent_inter + other.sent_inter,
            self.received_inter + other.received_inter,
        )

    def seconds(self, cluster: Cluster) -> float:
        """The time of the busiest port."""
        nic, sent, received = nic_bandwidth(cluster), self.sent_inter, self.received_inter
        if cluster.shares_nics:
            nic, firsts = cluster.node_bandwidth, np.arange(0, cluster.world_size, cluster.devices_per_node)
            sent, received = np.add.reduceat(sent, firsts), np.add.reduceat(received, firsts)
        device = max(self.sent_intra.max(), self.received_intra.max()) / cluster.intra_bandwidth
        return float(max(device, sent.max() / nic, received.max() / nic))


def overlapped_seconds(hops: Iterable[PortLoads], cluster: Cluster) -> float:
    """The time of several hops that overlap in many small chunks: of their summed loads."""
    return sum(hops, PortLoads.zero(cluster)).seconds(cluster)


def nic_bandwidth(cluster: Cluster) -> float:
    """A device's even share of the NICs of a full node, in bytes per second and direction."""
    return cluster.node_bandwidth / cluster.devices_per_node


def node_bandwidths(cluster: Cluster) -> list[float]:
    """Each node's bytes per second to (and from) other nodes; a short last node has fewer own NICs."""
    if cluster.shares_nics:
        return [cluster.node_bandwidth] * cluster.num_nodes
    return [nic_bandwidth(cluster) * len(cluster.ranks(node)) for node in range(cluster.num_nodes)]
