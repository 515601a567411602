"""Slow devices: what `hotspa_stragglers` makes of them, against no answer and against no slow device.

    python benchmarks/stragglers.py                                  # one slow rank of four
    python benchmarks/stragglers.py --part four                      # 8, 6, 4 and 2 times as slow on four of eight ranks
    python benchmarks/stragglers.py --part table                     # what migration costs where no rank is slow
    python benchmarks/stragglers.py --part stages                    # one slow stage of four, layers divided by speed
    HOTSPA_BENCHMARK_SLOW=2:3.5 python benchmarks/stragglers.py      # rank 2 takes 3.5 times as long

All sides in turn in one run: mini-batch by mini-batch, each with its own weights, optimizer and decisions, from the same start, on the
same rows. Every product of a linear that tp cuts sleeps for its size, on a slow rank `chi` times as long, so that the cores are never the
limit; under `dp4` and `pp4` every forward sleeps for its tokens and layers, three times as long as a product does (the backward is two more). Every side finds
the slow ranks by itself, by what its mini-batches measured, and the first ones are not counted. What it took to look at the variation of
weights (once a period) is not counted either. The numbers of the paper (arXiv 2401.11469: 8 V100, ViT-1B, tree collectives) stand
beside as ratios.
"""

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from result_file import command_line, given_options, write_json
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.features.slow_devices import giving as rates
from hf_hotspa.features.slow_devices.columns import Resizing
from hf_hotspa.features.slow_devices.device_step_time import DeviceStepTime
from hf_hotspa.features.slow_devices.flexible_linear import PRODUCTS, Exchange, ProductClock, flexible_works, give
from hf_hotspa.features.slow_devices.mode import GIVING, HandOver
from hf_hotspa.features.slow_devices.reaction import ColumnStatistics, pretest
from hf_hotspa.features.slow_devices.speeds import cut_by_speed, shares_by_speed
from hf_hotspa.layout.shares import shard_widths
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.pass_through import PassThrough
from hf_hotspa.model.replica import Replica
from hf_hotspa.packing.bucketing import Speeds, plan_mini_batch
from hf_hotspa.report import MEASURES
from hf_hotspa.rows.read_row import DEFAULT_RULES, read_row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.strategy import parse_buckets

