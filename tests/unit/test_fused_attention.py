"""Attention of a slice of a pack, whose first tokens came elsewhere, against attention of whole sequences, in fp64."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from hf_hotspa.parallel import attention, fused_attention
from hf_hotspa.parallel.attention import PackedSequences, packed_attention
from tests.gloo.test_fully_sharded_memory import Allocated


class _Given:
    """A prefix of tensors, [1, K, tokens, D] of each sequence that has one."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values
        self.lengths, self.in_host = tuple(x.shape[2] for x in keys), False

    def before(self, module, key, value):
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)

    def takes_gradients(self, module):
        return None

    def fetched(self, module, before, device):
        return before


def slices(whole, cuts):
    """The slices `[before, stop)` of each sequence in a row of whole sequences."""
    starts = [0]
    for length in whole:
        starts.append(starts[-1] + length)
    return starts, [slice(starts[i] + before, starts[i] + stop) for i, (before, stop) in enumerate(cuts)]


def assert_same(found, expected, weights, inputs):
    """Results, and the gradients of inputs."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    got, wanted = (torch.autograd.grad((x * weights).sum(), inputs) for x in (found, expected))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


KINDS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window of one": {"sliding_window": 1},
    "soft cap": {"softcap": 1.5},
    "soft cap and window": {"softcap": 1.5, "sliding_window": 4},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "sliding_window": 6},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_see_both_sides_in_a_module_that_is_not_causal(kind, monkeypatch):
    """Forward and gradients of sequences of a pack, by the kernels of their kind, against one softmax of each sequence."""
    monkeypatch.setitem(attention.BLOCK_ELEMENTS, "cpu", 60)
    monkeypatch.setattr(fused_attention, "_QUERIES", (3, 4))
    monkeypatch.setattr(attention, "_MASKED_QUERIES", 5)
    options, module = dict(KINDS[kind]), torch.nn.Module()
    module.is_causal = False
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 13, 6, 17)
    query, key, value = (
        torch.randn(1, n, sum(lengths), 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for n in (4, 2, 2)
    )
    sinks = torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True)
    with_sinks = options.pop("sinks", False)
    given = options | ({"s_aux": sinks} if with_sinks else {})
    starts, places = slices(lengths, [(0, length) for length in lengths])
    pack = PackedSequences(lengths, torch.tensor(starts, dtype=torch.int32))
    out, _ = packed_attention(module, query, key, value, None, hotspa_pack=pack, **given)
    parts = []
    for place in places:
        q, (k, v) = query[0, :, place], (x[0, :, place].repeat_interleave(2, 0) for x in (key, value))
        scores = q @ k.transpose(1, 2) / 8**0.5
        scores = options["softcap"] * (scores / options["softcap"]).tanh() if "softcap" in options else scores
        position = torch.arange(scores.shape[1])
        far = (position[:, None] - position).abs() >= options.get("sliding_window", 99)
        scores = scores.masked_fill(far, -torch.inf)
        if with_sinks:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(position), 1)], 2)
        parts.append((scores.softmax(2)[..., : len(position)] @ v).transpose(0, 1))
    expected = torch.cat(parts)[None]
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    inputs = [query, key, value, *([sinks] if with_sinks else [])]
    for mine, others in zip(
        (out, *torch.autograd.grad((out * weights).sum(), inputs)),
        (expected, *torch.autograd.grad((expected * weights).sum(), inputs)),
        strict=True,
    ):
        assert torch.allclose(mine, others, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
def test_a_slice_with_its_prefix_is_that_part_of_the_whole(kind, heads, monkeypatch):
    """Forward, and the gradients of queries, own and earlier keys and values, for random borders."""
    monkeypatch.setitem(attention.BLOCK_ELEMENTS, "cpu", 60)  # several blocks of queries
    generator = torch.Generator().manual_seed(10 * list(KINDS).index(kind) + heads[0])
    options = dict(KINDS[kind])
    query_heads, kv_heads = heads
    module = torch.nn.Module()
    for _ in range(6):
        whole = torch.randint(1, 14, (4,), generator=generator).tolist()
        cuts = []
        for length in whole:
            before = int(torch.randint(0, length, (1,), generator=generator))
            cuts.append((before, int(torch.randint(before + 1, length + 1, (1,), generator=generator))))
        total = sum(whole)
        query, key, value = (
            torch.randn(1, n, total, 8, dtype=torch.float64, generator=generator, requires_grad=True)
            for n in (query_heads, kv_heads, kv_heads)
        )
        given = {k: v for k, v in options.items() if k != "sinks"}
        if options.get("sinks"):
            given["s_aux"] = torch.randn(query_heads, dtype=torch.float64, generator=generator, requires_grad=True)
        starts, own = slices(whole, cuts)
        pack = PackedSequences(tuple(whole), torch.tensor(starts, dtype=torch.int32))
        expected, _ = packed_attention(module, query, key, value, None, hotspa_pack=pack, **given)
        expected = torch.cat([expected[:, place] for place in own], 1)
        weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
        inputs = [query, key, value, *(x for x in given.values() if isinstance(x, torch.Tensor))]
        prefix = _Given(*([x[:, :, s : s + b] for s, (b, _) in zip(starts, cuts, strict=False)] for x in (key, value)))
        prefix.own = [stop - before for before, stop in cuts]
        row = PackedSequences(tuple(prefix.own), torch.zeros(0), prefix)
        q, k, v = (torch.cat([x[:, :, place] for place in own], 2) for x in (query, key, value))
        found, _ = packed_attention(module, q, k, v, None, hotspa_pack=row, **given)
        assert_same(found, expected, weights, inputs)


def test_gradients_of_a_prefix_are_taken_a_block_at_a_time(monkeypatch):
    """Where somebody takes them autograd brings none, and no tensor is as long as the prefix."""
    monkeypatch.setattr(fused_attention, "BLOCK_TOKENS", 4)
    generator = torch.Generator().manual_seed(0)
    query, key, value, keys, values = (
        torch.randn(1, heads, tokens, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads, tokens in ((6, 5), (2, 5), (2, 5), (2, 11), (2, 11))
    )
    weights = torch.randn(query.shape, dtype=torch.float64, generator=generator)
    inputs = query, key, value, keys, values
    attend = fused_attention.attend_with_prefix
    expected = torch.autograd.grad((attend(query, key, value, (keys, values), None) * weights).sum(), inputs)
    taken, blocks = [torch.zeros_like(keys), torch.zeros_like(values)], []

    def take(tokens, of_keys, of_values):
        blocks.append(of_keys.shape[2])
        for total, gradient in zip(taken, (of_keys, of_values), strict=True):
            total[:, :, tokens] += gradient

    out = attend(query, key, value, (keys, values), None, take)
    got = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)
    assert got[3:] == (None, None)
    assert sorted(blocks) == [3, 4, 4]
    for a, b in zip([*got[:3], *taken], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    # of values alone: autograd brings them
    keys.requires_grad_(False)
    out = attend(query, key, value, (keys, values), None, take)
    (of_values,) = torch.autograd.grad((out * weights).sum(), [values])
    torch.testing.assert_close(of_values, expected[4], rtol=1e-12, atol=1e-12)
    assert len(blocks) == 3


def drawn(lengths, heads, dtype=torch.float64, seed=0):
    """Queries, keys, values and sinks of a row that require gradients, and weights of its result."""
    generator = torch.Generator().manual_seed(seed)
    tokens, keys = sum(own for own, _ in lengths), sum(seen for _, seen in lengths)
    shapes = (1, heads[0], tokens, 8), (1, heads[1], keys, 8), (1, heads[1], keys, 8), (heads[0],)
    inputs = [torch.randn(shape, dtype=dtype, generator=generator, requires_grad=True) for shape in shapes]
    return inputs, torch.randn(shapes[0], dtype=dtype, generator=generator)


LENGTHS = ((9, 9), (1, 4), (7, 13), (0, 0), (2, 2))


@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 12])
def test_windows_and_sinks_are_the_definition(window, with_sinks, monkeypatch):
    """In blocks of a few queries and keys; gradients of queries, keys, values and sinks."""
    monkeypatch.setattr(fused_attention, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(fused_attention, "_QUERIES", (2, 4))
    inputs, weights = drawn(LENGTHS, (6, 2))
    used = [x for x in inputs if with_sinks or x is not inputs[3]]
    given = used if with_sinks else [*used, None]
    definition = attention.ExplicitAttention(LENGTHS, attention.Scores(8**-0.5, window))
    expected = fused_attention.attend_by(*given, definition)
    out = fused_attention.attend_by(*given, fused_attention.FusedAttention(LENGTHS, None, window))
    assert_same(out, expected, weights, used)


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_beside_the_variable_length_kernel(window, monkeypatch):
    """The kernel runs on CUDA only: others that compute the same stand in its place, and its arguments are looked at."""
    lengths = ((9, 9), (1, 4), (7, 13))
    pack = PackedSequences((9, 1, 7), torch.tensor([0, 9, 10, 17], dtype=torch.int32), gathered_keys=(9, 4, 13))
    kernel = fused_attention.FusedAttention(lengths, 0.3, window)
    reach = [-1 if window is None else window - 1, 0]

    def heads_first(*tensors):
        return [x.transpose(0, 1)[None] for x in tensors]

    def forward(query, key, value, of_queries, of_keys, most, most_keys, causal, scale, window_size, enable_gqa):
        assert of_queries.tolist() == [0, 9, 10, 17]
        assert (of_keys.tolist(), of_keys.dtype) == ([0, 9, 13, 26], torch.int32)
        assert (most, most_keys, causal, scale, window_size) == (9, 13, window is None, 0.3, reach)
        assert enable_gqa
        out, total = kernel.forward(*heads_first(query, key, value), None)
        return out[0].transpose(0, 1), total[0], torch.zeros(2)

    def backward(of_out, query, key, value, out, total, q, k, most, most_keys, causal, state, scale, window_size):
        assert (most, most_keys, causal, scale, window_size) == (9, 13, window is None, 0.3, reach)
        of_out, query, key, value, out = heads_first(of_out, query, key, value, out)
        gradients = kernel.backward(of_out, (query, key, value, None), out, total[None])
        return [x[0].transpose(0, 1) for x in gradients[:3]]

    import_module("torch.nn.attention.varlen")  # registers the names

    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", forward)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", backward)
    inputs, weights = drawn(lengths, (6, 2))
    call = attention.AttentionCall(0.3, window, None, inputs[3], 0.0)
    out = attention.varlen(*inputs[:3], pack, call).transpose(1, 2)
    expected = fused_attention.attend_by(*inputs, kernel)
    assert_same(out, expected, weights, inputs)


@pytest.mark.parametrize("window", [None, 128])
def test_memory_of_attention_with_sinks_grows_with_tokens(window):
    """And not with their square: one sequence of 2K, 4K and 8K tokens, forward and backward."""
    peaks = []
    for tokens in (2048, 4096, 8192):
        inputs, weights = drawn(((tokens, tokens),), (2, 1), torch.float32)
        pack = PackedSequences((tokens,), torch.zeros(0))
        with Allocated() as allocated:
            out, _ = packed_attention(
                torch.nn.Module(), *inputs[:3], None, hotspa_pack=pack, s_aux=inputs[3], sliding_window=window
            )
            torch.autograd.grad((out.transpose(1, 2) * weights).sum(), inputs)
        peaks.append(allocated.peak)
        del out
    assert peaks[2] < 4.1 * peaks[0]
    assert peaks[2] < 8192 * 8192


@pytest.mark.parametrize("window", [None, 3])
def test_caps_go_through_the_kernel_of_flash_attn_where_it_is_installed(window, monkeypatch):
    """The kernel runs on CUDA only: the definition stands in its place, and its arguments are looked at."""
    calls = []

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, most_q, most_k, softmax_scale, causal, window_size, softcap):
        calls.append((cu_q.tolist(), cu_k.tolist(), most_q, most_k, softmax_scale, causal, window_size, softcap))
        scores = attention.Scores(softmax_scale, None if window_size[0] < 0 else window_size[0] + 1, softcap)
        rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
        lengths = tuple(zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True))
        kernel = attention.ExplicitAttention(lengths, scores)
        return fused_attention.attend_by(*rows, None, kernel)[0].transpose(0, 1)

    module = torch.nn.Module()
    given = [torch.randn(1, heads, 17, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    options = {"scaling": 0.3, "softcap": 1.5, "sliding_window": window}

    def run():
        pack = PackedSequences((9, 1, 7), torch.tensor([0, 9, 10, 17], dtype=torch.int32))
        return packed_attention(module, *given, None, hotspa_pack=pack, **options)[0]

    expected = run()
    assert not calls
    monkeypatch.setattr(attention, "varlen_takes", lambda query, value: True)
    torch.testing.assert_close(run(), expected, rtol=0, atol=0)  # not installed: as before
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    attention.capping_kernel.cache_clear()
    try:
        out = run()
    finally:
        attention.capping_kernel.cache_clear()
    reach = -1 if window is None else window - 1
    assert calls == [([0, 9, 10, 17], [0, 9, 10, 17], 9, 9, 0.3, True, (reach, 0), 1.5)]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    for a, b in zip(*(torch.autograd.grad(x.sum(), given) for x in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
