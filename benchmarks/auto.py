r"""Whether `auto` is as fast as the best static strategy, after its race: `python benchmarks/auto.py --seed 7`.

    python benchmarks/auto.py --seed 7 --cells 4x-0 --minutes 90     # some cells, by expressions for their names; resumes where it ended
    python benchmarks/auto.py --seed 7 --table                        # what is known so far
    python benchmarks/auto.py --published --cells '2x-7M-fp32-\w+$'  # models and length files of side_by_side.py instead

Cells are model shapes x length distributions, both drawn from the seed, x with and without a limit of memory x 2 and 4 ranks. In
each the Trainer runs under `auto` until the race of its plans is over, as the first mini-batches of a run of `--steps`. Then `auto`
(the plan that stayed), all static strategies that fit with the packs that the search finds best for them, and the computation alone run the same
mini-batches in turn, forward and backward; sides far behind are left out after two. Printed is the median of the ratios of `auto`
to the best static strategy over mini-batches, with the interval of `search/race.py`: at most 1.02, or the interval reaches 1.

Computation alone: the packs of data parallelism on one process a core at a time, no communication, no optimizer. With more
ranks than cores ranks take turns. Balanced computation: the same seconds of all ranks, shared equally by the cores; so much a
plan could take at best. Results are kept by cell in `out/auto-SEED.json`.
"""

import argparse
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from contest import make_model
from result_file import command_line, write_json

from hf_hotspa.commands.bench.workload import LENGTHS, draw, make_rows, rows_of_mini_batch
from hf_hotspa.commands.rank_world import WorldError, run_world

MOST = 1.02
"""`auto` over the best static strategy."""
ALONE = ("computation alone", "balanced computation")
"""Sides that do nothing but compute the packs of data parallelism: until the last rank is done, and with equal work for all cores."""
_LIMIT = 1.15
"""A limit of memory, over the least that a static strategy of plain degrees needs for the longest sequence."""


def shapes(seed: int) -> list[dict[str, int]]:
    """Two Llamas: a small one and one of several million parameters."""
    rng, drawn = np.random.default_rng([seed, 0]), list[dict[str, int]]()
    for widths, layers in (((96, 128, 160), (4, 6)), ((192, 256, 320), (6, 8, 10))):
        hidden = int(rng.choice(widths))
        drawn.append(
            {
                "vocab_size": int(rng.choice((512, 1024, 2048))),
                "hidden_size": hidden,
                "intermediate_size": hidden * int(rng.integers(2, 4)),
                "num_hidden_layers": int(rng.choice(layers)),
                "num_attention_heads": 8,
                "num_key_value_heads": int(rng.choice((2, 4, 8))),
                "max_position_embeddings": 8192,
            }
        )
    return drawn


def distribution(seed: int, number: int, count: int, longest: int) -> list[int]:
    """Lengths of a distribution, in random order: log-normal, of two kinds of rows, or even, with parameters from the seed."""
    rng = np.random.default_rng([seed, 1, number])
    kind, median, sigma = number % 3, float(rng.uniform(0.03, 0.25)), float(rng.uniform(0.4, 1.5))
    share, low = float(rng.uniform(0.01, 0.2)), float(rng.uniform(0.02, 0.5))
    lengths = longest * median * np.exp(sigma * rng.standard_normal(count))
    if kind == 1:
        short = longest * median / 2 * np.exp(0.4 * rng.standard_normal(count))
        lengths = np.where(rng.random(count) < share, longest * rng.uniform(0.6, 1.0, count), short)
    if kind == 2:
        lengths = longest * rng.uniform(low, 1.0, count)
    return [int(length) for length in np.clip(lengths, 16, longest)]


