"""Gated delta nets in packs: the recurrence against one token after the other, and what may pass between documents."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.features.isolation import isolation
from hf_hotspa.features.isolation.isolation import Sequences, delta_rule, mix_packed, set_heads_of_shard
from hf_hotspa.model.model_kind import is_linear_attention, projections
from hf_hotspa.parallel.attention import PackedSequences
from tests.oracle import exact_in_double
from tests.tiny_families import tiny_model_of

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "qwen4_exp_text")


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def part(given: Inputs, tokens: slice) -> Inputs:
    query, key, value, decay, beta = (x[:, tokens] for x in given)
    return query, key, value, decay, beta


def inputs(num_tokens: int, seed: int = 0) -> Inputs:
    """Queries, keys, values, decays and betas in fp64; some decays are nearly none, and some nearly everything."""
    torch.manual_seed(seed)
    few, many = 2, 4  # heads
    vectors = [
        torch.randn(1, num_tokens, h, width, dtype=torch.float64) for h, width in ((few, 8), (few, 8), (many, 6))
    ]
    decay = -(torch.rand(1, num_tokens, many, dtype=torch.float64) * 4).exp() + 1
    beta = torch.rand(1, num_tokens, many, dtype=torch.float64)
    query, key, value, decay, beta = (x.requires_grad_() for x in (*vectors, decay, beta))
    return query, key, value, decay, beta


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """The recurrence as the paper has it, a token after the other."""
    outs, each = [], value.shape[2] // key.shape[2]
    of_rows = (x.split(lengths, 1) for x in (query, key, value, decay, beta))
    for q, k, v, g, b in zip(*of_rows, strict=True):
        q, k = (x[0] / (x[0].square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(each, 1) for x in (q, k))
        state = q.new_zeros(v.shape[2], k.shape[2], v.shape[3])
        for t in range(len(q)):
            state = state * g[0, t].exp()[:, None, None]
            seen = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], (v[0, t] - seen) * b[0, t, :, None])
            outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs)[None]


@pytest.mark.parametrize("lengths", [(1,), (5, 1, 70), (130, 64, 3, 3, 17), (2,) * 40, (63, 65)])
def test_all_sequences_at_once_are_one_token_after_the_other(lengths: tuple[int, ...]) -> None:
    given = inputs(sum(lengths))
    found, _ = delta_rule(*given, Sequences(lengths))
    expected = one_by_one(*given, lengths=lengths)
    weights = torch.randn_like(found)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(
        *(torch.autograd.grad((out * weights).sum(), given) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 40, 64, 99])
def test_a_state_goes_on_in_the_next_row(cut: int) -> None:
    given = inputs(100, seed=1)
    whole, _ = delta_rule(*given, Sequences((100,)))
    first, state = delta_rule(*part(given, slice(cut)), Sequences((cut,), continues=True))
    second, none = delta_rule(*part(given, slice(cut, None)), Sequences((100 - cut,), state))
    assert state is not None
    assert none is None
    both = torch.cat([first, second], 1)
    torch.testing.assert_close(both, whole, rtol=1e-12, atol=1e-13)
    weights = torch.randn_like(whole)
    for ours, theirs in zip(*(torch.autograd.grad((out * weights).sum(), given) for out in (both, whole)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def net_of(family: str) -> Any:
    model = tiny_model_of(family)
    return next(module for module in model.modules() if is_linear_attention(module))


def pack_of(*lengths: int) -> PackedSequences:
    return PackedSequences(lengths, torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32))


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_do_not_see_each_other(family: str) -> None:
    """Not by a bit: neither what the layer gives, nor gradients."""
    net, lengths = net_of(family), (7, 1, 66, 2, 30)
    with torch.no_grad():
        net.A_log.sub_(6.0)  # states that outlive a document
    own = net.forward
    hidden = torch.randn(1, sum(lengths), net.hidden_size, dtype=torch.float64)
    with exact_in_double(torch.float64):
        alone = torch.cat([own(part) for part in hidden.split(lengths, 1)], 1)
        mix_packed(net)
        packed = net(hidden, hotspa_pack=pack_of(*lengths))
        torch.testing.assert_close(packed, alone, rtol=1e-11, atol=1e-12)
        for changed, (first, last) in enumerate(pairwise(torch.tensor([0, *lengths]).cumsum(0).tolist())):
            other = hidden.clone()
            other[:, first:last] += 100.0
            out = net(other.requires_grad_(), hotspa_pack=pack_of(*lengths))
            parts = zip(out.split(lengths, 1), packed.split(lengths, 1), strict=True)
            assert [torch.equal(*pair) for pair in parts] == [i != changed for i in range(len(lengths))]
            (gradient,) = torch.autograd.grad(out[:, first:last].square().sum(), other)
            gradient[:, first:last] = 0
            assert not gradient.any()


def test_kernels_get_the_borders_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fla is installed, its function is called once for the pack, as transformers would; here one takes its place."""
    net, calls, lengths = net_of("qwen3_next"), list[dict[str, Any]](), (5, 1, 9)

    def kernel(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        calls.append(kwargs)
        borders = kwargs["cu_seqlens"].diff().tolist()
        return delta_rule(query, key, value, kwargs["g"], kwargs["beta"], Sequences(borders))

    monkeypatch.setattr(isolation, "has_kernel", lambda value: True)
    monkeypatch.setitem(type(net).forward.__wrapped__.__globals__, "torch_chunk_gated_delta_rule", kernel)
    hidden = torch.randn(1, 15, net.hidden_size, dtype=torch.float64)
    mix_packed(net)
    out = net(hidden, hotspa_pack=pack_of(*lengths))
    assert len(calls) == 1
    assert calls[0]["cu_seqlens"].tolist() == [0, 5, 6, 15]
    assert calls[0]["use_qk_l2norm_in_kernel"] is True
    assert calls[0]["initial_state"] is None
    assert not calls[0]["output_final_state"]
    monkeypatch.undo()
    torch.testing.assert_close(out, net(hidden, hotspa_pack=pack_of(*lengths)), rtol=1e-12, atol=1e-13)


def test_layers_with_a_forward_that_nobody_knows_are_left_to_run_alone() -> None:
    net = net_of("qwen3_next")
    assert is_linear_attention(net)
    net.__class__ = type("Own", (type(net),), {"forward": lambda self, x: functional.relu(x)})
    assert not is_linear_attention(net)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shard_without_heads_adds_nothing(family: str) -> None:
    net = net_of(family)
    into, out, norm = projections(net)
    assert {*into, out, norm, "conv1d"} == {name for name, child in net.named_children() if list(child.parameters())}
    set_heads_of_shard(net, 0)
    for name in into:
        net.get_submodule(name).weight = nn.Parameter(torch.zeros(0, net.hidden_size, dtype=torch.float64))
    net.get_submodule(out).weight = nn.Parameter(torch.zeros(net.hidden_size, 0, dtype=torch.float64))
    hidden = torch.randn(1, 4, net.hidden_size, dtype=torch.float64, requires_grad=True)
    given = net(hidden, hotspa_pack=pack_of(4))
    assert given.shape == hidden.shape
    assert not given.any()
    (gradient,) = torch.autograd.grad(given.sum(), hidden)  # its sum over the ranks is collective
    assert not gradient.any()
