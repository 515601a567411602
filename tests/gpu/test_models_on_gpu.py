"""Models whose kernels differ on CUDA: attention sinks beside the variable-length kernel, and bases in 4 bits."""

import itertools
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

pytestmark = pytest.mark.gpu


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
def test_sinks_without_explicit_scores(heads: tuple[int, int], window: int | None):
    """Output and gradients, those of the sinks among them, as near to fp64 as bf16 is, and in memory linear in tokens."""
    from hf_hotspa.parallel.attention import PackedSequences, packed_attention, varlen_takes

    lengths, generator = (700, 1, 33, 290), torch.Generator("cuda").manual_seed(heads[1])
    shapes = [(1, heads[0], sum(lengths), 64), *[(1, heads[1], sum(lengths), 64)] * 2, (heads[0],)]
    given = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes]
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    weight = torch.randn(1, sum(lengths), heads[0], 64, device="cuda", generator=generator).bfloat16()

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        query, key, value, sinks = inputs = [x.to(dtype).requires_grad_() for x in given]
        assert varlen_takes(query, value) == (dtype == torch.bfloat16)
        options = {} if window is None else {"sliding_window": window}
        pack = PackedSequences(lengths, borders)
        out, _ = packed_attention(torch.nn.Module(), query, key, value, None, hotspa_pack=pack, s_aux=sinks, **options)
        return [out, *torch.autograd.grad((out * weight.to(dtype)).sum(), inputs)]

    for found, exact in zip(results(torch.bfloat16), results(torch.float64), strict=True):
        assert relative(found, exact) < 0.02


def gradients_of_four_bits(rank: int, world_size: int, buckets: str) -> float:
    """The worst relative error of an adapter's gradient in fp32 beside PEFT and bitsandbytes in one process on CPU."""
    from tests.gloo.test_lora import trained_gradients
    from tests.oracle import random_rows
    from tests.qlora import WIDE, tiny_qlora
    from tests.worlds import make_engine, make_mini_batch, worst_error

    torch.backends.cuda.matmul.allow_tf32 = False
    given: Any = tiny_qlora("llama", model=WIDE)
    rows = random_rows(12, given.config.vocab_size, longest=60)
    exact = trained_gradients(given, rows)
    engine = make_engine(given, buckets)
    mini_batch = make_mini_batch(engine, rows)
    if rank == 0:
        worst, _ = worst_error(engine, mini_batch, *exact)
    else:
        engine.forward_backward(mini_batch)
        engine.full_gradients()
        worst = 0.0
    engine.close()
    return worst


@pytest.mark.parametrize(
    ("ranks", "buckets"),
    [(1, "dp1:60@64"), (2, "dp2:16@64,tp2:30@64,pp2:60@64"), (4, "dp4+z3:16@64,dp2tp2:30@64,tp2pp2:60@64")],
)
def test_bases_in_four_bits(ranks: int, buckets: str):
    assert max(run_ranks(ranks, gradients_of_four_bits, buckets, device="cuda", timeout=300)) < 1e-5
