"""TRL's trainers with rows of images over a switched model against TRL's own under DDP on as many ranks, in fp64."""

from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, Sequence, Value
from transformers import AutoModelForImageTextToText

from hf_hotspa.checkpoint.format.manifest import WEIGHT
from tests.gloo.test_trl import FREE
from tests.harness import run_ranks
from tests.training_runs import newest, whole_state
from tests.trl_runs import EVALUATES, Case, both_sides, check_resumed, compare, run_and_resume
from tests.vision_models import KINDS, image_rows, vision_model

pytestmark = pytest.mark.gloo


def pictures(family: str, kind: str, number: int, seed: int = 0) -> Dataset:
    """Rows with none, one and several images, as TRL reads them."""
    kinds = [(words, sizes) for group in KINDS for words, sizes in group]
    made, columns = image_rows(family, [kinds[i % len(kinds)] for i in range(number)], seed), dict[str, list[Any]]()
    for index, row in enumerate(made):
        words = row["text"].split(" ")
        cut = 1 + max([i for i, word in enumerate(words) if not word.startswith("w")], default=1)
        parts = {"text": row["text"]}
        if kind == "pair":
            ends = [" ".join(["", *words[cut:], f"w{4 + (index + n) % 9}"]) for n in range(2)]
            parts = {"prompt": " ".join(words[:cut]), "chosen": ends[0], "rejected": ends[1]}
        elif kind != "text":
            parts = {"prompt": " ".join(words[:cut]), "completion": " ".join(["", *words[cut:], f"w{4 + index % 9}"])}
        for name, value in (parts | {"images": row["images"]}).items():
            columns.setdefault(name, []).append(value)
    features = {name: Value("string") for name in columns if name != "images"} | {"images": Sequence(Image())}
    return Dataset.from_dict(columns, features=Features(features))


def of_images(family: str, kind: str) -> Any:
    return lambda: {
        "train_dataset": pictures(family, kind, 40),
        "eval_dataset": pictures(family, kind, 7, seed=1),
    }


POOLS = ("dp2:24@128,tp2+sp:60@128,cp2+rc:256@256", "dp4:24@128,dp2tp2+sp:60@128,cp2tp2:256@256")
BLOCKS = ("dp2:24@128,tp2+sp:60@128,pp2+rc:256@256", "dp4:24@128,dp2tp2+sp:60@128,tp2pp2:256@256")
OTHER = ("dp2+z3:256@256", "dp2tp2+rc:256@256")
SMALL = {**FREE, "per_device_train_batch_size": 3, "max_steps": 5}
CASES = {
    "sft": Case("SFT", POOLS, "", {**SMALL, **EVALUATES}, family="qwen3_vl", given=of_images("qwen3_vl", "completion")),
    "sft of completions": Case(
        "SFT", BLOCKS, "", {**SMALL, "gradient_accumulation_steps": 2, "max_steps": 3}, family="gemma3",
        given=of_images("gemma3", "completion"), wide=True,
    ),
    "sft with adapters on both halves": Case(
        "SFT", BLOCKS, "", SMALL, family="gemma3", given=of_images("gemma3", "completion"), lora=True, wide=True
    ),
    "dpo": Case(
        "DPO", BLOCKS, "", {**SMALL, **EVALUATES}, family="gemma3", given=of_images("gemma3", "pair"), reference=True, wide=True
    ),
    "dpo with adapters on both halves": Case(
        "DPO", POOLS, "", SMALL, family="qwen3_vl", given=of_images("qwen3_vl", "pair"), lora=True, wide=True
    ),
}  # fmt: skip


def both(rank: int, world_size: int, names: list[str], folder: str) -> Any:
    return both_sides({name: CASES[name] for name in names}, world_size, folder)


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        *((2, [name]) for name, case in CASES.items() if not case.wide),
        pytest.param(2, [name for name, case in CASES.items() if case.wide], marks=pytest.mark.slow),
        pytest.param(4, list(CASES), marks=pytest.mark.slow),
    ],
)
def test_it_is_trl_under_ddp(world_size, names, tmp_path):
    compare(both, world_size, {name: CASES[name] for name in names}, tmp_path)


KEPT = {"sft": CASES["sft of completions"]}


def resumes(rank: int, world_size: int, folder: str) -> None:
    run_and_resume(KEPT, BLOCKS[0], OTHER[0], folder)


@pytest.mark.slow
def test_it_resumes_in_another_layout(tmp_path):
    """And the files are of the class for images, with the towers as they were trained."""
    run_ranks(2, resumes, str(tmp_path), timeout=600)
    check_resumed(tmp_path, KEPT)
    folder = newest(tmp_path / "sft" / "whole")
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not {key: value for key, value in report.items() if value}
    start, trained, others = vision_model("gemma3").state_dict(), whole_state(folder), list[bool]()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[f"{WEIGHT}/{name}"]), name
        others += [] if "language_model" in name else [torch.equal(parameter, start[name])]
    assert sum(others) < len(others) / 4
