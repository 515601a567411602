"""The collator: exact tensors, every token once over the replicas, and errors that are carried, not raised."""

import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.data.collator import MicroBatch, MiniBatch, PackedBucketCollator
from hf_hotspa.errors import DataError, TokenRangeError
from hf_hotspa.packing.bucketing import plan_mini_batch
from hf_hotspa.rows.scan import scan_dataset
from hf_hotspa.strategy import parse_buckets

BUCKETS = parse_buckets("dp4:4@8,dp2tp2:10,tp2pp2:40")
VOCAB = 100


def scan(rows):
    return scan_dataset(rows, disable_progress=True)


def collate(rows, rank=0, buckets=BUCKETS, policy="error", change=None, table=True):
    """The mini-batch of all rows on one rank; `change` replaces rows after the scan."""
    scanned = scan(rows)
    plan = plan_mini_batch(range(len(rows)), scanned, buckets, policy=policy)
    examples = dict(enumerate(rows)) | (change or {})
    collator = PackedBucketCollator(buckets, rank=rank, vocab_size=VOCAB, table=scanned if table else None)
    return collator.of_plan(plan, examples)


def test_the_tensors_of_a_pack():
    rows = [{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22, 23, 24], "labels": [-100, -100, 23, 24]}]
    mini_batch = collate(rows, buckets=parse_buckets("dp1:4@8"))
    assert mini_batch.error is None
    ((batch,),) = [phase.micro_batches for phase in mini_batch.phases]
    assert batch.input_ids.tolist() == [[21, 22, 23, 24, 11, 12, 13]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.labels.tolist() == [[-100, 23, 24, -100, 12, 13, -100]]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.lengths == (4, 3)
    assert (batch.num_tokens, batch.num_labels, max(batch.lengths)) == (7, 4, 4)
    assert mini_batch.num_labels == 4
    assert {t.dtype for t in (batch.input_ids, batch.position_ids, batch.labels)} == {torch.int64}
    assert batch.cu_seqlens.dtype == torch.int32


@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=60), min_size=1, max_size=25),
    st.sampled_from(["truncate", "split", "drop"]),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_the_ranks_together_train_every_planned_token_once(token_lists, policy, with_labels):
    rows = [{"input_ids": ids} for ids in token_lists]
    if with_labels:
        rows = [{**row, "labels": [t if t % 3 else -100 for t in row["input_ids"]]} for row in rows]
    table = scan(rows)
    plan = plan_mini_batch(range(len(rows)), table, BUCKETS, policy=policy)
    expected = []
    for s in plan.sequences():
        source = rows[s.row].get("labels", rows[s.row]["input_ids"])
        expected.append((tuple(token_lists[s.row][s.start : s.stop]), (*source[s.start + 1 : s.stop], -100)))
    seen, num_labels = [], 0
    for p, phase in enumerate(plan.phases):
        strategy = phase.bucket.strategy
        for rank in range(4):
            collator = PackedBucketCollator(BUCKETS, rank=rank, vocab_size=VOCAB, table=table)
            mini_batch = collator.of_plan(
                plan, {row: rows[row] for row in collator.rows_of(plan)}
            )  # reads nothing else
            assert mini_batch.error is None
            assert len(mini_batch.phases) == len(plan.phases)
            coord = strategy.coord(rank)
            batches = mini_batch.phases[p].micro_batches
            assert [b.lengths for b in batches] == [pack.lengths for pack in phase.replicas[coord.dp]]
            if coord.tp or coord.pp:
                continue  # the other ranks of a replica run the same packs
            for batch in batches:
                edges = batch.cu_seqlens.tolist()
                assert [b - a for a, b in pairwise(edges)] == list(batch.lengths)
                for a, b in pairwise(edges):
                    assert batch.position_ids[0, a:b].tolist() == list(range(b - a))
                    seen.append((tuple(batch.input_ids[0, a:b].tolist()), tuple(batch.labels[0, a:b].tolist())))
                assert batch.num_labels == int((batch.labels != -100).sum())
                num_labels += batch.num_labels
    assert sorted(seen) == sorted(expected)
    assert num_labels == plan.num_labels


