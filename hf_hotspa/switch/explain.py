"""What a switch plan costs on a cluster: an explanation in bytes per link, busiest ports and predicted seconds.

The seconds are those of the fluid port model (`ports`): they compare plans, and with measured bandwidths in the cluster
description they predict the wire part of a switch; packing and launching are not in them. Pure functions of plain data:
it is given loads, not plans.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hf_hotspa.cluster import Cluster
from hf_hotspa.switch.ports import (
    Bound,
    PieceClass,
    Port,
    PortLoads,
    lower_bound,
    overlapped_seconds,
    sequential_seconds,
)


@dataclass(frozen=True)
class Hop:
    """One hop of a plan.

    Args:
        links: Which links it uses: "intra", "inter" or "any".
        intra_node_bytes: Bytes between ranks of one node.
        inter_node_bytes: Bytes between nodes.
        seconds: Of its busiest port.
    """

    links: str
    intra_node_bytes: int
    inter_node_bytes: int
    seconds: float


@dataclass(frozen=True)
class Explanation:
    """What a plan moves, where it is held up, and how long that takes; bytes and seconds.

    Args:
        name: The plan's.
        local_bytes: Bytes that stay inside their rank.
        intra_node_bytes: Bytes between ranks of one node.
        inter_node_bytes: Bytes between nodes.
        device_port: The busiest port of a device inside its node, over all hops.
        nic_port: The busiest network interface, over all hops.
        hops: The hops in order.
        overlapped_s: Seconds when all hops run at the same time in many small pieces: the busiest port of their sum.
        sequential_s: Seconds when each hop starts after the one before has ended.
        latency_s: What the rounds cost besides: `Cluster.latency_s` for each.
        rounds: How many; one for each hop that moves something, where nobody counted them.
        bound: Seconds below which no plan can be; None when the piece classes were not given.
    """

    name: str
    local_bytes: int
    intra_node_bytes: int
    inter_node_bytes: int
    device_port: Port
    nic_port: Port
    hops: tuple[Hop, ...]
    overlapped_s: float
    sequential_s: float
    latency_s: float
    rounds: int
    bound: Bound | None

    @property
    def ratio(self) -> float | None:
        """`overlapped_s` over the lower bound, 1 when nothing has to move; None without a bound."""
        if self.bound is None:
            return None
        if self.bound.seconds > 0:
            return self.overlapped_s / self.bound.seconds
        return 1.0 if self.overlapped_s == 0 else None

    def to_dict(self) -> dict[str, object]:
        """The explanation as JSON-ready plain data."""
        return {**asdict(self), "hops": [asdict(hop) for hop in self.hops], "ratio": self.ratio}

    def table(self) -> str:
        """The explanation as text for people; one fact a line."""

        def gigabytes(num_bytes: int) -> str:
            return f"{num_bytes / 1e9:10.3f} GB"

        rows = [
            ("inside a rank", gigabytes(self.local_bytes)),
            ("inside nodes", gigabytes(self.intra_node_bytes)),
            ("between nodes", gigabytes(self.inter_node_bytes)),
            ("busiest device port", str(self.device_port) if self.device_port.num_bytes else "idle"),
            ("busiest NIC", str(self.nic_port) if self.nic_port.num_bytes else "idle"),
        ]
        for index, hop in enumerate(self.hops):
            moved = f"{hop.intra_node_bytes / 1e9:.3f} GB inside nodes, {hop.inter_node_bytes / 1e9:.3f} GB between"
            rows.append((f"hop {index} ({hop.links})", f"{hop.seconds * 1e3:8.1f} ms  ({moved})"))
        rows.append(("hops overlapped", f"{self.overlapped_s * 1e3:8.1f} ms"))
        rows.append(("hop after hop", f"{self.sequential_s * 1e3:8.1f} ms"))
        rows.append(("latency", f"{self.latency_s * 1e3:8.1f} ms  ({self.rounds} rounds)"))
        if self.bound is not None:
            ratio = f"{self.ratio:.3f} times it" if self.ratio is not None else "it could have been left out"
            rows.append(("lower bound", f"{self.bound.seconds * 1e3:8.1f} ms  ({self.bound.limit}; {ratio})"))
        width = max(len(label) for label, _ in rows)
        return "\n".join([self.name, *(f"  {label:{width}}  {text}" for label, text in rows)])


def explain(
    name: str,
    loads: Sequence[PortLoads],
    links: Sequence[str],
    local_bytes: int,
    cluster: Cluster,
    classes: Sequence[PieceClass] | None = None,
    rounds: int | None = None,
) -> Explanation:
    """Explains the loads of the hops of a plan.

    Args:
        name: Of the plan.
        loads: The bytes through every port, for each hop.
        links: Which links each hop uses.
        local_bytes: Bytes that stay inside their rank.
        cluster: The machines.
        classes: What is held and needed, for the lower bound. Those of a gradient return are those of the load that it
            is the adjoint of: ports are full duplex, so that the bound is the same in both directions.
        rounds: How many rounds of messages the plan takes.
    """
    total = sum(loads, PortLoads.zero(cluster))
    ports = total.busiest(cluster)
    hops = tuple(
        Hop(link, int(hop.sent_intra.sum()), int(hop.sent_inter.sum()), hop.seconds(cluster))
        for link, hop in zip(links, loads, strict=True)
    )
    if rounds is None:
        rounds = sum(hop.seconds > 0 for hop in hops)
    return Explanation(
        name,
        local_bytes,
        int(total.sent_intra.sum()),
        int(total.sent_inter.sum()),
        ports.device,
        ports.nic,
        hops,
        overlapped_seconds(loads, cluster),
        sequential_seconds(loads, cluster),
        rounds * cluster.latency_s,
        rounds,
        None if classes is None else lower_bound(classes, cluster),
    )
