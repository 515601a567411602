"""Relay plans: what a node lacks crosses its NICs once and is forwarded inside the node.

HotSPa's Algorithm 1 sends a piece to every needer from wherever it is: if k devices of a node need the same bytes, the
node's NICs carry them k times. Here each byte enters a node once, spread over its devices' NICs, and is forwarded over
the fast links inside the node. There are two hops, sometimes three:

* *feed*, inside nodes: if the owners' NICs would be the bottleneck, they send a share to neighbours with idle NICs,
  into relay buffers;
* *cross*, between nodes: to the device where a share lands, in a needer's target buffer or in a relay buffer;
* *forward*, inside nodes: from there to the other needers, and everything that the node already had.

Fractions are decided for sets of ranks (independently for receivers and senders: bytes that leave by any device may
land on any), then applied to the pieces of each kind of segment. A gradient return is the adjoint: contributions are
summed inside the node before the sum crosses. A set of several needers then always lands in a relay buffer: sums have
one fixed order, and gradients are not overwritten.

Not needed on one node, nor if a device's port inside its node is slower than its share of the NICs (`relay_pays`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.placement import Numbers
from hf_hotspa.plan.direct import Pieces
from hf_hotspa.plan.switch_plan import RELAY, TARGET, PortLoads, SegmentPlan, canonical, nic_bandwidth, node_bandwidths

K = TypeVar("K")
Shares = tuple[tuple[int, float], ...]  # ranks and their fractions, by rank; their sum is 1
_Ranks = tuple[int, ...]
_Amounts = dict[_Ranks, float]  # bytes of each set of ranks (or nodes) that may send or get them
_Parts = dict[_Ranks, dict[int, float]]  # how they are split over the ranks
SHARE_ALIGNMENT = 64  # shares of a stream of pieces begin on multiples of this many elements
_Landings = dict[tuple[int, _Ranks], int]  # the number of each `(node, its needers)`, by first appearance
TOLERANCE = 0.01
"""A NIC this much busier than its fair share is left alone: relaying so little costs a message and gains nothing."""
MOST_SWEEPS = 40  # the most rounds of water-filling; regular layouts converge in two or three
_SETTLED = 1e-3  # water-filling ends when a round moves a smaller fraction of the bytes
_BISECTIONS = 30  # halvings of the interval when a level is searched
_LEAST_SHARE = 1e-6  # a smaller share is rounding noise, and dropped


class _Arrivals:
    """The (piece, node) pairs of one kind where the node needs a piece that none of its devices holds."""

    def __init__(self, pieces: Pieces, cluster: Cluster, landings: _Landings) -> None:
        size = cluster.devices_per_node
        self.pieces = pieces
        self.has_owner = np.zeros((len(pieces.starts), cluster.num_nodes), bool)
        self.has_owner[pieces.holders.piece, pieces.holders.rank // size] = True
        group_of, sets = pieces.needed.groups
        order = np.argsort(group_of, kind="stable")
        bounds = np.searchsorted(group_of[order], np.arange(len(sets) + 1))
        blocks = [np.empty((0, 3), np.int64)]
        for group, ranks in enumerate(sets):
            by_node: dict[int, list[int]] = {}
            for rank in ranks:
                by_node.setdefault(rank // size, []).append(rank)
            members = order[bounds[group] : bounds[group + 1]]
            nodes = list(by_node)
            landing = [landings.setdefault((node, tuple(by_node[node])), len(landings)) for node in nodes]
            blocks.append(
                np.column_stack(
                    (np.repeat(members, len(nodes)), np.tile(nodes, len(members)), np.tile(landing, len(members)))
                )
            )
        rows = np.concatenate(blocks)
        rows = rows[~self.has_owner[rows[:, 0], rows[:, 1]]]
        rows = rows[np.lexsort((rows[:, 0], rows[:, 2]))]
        self.piece, self.node, self.landing = rows[:, 0], rows[:, 1], rows[:, 2]
        self._size = size

    def count_pulls(self, pulls: dict[tuple[_Ranks, int], float], weight: int) -> None:
        """Adds the bytes that needers get from owners in their node, by these owners."""
        holders, needed = self.pieces.holders, self.pieces.needed
        near = self.has_owner[needed.piece, needed.rank // self._size] & (holders.find(needed.piece, needed.rank) < 0)
        group_of, sets = holders.groups
        world_size = holders.world_size
        keys = group_of[needed.piece[near]] * world_size + needed.rank[near]
        present, inverse = np.unique(keys, return_inverse=True)
        num_bytes = np.zeros(len(present), np.int64)
        np.add.at(num_bytes, inverse, self.pieces.lengths[needed.piece[near]] * weight)
        for key, total in zip(present.tolist(), num_bytes.tolist(), strict=True):
            needer = key % world_size
            owners = tuple(rank for rank in sets[key // world_size] if rank // self._size == needer // self._size)
            _count(pulls, (owners, needer), total)


class _Decided(NamedTuple):
    """The decisions for sets of ranks, over all kinds: each landing key's needers and landing shares; who sends, by
    owners (empty: each rank sends what it alone holds, uncut); who serves its own node, by owners there."""

    needers: list[_Ranks]
    landing: list[Shares]
    sending: dict[_Ranks, Shares]
    pulling: dict[_Ranks, Shares]


def plan_relay(
    kinds: Sequence[Pieces], kind_of: Sequence[int], element_sizes: Sequence[int], cluster: Cluster, sums: bool = False
) -> list[SegmentPlan]:
    """Plans all kinds of segments (-1: none), balanced by bytes of an element on the wire, with two hops (cross,
    forward) or three (feed, cross, forward); with `sums` for the adjoint, a gradient return."""
    weights = [0] * len(kinds)
    for kind, size in zip(kind_of, element_sizes, strict=True):
        if kind >= 0:
            weights[kind] += size
    landings: _Landings = {}
    arrivals = [_Arrivals(pieces, cluster, landings) for pieces in kinds]
    shares = _decide(arrivals, weights, landings, cluster)
    tables = [_Tables(arrival, shares, cluster, sums) for arrival in arrivals]
    without = 0 if any(len(t.feed) for t in tables) else 1
    return [SegmentPlan((t.feed, t.cross, t.forward)[without:], t.relay_sizes) for t in tables]


def _decide(arrivals: Sequence[_Arrivals], weights: Sequence[int], landings: _Landings, cluster: Cluster) -> _Decided:
    num_bytes = np.zeros(len(landings), np.int64)
    pulls: dict[tuple[_Ranks, int], float] = {}
    for arrival, weight in zip(arrivals, weights, strict=True):
        np.add.at(num_bytes, arrival.landing, arrival.pieces.lengths[arrival.piece] * weight)
        arrival.count_pulls(pulls, weight)
    pulled = [Pull(owners, needer, total) for (owners, needer), total in pulls.items()]
    demands = [Demand((), *key, float(total)) for key, total in zip(landings, num_bytes.tolist(), strict=True) if total]
    landers = landing_shares(demands, cluster, pulled)
    moves = [
        (lander, rank, demand.num_bytes * fraction)
        for demand in demands
        for lander, fraction in landers[demand.node, demand.needers]
        for rank in demand.needers
        if rank != lander
    ]
    inside = PortLoads.zero(cluster)
    if moves:
        inside.add(*zip(*moves, strict=True))
    pulling = pulling_shares(pulled, dict(enumerate(inside.sent_intra.tolist())))
    moves = [(server, to, total * part) for near, to, total in pulled for server, part in pulling[near]]
    if moves:
        inside.add(*zip(*moves, strict=True))
    sending = _sending_shares(arrivals, weights, cluster, inside)
    landing = [landers.get(key, ()) for key in landings]
    return _Decided([needers for _, needers in landings], landing, sending, pulling)


def _sending_shares(
    arrivals: Sequence[_Arrivals], weights: Sequence[int], cluster: Cluster, inside: PortLoads
) -> dict[_Ranks, Shares]:
    amounts: _Amounts = {}
    entering = np.zeros(cluster.num_nodes)
    for arrival, weight in zip(arrivals, weights, strict=True):
        group_of, sets = arrival.pieces.holders.groups
        num_bytes = arrival.pieces.lengths[arrival.piece] * weight
        np.add.at(entering, arrival.node, num_bytes)
        totals = np.zeros(len(sets), np.int64)
        np.add.at(totals, group_of[arrival.piece], num_bytes)
        for group in np.flatnonzero(totals).tolist():
            _count(amounts, sets[group], float(totals[group]))
    sending = sender_shares(amounts, entering.tolist(), cluster, inside)
    # a master store where no owner's NIC exceeds the unavoidable load
    sole = all(share == ((owners[0], 1.0),) and len(owners) == 1 for owners, share in sending.items())
    return {} if sole else sending


# -- which ranks send, and where the bytes land ------------------------------------------------------------------------


class Demand(NamedTuple):
    """Bytes that a node lacks: `owners` are other nodes' ranks that hold them, `needers` (>= 1) its own ranks."""

    owners: _Ranks
    node: int
    needers: _Ranks
    num_bytes: float


