"""Trained parameters that no strategy holds: the modules of a multimodal model that its caller runs."""

import pytest
import torch
from torch.optim import AdamW

from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import SwitchedModel
from tests.harness import run_ranks
from tests.multimodal import multimodal_model
from tests.oracle import exact_in_double
from tests.switched import worst

pytestmark = pytest.mark.gloo

STEPS = 3


def model_of(trained):
    model = multimodal_model("gemma3")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return model


def batches(step, world):
    """Rows of text, and images for all ranks but the first, and for no rank in the second step."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for rank in range(world):
        ids = torch.randint(4, 150, (2, 9 + 7 * rank), generator=generator)
        images = torch.randn(rank, 3, 28, 28, dtype=torch.float64, generator=generator)
        made.append((ids, images if rank and step != 1 else None))
    return made


def of_images(model, images):
    features = model.model.get_image_features(images, return_dict=True).pooler_output
    return features.square().mean() / 7 + features[..., 0].sum()


def plain(trained, world):
    """Gradients by step, and the weights afterwards: the mean of the ranks' losses of text, and the sum of those of images."""
    model, every = model_of(trained), []
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    with exact_in_double(torch.float64):
        for step in range(STEPS):
            optimizer.zero_grad()
            for ids, images in batches(step, world):
                loss = model(input_ids=ids, labels=ids).loss / world
                if images is not None:
                    loss = loss + of_images(model, images)
                if loss.requires_grad:
                    loss.backward()
            every.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
            optimizer.step()
    return every, model.state_dict()


def trained_by_the_caller(rank, world, trained, buckets):
    expected, ends = plain(trained, world)
    model = model_of(trained)
    switched = SwitchedModel(model, parse_buckets(buckets)).train()
    optimizer, found = AdamW(switched.parameters(), lr=1e-2, weight_decay=0.1), []
    beside = switched.engine.beside
    for step in range(STEPS):
        ids, images = batches(step, world)[rank]
        with exact_in_double(torch.float64):
            out = switched(input_ids=ids, labels=ids)
            if step != 1:
                beside.load(switched._steps.version, True)
            loss = out.loss
            if images is not None:
                loss = loss + of_images(model, images)
            loss.backward()
            switched.flush()
            gradients = switched.engine.full_gradients()
            reached = switched.engine.master.reached
        shown = {name: g for name, g in expected[step].items() if g is not None}
        same = reached == {name for name in shown if name in switched.engine.master.parameters}
        same &= not any(bool(g.any()) for n, g in gradients.items() if n not in shown and n != "lm_head.weight")
        found.append((worst({name: gradients[name] for name in shown}, shown), same))
        optimizer.step()
        optimizer.zero_grad()
    switched.refresh()
    state = model.state_dict()
    apart = max(float((state[name] - ends[name]).abs().max()) for name in state)
    switched.close()
    return found, apart


ALL = ("",)
TOWER, PROJECTION = ("vision_tower", "multi_modal_projector", "embed_tokens"), ("multi_modal_projector", "norm")
CASES = (
    (2, ALL, "dp2:12,tp2+sp:64"),
    (2, PROJECTION, "pp2:64"),
    (4, TOWER, "dp4:12,tp2pp2:64"),
    (4, ALL, "dp2tp2+z3:64"),
)


@pytest.mark.parametrize(
    ("world_size", "trained", "buckets"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_steps_of_both_halves_are_those_of_one_process(world_size, trained, buckets):
    """With images on some ranks, and in a step on none: then the optimizer leaves these parameters as they are."""
    for found, apart in run_ranks(world_size, trained_by_the_caller, trained, buckets):
        for error, is_same in found:
            assert error <= 1e-11
            assert is_same
        assert apart <= 1e-9
