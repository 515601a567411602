"""Seconds per mini-batch: every static strategy that fits a token budget against hot-switched combinations.

    python benchmarks/step.py --ranks 4 --model 7M
    python benchmarks/step.py --ranks 4 --model 0.9M --dtype bf16 --rounds 5 --json out/step.json
    python benchmarks/step.py --hot dp4:512@1024,dp2tp2:2048,tp4:4096 --lengths lengths.json
    python benchmarks/step.py --trainer-overhead          # only the last part

Printed last: the share of a step that `HotSPaTrainer` spends outside of the engine.

All sides run in one set of processes, in turn (A, B, C, A, B, C, ...), on the same mini-batches and one set of weights,
and the median over the rounds is reported: the speed of a shared machine drifts by a fifth within minutes. A mini-batch
counts everything: planning and collating, switching, forward and backward, clipping, the AdamW step. Every side is
packed, and the sequences of a pack are isolated; each static strategy also runs as the paper's baseline may have: with packs no longer than the
longest sequence, and without packs. Before timing, all sides run the first mini-batch from the same
weights, and their losses must agree.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

from contest import MODELS, Side, make_model, make_sides, mini_batch_lengths, one_each
from result_file import command_line, given_options, machine_facts, write_json
from trainer_overhead import trainer_overhead

from hf_hotspa.commands.bench.workload import make_rows
from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.costs.divided import WAYS
from hf_hotspa.strategy import Strategy

DTYPES = ("fp32", "bf16")
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}


@dataclass
class Timing:
    """What one side took in each round; seconds and bytes of a mini-batch.

    `wait` is the longest time that a rank waited for the busiest replica of a phase. `cpu` is processor time summed
    over ranks: blind to waiting, but steady where other programs take turns with the benchmark.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    data: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    switch_share: list[float] = field(default_factory=list)
    moved_bytes: int = 0
    num_packs: list[int] = field(default_factory=list)


# -- measuring (runs on every rank) -----------------------------------------------------------------------------------


def measure(rank: int, world_size: int, options: argparse.Namespace, sides: list[Side], lengths: list[int]) -> Any:
    """`(losses, gradient norms, timings)` by side; the work of one rank."""
    import torch
    import torch.distributed as dist
    from switches import over_ranks

    from hf_hotspa.data.collator import PackedBucketCollator
    from hf_hotspa.engine.engine import HotSPaEngine
    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.packing import bucketing
    from hf_hotspa.rows.table import SequenceTable

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    # one engine knows the strategies of all sides: they share weights, optimizer and memory
    used = {bucket.strategy: bucket for side in sides for bucket in side.buckets}
    engine = HotSPaEngine(
        make_model(options.model), list(used.values()), EngineOptions(compute_dtype=dtype, context_parallel=options.way)
    )
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.01), lr=1e-3, foreach=True)
    shape, table = engine.description.shape, SequenceTable.from_lengths(lengths)

    def mini_batch_of(side: Side, rows: list[dict[str, list[int]]]) -> Any:
        collator = PackedBucketCollator(side.buckets, rank=rank, vocab_size=shape.vocab_size)
        with nullcontext() if side.packed else patch.object(bucketing, "pack_sequences", one_each):
            plan = bucketing.plan_mini_batch(range(len(rows)), table, side.buckets, quadratic_cost=shape.quadratic_cost)
        return collator.of_plan(plan, {row: rows[row] for row in collator.rows_of(plan)})

    rows = make_rows(lengths, shape.vocab_size, seed=1)
    first = {side.name: engine.forward_backward(mini_batch_of(side, rows)) for side in sides}
    timings = {side.name: Timing() for side in sides}
    profiler = _profiler(options, rank)
    for round_index in range(-options.warmup, options.rounds):
        rows = make_rows(lengths, shape.vocab_size, seed=2 + options.warmup + round_index)
        for side in sides:
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            mini_batch = mini_batch_of(side, rows)
            collated = time.perf_counter()
            report = engine.forward_backward(mini_batch)
            returned = time.perf_counter()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            end = time.perf_counter()
            cpu = over_ranks(time.process_time() - cpu, dist.ReduceOp.SUM)
            seconds, optimizer_s = over_ranks(end - begin), over_ranks(end - returned)
            if round_index < 0:
                continue
            timing = timings[side.name]
            timing.seconds.append(seconds)
            timing.cpu.append(cpu)
            timing.data.append(collated - begin)
            timing.optimizer.append(optimizer_s)
            timing.load.append(sum(phase.load_s for phase in report.phases))
            timing.compute.append(sum(phase.compute_s for phase in report.phases))
            timing.wait.append(sum(phase.wait_s for phase in report.phases))
            timing.gradients.append(sum(phase.return_s for phase in report.phases))
            timing.switch_share.append(report.switch_s / seconds)
            timing.moved_bytes = report.moved_bytes
            timing.num_packs = [phase.num_packs for phase in report.phases]
    engine.close()
    profiler()
    return {name: (report.loss, report.grad_norm) for name, report in first.items()}, timings


