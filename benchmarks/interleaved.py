"""A few packs through two pipeline ranks, with one stage on each and with two (`+v2`), beside the simulator.

    python benchmarks/interleaved.py
    python benchmarks/interleaved.py --packs 4 --tokens 2048 --layers 16 --json out/interleaved.json
    python benchmarks/interleaved.py --packs 2 4 8 --tokens 512 --vocabulary 64

Two processes, both sides in turn on the same weights and packs: a Llama with the proportions of Llama-3.2-1B, in fp32 on CPU.
When each pass of each stage began and ended is recorded: printed are wall seconds, idle over busy seconds of the ranks beside
(p - 1) / (v m), and what `costs.time` finds for the measured passes. Losses must agree to 1e-4.

The formula is one of stages that take equally long. With the vocabulary of Llama the head makes the last stage longer; with
one of 64 tokens head and loss take less than 2 % of a stage.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from result_file import command_line, given_options, timed_calls, write_json

from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.costs.time import Pipeline, pipeline_seconds
from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.packing.pipeline_order import interleaved_order, reaches
from hf_hotspa.parallel.pipeline import Pack
from hf_hotspa.strategy import Bucket, Strategy

ROUNDS = (1, 2)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--packs", type=int, nargs="+", default=[2], help="how many; several numbers are run in turn")
    parser.add_argument("--tokens", type=int, default=1024, help="of each pack")
    parser.add_argument("--layers", type=int, default=8, help="a multiple of 4, so that stages take about as long")
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 256; 2048 is Llama-3.2-1B")
    parser.add_argument("--vocabulary", type=int, help="tokens; in proportion to the width when not given")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.layers, options.hidden, options.repeats = 64, 4, 256, 1
    return options


Pass = tuple[int, bool, float, float]
"""Which of the rank's stages, whether it is backward, and when it began and ended, in seconds."""


def run_side(rank: int, world_size: int, options: argparse.Namespace, rounds: int) -> list[dict[str, Any]]:
    """Of each number of packs the fastest repetition: wall seconds, the loss, idle over busy seconds, and the seconds of each
    pass of each stage."""
    from long_sequences import make_model

    model = make_model(options.hidden, options.layers, options.tokens, options.vocabulary)
    bucket = Bucket(Strategy(pp=world_size, v=rounds), options.tokens, options.tokens)
    engine = HotSPaEngine(model, [bucket], EngineOptions())
    (runner,) = engine.phases.values()
    parts = {id(part): index for index, part in enumerate(runner.parts)}
    log: list[Pass] = []
    for is_backward, name in enumerate(("forward", "backward")):

        def note(
            begin: float, end: float, _: Pack, stage: Any, *__: Any, is_backward: bool = bool(is_backward)
        ) -> None:
            log.append((parts[id(stage)], is_backward, begin, end))

        setattr(Pack, name, timed_calls(getattr(Pack, name), note))
    collate = PackedBucketCollator([bucket], rank=rank, vocab_size=model.config.vocab_size)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (max(options.packs), options.tokens), generator=draw).tolist()
    best: dict[int, dict[str, Any]] = {}
    for turn in range(options.repeats + 1):
        for count in options.packs:
            log.clear()
            mini_batch = collate([{"input_ids": row, "labels": row} for row in ids[:count]])
            dist.barrier()
            report = engine.forward_backward(mini_batch)
            gathered: list[Any] = [None] * world_size
            dist.all_gather_object(gathered, _summary(log, rounds))
            begin, end = min(each["begin"] for each in gathered), max(each["end"] for each in gathered)
            if turn and (count not in best or end - begin < best[count]["seconds"]):
                busy = sum(each["busy"] for each in gathered)
                best[count] = {
                    "seconds": end - begin,
                    "loss": float(report.loss),
                    "idle over busy": (world_size * (end - begin) - busy) / busy,
                    "busy": busy,
                    **{
                        name: [each[name][part] for part in range(rounds) for each in gathered]
                        for name in ("forward", "backward")
                    },
                }
    engine.close()
    return [] if rank else [best[count] for count in options.packs]


def _summary(log: Sequence[Pass], rounds: int) -> dict[str, Any]:
    """Begin, end and busy seconds of a rank (one clock for all processes of a machine), and its stages' passes in order."""
    passes = {
        kind: [
            [end - begin for part, is_back, begin, end in log if (part, is_back) == (index, kind)]
            for index in range(rounds)
        ]
        for kind in (False, True)
    }
    return {
        "begin": min(begin for *_, begin, _ in log),
        "end": max(end for *_, end in log),
        "busy": sum(end - begin for *_, begin, end in log),
        "forward": passes[False],
        "backward": passes[True],
    }


def simulated(side: dict[str, Any], rounds: int) -> float:
    """Seconds of the timeline of passes that take what was measured, with messages that take none."""
    num_packs = len(side["forward"][0])
    reach, hops = reaches([1] * num_packs), [0.0] * num_packs
    order = interleaved_order([1] * num_packs, 2, rounds) if rounds > 1 else ()
    return pipeline_seconds(Pipeline(side["forward"], side["backward"], hops, reach, rounds=rounds, order=order))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    measured = {rounds: run_world(2, run_side, options, rounds) for rounds in ROUNDS}
    runs = [_run(count, {rounds: measured[rounds][i] for rounds in ROUNDS}) for i, count in enumerate(options.packs)]
    result = {"options": given_options(options), "runs": runs}
    for run in runs:
        print(f"{run['packs']} packs of {options.tokens} tokens, {options.layers} layers")
        for name, side in run["sides"].items():
            longest, mean = max(side["stages"]), statistics.fmean(side["stages"])
            print(
                f"{name:>12}: {side['seconds']:7.3f} s, simulated {side['simulated']:7.3f} s; idle over busy"
                f" {side['idle over busy']:.3f}, simulated {side['simulated idle over busy']:.3f}, (p - 1) / (v m)"
                f" {side['formula']:.3f}; longest stage {longest / mean:.2f} of the mean"
            )
        print(f"+v2 is {run['speedup']:.2f} times as fast, simulated {run['simulated speedup']:.2f} times")
    write_json(options.json, result)
    return result


def _run(num_packs: int, sides: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """What follows from the sides, by rounds, of one number of packs."""
    for rounds, side in sides.items():
        side["simulated"] = simulated(side, rounds)
        side["simulated idle over busy"] = 2 * side["simulated"] / side["busy"] - 1
        side["formula"] = 1 / (rounds * num_packs)
        for name in ("forward", "backward"):
            side[name] = [statistics.fmean(passes) for passes in side[name]]
        side["stages"] = [sum(pair) for pair in zip(side["forward"], side["backward"], strict=True)]
    plain, twice = sides.values()
    if abs(plain["loss"] - twice["loss"]) > 1e-4 * plain["loss"]:
        raise SystemExit(f"the losses differ: {plain['loss']} and {twice['loss']}")
    return {
        "packs": num_packs,
        "sides": {str(Strategy(pp=2, v=rounds)): side for rounds, side in sides.items()},
        "speedup": plain["seconds"] / twice["seconds"],
        "simulated speedup": plain["simulated"] / twice["simulated"],
    }


if __name__ == "__main__":
    main()
