"""The switch executor against the wire, and against other ways to move the same parameters, over gloo.

    python benchmarks/switch.py --ranks 4
    python benchmarks/switch.py --ranks 8 --model 67M --pairs "master->dp8,dp4tp2->dp2tp4" --json out/switch.json
    python benchmarks/switch.py --model narrow            # many small slices
    python benchmarks/switch.py --model adapters          # many small parameters
    python benchmarks/switch.py --quick

All sides move the parameters of one switch, in one run, in turns, between equal layouts on one node. Seconds are the
slowest rank's, medians over the rounds. What the switch delivered is compared with what it should have, element by
element, before timing. Memory is measured last, in processes that do nothing else. `switch_baselines.py` says what the
other sides are.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from result_file import command_line, given_options, machine_facts, write_json
from switch_baselines import MEMORY_FILES, AllGather, Checkpoint, Copies, FusedRaw, PerSlice
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
    over_ranks,
    timed,
)
from written_plans import transfers_of

from hf_hotspa.calibrate.probe import PeakMemory
from hf_hotspa.cluster import Cluster
from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.engine.executor import SwitchExecutor, SwitchStats
from hf_hotspa.engine.transport import ProcessGroupTransport
from hf_hotspa.plan.switch_plan import RELAY, SOURCE, TARGET

CHUNKS = {"whole": None, "4 MiB": 4 << 20, "16 MiB": 16 << 20}
OTHERS = ("per slice", "per slice, as stored", "all-gather", "checkpoint")
MOST_SLICES = 100_000
"""Beyond, a batch of that many operations takes minutes."""
PAIRS = {
    4: "master->dp4,master->tp4,master->dp2tp2,dp2tp2->tp4,tp4->dp2tp2,dp4->master",
    8: "master->dp8,master->dp2tp4,dp4tp2->dp2tp4,tp8->dp4tp2,dp8->master",
}

# -- measuring (runs on every rank) -----------------------------------------------------------------------------------


class Switch:
    """One rank's side of a switch: plan, stores, executor. Calling it runs the switch once."""

    def __init__(self, pair: Pair, rank: int, world_size: int, options: argparse.Namespace) -> None:
        self.pair, self.rank = pair, rank
        self.dtype = DTYPES[options.dtype]
        self.plan = pair.plan(Cluster(world_size, world_size), self.dtype.itemsize)
        self.source, self.target = (Store.empty(layout, rank, self.dtype) for layout in (pair.source, pair.target))
        self._wires: list[torch.dtype | None] = [self.dtype] * len(self.plan.kind_of)
        self._staging_bytes = int(options.staging_mib * (1 << 20))
        self.stats: list[SwitchStats] = []
        fill(pair, self.source, rank)

    def prepare(self) -> None:
        """Makes the executor and allocates what it needs."""
        self.executor = SwitchExecutor(
            ProcessGroupTransport(), self.rank, self._staging_bytes, native=(SOURCE, TARGET, RELAY)
        )
        self.executor.prepare(self.plan, self._wires)

    def __call__(self) -> None:
        epoch = len(self.stats)
        self.stats.append(self.executor.run(self.plan, self.source.buffers, self.target.buffers, self._wires, epoch))


def measure(rank: int, world_size: int, options: argparse.Namespace, folder: str | None) -> list[dict[str, Any]]:
    """The rows of all pairs; the work of one rank. Checkpoints go to the folder, if there is one."""
    return [measure_pair(text, rank, world_size, options, folder) for text in options.pairs.split(",")]


def measure_pair(
    text: str, rank: int, world_size: int, options: argparse.Namespace, folder: str | None
) -> dict[str, Any]:
    vector = model_vector(options.model, DTYPES[options.dtype])
    pair = Pair.parse(text, vector, world_size)
    switch = Switch(pair, rank, world_size, options)
    switch.prepare()
    timed(switch)
    check(pair, switch.target, rank)
    plan, source, target = switch.plan, switch.source, switch.target
    raw = FusedRaw(plan, rank, switch.dtype)
    copies = Copies(plan, rank, source, target, raw)
    works: dict[str, Callable[[], object]] = {"ours": switch}
    for name, chunk_bytes in CHUNKS.items():
        exchange = partial(raw.run, chunk_bytes)
        works[f"raw {name}"] = exchange
        works[f"raw, copies {name}"] = partial(copies.around, exchange)
    works |= {"pack and unpack": copies.pack_unpack, "local copies": copies.local}
    if not pair.is_return:
        per_slice = PerSlice(plan, vector, rank, source, target)
        works["per slice"] = per_slice.run
        stored = PerSlice(plan, vector, rank, source, target, as_stored=True)
        if stored.num_slices <= MOST_SLICES:
            works["per slice, as stored"] = stored.run
        works["all-gather"] = AllGather(pair, plan, rank, source, target).run
        if folder:
            works["checkpoint"] = Checkpoint(pair, rank, source, target, f"{folder}/{pair.name}").run
        for name in OTHERS:  # the others must do the whole job, too
            if name in works:
                target.flat.zero_()
                timed(works[name])
                check(pair, target, rank)
    seconds = interleaved(works, options.rounds)
    parts = ("pack_seconds", "wire_seconds", "local_seconds", "unpack_seconds")
    stats = switch.stats[-options.rounds :]
    moves = [t for t in transfers_of(plan) if t.src != t.dst]
    return {
        "pair": text,
        "is_return": pair.is_return,
        "wire_bytes": int(sum(t.length for t in moves)) * switch.dtype.itemsize,
        "local_bytes": over_ranks(float(stats[-1].local_bytes), dist.ReduceOp.SUM),
        "num_slices": len(moves),
        "num_routes": len({(t.src, t.dst) for t in moves}),
        "num_rounds": stats[-1].num_rounds,
        "num_messages": over_ranks(float(stats[-1].num_messages), dist.ReduceOp.SUM) / 2,
        "seconds": medians(seconds),
        "all_seconds": seconds,
        "parts": {part: over_ranks(statistics.median(getattr(s, part) for s in stats)) for part in parts},
    }


