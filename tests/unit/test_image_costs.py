"""Images in plans: tokens and patches by config are those of the families' processors, parameters those of their models."""

import json
from argparse import Namespace
from unittest.mock import patch

import PIL.ImageFile
import pytest
import torch
import transformers as hf
from datasets import Dataset, Features, Image, List, Value
from tokenizers import Tokenizer, models, pre_tokenizers

from hf_hotspa.cli import main
from hf_hotspa.commands.inputs import data_counts
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.features.images.terms import ImageLoad, tower_of
from hf_hotspa.model.model_kind import other_half
from hf_hotspa.search.setup import Setup
from tests.vision_models import VISION_FAMILIES, picture, vision_model, vision_processor

TEXT = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
}  # fmt: skip
PUBLISHED = {  # the fields of config.json on the hub; parameters of tower and projector
    "Qwen3-VL-8B": {
        "model_type": "qwen3_vl", "text_config": {**TEXT, "model_type": "qwen3_vl_text"},
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
            "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    },
    "Qwen2.5-VL-7B": {
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "Gemma-3-12B": {
        "model_type": "gemma3", "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262208,
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    },
    "Mistral-Small-3.1-24B": {
        "model_type": "mistral3", "spatial_merge_size": 2,
        "text_config": {
            "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        },
        "vision_config": {
            "hidden_size": 1024, "image_size": 1540, "intermediate_size": 4096, "model_type": "pixtral",
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
        },
    },
}  # fmt: skip
# of a square image of 1024 pixels: patches and tokens, marks included
LARGE = {
    "Qwen3-VL-8B": (4096, 1026),
    "Qwen2.5-VL-7B": (5476, 1371),
    "Gemma-3-12B": (4096, 258),
    "Mistral-Small-3.1-24B": (5476, 37 * 38),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_patches_and_tokens_of_published_models(name):
    config = PUBLISHED[name]
    tower = tower_of(config, 1024)
    assert (tower.patches, tower.tokens) == LARGE[name]
    made = hf.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    made.get_text_config().num_hidden_layers = 1
    with torch.device("meta"):
        model = hf.AutoModelForImageTextToText.from_config(made)
    counted = sum(parameter.numel() for parameter in other_half(model).values())
    assert tower.parameters == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3", "mistral3", "llava"])
def test_an_image_has_the_tokens_that_the_processor_gives_it(family):
    config = vision_model(family).config.to_dict()
    for size in ((56,), (84,), (112,), (56, 112), (112, 84)):
        place = VISION_FAMILIES[family].placeholder
        image = picture(size[0], size[-1], 0)
        given = vision_processor(family)(text=[f"w5 {place} w6"], images=[[image]], return_tensors="pt")
        tower = tower_of(config, *size)
        assert tower.tokens == given["input_ids"].shape[1] - 2
        if "image_grid_thw" in given:
            assert tower.patches == len(given["pixel_values"])


def model_in(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-VL-8B"]))
    return str(folder)


def plan(capsys, tmp_path, *words):
    code = main([words[0], "--model", model_in(tmp_path), "--gpus", "8xh100", "--json", *words[1:]])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out)


def test_a_plan_counts_the_tokens_of_images(tmp_path, capsys):
    words = ("plan", "--lengths", "commoncrawl", "--longest", "2048", "--mini-batch", "32", "--max-buckets", "1")
    plain = plan(capsys, tmp_path, *words)
    found = plan(capsys, tmp_path, *words, "--images", "2", "--image-size", "512")
    assert found["lengths"]["longest"] == plain["lengths"]["longest"] + 2 * 258
    assert found["images"] == "2 of 512 x 512 pixels a row: 1,024 patches and 258 tokens each"
    large = plan(capsys, tmp_path, *words, "--images", "2", "--image-size", "512", "--strategies", "dp8:65536")
    more = found["seconds"] - sum(bucket["compute_seconds"] + bucket["switch_seconds"] for bucket in found["buckets"])
    assert 0 < more < found["seconds"]
    assert plain["seconds"] == pytest.approx(
        sum(bucket["compute_seconds"] + bucket["switch_seconds"] for bucket in plain["buckets"])
    )
    (note,) = found["notes"]
    assert f"takes about {more:,.2f} s" in note
    for kind in ("baselines", "near", "written"):
        assert all(other["seconds"] is None or other["seconds"] > more for other in large[kind])
    assert "258 tokens each" in note
    assert not plain["notes"]
    assert "images" not in plain


LONG, WIDE = (1024, 1024), (512, 256)
"""Heights and widths of images with 1,026 and 130 tokens, 4,096 and 512 patches."""


def words_tokenizer(tmp_path):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {{ eos_token }} {% endfor %}"
    made.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def rows_of(tmp_path, kind):
    """The words of three rows, of which one has no image, one an image, and one two; and the folder or file of the data set."""
    images = [[], [picture(*WIDE, 0)], [picture(*LONG, 1), picture(*WIDE, 2)]]
    texts = [" ".join(["w"] * count) for count in (3000, 5, 20)]
    if kind == "paths":
        rows = [{"text": text, "images": []} for text in texts]
        for row, of_row in zip(rows, images, strict=True):
            for image in of_row:
                row["images"].append(str(tmp_path / f"{len(list(tmp_path.glob('*.png')))}.png"))
                image.save(row["images"][-1])
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(tmp_path / "rows.jsonl")
    columns, features = {"text": texts}, {"text": Value("string")}
    if kind == "chats":
        parts = [[{"type": "image", "text": None}] * len(of_row) for of_row in images]
        spoken = [[*own, {"type": "text", "text": text}] for own, text in zip(parts, texts, strict=True)]
        columns = {
            "messages": [
                [{"role": "user", "content": c}, {"role": "assistant", "content": [{"type": "text", "text": "w"}]}]
                for c in spoken
            ]
        }
        part = {"type": Value("string"), "text": Value("string")}
        features = {"messages": List({"role": Value("string"), "content": List(part)})}
    given = Dataset.from_dict({**columns, "images": images}, features=Features(features | {"images": List(Image())}))
    given.save_to_disk(tmp_path / "rows")
    return str(tmp_path / "rows")


@pytest.mark.parametrize("kind", ["paths", "texts", "chats"])
def test_a_plan_takes_number_and_sizes_of_images_from_the_rows(kind, tmp_path, capsys):
    words = ("plan", "--dataset", rows_of(tmp_path, kind), "--tokenizer", words_tokenizer(tmp_path))
    words += ("--mini-batch", "8", "--max-buckets", "1")
    with patch.object(PIL.ImageFile.ImageFile, "load", side_effect=AssertionError("pixels were decoded")):
        found = plan(capsys, tmp_path, *words)
    assert found["lengths"]["count"] == 3
    assert found["lengths"]["longest"] == 3000 + (2 if kind == "chats" else 0) + 1
    assert found["images"] == "1 a row: 1,707 patches and 429 tokens each, means of the data set"
    (note,) = found["notes"]
    assert "The lengths have them" in note
    given = plan(capsys, tmp_path, *words, "--images", "2", "--image-size", "512")
    assert given["lengths"]["longest"] == found["lengths"]["longest"] + 2 * 258


def test_lengths_have_the_tokens_of_each_rows_images(tmp_path, capsys):
    rows = rows_of(tmp_path, "texts")
    given = {"dataset": rows, "split": "train", "rows": None, "tokenizer": words_tokenizer(tmp_path)}
    args = Namespace(**given, model=model_in(tmp_path), images=None, image_size=1024, mini_batch=64)
    counts, (load,) = data_counts(args)
    assert sorted(counts.lengths.tolist()) == [5 + 1 + 130, 20 + 1 + 1026 + 130, 3001]
    assert (load.images, load.row_tokens(), load.of_rank(8)) == (1.0, 0, 8.0)
    assert load.tower.patches * 3 == pytest.approx(4096 + 512 + 512, abs=1.5)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "w", "image": "gone.png"}, "No such file"),
        ({"text": "w", "images": [7]}, "a int is not an image"),
        ({"input_ids": [5, 6], "images": ["gone.png"]}, "nothing says whether image tokens are among them"),
    ],
)
def test_images_whose_sizes_are_unknown_are_asked_for_by_name(row, words, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    command = ["plan", "--model", model_in(tmp_path), "--gpus", "8xh100", "--dataset", str(tmp_path / "rows.jsonl")]
    assert main(command) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert words in said
    assert "--images N and --image-size PIXELS" in said


def test_an_estimate_has_the_bytes_of_towers(tmp_path, capsys):
    words = ("estimate", "--strategy", "tp8+rc", "--pack-tokens", "8192")
    runs = [(), ("--images", "4"), ("--images", "8"), ("--images", "4", "--lora", "16"), ("--lora", "16")]
    plain, four, eight, frozen, adapter = (plan(capsys, tmp_path, *words, *more)["memory"] for more in runs)
    tower = tower_of(PUBLISHED["Qwen3-VL-8B"], 1024)
    weights = 2 * tower.parameters
    assert four["weights"] - plain["weights"] == pytest.approx(weights)
    assert four["gradients"] - plain["gradients"] == pytest.approx(weights)
    assert frozen["weights"] - adapter["weights"] == pytest.approx(weights)
    assert frozen["gradients"] == adapter["gradients"]
    assert frozen["optimizer"] == adapter["optimizer"]
    of_images = four["activations"] - plain["activations"]
    assert eight["activations"] - four["activations"] == pytest.approx(of_images - 8192 * 4 * 4096 * 2)
    assert of_images > 20 * (frozen["activations"] - adapter["activations"] - 8192 * 4 * 4096 * 2)


def test_the_seconds_of_towers_grow_with_images_and_fall_with_ranks(tmp_path):
    tower = tower_of(PUBLISHED["Qwen3-VL-8B"], 1024)

    def seconds(images=1, nodes="1x8", lora=None):
        setup = Setup.read(model_in(tmp_path), nodes, "h100-80g", lora=lora)
        return ImageLoad(images, 1024, tower, rows=64).seconds_beside(setup)

    one = seconds()
    assert seconds(images=2) == pytest.approx(2 * one, rel=0.05)
    assert seconds(nodes="2x8") == pytest.approx(one / 2, rel=0.05)
    assert seconds(lora="16") == pytest.approx(one / 4)  # a pass without gradients, and no second one
    # no faster than the device's peak for the products alone
    assert one > 8 * tower.patches * 6 * tower.shape.num_layers * tower.shape.layer_parameters / 989e12


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama"}, "reads no images"),
        ({"model_type": "idefics3", "hidden_size": 64, "vision_config": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 14}}, "cuts images into tiles"),
    ],
)  # fmt: skip
def test_what_a_config_does_not_say_is_refused(config, words):
    with pytest.raises(HotspaConfigError, match=words):
        tower_of(config, 448)
