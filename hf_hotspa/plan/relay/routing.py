"""How bytes cross between nodes: which devices send them, and on which devices of a node that lacks them they land.

The relay planner moves what a node lacks into it once, through all of its network interfaces (NICs), and forwards it
inside. This file decides the fractions for classes of pieces, independently for receivers (`landing_shares`) and
senders (`sender_shares`): bytes that leave by any device may land on any. The caller determines who needs what inside a
node, and cuts pieces by these fractions.

Relaying pays if a device's port inside its node is faster than its share of the NICs (`relay_pays`); otherwise the
caller uses the direct plan. Pure functions of the totals of each key, independent of hash order.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hf_hotspa.cluster import Cluster
from hf_hotspa.plan.ports import PortLoads, nic_bandwidth, node_bandwidths
from hf_hotspa.plan.relay.balancing import MOST_SWEEPS, TOLERANCE, Shares, balance, relieve, shares_of, spill


class Demand(NamedTuple):
    """Bytes that a node lacks: `owners` are other nodes' ranks that hold them, `needers` (>= 1) its own ranks."""

    owners: tuple[int, ...]
    node: int
    needers: tuple[int, ...]
    num_bytes: float


class Pull(NamedTuple):
    """Bytes that a rank lacks, and the `owners` in its node that hold them."""

    owners: tuple[int, ...]
    needer: int
    num_bytes: float


def relay_pays(cluster: Cluster) -> bool:
    """Whether landing on a neighbour and forwarding is faster than fetching every copy through the device's own NIC.

    Each of k devices that need the same bytes receives all of them once either way; relaying moves all but 1/k from the
    NICs to the ports inside the node. This is faster, even with sequential hops, exactly if those ports are.
    """
    return cluster.num_nodes > 1 and cluster.devices_per_node > 1 and cluster.intra_bandwidth > nic_bandwidth(cluster)


def pulling_shares(
    pulls: Iterable[Pull], forwarded: Mapping[int, float] | None = None
) -> dict[tuple[int, ...], Shares]:
    """Which owners serve needs inside their node: balanced, with the least load of the busiest sender.

    Args:
        pulls: What moves inside nodes only.
        forwarded: Bytes that each rank forwards inside its node after landing.

    Returns:
        For each owner set its ranks with their fractions; even in regular layouts.
    """
    amounts: dict[tuple[int, ...], float] = {(rank,): num_bytes for rank, num_bytes in (forwarded or {}).items()}
    for owners, _, num_bytes in pulls:
        amounts[owners] = amounts.get(owners, 0.0) + num_bytes
    return {owners: shares_of(part) for owners, part in balance(amounts)[0].items()}


def landing_shares(
    demands: Iterable[Demand], cluster: Cluster, pulls: Sequence[Pull] = ()
) -> dict[tuple[int, tuple[int, ...]], Shares]:
    """On which devices of its node the bytes of each (node, needers) land.

    A landing device forwards its bytes to every (other) needer. Needers land first, with the least load of the busiest
    NIC. Only what would load a NIC over the node's even share (by more than 1 %) lands on neighbours with capacity
    left: nothing is forwarded if every device receives its own part. If the node shares its NICs, only needers land,
    balanced by what they forward. If forwarding would still make an intra-node port the bottleneck, the split is
    improved over both ports of all devices.

    Args:
        pulls: What moves inside nodes anyway. Relaying need not finish earlier.

    Returns:
        For each (node, needers) the landing ranks with their fractions.
    """
    by_node: dict[int, dict[tuple[int, ...], float]] = {}
    for _, node, needers, num_bytes in demands:
        amounts = by_node.setdefault(node, {})
        amounts[needers] = amounts.get(needers, 0.0) + num_bytes
    nic = cluster.node_bandwidth if cluster.shares_nics else nic_bandwidth(cluster)
    intra = cluster.intra_bandwidth
    served: list[dict[tuple[int, ...], float]] = [{} for _ in range(cluster.num_nodes)]
    pulled: dict[int, float] = {}
    for owners, rank, num_bytes in pulls:
        inside = served[cluster.node(rank)]
        inside[owners] = inside.get(owners, 0.0) + num_bytes
        pulled[rank] = pulled.get(rank, 0.0) + num_bytes
    busiest = max(max(balance(inside)[1].values(), default=0.0) for inside in served)
    pulls_s = max(busiest, max(pulled.values(), default=0.0)) / intra
    result = {}
    for node in sorted(by_node):
        amounts = by_node[node]
        devices = cluster.ranks(node)
        level_s = max(sum(amounts.values()) / nic / (1 if cluster.shares_nics else len(devices)), pulls_s)
        wanted = {rank: pulled.get(rank, 0.0) for rank in devices}
        for needers, num_bytes in amounts.items():
            for rank in needers:
                wanted[rank] += num_bytes
        # A device that lacks more than its intra-node port can receive in that time uses its NIC, too.
        level_s = max(level_s, max(wanted.values()) / (intra + nic))
        if cluster.shares_nics:
            forwards = dict(served[node])
            for needers, num_bytes in amounts.items():
                forwards[needers] = forwards.get(needers, 0.0) + num_bytes * (len(needers) - 1)
            balanced = {needers: shares_of(part) for needers, part in balance(forwards)[0].items()}
            parts = {n: {rank: share * num_bytes for rank, share in balanced[n]} for n, num_bytes in amounts.items()}
        else:
            parts, loads = balance(amounts)
            spill(parts, loads, devices, level_s * nic)
        relieve(parts, served[node], wanted, level_s, nic, intra)
        for needers, part in parts.items():
            result[node, needers] = shares_of(part)
    return result