def test_padding_is_a_sequence_of_its_own():
    (batch,) = collate([{"input_ids": [7, 8, 9]}]).phases[0].micro_batches
    padded = batch.padded_to(5, pad_token_id=1)
    assert padded.input_ids.tolist() == [[7, 8, 9, 1, 1]]
    assert padded.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert padded.labels.tolist() == [[8, 9, -100, -100, -100]]
    assert padded.cu_seqlens.tolist() == [0, 3, 5]
    assert padded.cu_seqlens.dtype == torch.int32
    assert padded.lengths == (3, 2)
    assert padded.num_labels == 2
    assert batch.padded_to(3, 1) is batch
    with pytest.raises(DataError, match="3 tokens cannot be padded to 2"):
        batch.padded_to(2, 1)


def test_moving_and_pickling_keep_everything():
    mini_batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": list(range(30))}])
    on_meta = mini_batch.to("meta")
    for phase in on_meta.phases:
        for batch in phase.micro_batches:
            tensors = (batch.input_ids, batch.position_ids, batch.labels, batch.cu_seqlens)
            assert {t.device.type for t in tensors} == {"meta"}
    assert on_meta.plan is mini_batch.plan
    again = pickle.loads(pickle.dumps(mini_batch))
    assert isinstance(again, MiniBatch)
    assert again.plan == mini_batch.plan
    first, second = (m.phases[1].micro_batches[0] for m in (mini_batch, again))
    assert isinstance(second, MicroBatch)
    assert torch.equal(first.labels, second.labels)


ROW = {"input_ids": list(range(30)), "labels": [-100] * 10 + list(range(10, 30))}


def altered(key, position, value):
    return {0: {**ROW, key: [*ROW[key][:position], value, *ROW[key][position + 1 :]]}}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            altered("input_ids", 3, 100),
            TokenRangeError,
            r"input_ids holds 100.*0 to 99 \(size 100\).*row 0, position 3,",
        ),
        (altered("input_ids", 29, -1), TokenRangeError, "input_ids holds -1.*row 0, position 29,"),
        (altered("labels", 15, 512), TokenRangeError, "labels holds 512.*row 0, position 15,"),
        (altered("labels", 15, -100), DataError, "scan is stale.*19 labels and 20 were planned.*row 0"),
        ({0: {"input_ids": list(range(31))}}, DataError, "scan is stale.*31 tokens and 30 were scanned"),
        ({0: {"input_ids": list(range(30))}}, DataError, "scan is stale.*29 labels and 20 were planned"),
        ({0: {**ROW, "labels": [1, 2]}}, DataError, "30 input_ids and 2 labels"),
        ({0: "text"}, DataError, "row is a str"),
    ],
)
def test_errors_are_carried_by_name(change, error, message):
    mini_batch = collate([ROW, {"input_ids": [1, 2]}], rank=3, change=change)
    assert type(mini_batch.error) is error
    with pytest.raises(error, match=message):
        raise mini_batch.error
    assert [phase.micro_batches for phase in mini_batch.phases] == [(), ()]
    assert mini_batch.num_labels == 21  # the plan is whole
    if error is TokenRangeError:
        assert "rank 3" in str(mini_batch.error)


def test_an_error_in_the_middle_of_a_pack_names_row_and_position():
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3, 200]}, {"input_ids": [1, 2, 3]}]
    begins = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [200, 2, 3]}]
    for wrong, position in ((rows, 3), (begins, 0)):
        mini_batch = collate(wrong, buckets=parse_buckets("dp1:4@16"))
        assert f"dataset row 1, position {position}" in str(mini_batch.error)
    rows = [{"input_ids": [1] * 7, "labels": [1] * 6 + [200]}]  # second piece of a split row
    mini_batch = collate(rows, buckets=parse_buckets("dp1:4@16"), policy="split")
    assert "labels holds 200" in str(mini_batch.error)
    assert "dataset row 0, position 6" in str(mini_batch.error)


def test_without_a_table_the_planned_slice_must_still_fit():
    assert collate([ROW], change={0: {"input_ids": [1] * 29}}, table=False).error is not None
    whole = collate([ROW], change={0: {k: [*v, 5] for k, v in ROW.items()}}, table=False)
    assert whole.error is None
