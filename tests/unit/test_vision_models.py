"""The tiny models that read images: what processors give is what the families' own forward takes, row by row and padded."""

import pytest
import torch

from tests.oracle import exact_in_double
from tests.vision_models import VISION_FAMILIES, batch_of_images, rows_with_images, vision_model, vision_reference

# towers whose last layers no feature is read from
IDLE = {"llava": ("vision_tower.encoder.layers.1", "post_layernorm"), "llava_onevision": ("post_layernorm",)}


def padded_loss(model, batch):
    with exact_in_double(model.dtype), torch.no_grad():
        return model(**batch, use_cache=False).loss.item()


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_rows_padded_together_give_what_each_row_gives(family):
    model = vision_model(family)
    rows = [rows_with_images(family, rank) for rank in range(2)]
    assert {len(row["images"]) for of_rank in rows for row in of_rank} == {0, 1, 2, 3}
    losses, gradients = vision_reference(model, family, rows)
    for found, of_rank in zip(losses, rows, strict=True):
        assert padded_loss(model, batch_of_images(family, of_rank)) == pytest.approx(found, rel=1e-12)
    idle = {name for name, gradient in gradients.items() if not gradient.any()}
    assert all(any(part in name for part in IDLE.get(family, ())) for name in idle), idle
    assert any("vis" in name for name in gradients.keys() - idle)
