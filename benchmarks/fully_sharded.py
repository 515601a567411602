"""Fully sharded data parallelism on the same packs: our `+z3` and `+z2` beside FSDP2, DeepSpeed ZeRO-3 and plain `dp`.

    python benchmarks/fully_sharded.py
    python benchmarks/fully_sharded.py --model 0.9M --length 128 --rows 8 --packs 2 --steps 12 --json out/fully_sharded.json

All sequences have one length, so that every side trains packs of the same tokens: `--rows` sequences a pack, `--packs` packs a
rank and mini-batch. With one sequence a pack (the default) attention is the same product on every side, and what differs is how weights and
gradients move. Each side has its own processes (gloo, one thread each) and all of them train one mini-batch in turn, another side
first each time; the clock runs from one end of a step to the next on the slowest rank, optimizer and clipping included. The
first two mini-batches do not count. A side that cannot run is a row with its own error. The losses after training must
agree to 1e-4, or the program stops.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from contest import MODELS, make_model
from peers.live import LiveSide, SideError, in_turns
from peers.sides import Side
from peers.work import Work
from result_file import command_line, given_options, write_json

UNCOUNTED = 2


def sides_of(ranks: int) -> dict[str, str]:
    """Our sides, and their strategies."""
    return {f"ours, dp{ranks}{z}": f"dp{ranks}{z}" for z in ("+z3", "+z2", "")}


PEERS = (
    Side("FSDP2, plain loop", "fsdp", {"kind": "loop"}),
    Side("FSDP2 of transformers, Trainer", "fsdp", {"kind": "native"}),
    Side("FSDP2 of accelerate, Trainer", "fsdp", {"kind": "accelerate"}),
    Side("DeepSpeed ZeRO-3, Trainer", "deepspeed_zero", {"stage": 3}),
    Side("DeepSpeed ZeRO-2, Trainer", "deepspeed_zero", {"stage": 2}),
)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="7M")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--rows", type=int, default=1, help="sequences of a pack")
    parser.add_argument("--packs", type=int, default=4, help="packs of a rank and mini-batch")
    parser.add_argument("--steps", type=int, default=12, help=f"mini-batches; the first {UNCOUNTED} do not count")
    parser.add_argument("--sides", nargs="+", help="parts of the names of the sides that run; all when left out")
    parser.add_argument("--limit-s", type=float, default=120.0, help="the longest that a side may take for a turn")
    parser.add_argument("--logs", type=Path, default=Path("out/fully-sharded-logs"))
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.length, options.packs, options.steps = "0.9M", 32, 2, 3
    return options


def work_of(options: argparse.Namespace, folder: str) -> Work:
    """What all sides train."""
    rows = options.ranks * options.rows * options.packs
    lengths = (options.length,) * (rows * options.steps)
    return Work(
        options.model, "fp32", options.ranks, lengths, rows, options.steps, folder, micro_batch_rows=options.rows
    )


def run(options: argparse.Namespace, folder: str) -> dict[str, dict[str, Any]]:
    """What became of each side: `seconds` of every turn and the `loss` afterwards, or the `reason` why there are none."""
    work, tokens = work_of(options, folder), options.rows * options.length
    make_model(work.model).save_pretrained(work.start_folder)
    works = {
        name: (Side(name, "ours", ours=True), replace(work, strategies=f"{strategy}:{options.length}@{tokens}"))
        for name, strategy in sides_of(options.ranks).items()
    } | {side.name: (side, work) for side in PEERS}
    wanted = {
        name: each for name, each in works.items() if not options.sides or any(part in name for part in options.sides)
    }
    found: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    live: dict[str, LiveSide] = {}
    for name, (side, own) in wanted.items():
        one = LiveSide(side, own, options.logs / "".join(c if c.isalnum() else "-" for c in name), options.limit_s)
        try:
            one.ready()
            live[name] = one
        except SideError as error:
            found[name] = {"reason": error.reason}
    turns, failed = in_turns(list(live.values()), list(live))
    for name, one in live.items():
        try:
            if name in failed:
                raise failed[name]
            end = one.finish()
        except SideError as error:
            found[name] = {"reason": error.reason}
            continue
        seconds, phases = [turn["seconds"] for turn in turns[name]], [turn["phases"] for turn in turns[name]]
        found[name] = {"seconds": seconds, "loss": end["loss"], "tokens": end["tokens"], "slots": end["slots"]}
        found[name]["median"] = statistics.median(seconds[UNCOUNTED:])
        found[name]["phases"] = phases[-1]
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    with tempfile.TemporaryDirectory(prefix="hotspa-sharded-") as folder:
        found = run(options, folder)
    ran = {name: side for name, side in found.items() if "loss" in side}
    losses = [side["loss"] for side in ran.values()]
    if losses and max(losses) - min(losses) > 1e-4 * min(losses):
        raise SystemExit(f"the losses differ: { {name: side['loss'] for name, side in ran.items()} }")
    ours, plain = f"ours, dp{options.ranks}+z3", f"ours, dp{options.ranks}"
    ratios = {
        name: {
            f"of {other}": side["median"] / ran[base]["median"]
            for other, base in (("+z3", ours), ("dp", plain))
            if base in ran
        }
        for name, side in ran.items()
    }
    tokens = options.rows * options.length
    print(
        f"{options.model} in fp32, {options.ranks} ranks on {os.cpu_count()} cores, {options.packs} packs of {tokens} tokens a rank "
        f"({options.rows} sequences each), {options.steps - UNCOUNTED} mini-batches"
    )
    for name, side in found.items():
        if name in ran:
            shown = "  ".join(f"{value:5.2f} {what}" for what, value in ratios[name].items())
            print(f"  {name:32} {side['median'] * 1e3:8.1f} ms  {shown}")
        else:
            print(f"  {name:32} {side['reason']}")
    if ran:
        print(f"losses agree to {max(losses) - min(losses):.1e}")
    result = {
        "options": given_options(options),
        "cores": os.cpu_count(),
        "sides": found,
        "ratios": ratios,
    }
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
