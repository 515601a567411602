"""Bounds of switches in the fluid port model: who holds and needs which bytes, and how fast any plan can be.

The benchmarks and tests compare the product's plans with these: classes of pieces, the resulting crossings and pulls, a
closed-form lower bound, and shares of senders by destination.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.placement import Layout
from hf_hotspa.plan.planner import segment_kinds
from hf_hotspa.plan.relay import Demand, Pull, Shares, sender_shares, shares_of
from hf_hotspa.plan.switch_plan import Bytes, PortLoads, nic_bandwidth, node_bandwidths

_MOST_SETS = 512
"""Owner-node sets for which the egress bound is evaluated (all pairs of sets are compared)."""
_MOST_JOINED_SETS = 24
"""The most owner-node sets with pairwise unions, too."""


class PieceClass(NamedTuple):
    """Bytes that the same ranks hold and the same ranks need.

    Attributes:
        owners: The ranks that hold them; at least one.
        needers: The ranks that must hold them afterwards; some may be owners.
    """

    num_bytes: float
    owners: tuple[int, ...]
    needers: tuple[int, ...]


def classes_of(
    sources: Layout | Sequence[Layout], target: Layout, element_sizes: Sequence[int], sums: bool = False
) -> list[PieceClass]:
    """Returns who holds and who needs which bytes of a load, over all segments: the input of bounds.

    For a gradient return pass its master layout as the source and its contributions as the target, with `sums`.

    Args:
        sources: One source layout, or two.
        element_sizes: Bytes of one element of each segment on the wire.
        sums: As for `segment_kinds`.

    Raises:
        PlanError: as `segment_kinds`.
    """
    kinds, kind_of = segment_kinds([sources] if isinstance(sources, Layout) else list(sources), target, sums)
    weights = [0] * len(kinds)
    for segment, kind in enumerate(kind_of):
        if kind >= 0:
            weights[kind] += element_sizes[segment]
    total: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for pieces, weight in zip(kinds, weights, strict=True):
        (holding, owners), (needed, needers) = pieces.holders.groups, pieces.needed.groups
        keys, inverse = np.unique(holding * len(needers) + needed, return_inverse=True)
        lengths = np.zeros(len(keys), np.int64)
        np.add.at(lengths, inverse, pieces.lengths)
        for key, length in zip(keys.tolist(), lengths.tolist(), strict=True):
            sets = owners[key // len(needers)], needers[key % len(needers)]
            total[sets] = total.get(sets, 0) + length * weight
    return [PieceClass(float(num_bytes), *sets) for sets, num_bytes in total.items()]


def demands_of(classes: Iterable[PieceClass], cluster: Cluster) -> list[Demand]:
    """What crosses between nodes: for each class one demand per node with some needer and no owner."""
    demands = []
    for num_bytes, owners, needers in classes:
        owner_nodes = {cluster.node(rank) for rank in owners}
        lacking: dict[int, list[int]] = {}
        for rank in needers:
            if (node := cluster.node(rank)) not in owner_nodes:
                lacking.setdefault(node, []).append(rank)
        demands += [Demand(owners, node, tuple(ranks), num_bytes) for node, ranks in lacking.items()]
    return demands


def pulls_of(classes: Iterable[PieceClass], cluster: Cluster) -> list[Pull]:
    """What moves inside nodes only: for each class and needer that does not own it, the owners in its node."""
    bytes_of: dict[tuple[tuple[int, ...], int], float] = {}
    for num_bytes, owners, needers in classes:
        by_node: dict[int, list[int]] = {}
        for rank in owners:
            by_node.setdefault(cluster.node(rank), []).append(rank)
        near = {node: tuple(ranks) for node, ranks in by_node.items()}
        for rank in needers:
            inside = near.get(cluster.node(rank), ())
            if inside and rank not in inside:
                bytes_of[inside, rank] = bytes_of.get((inside, rank), 0.0) + num_bytes
    return [Pull(*key, num_bytes) for key, num_bytes in bytes_of.items()]


def sending_shares(
    demands: Iterable[Demand], cluster: Cluster, background: PortLoads | None = None, *, neighbours: bool = True
) -> dict[tuple[tuple[int, ...], int], Shares]:
    """Which ranks send the bytes of each (owners, destination node): `sender_shares` by destination.

    The owners of a class send to different nodes if possible, rather than each a part to every node: equal loads, fewer
    messages.

    Args:
        background: What moves inside nodes anyway (pulls, forwards after landing). Relaying need not finish earlier.
        neighbours: Whether ranks other than owners may send, too.

    Returns:
        For each (owners, destination node) the sending ranks with their fractions.
    """
    keys: dict[tuple[tuple[int, ...], int], float] = {}
    amounts: dict[tuple[int, ...], float] = {}
    entering = [0.0] * cluster.num_nodes
    for owners, node, _, num_bytes in demands:
        keys[owners, node] = keys.get((owners, node), 0.0) + num_bytes
        amounts[owners] = amounts.get(owners, 0.0) + num_bytes
        entering[node] += num_bytes
    return _by_destination(keys, sender_shares(amounts, entering, cluster, background, neighbours=neighbours))


def _by_destination(
    keys: Mapping[tuple[tuple[int, ...], int], float], shares: Mapping[tuple[int, ...], Shares]
) -> dict[tuple[tuple[int, ...], int], Shares]:
    """Lays each owner set's destinations, and its senders, along one line, and pairs what lies side by side.

    There are then at most as many (sender, destination) pairs as senders and destinations together.
    """
    result = {}
    several: dict[tuple[int, ...], list[int]] = {}
    for key in keys:
        split = shares[key[0]]
        result[key] = split
        if len(split) > 1:
            several.setdefault(key[0], []).append(key[1])
    for owners, nodes in several.items():
        if len(nodes) == 1:
            continue
        nodes.sort()
        total = sum(keys[owners, node] for node in nodes)
        if total <= 0:
            continue
        senders = list(shares[owners])
        at, left = 0, senders[0][1]
        for node in nodes:
            wanted = keys[owners, node] / total
            took: dict[int, float] = {senders[at][0]: 0.0}
            while wanted > left and at + 1 < len(senders):
                took[senders[at][0]] = left
                wanted -= left
                at += 1
                left = senders[at][1]
            took[senders[at][0]] = wanted
            left -= wanted
            result[owners, node] = shares_of(took)
    return result


def sequential_seconds(hops: Iterable[PortLoads], cluster: Cluster) -> float:
    """The time of several hops in sequence."""
    return sum(hop.seconds(cluster) for hop in hops)


@dataclass(frozen=True)
class Bound:
    """Seconds below which no such plan can end, see `lower_bound`.

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
    """Returns a closed-form lower bound on the time of a switch in the port model, for any splitting and forwarding.

    The terms, for full-duplex ports, and why they hold:

    * receive: a device receives every byte that it needs and lacks, through its port inside the node or through NICs
      (its own; the node's if shared; none with one node). The same holds for the sums over a node's devices and their
      ports. Owners in the node do not matter: a plan may fetch over a NIC what a neighbour holds, so "bytes with an
      owner in the node / intra-node bandwidth" is not a bound.
    * node miss: what no device of a node holds and some device needs enters it at least once.
    * egress: what a node lacks leaves an owner node once for every node that lacks it. For each set A of nodes, bytes
      with all owners in A leave through the NICs of A. The sets A are the occurring sets of owner nodes, their pairwise
      unions while they are few, and all owner nodes. Only this term assumes that no third node forwards what it
      received from an owner (a chain of nodes), as no planner here does. Also, what one device alone holds and others
      need leaves it at least once.

    Args:
        classes: What is held and needed; classes may repeat.
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
    terms_s = [(float(seconds.max()), f"{name} {int(seconds.argmax())}") for name, seconds in terms]
    return max(terms_s, key=lambda term: term[0])


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
