"""Images in plans: tokens and patches by config are those of the families' processors, parameters those of their models."""

import json

import pytest
import torch
import transformers as hf

from hf_hotspa.cli import main
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
    for size in (56, 84, 112):
        place = VISION_FAMILIES[family].placeholder
        given = vision_processor(family)(
            text=[f"w5 {place} w6"], images=[[picture(size, size, 0)]], return_tensors="pt"
        )
        tower = tower_of(config, size)
        assert tower.tokens == given["input_ids"].shape[1] - 2
        if "image_grid_thw" in given:
            assert tower.patches == len(given["pixel_values"])


def plan(capsys, tmp_path, *words):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-VL-8B"]))
    code = main([words[0], "--model", str(folder), "--gpus", "8xh100", "--json", *words[1:]])
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
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-VL-8B"]))
    tower = tower_of(PUBLISHED["Qwen3-VL-8B"], 1024)

    def seconds(images=1, nodes="1x8", lora=None):
        setup = Setup.read(str(tmp_path), nodes, "h100-80g", lora=lora)
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
