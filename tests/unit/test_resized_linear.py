"""ZERO-resizing of a product, in fp64: the kept columns are those of a product whose other columns are zero."""

import pytest
import torch

from hf_hotspa.features.slow_devices.columns import LayerColumns, random_columns
from hf_hotspa.features.slow_devices.flexible_linear import GradientMemory, OwnColumns, RowProduct

TOKENS, COLUMNS, OUTPUTS = 7, 12, 5


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(1)
    x, w, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((TOKENS, COLUMNS), (OUTPUTS, COLUMNS), (TOKENS, OUTPUTS))
    )
    return x, w, grad


def run(x, w, grad, kept, imputation="zero", memory=None):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = RowProduct.apply(x, w, [], OwnColumns(COLUMNS, COLUMNS, torch.tensor(kept), imputation, memory))
    y.backward(grad)
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("count", [1, 4, 11])
def test_lineage_and_zeros(tensors, count):
    x, w, grad = tensors
    columns = LayerColumns(COLUMNS, random_columns(COLUMNS, count, "a"))
    kept, pruned = list(columns.kept), list(columns.pruned)
    y, dx, dw = run(x, w, grad, kept)
    assert torch.allclose(y, x @ w.T - x[:, pruned] @ w[:, pruned].T, rtol=0, atol=1e-13)
    without_x, without_w = x.clone(), w.clone()
    without_x[:, pruned], without_w[:, pruned] = 0.0, 0.0
    a, b = without_x.requires_grad_(), without_w.requires_grad_()
    (a @ b.T).backward(grad)
    assert torch.allclose(dx[:, kept], a.grad[:, kept], rtol=0, atol=1e-13)
    assert torch.allclose(dw[:, kept], b.grad[:, kept], rtol=0, atol=1e-13)
    assert not dx[:, pruned].any()
    assert not dw[:, pruned].any()
    assert dx.shape == x.shape
    assert dw.shape == w.shape


def test_average_imputes_the_mean_of_the_kept_columns(tensors):
    x, w, grad = tensors
    kept, pruned = [1, 4, 5], [0, 2, 3, 6, 7, 8, 9, 10, 11]
    _, dx, dw = run(x, w, grad, kept, "average")
    _, zero_dx, zero_dw = run(x, w, grad, kept)
    for found, zero in ((dx, zero_dx), (dw, zero_dw)):
        assert torch.equal(found[:, kept], zero[:, kept])
        mean = zero[:, kept].mean(1, keepdim=True).expand(-1, len(pruned))
        assert torch.allclose(found[:, pruned], mean, rtol=0, atol=1e-14)


def test_same_imputes_the_gradient_of_the_iteration_before(tensors):
    """With the same weights and inputs twice, the second gradient of the weight is the whole one of the first."""
    x, w, grad = tensors
    kept, pruned = [1, 4, 5], [0, 2, 3, 6, 7, 8, 9, 10, 11]
    memory = GradientMemory()
    memory.begin_step()
    _, _, whole = run(x, w, grad, list(range(COLUMNS)), "same", memory)
    memory.begin_step()
    _, dx, dw = run(x, w, grad, kept, "same", memory)
    assert torch.allclose(dw, whole, rtol=0, atol=1e-13)
    assert torch.equal(dw[:, pruned], whole[:, pruned])
    assert not dx[:, pruned].any()  # of an input there is no memory: its tokens are others
    _, _, more = run(x, w, grad, kept, "same", memory)  # a second pack of the same mini-batch
    assert not more[:, pruned].any()
    memory.begin_step()
    _, _, third = run(x, w, grad, kept, "same", memory)
    assert torch.equal(third[:, pruned], whole[:, pruned])  # goes on for as long as nothing is computed
    assert torch.allclose(third[:, kept], whole[:, kept], rtol=0, atol=1e-13)
