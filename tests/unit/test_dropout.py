"""Keyed dropout: its hash, its statistics, and what of a model's dropout is refused."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.features.dropout.dropout import DropoutMasks, KeyedDropout, _key, feature_keys, kept, token_keys
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel.attention import BLOCK_ELEMENTS, AttentionDropout, ExplicitAttention, PackedSequences, Scores
from hf_hotspa.parallel.fused_attention import attend_by
from tests.families import tiny_model
from tests.gloo.test_dropout import plain_attention
from tests.tiny_families import tiny_model_of

TOKENS, WIDTH = 256, 512


def pack_of(lengths, keys):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return MicroBatch(positions, positions, positions, ends.int(), tuple(lengths), 0, tuple(keys))


def mask(p=0.3, seed=1, step=2, row=3, module="layers.0.lora_dropout.default", tokens=TOKENS, width=WIDTH):
    keys = token_keys(seed, step, pack_of([tokens], [(row, 0)]))
    return kept(keys, feature_keys(module, torch.arange(width)), p)


# --------------------------------------------------------------------------------------------------------- the hash


def _wrap(x, bits):
    return (x + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def _plain_hash(tokens, features):
    """The hash of one element in Python's integers, which never wrap around by themselves."""
    (low_t, high_t), (low_f, high_f) = tokens, features
    x = _wrap((low_t ^ low_f) * 0x85EBCA6B, 32)
    x ^= (x & 0xFFFFFFFF) >> 15
    x = _wrap(x + high_t, 32) ^ high_f
    return _wrap(x * 0xC2B2AE35, 32)


def _plain_mix(x):
    x &= (1 << 64) - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return x ^ (x >> 31)


def test_the_hash_is_the_documented_one():
    """32-bit and 64-bit products wrap around in torch as they do in the definition."""
    golden = 0x9E3779B97F4A7C15
    low, high = feature_keys("m", torch.arange(5))
    for index in range(5):
        expected = _plain_mix(_key("m") + index * golden)
        assert (int(low[index]) & 0xFFFFFFFF, int(high[index]) & 0xFFFFFFFF) == (expected & 0xFFFFFFFF, expected >> 32)
    tokens = token_keys(0, 0, pack_of([40], [(7, 5)]))
    features = feature_keys("m", torch.arange(60))
    for p in (0.001, 0.5, 0.97):
        found = kept(tokens, features, p)
        for t in (0, 1, 39):
            for f in (0, 31, 59):
                pair = [(int(low[i]), int(high[i])) for (low, high), i in ((tokens, (t, 0)), (features, f))]
                assert bool(found[t, f]) == (_plain_hash(*pair) + 2**31 >= p * 2**32)


def test_a_mask_does_not_depend_on_how_much_is_hashed_at_a_time(monkeypatch):
    whole = mask()
    monkeypatch.setattr("hf_hotspa.features.dropout.dropout._AT_A_TIME", 700)
    assert torch.equal(mask(), whole)


def test_a_token_keeps_its_mask_in_every_pack():
    features = feature_keys("m", torch.arange(64))
    alone = [kept(token_keys(1, 2, pack_of([n], [(row, 0)])), features, 0.5) for row, n in ((4, 9), (8, 5))]
    packed = kept(token_keys(1, 2, pack_of([5, 9, 2], [(8, 0), (4, 0), (-1, 0)])), features, 0.5)
    assert torch.equal(packed[:5], alone[1])
    assert torch.equal(packed[5:14], alone[0])
    # the second part of a row that was split
    assert torch.equal(kept(token_keys(1, 2, pack_of([4], [(4, 5)])), features, 0.5), alone[0][5:])
    # a shard sees some of the features
    some = feature_keys("m", torch.tensor([3, 4, 60]))
    assert torch.equal(kept(token_keys(1, 2, pack_of([9], [(4, 0)])), some, 0.5), alone[0][:, [3, 4, 60]])


