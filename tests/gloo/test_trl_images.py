"""Trainers with rows of images over a switched model, TRL's and transformers', against the stock ones under DDP on as many ranks, in
fp64."""

from copy import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset, Features, Image, Sequence, Value
from transformers import AutoModelForImageTextToText

from hf_hotspa.checkpoint.format.manifest import WEIGHT
from hf_hotspa.errors import HotspaConfigError, HotspaError
from tests.gloo.test_trl import FREE
from tests.harness import run_ranks
from tests.training_runs import newest, whole_state
from tests.trl_runs import EVALUATES, RL, Case, check_resumed, compare, made, worlds
from tests.vision_models import KINDS, batch_of_images, image_rows, rows_with_images, vision_model, vision_processor

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


def judged() -> Any:
    """Of Qwen3-VL, half of the completions are good."""
    rows = pictures("qwen3_vl", "completion", 40)
    return {"train_dataset": rows.add_column("label", [index % 3 != 0 for index in range(len(rows))])}


IN_PARTS = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|> "
    "{% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


def chats() -> Any:
    """Of Qwen3-VL, `messages` without placeholders, which TRL puts in front."""
    rows, processor = pictures("qwen3_vl", "completion", 40), copy(vision_processor("qwen3_vl"))
    processor.chat_template = IN_PARTS
    turns = []
    for row in rows.remove_columns("images"):
        words = [word for word in row["prompt"].split() if word.startswith("w")]
        user = {"role": "user", "content": " ".join(["w4", *words])}
        turns.append([user, {"role": "assistant", "content": row["completion"].strip()}])
    return {"train_dataset": rows.select_columns("images").add_column("messages", turns), "processing_class": processor}


def collated(family: str, evaluates: bool) -> Any:
    """Rows of text and images, and a collator that calls the processor."""
    given = of_images(family, "text")() | {"data_collator": partial(batch_of_images, family)}
    return given if evaluates else {name: value for name, value in given.items() if name != "eval_dataset"}


def of_images(family: str, kind: str) -> Any:
    return lambda: {
        "train_dataset": pictures(family, kind, 40),
        "eval_dataset": pictures(family, kind, 7, seed=1),
    }


POOLS = ("dp2:24@128,tp2+sp:60@128,cp2+rc:256@256", "dp4:24@128,dp2tp2+sp:60@128,cp2tp2:256@256")
BLOCKS = ("dp2:24@128,tp2+sp:60@128,pp2+rc:256@256", "dp4:24@128,dp2tp2+sp:60@128,tp2pp2:256@256")
OTHER = ("dp2+z3:256@256", "dp2tp2+rc:256@256")
SMALL = {**FREE, "per_device_train_batch_size": 3, "max_steps": 5}
PLAIN = {"per_device_train_batch_size": 3, "max_steps": 3, "remove_unused_columns": False}
# in fp32 with a larger epsilon: AdamW divides gradients that are rounding noise by themselves
CASES = {
    "collator": Case("", POOLS, "", PLAIN, family="qwen3_vl", given=partial(collated, "qwen3_vl", False)),
    "collator, evaluated": Case(
        "", BLOCKS, "", {**PLAIN, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.05},
        family="gemma3", given=partial(collated, "gemma3", True), wide=True,
    ),
    "sft": Case("SFT", POOLS, "", {**SMALL, **EVALUATES}, family="qwen3_vl", given=of_images("qwen3_vl", "completion")),
    "sft in fp32": Case(
        "SFT", POOLS, "", {**SMALL, **EVALUATES}, family="qwen3_vl", given=of_images("qwen3_vl", "completion"),
        dtype=torch.float32, wide=True,
    ),
    "dpo in fp32": Case(
        "DPO", BLOCKS, "", {**SMALL, **EVALUATES, "adam_epsilon": 1e-4}, family="gemma3", given=of_images("gemma3", "pair"),
        reference=True, dtype=torch.float32, wide=True,
    ),
    "sft of completions": Case(
        "SFT", BLOCKS, "", {**SMALL, "gradient_accumulation_steps": 2, "max_steps": 3}, family="gemma3",
        given=of_images("gemma3", "completion"), wide=True,
    ),
    "sft with adapters on both halves": Case(
        "SFT", BLOCKS, "", SMALL, family="gemma3", given=of_images("gemma3", "completion"), lora=True, wide=True
    ),
    "sft of chats": Case("SFT", POOLS, "", {**SMALL, "max_steps": 3}, family="qwen3_vl", given=chats, wide=True),
    "sft of texts": Case(
        "SFT", POOLS, "", {**SMALL, "max_steps": 3, "remove_unused_columns": False}, family="qwen3_vl",
        given=of_images("qwen3_vl", "text"), wide=True,
    ),
    "kto": Case("KTO", POOLS, "", {**SMALL, "max_steps": 3}, family="qwen3_vl", given=judged, reference=True, wide=True),
    "dpo": Case(
        "DPO", BLOCKS, "", {**SMALL, **EVALUATES}, family="gemma3", given=of_images("gemma3", "pair"), reference=True, wide=True
    ),
    "dpo with adapters on both halves": Case(
        "DPO", POOLS, "", SMALL, family="qwen3_vl", given=of_images("qwen3_vl", "pair"), lora=True, wide=True
    ),
}  # fmt: skip


