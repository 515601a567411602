"""Rows with images through a `SwitchedModel`, against the plain model one row at a time in one process."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import BitsAndBytesConfig

from hf_hotspa.errors import HotspaError
from hf_hotspa.features.images import towers
from hf_hotspa.features.pipedream.mode import PipeDream
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.switched.teacher import Teacher
from tests.harness import run_ranks
from tests.images import errors_of, gradients_of, image_errors
from tests.oracle import exact_in_double
from tests.vision_models import (
    VISION_FAMILIES,
    batch_of_images,
    image_rows,
    rows_with_images,
    vision_model,
    vision_reference,
)

pytestmark = pytest.mark.gloo

Case = tuple[str, str, tuple[str, ...]]
"""Family, what is frozen, buckets."""

TWO: tuple[Case, ...] = (
    ("qwen3_vl", "none", ("dp2:24,tp2+sp:200", "cp2+ck9+rc:200")),
    ("gemma3", "tower", ("cp2:24,pp2:200",)),
    ("gemma4", "none", ("cp2:24,tp2+sp:200",)),
)
SHORT = ("dp2:24,tp2:200", "tp2+sp+rc:200", "cp2:200", "dp2+z3:200", "pp2+z2:24,dp2:200")
WIDE_2: tuple[Case, ...] = (
    *((family, "none", SHORT) for family in VISION_FAMILIES),
    *((family, "language", SHORT) for family in ("qwen3_vl", "gemma3")),
)
WIDE_4: tuple[Case, ...] = tuple(
    (family, "none", ("dp4:24,dp2tp2:60,cp2tp2+sp:200", "cp4+z3:200", "dp2cp2+rc:200"))
    for family in ("qwen3_vl", "gemma3", "mistral3")
)


def errors(rank, world, cases):
    found = {}
    for family, frozen, buckets in cases:
        of_family = image_errors(rank, world, family, buckets, frozen)
        found |= {f"{family} {name}": numbers for name, numbers in of_family.items()}
    return found


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, TWO)]
    + [pytest.param(2, (case,), marks=pytest.mark.slow) for case in WIDE_2]
    + [pytest.param(4, (case,), marks=pytest.mark.slow) for case in WIDE_4],
)
def test_losses_and_gradients_are_those_of_the_plain_model(world_size, cases):
    for of_rank in run_ranks(world_size, errors, cases, timeout=400):
        assert len(of_rank) == sum(len(case[2]) for case in cases)
        for name, numbers in of_rank.items():
            assert max(numbers) < 1e-11, (name, numbers)


# -- callers ------------------------------------------------------------------------------------------------------------


def loss_of_logits(batch, logits):
    labels = batch["labels"][:, 1:]
    total = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return total / (labels != -100).sum()


def of_own_loss(batch, model):
    given = {name: value for name, value in batch.items() if name != "labels"}
    loss_of_logits(batch, model(**given).logits.whole()).backward()


def of_scored_loss(batch, model):
    """The logits are scored, with graphs that training continues."""
    model(**batch).logits.whole()
    model(**batch).loss.backward()


def of_double(batch, model):
    (model(**batch).loss * 2.0).backward()


def of_single_rows(family, rows, model):
    """A call for each row, as with gradient accumulation."""
    batches = [batch_of_images(family, [row]) for row in rows]
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        model(**batch, num_items_in_batch=items).loss.backward()


def of_towers_again(family, rows, model):
    """No graph of the towers is kept beyond the call."""
    with patch.object(towers, "GRAPH_BYTES", 0):
        of_single_rows(family, rows, model)
    made = [picture for picture in model._steps.now.documents.beside.values() if picture is not None]
    assert all(picture.encoded is None or picture.encoded.live is None for picture in made)


SINGLE = ("single rows", "towers again")
"""The calls of one row each."""


def patches_of(batches):
    """Of all images: a table of patches, or images of patches of 14 x 14 pixels."""
    pixels = [batch["pixel_values"] for batch in batches if "pixel_values" in batch]
    return sum(len(each) if each.dim() == 2 else each.numel() // (3 * 14 * 14) for each in pixels)


def called(rank, world, family, buckets):
    """The errors of gradients, of reported patches, of losses and logits without gradients, and what else is to be 0."""
    mine = [rows_with_images(family, 0), image_rows(family, [(9, []), (30, []), (4, [])])]
    rows, plain, numbers = mine[rank % 2], vision_model(family).train(), {}
    _, expected = vision_reference(plain, family, [mine[each % 2] for each in range(world)])
    batch = batch_of_images(family, rows)
    calls = {
        "own loss": partial(of_own_loss, batch),
        "double": partial(of_double, batch),
        "single rows": partial(of_single_rows, family, rows),
        "scored": partial(of_scored_loss, batch),
        "towers again": partial(of_towers_again, family, rows),
    }
    switched = SwitchedModel(vision_model(family), parse_buckets(buckets)).train()
    for name, backward in calls.items():
        found = gradients_of(switched, backward)
        half = 0.5 if name == "double" else 1.0
        numbers[name] = max(errors_of({key: value * half for key, value in found.items()}, expected))
        all_rows = [mine[each % 2] for each in range(world)]
        groups = [[row] for of_rank in all_rows for row in of_rank] if name in SINGLE else all_rows
        patches = patches_of(batch_of_images(family, group) for group in groups)
        reported = sum(phase.image_patches for phase in switched.report.phases)
        times = reported / patches  # "scored" trains rows again, with the gradients that came
        numbers[f"patches, {name}"] = max(1 - times, 0) if name == "scored" else abs(times - 1)
        switched.zero_grad()
    switched.eval()
    plain.eval()
    with torch.no_grad(), exact_in_double(torch.float64):
        out = switched(**batch)
        logits = out.logits.whole()
        for index, row in enumerate(rows):
            alone = plain(**{n: v for n, v in batch_of_images(family, [row]).items() if n != "labels"}).logits[0]
            numbers[f"row {index}"] = float((logits[index, : len(alone)] - alone).abs().max())
        numbers["loss"] = float((out.loss - loss_of_logits(batch, logits)).abs())
        if "pixel_values" in batch:  # an image of the last row that has one
            pixels = batch["pixel_values"].clone()
            pixels[-1] += 1.0
            others = switched(**batch | {"pixel_values": pixels}).logits.whole()
        else:
            others = switched(**batch).logits.whole()
    changed = [bool((one != other).any()) for one, other in zip(logits, others, strict=True)]
    switched.close()
    return numbers, changed


@pytest.mark.parametrize(
    ("world_size", "family", "buckets"),
    [
        (2, "qwen3_vl", "dp2:24,tp2:200"),
        pytest.param(2, "gemma3", "pp2:200", marks=pytest.mark.slow),
        pytest.param(2, "mistral3", "tp2+sp+ck9:200", marks=pytest.mark.slow),
        pytest.param(4, "qwen2_5_vl", "dp4:24,cp2tp2:200", marks=pytest.mark.slow),
        pytest.param(4, "qwen3_vl", "dp4:24,dp2pp2:60,dp2tp2+rc:200", marks=pytest.mark.slow),
    ],
)
def test_callers_may_use_logits_factors_and_several_calls(world_size, family, buckets):
    """And a rank may have no images; another image changes no other row."""
    for rank, (numbers, changed) in enumerate(run_ranks(world_size, called, family, buckets, timeout=400)):
        assert max(numbers.values()) < 1e-11, numbers
        assert changed == ([False, True, False] if rank % 2 == 0 else [False] * 3)


# -- what is refused ----------------------------------------------------------------------------------------------------


def quantized_towers():
    """Gemma 3 as QLoRA recipes load it: every linear layer in 4 bits, and adapters on the language model."""
    plain = vision_model("gemma3", torch.float32)
    given = {"config": plain.config, "state_dict": plain.state_dict(), "dtype": torch.float32}
    model = type(plain).from_pretrained(None, **given, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    return get_peft_model(model, LoraConfig(r=2, target_modules=r".*language_model.*(q_proj|v_proj)"))


def drops_in_towers():
    model = vision_model("gemma3")
    model.model.vision_tower.encoder.layers[0].self_attn.dropout = 0.1
    return model


def gemma4_with_inputs_of_layers():
    config = vision_model("gemma4").config
    config.text_config.hidden_size_per_layer_input = 8
    return type(vision_model("gemma4"))(config).double()


def refusals(rank, world):
    """Errors on every rank, for what the batch of one rank, or the model, makes inexact."""
    teacher, rows = vision_model("gemma3").eval(), rows_with_images("gemma3", 0)
    batch = batch_of_images("gemma3", rows)
    positions = torch.arange(batch["input_ids"].shape[1])[None]
    pixels, clip = (
        batch["pixel_values"],
        {"pixel_values_videos": torch.ones(4, 6), "video_grid_thw": torch.tensor([[1, 2, 2]])},
    )
    cases = [
        ("gemma3", None, "dp2+ck9:200", {}, {}, "attend to each other in both directions"),
        ("gemma3", None, "cp2:200", {"context_parallel": "allgather"}, {}, "attend to each other in both directions"),
        ("gemma3", None, "dp2:200", {}, {"position_ids": positions}, "position_ids"),
        ("gemma3", None, "dp2:200", {}, {"pixel_values": pixels[:-1]}, "cannot be encoded"),
        ("gemma3", None, "dp2:200", {}, {"pixel_values_videos": pixels}, "pixel_values_videos"),
        ("gemma3", drops_in_towers(), "dp2:200", {}, {}, "has a probability of 0.1 for zeros"),
        ("gemma3", quantized_towers(), "dp2:200", {}, {}, "are quantized"),
        ("gemma4", gemma4_with_inputs_of_layers(), "dp2:200", {}, {}, "['per_layer_inputs']"),
        ("llava", None, "pp2:200", {"features": (PipeDream(),)}, {}, "stages update after every pack"),
        ("gemma3", None, "dp2:200", {}, {"against": True}, "compared with a teacher"),
        ("qwen3_vl", None, "dp2:200", {}, clip, "pixel_values_videos"),
        ("gemma3", None, "dp2:200", {}, {"input_features": torch.ones(1, 4, 6)}, "input_features"),
    ]  # fmt: skip
    for family, model, buckets, options, more, words in cases:
        switched = SwitchedModel(
            model or vision_model(family), parse_buckets(buckets), EngineOptions(**options)
        ).train()
        if "against" in more:
            more = {"against": Teacher(teacher, switched.engine).against(1.0, 1.0)}
        given = image_rows(family, [(5, [])]) if rank else rows_with_images(family, 0)
        with pytest.raises(HotspaError) as caught:
            switched(**batch_of_images(family, given) | (more if rank == 0 or "against" in more else {}))
        assert words in str(caught.value)
        switched.close()


def test_what_cannot_be_exact_is_an_error_on_every_rank():
    run_ranks(2, refusals, timeout=200)
