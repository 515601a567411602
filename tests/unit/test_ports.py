"""The port model: loads of transfers, the busiest port, and bounds that no plan can beat."""

import numpy as np
import pytest
from planner_bounds import (  # type: ignore[import-not-found]
    direct_bound_lp,
    gradient_classes,
    parameter_classes,
    planned_hops,
    random_classes,
    relay_bound_lp,
)
from port_bounds import (  # type: ignore[import-not-found]
    PieceClass,
    lower_bound,
)

from hf_hotspa.cluster import Cluster
from hf_hotspa.plan.switch_plan import PortLoads, overlapped_seconds
from hf_hotspa.strategy import Strategy

PER_DEVICE = Cluster(4, 2)
PER_NODE = Cluster(4, 2, nics_per_node=1)


def test_transfers_load_the_ports_they_pass():
    loads = PortLoads.zero(PER_DEVICE)
    loads.add([0, 0, 2, 1], [1, 2, 3, 1], [10.0, 20.0, 30.0, 40.0])
    assert loads.sent_intra.tolist() == [10, 0, 30, 0]
    assert loads.received_intra.tolist() == [0, 10, 0, 30]
    assert loads.sent_inter.tolist() == [20, 0, 0, 0]
    assert loads.received_inter.tolist() == [0, 0, 20, 0]


# ------------------------------------------------------------------------------------------------ worked examples


@pytest.mark.parametrize(
    ("holders", "needers", "cluster", "direct", "seconds"),
    [
        ((0,), (2, 3), PER_DEVICE, 0.080, 0.020),  # relaying: both devices of another node need it
        ((0,), (2, 3), PER_NODE, 0.080, 0.040),
        ((0, 1), (2,), PER_DEVICE, 0.040, 0.020),  # striping: two devices have it
    ],
)
def test_worked_examples_of_1_gb(holders, needers, cluster, direct, seconds):
    classes = [PieceClass(1e9, holders, needers)]
    assert direct_bound_lp(classes, cluster) == pytest.approx(direct)
    assert relay_bound_lp(classes, cluster) == pytest.approx(seconds)
    assert overlapped_seconds(planned_hops(classes, cluster), cluster) == pytest.approx(seconds)
    bound = lower_bound(classes, cluster)
    assert bound.seconds == pytest.approx(seconds)
    assert bound.limit in ("miss of node 1", "send of node 0")


def test_worked_example_of_a_real_pair():
    """tp16pp2 -> dp4tp2pp4 of the 32B model on 4 x 8 devices: 0.330 s directly, 0.041 s relayed."""
    cluster = Cluster(32, 8)
    classes = parameter_classes(Strategy(1, 16, 2), Strategy(4, 2, 4))
    assert direct_bound_lp(classes, cluster) == pytest.approx(0.330, rel=0.03)
    assert relay_bound_lp(classes, cluster) == pytest.approx(0.041, rel=0.03)
    assert lower_bound(classes, cluster).seconds == pytest.approx(relay_bound_lp(classes, cluster), rel=0.01)


# ------------------------------------------------------------------------------------------------ bounds


def test_a_shared_owner_set_limits_its_nodes():
    """Nodes 0 and 1 hold what six others need; each alone would be twice as slow."""
    cluster = Cluster(16, 2)
    bound = lower_bound([PieceClass(1e9, (0, 2), (4, 6, 8, 10, 12, 14))], cluster)
    assert bound.egress_s == pytest.approx(6e9 / (2 * 50e9))
    assert bound.limit == "send of nodes 0, 1"


@pytest.mark.parametrize("nics", [None, 1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_beats_the_bound(seed, nics):
    cluster = Cluster(8 + seed % 3, 4 if seed % 2 else 3, nics_per_node=nics)  # with short last nodes
    classes = random_classes(seed, cluster, count=15)
    bound = lower_bound(classes, cluster)
    optimum = relay_bound_lp(classes, cluster)
    assert 0 < bound.seconds <= optimum * (1 + 1e-6)
    assert bound.seconds == max(bound.receive_s, bound.node_miss_s, bound.egress_s)
    assert optimum <= overlapped_seconds(planned_hops(classes, cluster), cluster) * (1 + 1e-6)


@pytest.mark.parametrize("make", [parameter_classes, gradient_classes])
def test_the_bound_is_near_the_optimum_on_regular_pairs(make):
    cluster = Cluster(32, 8, nics_per_node=1)
    ratios = []
    for pair in (((1, 16, 2), (2, 8, 2)), ((2, 8, 2), (8, 4, 1)), ((4, 2, 4), (4, 4, 2)), ((8, 4, 1), (1, 16, 2))):
        classes = make(*(Strategy(*degrees) for degrees in pair))
        ratios.append(lower_bound(classes, cluster).seconds / relay_bound_lp(classes, cluster))
    assert np.max(ratios) <= 1 + 1e-6
    assert np.median(ratios) > 0.99
