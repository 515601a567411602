"""Rows with images: packed and switched beside rows alone (exactness), and beside TRL's padded batches under DDP (speed).

    python benchmarks/images.py
    python benchmarks/images.py --rounds 5 --json out/images.json
    python benchmarks/images.py --part exactness --families qwen3_vl gemma3

`exactness` is the table that others print for packing with images: the loss, and the cosine of the gradients of the language
model and of the towers, of all rows in packs against the plain model one row at a time; in fp64, on 2 ranks. A loss hardly
shows a mistake in positions or masks; gradients do.

`speed` trains a small Qwen3-VL in fp32 on made-up rows, whose texts and numbers of images have a long tail, on 4 ranks. Sides
take turns, each on its own copy of the weights and an AdamW:

* `TRL, padded`: what TRL's collator and DDP do: micro-batches of `--batch` rows in their order, padded to the longest;
* `TRL, rows alone`: the same with micro-batches of one row, without padding;
* `ours`: the same rows of each rank as one call of a `SwitchedModel`.

Printed are the slowest rank's wall seconds of a step, processor seconds of all ranks, tokens and patches computed, and the
most bytes that a rank had beyond weights and optimizer. Before timing, the losses of all sides must agree to 1e-4.
"""

import argparse
import copy
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from result_file import write_json
from step import machine_facts
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from worlds import run_world

from hf_hotspa.calibrate.probe import PeakMemory, freeing_at_once
from hf_hotspa.model.model_kind import other_half
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import SwitchedModel
from tests.oracle import exact_in_double
from tests.vision_models import VISION_FAMILIES, batch_of_images, image_rows, rows_with_images, vision_model
from tests.vision_models import vision_reference as reference

PADDED, ALONE, OURS = "TRL, padded", "TRL, rows alone", "ours"
FAMILY = "qwen3_vl"
TOLERANCE = 1e-4
WANTED = 1.5
"""How many times as fast as padded batches packs should be."""


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("exactness", "speed"), help="only this one")
    parser.add_argument("--families", nargs="+", default=["qwen3_vl", "qwen2_5_vl", "gemma3", "mistral3"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16, help="of a rank in a step")
    parser.add_argument("--batch", type=int, default=4, help="rows of a padded micro-batch")
    parser.add_argument("--longest", type=int, default=1500, help="words of the longest row")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64; the tower's width is half of it")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--strategies", default="dp4:600@2048,dp2tp2:4096", help="as in hotspa_strategies")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--quick", action="store_true", help="a small run that shows that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.families, options.ranks, options.rows, options.batch, options.longest = ["qwen3_vl"], 2, 4, 2, 40
        options.hidden, options.layers, options.strategies, options.rounds = 64, 2, "dp2:60@128,tp2:512", 1
    return options


# -- exactness (runs on every rank) -----------------------------------------------------------------------------------


def packed_against_single(rank: int, world_size: int, families: Sequence[str]) -> list[dict[str, Any]]:
    """Of each family: the losses of both ways, and 1 - cosine of the gradients of the language model and of the rest."""
    found = []
    for family in families:
        plain, model = vision_model(family).train(), vision_model(family)
        losses, expected = reference(plain, family, [rows_with_images(family, each) for each in range(world_size)])
        switched = SwitchedModel(model, parse_buckets(f"dp{world_size}:200")).train()
        with exact_in_double(torch.float64):
            loss = switched(**batch_of_images(family, rows_with_images(family, rank))).loss
            loss.backward()
            switched.flush()
        gradients, half = switched.engine.full_gradients(), other_half(plain).keys()
        away = {}
        for part, names in (("language", expected.keys() - half), ("vision", half)):
            own = torch.cat([gradients[name].flatten() for name in sorted(names)])
            single = torch.cat([expected[name].flatten() for name in sorted(names)])
            away[part] = abs(1 - float(own @ single / (own.norm() * single.norm())))
        found.append({"family": family, "packed": float(loss.detach()), "single": losses[rank], **away})
        switched.close()
    return found


# -- speed (runs on every rank) ---------------------------------------------------------------------------------------


def small_model(options: argparse.Namespace) -> Any:
    """A Qwen3-VL of fp32 random weights, the same on every rank."""
    torch.manual_seed(0)
    tiny, width, heads = vision_model(FAMILY).config, options.hidden, options.hidden // 32
    text = {
        "vocab_size": tiny.text_config.vocab_size, "hidden_size": width, "intermediate_size": 3 * width,
        "num_hidden_layers": options.layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
        "head_dim": 32, "max_position_embeddings": 1 << 14,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 10000.0},
    }  # fmt: skip
    tower = {
        "depth": 4, "hidden_size": width // 2, "intermediate_size": width, "num_heads": heads // 2, "patch_size": 14,
        "out_hidden_size": width, "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2],
    }  # fmt: skip
    ids = {name: getattr(tiny, name) for name in ("image_token_id", "video_token_id", "vision_start_token_id")}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower, **ids))