def measure_memory(rank: int, world_size: int, options: argparse.Namespace, text: str) -> dict[str, float]:
    """Bytes of the rank with the most of each: stores, the executor's buffers, growth of the process at its peak."""
    pair = Pair.parse(text, model_vector(options.model, DTYPES[options.dtype]), world_size)
    switch = Switch(pair, rank, world_size, options)
    memory = PeakMemory(torch.device("cpu"))
    can_measure = memory.works
    timed(lambda: None)  # connects the ranks
    if can_measure:
        memory.start()
    switch.prepare()
    timed(switch)
    grown = float(memory.stop()) if can_measure else float("nan")
    held_bytes = (switch.source.flat.numel() + switch.target.flat.numel()) * switch.dtype.itemsize
    return {
        "store_bytes": over_ranks(held_bytes),
        "reserved_bytes": over_ranks(switch.executor.reserved_bytes),
        "grown_bytes": over_ranks(grown),
    }


# -- the report -------------------------------------------------------------------------------------------------------


def ratios(row: dict[str, Any]) -> dict[str, Any]:
    """How the switch compares: shares of the wire's speed, and how many times as long the other ways take.

    `raw and copies` is the wire between packing and unpacking, one after the other; `raw plus copies` is the sum of
    the two measured apart.
    """
    seconds = row["seconds"]
    ours = seconds["ours"]
    best = min((name for name in seconds if name.startswith("raw ")), key=seconds.__getitem__)
    best_copied = min((name for name in seconds if name.startswith("raw, ")), key=seconds.__getitem__)
    copies = seconds["pack and unpack"] + seconds["local copies"]
    others = {name: seconds[name] / ours for name in OTHERS if name in seconds}
    return {
        "best_raw": best,
        "bytes_per_second": row["wire_bytes"] / ours,
        "raw / ours": seconds[best] / ours,
        "raw and copies / ours": seconds[best_copied] / ours,
        "raw plus copies / ours": (seconds[best] + copies) / ours,
        **{f"{name} / ours": value for name, value in others.items()},
    }


def print_tables(rows: list[dict[str, Any]]) -> None:
    def times(row: dict[str, Any], name: str) -> str:
        value = row["ratios"].get(f"{name} / ours")
        return f"{value:.1f}x" if value else "-"

    header = ["pair", "MB moved", "slices", "rounds", "ours s", "MB/s", "raw s", "(chunks)", "pack s", "local s"]
    header += ["of raw", "of raw + copies", *OTHERS]
    cells = []
    for row in rows:
        seconds, found = row["seconds"], row["ratios"]
        cells.append(
            [
                row["pair"],
                f"{row['wire_bytes'] / 1e6:.0f}",
                row["num_slices"],
                row["num_rounds"],
                f"{seconds['ours']:.3f}",
                f"{found['bytes_per_second'] / 1e6:.0f}",
                f"{seconds[found['best_raw']]:.3f}",
                found["best_raw"].removeprefix("raw "),
                f"{seconds['pack and unpack']:.3f}",
                f"{seconds['local copies']:.3f}",
                f"{found['raw / ours']:.2f}",
                f"{found['raw and copies / ours']:.2f}",
                *(times(row, name) for name in OTHERS),
            ]
        )
    print("\n" + markdown(header, cells))
    header = ["pair", "source + target MB", "staging MB", "grown by MB", "of source + target"]
    header += ["pack ms", "wire ms", "local ms", "unpack ms"]
    cells = []
    for row in rows:
        memory = row["memory"]
        cells.append(
            [
                row["pair"],
                *(f"{memory[key] / 1e6:.1f}" for key in ("store_bytes", "reserved_bytes", "grown_bytes")),
                f"{memory['grown_bytes'] / memory['store_bytes']:.1%}",
                *(f"{part * 1e3:.1f}" for part in row["parts"].values()),
            ]
        )
    print("\n" + markdown(header, cells))


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", choices=MODELS, help="137M with 4 ranks, else 67M, when left out")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--pairs", help="comma-separated SOURCE->TARGET; some of 4 and of 8 ranks when left out")
    parser.add_argument("--staging-mib", type=float, default=16.0, help="each of the staging buffers, MiB")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.pairs, options.rounds = "0.2M", "master->dp2tp2,dp4->master", 2
    options.model = options.model or ("137M" if options.ranks == 4 else "67M")
    options.pairs = options.pairs or PAIRS.get(options.ranks, f"master->dp{options.ranks},master->tp{options.ranks}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    facts = machine_facts(options.ranks)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    vector = model_vector(options.model, DTYPES[options.dtype])
    megabytes = vector.numel * DTYPES[options.dtype].itemsize / 1e6
    print(
        f"model {options.model} {options.dtype}: {megabytes:.0f} MB in {len(vector.segments)} segments; staging "
        f"{options.staging_mib:g} MiB; medians of {options.rounds}",
        flush=True,
    )
    with ExitStack() as stack:  # what a failed rank leaves is removed, too
        folder = None
        if MEMORY_FILES.is_dir():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hotspa-bench-", dir=MEMORY_FILES))
        rows = run_world(options.ranks, measure, options, folder, preload=PRELOAD)
    for row in rows:
        row["ratios"] = ratios(row)
        row["memory"] = run_world(options.ranks, measure_memory, options, row["pair"])
    print_tables(rows)
    write_json(options.json, {"machine": facts, "options": given_options(options), "rows": rows})


if __name__ == "__main__":
    main()
