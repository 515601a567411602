"""Wall time of one long pack through two pipeline stages, whole and in chunks of tokens, beside the simulator's.

    python benchmarks/token_pipeline.py
    python benchmarks/token_pipeline.py --tokens 16384 --chunk 2048 --layers 4 --json out/token_pipeline.json

Two processes, one run, both sides in turn on the same weights and tokens: a Llama with the proportions of Llama-3.2-1B, in
fp32 on CPU. The seconds of every forward and backward of each stage are recorded; `costs.time` makes a timeline of
them, which is compared with the wall time, and one of four stages, each with half the layers. The losses must agree to 1e-4.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from result_file import write_json

from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.costs.time import Pipeline, pipeline_seconds
from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.packing.cuts import cut_for
from hf_hotspa.packing.pipeline_order import choose_passes
from hf_hotspa.parallel.pipeline import Pack
from hf_hotspa.strategy import Bucket, Strategy


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=2048, help="the most tokens of a chunk")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 256; 2048 is Llama-3.2-1B")
    parser.add_argument(
        "--pair-cost", type=float, help="cost of a pair of tokens relative to one; measured when left out"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.chunk, options.layers, options.repeats = 512, 128, 2, 1
    return options


def _timed(log: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        log.append(time.perf_counter() - begin)
        return result

    return call


def run_side(
    rank: int, world_size: int, options: argparse.Namespace, chunk: int, pair_cost: float
) -> dict[str, Any] | None:
    """Wall seconds of the fastest repetition, the loss, and the seconds of each pass by stage, in the order of tokens."""
    from long_sequences import make_model

    model = make_model(options.hidden, options.layers, options.tokens)
    bucket = Bucket(Strategy(pp=world_size, ck=chunk), options.tokens, options.tokens)
    engine = HotSPaEngine(model, [bucket], EngineOptions(pair_costs={1: pair_cost}))
    collate = PackedBucketCollator([bucket], rank=rank, vocab_size=model.config.vocab_size)
    ids = torch.randint(
        0, model.config.vocab_size, (options.tokens,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    forward, backward = list[float](), list[float]()
    Pack.forward = _timed(forward, Pack.forward)  # type: ignore[method-assign]
    Pack.backward = _timed(backward, Pack.backward)  # type: ignore[method-assign]
    best: tuple[float, float, list[float], list[float]] | None = None
    for turn in range(options.repeats + 1):
        forward.clear()
        backward.clear()
        mini_batch = collate([{"input_ids": ids, "labels": ids}])
        dist.barrier()
        report = engine.forward_backward(mini_batch)
        # of the phase alone: loads and returns are the same for both sides
        seconds = max(report.phases[0].compute_s, 0.0)
        if turn and (best is None or seconds < best[0]):
            best = seconds, float(report.loss), [*forward], [*backward][::-1]
    assert best is not None
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, best)
    engine.close()
    if rank:
        return None
    return {
        "seconds": max(each[0] for each in gathered),
        "loss": sum(each[1] for each in gathered) / world_size,
        "forward": [each[2] for each in gathered],
        "backward": [each[3] for each in gathered],
    }


def simulated(side: dict[str, Any], chains: Sequence[int], num_stages: int) -> float:
    """Seconds of the timeline; of more stages than were measured, each with its share of the layers."""
    share = len(side["forward"]) / num_stages
    each = num_stages // len(side["forward"])
    forward, backward = (
        [[t * share for t in times] for times in side[name] for _ in range(each)] for name in ("forward", "backward")
    )
    total = len(forward[0])
    passes = choose_passes("own", [1] * total, num_stages, None, chains if total > 1 else ())
    return pipeline_seconds(Pipeline(forward, backward, [0.0] * total, passes.reach, passes.depth, passes.chains))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    pair_cost = options.pair_cost
    if pair_cost is None:  # t(x) = b x + a x^2 of the chunks of equal tokens, see `packing.cuts`
        first = run_world(2, run_side, options, options.chunk, 0.0)
        pair_cost = _pair_cost(first, options)
    whole = run_world(2, run_side, options, 0, pair_cost)
    sliced = run_world(2, run_side, options, options.chunk, pair_cost)
    if abs(whole["loss"] - sliced["loss"]) > 1e-4 * whole["loss"]:
        raise SystemExit(f"the losses differ: {whole['loss']} and {sliced['loss']}")
    cut = cut_for(Strategy(pp=2, ck=options.chunk), [options.tokens], pair_cost)
    chains = [len(chain) for chain in cut]
    result = {
        "options": {k: v for k, v in vars(options).items() if k != "json"},
        "pair_cost": pair_cost,
        "chunks": [stop - start for chain in cut for start, stop in chain],
        "pp2": {"whole": whole, "chunks": sliced, "speedup": whole["seconds"] / sliced["seconds"]},
        "simulated": {
            f"pp{stages}": {"whole": simulated(whole, (), stages), "chunks": simulated(sliced, chains, stages)}
            for stages in (2, 4)
        },
    }
    print(
        f"{options.tokens} tokens in {sum(chains)} chunks of {result['chunks']} (a pair of tokens costs {pair_cost:.2e})"
    )
    for name, side in (("whole", whole), ("chunks", sliced)):
        timeline = result["simulated"]["pp2"][name]
        print(
            f"pp2 {name:>6}: {side['seconds']:7.2f} s, simulated {timeline:7.2f} s ({timeline / side['seconds'] - 1:+.1%})"
        )
    four = result["simulated"]["pp4"]
    print(
        f"pp2 measured {result['pp2']['speedup']:.2f} times as fast in chunks; pp4 simulated {four['whole'] / four['chunks']:.2f} times"
    )
    write_json(options.json, result)
    return result


def _pair_cost(side: dict[str, Any], options: argparse.Namespace) -> float:
    """From the seconds of chunks of equal tokens: by how much the last takes longer than the first."""
    times = [sum(pair) for pair in zip(*side["forward"], *side["backward"], strict=True)]
    ends = [(i + 1) * options.tokens / len(times) for i in range(len(times))]
    half = len(times) // 2
    early, late = (statistics.fmean(times[part]) for part in (slice(0, half), slice(half, None)))
    size = options.tokens / len(times)
    # a chunk of x tokens behind L costs b x + a (2 L x + x^2)
    mean_early, mean_late = (statistics.fmean(ends[part]) for part in (slice(0, half), slice(half, None)))
    a = max(0.0, (late - early) / (2 * size * (mean_late - mean_early)))
    b = (statistics.fmean(times) - a * size * (2 * statistics.fmean(ends) - size)) / size
    return a / b if b > 0 else 0.0


if __name__ == "__main__":
    main()