class Pull(NamedTuple):
    """Bytes that a rank lacks, and the `owners` in its node that hold them."""

    owners: _Ranks
    needer: int
    num_bytes: float


def relay_pays(cluster: Cluster) -> bool:
    """Whether landing on a neighbour and forwarding is faster than fetching every copy through the device's own NIC.

    Each of k devices that need the same bytes receives all of them once either way; relaying moves all but 1/k from the
    NICs to the ports inside the node. This is faster, even with sequential hops, exactly if those ports are.
    """
    return cluster.num_nodes > 1 and cluster.devices_per_node > 1 and cluster.intra_bandwidth > nic_bandwidth(cluster)


def pulling_shares(pulls: Iterable[Pull], forwarded: Mapping[int, float] | None = None) -> dict[_Ranks, Shares]:
    """Which owners serve needs inside their node: balanced, with the least load of the busiest sender. `pulls`: what
    moves inside nodes only. `forwarded`: bytes that each rank forwards inside its node after landing. Returns for each
    owner set its ranks with their fractions; even in regular layouts."""
    amounts: _Amounts = {(rank,): num_bytes for rank, num_bytes in (forwarded or {}).items()}
    for owners, _, num_bytes in pulls:
        _count(amounts, owners, num_bytes)
    return {owners: shares_of(part) for owners, part in balance(amounts)[0].items()}


