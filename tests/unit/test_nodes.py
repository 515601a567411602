"""Which machine each rank runs on, from what the ranks say."""

import json

import pytest

from hf_hotspa.parallel.mesh import Nodes, nodes_from, own_node


def said(host, launcher="", addresses=()):
    return json.dumps([host, launcher, list(addresses)])


def test_a_rank_says_its_host_and_its_launcher(monkeypatch):
    for name in ("GROUP_RANK", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    host, launcher, addresses = json.loads(own_node())
    assert host
    assert launcher == ""
    assert not [each for each in addresses if each.startswith("127.") or each == "::1"]
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert json.loads(own_node())[1] == "from 4"
    monkeypatch.setenv("GROUP_RANK", "3")
    assert json.loads(own_node())[1] == "3"


@pytest.mark.parametrize(
    ("texts", "names", "a_node"),
    [
        ([said("a")] * 2 + [said("b")] * 2, ("a", "a", "b", "b"), 2),
        ([said("a")] * 4, ("a",) * 4, 4),
        ([said("a")] * 2 + [said("b")], ("a", "a", "b"), 2),  # the last node may have fewer
        ([said("a")] + [said("b")] * 2, ("a", "b", "b"), 1),  # no other may
        ([said("a"), said("b")] * 2, ("a", "b", "a", "b"), 1),  # not node by node
        ([said("a", "7")] * 2 + [said("a", "0")] * 2, ("a, launcher 0",) * 2 + ("a, launcher 1",) * 2, 2),
    ],
)
def test_nodes_are_blocks_of_ranks(texts, names, a_node):
    nodes = nodes_from(texts)
    assert nodes.names == names
    assert nodes.devices_per_node == a_node


def test_errors_name_nodes():
    nodes = Nodes(("a", "a", "b", "b"), (frozenset({"10.0.0.1"}),) * 2 + (frozenset({"10.0.0.2", "fe80::1"}),) * 2)
    assert nodes.shown([2, 3]) == " (2, 3: all ranks of node b)"
    assert nodes.shown([1, 2]) == " (1: on node a; 2: on node b)"
    assert nodes.behind("Connection closed by peer [10.0.0.2]:4711") == " (node b, ranks 2, 3)"
    assert nodes.behind("Connection closed by peer [fe80::1]:4711") == " (node b, ranks 2, 3)"
    assert nodes.behind("Connection closed by peer [10.0.0.3]:4711") == ""
    assert nodes.behind("something else") == ""
    assert nodes.local(3) == 2
    one = nodes_from([said("a")] * 2)
    assert one.shown([1]) == one.behind("peer [10.0.0.2]:1") == ""
    shared = frozenset({"172.17.0.1"})  # an address that two nodes have names none
    assert Nodes(("a", "b"), (shared, shared)).behind("peer [172.17.0.1]:1") == ""
