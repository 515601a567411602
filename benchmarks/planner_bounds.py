"""Planner oracles: the fractional optimum of direct and of relay switches as linear programmes, and instances for them.

`planner.py` prints how near the planner's decisions come to the optimum.
The programmes are solved by HiGHS through scipy. Everything is counted in bytes and seconds of the fluid port model
(`hf_hotspa.plan.switch_plan`); nothing here is measured on a device.
"""

import random
from collections.abc import Sequence

import numpy as np
from planner_cases import sharded_pair, weights
from port_bounds import PieceClass, classes_of, demands_of, pulls_of, sending_shares
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.sparse import coo_matrix  # type: ignore[import-untyped]

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.placement import Layout
from hf_hotspa.plan.relay import landing_shares, pulling_shares
from hf_hotspa.plan.switch_plan import PortLoads, nic_bandwidth
from hf_hotspa.strategy import Strategy

MODEL = "32B"
"""Of the switch tables."""


class _Programme:
    """Minimise the busiest port over the fractions of amounts that each go to one of several routes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._amounts: list[float] = []
        self._choice: list[int] = []  # for each variable the amount that it is a part of
        self._loads: list[tuple[tuple[str, int], int]] = []  # (port, variable) entries

    def amount(self, num_bytes: float) -> int:
        """A new amount to be split; returns its index."""
        self._amounts.append(num_bytes)
        return len(self._amounts) - 1

    def route(self, amount: int, hops: Sequence[tuple[int | None, int | None]]) -> None:
        """A route for a part of an amount: hops (source, destination); None leaves that end's port out."""
        variable = len(self._choice)
        self._choice.append(amount)
        cluster = self.cluster
        for source, destination in hops:
            if source is not None and destination is not None and cluster.node(source) == cluster.node(destination):
                if source != destination:
                    self._loads += [(("intra send", source), variable), (("intra receive", destination), variable)]
                continue
            for kind, rank in (("NIC send", source), ("NIC receive", destination)):
                if rank is not None:
                    self._loads.append(((kind, cluster.node(rank) if cluster.shares_nics else rank), variable))

    def seconds(self) -> float:
        """The optimum."""
        if not self._loads:
            return 0.0
        cluster = self.cluster
        ports = {port: i for i, port in enumerate(dict.fromkeys(port for port, _ in self._loads))}
        nic = cluster.node_bandwidth if cluster.shares_nics else nic_bandwidth(cluster)
        speed = [cluster.intra_bandwidth if kind.startswith("intra") else nic for kind, _ in ports]
        # Bytes and seconds in units of the largest amount keep the matrix well scaled.
        unit, fastest = max(self._amounts) or 1.0, max(speed)
        count = len(self._choice)
        rows = np.array([ports[port] for port, _ in self._loads])
        columns = np.array([variable for _, variable in self._loads])
        values = 1.0 / (np.array(speed)[rows] / fastest)
        rows = np.concatenate([rows, np.arange(len(ports))])
        columns = np.concatenate([columns, np.full(len(ports), count)])
        values = np.concatenate([values, np.full(len(ports), -1.0)])
        used = sorted(set(self._choice))
        position = {amount: i for i, amount in enumerate(used)}
        split = coo_matrix(
            (np.ones(count), ([position[amount] for amount in self._choice], np.arange(count))),
            shape=(len(used), count + 1),
        )
        found = linprog(
            np.append(np.zeros(count), 1.0),
            A_ub=coo_matrix((values, (rows, columns)), shape=(len(ports), count + 1)).tocsr(),
            b_ub=np.zeros(len(ports)),
            A_eq=split.tocsr(),
            b_eq=np.array(self._amounts)[used] / unit,
            bounds=(0, None),
            method="highs",
        )
        if found.status != 0:
            raise RuntimeError(f"the linear programme has no optimum: {found.message}")
        return float(found.fun) * unit / fastest


