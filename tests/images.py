"""Pieces of the tests of rows with images: what a switched model gives for them, compared with the plain model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_hotspa.model.model_kind import other_half
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import SwitchedModel
from tests.oracle import exact_in_double
from tests.vision_models import batch_of_images, rows_with_images, vision_model, vision_reference


def freeze(model: Any, what: str) -> None:
    """`all`: towers and projector; `tower`: not the projector; `language`: the language model, these not; `none`."""
    half = other_half(model)
    for name, parameter in model.named_parameters():
        if what == "language" and name not in half:
            parameter.requires_grad_(False)
    for name, parameter in half.items():
        if what == "all" or (what == "tower" and "project" not in name and "merger" not in name):
            parameter.requires_grad_(False)


def errors_of(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, float]:
    """The largest relative errors of gradients, of the language model and of the other half, and its name; of what should be
    zero (biases of keys), in units of all."""
    least = 1e-6 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    worst = {True: 0.0, False: 0.0}
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm() / torch.maximum(gradient.norm(), least))
        is_text = "language_model" in name or "text_model" in name or "lm_head" in name
        worst[is_text] = max(worst[is_text], error)
    return worst[True], worst[False]


def image_errors(
    rank: int, world: int, family: str, bucket_lists: Sequence[str], frozen: str
) -> dict[str, tuple[float, float, float]]:
    """By buckets: the errors of the loss and of the gradients of the language model and of the other half."""
    found = {}
    plain = vision_model(family).train()
    freeze(plain, frozen)
    losses, expected = vision_reference(plain, family, [rows_with_images(family, each) for each in range(world)])
    trained = {name for name, p in plain.named_parameters(remove_duplicate=False) if p.requires_grad}
    batch = batch_of_images(family, rows_with_images(family, rank))
    for buckets in bucket_lists:
        model = vision_model(family)
        freeze(model, frozen)
        switched, seen = SwitchedModel(model, parse_buckets(buckets)).train(), list[float]()

        def backward(called: SwitchedModel, seen: list[float] = seen) -> None:
            loss = called(**batch).loss
            loss.backward()
            seen.append(float(loss.detach()))

        gradients = gradients_of(switched, backward)
        errors = errors_of(gradients, {name: g for name, g in expected.items() if name in trained})
        found[buckets] = abs(seen[0] - losses[rank]), *errors
        switched.close()
    return found


def gradients_of(switched: SwitchedModel, backward: Callable[[SwitchedModel], None]) -> dict[str, torch.Tensor]:
    """The gradients of a step, of all parameters: `backward` makes its calls and their backwards."""
    with exact_in_double(torch.float64):
        backward(switched)
        switched.flush()
        return switched.engine.full_gradients()