def cells(options: argparse.Namespace) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The name of each cell, its ranks, and what it trains."""
    drawn: list[tuple[str, dict[str, Any]]] = [
        (f"{number}-{lengths}", {"shape": shape, "distribution": lengths})
        for number, shape in enumerate(shapes(options.seed))
        for lengths in range(6)
    ]
    if options.published:
        drawn = [
            (f"{model}-{dtype}-{name.replace(' ', '_')}", {"model": model, "dtype": dtype, "lengths": name})
            for model, dtype, name in product(("0.9M", "7M"), ("fp32", "bf16"), LENGTHS)
        ]
    for ranks, (name, cell), limited in product((2, 4), drawn, (False, True)):
        yield f"{ranks}x-{name}" + ("-limit" if limited else ""), ranks, {**cell, "limited": limited}


def run_cell(rank: int, world_size: int, cell: dict[str, Any], options: argparse.Namespace, folder: str) -> Any:
    """One cell, on each rank."""
    import bf16_products
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    from hf_hotspa.search.race import Race
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    os.environ["HF_HOTSPA_CACHE"] = folder
    torch.manual_seed(0)
    if options.published:
        if cell["dtype"] == "bf16":
            bf16_products.install()
        model, lengths = make_model(cell["model"]), draw(cell["lengths"], 4096, options.longest, seed=1)
        size = rows_of_mini_batch(cell["lengths"], options.longest, options.tokens, world_size)
    else:
        model = LlamaForCausalLM(LlamaConfig(**cell["shape"]))
        lengths = distribution(options.seed, cell["distribution"], 4096, options.longest)
        size = max(1, round(options.tokens / float(np.mean(lengths)) / world_size)) * world_size
    rows = make_rows(lengths[: max(40 * size, 1024)], model.config.vocab_size, options.seed)

    class UntilRaced(TrainerCallback):
        """Notes seconds, and ends the training when plans are no longer tried."""

        def __init__(self) -> None:
            self.seconds, self.race_line, self.first = list[float](), "", 0.0

        def on_step_report(self, args: Any, state: Any, control: Any, report: Any, **kwargs: Any) -> None:
            self.first = self.first or time.perf_counter() - begin
            self.seconds.append(report.all_ranks_s)
            self.race_line = str(report.race or self.race_line)
            if report.race is not None:
                self.cost = report.race.cost

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not trainer._hotspa.watchers.plan.choices.race.is_on

    def arguments(limit: int | None) -> Any:
        return HotSPaTrainingArguments(
            output_dir=folder, max_steps=options.steps, hotspa_mini_batch_size=size, hotspa_memory_limit_mb=limit, use_cpu=True,
            save_strategy="no", report_to=[], logging_strategy="no", disable_tqdm=True, hotspa_report=False, hotspa_staging_mb=4,
            bf16=cell.get("dtype") == "bf16",
        )  # fmt: skip

    raced_runs, observe = list[Any](), Race.observe

    def observed(race: Race, seconds: float, predicted: Sequence[float], warm: bool) -> Any:
        raced_runs.append([race.plan, seconds, [float(each) for each in predicted], warm])
        return observe(race, seconds, predicted, warm)

    Race.observe = observed  # type: ignore[method-assign]
    noted, begin = UntilRaced(), time.perf_counter()
    limit, beyond_dp = None, 0.0
    if cell["limited"]:
        limit, held_by_dp = least_limit(model, arguments(None), options.longest)
        beyond_dp = sum(length for length in lengths if length > held_by_dp) / sum(lengths)
    trainer = HotSPaTrainer(model=model, args=arguments(limit), train_dataset=rows, callbacks=[noted])
    trainer.train()
    found = compare(trainer, options.repeats, os.cpu_count() or 1, options.published)
    trainer.close_engine()
    auto = trainer._hotspa.watchers.plan.choices
    raced = [" + ".join(str(bucket.strategy) for bucket in pool) for pool in (auto.plan.pool, *auto.plan.raced)]
    kept = raced[auto.race.plan]
    cost = getattr(noted, "cost", 0.0)
    return {"limit_mb": limit, "beyond_dp": beyond_dp, "rows": size, "plans": raced, "kept": kept, "race": noted.race_line, "cost": cost,
            "first_step_s": noted.first, "runs": raced_runs, **found}  # fmt: skip


def least_limit(model: Any, args: Any, longest: int) -> tuple[int, int]:
    """A limit, in MiB, that makes strategies which hold the longest sequence rare, and the tokens of the longest
    sequence that data parallelism holds within it. Collective."""
    import torch

    from hf_hotspa.calibrate.model_calibration import Procedure, calibrate
    from hf_hotspa.model.specs import describe_model
    from hf_hotspa.strategy import Strategy, legal_strategies
    from hf_hotspa.trainer.run_plan import START_S, cost_model

    description = describe_model(model, torch.bfloat16 if args.bf16 else None)
    plain = legal_strategies(args.world_size, description.shape)
    dtype = description.compute_dtype
    calibration = calibrate(
        model.config, strategies=plain, compute_dtype=dtype, procedure=Procedure(longest=longest, seconds=START_S)
    )
    memory = cost_model(calibration, description, args).memory
    limit = math.ceil(_LIMIT * min(memory.breakdown(s, longest, num_packs=1).total for s in plain) / 2**20)
    return limit, memory.largest_pack(Strategy(args.world_size), limit * 2**20, longest=None)


def is_plain(strategy: Any) -> bool:
    """Whether a strategy is dp x tp x pp, perhaps with `+sp` and `+rc`."""
    return bool(strategy.cp == strategy.ep == strategy.v == 1 and not strategy.z and not strategy.ck)


def is_static_plain(side: str) -> bool:
    """Whether a side of a cell is one such strategy."""
    from hf_hotspa.strategy import Strategy

    return side not in ("switching", *ALONE) and is_plain(Strategy.parse(side))


def compare(trainer: Any, repeats: int, cores: int, also_plain: bool) -> dict[str, Any]:
    """Seconds of each side, by mini-batch: `auto`, static strategies, and the computation alone. Collective.

    Args:
        also_plain: Whether the fastest plain strategy of each degrees runs beside the fastest one.
    """
    from hf_hotspa.strategy import Strategy
    from hf_hotspa.switched.model_object import as_built
    from hf_hotspa.trainer import gain

    world_size = trainer.args.world_size
    hot = gain._switching(trainer)
    kinds, plain = dict[Any, Any](), dict[Any, Any]()
    for bucket in gain._singles(trainer, hot).fitting:  # the fastest as predicted first
        s = bucket.strategy
        kinds.setdefault((s.dp, s.cp, s.tp, s.pp), bucket)
        if also_plain and is_plain(s):
            plain.setdefault((s.dp, s.tp, s.pp), bucket)
    sides = [
        hot,
        *(gain.Side(str(bucket.strategy), (bucket,)) for bucket in dict.fromkeys([*kinds.values(), *plain.values()])),
    ]
    alone, longest = Strategy(world_size), max(bucket.longest for bucket in hot.buckets)
    packs = kinds[world_size, 1, 1, 1].pack_tokens if (world_size, 1, 1, 1) in kinds else longest
    known = [*sides, gain.Side("alone", (replace(hot.buckets[-1], strategy=alone, low=0),))]
    trainer._hotspa.model.refresh()
    with as_built(trainer.model):
        engine = gain._engine(trainer, known)
    batches = gain._first_mini_batches(trainer, engine, hot, repeats)
    seconds, _ = gain._take_turns(engine, sides, batches, repeats, trainer)
    of_dp = gain.Side("alone", (replace(known[-1].buckets[0], longest=longest, pack_tokens=max(packs, longest)),))
    seconds |= zip(ALONE, computed_alone(engine, of_dp, batches, repeats, cores), strict=True)
    engine.close()
    chosen = {bucket.strategy for bucket in hot.buckets} if len(hot.buckets) == 1 else set()
    return {
        "single": [str(s) for s in chosen],
        "seconds": {n: each for n, each in seconds.items() if len(each) == repeats},
        "behind": {n: each for n, each in seconds.items() if 0 < len(each) < repeats},
    }


def computed_alone(engine: Any, side: Any, batches: Sequence[Any], repeats: int, cores: int) -> list[list[float]]:
    """Seconds of the packs of data parallelism, a process on each core at a time: as they end, and if all cores had
    an equal share of the work. Collective."""
    from hf_hotspa.data.collator import PackedBucketCollator
    from hf_hotspa.switched.passes import Exchange

    (bucket,), shape = side.buckets, engine.description.shape
    collator = PackedBucketCollator(
        engine.buckets, rank=engine.rank, vocab_size=shape.vocab_size, quadratic_cost=shape.quadratic_cost
    )
    exchange, runner = Exchange(engine.agreement, engine.world_size), engine.phases[bucket.strategy]
    ended, balanced = list[float](), list[float]()
    for number in range(-1, repeats):
        documents = batches[max(number, 0) % len(batches)]
        _, mini_batch = documents.plan(range(len(documents)), side.buckets, None, collator, exchange)
        (phase,) = mini_batch.phases
        runner.load()
        took = np.zeros(2)
        for first in range(0, engine.world_size, cores):
            engine.agreement.barrier()
            begin = time.perf_counter()
            if first <= engine.rank < first + cores:
                runner.compute(phase.micro_batches, 1.0)
            of_ranks = engine.agreement.gather([time.perf_counter() - begin])
            took += of_ranks.max(), of_ranks.sum() / cores
        runner.return_gradients()
        if number >= 0:
            ended.append(float(took[0]))
            balanced.append(float(took[1]))
    return [ended, balanced]


def verdict(cell: dict[str, Any]) -> dict[str, Any]:
    """What follows from the seconds of a cell."""
    from hf_hotspa.search.race import _middle

    seconds = dict(cell["seconds"])
    hot, alone, balanced = (np.array(seconds.pop(name)) for name in ("switching", *ALONE))
    own = [name for name in seconds if name in cell["single"]]  # what auto runs is this one: no side to compare with
    others = {name: each for name, each in seconds.items() if name not in own}
    # all others far behind: compared on the mini-batches that they ran
    others = others or {name: each for name, each in cell.get("behind", {}).items() if name not in own}
    seconds = others or seconds
    best = min(seconds, key=lambda name: float(np.median(seconds[name])))
    rival = np.array(seconds[best])
    middle, low, high = (math.exp(value) for value in _middle(np.log(hot[: len(rival)] / rival).tolist()))
    fits = middle <= MOST or low <= 1.0
    compared, left_early = (
        [float(np.median(np.array(each) / hot[: len(each)])) for name, each in sides.items() if is_static_plain(name)]
        for sides in (cell["seconds"], cell.get("behind", {}))
    )
    return {"best": best, "ratio": middle, "low": low, "high": high, "alone": float(np.median(alone / hot)), "ok": fits,
            "plain": min(compared or left_early, default=None), "balanced": float(np.median(balanced / hot))}  # fmt: skip


def table(results: dict[str, Any], steps: int) -> str:
    """All cells, and how many hold."""
    lines = [
        "| cell | kept of how many plans | best static | auto by best static | interval | race, % of the run | alone by auto | best plain static by auto | tokens dp does not hold, % | |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    verdicts = {name: verdict(cell) for name, cell in sorted(results.items()) if "seconds" in cell}
    for name, v in verdicts.items():
        cell = results[name]
        plain = "-" if v["plain"] is None else f"{v['plain']:.2f}"
        numbers = [
            f"{v['ratio']:.3f}", f"{v['low']:.2f} to {v['high']:.2f}", f"{100 * cell['cost'] / steps:.2f}",
            f"{v['alone']:.2f}", plain, f"{100 * cell.get('beyond_dp', 0.0):.0f}", "ok" if v["ok"] else "BEHIND",
        ]  # fmt: skip
        lines.append(f"| {name} | {cell['kept']} of {len(cell['plans'])} | {v['best']} | {' | '.join(numbers)} |")
    lines += [f"| {name} | {cell['error']} |||||||||" for name, cell in sorted(results.items()) if "error" in cell]
    ok, ratios = sum(v["ok"] for v in verdicts.values()), [v["ratio"] for v in verdicts.values()]
    if ratios:
        mean = geometric_mean(ratios)
        lines.append(f"\n{ok} of {len(verdicts)} cells hold; geometric mean of auto by best static {mean:.3f}")
    mixed = [v for name, v in verdicts.items() if v["plain"] and 0.2 <= results[name].get("beyond_dp", 0.0) <= 0.8]
    if mixed:
        lines.append(
            f"{len(mixed)} cells have 20 to 80 % of their tokens in sequences that dp does not hold: "
            f"best plain static by auto {geometric_mean(v['plain'] for v in mixed):.3f}, "
            f"by balanced computation {geometric_mean(v['plain'] / v['balanced'] for v in mixed):.3f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs cells that have not run yet, and prints all."""
    parser = command_line(__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--published", action="store_true", help="models and length files of side_by_side.py, no seed")
    parser.add_argument(
        "--cells",
        nargs="+",
        default=[""],
        help="expressions, one of which their names must hold (RANKSx-SHAPE-LENGTHS[-limit], RANKSx-MODEL-DTYPE-LENGTHS[-limit])",
    )
    parser.add_argument("--tokens", type=int, help="of a mini-batch, about; 12,000, or 3,072 with --published")
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=200, help="of the run whose first mini-batches are raced")
    parser.add_argument("--repeats", type=int, default=8, help="mini-batches that are compared")
    parser.add_argument("--minutes", type=float, default=90, help="after which no cell begins")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.longest, options.steps, options.repeats = 512, 256, 60, 2
    if (options.seed is None) != options.published:
        parser.error("give --seed or --published")
    options.tokens = options.tokens or (3072 if options.published else 12000)
    path = options.json or Path("out") / f"auto-{'published' if options.published else options.seed}.json"
    options.seed = options.seed or 0
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    end = time.monotonic() + 60 * options.minutes
    for name, ranks, cell in cells(options) if not options.table else ():
        if name in results or not any(re.search(part, name) for part in options.cells) or time.monotonic() > end:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[name] = run_world(ranks, run_cell, cell, options, folder)
            except WorldError as error:
                results[name] = {"error": str(error).strip().splitlines()[-1]}
        write_json(path, results)
    print(table(results, options.steps))
    return results


if __name__ == "__main__":
    main()
