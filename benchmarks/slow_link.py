"""Relay against Algorithm 1 where links between nodes are slow: 8 ranks as 2 nodes of 4, emulated on one machine.

    python benchmarks/slow_link.py
    python benchmarks/slow_link.py --pairs "master->dp8,tp8->dp2tp4" --rate-mb 20 --json out/slow_link.json
    python benchmarks/slow_link.py --nics-per-node 1
    python benchmarks/slow_link.py --quick

Every rank has a NIC of `--rate-mb` MB/s each way (`rate_limit.py`), slow enough for the emulated wire to outweigh by
far what the processes of a small machine spend on anything else. Both planners take turns in one run. Printed beside
the measured seconds are those that the plan predicts (`predicted_seconds`). Latency and the speed inside a node are
measured in the same run without slow links; the speed between nodes is the emulated one. Before timing, what arrived is
compared with what should have, element by element.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rate_limit import NodePorts, RateLimitedTransport
from result_file import command_line, given_options, machine_facts, write_json
from switches import (
    DTYPES,
    MODELS,
    PRELOAD,
    Pair,
    Store,
    check,
    fill,
    interleaved,
    markdown,
    medians,
    model_vector,
    timed,
)

from hf_hotspa.cluster import Cluster
from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.engine.executor import SwitchExecutor, SwitchStats
from hf_hotspa.engine.transport import ProcessGroupTransport, Transport
from hf_hotspa.plan.switch_plan import PortLoads, Schedule, SwitchPlan

PLANNERS = ("algorithm1", "relay")
PAIRS = "master->dp8,master->dp4tp2,tp8->dp8,tp4pp2->dp8,dp8->master"


def predicted_seconds(plan: SwitchPlan, schedule: Schedule, cluster: Cluster, element_size: int) -> dict[str, float]:
    """Seconds that a plan should take in the port model, by how closely the executor's order is followed.

    `ports`: the busiest port of the whole plan, as if everything moved at once. `groups`: groups of segments one after
    the other, the last hop of one beside the first hop of the next; each such turn takes its busiest port, at least the
    latency of its rounds, and the first round of a hop has nothing to hide its latency behind.
    """
    hops, num_turns = len(plan.links), len(schedule.groups) + len(plan.links) - 1
    whole = PortLoads.zero(cluster)
    turns = [PortLoads.zero(cluster) for _ in range(num_turns)]
    rounds = [0] * num_turns
    for current in schedule.rounds:
        rounds[current.group + current.hop] += 1
    for group, segments in enumerate(schedule.groups):
        sizes = [element_size if segment in segments else 0 for segment in range(len(plan.kind_of))]
        for hop, loads in enumerate(plan.loads(cluster, sizes)):
            turns[group + hop] += loads
            whole += loads
    busy = sum(
        max(loads.seconds(cluster), count * cluster.latency_s) for loads, count in zip(turns, rounds, strict=True)
    )
    return {"ports": whole.seconds(cluster), "groups": busy + hops * cluster.latency_s}


# -- measuring (runs on every rank) -----------------------------------------------------------------------------------


class Bench:
    """One rank of the benchmark."""

    def __init__(self, rank: int, world_size: int, options: argparse.Namespace, folder: str) -> None:
        self.rank, self.world_size, self.options = rank, world_size, options
        self.dtype = DTYPES[options.dtype]
        self._epoch = 0
        self._staging_bytes = int(options.staging_mib * (1 << 20))
        self.free = ProcessGroupTransport()
        self.forward = ProcessGroupTransport(dist.new_group(list(range(world_size))))
        self.cluster = self._calibrated()
        ports = None
        if options.nics_per_node:
            ports = NodePorts(Path(folder, f"node{self.cluster.node(rank)}"))
        nic = self.cluster.node_bandwidth if ports else self.cluster.inter_bandwidth
        self.slow = RateLimitedTransport(ProcessGroupTransport(), rank, self.cluster, nic, ports)

    def _calibrated(self) -> Cluster:
        """The machine as plans see it: emulated links between nodes, measured speed inside them and latency."""
        options = self.options
        cluster = Cluster(
            self.world_size,
            options.per_node,
            inter_bandwidth=options.rate_mb * 1e6,
            nics_per_node=options.nics_per_node,
        )
        outgoing = torch.zeros(options.calibration_mb << 20, dtype=torch.uint8)
        incoming = torch.zeros_like(outgoing)
        ranks = list(cluster.ranks(cluster.node(self.rank)))
        here = ranks.index(self.rank)

        def ring() -> None:
            self.free.recv(incoming, ranks[here - 1], 1)
            self.free.send(outgoing, ranks[(here + 1) % len(ranks)], 1)
            self.free.start().wait()

        seconds = medians(interleaved({"ring": ring}, 5))["ring"]
        cluster = replace(cluster, intra_bandwidth=outgoing.numel() / seconds)
        work, stats, _ = self._switch(
            self._pair(f"master->dp{self.world_size}", "15K"), cluster, "algorithm1", self.free
        )

        def several() -> None:  # one after the other: the ranks' different starts after a barrier count once
            for _ in range(8):
                work()

        # the best of several: what other programs of the machine add is not latency
        seconds = min(interleaved({"small": several}, 8)["small"]) / 8
        return replace(cluster, latency_s=seconds / stats[-1].num_rounds)

    def _switch(
        self, pair: Pair, cluster: Cluster, planner: str, transport: Transport
    ) -> tuple[Callable[[], None], list[SwitchStats], Schedule]:
        """A switch to be called again and again, the list that its statistics go to, and its rounds; checked once."""
        plan = pair.plan(cluster, self.dtype.itemsize, planner)
        source, target = (Store.empty(layout, self.rank, self.dtype) for layout in (pair.source, pair.target))
        wires: list[torch.dtype | None] = [self.dtype] * len(plan.kind_of)
        executor = SwitchExecutor(transport, self.rank, self._staging_bytes, forward=self.forward)
        executor.prepare(plan, wires)
        stats: list[SwitchStats] = []
        fill(pair, source, self.rank)

        def run() -> None:
            self._epoch += 1
            stats.append(executor.run(plan, source.buffers, target.buffers, wires, self._epoch))

        timed(run)
        check(pair, target, self.rank)
        return run, stats, executor.schedule(plan, tuple(wires))

    def _pair(self, text: str, model: str) -> Pair:
        return Pair.parse(text, model_vector(model, self.dtype), self.world_size)

    def compare(self, text: str) -> dict[str, Any]:
        """Both planners on one pair."""
        pair = self._pair(text, self.options.model)
        found = {planner: self._switch(pair, self.cluster, planner, self.slow) for planner in PLANNERS}
        seconds = interleaved({planner: work for planner, (work, _, _) in found.items()}, self.options.rounds, warmup=0)
        row: dict[str, Any] = {"pair": text}
        for planner, (_, stats, schedule) in found.items():
            plan = pair.plan(self.cluster, self.dtype.itemsize, planner)
            loads = plan.loads(self.cluster, [self.dtype.itemsize] * len(plan.kind_of))
            predicted = predicted_seconds(plan, schedule, self.cluster, self.dtype.itemsize)
            median = statistics.median(seconds[planner])
            row[planner] = {
                "seconds": median,
                "all_seconds": seconds[planner],
                "predicted": predicted,
                "error": predicted["groups"] / median - 1,
                "num_rounds": stats[-1].num_rounds,
                "inter_bytes": sum(float(hop.sent_inter.sum()) for hop in loads),
                "intra_bytes": sum(float(hop.sent_intra.sum()) for hop in loads),
                "busiest_port_seconds": sum(loads[1:], loads[0]).seconds(self.cluster),
                "rank0_parts": {
                    part: statistics.median(getattr(s, part) for s in stats[1:])
                    for part in ("pack_seconds", "wire_seconds", "local_seconds", "unpack_seconds")
                },
            }
        direct, relay = row["algorithm1"], row["relay"]
        row["ratio"] = direct["seconds"] / relay["seconds"]
        row["predicted_ratio"] = direct["predicted"]["groups"] / relay["predicted"]["groups"]
        return row


def measure(rank: int, world_size: int, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The rows of all pairs; the work of one rank."""
    bench = Bench(rank, world_size, options, folder)
    rows = [bench.compare(text) for text in options.pairs.split(",")]
    cluster = bench.cluster
    return {"rows": rows, "intra_bandwidth": cluster.intra_bandwidth, "latency_s": cluster.latency_s}


