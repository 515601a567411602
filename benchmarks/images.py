"""Rows with images: packed and switched beside rows alone (exactness), and beside TRL's padded batches under DDP (speed).

    python benchmarks/images.py
    python benchmarks/images.py --rounds 5 --json out/images.json
    python benchmarks/images.py --part exactness --families qwen3_vl gemma3

`exactness` is the table that others print for packing with images: the loss, and the cosine of the gradients of the language
model and of the towers, of all rows in packs against the plain model one row at a time; in fp64, on 2 ranks. A loss hardly
shows a mistake in positions or masks; gradients do.

`speed` trains a small Qwen3-VL in fp32 on made-up rows, whose texts and numbers of images have a long tail, on 4 ranks. Sides
take turns, each round another one first; a turn is a new trainer, one step that does not count, and one that does:

* `TRL, padded`: TRL's `SFTTrainer` under DDP, with micro-batches of `--batch` rows, padded to the longest;
* `TRL, rows alone`: the same with micro-batches of one row, without padding;
* `ours`: the `SFTTrainer` of `hf_hotspa.trl`, with the arguments of the first.

A step counts everything. Printed are wall seconds of a step, processor seconds and tokens of all ranks, and the peak of a process
over what it had before the turn, as a mean over ranks. The losses of the first and the last side must agree to 1e-4.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence as Ordered
from typing import Any

import torch
import trl
from datasets import Dataset, Features, Image, Sequence, Value
from result_file import command_line, given_options, machine_facts, write_json
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.trainer_callback import PrinterCallback
from trl_trainers import be_quiet, turn

import hf_hotspa.trl
from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.model.model_kind import other_half
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import SwitchedModel
from tests.oracle import exact_in_double
from tests.vision_models import (
    VISION_FAMILIES,
    batch_of_images,
    image_rows,
    rows_with_images,
    vision_model,
    vision_processor,
)
from tests.vision_models import vision_reference as reference

SIDES = PADDED, ALONE, OURS = "TRL, padded", "TRL, rows alone", "ours"
FAMILY = "qwen3_vl"
TOLERANCE = 1e-4
WANTED = 1.5
"""How many times as fast as padded batches packs should be."""


def parse_options(arguments: Ordered[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--part", choices=("exactness", "speed"), help="only this one")
    parser.add_argument("--families", nargs="+", default=["qwen3_vl", "qwen2_5_vl", "gemma3", "gemma4", "mistral3"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16, help="of a rank in a step")
    parser.add_argument("--batch", type=int, default=4, help="rows of a padded micro-batch")
    parser.add_argument("--longest", type=int, default=1500, help="words of the longest row")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64; the tower's width is half of it")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--strategies", default="dp4:600@2048,dp2tp2:4096", help="as in hotspa_strategies")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.quick:
        options.families, options.ranks, options.rows, options.batch, options.longest = ["qwen3_vl"], 2, 4, 2, 40
        options.hidden, options.layers, options.strategies, options.rounds = 64, 2, "dp2:60@128,tp2:512", 1
    return options


# -- exactness (runs on every rank) -----------------------------------------------------------------------------------


def packed_against_single(rank: int, world_size: int, families: Ordered[str]) -> list[dict[str, Any]]:
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


def make_rows(options: argparse.Namespace) -> Any:
    """The rows of a step: most have a short text and few images; one in sixteen has a long text, and eight images or none."""
    rng = random.Random(0)
    kinds = []
    for index in range(options.rows * options.ranks):
        is_long = index % 16 == 0
        words = options.longest if is_long else min(options.longest, int(rng.lognormvariate(4, 0.8)) + 4)
        number = 8 * (index // 16 % 2) if is_long else rng.choice((0, 1, 1, 2, 3))
        kinds.append((words, [(28 * rng.randint(1, 4), 28 * rng.randint(1, 4)) for _ in range(number)]))
    features = Features({"text": Value("string"), "images": Sequence(Image())})
    return Dataset.from_list(image_rows(FAMILY, kinds), features=features)


def trainer_of(side: str, options: argparse.Namespace) -> Any:
    """A trainer of a side, of two steps over the same rows."""
    home, batch = (hf_hotspa.trl if side == OURS else trl), 1 if side == ALONE else options.batch
    given = {
        "output_dir": options.folder, "max_steps": 2, "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": options.rows // batch, "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "bf16": False, "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
        "seed": 0, "gradient_checkpointing": False, "max_length": None, "remove_unused_columns": False,
    }  # fmt: skip
    if side == OURS:
        given |= {"hotspa_strategies": options.strategies, "hotspa_report": False, "hotspa_stragglers": "off"}
    made = home.SFTTrainer(
        model=small_model(options), args=home.SFTConfig(**given), train_dataset=make_rows(options),
        processing_class=vision_processor(FAMILY),
    )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def measure(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The turns of each side, and the patches of a step."""
    be_quiet()
    found: dict[str, Any] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES[number % 3 :] + SIDES[: number % 3]:
            found[side].append(turn(trainer_of(side, options), "ours" if side == OURS else "trl"))
    batch = vision_processor(FAMILY)(**make_rows(options)[:], padding=True, return_tensors="pt")
    return {"sides": found, "patches": len(batch["pixel_values"])}


