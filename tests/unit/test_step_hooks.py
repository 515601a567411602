"""What is attached to an optimizer: what works on each element is accepted, anything else is an error by name."""

import logging
from types import MethodType

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.trainer.step_hooks import attached, check_attached

CALLS: list[object] = []


def gradients(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def halved(optimizer, *_):
    for p in gradients(optimizer):
        p.grad.mul_(0.5).clamp_(-0.01, 0.01)


@torch.no_grad()
def bounded(optimizer, *_):
    for p in gradients(optimizer):
        p.clamp_(-1, 1)


def counted(optimizer, *_):
    CALLS.append(optimizer.param_groups[0]["lr"])
    logging.getLogger(__name__).warning("a step")


class Counter:
    def __init__(self):
        self.calls = 0

    def __call__(self, optimizer, *_):
        self.calls += 1

    def method(self, optimizer, *_):
        self.calls += 1
        halved(optimizer)


def of_all(optimizer, *_):
    torch.nn.utils.clip_grad_norm_(gradients(optimizer), 0.1)


def of_one(optimizer, *_):
    for p in gradients(optimizer):
        p.grad.div_(p.grad.norm())


def centred(optimizer, *_):
    for p in gradients(optimizer):
        if p.grad.ndim > 1:
            p.grad.sub_(p.grad.mean(1, keepdim=True))


def read(optimizer, *_):
    CALLS.append(float(sum(p.grad.norm() for p in gradients(optimizer))))


@torch.no_grad()
def of_rows(optimizer, *_):
    for p in gradients(optimizer):
        p.div_(p.norm(dim=-1, keepdim=True).clamp(min=1))


def made():
    return torch.optim.SGD(nn.Linear(3, 4).parameters(), lr=0.1)


COUNTER = Counter()
ELEMENTWISE = {"halved": halved, "bounded": bounded, "counted": counted, "object": COUNTER, "method": COUNTER.method}
OTHERS = {"of_all": of_all, "of_one": of_one, "centred": centred, "read": read, "of_rows": of_rows}


def attach(optimizer, how, function):
    old = optimizer.step
    if how == "before":
        optimizer.register_step_pre_hook(function)
    elif how == "after":
        optimizer.register_step_post_hook(function)
    elif how == "step":
        optimizer.step = lambda *a, **k: (function(optimizer), old(*a, **k))[1]
    else:
        optimizer.step = MethodType(lambda self, closure=None: (old(closure), function(self))[0], optimizer)


@pytest.mark.parametrize(
    ("how", "scheduled"),
    [("before", "after"), ("after", "not"), ("step", "before"), ("method", "before"), ("method", "after")],
)
def test_what_is_attached_is_tried(how, scheduled, caplog):
    for name, function in (ELEMENTWISE | OTHERS).items():
        optimizer = made()
        if scheduled == "before":
            LambdaLR(optimizer, lambda step: 1.0)
        attach(optimizer, how, function)
        if scheduled == "after":
            LambdaLR(optimizer, lambda step: 1.0)
        ((when, hook),) = attached(optimizer)
        weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        if name in ELEMENTWISE:
            check_attached(optimizer, when, hook)
        else:
            with pytest.raises(UnsupportedError, match=f"SGD has a .*(hook '{name}'|step 'attach).*is not elementwise"):
                check_attached(optimizer, when, hook)
        assert all(map(torch.equal, weights, optimizer.param_groups[0]["params"]))
    assert (CALLS, COUNTER.calls, caplog.records) == ([], 0, [])  # copies were called


def test_what_refers_to_a_model_or_to_weights_is_named():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = [*model.parameters()]

    def of_model(*_):
        for p in model.parameters():
            p.grad.mul_(2)

    def of_list(*_):
        for p in captured:
            p.grad.mul_(2)

    for hook in (of_model, of_list):
        with pytest.raises(
            UnsupportedError, match=r"of_(model|list)', which cannot be shown to be elementwise: it refers"
        ):
            check_attached(optimizer, "before", hook)


def test_schedulers_and_libraries_attach_nothing_of_the_users():
    optimizer = made()
    LambdaLR(optimizer, lambda step: 1.0)
    assert "step" in vars(optimizer)
    assert not [*attached(optimizer)]

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    own = Own(nn.Linear(3, 4).parameters(), lr=0.1)
    LambdaLR(own, lambda step: 1.0)
    assert not [*attached(own)]
    handle = register_optimizer_step_post_hook(of_all)
    try:
        assert [*attached(optimizer)] == [("after", of_all)]
    finally:
        handle.remove()
