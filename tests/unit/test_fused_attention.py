"""Attention of a slice of a pack, whose first tokens came elsewhere, against attention of whole sequences, in fp64."""

import pytest
import torch

from hf_hotspa.parallel import attention as explicit
from hf_hotspa.parallel import fused_attention
from hf_hotspa.parallel.attention import PackedSequences, packed_attention


class _Given:
    """A prefix of tensors, [1, K, tokens, D] of each sequence that has one."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values
        self.lengths = tuple(x.shape[2] for x in keys)

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
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
def test_a_slice_with_its_prefix_is_that_part_of_the_whole(kind, heads, monkeypatch):
    """Forward, and the gradients of queries, own and earlier keys and values, for random borders."""
    monkeypatch.setitem(explicit.BLOCK_ELEMENTS, "cpu", 60)  # several blocks of queries
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
        wanted = torch.autograd.grad((expected * weights).sum(), inputs)

        prefix = _Given(*([x[:, :, s : s + b] for s, (b, _) in zip(starts, cuts, strict=False)] for x in (key, value)))
        prefix.own = [stop - before for before, stop in cuts]
        row = PackedSequences(tuple(prefix.own), torch.zeros(0), prefix)
        q, k, v = (torch.cat([x[:, :, place] for place in own], 2) for x in (query, key, value))
        found, _ = packed_attention(module, q, k, v, None, hotspa_pack=row, **given)
        got = torch.autograd.grad((found * weights).sum(), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


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


def test_keys_of_a_row_with_prefixes():
    prefix = _Given([torch.zeros(1, 1, 3, 2)], [torch.zeros(1, 1, 3, 2)])
    row = PackedSequences((4, 2), torch.tensor([0, 4, 6], dtype=torch.int32), prefix)
    assert row.key_lengths == (7, 2)
    assert row.cu_keys.tolist() == [0, 7, 9]
    assert row.cu_keys.dtype == torch.int32
    whole = PackedSequences((4, 2), torch.tensor([0, 4, 6], dtype=torch.int32))
    assert whole.cu_keys is whole.cu_seqlens
