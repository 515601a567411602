"""Where packs are cut into chunks of tokens, and what a part of a pack holds."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_hotspa.costs.time import squared_lengths
from hf_hotspa.data.collator import MicroBatch, PackedBucketCollator
from hf_hotspa.packing.cuts import cut_into_chains, num_chunks
from hf_hotspa.parallel.loss import tokens_of
from hf_hotspa.rows.read_row import RowRules
from hf_hotspa.strategy import parse_buckets

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


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