def landing_shares(
    demands: Iterable[Demand], cluster: Cluster, pulls: Sequence[Pull] = ()
) -> dict[tuple[int, _Ranks], Shares]:
    """On which devices of its node the bytes of each (node, needers) land.

    A landing device forwards its bytes to every (other) needer. Needers land first, with the least load of the busiest
    NIC. Only what would load a NIC over the node's even share (by more than 1 %) lands on neighbours with capacity
    left: nothing is forwarded if every device receives its own part. If the node shares its NICs, only needers land,
    balanced by what they forward. If forwarding would still make an intra-node port the bottleneck, the split is
    improved over both ports of all devices. `pulls` move inside nodes anyway: relaying need not finish earlier.
    """
    by_node: dict[int, _Amounts] = {}
    for _, node, needers, num_bytes in demands:
        _count(by_node.setdefault(node, {}), needers, num_bytes)
    nic = cluster.node_bandwidth if cluster.shares_nics else nic_bandwidth(cluster)
    intra = cluster.intra_bandwidth
    served: list[_Amounts] = [{} for _ in range(cluster.num_nodes)]
    pulled: dict[int, float] = {}
    for owners, rank, num_bytes in pulls:
        _count(served[cluster.node(rank)], owners, num_bytes)
        _count(pulled, rank, num_bytes)
    busiest = max(max(balance(inside)[1].values(), default=0.0) for inside in served)
    pulls_s = max(busiest, max(pulled.values(), default=0.0)) / intra
    result = {}
    for node, amounts in sorted(by_node.items()):
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
                _count(forwards, needers, num_bytes * (len(needers) - 1))
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
    amounts: Mapping[_Ranks, float],  # what nodes lack, by the ranks that hold it; of several nodes, for each
    entering: Sequence[float],  # what each node lacks
    cluster: Cluster,
    background: PortLoads | None = None,  # what moves inside nodes anyway: relaying need not finish earlier
    *,
    neighbours: bool = True,  # whether ranks other than owners may send, too
) -> dict[_Ranks, Shares]:
    """Which ranks send the bytes of each owner set, over all destinations.

    Starts with the split among owners with the least load of the busiest NIC. If a NIC is then busier (by more than
    1 %) than the busiest node on either side makes unavoidable, the bytes are first split over the owner nodes. What
    exceeds the NICs of a node's owners is sent by neighbours with capacity left, which receive it beforehand, in equal
    parts from the owners of their node: a third hop. If nodes share their NICs, only owners send.

    Destinations do not change the load of a sender's NIC: all are balanced together.
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


def _through_nodes(amounts: Mapping[_Ranks, float], cluster: Cluster) -> tuple[_Parts, dict[int, float]]:
    """Splits over owner nodes by egress, evenly over each node's owners; also returns each node's egress."""
    nodes_of = {owners: tuple(dict.fromkeys(map(cluster.node, owners))) for owners in amounts}
    totals: _Amounts = {}
    for owners, num_bytes in amounts.items():
        _count(totals, nodes_of[owners], num_bytes)
    split, leaving = balance(totals, node_bandwidths(cluster))
    parts = {}
    for owners, num_bytes in amounts.items():
        nodes = nodes_of[owners]
        factor = num_bytes / totals[nodes] if totals[nodes] > 0 else 0.0
        inside = Counter(map(cluster.node, owners))
        parts[owners] = {r: split[nodes][node] * factor / inside[node] for r in owners for node in [cluster.node(r)]}
    return parts, leaving


def _with_neighbours(
    node_parts: Mapping[_Ranks, Mapping[int, float]], level: float, cluster: Cluster, background: PortLoads
) -> _Parts:
    """Splits each node's sends over its owners, then, above `level` bytes, over its other devices."""
    nic, intra = nic_bandwidth(cluster), cluster.intra_bandwidth
    amounts: dict[int, _Amounts] = {}
    for part in node_parts.values():
        for inside, num_bytes in _by_node(part, cluster):
            _count(amounts.setdefault(cluster.node(inside[0]), {}), inside, num_bytes)
    balanced = {node: balance(totals) for node, totals in amounts.items()}
    # An owner's bytes leave by its NIC or, to a neighbour, by its intra-node port, which also carries the background:
    # both ports together limit how far the NIC is relieved.
    for _, loads in balanced.values():
        for rank, num_bytes in loads.items():
            level = max(level, (num_bytes + background.sent_intra[rank]) / (intra + nic) * nic)
    # Neighbours that are busy receiving leave less capacity: then more leaves by the owners' NICs.
    split: _Parts = {}
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
    result: _Parts = {}
    for owners, part in node_parts.items():
        result[owners] = {}
        for inside, num_bytes in _by_node(part, cluster):
            total = amounts[cluster.node(inside[0])][inside]
            factor = num_bytes / total if total > 0 else 0.0
            result[owners].update({rank: num_part * factor for rank, num_part in split[inside].items()})
    return result


