"""`step.py --distributions`: auto against every static strategy, over length distributions, under a memory limit.

Each round has its own mini-batch, drawn from the distribution, which every side trains in turn (the turn begins
with another side each round). The memory limit of a device is the same for all sides: what the longest sequence needs
under the strategy that needs the least, and a twentieth more, by the calibrated memory model (weights, gradients,
master store, optimizer, activations of the packs in flight, logits, switch buffers). Each static side has the packs
that the search finds best for it. `auto` is what the Trainer does: a calibration, the search over a sample of the
distribution, and `PhaseChooser` for each mini-batch, which is shown what was measured. The static side that the search
thinks best runs twice, so that the noise is known: `noise` is how far these two are apart, or the standard error of it.
"""

import argparse
import statistics
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from contest import Side, describe, make_model

from hf_hotspa.commands.bench.workload import make_rows
from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.search.histogram import synthetic_lengths
from hf_hotspa.strategy import Bucket, legal_strategies

NAMES = ("uniform short", "all equal", "stdlib", "commoncrawl", "github")
"""16 to 512 tokens alike; 512 tokens each; files of Python's standard library, 4 bytes a token; log-normal with median
326 and sigma 1.33; log-normal with median 1441 and sigma 1.46. The last three are cut at the longest sequence."""
_SAMPLE = 2048
AGAIN = "static again"