def _profiler(options: argparse.Namespace, rank: int) -> Callable[[], None]:
    """Starts cProfile on rank 0 when asked for; the function returned prints what it saw."""
    if not options.profile or rank:
        return lambda: None
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()

    def finish() -> None:
        profile.disable()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(options.profile)

    return finish


# -- the report -------------------------------------------------------------------------------------------------------


def check_losses(losses: dict[str, tuple[float, float]], dtype: str) -> float:
    """The largest relative difference of the first loss between sides; raises when it is above the tolerance."""
    (reference, _), *_ = losses.values()
    worst = max(abs(loss - reference) / abs(reference) for loss, _ in losses.values())
    if not worst <= LOSS_TOLERANCE[dtype]:
        raise SystemExit(f"the sides disagree: losses and gradient norms {losses}, relative difference {worst:.1e}")
    return worst


def table_rows(sides: Sequence[Side], timings: dict[str, Timing], num_tokens: int, ranks: int) -> list[dict[str, Any]]:
    """One plain row a side, with its ratios to static tp over all ranks and to the best static side."""
    medians = {name: statistics.median(timing.seconds) for name, timing in timings.items()}
    best = min((medians[s.name] for s in sides if s.is_static), default=None)
    reference = medians.get(f"static {Strategy(tp=ranks)}")

    rows = []
    for side in sides:
        timing, seconds = timings[side.name], medians[side.name]
        median = {
            key: statistics.median(value)
            for key, value in asdict(timing).items()
            if key not in ("seconds", "moved_bytes", "num_packs")
        }
        rows.append(
            {
                "side": side.name,
                "buckets": ",".join(map(str, side.buckets)),
                "packs": timing.num_packs,
                "seconds": seconds,
                "min": min(timing.seconds),
                "max": max(timing.seconds),
                "tokens_per_second": num_tokens / seconds,
                "moved_bytes": timing.moved_bytes,
                "speedup_over_static_tp": reference / seconds if reference else None,
                "speedup_over_best_static": best / seconds if best else None,
                "medians": median,
                "all_seconds": timing.seconds,
            }
        )
    return rows


def print_table(rows: Sequence[dict[str, Any]], ranks: int) -> None:
    """The table, and below it where the time goes."""

    def ratio(value: float | None) -> str:
        return f"{value:.2f}x" if value else "-"

    width = max(len(row["side"]) for row in rows)
    print(
        f"\n{'':{width}}  s/mini-batch   (min .. max)   cpu s  tokens/s  switch  MB moved  / tp{ranks}  / best static  packs"
    )
    for row in rows:
        print(
            f"{row['side']:{width}}  {row['seconds']:12.3f}  {row['min']:6.3f} .. {row['max']:6.3f}"
            f"  {row['medians']['cpu']:6.3f}"
            f"  {row['tokens_per_second']:8.0f}  {row['medians']['switch_share']:6.1%}  {row['moved_bytes'] / 1e6:8.1f}"
            f"  {ratio(row['speedup_over_static_tp']):>5}  {ratio(row['speedup_over_best_static']):>13}"
            f"  {'+'.join(map(str, row['packs']))}"
        )
    print(f"\n{'ms':{width}}  {'data':>8} {'load':>8} {'compute':>8} {'wait':>8} {'return':>8} {'optimizer':>9}")
    for row in rows:
        parts = [row["medians"][key] * 1e3 for key in ("data", "load", "compute", "wait", "gradients", "optimizer")]
        print(f"{row['side']:{width}}  " + " ".join(f"{part:8.1f}" for part in parts[:-1]) + f" {parts[-1]:9.1f}")


