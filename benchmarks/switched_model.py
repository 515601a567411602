"""A step through `SwitchedModel` beside the engine's own loop: what it costs that each rank has its own batch and its own loss.

    python benchmarks/switched_model.py
    python benchmarks/switched_model.py --model 0.9M --rounds 9 --json out/switched_model.json
    python benchmarks/switched_model.py --profile 30

All sides train the same rows on the same ranks, with one set of weights, and one optimizer:

* `raw loop`: every rank reads all rows, `PackedBucketCollator` makes a mini-batch of them, `engine.forward_backward`;
* `loss`: each rank has its part of the rows as a padded batch, `model(**batch).loss` and its backward;
* `scores`: the same with a loss that is not linear in log-probabilities, of `model(**batch, fused_lm_head=True)` (needs trl).

Sides take turns, each round another one first; a turn is one step that does not count, and `--steps` that do. A step counts
everything: collating, reading, planning, switching, forward and backward, clipping, the AdamW step. Before timing, the losses of
all ways of the same rows and weights must agree.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from contest import MODELS, make_model, mini_batch_lengths
from result_file import write_json
from step import machine_facts

from hf_hotspa.commands.bench.workload import make_rows
from hf_hotspa.commands.rank_world import run_world

RAW = "raw loop"
SIDES = {RAW: None, "loss": 1.02, "scores": 1.40}
"""The sides, and what each may take of the raw loop."""
TOLERANCE = 1e-5
PARTS = ("data", "forward", "backward", "flush", "optimizer")

Rows = list[dict[str, list[int]]]


@dataclass
class Timing:
    """What one side took, a list of steps for each round.

    `seconds` are the slowest rank's. `cpu` is processor time summed over ranks: blind to waiting, but steady where other
    programs take turns with the benchmark. `parts` are rank 0's. Bytes are the last step's.
    """

    seconds: list[list[float]] = field(default_factory=list)
    cpu: list[list[float]] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    bytes: dict[str, int] = field(default_factory=dict)


def num_labels(rows: Rows) -> int:
    """All tokens of a step that are predicted."""
    return sum(len(row["input_ids"]) - 1 for row in rows)


# -- measuring (runs on every rank) -----------------------------------------------------------------------------------


class Loops:
    """The loops of all sides on one rank, around one switched model and its engine."""

    def __init__(self, rank: int, world_size: int, options: argparse.Namespace) -> None:
        import torch

        from hf_hotspa.data.collator import PackedBucketCollator
        from hf_hotspa.strategy import parse_buckets
        from hf_hotspa.switched.model import SwitchedModel

        self.rank, self.world_size = rank, world_size
        buckets = parse_buckets(options.strategies)
        self.model = SwitchedModel(make_model(options.model), buckets).train()
        self.engine = engine = self.model.engine
        groups = engine.parameter_groups(weight_decay=0.01)
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=True)
        shape = engine.description.shape
        self.collate = PackedBucketCollator(
            buckets, rank=rank, vocab_size=shape.vocab_size, quadratic_cost=shape.quadratic_cost
        )
        self.clock: dict[str, float] = {}

    def batch_of(self, rows: Rows) -> dict[str, Any]:
        """This rank's part of the rows, padded to one length."""
        import torch

        mine = [row["input_ids"] for row in rows[self.rank :: self.world_size]]
        width = max((len(ids) for ids in mine), default=1)

        def padded(values: list[list[int]], pad: int) -> Any:
            return torch.tensor([each + [pad] * (width - len(each)) for each in values]).reshape(len(values), width)

        mask = padded([[1] * len(ids) for ids in mine], 0)
        return {"input_ids": padded(mine, 0), "labels": padded(mine, -100), "attention_mask": mask}

    def loss_of(self, batch: dict[str, Any], rows: Rows, by_scores: bool) -> Any:
        """This rank's loss. Gradients are means over ranks, so a sum over ranks is multiplied by their number."""
        if not by_scores:
            return self.model(**batch, num_items_in_batch=num_labels(rows)).loss * self.world_size
        log_probs = self.model(**batch, fused_lm_head=True).log_probs
        of_row = log_probs.sum(1) / (batch["attention_mask"].sum(1) - 1)
        return (of_row**2).sum() * self.world_size / len(rows)

    def turn(self, name: str, of_steps: Sequence[Rows], after: Callable[[int], None]) -> None:
        """Steps of one side.

        Args:
            after: Called after each step, with its index.
        """
        for index, rows in enumerate(of_steps):
            self.clock = {"begin": time.perf_counter()}
            if name == RAW:
                mini_batch = self.collate(rows)
                self._tick("data")
                self.report = self.engine.forward_backward(mini_batch)
                self._tick("forward", "backward")
                self.engine.clip_grad_norm_(1.0)
            else:
                batch = self.batch_of(rows)
                self._tick("data")
                loss = self.loss_of(batch, rows, name == "scores")
                self._tick("forward")
                loss.backward()
                self._tick("backward")
                self.model.clip_grad_norm_(1.0)
                self.report = self.model.report
            self._tick("flush")
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._tick("optimizer")
            after(index)

    def _tick(self, *parts: str) -> None:
        """What went by since the last tick was the first of these parts."""
        now = time.perf_counter()
        self.clock[parts[0]] = now - self.clock["begin"] - sum(self.clock.get(part, 0.0) for part in PARTS)
        for other in parts[1:]:
            self.clock[other] = 0.0

    def losses(self, rows: Rows) -> dict[str, tuple[float, float]]:
        """The mean cross entropy of the same rows from the same weights, by every way, and the norm of its gradient."""
        report = self.engine.forward_backward(self.collate(rows))
        found, batch = {RAW: (report.loss, report.grad_norm)}, self.batch_of(rows)
        for way in ("loss", "scores"):
            if way == "loss":
                loss = self.loss_of(batch, rows, by_scores=False)
            else:
                log_probs = self.model(**batch, fused_lm_head=True).log_probs
                loss = -log_probs.sum() * self.world_size / num_labels(rows)
            loss.backward()
            self.model.flush()
            found[way] = self.over_ranks(loss.item() / self.world_size), self.engine.grad_norm
        self.model.zero_grad()
        return found

    def over_ranks(self, value: float, largest: bool = False) -> float:
        """The sum over all ranks, or the largest."""
        import torch
        import torch.distributed as dist

        number = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(number, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return float(number)


def measure(rank: int, world_size: int, options: argparse.Namespace, lengths: list[int]) -> Any:
    """`(losses, timings)` by side; the work of one rank."""
    import torch.distributed as dist

    loops = Loops(rank, world_size, options)
    vocabulary = loops.engine.description.shape.vocab_size
    losses = loops.losses(make_rows(lengths, vocabulary, seed=1))
    timings = {name: Timing() for name in SIDES}
    names, profiles = list(SIDES), {name: _profile(options, rank) for name in SIDES}
    for round_index in range(-options.warmup, options.rounds):
        seed = 2 + (options.warmup + round_index) * (options.steps + 1)
        of_steps = [make_rows(lengths, vocabulary, seed + step) for step in range(options.steps + 1)]
        first = round_index % len(names)
        for name in names[first:] + names[:first]:
            seconds, cpu = list[float](), list[float]()
            timing, begin = timings[name], time.process_time()

            def after(
                index: int,
                name: str = name,
                timing: Timing = timing,
                seconds: list[float] = seconds,
                cpu: Any = cpu,
                counts: bool = round_index >= 0,
            ) -> None:
                nonlocal begin
                taken = time.perf_counter() - loops.clock["begin"]
                cpu.append(loops.over_ranks(time.process_time() - begin))
                seconds.append(loops.over_ranks(taken, largest=True))
                if counts and index:
                    timing.engine.append(loops.report.total_s)
                    for part in PARTS:
                        timing.parts[part].append(loops.clock[part])
                if counts and not index and profiles[name] is not None:
                    profiles[name].enable()
                dist.barrier()
                begin = time.process_time()

            loops.turn(name, of_steps, after)
            if profiles[name] is not None:
                profiles[name].disable()
            report = loops.report
            timing.bytes = {"switches": report.moved_bytes} | {
                kind: getattr(report, f"{kind}_bytes") for kind in ("rows", "numbers", "seeds")
            }
            if round_index >= 0:
                timing.seconds.append(seconds[1:])
                timing.cpu.append(cpu[1:])
    loops.model.close()
    _print_profiles(options, profiles)
    return losses, timings


def _profile(options: argparse.Namespace, rank: int) -> Any:
    """A profile of rank 0, when it is asked for."""
    import cProfile

    return cProfile.Profile() if options.profile and not rank else None


def _print_profiles(options: argparse.Namespace, profiles: dict[str, Any]) -> None:
    import pstats

    for name, profile in profiles.items():
        if profile is not None:
            print(f"== {name}, {options.rounds * options.steps} steps", file=sys.stderr)
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(options.profile)


# -- the report -------------------------------------------------------------------------------------------------------


def check_losses(losses: dict[str, tuple[float, float]]) -> float:
    """The largest relative difference of loss or norm of the gradient from the raw loop.

    Raises:
        SystemExit: it is above the tolerance.
    """
    pairs = [(value, of_raw) for found in losses.values() for value, of_raw in zip(found, losses[RAW], strict=True)]
    worst = max(abs(value - of_raw) / abs(of_raw) for value, of_raw in pairs)
    if not worst <= TOLERANCE:
        raise SystemExit(f"the sides disagree: losses and gradient norms {losses}, relative difference {worst:.1e}")
    return worst


def ratios_of(timings: dict[str, Timing]) -> dict[str, dict[str, float]]:
    """Of each side but the raw loop what it took of it: of the medians over all steps, and the median over rounds of what
    stands in one round."""
    found: dict[str, dict[str, float]] = {}
    for name, timing in timings.items():
        if name == RAW:
            continue
        found[name] = {}
        for kind in ("seconds", "cpu"):
            mine, raw = getattr(timing, kind), getattr(timings[RAW], kind)
            found[name][kind] = _median(mine) / _median(raw)
            of_rounds = [sum(one) / sum(other) for one, other in zip(mine, raw, strict=True)]
            found[name][f"{kind}, by round"] = statistics.median(of_rounds)
    return found


def _median(of_rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(value for of_round in of_rounds for value in of_round)


def print_results(timings: dict[str, Timing], ratios: dict[str, dict[str, float]]) -> None:
    """Seconds, ratios beside their aims, where the time goes, and bytes."""
    width = max(map(len, timings))
    print(f"\n{'':{width}}  s/step   (min .. max)    cpu s  / raw  by round  cpu / raw  by round   aim")
    for name, timing in timings.items():
        seconds = [value for of_round in timing.seconds for value in of_round]
        line = f"{name:{width}}  {_median(timing.seconds):6.3f}  {min(seconds):6.3f} .. {max(seconds):6.3f}  {_median(timing.cpu):6.3f}"
        if name in ratios:
            one, aim = ratios[name], SIDES[name]
            assert aim is not None
            line += f"  {one['seconds']:5.3f}  {one['seconds, by round']:8.3f}  {one['cpu']:9.3f}  {one['cpu, by round']:8.3f}"
            line += f"  {aim:4.2f} {'yes' if one['seconds, by round'] <= aim else 'NO'}"
        print(line)
    print(f"\n{'ms of rank 0':{width}}  " + " ".join(f"{part:>9}" for part in (*PARTS, "engine")))
    for name, timing in timings.items():
        parts = [statistics.median(values) * 1e3 for values in (*timing.parts.values(), timing.engine)]
        print(f"{name:{width}}  " + " ".join(f"{part:9.1f}" for part in parts))
    print(f"\n{'KB of a step':{width}}  " + " ".join(f"{kind:>9}" for kind in timings[RAW].bytes))
    for name, timing in timings.items():
        print(f"{name:{width}}  " + " ".join(f"{size / 1e3:9.1f}" for size in timing.bytes.values()))


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", choices=MODELS, default="7M", help="parameters of the Llama")
    parser.add_argument(
        "--strategies", help="dp over all ranks for rows within the budget, and tp for the rest, when left out"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of a side in a round, beside one that does not count")
    parser.add_argument("--warmup", type=int, default=1, help="untimed rounds")
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a pack of each rank")
    parser.add_argument("--lengths", help="JSON file: the list of the sequence lengths of a mini-batch")
    parser.add_argument(
        "--num-short", type=int, default=32, help="rows of 256 tokens (or the budget), without --lengths"
    )
    parser.add_argument("--long", type=int, default=2048, help="tokens of the one long row, without --lengths")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="print rank 0's cProfile of each side")
    parser.add_argument("--quick", action="store_true", help="a few seconds: less of everything")
    parser.add_argument("--json", metavar="FILE", help="also write everything to a file")
    options = parser.parse_args(arguments)
    if min(options.ranks, options.rounds, options.steps) < 1:
        parser.error("--ranks, --rounds and --steps must be at least 1")
    if options.quick:
        options.model, options.rounds, options.steps, options.warmup, options.budget = "0.9M", 2, 1, 0, 64
        options.num_short, options.long = 8, 128
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    lengths, ranks = mini_batch_lengths(options), options.ranks
    if not options.strategies:
        short, longest = min(options.budget, max(lengths)), max(lengths)
        options.strategies = f"dp{ranks}:{short}@{options.budget}"
        if longest > short:
            options.strategies += f",tp{ranks}:{longest}@{max(longest, options.budget * ranks)}"
    facts = machine_facts(options)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(
        f"model {options.model} fp32; {options.strategies}; {len(lengths)} rows, {sum(lengths)} tokens a step, longest"
        f" {max(lengths)}; {options.rounds} rounds of {options.steps} steps",
        flush=True,
    )
    losses, timings = run_world(ranks, measure, options, lengths)
    worst, ratios = check_losses(losses), ratios_of(timings)
    print_results(timings, ratios)
    print(f"\nsame rows, same weights: losses and gradient norms agree to {worst:.1e} (relative)")
    result = {
        "machine": facts,
        "options": vars(options),
        "lengths": lengths,
        "losses": losses,
        "sides": {name: asdict(timing) for name, timing in timings.items()},
        "ratios": ratios,
        "aims": SIDES,
    }
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
