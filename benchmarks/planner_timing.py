"""How long planning takes, and how many messages a rank then has: from 7B on 8 devices to 405B on 4096.

*Cold* is one call of the planner, the proof of the plan included, in wall time and in processor time (steadier where
other programs run); layouts are made before and not counted. The planner keeps no plans.
"""

import time
from collections.abc import Iterator
from typing import Any

from planner_cases import cluster_of, gradients, llama_vector, master, weights

from hf_hotspa.plan.planner import plan_load, plan_return
from hf_hotspa.plan.rounds import cut_rounds
from hf_hotspa.plan.switch_plan import SwitchPlan, Wire, prove
from hf_hotspa.strategy import Strategy

CASES = {
    "7B": (8, Strategy(1, 4, 2), Strategy(8, 1, 1)),
    "32B": (32, Strategy(1, 16, 2), Strategy(4, 2, 4)),
    "70B": (1024, Strategy(16, 8, 8), Strategy(64, 8, 2)),
    "405B": (4096, Strategy(32, 8, 16), Strategy(64, 8, 8)),
}
"""Devices and two strategies of each model; eight devices a node (two at 8, so that there are nodes)."""
STAGING = 32 << 20
"""Bytes of the messages of one round, and of a group of segments: half of the executor's default staging buffer."""


def planning_times(largest: str = "405B") -> Iterator[dict[str, Any]]:
    """Times of all cases up to a model, one row after the other."""
    for model, (world, first, second) in CASES.items():
        cluster = cluster_of(world, 2 if world == 8 else 8, "device")
        store, a, b, added = (
            master(model, world),
            weights(model, first),
            weights(model, second),
            gradients(model, second),
        )
        sizes = [2] * len(llama_vector(model).segments)
        for what, sources, target in (
            (f"master -> {second}", [store], b),
            (f"{first} -> {second}", [a], b),
            (f"master + {first} -> {second}", [store, a], b),
            (f"return {second} -> master", [added], store),
        ):
            start, cpu = time.perf_counter(), time.process_time()
            if what.startswith("return"):
                plan = plan_return(sources[0], target, cluster, sizes)
            else:
                plan = plan_load(sources, target, cluster, sizes)
            cold, cpu = time.perf_counter() - start, time.process_time() - cpu
            start = time.perf_counter()
            prove(plan, sources, target)
            proof = time.perf_counter() - start
            row = {"model": model, "devices": world, "what": what, "cold_s": cold, "cpu_s": cpu, "validate_s": proof}
            yield row | {"plan_bytes": _size(plan)} | _messages(plan, world)
        if model == largest:
            break


def _size(plan: SwitchPlan) -> int:
    return sum(table.nbytes for kind in plan.kinds for table in (*kind.hops, kind.relay_sizes))


def _messages(plan: SwitchPlan, world: int) -> dict[str, Any]:
    """The most messages of one round, sends and receives together, of the first, middle and last rank."""
    wires = [Wire("bfloat16", 2)] * len(plan.kind_of)
    most = rounds = 0
    start = time.perf_counter()
    ranks = sorted({0, world // 2, world - 1})
    for rank in ranks:
        schedule = cut_rounds(plan, rank, wires, STAGING // 2, STAGING // 2)
        rounds = len(schedule.rounds)
        most = max([most, *(len(r.sends) + len(r.receives) for r in schedule.rounds)])
    return {"operations": most, "rounds": rounds, "cut_s": (time.perf_counter() - start) / len(ranks)}