def draw(name: str, count: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths from a distribution, in random order."""
    rng = np.random.default_rng([seed, NAMES.index(name)])
    if name == "uniform short":
        return [int(length) for length in rng.integers(16, min(512, longest) + 1, count)]
    if name == "all equal":
        return [min(512, longest)] * count
    if name == "stdlib":
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        tokens = [min(max(path.stat().st_size // 4, 16), longest) for path in files]
        return [tokens[at] for at in rng.integers(0, len(tokens), count)]
    return synthetic_lengths(name, count, longest, seed)


def measure(rank: int, world_size: int, options: argparse.Namespace) -> Any:
    """One row a distribution; the work of one rank."""
    import torch
    import torch.distributed as dist

    from hf_hotspa.calibrate.model_calibration import calibrate
    from hf_hotspa.costs.cost_model import CostModel
    from hf_hotspa.costs.memory import MemoryOptions
    from hf_hotspa.costs.online_calibration import PhaseSeconds
    from hf_hotspa.costs.sizes import ModelSizes
    from hf_hotspa.data.collator import PackedBucketCollator
    from hf_hotspa.engine.engine import HotSPaEngine
    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.packing.bucketing import plan_mini_batch
    from hf_hotspa.rows.table import SequenceTable
    from hf_hotspa.search.automatic import PACK_MARGIN, pool_of
    from hf_hotspa.search.capacities import Capacities
    from hf_hotspa.search.chooser import PhaseChooser
    from hf_hotspa.search.offers import MARGIN
    from hf_hotspa.search.question import Question
    from hf_hotspa.search.search import Choice, SearchOptions, search
    from hf_hotspa.strategy import Strategy

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    model = make_model(options.model)
    shape = describe(options).shape
    strategies = legal_strategies(world_size, shape)
    began = time.perf_counter()
    calibration = calibrate(model.config, strategies=strategies, compute_dtype=dtype)
    calibration_s = time.perf_counter() - began
    engine = HotSPaEngine(model, [Bucket(s, 1, 1) for s in strategies], EngineOptions(compute_dtype=dtype))
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.01), lr=1e-4, foreach=True)
    sizes = ModelSizes(shape, calibration.key.dtype, vector=engine.description.vector)
    cost = CostModel.of_calibration(calibration, sizes, MemoryOptions())
    time_model, memory, switch = cost.time, cost.memory, cost.switch_seconds(strategies)
    limit = 1.05 * min(memory.breakdown(s, options.long).total for s in strategies)
    capacities = Capacities(memory, limit)
    collator = PackedBucketCollator(engine.buckets, rank=rank, vocab_size=shape.vocab_size)

    def over_ranks(seconds: float, how: Any = dist.ReduceOp.MAX) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, op=how)
        return float(value)

    def contest(name: str) -> dict[str, Any]:
        sample = draw(name, _SAMPLE, options.long)
        size = max(4, min(256, round(options.tokens / statistics.mean(sample))))
        rounds = options.warmup + options.rounds
        lengths = draw(name, rounds * size, options.long, seed=1)
        longest, table = max(sample + lengths), SequenceTable.from_lengths(lengths)

        def searched(pool: Sequence[Strategy]) -> Choice:
            question = Question(cost, capacities, sample, size, longest)
            return search(question, pool, SearchOptions(margin=MARGIN, pack_margin=PACK_MARGIN))

        choice = searched(strategies)
        chooser = PhaseChooser(pool_of(choice, capacities), time_model, switch, quadratic_cost=shape.quadratic_cost)
        fitting = [s for s in strategies if capacities.tokens(s, capacities.arena(s)) >= longest]
        sides = [Side(f"static {s}", searched([s]).buckets) for s in fitting]
        sides += [Side(AGAIN, (choice.static,)), Side("auto", choice.buckets)]
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        cpu: dict[str, list[float]] = {side.name: [] for side in sides}
        phases, errors, refits = [], [], 0
        for number in range(rounds):
            rows = range(number * size, (number + 1) * size)
            examples = make_rows([lengths[row] for row in rows], shape.vocab_size, seed=number)
            losses = []
            for turn in range(len(sides)):
                side = sides[(number + turn) % len(sides)]
                dist.barrier()
                begin, used = time.perf_counter(), time.process_time()
                buckets = side.buckets
                if side.name == "auto":
                    buckets = chooser.choose(number, [lengths[row] for row in rows], chooser.previous).buckets
                plan = plan_mini_batch(rows, table, buckets, quadratic_cost=shape.quadratic_cost)
                mini_batch = collator.of_plan(plan, {row: examples[row - rows.start] for row in collator.rows_of(plan)})
                report = engine.forward_backward(mini_batch)
                engine.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                took = over_ranks(time.perf_counter() - begin)
                spent = over_ranks(time.process_time() - used, dist.ReduceOp.SUM)
                losses.append(report.loss)
                if side.name == "auto":
                    predicted = sum(phase.seconds for phase in chooser.predict(number, plan))
                    measured = {
                        s: PhaseSeconds(s, phase.compute_s, phase.moved_s)
                        for phase in report.phases
                        for s in (Strategy.parse(phase.strategy),)
                    }
                    refits += chooser.trained(number, plan, measured) is not None
                if number >= options.warmup:
                    seconds[side.name].append(took)
                    cpu[side.name].append(spent)
                    if side.name == "auto":
                        phases.append(" + ".join(str(p.bucket.strategy) for p in plan.phases))
                        errors.append(predicted / sum(phase.seconds for phase in report.phases) - 1)
            assert max(losses) - min(losses) < 0.5, losses  # the weights move a little from side to side
        return {
            "distribution": name,
            "limit_bytes": limit,
            "mini_batch_size": size,
            "tokens": sum(lengths) / rounds,
            "longest": longest,
            "again_of": f"static {choice.static.strategy}",
            "pool": ",".join(map(str, chooser.pool)),
            "predicted_gain": choice.static_seconds / choice.seconds,
            "phases": phases,
            "refits": refits,
            "prediction_error": statistics.median(map(abs, errors)),
            "seconds": seconds,
            "cpu": cpu,
        }

    found = [contest(name) for name in options.distributions]
    engine.close()
    return {"calibration_s": calibration_s, "rows": found}


def ratios(row: dict[str, Any], key: str) -> dict[str, Any]:
    """`auto` against the best static side: medians of paired ratios (below 1: auto is faster), and the noise."""
    sides = row[key]
    medians = {name: statistics.median(values) for name, values in sides.items()}
    best = min((name for name in medians if name not in ("auto", AGAIN)), key=lambda name: medians[name])

    def paired(a: str, b: str) -> list[float]:
        return [x / y for x, y in zip(sides[a], sides[b], strict=True)]

    twice = paired(AGAIN, row["again_of"])
    middle = statistics.median(twice)
    spread = 1.25 * statistics.median(abs(x - middle) for x in twice) / len(twice) ** 0.5
    return {
        "medians": medians,
        "best": best,
        "auto / best": statistics.median(paired("auto", best)),
        "auto / best of medians": medians["auto"] / medians[best],
        "noise": max(abs(middle - 1), spread),
    }


def compare_distributions(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the contests and prints them."""
    found: dict[str, Any] = run_world(options.ranks, measure, options)
    for row in found["rows"]:
        print_row(row)
    print(f"\ncalibration: {found['calibration_s']:.1f} s")
    return found


def print_row(row: dict[str, Any]) -> None:
    """One distribution."""
    wall, cpu = ratios(row, "seconds"), ratios(row, "cpu")
    row |= {"wall": wall, "cpu_time": cpu}
    print(
        f"\n{row['distribution']}: {row['mini_batch_size']} sequences, {row['tokens']:.0f} tokens a mini-batch, longest "
        f"{row['longest']}; {row['limit_bytes'] / 2**20:.0f} MiB a device\n  pool {row['pool']}; predicted gain {row['predicted_gain']:.2f}x, error of predictions "
        f"{row['prediction_error']:.0%}, {row['refits']} refits"
    )
    ran: Sequence[str] = row["phases"]
    print("  auto ran " + ", ".join(f"{ran.count(name)} x {name}" for name in sorted(set(ran))))
    width = max(map(len, wall["medians"]))
    print(f"  {'':{width}}  s/mini-batch  cpu s")
    for name in sorted(wall["medians"], key=lambda name: wall["medians"][name]):
        print(f"  {name:{width}}  {wall['medians'][name]:12.3f}  {cpu['medians'][name]:5.2f}")
    for title, side in (("wall", wall), ("cpu ", cpu)):
        print(
            f"  {title} auto takes {side['auto / best']:.3f} of {side['best']} (paired median; medians "
            f"{side['auto / best of medians']:.3f}), noise {side['noise']:.3f}",
            flush=True,
        )
