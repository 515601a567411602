"""Our planners reproduce a modelled table of switch times, reach its bounds, and keep the targets of a mini-batch."""

from typing import Any

import pytest
from planner_cases import (  # type: ignore[import-not-found]
    bit_reversed,
    cluster_of,
    gradients,
    master,
    sharded_pair,
    weights,
)
from planner_targets import (  # type: ignore[import-not-found]
    CHAINS,
    MODEL,
    NAMES,
    ROUNDING,
    chain_row,
    ours,
    targets,
)
from port_bounds import classes_of, lower_bound  # type: ignore[import-not-found]

from hf_hotspa.plan.planner import plan_load, plan_return
from hf_hotspa.plan.switch_plan import overlapped_seconds
from hf_hotspa.strategy import Strategy

PAIRS = targets()


@pytest.mark.parametrize("nic", ["device", "node"])
@pytest.mark.parametrize("order", ["canonical", "nested"])
@pytest.mark.parametrize("what", ["params", "grads"])
def test_modelled_switches(what: str, order: str, nic: str) -> None:
    cluster = cluster_of(32, 8, nic)
    wrong = []
    for pair in PAIRS:
        a, b = (Strategy(**pair[side]) for side in ("from", "to"))
        if order == "nested":
            a, b = bit_reversed(a), bit_reversed(b)
        sides = (weights(MODEL, a), weights(MODEL, b)) if what == "params" else sharded_pair(MODEL, a, b)
        modelled = pair[order][what]["nic_per_gpu" if nic == "device" else "nic_per_node"]
        for name, planner in NAMES.items():
            seconds = ours(planner, *sides, cluster)
            close = abs(seconds - modelled[name]) <= max(ROUNDING, 0.02 * modelled[name])
            if planner == "relay":
                close = seconds <= 1.02 * modelled[name] + ROUNDING
            if not close:
                wrong.append(f"{a}->{b} {name}: {seconds:.4f} s, modelled {modelled[name]:.4f} s")
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------------------------- what the engine does in a step


@pytest.mark.parametrize(
    "strategy", [*CHAINS["C3"], Strategy(1, 1, 32), Strategy(32, 1, 1), Strategy(2, 4, 4)], ids=str
)
def test_the_master_store_is_left_and_reached_within_the_bound(strategy: Strategy) -> None:
    store, target = master(MODEL, 32), weights(MODEL, strategy)
    contributions = gradients(MODEL, strategy)
    sizes = [2] * len(target.placements)
    for nic in ("device", "node"):
        cluster = cluster_of(32, 8, nic)
        load = plan_load(store, target, cluster, sizes)
        bound = lower_bound(classes_of(store, target, sizes), cluster).seconds
        assert overlapped_seconds(load.loads(cluster, sizes), cluster) <= 1.02 * bound
        back = plan_return(contributions, store, cluster, sizes)
        bound = lower_bound(classes_of(store, contributions, sizes, True), cluster).seconds
        assert overlapped_seconds(back.loads(cluster, sizes), cluster) <= 1.02 * bound


def chain(**conditions: Any) -> dict[str, Any]:
    found: dict[str, Any] = chain_row("C3", nic="device", wire="bf16", **conditions)
    return found


def test_the_longest_chain_keeps_its_targets() -> None:
    from_master, both = chain(second=False, nested=False), chain(second=True, nested=True)
    assert from_master["reached"], from_master
    assert both["reached"], both
    assert both["algorithm1_s"] > 2 * both["total_s"]
    reordered = chain(second=True, nested=True, reorder=True)
    assert reordered["total_s"] < both["total_s"]
    assert sorted(reordered["phases"]) == sorted(both["phases"])
