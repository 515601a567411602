"""Planner oracles: the fractional optimum of direct and of relay switches as linear programmes, and instances for them.

Run `python benchmarks/planner_bounds.py` for the table of how near the planner's decisions come to the optimum.
The programmes are solved by HiGHS through scipy. Everything is counted in bytes and seconds of the fluid port model
(`hf_hotspa.plan.switch_plan`); nothing here is measured on a device.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
from port_bounds import PieceClass, demands_of, pulls_of, sending_shares
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.sparse import coo_matrix  # type: ignore[import-untyped]

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.stages import StageCosts, nested_orders
from hf_hotspa.plan.relay import landing_shares, pulling_shares
from hf_hotspa.plan.switch_plan import PortLoads, nic_bandwidth
from hf_hotspa.strategy import Coord, Strategy, strategies_of

NUM_LAYERS, HIDDEN, FFN, VOCABULARY = 60, 6656, 17920, 32000
"""The 32B model of the switch tables."""


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


def planned_hops(classes: Sequence[PieceClass], cluster: Cluster, *, neighbours: bool = True) -> list[PortLoads]:
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
    sending = sending_shares(demands, cluster, forward, neighbours=neighbours)
    for owners, node, needers, num_bytes in demands:
        landers, parts = (np.array(column) for column in zip(*landing[node, needers], strict=True))
        for sender, share in sending[owners, node]:
            cross.add(sender, landers.astype(int), num_bytes * share * parts)
            if sender not in owners:
                feeders = [o for o in owners if cluster.node(o) == cluster.node(sender)]
                feed.add(feeders, sender, num_bytes * share / len(feeders))
    return [feed, cross, forward]


def _merged(pieces: Iterator[PieceClass]) -> list[PieceClass]:
    total: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    for num_bytes, owners, needers in pieces:
        total[owners, needers] = total.get((owners, needers), 0.0) + num_bytes
    return [PieceClass(num_bytes, *key) for key, num_bytes in total.items()]


def _holders(strategy: Strategy, stage: int, shard: int) -> tuple[int, ...]:
    """The ranks that hold a tp shard of a stage, by dp coordinate."""
    coordinate = strategy.shard_order.index(shard) if strategy.shard_order else shard
    return tuple(strategy.rank(Coord(dp, coordinate, stage)) for dp in range(strategy.dp))


def _units(a: Strategy, b: Strategy) -> Iterator[tuple[int, int, int, int]]:
    """(sharded elements, replicated elements, stage in a, stage in b) of the embedding, each layer, and the head."""
    layer, vocabulary = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN, VOCABULARY * HIDDEN
    cuts = [StageCosts((layer,) * NUM_LAYERS, vocabulary).stages(s.pp) for s in (a, b)]
    yield vocabulary, 0, 0, 0
    for index in range(NUM_LAYERS):
        at_a, at_b = (next(i for i, layers in enumerate(cut) if index in layers) for cut in cuts)
        yield layer, 2 * HIDDEN, at_a, at_b
    yield vocabulary, HIDDEN, a.pp - 1, b.pp - 1


def parameter_classes(a: Strategy, b: Strategy) -> list[PieceClass]:
    """The bf16 weights of the 32B model from one strategy to another; every replica holds and needs all."""

    def pieces() -> Iterator[PieceClass]:
        cells = int(np.lcm(a.tp, b.tp))
        for sharded, replicated, at_a, at_b in _units(a, b):
            for i in range(cells):
                yield PieceClass(
                    2 * sharded / cells, _holders(a, at_a, i * a.tp // cells), _holders(b, at_b, i * b.tp // cells)
                )
            if replicated:
                everyone = (
                    tuple(range(stage * s.dp * s.tp, (stage + 1) * s.dp * s.tp)) for s, stage in ((a, at_a), (b, at_b))
                )
                yield PieceClass(2.0 * replicated, *everyone)

    return _merged(pieces())


def gradient_classes(a: Strategy, b: Strategy) -> list[PieceClass]:
    """The bf16 gradients, cut over dp across the tp cut: one owner and one needer for each element."""

    def pieces() -> Iterator[PieceClass]:
        cells, cuts = int(np.lcm(a.tp, b.tp)), int(np.lcm(a.dp, b.dp))
        for sharded, _, at_a, at_b in _units(a, b):
            for i in range(cells):
                have, want = _holders(a, at_a, i * a.tp // cells), _holders(b, at_b, i * b.tp // cells)
                for j in range(cuts):
                    yield PieceClass(2 * sharded / cells / cuts, (have[j * a.dp // cuts],), (want[j * b.dp // cuts],))

    return _merged(pieces())


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


def pool(world_size: int, *, nested: bool) -> list[Strategy]:
    """Every strategy of a world size that the model allows, in plain or in nested order."""
    legal = [s for s in strategies_of(world_size) if s.pp <= NUM_LAYERS]
    if not nested:
        return legal
    orders = nested_orders(legal, [1] * NUM_LAYERS, StageCosts((1,) * NUM_LAYERS))
    return [s.ordered(orders[s]) for s in legal]


def _ratio(classes: Sequence[PieceClass], cluster: Cluster, *, neighbours: bool = True) -> tuple[float, float]:
    """(planned seconds / optimum, bytes fed to neighbours / all bytes that leave a node)."""
    hops = planned_hops(classes, cluster, neighbours=neighbours)
    planned, optimum = sum(hops, PortLoads.zero(cluster)).seconds(cluster), relay_bound_lp(classes, cluster)
    fed = hops[0].sent_intra.sum() / max(hops[1].sent_inter.sum(), 1.0)
    return (planned / optimum if optimum > 1e-9 else 1.0), float(fed)


def main() -> None:
    """Prints the ratio of the planner's decisions to the optimum, for regular and for irregular instances."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--random", type=int, default=200)
    options = parser.parse_args()
    for world in options.devices:
        for per_node in (2, 8):
            for nics in (None, 1):
                cluster = Cluster(world, per_node, nics_per_node=nics)
                for nested in (False, True):
                    for make in (parameter_classes, gradient_classes):
                        start, ratios, two_hops, fed = time.perf_counter(), [], [], []
                        for a, b in permutations(pool(world, nested=nested), 2):
                            classes = make(a, b)
                            ratio, share = _ratio(classes, cluster)
                            ratios.append((ratio, f"{a}->{b}"))
                            fed.append((share, f"{a}->{b}"))
                            two_hops.append(_ratio(classes, cluster, neighbours=False)[0] if share else ratio)
                        print(
                            f"{world} devices, {per_node} a node, {'1 NIC a node' if nics else 'NIC per device'}, "
                            f"{'nested' if nested else 'plain'}, {make.__name__}: {len(ratios)} pairs, "
                            f"max {max(ratios)[0]:.4f} ({max(ratios)[1]}), mean {np.mean([r for r, _ in ratios]):.4f}; "
                            f"owners only: max {max(two_hops):.3f}, {sum(r > 1.02 for r in two_hops)} above 1.02; "
                            f"neighbours send on {sum(s > 0 for s, _ in fed)} pairs, most {max(fed)[0]:.3f} of the bytes"
                            f" ({max(fed)[1]}); {time.perf_counter() - start:.1f} s",
                            flush=True,
                        )
    for world, per_node in ((8, 2), (16, 4), (32, 8)):
        for nics in (None, 1):
            cluster = Cluster(world, per_node, nics_per_node=nics)
            found = np.array([_ratio(random_classes(seed, cluster), cluster)[0] for seed in range(options.random)])
            print(
                f"irregular, {world} devices, {per_node} a node, {'1 NIC a node' if nics else 'NIC per device'}: "
                f"mean {found.mean():.4f}, p95 {np.quantile(found, 0.95):.4f}, max {found.max():.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
