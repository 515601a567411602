"""How well the calibrated cost model predicts: every legal strategy on mini-batches of many lengths, on this machine.

    python benchmarks/cost_model.py --model 0.9M --json out/cost_model.json
    python benchmarks/cost_model.py --model 0.9M --model 7M --rounds 7 --patience 20
    python benchmarks/cost_model.py --model 7M --memory-only --memory-tokens 16384 --strategies tp4 tp4+sp tp4+rc tp4+sp+rc
    python benchmarks/cost_model.py --quick

A mini-batch holds sequences of one length (the last one holds a mixture), is packed as in training, and runs through the
engine under each strategy, in turn. Printed for each mini-batch: predicted and measured seconds (medians) of the phase,
switch included; Kendall's tau over the strategies; the regret of the strategy that the model holds for fastest; and the
mean absolute error beside the noise floor, the error of one half of the runs against the other. Then the memory of
the fullest rank, predicted and measured.

Other programs disturb: a run during which they took more than `--others` of the cores is made again, up to
`--patience` rounds, and the quietest runs count. The report says how busy the others were, and compares the processor
seconds of all ranks, too, which other programs hardly change.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contest import MODELS, check_runs_everywhere, make_model, model_config
from cost_report import TARGETS, compare_memory, print_memory, print_rows, processor_seconds, summarise
from result_file import write_json

from hf_hotspa.commands.bench.workload import make_rows
from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.memory import MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.search.tables import calibration_text
from hf_hotspa.strategy import Bucket, Strategy, legal_strategies

MEMORY_TOKENS = (512, 2048)


# -- what other programs do -------------------------------------------------------------------------------------------


def busy_seconds() -> float:
    """Processor seconds of everything on this machine since its start; 0 where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, soft, steal = map(int, fields)
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


@dataclass
class Quietness:
    """The share of the machine's cores that other programs took."""

    others: float = 0.0


@contextmanager
def watching() -> Iterator[Quietness]:
    """Watches the machine on all ranks of the world. Collective."""
    import torch
    import torch.distributed as dist

    found = Quietness()
    dist.barrier()
    begin, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
    yield found
    own_s = torch.tensor(time.process_time() - own, dtype=torch.float64)
    dist.all_reduce(own_s)
    taken = torch.tensor((busy_seconds() - busy - float(own_s)) / (time.perf_counter() - begin), dtype=torch.float64)
    dist.broadcast(taken, 0)
    found.others = max(0.0, float(taken) / len(os.sched_getaffinity(0)))


# -- measuring (runs on every rank) -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A mini-batch: its name and its sequences."""

    name: str
    lengths: tuple[int, ...]

    def bucket(self, strategy: Strategy, pack_tokens: int) -> Bucket:
        """All of it under one strategy."""
        return Bucket(strategy, max(self.lengths), max(pack_tokens, *self.lengths))


@dataclass(frozen=True)
class Run:
    """One run of a case: seconds of the phase, processor seconds of its packs on all ranks, and what others took."""

    compute_s: float
    switch_s: float
    cpu_s: float
    others: float


def measure(rank: int, world_size: int, options: argparse.Namespace, name: str, cases: list[Case]) -> Any:
    """`(calibration, runs by case and strategy, packs of each phase, sizes of the model)`; the work of one rank."""
    import torch
    import torch.distributed as dist

    from hf_hotspa.calibrate.model_calibration import calibrate
    from hf_hotspa.engine.engine import HotSPaEngine

    model = make_model(name)
    strategies = legal_strategies(world_size, _shape_of(model))
    engine = HotSPaEngine(model, [Bucket(s, edge, edge) for edge, s in enumerate(strategies, 1)])
    mini_batches = {
        (case.name, s): make_mini_batch(engine, case, s, options.pack_tokens) for case in cases for s in strategies
    }
    runs: dict[tuple[str, Strategy], list[Run]] = {key: [] for key in mini_batches}
    calibration = calibrate(model.config, cache=Path(options.cache), force=True)
    counted = {strategy: _count_seconds(engine.phases[strategy]) for strategy in strategies}
    say: Callable[..., None] = print if rank == 0 else lambda *_, **__: None
    for index in range(-1, options.patience):
        for key, mini_batch in mini_batches.items():
            done = runs[key]
            if sum(run.others <= options.others for run in done) >= options.rounds:
                continue
            with watching() as quiet:
                (phase,) = engine.forward_backward(mini_batch).phases
            cpu_s = torch.tensor(counted[key[1]].pop(), dtype=torch.float64)
            dist.all_reduce(cpu_s)
            if index >= 0:
                done.append(Run(phase.compute_s, phase.moved_s, float(cpu_s), quiet.others))
        missing = sum(sum(run.others <= options.others for run in done) < options.rounds for done in runs.values())
        say(f"{name}: round {index + 1}, {missing} of {len(runs)} still to run in quiet", flush=True)
        if index >= 0 and not missing:
            break
    phases = {
        key: [[pack.lengths for pack in packs] for packs in mini_batch.plan.phases[0].replicas]
        for key, mini_batch in mini_batches.items()
    }
    sizes = ModelSizes(engine.description.shape, "float32", vector=engine.description.vector)
    engine.close()
    return calibration, runs, phases, sizes