def make_rows(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of a rank: most have a short text and few images; one in sixteen has a long text, and eight images or none."""
    rng = random.Random(rank)
    kinds = []
    for index in range(options.rows):
        is_long = index % 16 == rank % 16
        words = options.longest if is_long else min(options.longest, int(rng.lognormvariate(4, 0.8)) + 4)
        number = rng.choice((0, 8)) if is_long else rng.choice((0, 1, 1, 2, 3))
        kinds.append((words, [(28 * rng.randint(1, 4), 28 * rng.randint(1, 4)) for _ in range(number)]))
    return image_rows(FAMILY, kinds, seed=rank)


class Sides:
    """A step of each side on one rank."""

    def __init__(self, rank: int, world_size: int, options: argparse.Namespace) -> None:
        self.world_size, rows = world_size, make_rows(rank, options)
        model = small_model(options)
        self.plain = DistributedDataParallel(copy.deepcopy(model).train(), find_unused_parameters=True)
        self.switched = SwitchedModel(model, parse_buckets(options.strategies)).train()
        self.optimizers = {
            kind: torch.optim.AdamW(of.parameters(), lr=1e-4)
            for kind, of in ((PADDED, self.plain), (OURS, self.switched))
        }
        sizes = {PADDED: options.batch, ALONE: 1, OURS: len(rows)}
        self.batches = {
            side: [batch_of_images(FAMILY, rows[at : at + size], torch.float32) for at in range(0, len(rows), size)]
            for side, size in sizes.items()
        }
        (batch,) = self.batches[OURS]
        counted = torch.tensor([float((batch["labels"][:, 1:] != -100).sum()), float(batch["attention_mask"].sum())])
        dist.all_reduce(counted)
        self.num_items, self.num_tokens = map(int, counted)
        patches = sum(len(one["pixel_values"]) for one in self.batches[ALONE] if "pixel_values" in one)
        self.patches = self._sum(patches)

    def tokens(self, side: str) -> int:
        """Tokens that a side's layers compute, of all ranks."""
        if side == OURS:
            return self.num_tokens
        return self._sum(sum(batch["input_ids"].numel() for batch in self.batches[side]))

    def _sum(self, number: int) -> int:
        total = torch.tensor(number)
        dist.all_reduce(total)
        return int(total)

    def step(self, side: str, updates: bool = True) -> float:
        """Returns this rank's part of the loss, the sum over labels divided by all labels."""
        model: Any = self.switched if side == OURS else self.plain
        optimizer, total = self.optimizers[OURS if side == OURS else PADDED], 0.0
        for index, batch in enumerate(self.batches[side]):
            model.require_backward_grad_sync = index == len(self.batches[side]) - 1
            loss = model(
                **batch, num_items_in_batch=self.num_items, **({} if side == OURS else {"use_cache": False})
            ).loss
            (loss * self.world_size).backward()
            total += float(loss.detach())
        if updates:
            optimizer.step()
        elif side == OURS:
            self.switched.flush()
        optimizer.zero_grad()
        return total


def measure(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds by side and round, bytes, and what was computed."""
    with freeing_at_once():
        return _measure(rank, world_size, options)


def _measure(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    sides, names = Sides(rank, world_size, options), (PADDED, ALONE, OURS)
    totals = torch.tensor([sides.step(side, updates=False) for side in names], dtype=torch.float64)
    dist.all_reduce(totals)
    if float((totals / totals[0] - 1).abs().max()) > TOLERANCE:
        raise RuntimeError(f"the losses differ: {dict(zip(names, totals.tolist(), strict=True))}")
    memory = PeakMemory(torch.device("cpu"))
    found = {side: {"wall": [], "cpu": [], "bytes": 0.0, "tokens": sides.tokens(side)} for side in names}  # type: ignore[var-annotated]
    for turn in range(options.rounds + 1):
        for side in names[turn % 3 :] + names[: turn % 3]:
            dist.barrier()
            if not turn and memory.works:
                memory.start()
            wall, cpu = time.perf_counter(), time.process_time()
            sides.step(side)
            taken = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
            if not turn:  # it does not count: buffers are made, and memory is measured
                peak = torch.tensor(float(memory.stop()) if memory.works else 0.0)
                dist.all_reduce(peak, op=dist.ReduceOp.MAX)
                found[side]["bytes"] = float(peak)
                continue
            dist.all_reduce(taken[:1], op=dist.ReduceOp.MAX)
            dist.all_reduce(taken[1:])
            found[side]["wall"].append(float(taken[0]))
            found[side]["cpu"].append(float(taken[1]))
    sides.switched.close()
    return {"sides": found, "patches": sides.patches, "losses": totals.tolist()}


# -- what is printed --------------------------------------------------------------------------------------------------


def print_exactness(table: Sequence[dict[str, Any]]) -> None:
    """The table of losses and cosines."""
    print(f"{'':>14} {'loss packed':>18} {'loss single':>18} {'1 - cos language':>17} {'1 - cos vision':>15}")
    for row in table:
        print(
            f"{row['family']:>14} {row['packed']:18.14f} {row['single']:18.14f} {row['language']:17.1e} {row['vision']:15.1e}"
        )


def print_speed(measured: dict[str, Any]) -> dict[str, float]:
    """The table of sides; returns the ratios of seconds to ours."""
    sides, ratios = measured["sides"], dict[str, float]()

    def ratio(name: str, of: str) -> float:
        return statistics.median(sides[name][of]) / statistics.median(sides[OURS][of])

    print(f"{'':>16} {'wall s':>8} {'cpu s':>8} {'MiB':>8} {'tokens':>8} {'patches':>8} {'/ ours':>7} {'cpu':>6}")
    for name, side in sides.items():
        mib = f"{side['bytes'] / 2**20:.0f}" if side["bytes"] else "-"  # where the system measures no peaks
        ratios |= {f"{name} wall": ratio(name, "wall"), f"{name} cpu": ratio(name, "cpu")}
        print(
            f"{name:>16} {statistics.median(side['wall']):8.2f} {statistics.median(side['cpu']):8.2f} {mib:>8}"
            f" {side['tokens']:8,} {measured['patches']:8,} {ratio(name, 'wall'):7.2f} {ratio(name, 'cpu'):6.2f}"
        )
    print(f"padded batches take {ratios[f'{PADDED} wall']:.2f} times our seconds (wanted: {WANTED})")
    return ratios


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    result: dict[str, Any] = {"options": {k: v for k, v in vars(options).items() if k != "json"}}
    if options.part != "speed":
        unknown = set(options.families) - VISION_FAMILIES.keys()
        if unknown:
            raise SystemExit(f"--families: {', '.join(unknown)}; there are {', '.join(VISION_FAMILIES)}")
        result["exactness"] = run_world(2, packed_against_single, options.families)
        print_exactness(result["exactness"])
    if options.part != "exactness":
        result["machine"] = machine_facts(options)
        result["speed"] = run_world(options.ranks, measure, options)
        result["ratios"] = print_speed(result["speed"])
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
