"""Seconds per mini-batch: every static strategy that fits a token budget against hot-switched combinations.

    python benchmarks/step.py --ranks 4 --model 7M
    python benchmarks/step.py --ranks 4 --model 0.9M --dtype bf16 --rounds 5 --json out/step.json
    python benchmarks/step.py --hot dp4:512@1024,dp2tp2:2048,tp4:4096 --lengths lengths.json
    python benchmarks/step.py --trainer-overhead          # only the share of HotSPaTrainer outside the engine

All sides run in one set of processes, in turn (A, B, C, A, B, C, ...), on the same mini-batches and one set of weights, and
the median over the rounds is reported: the speed of a shared machine drifts by a fifth within minutes. A mini-batch counts
everything: planning and collating, switching, forward and backward, clipping, the AdamW step. Every side is packed, and
the sequences of a pack are isolated. Before timing, all sides run the first mini-batch from the same weights, and their losses must agree.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from worlds import run_world

from hf_hotspa.strategy import Bucket, Strategy, parse_buckets, strategies_of

MODELS = {  # hidden, intermediate, layers, vocabulary; 8 heads, 4 key/value heads
    "0.9M": (128, 384, 4, 512),
    "7M": (256, 768, 8, 2048),
    "46M": (512, 1536, 12, 8192),
}
DTYPES = ("fp32", "bf16")
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
OVERHEAD_TARGET = 0.05


def short_name(strategy: Strategy) -> str:
    """`dp2tp2` for `dp2tp2pp1`."""
    parts = [f"{axis}{getattr(strategy, axis)}" for axis in ("dp", "tp", "pp") if getattr(strategy, axis) > 1]
    return "".join(parts) or "dp1"


@dataclass(frozen=True)
class Side:
    """One contestant: a bucket list, static when it has one bucket."""

    name: str
    buckets: tuple[Bucket, ...]

    @property
    def is_static(self) -> bool:
        return len(self.buckets) == 1


@dataclass
class Timing:
    """What one side took in each round; seconds and bytes of a mini-batch.

    `wait` is the longest time that a rank waited for the busiest replica of a phase. `cpu` is processor time summed over
    ranks: blind to waiting, but steady where other programs take turns with the benchmark.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    data: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    give_back: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    switch_share: list[float] = field(default_factory=list)
    switch_bytes: int = 0
    num_packs: list[int] = field(default_factory=list)


def pack_limit(strategy: Strategy, budget: int, rule: str) -> int:
    """The largest pack of a strategy: the tokens that the ranks which share its activations may hold together."""
    return budget * strategy.tp * (strategy.pp if rule == "tp-pp" else 1)


def make_sides(options: argparse.Namespace, lengths: Sequence[int]) -> tuple[list[Side], list[str]]:
    """The contestants, and a line for each static strategy that does not fit."""
    from hf_hotspa.strategy import check_buckets

    longest = max(lengths)
    shape = describe(options).shape
    sides, left_out = [], []
    for strategy in strategies_of(options.ranks):
        limit = pack_limit(strategy, options.budget, options.budget_rule)
        if why := strategy.misfit(shape):
            left_out.append(f"{short_name(strategy)}: {why}")
        elif limit < longest:
            left_out.append(f"{short_name(strategy)}: its packs of {limit} tokens cannot hold a sequence of {longest}")
        else:
            sides.append(Side(f"static {short_name(strategy)}", (Bucket(strategy, longest, limit),)))
    texts = options.hot or default_hot(options, longest, sides)
    for text in texts:
        buckets = parse_buckets(text)
        check_buckets(buckets, options.ranks, shape)
        over = [str(b) for b in buckets if b.pack_tokens > pack_limit(b.strategy, options.budget, options.budget_rule)]
        name = "hot " + " + ".join(short_name(b.strategy) for b in buckets)
        if any(side.name == name for side in sides):
            name = f"hot {text}"  # the same strategies with other packs
        sides.append(Side(name + (" (over budget)" if over else ""), buckets))
    return sides, left_out


def default_hot(options: argparse.Namespace, longest: int, fitting: Sequence[Side]) -> list[str]:
    """Pure data parallelism up to the budget, then each static strategy that fits."""
    wide = Strategy(dp=options.ranks)
    if longest <= options.budget:
        return []
    return [
        f"{wide}:{options.budget},{bucket.strategy}:{bucket.longest}@{bucket.pack_tokens}"
        for side in fitting
        for bucket in side.buckets
        if bucket.strategy != wide
    ]


# -- the model and its data -------------------------------------------------------------------------------------------


def model_config(name: str) -> Any:
    """A Llama of the given size."""
    from transformers import LlamaConfig

    hidden, intermediate, layers, vocabulary = MODELS[name]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )


def describe(options: argparse.Namespace) -> Any:
    """The description of the model, without its weights."""
    import torch
    from transformers import LlamaForCausalLM

    from hf_hotspa.runtime.specs import describe_model

    with torch.device("meta"):
        return describe_model(LlamaForCausalLM(model_config(options.model)))


def make_model(name: str) -> Any:
    """Random weights in fp32, the same on every rank."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(model_config(name))


def make_rows(lengths: Sequence[int], vocabulary: int, seed: int) -> list[dict[str, list[int]]]:
    """Random rows in which small token ids are more frequent, so that there is something to learn."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        a, b = (torch.randint(0, vocabulary, (length,), generator=generator) for _ in range(2))
        rows.append({"input_ids": torch.minimum(a, b).tolist()})
    return rows


def mini_batch_lengths(options: argparse.Namespace) -> list[int]:
    """Tokens of each sequence of the mini-batch."""
    if options.lengths:
        lengths = [int(length) for length in json.loads(Path(options.lengths).read_text())]
        if not lengths:
            raise SystemExit(f"{options.lengths} holds no lengths")
        return lengths
    return [256] * options.num_short + [options.long]


# -- measuring (runs on every rank) -----------------------------------------------------------------------------------


def measure(rank: int, world_size: int, options: argparse.Namespace, sides: list[Side], lengths: list[int]) -> Any:
    """`(losses, gradient norms, timings)` by side; the work of one rank."""
    import torch
    import torch.distributed as dist

    from hf_hotspa.data.bucketing import plan_mini_batch
    from hf_hotspa.data.collator import PackedBucketCollator
    from hf_hotspa.data.scan import SequenceTable
    from hf_hotspa.runtime.engine import HotSPaEngine

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    # one engine knows the strategies of all sides: they share weights, optimizer and memory
    used = {bucket.strategy: bucket for side in sides for bucket in side.buckets}
    engine = HotSPaEngine(make_model(options.model), list(used.values()), compute_dtype=dtype)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.01), lr=1e-3, foreach=True)
    shape, table = engine.description.shape, SequenceTable.from_lengths(lengths)
    collator = PackedBucketCollator(rank, shape.vocab_size)

    def mini_batch_of(side: Side, rows: list[dict[str, list[int]]]) -> Any:
        plan = plan_mini_batch(range(len(rows)), table, side.buckets, quadratic_cost=shape.quadratic_cost)
        return collator(plan, {row: rows[row] for row in collator.rows_of(plan)})

    def over_ranks(seconds: float, how: Any = dist.ReduceOp.MAX) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, op=how)
        return float(value)

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
            timing.give_back.append(sum(phase.return_s for phase in report.phases))
            timing.switch_share.append(report.switch_s / seconds)
            timing.switch_bytes = report.switch_bytes
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