def compare_steps(options: argparse.Namespace, lengths: list[int]) -> dict[str, Any]:
    """Runs the contest and prints it."""
    sides, left_out = make_sides(options, lengths)
    names = {side.name for side in sides}
    if unknown := [name for name in options.only or () if name not in names]:
        raise SystemExit(f"there are no sides {unknown}; there are {sorted(names)}, and\n" + "\n".join(left_out))
    if options.only:
        sides = [side for side in sides if side.name in options.only]
    if not sides:
        raise SystemExit("no strategy fits:\n" + "\n".join(left_out))
    losses, timings = run_world(options.ranks, measure, options, sides, lengths)
    worst = check_losses(losses, options.dtype)
    rows = table_rows(sides, timings, sum(lengths), options.ranks)
    print_table(rows, options.ranks)
    for line in left_out:
        print(line)
    print(f"\nfirst mini-batch, same weights: losses agree to {worst:.1e} (relative)")
    for name, (loss, norm) in losses.items():
        print(f"  {name:30s} loss {loss:.8f}  gradient norm {norm:.8f}")
    return {"rows": rows, "left_out": left_out, "losses": losses}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", choices=MODELS, default="7M", help="parameters of the Llama")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="of weights and activations; the master is fp32"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="untimed rounds")
    parser.add_argument("--budget", type=int, default=1024, help="tokens per rank and micro-batch at tp1")
    parser.add_argument(
        "--budget-rule",
        choices=("tp-pp", "tp"),
        default="tp-pp",
        help="a pack holds budget x tp x pp tokens (a stage keeps the activations of its layers only), or budget x tp",
    )
    parser.add_argument(
        "--hot", action="append", help="a bucket list, dp4:1024,tp4:4096; may be repeated (default: dpN + each static)"
    )
    parser.add_argument("--cp", action="store_true", help="also every strategy with context parallelism")
    parser.add_argument("--way", choices=WAYS, default="auto", help="how ranks of cp attend")
    parser.add_argument("--only", action="append", metavar="SIDE", help="run only this side (its name in the table)")
    parser.add_argument("--lengths", help="JSON file: the list of the sequence lengths of a mini-batch")
    parser.add_argument(
        "--num-short", type=int, default=64, help="sequences of 256 tokens (or the budget), without --lengths"
    )
    parser.add_argument("--long", type=int, default=4096, help="tokens of the one long sequence, without --lengths")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="print rank 0's cProfile")
    parser.add_argument("--trainer-overhead", action="store_true", help="only the overhead of HotSPaTrainer")
    parser.add_argument("--trainer-steps", type=int, default=8, help="steps of HotSPaTrainer; 0 leaves that part out")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.ranks < 1 or options.trainer_steps in (1, *range(-9, 0)):
        parser.error("--rounds and --ranks must be at least 1, --trainer-steps at least 2, or 0")
    if options.quick:
        options.model, options.rounds, options.warmup, options.budget, options.trainer_steps = "0.9M", 2, 1, 64, 2
        options.num_short, options.long = 8, options.budget * options.ranks
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    lengths = mini_batch_lengths(options)
    facts = machine_facts(options.ranks)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(
        f"model {options.model} {options.dtype}; mini-batch of {len(lengths)} sequences, {sum(lengths)} tokens, longest "
        f"{max(lengths)}; budget {options.budget} x {options.budget_rule.replace('-', ' x ')} tokens per pack;"
        f" {options.rounds} rounds",
        flush=True,
    )
    result = {"machine": facts, "options": given_options(options), "lengths": lengths}
    if not options.trainer_overhead:
        result |= compare_steps(options, lengths)
    if options.trainer_steps:
        result["trainer_overhead"] = trainer_overhead(options, lengths)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
