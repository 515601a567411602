"""Trainers with rows of images over a switched model, TRL's and transformers', against the stock ones under DDP on as many ranks, in
fp64."""

from copy import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, Features, Image, Sequence, Value
from transformers import AutoModelForImageTextToText

from hf_hotspa.checkpoint.format.manifest import WEIGHT
from hf_hotspa.errors import HotspaConfigError, HotspaError
from tests.gloo.test_trl import FREE
from tests.switched import run_parts
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


def online(rank: int, world_size: int, folder: str) -> None:
    """Online trainers refuse images by name."""
    rows = pictures("qwen3_vl", "completion", 8)
    for kind in ("GRPO", "RLOO"):
        case = Case(kind, POOLS, "", RL, family="qwen3_vl", given=lambda: {"train_dataset": rows})
        with pytest.raises(HotspaError) as caught:
            made(case, folder, POOLS[0])
        assert f"{kind}Trainer and a dataset with the columns ['images']" in str(caught.value)


def of_processor(rank: int, world_size: int, folder: str) -> None:
    """Pixels without a collator are refused by name."""
    batch = batch_of_images("qwen3_vl", rows_with_images("qwen3_vl", 0)[:1])
    row = {
        name: value.tolist() if name in ("pixel_values", "image_grid_thw") else value[0].tolist()
        for name, value in batch.items()
    }
    given = {"train_dataset": Dataset.from_list([row] * 9)}
    trainer = made(Case("", POOLS, "", {"max_steps": 3}, family="qwen3_vl", given=lambda: given), folder, POOLS[0])
    with pytest.raises(HotspaError, match="(?s)pixel_values.*data_collator"):
        trainer.train()
    assert trainer.state.global_step == 0


def planned(rank: int, world_size: int, folder: str) -> None:
    """The plans of `auto` are told of images in the first batches of any rank: rank 0 reads the first ones."""
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
    without, with_images = seen
    assert "pixel_values" not in without
    assert "input_ids" in without
    assert "pixel_values" in with_images


def passes_of(rank: int, world_size: int, folder: str) -> None:
    """Each micro-batch of SFT is trained at once, also of a model that is not told how many labels a step has: its loss is the
    mean of each micro-batch. The log of each step has the patches of all pixels that the model got."""
    fields = {**SMALL, "max_steps": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    case = Case("SFT", POOLS, "", fields, family="qwen3_vl", given=of_images("qwen3_vl", "completion"))
    trainer = made(case, folder, POOLS[0])
    given, forward = [], trainer.switched.forward

    def counted(**batch: Any) -> Any:
        given.append(len(batch["pixel_values"]) if "pixel_values" in batch else 0)
        return forward(**batch)

    with patch.object(trainer.switched, "forward", counted):
        trainer.train()
    assert trainer.switched._passes.counts == {"scoring": 0, "training": 4}
    logged = [line["hotspa/image_patches"] for line in trainer.state.log_history if "hotspa/image_patches" in line]
    of_all = torch.tensor([sum(given)])
    dist.all_reduce(of_all)
    assert len(logged) == 2
    assert sum(logged) == int(of_all) > 0
    trainer.close_engine()


def test_images_are_refused_by_name_planned_and_trained_at_once(tmp_path):
    parts = (online, of_processor, planned, passes_of)
    run_parts(2, *(partial(part, folder=str(tmp_path / part.__name__)) for part in parts))
