"""What a division of micro-batches by cost and speed would have saved real jobs: a replay of measured operation times.

    python benchmarks/straggler_trace.py tests/data/straggler_trace_ST.parquet tests/data/straggler_trace_SE.parquet

The traces are from ByteDance-Seed/StragglerAnalysis (Apache-2.0): seconds of every forward and backward of every stage of
jobs with mixed lengths, as parquet with the columns `step`, `dp_rank`, `stage`, `mb_id`, `optype`, `duration`. Each step is simulated
as a 1F1B pipeline a replica (`costs.time`), the step being as long as its slowest replica:

* as it ran: every replica its own micro-batches;
* by cost: the same micro-batches, each to the replica that is done with it first, as `packing` divides sequences;
* by cost and speed: as well, by the speed that each replica showed in the steps before (its seconds by the mean's);
* the bound: all work divided evenly over all devices, without a bubble.

A micro-batch counts as its measured seconds. Where those are long because a device was slow and not because the micro-batch is,
division by cost alone moves the wrong thing; by cost and speed, seconds are multiplied by the speed first. No GPU, no network.

Where a trace has the column `start_ts`, "as it ran" is compared with what was measured: from the first start of a forward or backward of a
step to the last end. That is a test of the simulated schedule, not of operation times, which are the measured ones.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
from result_file import write_json

from hf_hotspa.costs.time import Pipeline, pipeline_seconds
from hf_hotspa.packing.bucketing import divide_by_speed
from hf_hotspa.packing.pipeline_order import reaches

MicroBatch = tuple[list[float], list[float]]
"""Seconds of the forward and of the backward, by stage."""
SIDES = ("as it ran", "by cost", "by cost and speed", "bound")


def read_trace(path: Path) -> list[list[list[MicroBatch]]]:
    """`[step][replica][micro-batch]`; of ranks that share a stage, the slower one."""
    rows = pq.read_table(path, columns=["step", "dp_rank", "stage", "mb_id", "optype", "duration"]).to_pylist()
    found: dict[int, dict[tuple[int, int, int, str], float]] = defaultdict(dict)
    for row in rows:
        if row["optype"] in ("forward-compute", "backward-compute"):
            key = row["dp_rank"], row["mb_id"], row["stage"], row["optype"]
            found[row["step"]][key] = max(found[row["step"]].get(key, 0.0), row["duration"])
    steps = []
    for _, seconds in sorted(found.items()):
        replicas, packs, stages = (1 + max(key[i] for key in seconds) for i in range(3))
        steps.append(
            [
                [
                    (
                        [seconds[r, m, s, "forward-compute"] for s in range(stages)],
                        [seconds[r, m, s, "backward-compute"] for s in range(stages)],
                    )
                    for m in range(packs)
                ]
                for r in range(replicas)
            ]
        )
    return steps


def measured_seconds(path: Path) -> list[float]:
    """From the first start of a step to its last end; nothing where the trace has no starts."""
    if "start_ts" not in pq.read_schema(path).names:
        return []
    spans: dict[int, tuple[float, float]] = {}
    for row in pq.read_table(path, columns=["step", "optype", "start_ts", "duration"]).to_pylist():
        if row["optype"] in ("forward-compute", "backward-compute"):
            first, last = spans.get(row["step"], (float("inf"), 0.0))
            spans[row["step"]] = min(first, row["start_ts"]), max(last, row["start_ts"] + row["duration"])
    return [last - first for _, (first, last) in sorted(spans.items())]


def replica_seconds(packs: Sequence[MicroBatch]) -> float:
    """A pipeline of these micro-batches, in this order."""
    if not packs:
        return 0.0
    stages = range(len(packs[0][0]))
    reach = reaches([1] * len(packs), None)
    times = [[[pack[way][stage] for pack in packs] for stage in stages] for way in (0, 1)]
    return pipeline_seconds(Pipeline(*times, hops=[0.0] * len(packs), reach=reach))


def replay(steps: Sequence[Sequence[Sequence[MicroBatch]]]) -> dict[str, float]:
    """Mean seconds of a step, by side."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    history: list[list[float]] = []
    for replicas in steps:
        work = [sum(sum(f) + sum(b) for f, b in packs) for packs in replicas]
        found["as it ran"].append(max(map(replica_seconds, replicas)))
        found["bound"].append(sum(work) / len(replicas) / len(replicas[0][0][0]))
        known = [fmean(of_replica) for of_replica in zip(*history, strict=True)] if history else [1.0] * len(work)
        for side, speeds in (("by cost", [1.0] * len(work)), ("by cost and speed", known)):
            found[side].append(_divided(replicas, speeds))
        history.append([fmean(work) / mine for mine in work])
    return {side: fmean(values) for side, values in found.items()}


def _divided(replicas: Sequence[Sequence[MicroBatch]], speeds: Sequence[float]) -> float:
    """The slowest replica, when micro-batches are divided by speed; one that moves takes as long as its new replica does."""
    packs = [(pack, speeds[r]) for r, of_replica in enumerate(replicas) for pack in of_replica]
    costs = [(sum(forward) + sum(backward)) * speed for (forward, backward), speed in packs]
    order = sorted(range(len(packs)), key=lambda i: (-costs[i], i))
    slowest = 0.0
    for replica, mine in enumerate(divide_by_speed(order, costs, speeds)):
        moved = [
            tuple([t * packs[i][1] / speeds[replica] for t in way] for way in packs[i][0])
            for i in sorted(mine, key=lambda i: -costs[i])
        ]
        slowest = max(slowest, replica_seconds(moved))  # type: ignore[arg-type]
    return slowest


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Replays, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", help="parquet files")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args(arguments)
    result = {}
    for path in options.traces:
        steps = read_trace(path)
        seconds = replay(steps)
        result[path.stem] = {
            "steps": len(steps),
            "replicas": len(steps[0]),
            "stages": len(steps[0][0][0][0]),
            "seconds": seconds,
        }
        print(f"{path.stem}: {len(steps)} steps, {len(steps[0])} replicas of {len(steps[0][0][0][0])} stages")
        if measured := measured_seconds(path):
            simulated = [max(map(replica_seconds, replicas)) for replicas in steps]
            errors = [ours / real - 1 for ours, real in zip(simulated, measured, strict=True)]
            result[path.stem] |= {"measured": fmean(measured), "error": fmean(errors), "worst": max(errors, key=abs)}
            print(
                f"  measured            {fmean(measured):>9.3f} s a step   simulated {fmean(errors):+.2%}, at worst {max(errors, key=abs):+.2%}"
            )
        for side, value in seconds.items():
            print(f"  {side:<20}{value:>9.3f} s a step   {seconds['as it ran'] / value:.2f}x")
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
