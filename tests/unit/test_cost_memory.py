"""The memory model: sizes against layouts, what a rank holds, and how long packs may be."""

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.cli import main
from hf_hotspa.costs.memory import (
    PLANNED_SHARE,
    UNLIMITED_TOKENS,
    MemoryModel,
    MemoryOptions,
    activation_bytes,
    card_bytes,
)
from hf_hotspa.costs.sizes import ModelSizes, dtype_bytes
from hf_hotspa.costs.terms import optimizer_states
from hf_hotspa.errors import DeviceMemoryError, HotspaConfigError
from hf_hotspa.layout.placement import master_layout, strategy_layout
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.cuts import cut_for
from hf_hotspa.packing.pipeline_order import SCHEDULES, choose_passes, interleaved_order
from hf_hotspa.search.capacities import Capacities
from hf_hotspa.search.setup import Setup
from hf_hotspa.strategy import Bucket, Strategy, legal_strategies
from tests.random_models import random_model

GIB = 1 << 30


def llama(layers: int, hidden: int, heads: int, ffn: int, kv_heads: int | None = None) -> ModelShape:
    kv_heads = kv_heads or heads
    attention = 2 * hidden * hidden * (heads + kv_heads) // heads
    parameters = attention + 3 * hidden * ffn + 2 * hidden
    return ModelShape("llama", layers, heads, kv_heads, hidden, hidden, 32000, parameters)


LLAMA_7B = llama(32, 4096, 32, 11008)
SIZES_7B = ModelSizes(LLAMA_7B)


def test_sizes_of_a_vector_are_those_of_its_layouts() -> None:
    rng = random.Random(5)
    for _ in range(20):
        model = random_model(rng)
        sizes = ModelSizes(model.shape, vector=model.vector)
        assert sizes.num_parameters == model.vector.numel
        segments = model.vector.segments
        for strategy in model.strategies(rng.randint(1, 8)):
            layout = strategy_layout(model.vector, strategy)
            held: dict[int, tuple[int, int]] = {}
            for rank in range(strategy.world_size):
                pairs = list(zip(layout.rank_sizes(rank), segments, strict=True))
                weights = sum(n * dtype_bytes(s.dtype) for n, s in pairs)
                gradients = sum(n * dtype_bytes(s.master_dtype) for n, s in pairs if s.trainable)
                stage = strategy.coord(rank).pp
                held[stage] = max(held.get(stage, (0, 0)), (weights, gradients), key=sum)
            found = sizes.stages(strategy)
            assert [(s.weight_bytes + s.gradient_bytes) for s in found] == [sum(held[p]) for p in range(strategy.pp)]
            assert sum(s.num_layers for s in found) == model.shape.num_layers
            master = sizes.master(strategy.world_size)
            shares = [
                sum(
                    n * dtype_bytes(s.master_dtype) * (1 + s.trainable)
                    for n, s in zip(
                        master_layout(model.vector, strategy.world_size).rank_sizes(r), segments, strict=True
                    )
                )
                for r in range(strategy.world_size)
            ]
            assert master.weight_bytes + master.gradient_bytes == max(shares)


def test_sizes_of_a_shape() -> None:
    assert SIZES_7B.num_parameters == pytest.approx(6.74e9, rel=0.002)  # LLaMA-2 7B
    tied = replace(SIZES_7B, tied=True)
    assert SIZES_7B.num_parameters - tied.num_parameters == 32000 * 4096
    grouped = ModelSizes(llama(4, 64, 8, 128, kv_heads=2))
    (eighth,) = grouped.stages(Strategy(1, 8, 1))
    assert eighth.weight_bytes > grouped.stages(Strategy(1, 1, 1))[0].weight_bytes / 8  # key/value heads are repeated
    with pytest.raises(HotspaConfigError, match="no size is known for dtype 'int3'"):
        dtype_bytes("int3")


