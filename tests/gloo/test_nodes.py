"""Two nodes: each way of starting trains what one launcher of four processes does, and plans know the nodes.

What becomes of a job that loses a node is in `tests/node_trials.py`.
"""

import pytest

from tests.harness import run_ranks
from tests.node_steps import launch, steps
from tests.nodes import NAMES, Nodes, free_port

pytestmark = pytest.mark.gloo


def test_two_launchers_train_what_one_does():
    """The quick form: torchrun's agents, with processes that need no imports."""
    with Nodes() as nodes:
        holders, environments = nodes.holders, [nodes.environment(node) for node in (0, 1)]
        both = run_ranks(2, launch, holders, environments, f"{nodes.addresses[0]}:{free_port()}", init=False)
        names = NAMES if nodes.real else None
    ranks = [both[rank // 2][rank] for rank in range(4)]
    one = run_ranks(4, steps)
    assert [rank["losses"] for rank in ranks] == [pytest.approx(rank["losses"], abs=1e-6) for rank in one]
    assert {rank["switches"] for rank in ranks} == {one[0]["switches"]}
    for rank in ranks:
        first, second = rank["nodes"][0], rank["nodes"][2]
        assert rank["nodes"] == (first, first, second, second)
        assert (first, second) == names if names else first != second
        assert rank["a_node"] == 2
        # what a node lacks, which is half of the weights, comes once; ranks of one node are sent it one by one
        assert rank["between"] == rank["parameters"]
    assert one[0]["a_node"] == 4
    assert one[0]["between"] == 2 * one[0]["parameters"]