def measure_trainer(rank: int, world_size: int, options: argparse.Namespace, lengths: list[int], folder: str) -> Any:
    """`(wall seconds, engine seconds, steps)` of HotSPaTrainer's loop without its first step, on rank 0."""
    from transformers import TrainerCallback

    from hf_hotspa.trainer import HotSPaTrainer, HotSPaTrainingArguments

    class Clock(TrainerCallback):
        """The wall time from the beginning of step 2 to the end of the last one, and what of it was the engine's."""

        begin = end = inside = step_begin = 0.0
        steps = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for name in ("forward_backward", "clip_grad_norm_"):
                setattr(trainer.engine, name, self.counted(getattr(trainer.engine, name)))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                self.begin, self.inside = time.perf_counter(), 0.0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.step_begin = time.perf_counter()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.inside += time.perf_counter() - self.step_begin

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.end, self.steps = time.perf_counter(), state.global_step - 1

        def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
            """The function, its time counted as the engine's."""

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    self.inside += time.perf_counter() - begin

            return wrapped

    clock = Clock()
    longest, shortest = max(lengths), options.budget
    hot = f"{Strategy(dp=world_size)}:{shortest},{Strategy(tp=world_size)}:{longest}@{max(longest, shortest * world_size)}"
    strategies = hot if longest > shortest else f"{Strategy(dp=world_size)}:{shortest}"
    num_rows = -(-len(lengths) // world_size) * world_size
    padded = [*lengths, *[min(lengths)] * (num_rows - len(lengths))]
    vocabulary = MODELS[options.model][3]
    rows = [row for seed in range(2) for row in make_rows(padded, vocabulary, seed)]
    args = HotSPaTrainingArguments(
        output_dir=folder,
        hotspa_strategies=strategies,
        use_cpu=True,
        bf16=options.dtype == "bf16",
        max_steps=options.trainer_steps,
        per_device_train_batch_size=num_rows // world_size,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = HotSPaTrainer(model=make_model(options.model), args=args, train_dataset=rows, callbacks=[clock])
    trainer.train()
    return clock.end - clock.begin, clock.inside, clock.steps


# -- the report -------------------------------------------------------------------------------------------------------


def machine_facts(options: argparse.Namespace) -> dict[str, Any]:
    """What a number of this benchmark depends on."""
    import torch
    import transformers

    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "load_average": round(os.getloadavg()[0], 2),
        "ranks": options.ranks,
        "threads_per_rank": 1,
        "backend": "gloo",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


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
    reference = medians.get(f"static {short_name(Strategy(tp=ranks))}")

    rows = []
    for side in sides:
        timing, seconds = timings[side.name], medians[side.name]
        median = {
            key: statistics.median(value)
            for key, value in asdict(timing).items()
            if key not in ("seconds", "switch_bytes", "num_packs")
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
                "switch_bytes": timing.switch_bytes,
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
            f"  {row['tokens_per_second']:8.0f}  {row['medians']['switch_share']:6.1%}  {row['switch_bytes'] / 1e6:8.1f}"
            f"  {ratio(row['speedup_over_static_tp']):>5}  {ratio(row['speedup_over_best_static']):>13}"
            f"  {'+'.join(map(str, row['packs']))}"
        )
    print(f"\n{'ms':{width}}  {'data':>8} {'load':>8} {'compute':>8} {'wait':>8} {'return':>8} {'optimizer':>9}")
    for row in rows:
        parts = [row["medians"][key] * 1e3 for key in ("data", "load", "compute", "wait", "give_back", "optimizer")]
        print(f"{row['side']:{width}}  " + " ".join(f"{part:8.1f}" for part in parts[:-1]) + f" {parts[-1]:9.1f}")


def compare_steps(options: argparse.Namespace, lengths: list[int]) -> dict[str, Any]:
    """Runs the contest and prints it."""
    sides, left_out = make_sides(options, lengths)
    if options.only:
        sides = [side for side in sides if side.name in options.only]
    if not sides:
        raise SystemExit("no strategy fits:\n" + "\n".join(left_out))
    losses, timings = run_world(options.ranks, measure, options, sides, lengths)
    worst = check_losses(losses, options.dtype)
    rows = table_rows(sides, timings, sum(lengths), options.ranks)
    print_table(rows, options.ranks)
    for line in left_out:
        print(f"does not fit: {line}")
    print(f"\nfirst mini-batch, same weights: losses agree to {worst:.1e} (relative)")
    for name, (loss, norm) in losses.items():
        print(f"  {name:30s} loss {loss:.8f}  gradient norm {norm:.8f}")
    return {"rows": rows, "left_out": left_out, "losses": losses}


def trainer_overhead(options: argparse.Namespace, lengths: list[int]) -> dict[str, Any]:
    """Runs HotSPaTrainer and prints the time that it spends outside of engine and optimizer."""
    with tempfile.TemporaryDirectory(prefix="hotspa-bench-") as folder:
        wall, inside, steps = run_world(options.ranks, measure_trainer, options, lengths, folder)
    share = (wall - inside) / wall
    print(
        f"\nHotSPaTrainer, {steps} steps after the first: {wall / steps:.3f} s/step, of which"
        f" {(wall - inside) / steps * 1e3:.1f} ms outside of engine and optimizer = {share:.1%}"
        f" (target: at most {OVERHEAD_TARGET:.0%})"
    )
    return {"steps": steps, "seconds_per_step": wall / steps, "share_outside": share, "target": OVERHEAD_TARGET}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Static strategies against hot switching.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
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
    parser.add_argument("--only", action="append", metavar="SIDE", help="run only this side (its name in the table)")
    parser.add_argument("--lengths", help="JSON file: the list of the sequence lengths of a mini-batch")
    parser.add_argument("--num-short", type=int, default=64, help="sequences of 256 tokens, without --lengths")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the one long sequence, without --lengths")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="print rank 0's cProfile")
    parser.add_argument("--trainer-overhead", action="store_true", help="measure HotSPaTrainer instead")
    parser.add_argument("--trainer-steps", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="also write everything to a file")
    options = parser.parse_args()
    if options.rounds < 1 or options.ranks < 1 or options.trainer_steps < 2:
        parser.error("--rounds and --ranks must be at least 1, --trainer-steps at least 2")
    return options


def main() -> None:
    options = parse_options()
    lengths = mini_batch_lengths(options)
    facts = machine_facts(options)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(
        f"model {options.model} {options.dtype}; mini-batch of {len(lengths)} sequences, {sum(lengths)} tokens, longest "
        f"{max(lengths)}; budget {options.budget} x {options.budget_rule.replace('-', ' x ')} tokens per pack;"
        f" {options.rounds} rounds",
        flush=True,
    )
    run = trainer_overhead if options.trainer_overhead else compare_steps
    result = {"machine": facts, "options": vars(options), "lengths": lengths, **run(options, lengths)}
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
