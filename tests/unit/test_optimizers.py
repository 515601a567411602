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


class Made(optim.Optimizer):
    """Steps along what `how` makes of a gradient."""

    def __init__(self, params, how, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.how = how

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for at, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.add_(self.how(p, at, group), alpha=-group["lr"])


def orthogonal(p, *_):
    if p.ndim != 2:
        return p.grad.sign()
    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
    return u @ v


LOOK_AT_SHAPES = {
    "decay of matrices": lambda p, *_: p.grad + 2 * p if p.ndim > 1 else p.grad,
    "by width": lambda p, *_: p.grad / p.shape[-1] if p.ndim > 1 else p.grad,
    "of wide ones": lambda p, *_: p.grad * (3 if p.shape[-1] == 70 else 1),
    "of tall ones": lambda p, *_: p.grad * (3 if p.shape[0] > 100_000 else 1),
    "by size": lambda p, *_: p.grad * (3 if p.numel() > 200 else 1),
    "of 3-D ones": lambda p, *_: p.grad * (3 if p.ndim == 3 else 1),
    "orthogonal": orthogonal,
}
ELEMENTWISE = {
    "by place": lambda p, at, _: p.grad * (1 + at),
    "by name": lambda p, at, group: p.grad * (2 if "b" in group["param_names"][at] else 1),
    "by mark": lambda p, *_: p.grad * getattr(p, "factor", 1),
}


def parameters_of_shapes():
    shapes = {"a": (100_001, 8), "b": (3, 70), "c": (3, 70), "d": (5,), "e": (2, 3, 4)}
    made = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    made["c"].factor = 7
    made["d"].requires_grad_(False)
    return made


@pytest.mark.parametrize("name", [*LOOK_AT_SHAPES, *ELEMENTWISE])
def test_a_step_that_looks_at_shapes_is_found(name):
    optimizer = Made(list(parameters_of_shapes().items()), (LOOK_AT_SHAPES | ELEMENTWISE)[name])
    if name in ELEMENTWISE:
        check_optimizer(optimizer)
    else:
        with pytest.raises(UnsupportedError, match=r"Made is not elementwise: it updates a parameter of shape \["):
            check_optimizer(optimizer)


def test_a_class_is_tried_on_matrices():
    check_elementwise(Made, {"how": ELEMENTWISE["by place"]})
    with pytest.raises(UnsupportedError, match=r"of shape \[3, 4\]"):
        check_elementwise(Made, {"how": LOOK_AT_SHAPES["by width"]})


def test_the_shapes_of_shares_are_those_of_the_model():
    shares = [nn.Parameter(torch.ones(12)), nn.Parameter(torch.ones(4))]
    optimizer = Made(shares, LOOK_AT_SHAPES["by width"])
    check_optimizer(optimizer)
    with pytest.raises(UnsupportedError, match=r"of shape \[6, 4\]"):
        check_optimizer(optimizer, shapes={id(shares[0]): (6, 4), id(shares[1]): (8,)})


@pytest.mark.parametrize("kind", ["set", "dict", "group"])
def test_ids_of_parameters_are_found(kind):
    model = parameters_of_shapes()
    optimizer = optim.SGD(model.values(), lr=0.1)
    chosen = id(model["b"])
    if kind == "group":
        optimizer.param_groups[0]["chosen"] = (chosen,)
    else:
        optimizer.chosen = {chosen} if kind == "set" else {"few": {chosen: 3.0}}
    with pytest.raises(UnsupportedError, match="SGD refers to 'b' outside of its parameter groups"):
        check_optimizer(optimizer, {id(p): name for name, p in model.items()})
