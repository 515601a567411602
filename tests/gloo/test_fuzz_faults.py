"""Faults that the fuzzers find: seeded bugs (`tests/mutations.py`), and mends of earlier days that are taken back.

Each is planted into a copy of the tree, where the seeds beside it must fail; without it they pass (`test_fuzz.py`).
"""

import pytest

from tests.mutations import MUTATIONS, TAKEN_BACK, Copy

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

FOUND = [
    ("labels are not shifted", "strategy_fuzz", "0,1,2,3,4,5"),
    ("replicated gradients are counted once a shard", "strategy_fuzz", "9"),
    ("a rank's own contribution is left out", "strategy_fuzz", "0,1,2,3,4,5"),
    ("gradients of the mini-batch before stay", "strategy_fuzz", "2,3,7"),
    ("gradients of the phase before stay", "strategy_fuzz", "0,2,3,4"),
    ("sequences of a pack attend to each other", "strategy_fuzz", "1,2,3"),
    ("keys and values of a chunk have no gradients of later chunks", "strategy_fuzz", "0,4"),
    ("the loss misses what the other shards sum", "strategy_fuzz", "0,6,9"),
    ("an all-reduce of the backward is missed", "strategy_fuzz", "9"),
    ("a bias is added once a shard", "strategy_fuzz", "0,6,9"),
    ("label smoothing takes nothing from the label", "strategy_fuzz", "4,9"),
    ("gradients that come back on a ring are lost", "strategy_fuzz", "8,16"),
    ("tokens of ranks are taken for the order of the pack", "strategy_fuzz", "0"),
    ("clipping takes the squared norm", "trainer_fuzz", "0,1,2,4,5,6"),
    ("hooks that only ask for gradients of the input count as changes", "trainer_fuzz", "4"),
    ("attributes of modules that were changed are not noticed", "trainer_fuzz", "3"),
    ("what a callback freezes is trained further", "trainer_fuzz", "5"),
    ("rates are not restored", "trainer_fuzz", "6"),
    ("states of the optimizer are not restored", "trainer_fuzz", "6"),
    ("rates of the stock Trainer are not restored", "trainer_fuzz", "7"),
]
"""What is wrong, the fuzzer, and the seeds that find it."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return Copy(tmp_path_factory.mktemp("tree"))


@pytest.mark.parametrize(("name", "fuzzer", "seeds"), FOUND)
def test_a_fault_is_found_by_a_fuzzer(copy, name, fuzzer, seeds):
    [fault] = [mutation for mutation in (*MUTATIONS, *TAKEN_BACK) if mutation.name == name]
    with copy.with_bug(fault):
        done = copy.run("-m", f"tests.{fuzzer}", seeds)
    outcomes = [line for line in done.stdout.splitlines() if "FUZZER.replay(" in line]
    assert len(outcomes) == len(seeds.split(",")), done.stderr[-2000:]
    passed = [line for line in outcomes if line.startswith("exact | ")]
    assert not passed, "\n".join(passed)
    assert done.returncode == 1
