"""The machines of a run as plain data: which ranks share a node. Bandwidths join here when a cost model needs them."""

from dataclasses import dataclass

from hf_hotspa.errors import HotspaConfigError


@dataclass(frozen=True)
class Cluster:
    """Ranks in consecutive blocks of `devices_per_node`, the way every launcher numbers them.

    Raises:
        HotspaConfigError: a count is below one.
    """

    world_size: int
    devices_per_node: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.devices_per_node < 1:
            raise HotspaConfigError(
                f"a cluster of {self.world_size} ranks with {self.devices_per_node} devices a node does not exist",
                fix="both numbers must be at least 1",
            )

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.devices_per_node
