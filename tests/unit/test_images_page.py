"""docs/images.md: its loop trains on made-up images, and its command knows the flags."""

import re
from pathlib import Path

import torch

from tests.vision_models import image_rows, vision_model, vision_processor

PAGE = (Path(__file__).parents[2] / "docs" / "images.md").read_text()


def test_the_loop_of_the_page_trains():
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    rows = image_rows("qwen3_vl", [(9, [(56, 28)]), (30, [(28, 28), (28, 56)]), (12, [(56, 56)])])
    model, losses = vision_model("qwen3_vl", torch.float32), []
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loop = code.replace("    optimizer.step()", "    losses.append(loss.item())\n    optimizer.step()")
    names = {
        "model": model, "processor": vision_processor("qwen3_vl"), "batches": [rows] * 6, "torch": torch, "losses": losses
    }  # fmt: skip
    exec(loop, names)
    assert losses[-1] < losses[0] - 0.05
    names["model"].write_back()
    moved = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert any("visual" in name for name in moved)
    assert any("language_model" in name for name in moved)
    names["model"].close()


def test_the_page_is_short():
    assert len(PAGE.split()) <= 600
