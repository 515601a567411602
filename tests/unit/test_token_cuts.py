"""Which tokens of a pack each rank of cp has: all of them once, balanced, and what each way moves. Where packs are cut into chunks
of tokens, and what a part of a pack holds."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_hotspa.costs.divided import (
    AUTO,
    GATHER,
    RING,
    ULYSSES,
    WAYS,
    choose_way,
    exchanged_elements,
    head_repeats,
)
from hf_hotspa.costs.run_options import RunOptions
from hf_hotspa.costs.time import squared_lengths
from hf_hotspa.data.collator import MicroBatch, PackedBucketCollator
from hf_hotspa.errors import HotspaConfigError, StrategyError, UnsupportedError
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.specs import describe_model
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.packing.bucketing import pack_sequences
from hf_hotspa.packing.cuts import Shares, cut_into_chains, num_chunks, share_by_cost, share_by_tokens
from hf_hotspa.parallel.loss import tokens_of
from hf_hotspa.rows.read_row import RowRules
from hf_hotspa.search.histogram import synthetic_lengths
from hf_hotspa.strategy import Strategy, parse_buckets
from tests.tiny_families import tiny_model_of

LLAMA_8B = ModelShape("llama", 32, 32, 8, 4096, 4096, 128256, 218_112_000)
QWEN_7B = ModelShape("qwen2", 28, 28, 4, 3584, 3584, 152064, 233_057_792)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def check(shares: Shares, lengths: list[int], cp: int, multiple: int) -> None:
    tokens = [(i, t) for pieces in shares.pieces for i, first, stop in pieces for t in range(first, stop)]
    assert sorted(tokens) == [(i, t) for i, length in enumerate(lengths) for t in range(length)]
    for pieces, row, pad in zip(shares.pieces, shares.rows, shares.pads, strict=True):
        assert list(pieces) == sorted(pieces)
        assert row == sum(stop - first for _, first, stop in pieces) + pad > 0
        assert row % multiple == 0
        assert pad < multiple or row == pad == multiple
    assert len(shares.pieces) == cp


@given(LENGTHS, st.integers(1, 5), st.integers(1, 3), st.sampled_from([0.0, 1e-3, 0.5]))
def test_every_token_is_on_one_rank_once(lengths: list[int], cp: int, multiple: int, quadratic: float) -> None:
    by_tokens = share_by_tokens(lengths, cp, multiple)
    check(by_tokens, lengths, cp, multiple)
    assert max(by_tokens.rows) - min(by_tokens.rows) <= multiple
    check(share_by_cost(lengths, cp, quadratic, multiple), lengths, cp, multiple)


def test_a_long_sequence_is_cut_in_zigzag_and_short_ones_stay_whole() -> None:
    shares = share_by_cost([800, 100, 100, 100, 100], 4, 1e-3)
    assert [pieces[0] for pieces in shares.pieces] == [(0, 0, 100), (0, 100, 200), (0, 200, 300), (0, 300, 500)]
    assert shares.pieces[0][1] == (0, 700, 800)
    assert sorted(piece for pieces in shares.pieces for piece in pieces if piece[0]) == [
        (i, 0, 100) for i in range(1, 5)
    ]
    assert shares.cut == {0}
    assert shares.rows == (300,) * 4


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN_7B], ids=lambda shape: shape.family)
def test_packs_of_the_file_like_github_are_balanced(shape: ModelShape, cp: int) -> None:
    """Cost of the fullest rank over the mean at most 1.03, and tokens as well, on every pack."""
    lengths = [min(length, 32768) for length in synthetic_lengths("github", 400)]
    random.Random(0).shuffle(lengths)
    packs = pack_sequences(lengths, capacity=32768, quadratic_cost=shape.quadratic_cost)[0]
    whole = cut = 0
    for pack in packs:
        shares = share_by_cost([lengths[i] for i in pack], cp, shape.quadratic_cost)
        for loads in (shares.costs(shape.quadratic_cost), shares.rows):
            assert max(loads) <= 1.03 * sum(loads) / cp
        cut += len(shares.cut)
        whole += len(pack) - len(shares.cut)
    assert whole > 0  # not everything is cut
    assert cut > 0


def test_elements_on_the_wire() -> None:
    # DeepSpeed Ulysses: (2 q + 2 k) / P * (P - 1) / P forward, and the same backward
    assert exchanged_elements(ULYSSES, 32, 8, 4) == 2 * 80 / 4 * 3 / 4
    assert exchanged_elements(ULYSSES, 28, 4, 4) == 2 * 64 / 4 * 3 / 4
    assert exchanged_elements(ULYSSES, 32, 2, 4) == 2 * (64 + 2 * 4) / 4 * 3 / 4  # two key/value heads on four ranks
    assert exchanged_elements(GATHER, 32, 8, 4) == exchanged_elements(RING, 32, 8, 4) == 3 * 16 * 3 / 4
    assert [head_repeats(12, 4, cp) for cp in (2, 3, 4, 6, 12)] == [1, 3, 1, 3, 3]


def test_the_way_that_moves_least_runs_and_others_can_be_forced() -> None:
    assert choose_way(Strategy(cp=4), LLAMA_8B) == ULYSSES
    assert choose_way(Strategy(cp=4), QWEN_7B) == GATHER  # four key/value heads are little to gather
    assert choose_way(Strategy(cp=3), LLAMA_8B) == GATHER  # 32 heads
    assert choose_way(Strategy(tp=8, cp=8), QWEN_7B) == GATHER
    wide = ModelShape("llama", 4, 32, 1, 512, 4096, 1000, 10**6)
    assert choose_way(Strategy(cp=2), wide) == GATHER  # one key/value head is less than any share of 32
    for way in (GATHER, RING):
        assert choose_way(Strategy(cp=4), LLAMA_8B, way) == way
    with pytest.raises(StrategyError, match="32 attention heads of a rank are not a multiple of cp3.*allgather"):
        choose_way(Strategy(cp=3), LLAMA_8B, ULYSSES)
    with pytest.raises(HotspaConfigError, match="cp method is 'swarm'.*ulysses"):
        EngineOptions(context_parallel="swarm")
    assert set(WAYS) == {AUTO, ULYSSES, GATHER, RING}


@pytest.mark.parametrize(
    ("buckets", "way", "schedule", "device", "says"),
    [
        ("cp4:3", AUTO, "auto", "cpu", "packs of 3 tokens, and cp4 divides them over 4 ranks"),
        ("cp4:4096", RING, "auto", "cuda", "its blocks are computed by a kernel for CPU"),
        ("cp2pp2:4096", AUTO, "gpipe", "cpu", "it needs packs of one shape"),
        ("cp4+ck128+kg1:4096", AUTO, "auto", "cpu", "kept graphs (+kg)"),
        ("cp4+ck128+kh:4096", AUTO, "auto", "cpu", "leave +kh out"),
        ("cp4+ck128+kh:4096", ULYSSES, "auto", "cuda", "leave +kh out"),
        ("cp4+ck128+kh:4096", GATHER, "auto", "cuda", "leave +kh out"),
        ("cp4+ck128:4096", RING, "auto", "cpu", "of earlier chunks on the ring"),
    ],
)
def test_what_cannot_run_is_refused_with_a_fix(buckets: str, way: str, schedule: str, device: str, says: str) -> None:
    with pytest.raises((StrategyError, UnsupportedError)) as caught:
        RunOptions(schedule, way, device).check(parse_buckets(buckets), LLAMA_8B)
    assert says in str(caught.value)
    assert caught.value.fix
    RunOptions("gpipe", AUTO, "cuda").check(parse_buckets("cp4:4096,dp2tp2:8192"), LLAMA_8B)


@pytest.mark.parametrize("family", ["llama", "phi3", "mistral", "qwen3"])
def test_a_window_rules_out_the_ring_wherever_a_forward_reads_it(family: str) -> None:
    reason = describe_model(tiny_model_of(family)).shape.ring_unsupported_reason or "none"
    assert ("none" if family == "llama" else "a sliding window of 5 tokens") in reason


# -- chunks ---------------------------------------------------------------------------------------------------------------


@given(LENGTHS, st.integers(1, 45), st.sampled_from([None, 0.0, 0.01, 0.3, 5.0]))
def test_chains_cover_the_row_in_chunks_that_are_small_enough(
    lengths: list[int], most: int, pair_cost: float | None
) -> None:
    chains = cut_into_chains(lengths, most, pair_cost)
    chunks = [chunk for chain in chains for chunk in chain]
    assert [first for first, _ in chunks] == [0, *(stop for _, stop in chunks[:-1])]
    assert chunks[-1][1] == sum(lengths)
    assert all(0 < stop - first <= most for first, stop in chunks)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    inside = {(a, b): [s for s in starts if a < s < b] for a, b in chunks}
    for chain in chains:
        assert chain[0][0] in starts
        assert chain[-1][1] in starts
        assert not any(inside[chunk] for chunk in chain[:-1]), "only the last chunk of a chain holds several sequences"
        if len(chain) > 1:  # one sequence is cut, because it is longer than a chunk
            length = next(length for start, length in zip(starts, lengths, strict=False) if start == chain[0][0])
            assert length > most
            assert pair_cost or len(chain) == -(-length // most)
            assert pair_cost is None or len(chain) == num_chunks(length, most, pair_cost)
    # what attention costs is told apart by chunks, and nothing is lost
    squares = squared_lengths(lengths, chains)
    assert list(map(len, squares)) == list(map(len, chains))
    assert sum(map(sum, squares)) == sum(length * length for length in lengths)


@given(st.integers(2000, 200_000), st.integers(200, 4000), st.sampled_from([0.0, 1e-6, 1 / 32768, 1e-3]))
def test_chunks_of_a_sequence_in_a_pipeline_take_equal_time(length: int, most: int, pair_cost: float) -> None:
    (chain,) = cut_into_chains([length], most, pair_cost)
    (squares,) = squared_lengths([length], [chain])
    times = [stop - first + pair_cost * pairs for (first, stop), pairs in zip(chain, squares, strict=True)]
    one_token = 1 + 2 * pair_cost * length  # what rounding to tokens may change
    assert max(times) - min(times) <= 2 * one_token
    assert max(times) <= most + pair_cost * most * most + one_token
    assert len(chain) == num_chunks(length, most, pair_cost)
    if len(chain) > 1:  # fewer would each cost more than a chunk may
        assert sum(times) / (len(chain) - 1) > most + pair_cost * most * most - 1e-6


def _pack() -> MicroBatch:
    collator = PackedBucketCollator(
        parse_buckets("dp1:9@20"), rank=0, vocab_size=50, rules=RowRules(columns=("weights", "domain"))
    )
    rows = [
        {
            "input_ids": list(range(10 * i, 10 * i + n)),
            "labels": [-100] * (n // 3) + list(range(10 * i + n // 3, 10 * i + n)),
            "weights": [i + 0.01 * t for t in range(n)],
            "domain": i,
        }
        for i, n in ((1, 9), (2, 5), (3, 4))
    ]
    (pack,) = collator(rows).phases[0].micro_batches
    return pack


@given(st.integers(0, 17), st.integers(1, 18))
def test_a_part_of_a_pack_has_the_targets_positions_and_columns_of_the_whole(first: int, size: int) -> None:
    pack = _pack()
    stop = min(first + size, pack.num_tokens)
    part = pack.part(first, stop)
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.equal(getattr(part, name), getattr(pack, name)[:, first:stop])
        assert getattr(part, name).untyped_storage().data_ptr() == getattr(pack, name).untyped_storage().data_ptr()
    assert part.num_tokens == sum(part.lengths) == stop - first
    assert part.cu_seqlens.tolist() == [sum(part.lengths[:i]) for i in range(len(part.lengths) + 1)]
    assert part.cu_seqlens.dtype == pack.cu_seqlens.dtype
    assert part.num_labels == int((part.labels != -100).sum())
    whole, found = tokens_of(pack)[slice(first, stop)], tokens_of(part)
    for name in ("labels", "rows", "positions"):
        assert torch.equal(getattr(whole, name), getattr(found, name))
    valid = found.labels != -100
    for name in ("weights", "domain"):
        assert torch.equal(whole.columns[name][valid], found.columns[name][valid])
    if part is not pack:
        assert [whole for _, whole in part.cuts] == [
            dict(zip(pack.keys, pack.lengths, strict=True))[k] for k in part.keys
        ]
        assert all(
            before == int(part.position_ids[0, at]) for (before, _), at in zip(part.cuts, part.cu_seqlens, strict=False)
        )
        padded = part.padded_to(part.num_tokens + 3, 0)
        assert padded.cuts == (*part.cuts, (0, 3))
        assert torch.equal(tokens_of(padded).columns["weights"][: part.num_tokens], found.columns["weights"])
