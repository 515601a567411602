"""DeepSpeed's CPU Adam against torch's AdamW, on shares as the master store has them.

These tests use a kernel that was compiled before: `make test-slow` does, on two ranks (gloo/test_deepspeed.py).
"""

import copy
from pathlib import Path

import deepspeed
import pytest
import torch
from torch.utils.cpp_extension import get_default_build_root

from hf_hotspa.trainer.cpu_adam import cpu_adam_class, load_cpu_adam

SIZES = (1, 7, 64, 1001, 0)


def compiled():
    """Whether torch's cache has the kernel of this very installation."""
    sources = str(Path(deepspeed.__file__).parent)
    builds = [path.parent for path in Path(get_default_build_root()).glob("**/cpu_adam/cpu_adam.so")]
    return any(sources in (build / "build.ninja").read_text() for build in builds)


@pytest.fixture(scope="module")
def optimizer_class():
    if not compiled():
        pytest.skip("the kernel was never compiled here: make test-slow")
    assert load_cpu_adam() is None
    return cpu_adam_class()


def make(cls, values):
    parameters = [torch.nn.Parameter(v.clone()) for v in values]
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
    return cls(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8), parameters


def step(optimizer, parameters, number):
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 / (number + 1)  # as a schedule does
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (number % 5 - 3)
    optimizer.step()


@pytest.mark.parametrize("from_torch", [False, True])
def test_it_goes_on_to_the_bit_from_the_state_of_another_object_or_as_torchs_adamw(optimizer_class, from_torch):
    """And the one that was never interrupted goes on beside them."""
    values = [torch.zeros(n) for n in SIZES]  # so that nothing of an update is rounded away
    optimizer, parameters = make(torch.optim.AdamW if from_torch else optimizer_class, values)
    for number in range(14):
        step(optimizer, parameters, number)
    resumed = []
    for _ in range(2):
        other, copies = make(optimizer_class, [p.detach() for p in parameters])
        state = copy.deepcopy(optimizer.state_dict())  # or all would share their tensors
        state["param_groups"] = [
            {**own, **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}}
            for own, group in zip(other.state_dict()["param_groups"], state["param_groups"], strict=True)
        ]
        other.load_state_dict(state)
        resumed.append((other, copies))
    for number in range(14, 30):
        for other, copies in [*resumed, (optimizer, parameters)]:
            step(other, copies, number)
    for found, again, expected in zip(*(copies for _, copies in resumed), parameters, strict=True):
        assert torch.equal(found, again)
        assert torch.allclose(found, expected, rtol=0, atol=1e-6 if from_torch else 0)
        assert not found.numel() or found.abs().max() > 1e-4