def _by_node(part: Mapping[int, float], cluster: Cluster) -> list[tuple[_Ranks, float]]:
    groups: dict[int, list[int]] = {}
    for rank in part:
        groups.setdefault(cluster.node(rank), []).append(rank)
    return [(tuple(ranks), sum(part[rank] for rank in ranks)) for ranks in groups.values()]


# -- water-filling -----------------------------------------------------------------------------------------------------


def _count(amounts: dict[K, float], key: K, num_bytes: float) -> None:
    amounts[key] = amounts.get(key, 0.0) + num_bytes


def balance(
    amounts: Mapping[_Ranks, float], capacity: Sequence[float] | None = None
) -> tuple[_Parts, dict[int, float]]:
    """Splits each amount over its places to minimise the load of the fullest place; also returns the loads.

    Repeated water-filling, one amount after the other (fewest places first, then largest): block coordinate descent on
    the sum of squared loads. Its minimum also has the smallest maximum, and the least above any level.
    """
    free = [places for places in amounts if len(places) > 1]
    parts: _Parts = {places: {places[0]: amount} for places, amount in amounts.items() if len(places) == 1}
    parts |= {places: dict.fromkeys(places, 0.0) for places in free}
    loads: dict[int, float] = {}
    for part in parts.values():
        for place, num_bytes in part.items():
            loads[place] = loads.get(place, 0.0) + num_bytes
    free.sort(key=lambda places: (len(places), -amounts[places], places))
    enough = _SETTLED * sum(amounts.values())
    for sweep in range(MOST_SWEEPS):
        moved = 0.0
        for places in free:
            part = parts[places]
            others = [loads[place] - part[place] for place in places]
            added = _fill(others, None if capacity is None else [capacity[p] for p in places], amounts[places])
            for place, base, num_bytes in zip(places, others, added, strict=True):
                moved += abs(num_bytes - part[place])
                part[place] = num_bytes
                loads[place] = base + num_bytes
        if sweep and moved <= enough:
            break
    return parts, loads