@pytest.mark.parametrize(("world_size", "names"), worlds(CASES))
def test_it_is_trl_under_ddp(world_size, names, tmp_path):
    compare(__name__, tmp_path, names, world_size=world_size)


RESUMED = {"sft": CASES["sft of completions"]}


@pytest.mark.slow
def test_it_resumes_in_another_layout(tmp_path):
    """And the files are of the class for images, with the towers as they were trained."""
    check_resumed(__name__, tmp_path, BLOCKS[0], OTHER[0])
    folder = newest(tmp_path / "sft" / "whole")
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not {key: value for key, value in report.items() if value}
    start, trained, others = vision_model("gemma3").state_dict(), whole_state(folder), list[bool]()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[f"{WEIGHT}/{name}"]), name
        others += [] if "language_model" in name else [torch.equal(parameter, start[name])]
    assert sum(others) < len(others) / 4


def online(rank: int, world_size: int, kinds: list[str], folder: str) -> list[str]:
    texts, rows = [], pictures("qwen3_vl", "completion", 8)
    for kind in kinds:
        case = Case(kind, POOLS, "", RL, family="qwen3_vl", given=lambda: {"train_dataset": rows})
        try:
            made(case, folder, POOLS[0])
        except HotspaError as error:
            texts.append(str(error))
    return texts


def test_online_trainers_refuse_images_by_name(tmp_path):
    kinds = ["GRPO", "RLOO"]
    for texts in run_ranks(2, online, kinds, str(tmp_path), timeout=200):
        for kind, text in zip(kinds, texts, strict=True):
            assert f"{kind}Trainer and a dataset with the columns ['images']" in text


def of_processor(rank: int, world_size: int, folder: str) -> str:
    batch = batch_of_images("qwen3_vl", rows_with_images("qwen3_vl", 0)[:1])
    row = {
        name: value.tolist() if name in ("pixel_values", "image_grid_thw") else value[0].tolist()
        for name, value in batch.items()
    }
    case = Case(
        "",
        POOLS,
        "",
        {"max_steps": 3},
        family="qwen3_vl",
        given=lambda: {"train_dataset": Dataset.from_list([row] * 9)},
    )
    trainer = made(case, folder, POOLS[0])
    try:
        trainer.train()
    except HotspaError as error:
        assert trainer.state.global_step == 0
        return str(error)
    return ""


def test_pixels_without_a_collator_are_refused_by_name(tmp_path):
    for text in run_ranks(2, of_processor, str(tmp_path), timeout=200):
        assert "pixel_values" in text, text
        assert "data_collator" in text, text


def planned(rank: int, world_size: int, folder: str) -> list[set[str]]:
    """The fields that the plans of `auto` are told of: rank 0 reads the first images."""
    seen = list[set[str]]()

    def plan(*_: Any, fields: set[str], **__: Any) -> Any:
        seen.append(fields)
        raise HotspaConfigError("planned")

    def given() -> dict[str, Any]:
        sizes = [(28, 28)] if seen else []
        rows = image_rows("gemma3", [(9, sizes), *((9, []) for _ in range(7))])
        return {"train_dataset": rows, "data_collator": partial(batch_of_images, "gemma3")}

    case = Case("", POOLS, "", {**PLAIN, "train_sampling_strategy": "sequential"}, family="gemma3", given=given)
    for _ in range(2):
        with patch("hf_hotspa.trainer.run.prepare_auto", plan), pytest.raises(HotspaConfigError, match="planned"):
            made(case, f"{folder}/{len(seen)}", "auto").train()
    return seen


def test_auto_is_told_of_images_in_the_first_batches_of_any_rank(tmp_path):
    for without, with_images in run_ranks(2, planned, str(tmp_path), timeout=200):
        assert "pixel_values" not in without
        assert "input_ids" in without
        assert "pixel_values" in with_images


def passes_of(rank: int, world_size: int, folder: str) -> tuple[dict[str, int], list[float], int]:
    """The passes, the patches by the log of each step, and those of all pixels that the model got on this rank."""
    fields = {**SMALL, "max_steps": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    case = Case("SFT", POOLS, "", fields, family="qwen3_vl", given=of_images("qwen3_vl", "completion"))
    trainer = made(case, folder, POOLS[0])
    counts = trainer.switched._passes.counts
    given, forward = [], trainer.switched.forward

    def counted(**batch: Any) -> Any:
        given.append(len(batch["pixel_values"]) if "pixel_values" in batch else 0)
        return forward(**batch)

    with patch.object(trainer.switched, "forward", counted):
        trainer.train()
    logged = [line["hotspa/image_patches"] for line in trainer.state.log_history if "hotspa/image_patches" in line]
    trainer.close_engine()
    return dict(counts), logged, sum(given)


def test_each_micro_batch_of_sft_is_trained_at_once(tmp_path):
    """Also of a model that is not told how many labels a step has: its loss is the mean of each micro-batch."""
    results = run_ranks(2, passes_of, str(tmp_path), timeout=200)
    for counts, logged, _ in results:
        assert counts == {"scoring": 0, "training": 4}
        assert len(logged) == 2
        assert sum(logged) == sum(given for _, _, given in results) > 0
