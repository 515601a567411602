"""What leaving columns out does to the loss: a small decoder on real text under tp2, exactly and with one rank resized.

    python benchmarks/resize_loss.py
    python benchmarks/resize_loss.py --json out/resize.json --svg docs/img/resize-loss.svg
    python benchmarks/resize_loss.py --part all          # columns left out on every rank (the paper's Figs. 5 and 6)
    python benchmarks/resize_loss.py --part turns        # on one rank at a time, in turn (Figs. 7 and 8)
    python benchmarks/resize_loss.py --part semi         # one slow rank: left out, migrated, both (Fig. 10a)
    python benchmarks/resize_loss.py --part four         # four slow ranks of eight, some of them migrate (Fig. 11a)

Two processes (eight for `four`), all sides one after the other in one run from the same weights: the bytes of the standard library of Python, 16 rows of
128 bytes a step, AdamW. On one of the two ranks a share of the columns of every product is left out in every step, far more
than a run with a device that is slow for a while. The loss of each step is computed by the forward pass as it was run, that is without the
columns; the last line is the loss of the trained weights in an exact forward, over rows that were not trained.
"""

import argparse
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from result_file import command_line, given_options, write_json, write_text
from stragglers import make_model

from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.features.slow_devices.columns import Resizing
from hf_hotspa.features.slow_devices.flexible_linear import flexible_works
from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.features.slow_devices.reaction import ColumnStatistics
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.report import MEASURES
from hf_hotspa.strategy import parse_buckets


@dataclass(frozen=True)
class Side:
    """What ranks do not compute in a step.

    Args:
        left: The share of its columns that each rank leaves out; one number for the last rank alone.
        columns: How these are chosen.
        imputation: What their gradients are.
        given: The share of its columns that each rank gives to the others.
        turns: Whether the shares pass from rank to rank, once a period.
    """

    left: tuple[float, ...] = ()
    columns: str = "pri"
    imputation: str = "zero"
    given: tuple[float, ...] = ()
    turns: bool = False

    def of(self, shares: tuple[float, ...], world_size: int, turn: int) -> tuple[float, ...]:
        """Shares by rank."""
        known = (0.0,) * (world_size - len(shares)) + shares
        return known[-turn % world_size :] + known[: -turn % world_size] if self.turns else known


SIDES = {
    "exact": Side(),
    "Rd 1/4": Side((0.25,), "rd"),
    "Rd 1/2": Side((0.5,), "rd"),
    "Pri 1/2": Side((0.5,)),
    "PriDiffR 1/2": Side((0.5,), "pridiffr"),
    "Rd 1/2 same": Side((0.5,), "rd", "same"),
    "Rd 1/2 average": Side((0.5,), "rd", "average"),
    "Rd 3/4": Side((0.75,), "rd"),
    "Pri 3/4": Side((0.75,)),
}
GAMMAS = {"1/4": 0.25, "1/2": 0.5, "9/10": 0.9}
"""The shares of the paper's Figs. 5 to 8."""
FOUR = (1 - 1 / 2, 1 - 1 / 4, 1 - 1 / 6, 1 - 1 / 8)
"""What ranks lose that take 2, 4, 6 and 8 times as long (equation 1 with the fastest rank as the reference)."""
PARTS: dict[str, tuple[int, dict[str, Side]]] = {
    "one": (2, SIDES),
    "all": (
        2,
        {"exact": Side()}
        | {f"{how} {text}": Side((share,) * 2, how.lower()) for text, share in GAMMAS.items() for how in ("Rd", "Pri")},
    ),
    "turns": (
        2, {"exact": Side()} | {f"Pri {text}": Side((0.0, share), turns=True) for text, share in GAMMAS.items()},
    ),
    "semi": (
        2,
        {"exact": Side()}
        | {
            f"{how}, {chi}x": side
            for chi in (2, 4, 8)
            for how, side in {
                "migrate": Side(given=(1 - 1 / chi,)),
                "PriDiffR": Side((1 - 1 / chi,), "pridiffr"),
                "semi": Side(((1 - 1 / chi) / 2,), given=((1 - 1 / chi) / 2,)),
            }.items()
        },
    ),
    "four": (
        8,
        {"exact": Side()}
        | {
            f"lambda {x}": Side(
                tuple(0.0 if i >= 4 - x else share for i, share in enumerate(FOUR)), "pri" if x else "pridiffr",
                given=tuple(share if i >= 4 - x else 0.0 for i, share in enumerate(FOUR)),
            )
            for x in range(5)
        },
    ),
}  # fmt: skip
"""Ranks, and sides by name. `semi` divides what a rank loses into halves; the product finds the parts by equation 2."""
ROWS, LENGTH, LEARNING_RATE = 16, 128, 3e-3
PAPER = """the paper (Figs. 3, 5 to 8; ViT-1B and 3B on CIFAR-10, 150 epochs): accuracy is best with same, then zero, then average (gamma = 1/2); Pri
loses up to 18 % less accuracy than Rd (gamma = 9/10, all GPUs); one slow GPU alone costs less accuracy than all (gamma the same)."""
COLOURS = ("#1b1f24", "#2f6fde", "#17926b", "#c2410c", "#7c3aed", "#b45309", "#be185d", "#0e7490", "#65a30d")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--part", choices=list(PARTS), default="one")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--period", type=int, default=25, help="steps from one look at the variation to the next")
    parser.add_argument("--evaluated", type=int, default=8, help="mini-batches of rows that are not trained")
    parser.add_argument("--svg", type=Path, help="write the curves there")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.layers, options.period, options.evaluated = 2, 1, 1, 1
    return options


