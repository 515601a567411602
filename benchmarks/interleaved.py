"""A few packs through two pipeline ranks, with one stage on each and with two (`+v2`), beside the simulator.

    python benchmarks/interleaved.py
    python benchmarks/interleaved.py --packs 4 --tokens 2048 --layers 16 --json out/interleaved.json

Two processes, both sides in turn on the same weights and packs: a Llama with the proportions of Llama-3.2-1B, in fp32 on CPU.
When each pass of each stage began and ended is recorded: printed are wall seconds, idle over busy seconds of the ranks beside
(p - 1) / (v m), and the seconds that `costs.pipelines` finds for the means of the measured passes. Losses must agree to 1e-4.
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
from worlds import run_world

from hf_hotspa.costs.pipelines import Pipeline, pipeline_seconds
from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.packing.interleaved_order import interleaved_order
from hf_hotspa.packing.pipeline_order import reaches
from hf_hotspa.parallel import token_chunks
from hf_hotspa.strategy import Bucket, Strategy

ROUNDS = (1, 2)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="of each pack")
    parser.add_argument("--layers", type=int, default=8, help="a multiple of 4, so that stages take about as long")
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 256; 2048 is Llama-3.2-1B")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.layers, options.hidden, options.repeats = 64, 4, 256, 1
    return options


Pass = tuple[int, bool, float, float]
"""Which of the rank's stages, whether it is backward, and when it began and ended, in seconds."""


def _recorded(log: list[Pass], parts: dict[int, int], is_backward: bool, function: Callable[..., Any]) -> Any:
    def call(chunk: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = function(chunk, stage, *args, **kwargs)
        log.append((parts[id(stage)], is_backward, begin, time.perf_counter()))
        return result

    return call


def run_side(rank: int, world_size: int, options: argparse.Namespace, rounds: int) -> dict[str, Any] | None:
    """The fastest repetition: wall seconds, the loss, idle over busy seconds, and mean seconds of the passes of each stage."""
    from long_sequences import make_model

    model = make_model(options.hidden, options.layers, options.tokens)
    bucket = Bucket(Strategy(pp=world_size, v=rounds), options.tokens, options.tokens)
    engine = HotSPaEngine(model, [bucket], EngineOptions())
    (runner,) = engine.phases.values()
    parts = {id(part): index for index, part in enumerate(runner.parts)}
    log: list[Pass] = []
    chunk = token_chunks.Chunk
    chunk.forward = _recorded(log, parts, False, chunk.forward)  # type: ignore[method-assign]
    chunk.backward = _recorded(log, parts, True, chunk.backward)  # type: ignore[method-assign]
    collate = PackedBucketCollator([bucket], rank=rank, vocab_size=model.config.vocab_size)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (options.packs, options.tokens), generator=draw).tolist()
    best: dict[str, Any] | None = None
    for turn in range(options.repeats + 1):
        log.clear()
        mini_batch = collate([{"input_ids": row, "labels": row} for row in ids])
        dist.barrier()
        report = engine.forward_backward(mini_batch)
        mine = _summary(log, rounds)
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, mine)
        begin, end = min(each["begin"] for each in gathered), max(each["end"] for each in gathered)
        if turn and (best is None or end - begin < best["seconds"]):
            busy = sum(each["busy"] for each in gathered)
            best = {
                "seconds": end - begin,
                "loss": float(report.loss),
                "idle over busy": (world_size * (end - begin) - busy) / busy,
                **{
                    name: [each[name][part] for part in range(rounds) for each in gathered]
                    for name in ("forward", "backward")
                },
            }
    engine.close()
    return None if rank else best


def _summary(log: Sequence[Pass], rounds: int) -> dict[str, Any]:
    """Begin, end and busy seconds of a rank (one clock for all processes of a machine), and means of its stages' passes."""
    mean = {
        kind: [
            statistics.fmean(end - begin for part, is_back, begin, end in log if (part, is_back) == (index, kind))
            for index in range(rounds)
        ]
        for kind in (False, True)
    }
    return {
        "begin": min(begin for *_, begin, _ in log),
        "end": max(end for *_, end in log),
        "busy": sum(end - begin for *_, begin, end in log),
        "forward": mean[False],
        "backward": mean[True],
    }


def simulated(side: dict[str, Any], num_packs: int, rounds: int) -> float:
    """Seconds of the timeline of passes that take what was measured."""
    forward, backward = ([[seconds] * num_packs for seconds in side[name]] for name in ("forward", "backward"))
    reach, hops = reaches([1] * num_packs), [0.0] * num_packs
    order = interleaved_order([1] * num_packs, 2, rounds) if rounds > 1 else ()
    return pipeline_seconds(Pipeline(forward, backward, hops, reach, rounds=rounds, order=order))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    sides: dict[str, Any] = {}
    for rounds in ROUNDS:
        side = run_world(2, run_side, options, rounds)
        side["simulated"] = simulated(side, options.packs, rounds)
        side["formula"] = 1 / (rounds * options.packs)
        sides[str(Strategy(pp=2, v=rounds))] = side
    plain, twice = sides.values()
    if abs(plain["loss"] - twice["loss"]) > 1e-4 * plain["loss"]:
        raise SystemExit(f"the losses differ: {plain['loss']} and {twice['loss']}")
    result = {
        "options": {k: v for k, v in vars(options).items() if k != "json"},
        "sides": sides,
        "speedup": plain["seconds"] / twice["seconds"],
        "simulated speedup": plain["simulated"] / twice["simulated"],
    }
    print(f"{options.packs} packs of {options.tokens} tokens, {options.layers} layers")
    for name, side in sides.items():
        print(
            f"{name:>12}: {side['seconds']:7.3f} s, simulated {side['simulated']:7.3f} s; idle over busy"
            f" {side['idle over busy']:.3f}, (p - 1) / (v m) {side['formula']:.3f}"
        )
    print(f"+v2 is {result['speedup']:.2f} times as fast, simulated {result['simulated speedup']:.2f} times")
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
