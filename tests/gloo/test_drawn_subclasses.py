"""Drawn subclasses of a Trainer on two processes: equal to the stock Trainer under DDP, or rejected by name."""

import re
from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tests.moves import Kit, differences
from tests.overriding import CHANGES, Notes, drawn, files_of

pytestmark = pytest.mark.gloo


def run_all(rank, world_size, numbers, stock, folder):
    """Of each number what its class shows of a run, or the error that rejects it before the first step."""
    from hf_hotspa.errors import HotspaError
    from hf_hotspa.trainer import switched

    results = []
    for number in numbers:
        path = Path(folder) / f"{number}-{stock}"
        path.mkdir(exist_ok=True)
        kit, notes = Kit(stock, world_size, path), Notes(path / "out")
        cls = switched(drawn(number, notes)) if number % 2 and not stock else drawn(number, notes, kit.trainer_class)
        rows = kit.rows(12)
        args = kit.arguments(max_steps=3, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
        try:
            seen = kit.train(kit.trainer(cls, args=args, train_dataset=rows, eval_dataset=rows))
            torch.distributed.barrier()
            written = files_of(path / "out")
            results.append({**seen, "calls": notes.calls, "weights seen": notes.weights, "written": written})
        except HotspaError as failure:
            assert not kit.counter.made
            results.append(str(failure))
        kit.close()
    return results


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_drawn_subclasses_are_equal_or_rejected_by_name(tmp_path):
    numbers = list(range(41, 81))
    stock = run_ranks(2, run_all, numbers, True, str(tmp_path), timeout=560)
    ours = run_ranks(2, run_all, numbers, False, str(tmp_path), timeout=560)
    wrong = {}
    for number, expected, found in zip(numbers * 2, [*stock[0], *stock[1]], [*ours[0], *ours[1]], strict=True):
        if isinstance(found, str):
            if not re.search(r"HSP-0\d\d.*(" + "|".join(CHANGES) + ")", found):
                wrong[number] = found
        elif text := differences(found, expected, 2e-5):
            wrong[number] = text[:4]
    assert not wrong
