"""The fluid port model: how long a set of transfers keeps the ports of a cluster busy, and how fast any plan can be.

Every device has a full-duplex port to the devices of its node; traffic between nodes passes the device's share of its
node's network interfaces (NICs), or, where there are fewer NICs than devices, the interfaces that the node shares.
The time of a set of transfers is the time of its busiest port: no latency, no protocol, perfect overlap. It compares
plans and bounds them; it does not predict a stopwatch. Pure functions of plain data (numpy, no torch).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_hotspa.cluster import Cluster

Bytes = npt.NDArray[np.float64]

_MOST_SETS = 512
"""Owner-node sets for which the egress bound is evaluated (all pairs of sets are compared)."""
_MOST_JOINED_SETS = 24
"""Owner-node sets up to which their pairwise unions are evaluated, too."""


class PieceClass(NamedTuple):
    """Bytes that the same ranks hold and the same ranks need.

    Attributes:
        num_bytes: Their number.
        owners: The ranks that hold them; at least one.
        needers: The ranks that must hold them afterwards; some may be owners.
    """

    num_bytes: float
    owners: tuple[int, ...]
    needers: tuple[int, ...]


@dataclass(frozen=True)
class Port:
    """The load of one port.

    Args:
        kind: Which port, and in which direction.
        place: The rank whose port it is; the node where the devices of a node share their NICs.
        is_node: Whether `place` is a node.
        num_bytes: Bytes that pass it.
        seconds: How long that takes.
    """

    kind: Literal["intra send", "intra receive", "NIC send", "NIC receive"]
    place: int
    is_node: bool
    num_bytes: float
    seconds: float

    def __str__(self) -> str:
        where = f"{'node' if self.is_node else 'rank'} {self.place}"
        return f"{self.kind} of {where}: {self.num_bytes / 1e9:.3f} GB, {self.seconds * 1e3:.1f} ms"


@dataclass(frozen=True)
class BusiestPorts:
    """The busiest port inside a node, and the busiest port between nodes."""

    device: Port
    nic: Port


@dataclass
class PortLoads:
    """Bytes through every port: four float64 arrays with one entry per rank.

    Args:
        devices_per_node: Ranks of a full node, which tells the two kinds of traffic apart.
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
        """No load on any port."""
        sent_intra, received_intra, sent_inter, received_inter = np.zeros((4, cluster.world_size))
        return cls(cluster.devices_per_node, sent_intra, received_intra, sent_inter, received_inter)

    def add(self, src: npt.ArrayLike, dst: npt.ArrayLike, num_bytes: npt.ArrayLike) -> None:
        """Adds transfers, given as arrays of equal length (scalars are repeated); `src == dst` loads no port."""
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

    def busiest(self, cluster: Cluster) -> BusiestPorts:
        """The busiest port of each kind; the lowest rank or node, and sending, among equals."""
        device = max(
            _busiest("intra send", self.sent_intra, cluster.intra_bandwidth, False),
            _busiest("intra receive", self.received_intra, cluster.intra_bandwidth, False),
            key=lambda port: port.seconds,
        )
        shared = cluster.shares_nics
        bandwidth = cluster.node_bandwidth if shared else nic_bandwidth(cluster)
        sent, received = self.sent_inter, self.received_inter
        if shared:
            firsts = np.arange(0, cluster.world_size, cluster.devices_per_node)
            sent, received = np.add.reduceat(sent, firsts), np.add.reduceat(received, firsts)
        nic = max(
            _busiest("NIC send", sent, bandwidth, shared),
            _busiest("NIC receive", received, bandwidth, shared),
            key=lambda port: port.seconds,
        )
        return BusiestPorts(device, nic)

    def seconds(self, cluster: Cluster) -> float:
        """Seconds until the busiest port is done."""
        ports = self.busiest(cluster)
        return max(ports.device.seconds, ports.nic.seconds)


