"""Which optimizers are elementwise: found by trial, however small or late their first steps are."""

import pytest
import torch
from torch import nn, optim
from transformers.optimization import Adafactor

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.trainer.optimizers import check_elementwise, check_optimizer

KINDS = [
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.RMSprop,
    optim.ASGD,
    optim.SGD,
]
RATES = [0.0, 1e-9, 1.0]


class ByNorm(optim.Optimizer):
    """Steps by the norms of whole tensors (LARS), after some steps of waiting."""

    def __init__(self, params, lr, wait=0):
        super().__init__(params, {"lr": lr, "wait": wait})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                if state["step"] > group["wait"]:
                    p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / p.grad.norm()))


class ByBlock(optim.SGD):
    """Rounds gradients of large tensors to multiples of a part of the largest of 256 elements."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.numel() >= 4096:
                    blocks = torch.nn.functional.pad(p.grad.flatten(), (0, -p.numel() % 256)).view(-1, 256)
                    scale = blocks.abs().amax(1, keepdim=True) / 127
                    p.grad = ((blocks / scale).round() * scale).flatten()[: p.numel()].view_as(p)
        return super().step(closure)


def test_blocks_of_large_tensors_are_found():
    with pytest.raises(UnsupportedError, match="ByBlock is not elementwise"):
        check_optimizer(ByBlock(weights(), 0.1))


def weights():
    return [nn.Parameter(torch.ones(4, 3))]


@pytest.mark.parametrize("rate", RATES)
def test_elementwise_ones_are_accepted(rate):
    for kind in KINDS:
        check_optimizer(kind(weights(), lr=rate))
        check_elementwise(kind, {"lr": rate, "weight_decay": 0.1})
    check_optimizer(optim.AdamW(weights(), lr=torch.tensor(rate)))
    check_optimizer(optim.AdamW(weights(), lr=rate, fused=True))
    check_optimizer(optim.SGD(weights(), lr=rate, momentum=0.9))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("wait", [0, 20])
def test_norms_are_found(rate, wait):
    with pytest.raises(UnsupportedError, match="ByNorm is not elementwise"):
        check_optimizer(ByNorm(weights(), rate, wait))


@pytest.mark.parametrize("options", [{"warmup_init": True}, {}, {"lr": 1e-9, "relative_step": False}])
def test_adafactor_is_found_in_its_own_warm_up(options):
    with pytest.raises(UnsupportedError, match="Adafactor is not elementwise"):
        check_optimizer(Adafactor(weights(), **options))
    with pytest.raises(UnsupportedError, match="Adafactor is not elementwise"):
        check_elementwise(Adafactor, options)
