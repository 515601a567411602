"""What crosses between nodes: balanced landing and sending, as near to the optimum as the planner promises."""

from itertools import permutations

import numpy as np
import pytest
from planner_bounds import (  # type: ignore[import-not-found]
    gradient_classes,
    parameter_classes,
    planned_hops,
    random_classes,
    relay_bound_lp,
)
from planner_cases import pool  # type: ignore[import-not-found]
from port_bounds import (  # type: ignore[import-not-found]
    PieceClass,
    demands_of,
    pulls_of,
    sending_shares,
)

from hf_hotspa.cluster import Cluster
from hf_hotspa.plan.relay import Demand, Pull, landing_shares, pulling_shares, relay_pays
from hf_hotspa.plan.switch_plan import overlapped_seconds

TWO_NODES = Cluster(8, 4)


def test_demands_and_pulls_of_classes():
    classes = [PieceClass(8.0, (0, 1), (1, 2, 5, 6)), PieceClass(4.0, (0, 1), (2, 3))]
    assert demands_of(classes, TWO_NODES) == [Demand((0, 1), 1, (5, 6), 8.0)]
    assert pulls_of(classes, TWO_NODES) == [Pull((0, 1), 2, 12.0), Pull((0, 1), 3, 4.0)]


def test_relaying_pays_where_the_node_is_faster_than_its_nics():
    assert relay_pays(Cluster(16, 8))
    assert relay_pays(Cluster(16, 8, nics_per_node=1, intra_bandwidth=10e9))
    assert not relay_pays(Cluster(8, 8))
    assert not relay_pays(Cluster(8, 1))
    assert not relay_pays(Cluster(16, 8, intra_bandwidth=10e9))
    assert not relay_pays(Cluster(16, 8, intra_bandwidth=25e9))


def test_a_single_owner_is_helped_by_its_neighbours():
    demands = [Demand((0,), 1, (4, 5, 6, 7), 8.0)]
    assert sending_shares(demands, TWO_NODES) == {((0,), 1): tuple((r, 0.25) for r in range(4))}
    assert sending_shares(demands, TWO_NODES, neighbours=False) == {((0,), 1): ((0, 1.0),)}
    shared = Cluster(8, 4, nics_per_node=1)
    assert sending_shares(demands, shared) == {((0,), 1): ((0, 1.0),)}


def test_pulls_go_to_the_owners_that_forward_least():
    shares = pulling_shares([Pull((0, 1), 2, 4.0), Pull((0, 1), 3, 2.0)], {0: 4.0})
    assert dict(shares[0, 1]) == pytest.approx({0: 1 / 6, 1: 5 / 6})
    assert pulling_shares([Pull((0, 1), 2, 4.0)]) == {(0, 1): ((0, 0.5), (1, 0.5))}


def ratio(classes, cluster):
    optimum = relay_bound_lp(classes, cluster)
    return overlapped_seconds(planned_hops(classes, cluster), cluster) / optimum if optimum > 1e-9 else 1.0


@pytest.mark.parametrize("nics", [None, 1])
@pytest.mark.parametrize("per_node", [2, 8])
@pytest.mark.parametrize("make", [parameter_classes, gradient_classes])
def test_regular_pairs_reach_the_optimum(make, per_node, nics):
    """Every fifth pair of 16 devices, plain and nested; `benchmarks/planner.py` runs them all."""
    cluster = Cluster(16, per_node, nics_per_node=nics)
    for nested in (False, True):
        for a, b in list(permutations(pool(16, "32B", nested=nested), 2))[:: 10 if nested else 9]:
            assert ratio(make(a, b), cluster) <= 1.02, (str(a), str(b))


@pytest.mark.parametrize("nics", [None, 1])
def test_irregular_instances_are_near_the_optimum(nics):
    cluster = Cluster(16, 4, nics_per_node=nics)
    assert np.mean([ratio(random_classes(seed, cluster), cluster) for seed in range(20)]) <= 1.05


@pytest.mark.parametrize("seed", range(8))
def test_shares_are_fractions_of_ranks_that_can(seed):
    cluster = Cluster(11, 4, nics_per_node=1 if seed % 2 else None)
    classes = random_classes(seed, cluster)
    demands, pulls = demands_of(classes, cluster), pulls_of(classes, cluster)
    landing, sending = landing_shares(demands, cluster, pulls), sending_shares(demands, cluster)
    for owners, node, needers, _ in demands:
        for ranks, shares in (
            (cluster.ranks(node), landing[node, needers]),
            ([r for o in owners for r in cluster.ranks(cluster.node(o))], sending[owners, node]),
        ):
            assert sum(share for _, share in shares) == pytest.approx(1)
            assert all(share > 0 and rank in ranks for rank, share in shares)
            assert [rank for rank, _ in shares] == sorted({rank for rank, _ in shares})
    owners_only = sending_shares(demands, cluster, neighbours=False)
    assert all(rank in owners for (owners, _), shares in owners_only.items() for rank, _ in shares)
    assert sending == sending_shares(demands, cluster)
    assert landing == landing_shares(demands, cluster, pulls)
