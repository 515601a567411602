"""One slow device of four: what `hotspa_stragglers` makes of it, against no answer and against no slow device.

    python benchmarks/stragglers.py
    python benchmarks/stragglers.py --chi 4 --hidden 128 --json out/stragglers.json
    HOTSPA_BENCHMARK_SLOW=2:3.5 python benchmarks/stragglers.py      # rank 2 takes 3.5 times as long

Four processes, all sides in turn on the same weights and rows, in one run. Every product of a linear that tp cuts sleeps
for its size, on the slow rank `chi` times as long, so that the cores are never the limit; under `dp4` every forward sleeps for its
tokens, three times as long as a product does (the backward is two more). Every side finds the slow rank by itself, by what its
mini-batches measured, and the first ones are not counted. The numbers of the paper (arXiv 2401.11469, Table I: 8 GPUs, tree
collectives) stand beside as ratios.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from worlds import run_world

from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.replica import Replica
from hf_hotspa.packing.bucketing import plan_mini_batch
from hf_hotspa.parallel.flexible_work import Exchange
from hf_hotspa.parallel.waiting import PRODUCTS, ProductClock
from hf_hotspa.rows.features import DEFAULT_RULES, read_row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.stragglers.modes import GIVING
from hf_hotspa.strategy import parse_buckets

SLOW = "HOTSPA_BENCHMARK_SLOW"
RANKS, WARM = 4, 4
MIGRATION = {
    "migrate": Exchange.BROADCAST,
    "migrate, own reduces": Exchange.UNMERGED,
    "migrate, scatter and gather": Exchange.SCATTER,
}
PAPER = {"broadcast and reduce": 1.268, "scatter and gather": 2.134}
"""Table I, one slow task, half of its columns: seconds by those without migration, on GPUs of equal speed."""


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chi", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="rows of 16 tokens in a mini-batch")
    parser.add_argument("--rounds", type=int, default=3, help="mini-batches of each side that count")
    parser.add_argument("--usual", type=float, default=0.3, help="seconds of products of a usual rank in a mini-batch")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.chi, options.hidden, options.layers, options.rows = [4.0], [32], 1, 16
        options.rounds, options.usual = 1, 0.05
    return options


def slow_rank(chi: float) -> tuple[int, float]:
    """The slow rank and how many times as long it takes; the environment may name both."""
    given = os.environ.get(SLOW)
    if not given:
        return 1, chi
    rank, times = given.split(":")
    return int(rank), float(times)


def make_model(hidden: int, layers: int, vocab_size: int = 64, longest: int = 64) -> LlamaForCausalLM:
    """A decoder of the proportions of a ViT: an MLP of about four times the width, as many heads as it takes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=vocab_size,
        max_position_embeddings=longest,
    )
    model = LlamaForCausalLM(config).train()
    model.config.use_cache = False
    return model