def _fill(loads: Sequence[float], capacity: Sequence[float] | None, amount: float) -> list[float]:
    """Pours an amount over places and returns each one's part: the lowest (per capacity) are filled first."""
    widths = [1.0] * len(loads) if capacity is None else capacity
    heights = [load / width for load, width in zip(loads, widths, strict=True)]
    order = sorted(range(len(loads)), key=heights.__getitem__)
    content = width = level = 0.0
    for position, place in enumerate(order):
        content += loads[place]
        width += widths[place]
        level = (amount + content) / width
        if position + 1 == len(order) or level <= heights[order[position + 1]]:
            break
    return [max(0.0, level - height) * width for height, width in zip(heights, widths, strict=True)]


def spill(
    parts: _Parts,
    loads: Mapping[int, float],
    devices: Sequence[int],
    level: float,
    free: Mapping[int, float] | None = None,
) -> None:
    """Moves what exceeds `level` on a device to devices with capacity below it, in place.

    `level` is at least the even share: there is capacity for everything. The devices with capacity take the same
    fractions of everything that moves, which balances what they forward like what they take. `free`: bytes that each
    device should take at most; ignored if they do not suffice.
    """
    excess = {d: loads[d] - level for d in devices if loads.get(d, 0.0) > level * (1 + TOLERANCE)}
    if not excess:
        return
    moving = sum(excess.values())
    capacities = {d: level - loads.get(d, 0.0) for d in devices if loads.get(d, 0.0) < level}
    narrower = {d: min(capacity, free[d]) if free else capacity for d, capacity in capacities.items()}
    narrower = {d: capacity for d, capacity in narrower.items() if capacity > level * TOLERANCE}
    if sum(narrower.values()) >= moving * (1 - 2 * TOLERANCE):
        capacities = narrower
    space = sum(capacities.values())
    for part in parts.values():
        moved = 0.0
        for device in [d for d in part if d in excess]:
            share = part[device] * (excess[device] / loads[device])
            part[device] -= share
            moved += share
        if moved > 0:
            for device, capacity in capacities.items():
                part[device] = part.get(device, 0.0) + moved * capacity / space


def relieve(
    parts: _Parts,  # bytes that land, by needers and device
    served: Mapping[_Ranks, float],  # bytes that are pulled inside the node, by owners
    # bytes that each rank of the node needs and lacks; its intra-node port receives what does not land on it
    wanted: Mapping[int, float],
    level_s: float,  # seconds up to which a port is not a bottleneck
    nic: float,  # bytes per second into a device from other nodes
    intra: float,  # bytes per second out of a device inside the node
) -> None:
    """Improves one node's landing, in place, where forwarding keeps a device's intra-node port above `level_s`.

    Water-filling of the busier of a device's two ports (NIC in, intra-node out), over all devices, while the load of
    the node's busiest port falls. Between the rounds the pulls move to the owners that forward least.
    """
    devices = sorted(wanted)
    cost = {needers: {d: (len(needers) - (d in needers)) / intra for d in devices} for needers in parts}
    trial = {needers: dict(part) for needers, part in parts.items()}
    order = sorted(trial, key=lambda needers: (-len(needers) * sum(trial[needers].values()), needers))
    best_s = float("inf")
    for _ in range(MOST_SWEEPS):
        received_s, forwarded_s = dict.fromkeys(devices, 0.0), dict.fromkeys(devices, 0.0)
        handed = dict(wanted)
        for needers, part in trial.items():
            for device, num_bytes in part.items():
                received_s[device] += num_bytes / nic
                forwarded_s[device] += num_bytes * cost[needers][device]
                handed[device] -= num_bytes if device in needers else 0.0
        sends: _Amounts = {(device,): seconds * intra for device, seconds in forwarded_s.items()}
        for owners, num_bytes in served.items():
            sends[owners] = sends.get(owners, 0.0) + num_bytes
        sent_s = {device: num_bytes / intra for device, num_bytes in balance(sends)[1].items()}
        busiest_s = max(*received_s.values(), *sent_s.values(), max(handed.values()) / intra)
        if busiest_s < best_s:
            parts.update({needers: dict(part) for needers, part in trial.items()})
        if max(sent_s.values()) <= level_s * (1 + TOLERANCE) or busiest_s > best_s * (1 - _SETTLED):
            return
        best_s = busiest_s
        for needers in order:
            part, step = trial[needers], cost[needers]
            amount = sum(part.values())
            for device, num_bytes in part.items():
                received_s[device] -= num_bytes / nic
                sent_s[device] -= num_bytes * step[device]
            trial[needers] = part = _fill_two_ports(amount, needers, received_s, sent_s, step, nic, level_s)
            for device, num_bytes in part.items():
                received_s[device] += num_bytes / nic
                sent_s[device] += num_bytes * step[device]