def most_held(operations: Iterable[tuple[int, bool]], tokens: Sequence[int]) -> int:
    """The most tokens in flight on a stage."""
    return max(itertools.accumulate(-tokens[unit] if is_backward else tokens[unit] for unit, is_backward in operations))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_tokens_that_are_counted_are_those_that_the_schedule_holds(schedule: str) -> None:
    rng = random.Random(7)
    model = MemoryModel(SIZES_7B, 8, MemoryOptions(schedule=schedule))
    reached = 0
    for _ in range(200):
        pp, capacity = rng.choice([2, 4, 8]), rng.randint(100, 500)
        tokens = [rng.randint(capacity // 2, capacity) for _ in range(rng.randint(1, 12))]
        tokens += [rng.randint(capacity, 6 * capacity) for _ in range(rng.randint(0, 2))]
        rng.shuffle(tokens)
        bucket = Bucket(Strategy(8 // pp, 1, pp), max(tokens), capacity)
        passes = choose_passes(schedule, tokens, pp, bucket.most_tokens)
        enough = model.stages(replace(bucket, pack_tokens=capacity))
        exactly = model.stages(replace(bucket, pack_tokens=capacity), num_packs=len(tokens))
        for stage in range(pp):
            most = most_held(passes.operations(stage), passes.tokens)
            assert most <= exactly[stage].held_tokens <= enough[stage].held_tokens <= bucket.most_tokens
            reached += most > 0.9 * enough[stage].held_tokens
    assert reached > 50  # and not much less


def test_the_tokens_that_are_counted_are_those_that_pipelines_of_chunks_hold() -> None:
    rng, reached = random.Random(8), 0
    model = MemoryModel(SIZES_7B, 8)
    for _ in range(200):
        pp, most_of_chunk = rng.choice([2, 4, 8]), rng.randint(50, 500)
        packs = [[rng.randint(1, 2000) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 6))]
        strategy = Strategy(8 // pp, 1, pp, ck=most_of_chunk)
        bucket = Bucket(strategy, max(map(max, packs)), max(map(sum, packs)))
        cuts = [cut_for(strategy, pack, rng.choice([0.0, 1e-4, 1e-2])) for pack in packs]
        tokens = [stop - first for cut in cuts for chain in cut for first, stop in chain]
        chains = [len(chain) for cut in cuts for chain in cut]
        passes = choose_passes("auto", tokens, pp, bucket.most_tokens, chains)
        enough = model.stages(bucket)
        for stage in range(pp):
            most = most_held(passes.operations(stage), tokens)
            assert most <= enough[stage].held_tokens <= bucket.most_tokens
            reached += most > 0.6 * enough[stage].held_tokens
    assert reached > 50  # and not much less


@pytest.mark.parametrize("most_of_chunk", [0, 300])
def test_the_tokens_that_are_counted_are_those_that_ranks_with_several_stages_hold(most_of_chunk: int) -> None:
    rng, reached = random.Random(9), 0
    model = MemoryModel(SIZES_7B, 8)
    for _ in range(100):
        pp, v = rng.choice([(2, 2), (4, 2), (2, 3), (8, 2)])
        packs = [rng.randint(100, 500) for _ in range(rng.randint(1, 12))] + [2000] * (rng.random() < 0.3)
        strategy = Strategy(8 // pp, 1, pp, ck=most_of_chunk, v=v)
        bucket = Bucket(strategy, max(packs), 500)
        cuts = [cut_for(strategy, [pack], 0.0) if most_of_chunk else [((0, pack),)] for pack in packs]
        chains = [len(chain) for cut in cuts for chain in cut]
        tokens = [stop - first for cut in cuts for chain in cut for first, stop in chain]
        order = interleaved_order(tokens, pp, v, bucket.most_tokens, chains)
        enough = model.stages(bucket)
        exactly = model.stages(bucket, num_packs=len(packs))
        for rank in range(pp):
            most = most_held([(turn.unit, turn.is_backward) for turn in order if turn.stage % pp == rank], tokens)
            assert most <= v * exactly[rank].held_tokens <= v * enough[rank].held_tokens <= v * bucket.most_tokens
            reached += most > 0.6 * v * enough[rank].held_tokens
    assert reached > 50  # and not much less


def test_an_estimate_counts_the_schedule_that_will_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for schedule in SCHEDULES:
        arguments = ["--model", "llama2-7b", "--nodes", "1x8", "--strategy", "dp2pp4", "--pack-tokens", "8192"]
        assert main(["estimate", "--json", "--pipeline-schedule", schedule, *arguments]) == 0
        found[schedule] = json.loads(capsys.readouterr().out)
        assert found[schedule]["pipeline_schedule"] == schedule
    total = {schedule: each["memory"]["total"] for schedule, each in found.items()}
    assert total["auto"] == total["own"] < total["1f1b"] < total["gpipe"]
    setup = Setup.read("llama2-7b", "1x8", "h100-80g", schedule="gpipe")
    assert setup.memory.options.schedule == setup.cost.time.schedule == "gpipe"


def drawn(data: st.DataObject) -> Strategy:
    found = data.draw(st.sampled_from(legal_strategies(8, LLAMA_7B)))
    return replace(found, sp=found.tp > 1 and data.draw(st.booleans()), rc=data.draw(st.integers(0, 3)))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_capacities_fit_and_grow_with_the_limit(data: st.DataObject) -> None:
    strategy = drawn(data)
    model = MemoryModel(SIZES_7B, 8, MemoryOptions(schedule=data.draw(st.sampled_from(SCHEDULES))))
    arena = data.draw(st.sampled_from([0, model.arena_bytes(Strategy(2, 2, 2))]))
    limits = sorted(data.draw(st.lists(st.integers(1 * GIB, 200 * GIB), min_size=2, max_size=4)))
    packs = [model.largest_pack(strategy, limit, arena_bytes=arena) for limit in limits]
    assert packs == sorted(packs)
    for limit, tokens in zip(limits, packs, strict=True):
        if tokens:
            assert model.breakdown(strategy, tokens, arena_bytes=arena).total <= limit + 1
        assert model.breakdown(strategy, tokens + 1, arena_bytes=arena).total > limit - 1
        assert model.largest_pack(strategy, limit, arena_bytes=arena + GIB) <= tokens
    assert model.largest_pack(strategy, None) == UNLIMITED_TOKENS


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_pipeline_holds_long_sequences_with_smaller_packs_beside_them(data: st.DataObject) -> None:
    strategy = drawn(data)
    schedule = data.draw(st.sampled_from(SCHEDULES))
    model = MemoryModel(SIZES_7B, 8, MemoryOptions(schedule=schedule))
    arena, limit = data.draw(st.sampled_from([0, model.arena_bytes(Strategy(2, 2, 2))])), 80 * GIB
    capacities = Capacities(model, limit)
    longest, full = capacities.tokens(strategy, arena), model.largest_pack(strategy, limit, arena_bytes=arena)
    if not longest:
        return
    assert longest >= full
    if strategy.pp == 1:
        assert longest == full
    lengths = sorted(data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=4)))
    packs = [capacities.pack_tokens(strategy, arena, length) for length in lengths]
    assert packs == sorted(packs, reverse=True)
    for length, tokens in zip(lengths, packs, strict=True):
        # one that fits alone fits whatever is beside it: a pipeline full of packs that are that much smaller (GPipe
        # also keeps what the losses of all of them keep)
        assert tokens >= length // strategy.pp or (schedule == "gpipe" and strategy.pp > 1)
        if length <= full:
            assert tokens == full
        found = model.breakdown(strategy, tokens, longest=length, arena_bytes=arena)
        assert found.total <= limit + 1
        assert found.held_tokens <= max(strategy.pp * tokens, length)
        assert model.breakdown(strategy, tokens + 1, longest=length, arena_bytes=arena).total > limit - 1


def test_an_impossible_limit_names_what_would_work() -> None:
    model = MemoryModel(SIZES_7B, 8)
    capacities = Capacities(model, 24 * GIB)
    strategies = legal_strategies(8, LLAMA_7B)
    error = capacities.too_long(100_000, strategies)
    assert isinstance(error, DeviceMemoryError)
    needs = {s: model.breakdown(s, 100_000, num_packs=1).total for s in strategies}
    cheapest = min(strategies, key=lambda s: needs[s])
    assert str(cheapest) in str(error)
    named = int(str(error.fix).split("a limit of ")[1].split("MiB")[0]) << 20
    assert Capacities(model, named).tokens(cheapest, 0) >= 100_000  # the limit it names works
    assert all(Capacities(model, named - (2 << 20)).tokens(s, 0) < 100_000 for s in strategies)  # and is the smallest
    tokens = int(str(error.fix).split("at most ")[1].split(" ")[0])
    assert max(capacities.tokens(s, 0) for s in strategies) == tokens > 0
    assert "more devices" in str(Capacities(model, GIB).too_long(10, strategies))


def test_a_pool_that_does_not_fit() -> None:
    model = MemoryModel(SIZES_7B, 8)
    fits = [Bucket(Strategy(2, 4, 1), 2048, 2048), Bucket(Strategy(1, 8, 1), 4096, 4096, 2048)]
    model.check_pool(fits, 79 * GIB)
    model.check_pool(fits, None)
    with pytest.raises(
        DeviceMemoryError,
        match="dp2tp4 with packs of 900000 tokens.*its activations do not fit: [0-9.]+ GiB are left for them.*"
        "packs of at most [0-9]+ tokens",
    ):
        model.check_pool([Bucket(Strategy(2, 4, 1), 900_000, 900_000)], 79 * GIB)
    with pytest.raises(
        DeviceMemoryError, match="optimizer state and the buffers of switches alone do not fit.*use a limit of"
    ):
        model.check_pool(fits, GIB)


@pytest.mark.parametrize(
    ("optim", "quantized", "full"),
    [
        ("adamw_torch", 8, 8), ("adamw_8bit", 2 + 8 / 256, 8), ("paged_adamw_32bit", 8, 8), ("lion_8bit", 1 + 4 / 256, 4), ("rmsprop_bnb_8bit", 1 + 4 / 256, 4),
        ("ademamix_8bit", 3 + 12 / 256, 12), ("adamw_torch_8bit", 2 + 8 / 256, 8), ("adamw_torch_4bit", 1 + 8 / 256, 8),
        ("sgd", 4, 4),
    ],
)  # fmt: skip
def test_each_optimizer_keeps_its_own_bytes(optim: str, quantized: float, full: float) -> None:
    state = optimizer_states()[optim]
    assert state.element_bytes(1 << 20, False) == quantized
    assert state.element_bytes(4095, False) == full
    assert state.element_bytes(4097, False) == (full if "torch" in optim else quantized)
    assert state.element_bytes(1 << 20, True) == (quantized if "torch" in optim or optim == "sgd" else full)


def test_a_card_shows_more_than_torch_allocates() -> None:
    assert card_bytes(0, 1) == 1 << 29
    assert card_bytes(0, 8) == (1 << 29) + 1_150_000_000
    assert card_bytes(10 * GIB, 1) == pytest.approx(10.8 * GIB + (1 << 29))
    # what plans may fill leaves room for it, on one card and on eight of 80 GB
    assert card_bytes(PLANNED_SHARE * 24 * GIB, 1) < 24 * GIB
    assert card_bytes(PLANNED_SHARE * 79.35 * GIB, 8) < 79.35 * GIB


def test_fused_kernels_keep_what_megatron_keeps() -> None:
    """Korthikanti et al., 2022, for a gated MLP: 8h + 4 (a + kv) + 6f bytes, all of which sequence parallelism divides."""
    shape = SIZES_7B.shape
    whole = 8 * 4096 + 4 * 2 * 4096 + 6 * 11008
    fused = activation_bytes(shape, 1, fused=True)
    assert fused == pytest.approx(whole, rel=1e-3)  # norm weights count as an MLP's
    assert activation_bytes(shape, 4, sequence_parallel=True, fused=True) == pytest.approx(fused / 4)
    assert activation_bytes(shape, 4, fused=True) > fused / 4
    assert activation_bytes(shape, 1) > fused
