"""Rows: padding that is cut off, documents that are told apart, what is refused, and the same on every path of the scan."""

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import (
    BloomConfig,
    GemmaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
)

from hf_hotspa.data.collator import MiniBatch, PackedBucketCollator
from hf_hotspa.errors import DataError, HotspaConfigError, OverlongError, UnsupportedError
from hf_hotspa.model.model_kind import has_absolute_positions
from hf_hotspa.packing.bucketing import check_lengths, plan_mini_batch
from hf_hotspa.rows import scan
from hf_hotspa.rows.read_row import RowRules, read_row
from hf_hotspa.rows.scan import cache_path, scan_dataset
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.strategy import parse_buckets

LANGUAGE_MODELING = RowRules(labels_are_ids=True, unlabelled_id=9)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """Nothing is written to the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def read(rules=None, **columns):
    row = read_row(columns, 4, rules or RowRules())
    return row.ids.tolist(), None if row.labels is None else row.labels.tolist(), row.cuts.tolist(), row.first


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda x: torch.tensor(x).bool()])
def test_padding_is_cut_off(make):
    mask = make([0, 0, 1, 1, 1, 0])
    ids, labels = [7, 7, 1, 2, 3, 7], [-100, -100, -100, 2, 3, -100]
    assert read(input_ids=ids, labels=labels, attention_mask=mask) == ([1, 2, 3], [-100, 2, 3], [], 2)
    assert read(input_ids=ids, attention_mask=mask) == ([1, 2, 3], None, [], 2)
    assert read(input_ids=ids, attention_mask=make([0] * 6))[0] == []
    assert read(input_ids=ids, labels=labels, attention_mask=make([1] * 6))[0] == ids


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("position_ids", [0, 1, 0, 0, 1, 2]),
        ("seq_lengths", [2, 1, 3]),
        ("seq_lens", [2, 0, 1, 3]),
        ("cu_seqlens", [0, 2, 3, 6]),
        ("cu_seq_lens_q", [0, 2, 3, 6, 6]),
        ("seq_idx", [5, 5, 1, 2, 2, 2]),
    ],
)
def test_documents_are_told_apart(column, value):
    assert read(input_ids=[1, 2, 3, 4, 5, 6], **{column: value})[2] == [2, 3]
    padded = {"input_ids": [9, 1, 2, 3, 4, 5, 6, 9], "attention_mask": [0] + [1] * 6 + [0]}
    if column in ("position_ids", "seq_idx"):
        value = [value[0], *value, 0]
    assert read(**padded, **{column: value})[2:] == ([2, 3], 1)  # lengths of the tokens
    if column == "seq_lengths":
        assert read(**padded, seq_lengths=[1, 2, 1, 3, 1])[2] == [2, 3]  # and of tokens and padding


def test_labels_of_a_language_modeling_collator():
    assert read(LANGUAGE_MODELING, input_ids=[1, 9, 2], labels=[-100] * 3)[1] == [1, -100, 2]
    padded = {"input_ids": [1, 2, 9, 9], "attention_mask": [1, 1, 0, 0]}
    assert read(LANGUAGE_MODELING, **padded)[:2] == ([1, 2], [1, 2])
    assert read(RowRules(labels_are_ids=True), input_ids=[1, 9])[1] == [1, 9]  # the tokenizer has no padding
    assert read(input_ids=[1, 2], label_ids=[-100, 2])[1] == [-100, 2]


@pytest.mark.parametrize(
    ("rules", "columns", "error", "message"),
    [
        ({}, {"attention_mask": [1, 0, 1]}, UnsupportedError, "0 at position 1, between tokens.*row 4"),
        ({}, {"attention_mask": [1, 2, 2]}, UnsupportedError, "attention_mask holds 2"),
        ({}, {"attention_mask": [1, -1, 1]}, UnsupportedError, "attention_mask holds -1"),
        ({}, {"attention_mask": [1, 1]}, DataError, "3 input_ids and 2 attention_mask"),
        ({}, {"attention_mask": [[1, 1, 1]]}, DataError, "2 dimensions"),
        ({}, {"attention_mask": [1, 1, 0], "labels": [1, 2, 3]}, UnsupportedError, "position 2 is padding.*row 4"),
        ({}, {"attention_mask": [0, 0, 1], "labels": [-100, 2, 3]}, UnsupportedError, "position 1 is padding.*row 4"),
        ({"reads_mask": False}, {"attention_mask": [1, 1, 0]}, UnsupportedError, "leaves their attention_mask out"),
        ({"absolute_positions": True}, {"attention_mask": [0, 1, 1]}, UnsupportedError, "has absolute positions"),
        ({"unsupported": frozenset(["inputs_embeds"])}, {"inputs_embeds": [1]}, UnsupportedError, "'inputs_embeds'"),
        ({}, {"labels": [1, 2, 3], "label_ids": [1, 2, 4]}, DataError, r"\['labels', 'label_ids'\] differ"),
        ({}, {"position_ids": [1, 2, 3]}, DataError, "position_ids holds 1 at token 0.*row 4"),
        ({}, {"position_ids": [0, 1, 3]}, DataError, "position_ids holds 3 at token 2, after 1"),
        ({}, {"position_ids": [0, 1]}, DataError, "3 input_ids and 2 position_ids"),
        ({}, {"seq_lengths": [1, 1]}, DataError, "have 2 tokens by seq_lengths, and the row has 3"),
        ({}, {"seq_lengths": [4, -1]}, DataError, "a document has -1 tokens"),
        ({}, {"cu_seqlens": [1, 3]}, DataError, "does not begin with 0"),
        ({}, {"seq_lengths": [1, 2], "position_ids": [0, 1, 2]}, DataError, "position_ids and seq_lengths cut"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(rules, columns, error, message):
    with pytest.raises(error, match=message):
        read(RowRules(**rules), input_ids=[1, 2, 3], **columns)


def test_absolute_positions_are_those_of_the_documents():
    """Positions that the row brings along need no padding on the left."""
    row = {"input_ids": [9, 1, 2], "attention_mask": [0, 1, 1], "position_ids": [1, 0, 1]}
    assert read(RowRules(absolute_positions=True), **row) == ([1, 2], None, [], 1)


@pytest.mark.parametrize(
    ("config", "absolute"),
    [
        (GPT2Config, True), (GPTBigCodeConfig, True), (LlamaConfig, False), (GemmaConfig, False), (GPTJConfig, False),
        (GPTNeoXConfig, False), (OPTConfig, False), (BloomConfig, False), (Phi3Config, False),
    ],
)  # fmt: skip
def test_which_models_know_where_a_row_begins(config, absolute):
    assert has_absolute_positions(config()) is absolute


ROW = st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=6), max_size=4)


@given(st.lists(st.tuples(ROW, st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8), st.booleans())
@settings(deadline=None, max_examples=40)
def test_every_scan_counts_every_document(rows, labelled):
    """Lists of rows and columns of a `datasets.Dataset` give the table of the documents by themselves."""
    examples, documents = [], []
    for row, left, right in rows:
        documents.append(row)
        example = {
            "input_ids": [9] * left + [token for document in row for token, _ in document] + [9] * right,
            "attention_mask": [0] * left + [1] * sum(map(len, row)) + [0] * right,
            "position_ids": [0] * left + [at for document in row for at in range(len(document))] + [0] * right,
        }
        if labelled:
            flat = [token if counts and at else -100 for d in row for at, (token, counts) in enumerate(d)]
            example["labels"] = [-100] * left + flat + [-100] * right
        examples.append(example)
    old, scan._ROWS_PER_READ = scan._ROWS_PER_READ, 3
    try:
        tables = [scan_dataset(examples, disable_progress=True)]
        tables.append(scan.scan_arrow(datasets.Dataset.from_list(examples), RowRules(), True))
    finally:
        scan._ROWS_PER_READ = old
    for table in tables:
        lengths = [len(document) for row in documents for document in (row or [[]])]
        assert table.sequence_lengths.tolist() == lengths
        assert table.longest_of_rows.tolist() == [max(map(len, row), default=0) for row in documents]
        plan = plan_mini_batch(range(len(table)), table, parse_buckets("dp2:3@6,tp2:6"))
        found = sorted((s.row, s.start, s.num_tokens, s.num_labels) for s in plan.sequences())
        expected = []
        for index, row in enumerate(documents):
            start = 0
            for document in row:
                counted = sum(counts or not labelled for _, counts in document[1:])
                expected.append((index, start, len(document), counted))
                start += len(document)
        assert found == sorted(expected)
        assert table.label_counts.sum() == plan.num_labels


def test_plain_columns_are_scanned_without_making_rows(tmp_path, monkeypatch):
    rows = [{"input_ids": [1, 2, 9], "attention_mask": [1, 1, 1], "position_ids": [0, 1, 2]}, {"input_ids": [4]}]
    rows[1] |= {"attention_mask": [1], "position_ids": [0]}
    dataset = datasets.Dataset.from_list(rows)
    with monkeypatch.context() as patched:
        patched.setattr(scan, "read_row", None)
        assert scan_dataset(dataset, cache_dir=tmp_path, disable_progress=True).lengths.tolist() == [3, 1]
        table = scan_dataset(dataset, rules=LANGUAGE_MODELING, cache_dir=tmp_path, disable_progress=True)
        assert table.label_counts.tolist() == [1, 0]
    paths = {cache_path(dataset, tmp_path, rules).name for rules in (RowRules(), LANGUAGE_MODELING)}
    assert {path.name for path in tmp_path.glob("*.npz")} == paths
    # documents come back from the cache
    packed = datasets.Dataset.from_list([{"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}])
    for _ in range(2):
        assert scan_dataset(packed, cache_dir=tmp_path, disable_progress=True).sequence_lengths.tolist() == [1, 2]
    hidden = packed.with_format(columns=["input_ids"])  # has the same fingerprint in some releases
    assert scan_dataset(hidden, cache_dir=tmp_path, disable_progress=True).sequence_lengths.tolist() == [3]


def test_collators_that_pad_on_the_left():
    rules = RowRules(pads_left=True)
    unequal = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [-100, 5]}]
    assert len(scan_dataset(unequal, rules=rules, disable_progress=True)) == 2
    with pytest.raises(UnsupportedError, match="pads on the left.*positions of a row"):
        scan_dataset(unequal, rules=RowRules(pads_left=True, absolute_positions=True), disable_progress=True)
    unequal[1]["labels"] = [4, 5]  # the first one counts for nothing
    for dataset in (unequal, datasets.Dataset.from_list(unequal)):
        table = scan_dataset(dataset, rules=rules, disable_progress=True)
        assert table.label_counts.tolist() == [2, 1]


def test_the_first_token_behind_padding_is_trained_from_nothing():
    row = {"input_ids": [9, 1, 2], "attention_mask": [0, 1, 1], "labels": [-100, 1, 2]}
    assert SequenceTable.of_rows([read_row(row, 0)]).label_counts.tolist() == [1]
    of_ids = read_row(row, 0, RowRules(labels_are_ids=True, unlabelled_id=9))
    assert SequenceTable.of_rows([of_ids]).label_counts.tolist() == [1]


def test_policies_look_at_documents():
    table = SequenceTable.of_rows([read_row({"input_ids": list(range(10)), "seq_lengths": [2, 5, 3]}, 0)])
    check_lengths(table, 5, "error")
    with pytest.raises(OverlongError, match="a sequence of 5 tokens"):
        check_lengths(table, 4, "error")
    buckets = parse_buckets("dp1:4@8")

    def pieces(policy):
        plan = plan_mini_batch([0], table, buckets, policy=policy)
        return sorted((s.start, s.stop, s.num_labels) for s in plan.sequences())

    assert pieces("drop") == [(0, 2, 1), (7, 10, 2)]
    assert pieces("truncate") == [(0, 2, 1), (2, 6, 3), (7, 10, 2)]
    assert pieces("split") == [(0, 2, 1), (2, 6, 3), (6, 7, 0), (7, 10, 2)]


# -- the collator in a plain DataLoader --------------------------------------------------------------------------------

BUCKETS = parse_buckets("dp2:4@8,tp2:40")


def test_the_collator_in_a_data_loader():
    rows = [{"input_ids": list(range(n))} for n in (3, 4, 20, 2, 4, 1)]
    parts = []
    for rank in range(2):
        collator = PackedBucketCollator(BUCKETS, rank=rank, vocab_size=100)
        for loader in (
            DataLoader(rows, batch_size=3, collate_fn=collator),
            DataLoader(datasets.Dataset.from_list(rows), batch_size=3, collate_fn=collator, num_workers=1),
        ):
            batches = list(loader)
            assert all(isinstance(batch, MiniBatch) and batch.error is None for batch in batches)
            assert [batch.plan.num_rows for batch in batches] == [3, 3]
            assert [batch.num_labels for batch in batches] == [2 + 3 + 19, 1 + 3]
        parts.append(batches)
    for ours, theirs in zip(*parts, strict=True):
        assert ours.digests() == theirs.digests()
    tokens = [sum(m.num_tokens for b in p for m in b.phases[0].micro_batches) for p in parts]
    assert sum(tokens) == 3 + 4 + 2 + 4 + 1
    other = PackedBucketCollator(BUCKETS, rank=1, vocab_size=100)([{"input_ids": [5, 6, 7]}, *rows[1:3]])
    assert other.digests() != parts[0][0].digests()  # rows that differ between ranks are noticed


def test_errors_are_carried_in_the_mini_batch():
    collator = PackedBucketCollator(BUCKETS, rank=0, vocab_size=100)
    for rows, error, message in (
        ([{"input_ids": [1]}, {"text": "a"}], DataError, "no 'input_ids'.*row 1, counted within the mini-batch"),
        ([{"input_ids": [1] * 50}], OverlongError, "50 tokens is longer.*row 0"),
        ([{"input_ids": [1, 100]}], DataError, "input_ids holds 100.*row 0, position 1"),
    ):
        found = collator(rows).error
        with pytest.raises(error, match=message):
            raise found
    with pytest.raises(HotspaConfigError, match="no buckets"):
        PackedBucketCollator((), rank=0, vocab_size=100)
    with pytest.raises(HotspaConfigError, match="policy"):
        PackedBucketCollator(BUCKETS, rank=0, vocab_size=100, policy="cut")