def _fill_two_ports(
    amount: float,
    needers: _Ranks,
    received_s: Mapping[int, float],
    sent_s: Mapping[int, float],
    step: Mapping[int, float],
    nic: float,
    level_s: float,
) -> dict[int, float]:
    """Splits an amount over devices by bisection, raising the lowest `max(received, sent)` first. Ports are free below
    `level_s`, where needers come first."""

    def capacity(device: int, level: float) -> float:
        space = (level - received_s[device]) * nic
        if step[device] > 0:
            space = min(space, (level - sent_s[device]) / step[device])
        return max(0.0, space)

    low = min(max(received_s[d], sent_s[d]) for d in step)
    high = max(max(received_s[d], sent_s[d]) for d in step) + amount * max(1 / nic, *step.values())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(capacity(device, middle) for device in step) < amount:
            low = middle
        else:
            high = middle
    capacities = {device: capacity(device, max(high, level_s)) for device in step}
    part: dict[int, float] = {}
    for group in (needers, [device for device in step if device not in needers]):
        space, left = sum(capacities[device] for device in group), amount - sum(part.values())
        if space > 0 and left > amount * _LEAST_SHARE:
            part.update(
                {device: capacities[device] * min(1.0, left / space) for device in group if capacities[device] > 0}
            )
    total = sum(part.values())
    return {device: num_bytes * amount / total for device, num_bytes in part.items()}


def shares_of(part: Mapping[int, float]) -> Shares:
    """Returns a split as fractions, by rank; an even one for no bytes."""
    total = sum(part.values())
    if total <= 0:
        return tuple((rank, 1 / len(part)) for rank in sorted(part))
    kept = {rank: num_bytes for rank, num_bytes in part.items() if num_bytes > total * _LEAST_SHARE}
    total = sum(kept.values())
    return tuple((rank, kept[rank] / total) for rank in sorted(kept))


# -- tables ------------------------------------------------------------------------------------------------------------


