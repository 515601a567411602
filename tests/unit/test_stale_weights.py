"""The guard on the parameters of a model whose weights are old."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_hotspa.errors import HotspaError
from hf_hotspa.switched.model_object import guard, release, structure_only

LOOKS = {
    "forward": lambda m, p: m(torch.zeros(1, dtype=torch.long)),
    "state dict": lambda m, p: m.state_dict(),
    "gradient": lambda m, p: p.grad,
    "data": lambda m, p: p.data,
    "sum": lambda m, p: torch.zeros(4, 4) + p,
    "copy": lambda m, p: copy.deepcopy(m),
    "list": lambda m, p: p.tolist(),
    "numpy": lambda m, p: p.numpy(),
    "element": lambda m, p: float(p[0, 0]),
    "hook": lambda m, p: p.register_hook(print),
    "other data": lambda m, p: setattr(p, "data", torch.zeros(4, 4)),
    "pointer": lambda m, p: p.data_ptr(),
    "pickle": lambda m, p: pickle.dumps(p),
    "dtype": lambda m, p: m.to(torch.float64),
    "initialize": lambda m, p: nn.init.zeros_(p),
    "load": lambda m, p: p.copy_(torch.zeros(4, 4)),
    "equal": lambda m, p: torch.equal(p, p),
    "storage": lambda m, p: p.untyped_storage(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_values_are_refused_and_facts_are_not(look):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4).requires_grad_(False))
    before, parameter = list(model.parameters()), model[1].weight
    guard(model)
    guard(model)
    with pytest.raises(HotspaError, match=r"are not the weights of this training step|has no gradient here"):
        LOOKS[look](model, parameter)
    assert (parameter.shape, parameter.dtype, parameter.numel(), len(parameter)) == ((4, 4), torch.float32, 16, 4)
    assert parameter.requires_grad
    assert isinstance(parameter, nn.Parameter)
    assert "master store" in repr(parameter)
    assert model[2].weight.sum() == 4  # frozen weights are never old
    with structure_only():
        assert list(model.state_dict())[1] == "1.weight"
    release(model)
    assert all(a is b and type(a) is nn.Parameter for a, b in zip(model.parameters(), before, strict=True))
    model(torch.zeros(1, dtype=torch.long)).sum().backward()