def test_the_expectation_is_what_goes_in():
    masks = DropoutMasks(5, None, False)
    masks.begin(PackedSequences((TOKENS,), torch.tensor([0, TOKENS])), pack_of([TOKENS], [(0, 0)]), whole=None)
    module = KeyedDropout("m", 0.25, masks)
    x = torch.ones(1, TOKENS, WIDTH, requires_grad=True)
    out = module(x)
    assert out.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(out.detach().mean()) == pytest.approx(1.0, abs=5 * math.sqrt(1 / 3 / out.numel()))
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
    assert not torch.equal(module(x), out)  # a second call, of attention and MLP of one layer say, draws anew
    masks.begin(PackedSequences((TOKENS,), torch.tensor([0, TOKENS])), pack_of([TOKENS], [(0, 0)]), whole=None)
    assert torch.equal(module(x), out)
    assert module.eval()(x) is x
    assert not KeyedDropout("m", 1.0, masks)(x).any()
    with pytest.raises(ModelError, match=r"the dropout m got a tensor of the shape \(1, 255, 512\)"):
        module.train()(x[:, 1:])
    with pytest.raises(ModelError, match="tokens of a pack"):
        module(torch.ones(2, TOKENS, WIDTH))


# ------------------------------------------------------------------------------------------------ attention probabilities


class _Attention(torch.nn.Module):
    """A module whose forward goes through the interface of transformers."""

    def forward(self, x):
        return ALL_ATTENTION_FUNCTIONS[x]


def pair_mask(p=0.3, seed=1, step=2, row=3, module="layers.0.self_attn", heads=(0, 4), length=192, first=0):
    """bool [H, length, length] as attention draws them for one sequence alone in its pack."""
    masks = DropoutMasks(seed, None, False)
    masks.step = step
    attention = _Attention()
    masks.attentions = {attention: (module, heads[0])}
    pack = PackedSequences((length,), torch.tensor([0, length]))
    masks.begin(pack, pack_of([length], [(row, first)]), whole=None)
    drawn = pack.attention_dropout(attention, p, heads[1] - heads[0], pack)
    return drawn.keep(0, (0, length), (0, length))


def correlation(a, b, p):
    """Of what is dropped beyond the rate, in standard deviations."""
    return abs(float((a * b).sum() / (p * (1 - p)) / math.sqrt(a.numel())))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("draw", [mask, pair_mask])
def test_elements_are_dropped_at_the_rate_and_independently(draw, p):
    """The whole, every token, feature, head and key: within five standard deviations, and with the variance of coin tosses.
    Neighbours, and masks of other seeds, steps, rows, modules and heads, are uncorrelated."""
    dropped = (~draw(p)).double()
    variance = p * (1 - p)
    assert abs(dropped.mean() - p) < 5 * math.sqrt(variance / dropped.numel())
    for dim, count in enumerate(dropped.shape):
        means = dropped.movedim(dim, 0).flatten(1).mean(1)
        deviation = (means - p) / math.sqrt(variance * count / dropped.numel())
        assert deviation.abs().max() < 5.5
        assert count < TOKENS or 0.8 < deviation.square().mean() < 1.25
    dropped -= p
    for shift in (1, 2, 3, 4, 8, 16, 31, 32, 64, 128):
        assert correlation(dropped[..., shift:, :], dropped[..., :-shift, :], p) < 5
        assert correlation(dropped[..., shift:], dropped[..., :-shift], p) < 5
    others = [{"seed": 9}, {"step": 3}, {"row": 4}, {"module": "layers.1"}]
    for change in [*others, {"heads": (4, 8)}] if draw is pair_mask else others:
        assert correlation(dropped, (~draw(p, **change)).double() - p, p) < 5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_keys_of_tokens_features_and_heads_leave_nothing_in_common(p):
    dropped, pairs = ((~draw(p)).double() - p for draw in (mask, pair_mask))
    # corners of rectangles: what a key of tokens XOR one of features would have in common
    square = dropped[:-1, :-1] * dropped[1:, :-1] * dropped[:-1, 1:] * dropped[1:, 1:] / (p * (1 - p)) ** 2
    assert abs(float(square.sum()) / math.sqrt(square.numel())) < 6
    assert correlation(pairs, pairs.transpose(1, 2), p) < 8  # pairs are counted twice
    assert correlation(pairs[1:], pairs[:-1], p) < 5