def sender_shares(
    amounts: Mapping[tuple[int, ...], float],
    entering: Sequence[float],
    cluster: Cluster,
    background: PortLoads | None = None,
    *,
    neighbours: bool = True,
) -> dict[tuple[int, ...], Shares]:
    """Which ranks send the bytes of each owner set, over all destinations.

    Starts with the split among owners with the least load of the busiest NIC. If a NIC is then busier (by more than
    1 %) than the busiest node on either side makes unavoidable, the bytes are first split over the owner nodes. What
    exceeds the NICs of a node's owners is sent by neighbours with capacity left, which receive it beforehand, in equal
    parts from the owners of their node: a third hop. If nodes share their NICs, only owners send.

    Destinations do not change the load of a sender's NIC: all are balanced together.

    Args:
        amounts: What nodes lack, by the ranks that hold it; what several nodes lack counts for each.
        entering: What each node lacks.
        background: What moves inside nodes anyway (pulls, forwards after landing). Relaying need not finish earlier.
        neighbours: Whether ranks other than owners may send, too.

    Returns:
        For each owner set its sending ranks with their fractions.
    """
    if not amounts:
        return {}
    if cluster.shares_nics:
        parts = _through_nodes(amounts, cluster)[0]
    else:
        parts, loads = balance(amounts)
        capacity = [len(cluster.ranks(node)) for node in range(cluster.num_nodes)]
        level = max(total / size for total, size in zip(entering, capacity, strict=True))
        if background:
            level = max(level, background.seconds(cluster) * nic_bandwidth(cluster))
        busiest = max(loads.values())
        if neighbours and busiest > level * (1 + TOLERANCE):
            node_parts, leaving = _through_nodes(amounts, cluster)
            level = max(level, max(total / capacity[node] for node, total in leaving.items()))
            if busiest > level * (1 + TOLERANCE):
                parts = _with_neighbours(node_parts, level, cluster, background or PortLoads.zero(cluster))
    return {owners: shares_of(part) for owners, part in parts.items()}


def _through_nodes(
    amounts: Mapping[tuple[int, ...], float], cluster: Cluster
) -> tuple[dict[tuple[int, ...], dict[int, float]], dict[int, float]]:
    """Splits over owner nodes by egress, evenly over each node's owners; also returns each node's egress."""
    nodes_of = {owners: tuple(dict.fromkeys(map(cluster.node, owners))) for owners in amounts}
    totals: dict[tuple[int, ...], float] = {}
    for owners, num_bytes in amounts.items():
        totals[nodes_of[owners]] = totals.get(nodes_of[owners], 0.0) + num_bytes
    split, leaving = balance(totals, node_bandwidths(cluster))
    parts = {}
    for owners, num_bytes in amounts.items():
        nodes = nodes_of[owners]
        factor = num_bytes / totals[nodes] if totals[nodes] > 0 else 0.0
        inside = dict.fromkeys(nodes, 0)
        for rank in owners:
            inside[cluster.node(rank)] += 1
        parts[owners] = {
            rank: split[nodes][node] * factor / inside[node] for rank in owners for node in (cluster.node(rank),)
        }
    return parts, leaving


def _with_neighbours(
    node_parts: Mapping[tuple[int, ...], Mapping[int, float]], level: float, cluster: Cluster, background: PortLoads
) -> dict[tuple[int, ...], dict[int, float]]:
    """Splits each node's sends over its owners, then, above `level` bytes, over its other devices."""
    nic, intra = nic_bandwidth(cluster), cluster.intra_bandwidth
    amounts: dict[int, dict[tuple[int, ...], float]] = {}
    for part in node_parts.values():
        for inside, num_bytes in _by_node(part, cluster):
            in_node = amounts.setdefault(cluster.node(inside[0]), {})
            in_node[inside] = in_node.get(inside, 0.0) + num_bytes
    balanced = {node: balance(totals) for node, totals in amounts.items()}
    # An owner's bytes leave by its NIC or, to a neighbour, by its intra-node port, which also carries the background:
    # both ports together limit how far the NIC is relieved.
    for _, loads in balanced.values():
        for rank, num_bytes in loads.items():
            level = max(level, (num_bytes + background.sent_intra[rank]) / (intra + nic) * nic)
    # Neighbours that are busy receiving leave less capacity: then more leaves by the owners' NICs.
    split: dict[tuple[int, ...], dict[int, float]] = {}
    for node, (parts, loads) in balanced.items():
        devices = cluster.ranks(node)
        free: dict[int, float] = {}
        highest = level
        for _ in range(MOST_SWEEPS):
            free = {rank: max(0.0, highest / nic * intra - float(background.received_intra[rank])) for rank in devices}
            excess = sum(max(0.0, loads.get(rank, 0.0) - highest) for rank in devices)
            capacity = sum(min(free[rank], max(0.0, highest - loads.get(rank, 0.0))) for rank in devices)
            if capacity >= excess:
                break
            highest *= 1 + TOLERANCE / 2
        spill(parts, loads, devices, highest, free)
        split.update(parts)
    result: dict[tuple[int, ...], dict[int, float]] = {}
    for owners, part in node_parts.items():
        result[owners] = {}
        for inside, num_bytes in _by_node(part, cluster):
            total = amounts[cluster.node(inside[0])][inside]
            factor = num_bytes / total if total > 0 else 0.0
            result[owners].update({rank: num_part * factor for rank, num_part in split[inside].items()})
    return result


def _by_node(part: Mapping[int, float], cluster: Cluster) -> list[tuple[tuple[int, ...], float]]:
    groups: dict[int, list[int]] = {}
    for rank in part:
        groups.setdefault(cluster.node(rank), []).append(rank)
    return [(tuple(ranks), sum(part[rank] for rank in ranks)) for ranks in groups.values()]
