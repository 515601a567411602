"""The first steps of the ladder of exactness: what repeats, and what a switch leaves as it is, bit for bit.

docs/exactness.md says which test holds which step; those that compare with the plain model are in test_exact.py and
test_trainer.py, those that resume in test_resume.py.
"""

import random
from pathlib import Path

import pytest
import torch

from tests.checkpoints import memory_folder
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.training_runs import contents, newest, several_runs
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

NUM_SWITCHES = 24


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_run_twice_gives_the_same_bits(world):
    with memory_folder() as folder:
        runs = [(str(folder / name), None, {}) for name in ("a", "b")]
        for first, second in run_ranks(world, several_runs, runs):
            assert first == second
        assert contents(newest(folder / "a")) == contents(newest(Path(folder, "b")))


def bits(tensors):
    return [None if t is None else t.detach().contiguous().view(torch.uint8).clone() for t in tensors]


def same(found, expected):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def there_and_back(rank, world_size, dtype):
    """Whether weights, masters, gradients and loss are what they are without the switches in between."""
    model = tiny_model("qwen3_qk_norm_tied")
    engine = make_engine(model, "dp4:16@32,dp2tp2:32,tp2pp2:60", compute_dtype=dtype, second_source=True)
    mini_batch = make_mini_batch(engine, random_rows(9, model.config.vocab_size, longest=60))
    loss = engine.forward_backward(mini_batch).loss
    gradients, masters = bits(engine.master.gradients), bits(engine.master.weights)
    runners, rng = list(engine.phases.values()), random.Random(5)
    first = runners[0]
    first.load()
    expected = bits(first.weights)
    first.release()
    previous = first
    for runner in [*(rng.choice([r for r in runners if r is not first]) for _ in range(NUM_SWITCHES)), first]:
        runner.load(previous if runner is not previous else None)
        runner.release()
        previous = runner
    kept = [same(bits(first.weights), expected), same(bits(engine.master.weights), masters),
            same(bits(engine.master.gradients), gradients)]  # fmt: skip
    again = engine.forward_backward(mini_batch).loss
    return [*kept, again == loss, same(bits(engine.master.gradients), gradients)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_switches_without_a_step_change_no_bit(dtype):
    assert run_ranks(4, there_and_back, dtype) == [[True] * 5] * 4