def calibrated(rank: int, world_size: int, options: argparse.Namespace, name: str) -> Any:
    """`(calibration, sizes of the model)`; the work of one rank."""
    from hf_hotspa.calibrate.model_calibration import calibrate
    from hf_hotspa.model.specs import describe_model

    model = make_model(name)
    description = describe_model(model)
    sizes = ModelSizes(description.shape, "float32", vector=description.vector)
    return calibrate(model.config, cache=Path(options.cache), force=True), sizes


def measure_memory(rank: int, world_size: int, options: argparse.Namespace, name: str) -> Any:
    """Bytes that packs take at most, on the fullest rank, by strategy and pack tokens; the work of one rank.

    Above what the process holds between mini-batches: libraries and connections take megabytes that models as small as
    these would drown in. What is alive counts, not what the C library keeps for later.
    """
    from hf_hotspa.calibrate.probe import freeing_at_once

    with freeing_at_once():
        return _measure_memory(world_size, options, name)


def _measure_memory(world_size: int, options: argparse.Namespace, name: str) -> Any:
    import torch
    import torch.distributed as dist

    from hf_hotspa.calibrate.probe import PeakMemory
    from hf_hotspa.engine.engine import HotSPaEngine

    memory, model = PeakMemory(torch.device("cpu")), make_model(name)
    if not memory.works:
        return {}
    strategies = list(map(Strategy.parse, options.strategies)) or legal_strategies(world_size, _shape_of(model))
    engine = HotSPaEngine(model, [Bucket(s, edge, edge) for edge, s in enumerate(strategies, 1)])
    peaks = {}
    for tokens in (64, *options.memory_tokens):  # the first only warms up
        for strategy in strategies:
            longest = min(tokens, model.config.max_position_embeddings)
            case = Case("memory", (longest,) * (tokens // longest) * strategy.dp * strategy.pp)
            mini_batch = make_mini_batch(engine, case, strategy, tokens)
            memory.start()
            engine.forward_backward(mini_batch)
            peak = torch.tensor(float(memory.stop()))
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
            peaks[strategy, tokens] = float(peak)
    engine.close()
    return {key: peak for key, peak in peaks.items() if key[1] in options.memory_tokens}


def make_mini_batch(engine: Any, case: Case, strategy: Strategy, pack_tokens: int) -> Any:
    """The case as the data loader would build it for this rank."""
    from hf_hotspa.data.collator import PackedBucketCollator

    shape, buckets = engine.description.shape, [case.bucket(strategy, pack_tokens)]
    collate = PackedBucketCollator(
        buckets, rank=engine.rank, vocab_size=shape.vocab_size, quadratic_cost=shape.quadratic_cost
    )
    return collate(make_rows(case.lengths, shape.vocab_size, seed=1))


def _count_seconds(runner: Any) -> list[float]:
    """Lets a phase note the processor seconds of each of its computations; returns the notes."""
    compute, notes = runner.compute, []

    def counting(*args: Any) -> Any:
        begin = time.process_time()
        found = compute(*args)
        notes.append(time.process_time() - begin)
        return found

    runner.compute = counting
    return notes


def _shape_of(model: Any) -> Any:
    from hf_hotspa.model.specs import describe_model

    shape = describe_model(model).shape
    check_runs_everywhere(shape)
    return shape


# -- both sides -------------------------------------------------------------------------------------------------------


def quietest(runs: Sequence[Run], count: int) -> list[Run]:
    """The runs during which others did least, in the order in which they were made."""
    chosen = sorted(range(len(runs)), key=lambda i: (runs[i].others, i))[:count]
    return [runs[i] for i in sorted(chosen)]


def compare(options: argparse.Namespace, name: str, cases: list[Case]) -> dict[str, Any]:
    """Measures one model and prints the comparison."""
    peaks = run_world(options.ranks, measure_memory, options, name) if options.memory_tokens else {}
    if options.memory_only:
        calibration, sizes = run_world(options.ranks, calibrated, options, name)
        memory = compare_memory(calibration, sizes, peaks)
        print_memory(memory)
        return {"model": name, "calibration": calibration.to_dict(), "memory": memory}
    calibration, all_runs, phases, sizes = run_world(options.ranks, measure, options, name, cases)
    time_model = calibration.time_model(sizes)
    strategies = list(dict.fromkeys(strategy for _, strategy in phases))
    switches = CostModel.of_calibration(calibration, sizes, MemoryOptions()).switch_seconds(strategies)
    print(f"\n{calibration_text(calibration)}")

    rows = []
    for case in cases:
        for strategy in strategies:
            key = case.name, strategy
            runs = quietest(all_runs[key], options.rounds)
            seconds = [run.compute_s + run.switch_s for run in runs]
            rows.append(
                {
                    "case": case.name,
                    "strategy": str(strategy),
                    "packs": sum(map(len, phases[key])),
                    "predicted_s": time_model.phase_seconds(strategy, phases[key]) + switches[strategy],
                    "measured_s": statistics.median(seconds),
                    "predicted_compute_s": time_model.phase_seconds(strategy, phases[key]),
                    "measured_compute_s": statistics.median(run.compute_s for run in runs),
                    "predicted_switch_s": switches[strategy],
                    "measured_switch_s": statistics.median(run.switch_s for run in runs),
                    "predicted_cpu_s": processor_seconds(time_model, strategy, phases[key]),
                    "measured_cpu_s": statistics.median(run.cpu_s for run in runs),
                    "halves_s": [statistics.median(seconds[half::2]) for half in (0, 1)],
                    "others": statistics.fmean(run.others for run in runs),
                    "all_seconds": seconds,
                }
            )
    summary = summarise(rows)
    print_rows(name, rows, summary)
    memory = compare_memory(calibration, sizes, peaks)
    print_memory(memory)
    return {
        "model": name,
        "calibration": calibration.to_dict(),
        "rows": rows,
        "summary": summary,
        "memory": memory,
    }


def make_cases(options: argparse.Namespace) -> list[Case]:
    """One mini-batch of each length, and a mixture of all of them; each of about the same number of tokens."""
    cases = [Case(str(length), (length,) * max(1, options.tokens // length)) for length in options.lengths]
    if len(options.lengths) > 1:
        share = options.tokens // len(options.lengths)
        mixed = [length for length in options.lengths for _ in range(max(1, share // length))]
        cases.append(Case("mixed", tuple(mixed)))
    return cases


def machine_facts(options: argparse.Namespace) -> dict[str, Any]:
    """What a number of this benchmark depends on."""
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "load_average": round(os.getloadavg()[0], 2),
        "ranks": options.ranks,
        "threads_per_rank": 1,
        "backend": "gloo",
        "torch": torch.__version__,
    }


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Predicted against measured.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated (default: 0.9M and 7M)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--patience", type=int, default=15, metavar="ROUNDS", help="most rounds, in search of quiet")
    parser.add_argument("--others", type=float, default=0.1, metavar="SHARE", help="of the cores: what counts as quiet")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=4096, help="of a mini-batch")
    parser.add_argument("--pack-tokens", type=int, default=1024, help="of a pack, where no sequence is longer")
    parser.add_argument("--memory-only", action="store_true", help="no seconds")
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=[],
        help="whose memory is measured, such as tp4 tp4+sp+rc; all without options",
    )
    parser.add_argument("--memory-tokens", type=int, nargs="*", default=list(MEMORY_TOKENS), help="of a pack")
    parser.add_argument("--cache", default=".cache/calibration", help="folder of calibrations")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    parser.add_argument("--json", metavar="FILE", help="also write everything to a file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.ranks, options.model, options.rounds, options.patience = 2, ["0.9M"], 2, 2
        options.lengths, options.tokens, options.pack_tokens, options.memory_tokens = [32, 64], 256, 128, [256]
    if options.rounds < 2 or options.patience < options.rounds:
        parser.error("--rounds must be at least 2, and --patience at least as many")
    options.model = options.model or ["0.9M", "7M"]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    facts = machine_facts(options)
    print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    cases = make_cases(options)
    for name in options.model:
        if max(options.lengths) > model_config(name).max_position_embeddings:
            raise SystemExit(f"the models have {model_config(name).max_position_embeddings} positions")
    result: dict[str, Any] = {
        "machine": facts,
        "options": vars(options),
        "targets": TARGETS,
        "models": [compare(options, name, cases) for name in options.model],
    }
    write_json(options.json, result)


if __name__ == "__main__":
    main()