# -- the report -------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    header = ["pair", "Alg. 1 s", "predicted", "error", "relay s", "predicted", "error", "Alg. 1 / relay", "predicted"]
    cells = []
    for row in rows:
        line = [row["pair"]]
        for planner in PLANNERS:
            side = row[planner]
            line += [f"{side['seconds']:.3f}", f"{side['predicted']['groups']:.3f}", f"{side['error']:+.1%}"]
        cells.append([*line, f"{row['ratio']:.2f}x", f"{row['predicted_ratio']:.2f}x"])
    return markdown(header, cells)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--per-node", type=int, default=4, help="ranks of a node")
    parser.add_argument("--model", choices=MODELS, default="9M")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--pairs", default=PAIRS, help="comma-separated SOURCE->TARGET")
    parser.add_argument("--rate-mb", type=float, default=6.0, help="MB/s of a NIC, each way")
    parser.add_argument(
        "--nics-per-node", type=int, help="NICs that the ranks of a node share; one for each when left out"
    )
    parser.add_argument("--staging-mib", type=float, default=8.0, help="staging buffers, MiB")
    parser.add_argument(
        "--calibration-mb", type=int, default=4, help="MiB of the message that measures speed in a node"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.pairs, options.rounds, options.calibration_mb = "0.2M", "master->dp4", 2, 1
        options.ranks, options.per_node = 4, 2
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    facts = machine_facts(options.ranks)
    print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="hotspa-nics-") as folder:
        found = run_world(options.ranks, measure, options, folder, preload=PRELOAD)
    nodes = f"{options.ranks // options.per_node} nodes of {options.per_node}"
    print(
        f"model {options.model} {options.dtype}, {nodes}, NICs of {options.rate_mb:g} MB/s; without slow links: "
        f"{found['intra_bandwidth'] / 1e6:.0f} MB/s a rank inside nodes, {found['latency_s'] * 1e3:.1f} ms a round; "
        f"medians of {options.rounds}\n"
    )
    print(table(found["rows"]))
    write_json(options.json, {"machine": facts, "options": given_options(options), **found})


if __name__ == "__main__":
    main()
