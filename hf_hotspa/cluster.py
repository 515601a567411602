"""The machines of a run as plain data: which ranks share a node, and the speed of the links."""

from dataclasses import dataclass

from hf_hotspa.errors import HotspaConfigError


@dataclass(frozen=True)
class Cluster:
    """Ranks in consecutive blocks of `devices_per_node`, as every launcher numbers them.

    Links are full duplex. Every device has a port to the devices of its node; the devices of a node share its
    `nics_per_node` network interfaces evenly. Defaults: an A800 node with one 200 Gb/s NIC for each GPU. Raises
    `HotspaConfigError`: a count is below one, or a bandwidth or latency is invalid.
    """

    world_size: int
    devices_per_node: int  # ranks on a full node; the last node may have fewer
    intra_bandwidth: float = 200e9  # bytes per second, per direction, of a device's port inside its node
    inter_bandwidth: float = 25e9  # bytes per second, per direction, of one NIC
    nics_per_node: int | None = None  # None for one per device
    latency_s: float = 0.0  # fixed seconds of one round of messages

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.devices_per_node < 1:
            raise HotspaConfigError(
                f"a cluster of {self.world_size} ranks with {self.devices_per_node} devices a node does not exist",
                fix="both numbers must be at least 1",
            )
        if self.nics_per_node is not None and self.nics_per_node < 1:
            raise HotspaConfigError(f"a node cannot have {self.nics_per_node} NICs", fix="use at least 1")
        if not (0 < self.intra_bandwidth < float("inf") and 0 < self.inter_bandwidth < float("inf")):
            raise HotspaConfigError(
                f"bandwidths of {self.intra_bandwidth} and {self.inter_bandwidth} bytes per second are impossible",
                fix="give positive numbers, in bytes per second and direction",
            )
        if not 0 <= self.latency_s < float("inf"):
            raise HotspaConfigError(f"a latency of {self.latency_s} seconds is impossible")

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.devices_per_node)

    @property
    def node_bandwidth(self) -> float:
        """Bytes per second, per direction, between a full node and the others."""
        return self.inter_bandwidth * (self.nics_per_node or self.devices_per_node)

    @property
    def shares_nics(self) -> bool:
        """Whether several devices share a NIC."""
        return self.nics_per_node is not None and self.nics_per_node < self.devices_per_node

    def node(self, rank: int) -> int:
        return rank // self.devices_per_node

    def ranks(self, node: int) -> range:
        first = node * self.devices_per_node
        return range(first, min(first + self.devices_per_node, self.world_size))
