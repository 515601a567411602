"""Gradients in a wider dtype than that of the weights: the same bits with an old torch as with a new one."""

import pytest
import torch
from torch import nn

from hf_hotspa.model import replica
from hf_hotspa.model.replica import KNOWS_GRAD_DTYPE, bind_gradient, widen
from tests.worlds import gradient_of


def accumulated(dtype, wide, uses=1):
    """What three backward passes leave in a buffer, of a weight that each uses so often."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8, generator=generator).to(dtype))
    widen(weight, wide)
    counts = []
    weight.register_post_accumulate_grad_hook(lambda _: counts.append(1))
    buffer = torch.full((8, 8), 1000.0, dtype=wide)
    bind_gradient(weight, buffer)
    for _ in range(3):
        x = torch.randn(4, 8, generator=generator).to(dtype)
        for _ in range(uses):
            x = x @ weight
        x.sum().backward()
    assert gradient_of(weight) is buffer
    assert counts == [1, 1, 1]
    bind_gradient(weight, None)
    assert weight.grad is None
    assert gradient_of(weight) is None
    return buffer


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_an_older_torch_sums_the_same_bits(dtype, wide, monkeypatch):
    monkeypatch.setattr(replica, "KNOWS_GRAD_DTYPE", False)
    without = accumulated(dtype, wide)
    assert without.dtype == wide
    assert not torch.equal(without, torch.full_like(without, 1000.0))
    if KNOWS_GRAD_DTYPE:
        monkeypatch.undo()
        assert torch.equal(without, accumulated(dtype, wide))


@pytest.mark.skipif(not KNOWS_GRAD_DTYPE, reason="compares with a torch that adds to wider gradients itself")
def test_several_uses_in_one_backward_are_summed_in_the_dtype_of_the_weight(monkeypatch):
    expected = accumulated(torch.bfloat16, torch.float32, uses=2)
    monkeypatch.setattr(replica, "KNOWS_GRAD_DTYPE", False)
    got = accumulated(torch.bfloat16, torch.float32, uses=2)
    assert (got - expected).abs().max() <= 2**-7 * (expected - 1000).abs().max()


def test_a_backward_after_the_buffer_is_gone_leaves_nothing(monkeypatch):
    monkeypatch.setattr(replica, "KNOWS_GRAD_DTYPE", False)
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    widen(weight, torch.float32)
    weight.sum().backward()
    assert weight.grad is None