def _busiest(
    kind: Literal["intra send", "intra receive", "NIC send", "NIC receive"],
    loads: Bytes,
    bandwidth: float,
    is_node: bool,
) -> Port:
    place = int(loads.argmax())
    return Port(kind, place, is_node, float(loads[place]), float(loads[place]) / bandwidth)


def sequential_seconds(hops: Iterable[PortLoads], cluster: Cluster) -> float:
    """Seconds of several hops when each starts after the one before has ended."""
    return sum(hop.seconds(cluster) for hop in hops)


def overlapped_seconds(hops: Iterable[PortLoads], cluster: Cluster) -> float:
    """Seconds of several hops that run at the same time in many small chunks: those of the sum of their loads."""
    return sum(hops, PortLoads.zero(cluster)).seconds(cluster)


def nic_bandwidth(cluster: Cluster) -> float:
    """Bytes per second, per direction, of one device's even share of the NICs of a full node."""
    return cluster.node_bandwidth / cluster.devices_per_node


def node_bandwidths(cluster: Cluster) -> list[float]:
    """Bytes per second, per direction, between each node and the others; a short last node has fewer own NICs."""
    if cluster.shares_nics:
        return [cluster.node_bandwidth] * cluster.num_nodes
    return [nic_bandwidth(cluster) * len(cluster.ranks(node)) for node in range(cluster.num_nodes)]


@dataclass(frozen=True)
class Bound:
    """Seconds below which no plan of the described kind can end, see `lower_bound`.

    Args:
        seconds: The largest of the others.
        receive_s: What devices must receive, over all their ports.
        node_miss_s: What whole nodes lack, through their NICs.
        egress_s: What only some nodes hold and others lack, out of their NICs; what only one device holds, out of it.
        limit: Which of the three is the largest, with its place; "nothing moves" when all are zero.
    """

    seconds: float
    receive_s: float
    node_miss_s: float
    egress_s: float
    limit: str