# -- what is printed --------------------------------------------------------------------------------------------------


def print_exactness(table: Ordered[dict[str, Any]]) -> None:
    """The table of losses and cosines."""
    print(f"{'':>14} {'loss packed':>18} {'loss single':>18} {'1 - cos language':>17} {'1 - cos vision':>15}")
    for row in table:
        print(
            f"{row['family']:>14} {row['packed']:18.14f} {row['single']:18.14f} {row['language']:17.1e} {row['vision']:15.1e}"
        )


def print_speed(measured: dict[str, Any]) -> dict[str, float]:
    """The table of sides; returns the ratios of seconds to ours. Raises `SystemExit`: the losses differ."""
    median = {
        side: {name: statistics.median(each[name] for each in turns) for name in turns[0]}
        for side, turns in measured["sides"].items()
    }
    ours, padded = median[OURS], median[PADDED]
    if abs(padded["loss"] - ours["loss"]) > TOLERANCE * abs(padded["loss"]):
        raise SystemExit(f"the losses differ: {padded['loss']} and {ours['loss']}")
    print(
        f"{'':>16} {'wall s':>8} {'cpu s':>8} {'MiB':>8} {'tokens':>8} {'patches':>8} {'/ ours':>7} {'cpu':>6} {'MiB':>6}"
    )
    ratios = {}
    for name, side in median.items():
        wall, cpu, memory = (side[of] / ours[of] for of in ("seconds", "cpu", "memory"))
        ratios |= {f"{name} wall": wall, f"{name} cpu": cpu, f"{name} memory": memory}
        print(
            f"{name:>16} {side['seconds']:8.2f} {side['cpu']:8.2f} {side['memory'] / 2**20:8.0f} {side['tokens']:8,.0f}"
            f" {measured['patches']:8,} {wall:7.2f} {cpu:6.2f} {memory:6.2f}"
        )
    print(f"padded batches take {ratios[f'{PADDED} wall']:.2f} times our seconds (wanted: {WANTED})")
    return ratios


def main(arguments: Ordered[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    result: dict[str, Any] = {"options": given_options(options)}
    if options.part != "speed":
        unknown = set(options.families) - VISION_FAMILIES.keys()
        if unknown:
            raise SystemExit(f"--families: {', '.join(unknown)}; there are {', '.join(VISION_FAMILIES)}")
        result["exactness"] = run_world(2, packed_against_single, options.families)
        print_exactness(result["exactness"])
    if options.part != "exactness":
        result["machine"] = machine_facts(options.ranks)
        with tempfile.TemporaryDirectory() as options.folder:
            result["speed"] = run_world(options.ranks, measure, options)
        result["ratios"] = print_speed(result["speed"])
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