class Sleep:
    """Makes products, and forwards without tp, take as long as on a slower device.

    Attributes:
        times: How many times as long this rank takes now.
    """

    def __init__(self, product_s: float, token_s: float) -> None:
        self.times, self._product_s, self._token_s = 1.0, product_s, token_s

    def install(self) -> None:
        """For the rest of this process."""
        plain, linear, forward = ProductClock.of, ProductClock.linear, Replica.forward

        def wait(rows: int, columns: int, outputs: int) -> None:
            with PRODUCTS.waiting:
                time.sleep(self._product_s * rows * columns * outputs * self.times)

        def product(clock: ProductClock, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            wait(*a.shape, b.shape[1])
            return plain(clock, a, b)

        def whole(clock: ProductClock, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            wait(*x.shape, w.shape[0])
            return linear(clock, x, w, bias)

        def forwards(replica: Replica, micro_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if replica.mesh.strategy.tp == 1:
                time.sleep(self._token_s * micro_batch.num_tokens * self.times)
            return forward(replica, micro_batch, *args, **kwargs)

        ProductClock.of, ProductClock.linear = product, whole  # type: ignore[method-assign]
        Replica.forward = forwards  # type: ignore[method-assign,assignment]


def measure(rank: int, world_size: int, hidden: int, chi: float, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each side; on every rank, and the same on all."""
    slow, times = slow_rank(chi)
    model = make_model(hidden, options.layers)
    tokens = options.rows * 16
    size = options.layers * (4 * hidden * hidden + 3 * hidden * 4 * hidden) * tokens * 3 // RANKS
    sleep = Sleep(options.usual / size, options.usual * RANKS / tokens)
    sleep.install()
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(0, 64, (16,), generator=generator).tolist()} for _ in range(options.rows)]
    read = [read_row(row, index, DEFAULT_RULES) for index, row in enumerate(rows)]
    table = SequenceTable.of_rows(read, DEFAULT_RULES)
    engines = {
        name: HotSPaEngine(model, parse_buckets(f"{name}:16@{tokens}"), EngineOptions(flexible=True))
        for name in ("tp4", "dp4")
    }
    sides: dict[str, Callable[[], float]] = {}
    found: dict[str, list[float]] = {}
    detected: dict[str, int] = {}
    losses: dict[str, float] = {}

    def add(name: str, strategy: str, chi: float, answer: str, exchange: Exchange = Exchange.BROADCAST) -> None:
        engine = engines[strategy]
        pace = engine.device_pace(answer if answer in GIVING else None)
        collate = PackedBucketCollator(engine.buckets, rank=rank, vocab_size=64)
        steps = 0

        def step() -> float:
            nonlocal steps
            steps += 1
            sleep.times = chi if rank == slow else 1.0
            speeds = pace.devices.speeds() if answer == "balance" else None
            plan = plan_mini_batch(range(len(rows)), table, engine.buckets, speeds=speeds)
            for runner in engine.phases.values():
                if (work := runner.replica.flexible) is not None:
                    work.exchange = exchange
                    work.give((0.0,) * work.size)
                    work.resized = 0.0
            if pace.giving is not None:
                engine.give(pace.giving.shares, pace.giving.to_nobody)
            mini_batch = collate.of_plan(plan, dict(enumerate(read)))
            engine.agreement.barrier()
            begin = time.perf_counter()
            report = engine.forward_backward(mini_batch, steps - 1)
            seconds = time.perf_counter() - begin
            report, event = pace.trained(plan, report)
            if event is not None and slow in event.slow:
                detected.setdefault(name, steps)
            if pace.giving is not None:
                pace.giving.decide(pace.devices.known, pace.devices.slow)
            losses[name] = report.loss
            return seconds

        sides[name], found[name] = step, []

    for strategy in engines:
        add(f"{strategy}: none slow", strategy, 1.0, "off")
        add(f"{strategy}: off", strategy, times, "off")
    for name, exchange in MIGRATION.items():
        add(f"tp4: {name}", "tp4", times, "migrate", exchange)
    add("tp4: resize (not exact)", "tp4", times, "resize")
    add("dp4: balance", "dp4", times, "balance")
    for number in range(WARM + options.rounds):
        for name, step in sides.items():
            seconds = step()
            if number >= WARM:
                found[name].append(seconds)
    for engine in engines.values():
        engine.close()
    exact = [loss for name, loss in losses.items() if "not exact" not in name]
    if max(exact) - min(exact) > 1e-4 * losses["tp4: off"]:
        raise SystemExit(f"the losses differ: {losses}")
    medians = {name: statistics.median(values) for name, values in found.items()}
    # the best of any division: none of the products for tp, which gives them to three others; sequences for dp
    ideal = {"tp4": times * RANKS / (times * (RANKS - 1) + 1), "dp4": times * RANKS / (times * (RANKS - 1) + 1)}
    return {
        "hidden": hidden,
        "chi": times,
        "seconds": medians,
        "all_seconds": found,
        "ideal": {name: ratio * medians[f"{name}: none slow"] for name, ratio in ideal.items()},
        "found_after": detected,
        "loss": losses,
    }


def show(result: dict[str, Any]) -> None:
    """One configuration as a table."""
    print(f"\nhidden {result['hidden']}, one rank takes {result['chi']:g} times as long")
    print(f"{'side':<34}{'s a mini-batch':>16}{'by none slow':>14}{'by ideal':>10}{'found after':>13}")
    for name, seconds in result["seconds"].items():
        strategy = name.split(":")[0]
        none, ideal = result["seconds"][f"{strategy}: none slow"], result["ideal"][strategy]
        after = result["found_after"].get(name, "")
        print(f"{name:<34}{seconds:>16.3f}{seconds / none:>14.2f}{seconds / ideal:>10.2f}{after!s:>13}")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    results = []
    for hidden in options.hidden:
        for chi in options.chi:
            results.append(run_world(RANKS, measure, hidden, chi, options))
            show(results[-1])
    print(
        "\nthe paper, no slow GPU, half of one task's columns given away, by none given: "
        + ", ".join(f"{name} {ratio}" for name, ratio in PAPER.items())
    )
    given = {key: value for key, value in vars(options).items() if key != "json"}
    result = {"options": given, "runs": results}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