def lower_bound(classes: Sequence[PieceClass], cluster: Cluster) -> Bound:
    """A closed-form lower bound on the time of a switch in the port model, whatever splits and forwards pieces.

    The terms, each for full-duplex ports, and why each holds:

    * receive: a device takes in every byte that it needs and lacks, through its port inside the node or through NICs
      (its own; all of the node where they are shared; none when there is one node). The same holds for the sum over
      the devices of a node and the sum of their ports. Whether an owner is in the node does not matter: a plan may
      fetch over a NIC what a neighbour holds, so "bytes with an owner in the node / intra-node bandwidth" is no bound.
    * node miss: what no device of a node holds and some device needs enters it at least once.
    * egress: what a node lacks leaves an owner node once for every node that lacks it. For each set A of nodes, bytes
      with all owners in A leave through the NICs of A. A are the sets of owner nodes that occur, their pairwise unions
      while they are few, and all owner nodes. This term alone assumes that no third node hands on what it received
      from an owner (a chain of nodes), as no planner here does; the others hold for chains, too.
      On top: what one device alone holds and others need leaves that device at least once.

    Args:
        classes: What is held and needed; classes may repeat.
        cluster: The machines.
    """
    world, per_node, nodes = cluster.world_size, cluster.devices_per_node, cluster.num_nodes
    if not classes:
        return Bound(0.0, 0.0, 0.0, 0.0, "nothing moves")
    sizes = np.array([c.num_bytes for c in classes], np.float64)
    needs = _pairs([c.needers for c in classes], world)
    holds = _pairs([c.owners for c in classes], world)
    needs = np.setdiff1d(needs, holds)
    piece, rank = needs // world, needs % world
    received = np.bincount(rank, sizes[piece], world)
    node_bandwidth = np.array(node_bandwidths(cluster))
    firsts = np.arange(0, world, per_node)
    devices = np.diff(np.append(firsts, world))

    nic = (cluster.node_bandwidth if cluster.shares_nics else nic_bandwidth(cluster)) if nodes > 1 else 0.0
    by_node = np.add.reduceat(received, firsts) / (
        devices * cluster.intra_bandwidth + (node_bandwidth if nodes > 1 else 0.0)
    )
    receive = _largest(
        ("receive of rank", received / (cluster.intra_bandwidth + nic)),
        ("receive of node", by_node),
    )

    holding_nodes = np.unique(holds // world * nodes + holds % world // per_node)
    missing = np.setdiff1d(np.unique(piece * nodes + rank // per_node), holding_nodes)
    miss = _largest(("miss of node", np.bincount(missing % nodes, sizes[missing // nodes], nodes) / node_bandwidth))

    # A device that is the only owner of a class that others need.
    owner_count = np.bincount(holds // world, minlength=len(classes))
    moved = np.zeros(len(classes), bool)
    moved[piece] = True
    alone = holds[(owner_count == 1)[holds // world] & moved[holds // world]]
    sent = np.bincount(alone % world, sizes[alone // world], world)
    egress = max(
        _largest(("send of rank", sent / (cluster.intra_bandwidth + nic))),
        _node_egress(sizes, holding_nodes, missing, node_bandwidth),
        key=lambda term: term[0],
    )

    seconds, limit = max(miss, egress, receive, key=lambda term: term[0])
    return Bound(seconds, receive[0], miss[0], egress[0], limit if seconds > 0 else "nothing moves")


def _pairs(ranks_of: Sequence[tuple[int, ...]], world: int) -> npt.NDArray[np.int64]:
    """(class, rank) pairs as sorted unique numbers `class * world + rank`."""
    lengths = np.fromiter(map(len, ranks_of), np.int64, len(ranks_of))
    ranks = np.fromiter(chain.from_iterable(ranks_of), np.int64, int(lengths.sum()))
    return np.unique(np.repeat(np.arange(len(ranks_of)), lengths) * world + ranks)


def _largest(*terms: tuple[str, Bytes]) -> tuple[float, str]:
    found = [(float(seconds.max()), f"{name} {int(seconds.argmax())}") for name, seconds in terms]
    return max(found, key=lambda term: term[0])


def _node_egress(
    sizes: Bytes,
    holding_nodes: npt.NDArray[np.int64],
    missing: npt.NDArray[np.int64],
    bandwidth: Bytes,
) -> tuple[float, str]:
    """The egress bound over sets of owner nodes; pairs are numbers `class * nodes + node`."""
    nodes = len(bandwidth)
    out = np.bincount(missing // nodes, sizes[missing // nodes], len(sizes))
    masks = [0] * len(sizes)
    for pair in holding_nodes[out[holding_nodes // nodes] > 0].tolist():
        masks[pair // nodes] |= 1 << (pair % nodes)
    out_of: dict[int, float] = {}
    for mask, num_bytes in zip(masks, out.tolist(), strict=True):
        if mask:
            out_of[mask] = out_of.get(mask, 0.0) + num_bytes
    if not out_of:
        return 0.0, "send of no node"
    every = 0
    for mask in out_of:
        every |= mask
    largest_first = sorted(out_of, key=lambda mask: (-out_of[mask], mask))
    candidates = {every, *largest_first[:_MOST_SETS]}
    if len(out_of) <= _MOST_JOINED_SETS:
        candidates |= {a | b for a, b in combinations(out_of, 2)}

    best = (0.0, "send of no node")
    for candidate in sorted(candidates):
        members = [n for n in range(nodes) if candidate >> n & 1]
        if candidate == every:
            total = sum(out_of.values())
        elif len(members) == 1:
            total = out_of[candidate]
        else:
            total = sum(num_bytes for mask, num_bytes in out_of.items() if not mask & ~candidate)
        seconds = total / float(bandwidth[members].sum())
        if seconds > best[0]:
            label = ", ".join(map(str, members)) if len(members) <= 8 else f"{len(members)} of them"
            best = (seconds, f"send of node {label}" if len(members) == 1 else f"send of nodes {label}")
    return best
