"""Configurations at random: each is accepted, or refused by an error of our family with a fix; nothing else is raised.

The seeds are fixed. Half of the texts are made of the right pieces in the wrong places, a third are right ones with a
few characters changed, the rest are any characters at all.
"""

import dataclasses
import random
import string
from typing import Any

import pytest
import torch

from hf_hotspa.errors import HotspaConfigError, HotspaError
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.strategy import Strategy, check_buckets, check_launch, parse_buckets
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments, evaluation_buckets

NUMBER = 10_000
LARGEST_WORLD = 4096
"""More processes than that are not running anywhere that this test could be."""
PIECES = ["dp", "tp", "pp", "sp", "+sp", ":", "@", ",", " ", "\n", "-", ".", "0", "1", "2", "4", "8", "16", "1024", "99999999999",
          "1e3", "auto", "DP4", "dp4", "tp2pp2", "dp1tp2pp1:64@128", "²", "٣", "\0", "None", "[]", "dp-1", "dp01"]  # fmt: skip
GOOD = ["dp4:1024@4096,dp2tp2:4096,tp2pp2:8192", "dp1:64", "dp2:16@32,tp2:60", "pp4:2048", "dp2tp2pp2:100", "auto"]


def any_text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return "".join(rng.choices(PIECES, k=rng.randrange(12)))
    if kind < 0.85:
        text = list(rng.choice(GOOD))
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randrange(2)] = rng.choices(string.printable + "²٣", k=rng.randrange(3))
        return "".join(text)
    return "".join(chr(rng.randrange(1, 0x2FFF)) for _ in range(rng.randrange(40)))


def any_number(rng: random.Random) -> float | int:
    return rng.choice(
        [0, 1, -1, 2, 3, 0.5, -0.5, 1e-300, 1e308, float("nan"), float("inf"), 10**30, rng.randrange(1 << 40)]
    )


def any_shape(rng: random.Random) -> ModelShape:
    kv_heads = rng.choice([1, 2, 3, 8])
    positions = rng.choice([None, 64, 4096])
    return ModelShape(
        "llama", rng.choice([1, 2, 5]), kv_heads * rng.choice([1, 4]), kv_heads, 64, 64, 500, 40_000,
        max_position_embeddings=positions, has_tp_plan=rng.random() < 0.8, has_pp_plan=rng.random() < 0.8,
    )  # fmt: skip


def refused_or_fine(action, *args, **options) -> bool:
    """Whether it was refused; anything but our own errors fails the test."""
    refused = None
    try:
        action(*args, **options)
    except HotspaError as error:
        refused = error
    if refused is None:
        return False
    assert isinstance(refused, HotspaConfigError), refused
    assert refused.code in str(refused)
    assert len(str(refused)) < 3000
    return True


def configure(rng: random.Random) -> None:
    """What happens to a text between the command line and the first collective."""
    buckets = parse_buckets(any_text(rng))
    world = buckets[0].strategy.world_size
    check_launch(buckets, rng.choice([world if world <= LARGEST_WORLD else 1, 1, 3]))
    check_buckets(buckets, world, any_shape(rng))
    evaluation_buckets(rng.choice(["longest", "buckets", any_text(rng), str(buckets[0].strategy)]), buckets)
    assert parse_buckets(",".join(map(str, buckets))) == buckets


def engine_options(rng: random.Random) -> None:
    names = ["timeout_s", "switch_timeout_s", "memory_limit", "label_smoothing", "loss_chunk_tokens"]
    chosen: dict[str, Any] = {name: any_number(rng) for name in names if rng.random() < 0.3}
    if rng.random() < 0.3:
        chosen["planner"] = rng.choice(["relay", "first_owner", any_text(rng)])
    if rng.random() < 0.3:
        chosen["pipeline_schedule"] = rng.choice(["own", "1f1b", any_text(rng)])
    EngineOptions(**chosen).timeouts(torch.device("cpu"))


@pytest.mark.parametrize("action", [lambda rng: Strategy.parse(any_text(rng)), configure, engine_options],
                         ids=["strategies", "buckets", "options"])  # fmt: skip
def test_ten_thousand_configurations(action) -> None:
    rng = random.Random(7)
    refused = sum(refused_or_fine(action, rng) for _ in range(NUMBER))
    assert 0 < refused < NUMBER, "all alike: this is no test"


FLAGS = [field for field in dataclasses.fields(HotSPaTrainingArguments) if field.name.startswith("hotspa_")]
REFUSED_SETTINGS: list[dict[str, Any]] = [{"fp16": True}, {"torch_compile": True}, {"use_liger_kernel": True}, {"label_names": ["x"]},
                    {"optim": "adafactor"}, {"ddp_bucket_cap_mb": 1}]  # fmt: skip


def any_flag(rng: random.Random, field: Any) -> object:
    """Something for a flag: often of the right type, sometimes what is possible, sometimes neither."""
    kind = rng.random()
    if kind < 0.3 and field.metadata.get("choices"):
        return rng.choice(field.metadata["choices"])
    if kind < 0.6:
        usual: dict[Any, object] = {int: 3, float: 2.5, bool: True, str: "auto"}
        return usual.get(field.type, rng.choice([None, 5, "dp1:64@128"]))
    return rng.choice([any_text(rng), any_number(rng), None, True, [], {}, b"dp1:64", object()])


def test_two_hundred_sets_of_training_arguments(tmp_path) -> None:
    rng = random.Random(11)
    refused = 0
    for _ in range(200):
        chosen: dict[str, Any] = {"hotspa_strategies": "dp1:64"}
        chosen |= {field.name: any_flag(rng, field) for field in rng.sample(FLAGS, k=rng.randrange(4))}
        if rng.random() < 0.2:
            chosen |= rng.choice(REFUSED_SETTINGS)
        refused += refused_or_fine(
            HotSPaTrainingArguments, output_dir=str(tmp_path), use_cpu=True, report_to="none", **chosen
        )
    assert 20 < refused < 200, "all alike: this is no test"