QUICK = {"one": ("exact", "Rd 1/2", "Pri 1/2", "Rd 1/2 same"), "four": ("exact", "lambda 2")}
"""Of a quick run; else all of them."""


def make_rows(count: int) -> list[dict[str, list[int]]]:
    """Rows of real text as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: 1 << 22]
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(text) - LENGTH, (count,), generator=generator).tolist()
    return [{"input_ids": list(text[start : start + LENGTH])} for start in starts]


def train(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Losses of each side: of every step, and of rows that were not trained; and the share that was left out."""
    rows = make_rows(ROWS * (options.steps + options.evaluated))
    found: dict[str, Any] = {}
    sides = PARTS[options.part][1]
    for name in QUICK.get(options.part, sides) if options.quick else sides:
        side = sides[name]
        model = make_model(options.hidden, options.layers, vocab_size=256, longest=LENGTH, num_heads=max(4, world_size))
        buckets = parse_buckets(f"tp{world_size}:{LENGTH}@{ROWS * LENGTH}")
        engine = HotSPaEngine(model, buckets, EngineOptions(features=(HandOver(),)))
        collate = PackedBucketCollator(engine.buckets, rank=rank, vocab_size=256)
        optimizer = torch.optim.AdamW(engine.parameter_groups(), lr=LEARNING_RATE)
        statistics = ColumnStatistics(engine, Resizing(side.columns, side.imputation, options.period))
        losses, left, begin = [], [], time.process_time()
        for step in range(options.steps + options.evaluated):
            trains = step < options.steps
            statistics.begin(step, options.period)
            turn = step // options.period
            for work in flexible_works(engine).values():
                work.give(side.of(side.given, world_size, turn))
                work.resized = side.of(side.left, world_size, turn)[rank] if trains else 0.0
            report = engine.forward_backward(collate(rows[step * ROWS : (step + 1) * ROWS]), step)
            losses.append(report.loss)
            if trains:
                assert report.ranks is not None
                left.append(fmean(row[0][MEASURES.index("left_out")] for row in report.ranks.phases))
                engine.clip_grad_norm_(1.0)
                optimizer.step()
        seconds = (time.process_time() - begin) / (options.steps + options.evaluated)
        engine.close()
        evaluated = fmean(losses[options.steps :])
        found[name] = {
            "losses": losses[: options.steps], "evaluated": evaluated, "left_out": fmean(left), "cpu_s": seconds,
        }  # fmt: skip
    return found


def curves(
    sides: Mapping[str, Any],
    steps: int,
    title: str = "Loss of exact training, and with columns left out on one of two ranks",
) -> str:
    """A chart of the losses, means over neighbouring steps."""
    width, height, left, bottom = 760, 420, 50, 40
    size = max(steps // 30, 1)
    lines = {
        name: [fmean(side["losses"][at : at + size]) for at in range(0, steps, size)] for name, side in sides.items()
    }
    low, high = min(map(min, lines.values())), max(map(max, lines.values()))

    def x(i: int) -> float:
        return left + (width - left - 170) * min((i + 0.5) * size, steps) / steps

    def y(loss: float) -> float:
        return 20 + (height - bottom - 20) * (high - loss) / (high - low or 1.0)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="12">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i in range(6):
        loss = low + (high - low) * i / 5
        parts.append(f'<text x="{left - 6}" y="{y(loss) + 4:.1f}" text-anchor="end" fill="#5a6472">{loss:.2f}</text>')
        parts.append(f'<path d="M{left} {y(loss):.1f}H{width - 170}" stroke="#e5e7eb"/>')
    parts += [
        f'<text x="{x(round(steps * i / 5 / size) - 1) + 8:.1f}" y="{height - 16}" text-anchor="middle" fill="#5a6472">'
        f"{round(steps * i / 5)}</text>"
        for i in range(1, 6)
    ]
    order = sorted(lines, key=lambda name: -lines[name][-1])
    for place, name in enumerate(order):
        colour = COLOURS[list(lines).index(name) % len(COLOURS)]
        points = " ".join(f"{x(i):.1f},{y(loss):.1f}" for i, loss in enumerate(lines[name]))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        text = f"{name}: {sides[name]['evaluated']:.3f}"
        parts.append(f'<text x="{width - 162}" y="{40 + 18 * place}" fill="{colour}">{text}</text>')
    parts.append(f'<text x="{width - 162}" y="20" fill="#5a6472">loss of rows not trained</text></svg>')
    return "\n".join(parts) + "\n"


def print_losses(sides: Mapping[str, Any], steps: int, size: int, width: int) -> None:
    """The mean losses of each side, of so many neighbouring steps at a time."""
    print(f"{'steps':<14}" + "".join(f"{name:>{width}}" for name in sides))
    for begin in range(0, steps, max(size, 1)):
        end = min(begin + max(size, 1), steps)
        cells = (f"{fmean(side['losses'][begin:end]):>{width}.4f}" for side in sides.values())
        print(f"{f'{begin + 1} to {end}':<14}" + "".join(cells))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains, prints and writes."""
    options = parse_options(arguments)
    found = run_world(PARTS[options.part][0], train, options)
    print_losses(found, options.steps, options.steps // 6, 16)
    for name, key in (("not trained", "evaluated"), ("left out", "left_out"), ("cpu s a step", "cpu_s")):
        print(f"{name:<14}" + "".join(f"{side[key]:>16.4f}" for side in found.values()))
    print("\n" + PAPER)
    result = {"options": given_options(options), "sides": found}
    write_json(options.json, result)
    if options.svg:
        write_text(options.svg, curves(found, options.steps))
    return result


if __name__ == "__main__":
    main()