SLOW = "HOTSPA_BENCHMARK_SLOW"
WARM, PERIOD, LENGTH, LEARNING_RATE = 4, 2, 16, 3e-3
PACKS = 16
"""Packs of a mini-batch of a pipeline."""
RECUT = ("pp recut", "tp recut")
"""Engines whose layers or MLPs are divided by speed."""
MIGRATION = {
    "migrate": Exchange.BROADCAST,
    "migrate, own reduces": Exchange.UNMERGED,
    "migrate, scatter and gather": Exchange.SCATTER,
}
RESIZING = {"resize Rd": "rd", "resize Pri": "pri", "resize PriDiffR": "pridiffr", "resize PriDiffE": "pridiffe"}
FOUR = (8.0, 6.0, 4.0, 2.0)
TABLE = {
    ("broadcast and reduce", 1): (1.139, 1.209, 1.268, 1.340),
    ("scatter and gather", 1): (1.282, 1.681, 2.134, 2.582),
    ("broadcast and reduce", 4): (1.976, 2.268, 2.676, 2.984),
    ("scatter and gather", 4): (2.088, 2.603, 3.212, 3.850),
}
"""Table I: seconds by those without migration, on GPUs of equal speed, for 1/4, 1/2, 3/4 and all columns of so many tasks."""
TABLE_SHARES = (0.25, 0.5, 0.75, 0.95)
PAPER = """the paper, one slow GPU of eight (Figs. 9, 10): without an answer the seconds of an epoch grow in proportion to chi; with Pri, PriDiffR and SEMI
nearly flat; at chi = 8 Pri is 3.5 times as fast as no answer, PriDiffE 2.1 times; PriDiffR up to 4 % below Pri (chi = 2);
migration alone is between, far from the ideal at large chi. Accuracy lost: Pri 1.3 %, PriDiffE 0.3 %; SEMI much less than PriDiffR."""
PAPER_FOUR = "the paper (Fig. 11, four of eight GPUs at chi = 8, 6, 4, 2): lambda = 0 is PriDiffR, 4 is migration alone, the best is 3."


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--part", choices=("one", "four", "table", "stages"), nargs="+", default=["one"])
    parser.add_argument("--chi", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--layers", type=int, default=4, help="layers of the model; of each stage with --part stages")
    parser.add_argument("--rows", type=int, default=64, help="rows of 16 tokens in a mini-batch")
    parser.add_argument("--rounds", type=int, default=3, help="mini-batches of each side that count")
    parser.add_argument("--usual", type=float, default=0.4, help="seconds of products of a usual rank in a mini-batch")
    options = parser.parse_args(arguments)
    if options.quick:
        options.chi, options.hidden, options.layers, options.rows = [4.0], [32], 1, 16
        options.layers += "stages" in options.part
        options.rounds, options.usual = 1, 0.05
    return options


def slow_rank(chi: float) -> tuple[int, float]:
    """The slow rank and how many times as long it takes; the environment may name both."""
    given = os.environ.get(SLOW)
    if not given:
        return 1, chi
    rank, times = given.split(":")
    return int(rank), float(times)


def make_model(
    hidden: int, layers: int, vocab_size: int = 64, longest: int = 64, num_heads: int = 4
) -> LlamaForCausalLM:
    """A decoder of the proportions of a ViT: an MLP of about four times the width, as many heads as it takes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
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
                mine = sum(not isinstance(layer, PassThrough) for layer in replica.layers)
                time.sleep(self._token_s * micro_batch.num_tokens * mine / len(replica.layers) * self.times)
            return forward(replica, micro_batch, *args, **kwargs)

        ProductClock.of, ProductClock.linear = product, whole  # type: ignore[method-assign]
        Replica.forward = forwards  # type: ignore[method-assign,assignment]


@dataclass(frozen=True)
class Answer:
    """One side.

    Args:
        strategy: tp, dp or pp. A further word names a separate engine, for a side that cuts pipelines or MLPs anew.
        mode: Of `hotspa_stragglers`.
        slow: Whether devices are slow.
        exchange: How columns migrate.
        columns: Which are left out.
        migrating: Of several slow ranks so many migrate, whatever equation 3 finds: the paper's lambda.
    """

    strategy: str
    mode: str = "off"
    slow: bool = True
    exchange: Exchange = Exchange.BROADCAST
    columns: str = "pri"
    migrating: int | None = None


class Measured:
    """The world of a benchmark on this rank: a model, an engine a strategy, rows, and the sleeps."""

    def __init__(self, rank: int, world_size: int, hidden: int, strategies: str, options: argparse.Namespace) -> None:
        self.rank, self.tokens = rank, options.rows * LENGTH
        layers = options.layers * (world_size if strategies.startswith("pp") else 1)
        self.model = make_model(hidden, layers, num_heads=max(world_size, 4))
        size = layers * (4 * hidden * hidden + 3 * hidden * 4 * hidden) * self.tokens * 3 // world_size
        self.sleep = Sleep(options.usual / size, options.usual * world_size / self.tokens)
        self.sleep.install()
        generator = torch.Generator().manual_seed(0)
        rows = [
            {"input_ids": torch.randint(0, 64, (LENGTH,), generator=generator).tolist()} for _ in range(options.rows)
        ]
        self.rows = [read_row(row, index, DEFAULT_RULES) for index, row in enumerate(rows)]
        self.table = SequenceTable.of_rows(self.rows, DEFAULT_RULES)
        self.engines = {
            name: HotSPaEngine(
                self.model,
                parse_buckets(
                    f"{name.split()[0]}{world_size}:{LENGTH}@{self.tokens // (PACKS if 'pp' in name else 1)}"
                ),
                EngineOptions(features=(HandOver(),)),
            )
            for name in strategies.split(",")
        }

    def close(self) -> None:
        """Ends the engines."""
        for engine in self.engines.values():
            engine.close()


class Side:
    """One way to answer, with its own weights and knowledge.

    Attributes:
        given: Shares that are handed over whatever is measured; None to decide.
        seconds: Of each mini-batch.
        found_after: The mini-batch after which all slow ranks were known.
        loss: Of the last mini-batch.
        shares: For each rank what it handed over and what it left out in the last mini-batch.
    """

    def __init__(self, world: Measured, answer: Answer, chis: Mapping[int, float]) -> None:
        self.world, self.answer, self.chis = world, answer, chis if answer.slow else {}
        self.engine = engine = world.engines[answer.strategy]
        self.step_time = DeviceStepTime(engine, answer.mode if answer.mode in GIVING else None)
        self.collate = PackedBucketCollator(engine.buckets, rank=world.rank, vocab_size=64)
        self.optimizer = torch.optim.AdamW(engine.parameter_groups(), lr=LEARNING_RATE)
        self.resizing = Resizing(answer.columns, "zero", PERIOD)
        self.statistics = ColumnStatistics(engine, self.resizing)
        self.weights = [w.clone() if w is not None else None for w in engine.master.weights]
        self.tensors: dict[str, torch.Tensor] = {}
        self.given: dict[str, tuple[float, ...]] | None = None
        self.seconds: list[float] = []
        self.found_after: int | None = None
        self.recut_s: list[float] = []
        self.loss, self.shares = 0.0, ""
        world.sleep.times = 1.0
        if answer.mode == "semi":
            assert self.step_time.giving is not None
            pretest(engine, self.step_time.giving)

    def step(self) -> None:
        """One mini-batch."""
        world, engine, number = self.world, self.engine, len(self.seconds)
        world.sleep.times = self.chis.get(world.rank, 1.0)
        for weight, own in zip(engine.master.weights, self.weights, strict=True):
            if weight is not None and own is not None:
                weight.copy_(own)
        for work in flexible_works(engine).values():
            work.exchange, work.resizing = self.answer.exchange, self.resizing
            work.give((0.0,) * work.size)
            work.resized = 0.0
        self.statistics.load(self.tensors)
        self.statistics.begin(number, PERIOD)
        giving = self.step_time.giving
        if giving is not None:
            give(engine, giving.shares, giving.resized)
        elif self.given is not None:
            give(engine, self.given)
        known = self.step_time.devices.speeds() if self.answer.mode == "balance" else None
        speeds = Speeds(known) if known is not None else None
        plan = plan_mini_batch(range(len(world.rows)), world.table, engine.buckets, speeds=speeds)
        mini_batch = self.collate.of_plan(plan, dict(enumerate(world.rows)))
        engine.agreement.barrier()
        begin = time.perf_counter()
        report = engine.forward_backward(mini_batch, number)
        self.seconds.append(time.perf_counter() - begin)
        self.shares = self._shares(report)
        report, _ = self.step_time.trained(plan, report)
        if self.found_after is None and self.chis and self.chis.keys() <= self.step_time.devices.slow:
            self.found_after = number + 1
        if self.answer.strategy in RECUT:
            self._recut()
        if giving is not None and self.answer.migrating is not None:
            with patch.object(rates, "num_migrating", lambda *_: self.answer.migrating):
                giving.decide(self.step_time.devices.known, self.step_time.devices.slow)
        elif giving is not None:
            giving.decide(self.step_time.devices.known, self.step_time.devices.slow)
        self.loss, self.tensors = report.loss, self.statistics.tensors()
        engine.clip_grad_norm_(1.0)
        self.optimizer.step()
        for weight, own in zip(engine.master.weights, self.weights, strict=True):
            if weight is not None and own is not None:
                own.copy_(weight)

    def _recut(self) -> None:
        """Divides layers, or MLPs, by what is known of the devices; what it takes is said, and not counted in a mini-batch."""
        engine, begin, speeds = self.engine, time.perf_counter(), self.step_time.devices.speeds()
        vector = engine.description.vector
        shares = shares_by_speed(vector, engine.phases, speeds)
        if engine.recut(cut_by_speed(vector.stage_costs, engine.phases, speeds), rank_times=shares):
            self.step_time.take_cut()
            self.recut_s.append(time.perf_counter() - begin)

    def _shares(self, report: Any) -> str:
        giving = self.step_time.giving
        if self.answer.strategy in RECUT:
            (strategy,), vector = self.engine.phases, self.engine.description.vector
            took = f", cut in {sum(self.recut_s):.2f} s" if self.recut_s else ""
            down = next(spec for spec in vector.specs if spec.name.endswith("down_proj.weight"))
            parts = shard_widths(vector, strategy, down, 0)
            if strategy.pp > 1:
                parts = tuple(len(stage) for stage in vector.stage_costs.stages(strategy.pp))
            return f"{'layers' if strategy.pp > 1 else 'columns'} {'+'.join(map(str, parts))}{took}"
        if giving is None or report.ranks is None:
            return ""
        (given,) = giving.shares.values()
        left = [row[0][MEASURES.index("left_out")] for row in report.ranks.phases]
        both = {rank: (given[rank], left[rank]) for rank in self.chis}
        return ", ".join(
            " + ".join([f"{g:.2f} migrates"] * (g > 0) + [f"{p:.2f} left out"] * (p > 0)) or "all"
            for g, p in both.values()
        )


def compared(world: Measured, answers: Mapping[str, Answer], chis: Mapping[int, float], rounds: int) -> dict[str, Any]:
    """What the sides took and came to, mini-batch by mini-batch in turn. Raises `SystemExit`: losses of exact sides differ."""
    sides = {name: Side(world, answer, chis) for name, answer in answers.items()}
    for _ in range(WARM + rounds):
        for side in sides.values():
            side.step()
    result: dict[str, Any] = {
        name: {
            "seconds": statistics.median(side.seconds[WARM:]),
            "all_seconds": side.seconds,
            "found_after": side.found_after,
            "loss": side.loss,
            "shares": side.shares,
            "strategy": side.answer.strategy.split()[0],
            "exact": side.answer.mode not in ("resize", "semi"),
        }
        for name, side in sides.items()
    }
    world.close()
    losses = [side["loss"] for side in result.values() if side["exact"]]
    if max(losses) - min(losses) > 1e-3 * losses[0]:
        raise SystemExit(f"the losses of exact sides differ: {losses}")
    return result


def ideal_ratio(chis: Sequence[float], world_size: int) -> float:
    """Seconds by those with no slow rank, of the best exact division: all work divided by speed."""
    return world_size / (sum(1.0 / chi for chi in chis) + world_size - len(chis))


def one_of_four(rank: int, world_size: int, hidden: int, chi: float, options: argparse.Namespace) -> dict[str, Any]:
    """One slow rank of four, every answer."""
    slow, times = slow_rank(chi)
    world = Measured(rank, world_size, hidden, "tp,dp,tp recut", options)
    answers = {"tp4: none slow": Answer("tp", slow=False), "tp4: off": Answer("tp")}
    answers |= {f"tp4: {name}": Answer("tp", "migrate", exchange=exchange) for name, exchange in MIGRATION.items()}
    answers |= {f"tp4: {name}": Answer("tp", "resize", columns=columns) for name, columns in RESIZING.items()}
    answers |= {"tp4: semi": Answer("tp", "semi"), "tp4: semi, PriDiffR": Answer("tp", "semi", columns="pridiffr")}
    answers |= {"tp4: balance (shares)": Answer("tp recut", "balance")}
    answers |= {
        "dp4: none slow": Answer("dp", slow=False),
        "dp4: off": Answer("dp"),
        "dp4: balance": Answer("dp", "balance"),
    }
    result = compared(world, answers, {slow: times}, options.rounds)
    # of all products for tp, of which `balance` divides the MLPs' alone; of sequences for dp
    ratio = ideal_ratio([times], world_size)
    ideal = {s: ratio * result[f"{s}4: none slow"]["seconds"] for s in ("tp", "dp")}
    what = f"hidden {hidden}, one of four ranks takes {times:g} times as long"
    return {"what": what, "ideal": ideal, "sides": result}


def stages_of_four(rank: int, world_size: int, hidden: int, chi: float, options: argparse.Namespace) -> dict[str, Any]:
    """One slow stage of four, whose layers go to the others."""
    slow, times = slow_rank(chi)
    world = Measured(rank, world_size, hidden, "pp,pp recut", options)
    answers = {"pp4: none slow": Answer("pp", slow=False), "pp4: off": Answer("pp")}
    answers |= {"pp4: balance": Answer("pp recut", "balance")}
    result = compared(world, answers, {slow: times}, options.rounds)
    ideal = ideal_ratio([times], world_size) * result["pp4: none slow"]["seconds"]
    what = f"hidden {hidden}, {options.layers * world_size} layers, one of four stages takes {times:g} times as long"
    return {"what": what, "ideal": {"pp": ideal}, "sides": result}


def four_of_eight(rank: int, world_size: int, hidden: int, options: argparse.Namespace) -> dict[str, Any]:
    """Four slow ranks of eight: lambda of them migrate, the others are resized."""
    world = Measured(rank, world_size, hidden, "tp", options)
    answers = {"tp8: none slow": Answer("tp", slow=False), "tp8: off": Answer("tp")}
    answers |= {f"tp8: lambda {x}": Answer("tp", "semi", migrating=x) for x in range(len(FOUR) + 1)}
    answers |= {"tp8: semi (equation 3)": Answer("tp", "semi")}
    result = compared(world, answers, dict(enumerate(FOUR)), options.rounds)
    ideal = ideal_ratio(FOUR, world_size) * result["tp8: none slow"]["seconds"]
    what = f"hidden {hidden}, four of eight ranks take 8, 6, 4 and 2 times as long"
    return {"what": what, "ideal": {"tp": ideal}, "sides": result}


def table_of_migration(rank: int, world_size: int, hidden: int, options: argparse.Namespace) -> dict[str, Any]:
    """Table I: no rank is slow, and columns migrate all the same."""
    world = Measured(rank, world_size, hidden, "tp", options)
    side = Side(world, Answer("tp"), {})
    exchanges = {"broadcast and reduce": Exchange.BROADCAST, "scatter and gather": Exchange.SCATTER}
    cells = {("none", 0, 0.0): []}
    cells |= {(name, nu, share): [] for name in exchanges for nu in (1, 4) for share in TABLE_SHARES}
    (strategy,) = side.engine.phases
    for number in range(options.rounds + 1):
        for (name, nu, share), seconds in cells.items():
            side.answer = Answer("tp", exchange=exchanges.get(name, Exchange.BROADCAST))
            side.given = {str(strategy): tuple(share if r < nu else 0.0 for r in range(world_size))}
            side.step()
            if number:
                seconds.append(side.seconds[-1])
    world.close()
    medians = {key: statistics.median(seconds) for key, seconds in cells.items()}
    whole = medians.pop(("none", 0, 0.0))
    by = [[*key, seconds, seconds / whole] for key, seconds in medians.items()]
    return {"what": f"hidden {hidden}, eight ranks of equal speed", "whole_s": whole, "cells": by}


def show(result: Mapping[str, Any]) -> None:
    """One configuration as a table."""
    print(f"\n{result['what']}")
    if "cells" in result:
        print(f"nothing given: {result['whole_s']:.3f} s a mini-batch; by it, and the paper's")
        for name, nu, share, seconds, ratio in result["cells"]:
            paper = TABLE[name, nu][TABLE_SHARES.index(share)]
            print(f"{name:<22}{nu} give {share:4.2f}{seconds:>10.3f} s{ratio:>8.3f}{paper:>8.3f}")
        return
    heads = ("s a mini-batch", "by none slow", "by ideal", "off by it", "found after", "loss")
    print(f"{'side':<34}" + "".join(f"{head:>15}" for head in heads) + "  shares of slow ranks")
    for name, side in result["sides"].items():
        prefix, seconds = name.split(":")[0], side["seconds"]
        none, off = (result["sides"][f"{prefix}: {other}"]["seconds"] for other in ("none slow", "off"))
        values = (f"{seconds:.3f}", f"{seconds / none:.2f}", f"{seconds / result['ideal'][side['strategy']]:.2f}")
        values += (f"{off / seconds:.2f}x", str(side["found_after"] or ""), f"{side['loss']:.4f}")
        exact = "" if side["exact"] else " (not exact)"
        print(f"{name + exact:<34}" + "".join(f"{value:>15}" for value in values) + f"  {side['shares']}")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    results = []
    for part in options.part:
        for hidden in options.hidden:
            if part in ("one", "stages"):
                for chi in options.chi:
                    by_chi = one_of_four if part == "one" else stages_of_four
                    results.append(run_world(4, by_chi, hidden, chi, options))
                    show(results[-1])
                continue
            measure = four_of_eight if part == "four" else table_of_migration
            results.append(run_world(8, measure, hidden, options))
            show(results[-1])
        if part != "stages":  # the paper has no pipelines
            print("\n" + {"one": PAPER, "four": PAPER_FOUR, "table": "the paper: Table I"}[part])
    result = {"options": given_options(options), "runs": results}
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
