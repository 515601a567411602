"""The planner against its bounds: modelled seconds of real plans over the linear-programming optimum; planning time.

    python benchmarks/planner.py                                            # a few minutes
    python benchmarks/planner.py --devices 8 16 32 64 --most 420 --largest 405B     # everything; an hour
    python benchmarks/planner.py --parts pairs irregular
    python benchmarks/planner.py --quick --json out/planner.json

Seconds of switches follow from the fluid port model (`hf_hotspa.plan.switch_plan`), never measured ones; only planning is
timed. Nothing is moved, no process is started, no GPU is needed.
"""

import argparse
import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from planner_bounds import planned_hops, random_classes, relay_bound_lp
from planner_cases import (
    cluster_of,
    gradients,
    llama_vector,
    master,
    pool,
    sharded_pair,
    weights,
)
from planner_targets import chains, modelled_table
from planner_timing import planning_times
from port_bounds import classes_of, lower_bound
from result_file import command_line, given_options, write_json

from hf_hotspa.cluster import Cluster
from hf_hotspa.layout.placement import Layout
from hf_hotspa.plan.planner import PLANNERS, plan_load, plan_return
from hf_hotspa.plan.switch_plan import overlapped_seconds
from hf_hotspa.strategy import Strategy

PARTS = ("pairs", "irregular", "modelled", "chains", "times")
KINDS = ("weights", "sharded gradients", "master store to strategy", "gradient return")
MODEL = "32B"
REGULAR_TARGET, IRREGULAR_TARGET = 1.02, 1.05
NOTHING = 1e-9
"""Seconds below which a switch moves nothing."""


def compare(kind: str, source: Layout, target: Layout, cluster: Cluster, *, closed_form: bool) -> dict[str, float]:
    """Seconds of the bound and of each planner's plan for one switch; a return is compared with its adjoint's bound."""
    sizes = [2] * max(len(source.placements), len(target.placements))
    back = kind == "gradient return"
    classes = classes_of(target, source, sizes, True) if back else classes_of(source, target, sizes)
    found = {"bound": lower_bound(classes, cluster).seconds if closed_form else relay_bound_lp(classes, cluster)}
    for planner in PLANNERS:
        if back:
            plan = plan_return(source, target, cluster, sizes, planner)
        else:
            plan = plan_load(source, target, cluster, sizes, planner)
        found[planner] = overlapped_seconds(plan.loads(cluster, sizes), cluster)
    return found


def cases_of(kind: str, strategies: Sequence[Strategy], world_size: int) -> list[tuple[str, Callable[[], Any]]]:
    """`(name, layouts)` of all switches of a kind; layouts are made when they are needed."""
    store = master(MODEL, world_size)
    pairs = list(permutations(strategies, 2))
    if kind == "weights":
        return [(f"{a}->{b}", lambda a=a, b=b: (weights(MODEL, a), weights(MODEL, b))) for a, b in pairs]
    if kind == "sharded gradients":
        return [(f"{a}->{b}", lambda a=a, b=b: sharded_pair(MODEL, a, b)) for a, b in pairs]
    if kind == "gradient return":
        return [(f"{s}->master", lambda s=s: (gradients(MODEL, s), store)) for s in strategies]
    return [(f"master->{s}", lambda s=s: (store, weights(MODEL, s))) for s in strategies]


