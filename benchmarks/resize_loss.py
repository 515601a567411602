"""What leaving columns out does to the loss: a small decoder on real text under tp2, exactly and with one rank resized.

    python benchmarks/resize_loss.py
    python benchmarks/resize_loss.py --steps 300 --json out/resize.json

Two processes, all sides in turn in one run from the same weights: the bytes of the standard library of Python, 16 rows of
128 bytes a step, AdamW. On one of the two ranks a share of the columns of every product is left out in every step, far more
than a run with a device that is slow for a while. The loss of each step is that of the forward as it was computed, that is without the
columns; the last line is the loss of the trained weights in an exact forward, over rows that were not trained.
"""

import argparse
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from stragglers import make_model
from worlds import run_world

from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.strategy import parse_buckets

SIDES = (("exact", 0.0, "zero"), ("a quarter", 0.25, "zero"), ("half", 0.5, "zero"), ("half, average", 0.5, "average"))
SIDES += (("three quarters", 0.75, "zero"),)
ROWS, LENGTH, EVALUATED = 16, 128, 8


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.layers = 2, 1
    return options


def make_rows(count: int) -> list[dict[str, list[int]]]:
    """Rows of real text as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: 1 << 22]
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(text) - LENGTH, (count,), generator=generator).tolist()
    return [{"input_ids": list(text[start : start + LENGTH])} for start in starts]


def train(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Losses of each side: of every step, and of rows that were not trained."""
    rows = make_rows(ROWS * (options.steps + EVALUATED))
    found: dict[str, Any] = {}
    for name, share, imputation in SIDES:
        model = make_model(options.hidden, options.layers, vocab_size=256, longest=LENGTH)
        buckets = parse_buckets(f"tp2:{LENGTH}@{ROWS * LENGTH}")
        engine = HotSPaEngine(model, buckets, EngineOptions(flexible=True))
        collate = PackedBucketCollator(engine.buckets, rank=rank, vocab_size=256)
        optimizer = torch.optim.AdamW(engine.parameter_groups(), lr=3e-3)
        losses = []
        for step in range(options.steps + EVALUATED):
            trains = step < options.steps
            for runner in engine.phases.values():
                work = runner.replica.flexible
                assert work is not None
                work.imputation, work.resized = imputation, share if trains and rank == 1 else 0.0
            report = engine.forward_backward(collate(rows[step * ROWS : (step + 1) * ROWS]), step)
            losses.append(report.loss)
            if trains:
                engine.clip_grad_norm_(1.0)
                optimizer.step()
        engine.close()
        found[name] = {"losses": losses[: options.steps], "evaluated": fmean(losses[options.steps :])}
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains, prints and writes."""
    options = parse_options(arguments)
    found = run_world(2, train, options)
    print(f"{'steps':<14}" + "".join(f"{name:>17}" for name in found))
    size = max(options.steps // 6, 1)
    for begin in range(0, options.steps, size):
        end = min(begin + size, options.steps)
        print(
            f"{f'{begin + 1} to {end}':<14}"
            + "".join(f"{fmean(s['losses'][begin:end]):>17.4f}" for s in found.values())
        )
    print(f"{'not trained':<14}" + "".join(f"{side['evaluated']:>17.4f}" for side in found.values()))
    result = {"options": {k: v for k, v in vars(options).items() if k != "json"}, "sides": found}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