def split_streams(
    lengths: Numbers, streams: Numbers, shares: Sequence[Shares]
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Divides streams of pieces between ranks: each stream is laid end to end and cut in consecutive shares. `lengths`:
    elements of each row. `streams`: the stream of each row, ascending. `shares`: of each stream. Returns `(row, offset
    in the row, length, rank)` of each part, by row and offset."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    present, first_row = np.unique(streams, return_index=True)
    bases = begins[first_row].tolist()
    totals = np.add.reduceat(lengths, first_row).tolist() if len(lengths) else []
    cuts, ranks = [], []
    for stream, base, total in zip(present.tolist(), bases, totals, strict=True):
        done = 0.0
        for rank, fraction in shares[stream]:
            if fraction > 0:
                cuts.append(base + round(done * total / SHARE_ALIGNMENT) * SHARE_ALIGNMENT if done else base)
                ranks.append(rank)
                done += fraction
    cut_at = np.array(cuts, np.int64)
    # rounding may move a cut of a short stream into the next
    limit = np.array([base + total for base, total in zip(bases, totals, strict=True)], np.int64)
    counts = [sum(fraction > 0 for _, fraction in shares[stream]) for stream in present.tolist()]
    cut_at = np.minimum(cut_at, np.repeat(limit, counts))
    points = np.union1d(begins, cut_at[cut_at < (ends[-1] if len(ends) else 0)])
    row = np.searchsorted(begins, points, side="right") - 1
    length = np.diff(np.append(points, ends[-1] if len(ends) else 0))
    rank = np.array(ranks, np.int64)[_last_of_stream(cut_at, points, limit, counts)]
    return row, points - begins[row], length, rank


def _last_of_stream(cut_at: Numbers, points: Numbers, limits: Numbers, counts: Sequence[int]) -> Numbers:
    """The share of each point: the last one that begins at or before it, in its own stream."""
    stream_of_cut = np.repeat(np.arange(len(limits)), counts)
    stream_of_point = np.searchsorted(limits, points, side="right")
    # a cut at the end of a stream is an empty share: after all points of its stream, before the next
    keys = cut_at * (len(limits) + 1) + stream_of_cut
    return np.searchsorted(keys, points * (len(limits) + 1) + stream_of_point, side="right") - 1


class _Tables:
    """The tables of one kind of segment."""

    def __init__(self, arrival: _Arrivals, shares: _Decided, cluster: Cluster, sums: bool) -> None:
        self._arrivals, self._shares, self._cluster = arrival, shares, cluster
        pieces = arrival.pieces
        holders, needed, starts = pieces.holders, pieces.needed, pieces.starts
        row, offset, length, land = split_streams(pieces.lengths[arrival.piece], arrival.landing, shares.landing)
        row, offset, length, land, sender = self._assign_senders(row, offset, length, land)
        piece, landing_of = arrival.piece[row], arrival.landing[row]
        source, wanted = holders.find(piece, sender), needed.find(piece, land)
        set_sizes = np.array([len(ranks) for ranks in shares.needers], np.int64)
        in_target = (wanted >= 0) & ((set_sizes[landing_of] == 1) | (not sums))
        # relay buffers: landed parts first, then fed parts
        nothing = np.zeros(cluster.world_size, np.int64)
        relay_offset, landed = _relay_offsets(land, np.where(in_target, 0, length), nothing)
        fed = source < 0
        fed_offset, self.relay_sizes, feed = self._fed(piece[fed], offset[fed], length[fed], sender[fed], landed)
        sent_offset = holders.offset[source] + offset
        sent_offset[fed] = fed_offset
        store = np.where(in_target, TARGET, RELAY)
        landed_at = np.where(in_target, needed.offset[wanted] + offset, relay_offset)
        start = starts[piece] + offset
        sent = np.where(fed, RELAY, holders.store[source]), sender, sent_offset
        self.cross = canonical(np.column_stack((*sent, store, land, landed_at, start, length)))
        self.feed = canonical(feed)
        # forwarding: each landed part to the node's needers on which it did not land
        counts = set_sizes[landing_of]
        part = np.repeat(np.arange(len(row)), counts)
        flat = np.array([rank for ranks in shares.needers for rank in ranks], np.int64)
        begins = (np.cumsum(set_sizes) - set_sizes)[landing_of]
        to = flat[np.repeat(begins, counts) + np.arange(len(part)) - np.repeat(np.cumsum(counts) - counts, counts)]
        keep = ~(in_target[part] & (to == land[part]))
        part, to = part[keep], to[keep]
        got = np.full(len(part), TARGET), to, needed.offset[needed.find(piece[part], to)] + offset[part]
        forward = np.column_stack((store[part], land[part], landed_at[part], *got, start[part], length[part]))
        self.forward = canonical(np.concatenate((forward, self._inside())))

    def _assign_senders(
        self, row: Numbers, offset: Numbers, length: Numbers, land: Numbers
    ) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        """Assigns a sender to each part; cuts parts further if several ranks send.

        What goes to each node from the same owners lies along one line, and the senders take consecutive stretches: to
        different nodes if possible, which keeps messages few.
        """
        holders, sending = self._arrivals.pieces.holders, self._shares.sending
        piece, node = self._arrivals.piece[row], self._arrivals.node[row]
        if not sending:
            return row, offset, length, land, holders.rank[holders.first[piece]]
        group_of, sets = holders.groups
        stream = group_of[piece]
        order = np.lexsort((node, stream))
        shares = [sending.get(owners, ()) for owners in sets]
        sub, sub_offset, sub_length, rank = split_streams(length[order], stream[order], shares)
        parts = order[sub]
        return row[parts], offset[parts] + sub_offset, sub_length, land[parts], rank

    def _fed(
        self, piece: Numbers, offset: Numbers, length: Numbers, sender: Numbers, filled: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Plans what senders without a piece receive beforehand, once, in equal shares from the owners in their node.
        Returns each part's place in its sender's relay buffer, the buffer sizes, and the table."""
        holders, size = self._arrivals.pieces.holders, self._cluster.devices_per_node
        span = int(self._arrivals.pieces.lengths.max(initial=0)) + 1
        at = (sender * len(self._arrivals.pieces.lengths) + piece) * span + offset
        order = np.argsort(at, kind="stable")
        reach = np.maximum.accumulate((at + length)[order]) if len(at) else at
        new = np.concatenate(([True], at[order][1:] > reach[:-1])) if len(at) else np.empty(0, bool)
        first = np.flatnonzero(new)
        stretch = np.empty(len(at), np.int64)
        stretch[order] = np.cumsum(new) - 1
        begin, who, which = at[order][first], sender[order][first], piece[order][first]
        extent = np.maximum.reduceat(reach, first) - begin if len(at) else at
        places, sizes = _relay_offsets(who, extent, filled)
        low, high = holders.between(which, who // size * size, (who // size + 1) * size)
        sub, sub_offset, sub_length, rank = self._share_out(low, high, who, extent, None)
        row = holders.find(which[sub], rank)
        shift = begin[sub] % span + sub_offset
        sent = holders.store[row], rank, holders.offset[row] + shift
        got = np.full(len(row), RELAY), who[sub], places[sub] + sub_offset
        table = np.column_stack((*sent, *got, self._arrivals.pieces.starts[which[sub]] + shift, sub_length))
        return places[stretch] + at - begin[stretch], sizes, table

    def _inside(self) -> Numbers:
        pieces, size = self._arrivals.pieces, self._cluster.devices_per_node
        holders, needed = pieces.holders, pieces.needed
        near = self._arrivals.has_owner[needed.piece, needed.rank // size]
        piece, rank, offset = needed.piece[near], needed.rank[near], needed.offset[near]
        own = holders.find(piece, rank)
        low, high = holders.between(piece, rank // size * size, (rank // size + 1) * size)
        simple = (own >= 0) | (high - low == 1)
        several = np.flatnonzero(~simple)
        sub, part_offset, part_length, part_rank = self._share_out(
            low[several], high[several], rank[several], pieces.lengths[piece[several]], self._shares.pulling
        )
        chosen = np.concatenate((np.flatnonzero(simple), several[sub]))
        shift = np.concatenate((np.zeros(int(simple.sum()), np.int64), part_offset))
        length = np.concatenate((pieces.lengths[piece[simple]], part_length))
        row = np.concatenate((np.where(own >= 0, own, low)[simple], holders.find(piece[several[sub]], part_rank)))
        sent = holders.store[row], holders.rank[row], holders.offset[row] + shift
        got = np.full(len(row), TARGET), rank[chosen], offset[chosen] + shift
        return np.column_stack((*sent, *got, pieces.starts[piece[chosen]] + shift, length))

    def _share_out(
        self, low: Numbers, high: Numbers, to: Numbers, length: Numbers, shares_of: dict[_Ranks, Shares] | None
    ) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Divides each row between the holders in rows `low` to `high`; equally without `shares_of`. Each receiver
        begins with another holder, which keeps all holders busy."""
        ranks_of_rows = self._arrivals.pieces.holders.rank.tolist()
        rows = zip(low.tolist(), high.tolist(), to.tolist(), strict=True)
        keys = [(tuple(ranks_of_rows[a:b]), rank) for a, b, rank in rows]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        stream = np.array([numbers[key] for key in keys], np.int64)
        order = np.argsort(stream, kind="stable")
        shares = []
        for ranks, rank in numbers:
            share = shares_of[ranks] if shares_of is not None else tuple((r, 1 / len(ranks)) for r in ranks)
            first = rank % len(share)
            shares.append(share[first:] + share[:first])
        sub, sub_offset, sub_length, chosen = split_streams(length[order], stream[order], shares)
        return order[sub], sub_offset, sub_length, chosen


def _relay_offsets(holder: Numbers, relayed: Numbers, filled: Numbers) -> tuple[Numbers, Numbers]:
    """Returns each part's place in its holder's relay buffer, behind the `filled` elements, and the new `filled`."""
    sizes = np.zeros(len(filled), np.int64)
    np.add.at(sizes, holder, relayed)
    order = np.argsort(holder, kind="stable")
    ends = np.cumsum(relayed[order])
    before = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    offsets = np.empty(len(holder), np.int64)
    offsets[order] = ends - relayed[order] - before[holder[order]] + filled[holder[order]]
    return offsets, filled + sizes
