"""Columns of slow ranks computed by others: exact, whatever is given away, and merged into the all-reduce that is there."""

from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_hotspa.features.slow_devices.flexible_linear import Exchange, flexible_works
from hf_hotspa.features.slow_devices.mode import HandOver
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

SHARES = {
    "one": (0.0, 0.6, 0.0, 0.0),
    "two": (0.5, 0.0, 0.3, 0.0),
    "most": (0.0, 0.0, 0.0, 0.95),
    "three": (0.5, 0.4, 0.0, 0.3),
}


def give(engine, shares, exchange=Exchange.BROADCAST):
    for work in flexible_works(engine).values():
        work.exchange = exchange
        work.give(tuple(shares[rank] for rank in work.ranks))


def errors_of(rank, world_size, family, strategies, given, num_rows):
    model = tiny_model(family, torch.float64)
    rows = random_rows(num_rows, model.config.vocab_size, longest=40)
    loss, gradients = shared_reference(model, rows)
    found = {}
    for strategy in strategies:
        engine = make_engine(model, f"{strategy}:40@60", features=(HandOver(),))
        for name in given:
            for exchange in Exchange:
                give(engine, SHARES[name], exchange)
                mini_batch = make_mini_batch(engine, rows)
                found[strategy, name, exchange.name], _ = worst_error(engine, mini_batch, loss, gradients)
        engine.close()
    return found


@pytest.mark.parametrize(
    ("family", "strategies", "given", "num_rows"),
    [
        pytest.param(
            "llama_gqa_bias", ("tp4", "dp2tp2", "tp4+rc"), ("one", "two", "most", "three"), 9, marks=pytest.mark.slow
        ),
        pytest.param("llama_uneven", ("tp4", "tp2pp2"), ("one", "two"), 9, marks=pytest.mark.slow),
        ("llama_gqa_bias", ("tp4+ck24",), ("one",), 5),
        pytest.param("llama_gqa_bias", ("tp4+ck8",), ("one", "three"), 9, marks=pytest.mark.slow),
        pytest.param("phi3_fused", ("tp4", "tp2pp2+sp"), ("one", "three"), 9, marks=pytest.mark.slow),
    ],
)
def test_migration_is_exact(family, strategies, given, num_rows):
    worst = run_ranks(4, errors_of, family, strategies, given, num_rows)[0]
    assert len(worst) == len(strategies) * len(given) * len(Exchange)
    assert max(worst.values()) <= 1e-11, worst


@contextmanager
def counting():
    calls = Counter()

    def counted(name, original):
        def call(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        return patch.object(dist, name, call)

    with ExitStack() as stack:
        for name in ("all_reduce", "broadcast", "reduce", "scatter", "gather"):
            stack.enter_context(counted(name, getattr(dist, name)))
        yield calls


def bits_and_calls(rank, world_size, in_bf16):
    model = tiny_model("llama_gqa_bias")
    rows = random_rows(6, model.config.vocab_size, longest=30)
    found = []
    counted = {}
    for flexible, shares, exchange in (
        (False, None, Exchange.BROADCAST),
        (True, (0.0,) * 4, Exchange.BROADCAST),
        (True, SHARES["one"], Exchange.BROADCAST),
        (True, SHARES["one"], Exchange.UNMERGED),
        (True, SHARES["one"], Exchange.SCATTER),
    ):
        engine = make_engine(model, "tp4:40@200", features=(HandOver(),) if flexible else ())
        if flexible:
            give(engine, shares, exchange)
        with counting() as calls:
            report = engine.forward_backward(make_mini_batch(engine, rows))
        counted[flexible, shares is not None and any(shares), exchange.name] = dict(calls)
        found.append((report.loss, {name: g.clone() for name, g in engine.full_gradients().items()}))
        engine.close()
    plain, untouched = found[:2]
    same = plain[0] == untouched[0] and all(torch.equal(g, untouched[1][name]) for name, g in plain[1].items())
    return same, counted, model.config.num_hidden_layers, bf16_differences(model, rows, untouched[1], in_bf16)


def flat(gradients):
    return torch.cat([g.flatten().double() for g in gradients.values()])


def bf16_differences(model, rows, in_fp32, exchanges):
    """How far the gradients in bf16 are from those in fp32, as a part of their norm: plain, and with each exchange."""
    fp32, found = flat(in_fp32), {}
    for name, shares, exchange in (
        ("plain", (0.0,) * 4, Exchange.BROADCAST),
        *((exchange.name, SHARES["two"], exchange) for exchange in exchanges),
    ):
        engine = make_engine(model, "tp4:40@200", features=(HandOver(),), compute_dtype=torch.bfloat16)
        give(engine, shares, exchange)
        engine.forward_backward(make_mini_batch(engine, rows))
        found[name] = float((flat(engine.full_gradients()) - fp32).norm() / fp32.norm())
        engine.close()
    return found


@pytest.mark.parametrize("in_bf16", [[Exchange.BROADCAST], pytest.param(list(Exchange), marks=pytest.mark.slow)])
def test_nothing_given_is_bit_equal_and_merging_saves_a_collective_for_each_product(in_bf16):
    same, counted, num_layers, of_bf16 = run_ranks(4, bits_and_calls, in_bf16)[0]
    assert same
    plain_bf16 = of_bf16.pop("plain")
    assert 0.0 < plain_bf16 < 0.1
    assert all(error < 2 * plain_bf16 for error in of_bf16.values()), (plain_bf16, of_bf16)
    plain = counted[False, False, "BROADCAST"]
    assert counted[True, False, "BROADCAST"] == plain
    merged, unmerged = counted[True, True, "BROADCAST"], counted[True, True, "UNMERGED"]
    # seven linears a layer: four are column-parallel and read by attention or the MLP, two are row-parallel
    columns, rows = 5, 2
    assert merged["all_reduce"] == unmerged["all_reduce"] == plain["all_reduce"]
    # column-parallel: weights, then gradients; row-parallel: inputs and weights
    assert merged["broadcast"] == unmerged["broadcast"] == num_layers * (2 * columns + 2 * rows)
    # column-parallel: outputs, gradients of weights; row-parallel: gradients of inputs and weights together
    assert merged["reduce"] == num_layers * (2 * columns + rows)
    assert unmerged["reduce"] - merged["reduce"] == num_layers * (columns + rows)
    scattered = counted[True, True, "SCATTER"]
    assert scattered["scatter"] == merged["broadcast"]
    assert scattered["gather"] == unmerged["reduce"]