def pair_ratios(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All switches between all legal strategies, and between them and the master store: plan over bound."""
    rows = []
    print("\nplan / bound of the relay class (fluid); other planners: mean seconds over the relay plan's")
    print(
        f"{'devices':>7} {'a node':>6} {'NIC per':>7} {'order':>6}  {'what':24} {'switches':>8} {'max':>6} {'mean':>6}"
        f" {'>1.02':>5}  {'alg. 1':>7} {'robin':>7} {'first':>7}  worst"
    )
    for world in options.devices:
        closed_form = world > 64
        for per_node in options.per_node:
            for nic in ("device", "node"):
                for nested in (False, True):
                    strategies = pool(world, MODEL, nested=nested)
                    for kind in KINDS:
                        cases = cases_of(kind, strategies, world)
                        if len(cases) > options.most:
                            cases = random.Random(world).sample(cases, options.most)
                        cluster = cluster_of(world, per_node, nic)
                        found = {
                            name: compare(kind, *layouts(), cluster, closed_form=closed_form) for name, layouts in cases
                        }
                        row = {
                            "devices": world,
                            "per_node": per_node,
                            "nic_per": nic,
                            "order": "nested" if nested else "plain",
                            "kind": kind,
                            "bound": "closed form" if closed_form else "linear programme",
                        }
                        rows.append(row | summary(found))
                        print_pairs(rows[-1])
    return rows


def summary(found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The ratios of many switches, and the names of those that miss the target."""
    ratios = {name: ratio(seconds["relay"], seconds["bound"]) for name, seconds in found.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    relay = sum(seconds["relay"] for seconds in found.values())
    return {
        "switches": len(found),
        "free": sum(seconds["bound"] <= NOTHING for seconds in found.values()),
        "max": ratios[worst],
        "mean": float(np.mean(list(ratios.values()))),
        "worst": worst,
        "misses": {name: value for name, value in ratios.items() if value > REGULAR_TARGET},
        "mean_s": {key: float(np.mean([s[key] for s in found.values()])) for key in ("bound", *PLANNERS)},
        "over_relay": {
            planner: sum(seconds[planner] for seconds in found.values()) / relay if relay > NOTHING else 1.0
            for planner in PLANNERS[1:]
        },
    }


def ratio(seconds: float, bound: float) -> float:
    """Seconds over a bound; 1 when neither is anything."""
    if bound > NOTHING:
        return seconds / bound
    return 1.0 if seconds <= NOTHING else float("inf")


def print_pairs(row: dict[str, Any]) -> None:
    over = " ".join(f"{value:6.2f}x" for value in row["over_relay"].values())
    print(
        f"{row['devices']:7} {row['per_node']:6} {row['nic_per']:>7} {row['order']:>6}  {row['kind']:24}"
        f" {row['switches']:8} {row['max']:6.3f} {row['mean']:6.3f} {len(row['misses']):5}  {over}  {row['worst']}",
        flush=True,
    )


def irregular_ratios(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Random owner and needer sets with heavy-tailed sizes: the planner's decisions over the optimum."""
    rows = []
    print("\nirregular instances: decisions / linear programme")
    for world, per_node in ((8, 2), (16, 4), (32, 8))[: 1 if options.quick else 3]:
        for nic in ("device", "node"):
            cluster = cluster_of(world, per_node, nic)
            found = []
            for seed in range(options.random):
                classes = random_classes(seed, cluster)
                found.append(overlapped_seconds(planned_hops(classes, cluster), cluster))
                found[-1] /= relay_bound_lp(classes, cluster)
            row = {"devices": world, "per_node": per_node, "nic_per": nic, "instances": len(found)}
            row |= {"mean": float(np.mean(found)), "p95": float(np.quantile(found, 0.95)), "max": max(found)}
            rows.append(row)
            print(
                f"{world:3} devices, {per_node} a node, NIC per {nic:6}: mean {row['mean']:.4f}, p95 {row['p95']:.4f},"
                f" max {row['max']:.4f} of {len(found)}",
                flush=True,
            )
    return rows


def print_modelled(table: dict[str, Any]) -> None:
    """The switches of the modelled table: ours, and how many are as the table says."""
    print("\n20 switches of 32B on 4 x 8 devices, modelled ms of our plans: NIC per device | NIC per node")
    names = list(table["verdicts"])
    print(f"{'':24} {'order':9} {'what':6} " + " ".join(f"{name:>11}" for name in names) + "  |  the same")
    found = {(row["pair"], row["order"], row["what"], row["nic_per"]): row["planners"] for row in table["rows"]}
    for (pair, order, what, nic), planners in found.items():
        if nic == "device":
            both = (planners, found[pair, order, what, "node"])
            columns = [" ".join(f"{side[name]['ours'] * 1e3:11.1f}" for name in names) for side in both]
            print(f"{pair:24} {order:9} {what:6} {'  |  '.join(columns)}")
    for row in table["rows"]:
        for name, entry in row["planners"].items():
            if entry["verdict"] != "equal":
                place = f"{row['pair']} {row['order']} {row['what']} NIC per {row['nic_per']} {name}"
                print(f"{entry['verdict']}: {place}: {entry['ours']:.4f} s, modelled {entry['modelled']:.4f} s")
    for name, count in table["verdicts"].items():
        print(f"against the modelled values, {name}: {', '.join(f'{n} {verdict}' for verdict, n in count.items())}")
    for key, value in table["means"].items():
        print(f"mean {key}: {value * 1e3:.1f} ms")


def print_chains(rows: list[dict[str, Any]]) -> None:
    """Seconds per mini-batch of the chains."""
    print("\nchains of strategies, modelled seconds per mini-batch (loads and gradient returns; fluid / hop after hop)")
    for row in rows:
        target = (
            f"  target {row['target_s']:.1f}: {'reached' if row['reached'] else 'MISSED'}" if row["target_s"] else ""
        )
        print(
            f"{row['chain']} {row['source']:14} {row['order']:6} NIC/{row['nic_per']:6} wire {row['wire']:4}"
            f" loads {row['loads_s']:.3f}/{row['loads_sequential_s']:.3f}"
            f" returns {row['returns_s']:.3f}/{row['returns_sequential_s']:.3f}"
            f" total {row['total_s']:.3f}/{row['total_sequential_s']:.3f}"
            f" (Algorithm 1 {row['algorithm1_s']:.3f}){target}  {' '.join(row['phases'])}",
            flush=True,
        )


def print_times(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints each row when it is there; all of them."""
    print("\nplanning on one core, s; operations = messages of the busiest sampled rank in one round")
    print(
        f"{'model':>5} {'devices':>7}  {'what':38} {'cold':>7} {'cpu':>7} {'validate':>8} {'plan MB':>8}"
        f" {'ops':>4} {'rounds':>6} {'cut s':>6}"
    )
    found = []
    for row in rows:
        found.append(row)
        print(
            f"{row['model']:>5} {row['devices']:7}  {row['what']:38} {row['cold_s']:7.3f} {row['cpu_s']:7.3f}"
            f" {row['validate_s']:8.3f} {row['plan_bytes'] / 1e6:8.2f}"
            f" {row['operations']:4} {row['rounds']:6} {row['cut_s']:6.3f}",
            flush=True,
        )
    return found


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.set_defaults(json=Path("out/planner.json"))
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16], help="above 64 the bound is a closed form")
    parser.add_argument("--per-node", type=int, nargs="+", default=[2, 8], help="devices of a node")
    parser.add_argument("--most", type=int, default=1000, help="switches of a kind; above, a fixed random sample")
    parser.add_argument("--random", type=int, default=200, help="irregular instances of each cluster")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--largest", default="70B", choices=("7B", "32B", "70B", "405B"), help="of the planning times")
    options = parser.parse_args(arguments)
    if options.quick:
        options.devices, options.per_node, options.most, options.random, options.largest = [8], [2], 4, 5, "7B"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    llama_vector(MODEL)
    start = time.perf_counter()
    result: dict[str, Any] = {
        "machine": {"machine": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)},
        "python": platform.python_version(),
        "options": given_options(options),
        "evidence": "modelled, except planning times",
    }
    for part in PARTS:
        if part not in options.parts:
            continue
        if part == "pairs":
            result[part] = pair_ratios(options)
        elif part == "irregular":
            result[part] = irregular_ratios(options)
        elif part == "modelled":
            result[part] = modelled_table(2 if options.quick else 20)
            print_modelled(result[part])
        elif part == "chains":
            result[part] = chains(("C1",) if options.quick else ("C1", "C2", "C3"))
            print_chains(result[part])
        else:
            result[part] = print_times(planning_times(options.largest))
    regular = max((row["max"] for row in result.get("pairs", [])), default=None)
    irregular = max((row["mean"] for row in result.get("irregular", [])), default=None)
    result["reached"] = {
        "regular_max": None if regular is None else regular <= REGULAR_TARGET,
        "irregular_mean": None if irregular is None else irregular <= IRREGULAR_TARGET,
    }
    print(f"\nlargest ratio {regular}, largest irregular mean {irregular}; {time.perf_counter() - start:.0f} s")
    write_json(options.json, result)


if __name__ == "__main__":
    main()