def test_a_pair_of_tokens_keeps_its_mask_in_every_pack_shard_and_block():
    whole = pair_mask(0.5)
    assert torch.equal(pair_mask(0.5, heads=(2, 3)), whole[2:3])
    # the second part of a row that was split sees what the whole row would
    assert torch.equal(pair_mask(0.5, length=92, first=100), whole[:, 100:, 100:])
    masks, attention = DropoutMasks(1, None, False), _Attention()
    masks.step, masks.attentions = 2, {attention: ("layers.0.self_attn", 0)}
    pack = PackedSequences((5, 192, 7), torch.tensor([0, 5, 197, 204]))
    masks.begin(pack, pack_of([5, 192, 7], [(8, 0), (3, 0), (-1, 0)]), whole=None)
    drawn = pack.attention_dropout(attention, 0.5, 4, pack)
    assert torch.equal(drawn.keep(1, (10, 20), (3, 20)), whole[:, 10:20, 3:20])
    again = pack.attention_dropout(attention, 0.5, 4, pack)  # a module that attends twice draws anew
    assert not torch.equal(again.keep(1, (10, 20), (3, 20)), whole[:, 10:20, 3:20])


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_explicit_attention_is_autograd_of_the_definition(window, softcap, with_sinks, monkeypatch):
    """Blocks of a few queries, grouped heads, values of another width than keys: output and gradients in fp64."""
    generator = torch.Generator().manual_seed(0)
    lengths, heads, p = (11, 1, 20), 4, 0.3
    given = [
        torch.randn(n, sum(lengths), d, generator=generator, dtype=torch.float64) for n, d in ((4, 8), (2, 8), (2, 6))
    ]
    given.append(torch.randn(heads, generator=generator, dtype=torch.float64))
    for tensor in given:
        tensor.requires_grad_()
    query, key, value, sinks = given
    keep = torch.rand(len(lengths), heads, 20, 20, generator=generator) >= p
    dropout = AttentionDropout(p, lambda index, q, k: keep[index, :, slice(*q), slice(*k)])
    monkeypatch.setitem(BLOCK_ELEMENTS, "cpu", 4 * 20 * 3)
    kernel = ExplicitAttention(tuple(zip(lengths, lengths, strict=True)), Scores(0.4, window, softcap, dropout))
    out = attend_by(query[None], key[None], value[None], sinks if with_sinks else None, kernel)[0]
    options = {"softcap": softcap, "sliding_window": window, "s_aux": sinks if with_sinks else None}
    parts = []
    for index, qkv in enumerate(zip(*(x[None].split(lengths, 2) for x in given[:3]), strict=True)):
        module = SimpleNamespace(training=True, keeps=lambda p, heads, n, index=index: keep[index, :, :n, :n])
        parts.append(plain_attention(module, *qkv, None, p, 0.4, **options)[0][0].transpose(0, 1))
    expected = torch.cat(parts, 1)
    assert torch.allclose(out, expected, rtol=0, atol=1e-14)
    of_out = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    inputs = given if with_sinks else given[:3]
    pairs = (torch.autograd.grad(x, inputs, of_out, retain_graph=True) for x in (out, expected))
    for found, wanted in zip(*pairs, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-13)


def test_everything_may_be_dropped():
    x = torch.ones(1, 3, 2, requires_grad=True)
    dropout = AttentionDropout(1.0, lambda *place: pytest.fail("no mask is needed"))
    out = attend_by(x[None], x[None], x[None], None, ExplicitAttention(((3, 3),), Scores(1.0, dropout=dropout)))
    out.sum().backward()
    assert not out.any()
    assert not x.grad.any()


# ------------------------------------------------------------------------------------------------------ what is refused


def test_dropout_that_a_family_draws_by_itself_is_refused_by_name():
    model = tiny_model("llama_gqa_bias", attention_dropout=0.1)
    assert describe_model(model).config.attention_dropout == 0.1
    assert describe_model(model, attention_dropout=False).config.attention_dropout == 0.0
    assert model.config.attention_dropout == 0.1
    alone = tiny_model_of(
        "doge", attention_dropout=0.1
    )  # its layers run one sequence at a time, with the attention of the family
    with pytest.raises(UnsupportedError, match=r"attention_dropout=0.1.*DogeAttention.*hotspa_attention_dropout=0"):
        describe_model(alone)
    assert describe_model(alone, attention_dropout=False).config.attention_dropout == 0.0
    # its layers keep what they have no name for, and its attention gets the pack
    handed = tiny_model_of("nemotron", attention_dropout=0.1)
    assert describe_model(handed).config.attention_dropout == 0.1
    with pytest.raises(
        UnsupportedError, match=r"residual_dropout=0.1.*random numbers of its layers depend on the layout"
    ):
        describe_model(tiny_model_of("starcoder2", residual_dropout=0.1))
    describe_model(tiny_model_of("phi3", resid_pdrop=0.1))