def relay_bound_lp(classes: Sequence[PieceClass], cluster: Cluster) -> float:
    """Seconds of the best relay plan: what a node lacks enters it once, by any of its devices, out of any owner node.

    A device of an owner node may also send what it does not own, fed by an owner inside the node. A needer with an
    owner in its node pulls from owners there. The sides of a crossing are independent, so that equal owner sets, and
    equal needer sets of a node, are one amount each: the optimum is the same.
    """
    programme = _Programme(cluster)
    for near, rank, num_bytes in pulls_of(classes, cluster):
        amount = programme.amount(num_bytes)
        for owner in near:
            programme.route(amount, [(owner, rank)])
    sending: dict[tuple[int, ...], float] = {}
    landing: dict[tuple[int, tuple[int, ...]], float] = {}
    for owners, node, needers, num_bytes in demands_of(classes, cluster):
        sending[owners] = sending.get(owners, 0.0) + num_bytes
        landing[node, needers] = landing.get((node, needers), 0.0) + num_bytes
    for (node, needers), num_bytes in landing.items():
        amount = programme.amount(num_bytes)
        for device in cluster.ranks(node):
            programme.route(amount, [(None, device), *((device, rank) for rank in needers)])
    for owners, num_bytes in sending.items():
        amount = programme.amount(num_bytes)
        for node in sorted({cluster.node(rank) for rank in owners}):
            for device in cluster.ranks(node):
                if device in owners:
                    programme.route(amount, [(device, None)])
                else:
                    for owner in (o for o in owners if cluster.node(o) == node):
                        programme.route(amount, [(owner, device), (device, None)])
    return programme.seconds()


def direct_bound_lp(classes: Sequence[PieceClass], cluster: Cluster) -> float:
    """Seconds of the best direct plan: every needer fetches from owners, from its own node where possible."""
    programme = _Programme(cluster)
    wanted = {(near, rank): num_bytes for near, rank, num_bytes in pulls_of(classes, cluster)}
    for owners, _, needers, num_bytes in demands_of(classes, cluster):
        for rank in needers:
            wanted[owners, rank] = wanted.get((owners, rank), 0.0) + num_bytes
    for (owners, rank), num_bytes in wanted.items():
        amount = programme.amount(num_bytes)
        for owner in owners:
            programme.route(amount, [(owner, rank)])
    return programme.seconds()


def planned_hops(classes: Sequence[PieceClass], cluster: Cluster) -> list[PortLoads]:
    """The loads of the relay plan: feeding neighbours that send, crossing, then forwarding and pulling in the nodes."""
    feed, cross, forward = (PortLoads.zero(cluster) for _ in range(3))
    pulls, demands = pulls_of(classes, cluster), demands_of(classes, cluster)
    landing = landing_shares(demands, cluster, pulls)
    for _, node, needers, num_bytes in demands:
        for lander, part in landing[node, needers]:
            forward.add(lander, needers, num_bytes * part)
    serving = pulling_shares(pulls, dict(enumerate(forward.sent_intra.tolist())))
    for near, rank, num_bytes in pulls:
        servers, shares = zip(*serving[near], strict=True)
        forward.add(servers, rank, num_bytes * np.array(shares))
    sending = sending_shares(demands, cluster, forward)
    for owners, node, needers, num_bytes in demands:
        landers, parts = (np.array(column) for column in zip(*landing[node, needers], strict=True))
        for sender, share in sending[owners, node]:
            cross.add(sender, landers.astype(int), num_bytes * share * parts)
            if sender not in owners:
                feeders = [o for o in owners if cluster.node(o) == cluster.node(sender)]
                feed.add(feeders, sender, num_bytes * share / len(feeders))
    return [feed, cross, forward]


def _classes(source: Layout, target: Layout) -> list[PieceClass]:
    return classes_of(source, target, [2] * len(target.placements))


def parameter_classes(a: Strategy, b: Strategy) -> list[PieceClass]:
    """The bf16 weights of the 32B model from one strategy to another; every replica holds and needs all."""
    return _classes(weights(MODEL, a), weights(MODEL, b))


def gradient_classes(a: Strategy, b: Strategy) -> list[PieceClass]:
    """The bf16 gradients, cut over dp across the tp cut: one owner and one needer for each element."""
    return _classes(*sharded_pair(MODEL, a, b))


def random_classes(seed: int, cluster: Cluster, count: int = 40) -> list[PieceClass]:
    """Irregular instances: random owner and needer sets, heavy-tailed sizes."""
    rng = random.Random(seed)
    ranks = range(cluster.world_size)
    return [
        PieceClass(
            1e8 * rng.paretovariate(1.2),
            tuple(sorted(rng.sample(ranks, rng.randint(1, min(4, len(ranks)))))),
            tuple(sorted(rng.sample(ranks, rng.randint(1, max(1, len(ranks) // 2))))),
        )
        for _ in range(count)
    ]
