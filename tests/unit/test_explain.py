"""Explanations of plans: bytes per link, busiest ports, predicted seconds, and how near the bound is."""

import json

import pytest

from hf_hotspa.cluster import Cluster
from hf_hotspa.errors import PlanError
from hf_hotspa.layout.intervals import Interval
from hf_hotspa.layout.placement import Layout
from hf_hotspa.switch.planner import classes_of, plan_load, plan_return
from hf_hotspa.switch.ports import PieceClass

UNIT = 1 << 20
CLUSTER = Cluster(4, 2, intra_bandwidth=100e6, inter_bandwidth=10e6, latency_s=0.001)


def held_by(name: str, *holders: int) -> Layout:
    held = [[Interval(0, UNIT, 0, 0)] if rank in holders else [] for rank in range(4)]
    return Layout.of(name, held, [(UNIT if rank in holders else 0,) for rank in range(4)])


ONE, THREE = held_by("one", 0), held_by("three", 0, 2, 3)


def test_a_relay_is_explained() -> None:
    plan = plan_load(ONE, THREE, CLUSTER, [2])
    found = plan.explain(CLUSTER, [2], classes_of(ONE, THREE, [2]))
    num_bytes = 2 * UNIT
    assert found.name == "load one -> three"
    assert found.local_bytes == num_bytes
    assert found.inter_node_bytes == num_bytes
    # half of it is fed to the neighbour, and each landing device hands its half to the other one
    assert found.intra_node_bytes == num_bytes // 2 + num_bytes
    assert [hop.links for hop in found.hops] == ["intra", "inter", "intra"]
    assert (found.nic_port.kind, found.nic_port.num_bytes) == ("NIC send", num_bytes / 2)
    assert found.overlapped_s == pytest.approx(num_bytes / 2 / 10e6)
    assert found.sequential_s == pytest.approx(num_bytes / 2 * (1 / 10e6 + 2 / 100e6))
    assert found.rounds == 3
    assert found.latency_s == pytest.approx(0.003)
    assert found.bound is not None
    assert found.bound.seconds == pytest.approx(num_bytes / 2 / 10e6)
    assert found.ratio == pytest.approx(1.0)
    assert plan.explain(CLUSTER, [2], rounds=7).latency_s == pytest.approx(0.007)


def test_the_seconds_are_those_of_the_hops() -> None:
    for planner in ("relay", "algorithm1", "first_owner"):
        found = plan_load(ONE, THREE, CLUSTER, [2], planner).explain(CLUSTER, [2])
        assert found.sequential_s == pytest.approx(sum(hop.seconds for hop in found.hops))
        assert max(found.device_port.seconds, found.nic_port.seconds) == pytest.approx(found.overlapped_s)
        assert found.overlapped_s <= found.sequential_s
        assert found.bound is None
        assert found.ratio is None


def test_a_return_has_the_bound_of_its_adjoint() -> None:
    back = plan_return(THREE, ONE, CLUSTER, [2])
    found = back.explain(CLUSTER, [2], classes_of(ONE, THREE, [2], sums=True))
    assert found.ratio == pytest.approx(1.0)
    assert found.nic_port.num_bytes == UNIT


def test_a_plan_that_moves_nothing() -> None:
    found = plan_load(ONE, held_by("same", 0), CLUSTER, [2]).explain(CLUSTER, [2], classes_of(ONE, ONE, [2]))
    assert (found.overlapped_s, found.sequential_s, found.latency_s, found.rounds) == (0, 0, 0, 0)
    assert found.ratio == 1.0
    assert "idle" in found.table()
    moved = plan_load(ONE, THREE, CLUSTER, [2]).explain(CLUSTER, [2], [])
    assert moved.ratio is None
    assert "left out" in moved.table()


def test_it_prints_and_serialises() -> None:
    found = plan_load(ONE, THREE, CLUSTER, [2]).explain(CLUSTER, [2], classes_of(ONE, THREE, [2]))
    table = found.table()
    for text in ("between nodes", "busiest NIC", "hop 2 (intra)", "hop after hop", "3 rounds", "1.000 times it"):
        assert text in table
    data = json.loads(json.dumps(found.to_dict()))
    assert data["ratio"] == pytest.approx(1.0)
    assert data["nic_port"]["seconds"] == pytest.approx(found.overlapped_s)
    assert len(data["hops"]) == 3


def test_another_cluster_is_refused() -> None:
    with pytest.raises(PlanError, match="4 ranks, the cluster has 8"):
        plan_load(ONE, THREE, CLUSTER, [2]).explain(Cluster(8, 2), [2])


def test_classes_of_layouts() -> None:
    assert classes_of(ONE, THREE, [2]) == [PieceClass(2.0 * UNIT, (0,), (0, 2, 3))]
    assert classes_of([ONE, held_by("two", 1)], THREE, [2]) == [PieceClass(2.0 * UNIT, (0, 1), (0, 2, 3))]
    with pytest.raises(PlanError, match="no rank"):
        classes_of(Layout.of("none", [[]] * 4, [(0,)] * 4), THREE, [2])
    with pytest.raises(PlanError, match="3 owners"):
        classes_of(THREE, ONE, [2], sums=True)
