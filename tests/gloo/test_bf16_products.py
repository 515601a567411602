"""The products that benchmarks put in place of torch's loops for bf16 compute what exact arithmetic rounds to."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.harness import run_ranks

pytestmark = pytest.mark.gloo

_ONE_ROUNDING = 2.0**-8
"""Half of the distance of two bf16 numbers, relative to the smaller of them."""


def _errors(rank: int, world_size: int) -> tuple[dict[str, float], list[float]]:
    """Of matrices, and of attention; in a process of its own, as what is installed stays."""
    from benchmarks import bf16_products  # type: ignore[import-not-found]

    assert bf16_products.install(everywhere=True)
    assert bf16_products.install(everywhere=True)  # once is enough
    lengths = 100, 1100  # all heads at once, and head by head
    return _of_matrices(bf16_products), [_of_attention(*case) for case in product(lengths, (False, True))]


def _of_matrices(bf16_products: Any) -> dict[str, float]:
    torch.manual_seed(0)
    rows, depth, columns = bf16_products.ROWS + 88, bf16_products.DEPTH + 476, 40  # several blocks of both
    x, weight, bias, grad = (
        torch.randn(shape).bfloat16() for shape in ((rows, depth), (columns, depth), (columns,), (rows, columns))
    )
    worst = {}
    for name, given in (("without bias", (x, weight)), ("with bias", (x, weight, bias))):
        found, wanted = (
            _with_gradients(F.linear, [each.to(dtype) for each in given], grad.to(dtype))
            for dtype in (torch.bfloat16, torch.float64)
        )
        worst[name] = _worst(found, wanted)
    batch, other = torch.randn(3, 70, 30).bfloat16(), torch.randn(3, 30, 20).bfloat16()
    worst["batched"] = _worst([torch.bmm(batch, other)], [torch.bmm(batch.double(), other.double())])
    assert torch.equal(x.float() @ weight.float().T, F.linear(x.float(), weight.float()))  # other dtypes as they were
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(F.linear(x.float(), weight.float()), F.linear(x, weight))
    return worst


def _of_attention(length: int, masked: bool) -> float:
    torch.manual_seed(0)
    shapes = (1, 8, length, 32), (1, 4, length, 32), (1, 4, length, 32)  # grouped queries
    query, key, value = (torch.randn(shape).bfloat16() for shape in shapes)
    mask: Any = None
    if masked:  # two sequences in a pack
        of = torch.arange(length) >= length // 3
        mask = (of[:, None] == of[None, :]).tril()[None, None]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not masked, enable_gqa=True)

    def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        hidden = ~(mask if masked else torch.ones(length, length).tril().bool())
        scores = (query @ key.transpose(-1, -2) / 32**0.5).masked_fill(hidden, float("-inf"))
        return scores.softmax(-1) @ value

    grad = torch.randn(shapes[0])
    given = [query, key, value]
    found = _with_gradients(attend, given, grad.bfloat16())
    wanted = _with_gradients(by_hand, [each.double() for each in given], grad.bfloat16().double())
    return _worst(found, wanted)


def _with_gradients(function: Any, given: list[Any], grad: Any) -> list[Any]:
    given = [each.clone().requires_grad_() for each in given]
    result = function(*given)
    return [result.detach(), *torch.autograd.grad(result, given, grad)]


def _worst(found: list[Any], wanted: list[Any]) -> float:
    """The largest error, relative to the largest number of its tensor."""
    return max(float((f.double() - w).abs().max() / w.abs().max()) for f, w in zip(found, wanted, strict=True))


def test_matrices_are_rounded_once_and_attention_and_its_gradients_a_few_times() -> None:
    ((of_matrices, of_attention),) = run_ranks(1, _errors)
    assert all(error <= 1.1 * _ONE_ROUNDING for error in of_matrices.values()), of_matrices
    assert max(of_attention) <= 6 * _ONE_ROUNDING  # the gradients are of rounded results
