"""What delayed weights do to the loss: a small decoder on real text, synchronous 1F1B beside PipeDream's asynchronous one.

    python benchmarks/pipedream_loss.py
    python benchmarks/pipedream_loss.py --steps 50 --json out/pipedream.json --svg docs/img/pipedream-loss.svg

One process a stage, all sides one after the other in one run from the same weights and with the same rows: the bytes of the
standard library of Python, 128 a row, AdamW, no clipping. A step is a mini-batch of as many packs as `--packs` says, whichever
side; what differs is when weights change, and what a pack sees of that. The loss of a step is the mean over its packs, as
they were computed; the last line is the loss of the trained weights on rows that were not trained. Idle is the share of a
stage's time that a pipeline of packs of equal time takes to fill and to run empty, by the textbook: (p - 1) / (m + p - 1).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from resize_loss import LENGTH, curves, make_rows, print_losses
from result_file import command_line, given_options, write_json, write_text
from stragglers import make_model

from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.features.pipedream.mode import PipeDream
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.strategy import parse_buckets

ONE_UPDATE, EVERY_PACK = "1F1B, one update a step", "1F1B, one update a pack"
SIDES: dict[str, PipeDream | None] = {
    ONE_UPDATE: None,
    EVERY_PACK: None,
    "PipeDream": PipeDream(),
    "PipeDream, vertical sync": PipeDream(vertical_sync=True),
}
"""Side -> how stages update by themselves. The second one is synchronous training whose mini-batches are single packs."""
TITLE = "Loss of synchronous 1F1B and of PipeDream"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="mini-batches")
    parser.add_argument("--stages", type=int, default=4, help="of the pipeline, one process each")
    parser.add_argument("--packs", type=int, default=8, help="of a mini-batch")
    parser.add_argument("--rows", type=int, default=2, help="of a pack")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--evaluated", type=int, default=8, help="mini-batches of rows that are not trained")
    parser.add_argument("--svg", type=Path, help="write the curves there")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.stages, options.layers, options.packs, options.evaluated = 2, 2, 2, 3, 1
    return options


def train(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Losses of each side, of every step and of rows that were not trained."""
    size = options.packs * options.rows
    rows = make_rows(size * (options.steps + options.evaluated))
    found: dict[str, Any] = {}
    for name, mode in SIDES.items():
        model = make_model(options.hidden, options.layers, vocab_size=256, longest=LENGTH)
        buckets = parse_buckets(f"pp{world_size}:{LENGTH}@{options.rows * LENGTH}")
        engine = HotSPaEngine(model, buckets, EngineOptions(features=(mode,) if mode else ()))
        collate = PackedBucketCollator(engine.buckets, rank=rank, vocab_size=256)
        optimizer = torch.optim.AdamW(engine.parameter_groups(), lr=options.learning_rate)
        if engine.updates is not None:
            engine.updates.step = optimizer.step
        losses = []
        at_a_time = options.rows if name == EVERY_PACK else size
        for begin in range(0, size * options.steps, size):
            parts = []
            for first in range(begin, begin + size, at_a_time):
                mini_batch = collate(rows[first : first + at_a_time])
                assert mini_batch.plan.phases[0].num_packs == at_a_time // options.rows
                parts.append(engine.forward_backward(mini_batch).loss)
                if engine.updates is None:
                    optimizer.step()
            losses.append(fmean(parts))
        with engine.evaluation() as evaluation:
            ends = [
                evaluation.run(collate(rows[at : at + size])) for at in range(size * options.steps, len(rows), size)
            ]
        engine.close()
        evaluated = sum(end.loss_sum for end in ends) / sum(end.num_labels for end in ends)
        packs = at_a_time // options.rows
        found[name] = {
            "losses": losses,
            "evaluated": evaluated,
            "updates": options.steps * (options.packs if name != ONE_UPDATE else 1),
            "idle": (world_size - 1) / (packs + world_size - 1),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains, prints and writes."""
    options = parse_options(arguments)
    found = run_world(options.stages, train, options)
    print_losses(found, options.steps, options.steps // 5, 26)
    for name, key, form in (("not trained", "evaluated", ".4f"), ("updates", "updates", "d"), ("idle", "idle", ".2f")):
        print(f"{name:<14}" + "".join(f"{side[key]:>26{form}}" for side in found.values()))
    delays = {name: mode.delays(options.stages) for name, mode in SIDES.items() if mode is not None}
    for name, delay in delays.items():
        print(f"{name}: weights are behind by {', '.join(map(str, delay))} packs on stages 0 to {options.stages - 1}")
    result = {"options": given_options(options), "sides": found}
    write_json(options.json, result)
    if options.svg:
        write_text(options.svg, curves(found, options.steps, TITLE))
    return result


if __name__ == "__main__":
    main()
