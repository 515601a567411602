"""The counts of a release: what a step enters, what commands cost, what switches move, how good plans are.

    python benchmarks/release_counts.py [--write]

Prints them as JSON, and with `--write` stores them in `tests/data/release_counts.json`, once a release. `tests/unit/test_release_counts.py`
compares the counts that are the same everywhere (switches and plans) with the stored ones; the others depend on the machine or on
the libraries, and tell releases apart.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planner_cases import gradients, llama_vector, master, weights
from result_file import write_json

from hf_hotspa.cluster import Cluster
from hf_hotspa.plan.planner import plan_load, plan_return
from hf_hotspa.search.setup import Setup, make_plan
from hf_hotspa.strategy import Strategy
from hf_hotspa.versions import version_of

FILE = Path(__file__).resolve().parents[1] / "tests" / "data" / "release_counts.json"
SWITCHES = (
    ("7B", "1x8", "tp8", "dp8"),
    ("7B", "1x8", "dp2tp2pp2", "dp4tp2"),
    ("32B", "2x8", "tp8pp2", "dp2tp8"),
    ("32B", "2x8", "dp2tp8", "dp4tp4"),
)
"""Model of `planner_cases`, nodes, and the strategies before and after."""
PLANS = (
    ("llama2-7b", "1x8", "h100-80g", "commoncrawl"),
    ("llama2-7b", "1x8", "h100-80g", "github"),
    ("llama2-13b", "2x8", "a100-40g", "chat"),
    ("llama2-13b", "1x8", "l40s", "uniform"),
)
"""Model, nodes, machine and lengths."""
COMMANDS = {
    "plan": "plan --model llama2-7b --gpus 8xh100-80g --lengths github",
    "estimate": "estimate --model llama2-7b --gpus 8xh100-80g --strategy dp4tp2 --pack-tokens 8192",
    "hardware": "hardware",
    "help": "--help",
}


def switches(cases: Iterable[tuple[str, str, str, str]] = SWITCHES) -> dict[str, dict[str, int]]:
    """The bytes that leave a rank, by switch: loading the first strategy's weights from the master store, switching to the
    second one, and returning its gradients."""
    found = {}
    for model, nodes, before, after in cases:
        count, devices = map(int, nodes.split("x"))
        cluster, sizes = Cluster(count * devices, devices), [2] * len(llama_vector(model).segments)
        one, other = Strategy.parse(before), Strategy.parse(after)
        store = master(model, cluster.world_size)
        load = plan_load(store, weights(model, one), cluster, sizes)
        switch = plan_load([store, weights(model, one)], weights(model, other), cluster, sizes)
        back = plan_return(gradients(model, other), store, cluster, sizes)
        plans = {"load": load, "switch": switch, "return": back}
        found[f"{model} {nodes} {before} to {after}"] = {name: plan.wire_bytes(sizes) for name, plan in plans.items()}
    return found


def plans(cases: Iterable[tuple[str, str, str, str]] = PLANS) -> dict[str, dict[str, float]]:
    """The predicted seconds of a mini-batch, by plan: of the plan, and of the best single strategy relative to it."""
    found = {}
    for model, nodes, machine, lengths in cases:
        plan: dict[str, Any] = make_plan(Setup.read(model, nodes, machine), lengths).to_dict()
        seconds, static = plan["seconds"], plan["static"]["seconds"]
        found[f"{model} {nodes} {machine} {lengths}"] = {"seconds": seconds, "of static": static / seconds}
    return found


def commands() -> dict[str, float]:
    """The CPU seconds of light commands, each in a new process."""
    found = {}
    for name, words in COMMANDS.items():
        before = os.times()
        subprocess.run([sys.executable, "-m", "hf_hotspa.cli", *words.split()], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        found[name] = round(used, 2)
    return found


def step() -> dict[str, int]:
    """The files and functions that a steady step enters."""
    from functions_a_step import entered

    found = entered()
    return {"files": len(found), "functions": sum(map(len, found.values()))}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"store them in {FILE.name}")
    options = parser.parse_args()
    versions = {name: version_of(name) for name in ("hf_hotspa", "torch", "transformers")}
    counts = {
        "versions": versions,
        "step": step(),
        "command CPU seconds": commands(),
        "switch bytes": switches(),
        "plans": plans(),
    }
    print(json.dumps(counts, indent=1))
    if options.write:
        write_json(FILE, counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
