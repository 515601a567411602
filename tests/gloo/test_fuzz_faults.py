"""Faults that the fuzzers find: seeded bugs (`tests/mutations.py`), and mends of earlier days that are taken back.

Each is planted into a copy of the tree, where the seeds beside it must fail; without it they pass (`test_fuzz.py`). Of the first ten
seeds of a fuzzer these are those that were seen to find the fault.
"""

import pytest

from tests.mutations import MUTATIONS, Copy, Mutation

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

TAKEN_BACK = [
    Mutation(
        "hooks that only ask for gradients of the input count as changes",
        "hf_hotspa/switched/model_object.py",
        "    if code is None or code.co_freevars or not",
        "    if code is not None or code.co_freevars or not",
        "",
    ),
    Mutation(
        "attributes of modules that were changed are not noticed",
        "hf_hotspa/model/model_check.py",
        "    if changes := changed_facts(facts, expected_facts, fresh):",
        "    if (changes := changed_facts(facts, expected_facts, fresh)) and fresh is None:",
        "",
    ),
    Mutation(
        "what a callback freezes is trained further",
        "hf_hotspa/switched/model_object.py",
        "                (frozen.add if at_start else thawed.append)(name)",
        "                _ = at_start or thawed.append(name)",
        "",
    ),
    Mutation(
        "rates are not restored",
        "hf_hotspa/trainer/resuming.py",
        "        scheduler.load_state_dict(tensors.state_from_json(state))",
        "        tensors.state_from_json(state)",
        "",
    ),
    Mutation(
        "states of the optimizer are not restored",
        "hf_hotspa/trainer/resuming.py",
        'tensors.restore(path, manifest, engine.master, optimizer, state["optimizer"])',
        "tensors.restore(path, manifest, engine.master, None, None)",
        "",
    ),
    Mutation(
        "rates of the stock Trainer are not restored",
        "hf_hotspa/trainer/resuming.py",
        "            scheduler.load_state_dict(dict(stock.scheduler))",
        "            pass",
        "",
    ),
    Mutation(
        "tokens of ranks are taken for the order of the pack",
        "hf_hotspa/parallel/context.py",
        "        order = division.to_pack\n        by_heads",
        "        order = None\n        by_heads",
        "",
    ),
    Mutation(
        "gradients that come back on a ring are lost",
        "hf_hotspa/parallel/context.py",
        "of_row.index_add_(2, ring.mine, returning[1]",
        "of_row.index_add_(2, ring.mine, 0 * returning[1]",
        "",
    ),
    Mutation(
        "gradients of keys that other ranks have are not summed",
        "hf_hotspa/parallel/context.py",
        "total = parts.sum(0, dtype=wide)[",
        "total = parts[0].to(wide)[",
        "",
    ),
    Mutation(
        "results of experts are weighed in the order in which they came back",
        "hf_hotspa/features/experts/expert_parallel.py",
        "back * weights.reshape(-1)[order][:, None]",
        "back * weights.reshape(-1)[:, None]",
        "",
    ),
]

FOUND = [
    ("labels are not shifted", "strategy_fuzz", "0,1"),
    ("replicated gradients are counted once a shard", "strategy_fuzz", "9"),
    ("clipping takes the squared norm", "trainer_fuzz", "0,1,2,4,5,6"),
    ("hooks that only ask for gradients of the input count as changes", "trainer_fuzz", "4"),
    ("attributes of modules that were changed are not noticed", "trainer_fuzz", "3"),
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
