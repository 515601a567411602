"""The scan: exact lengths and label counts on every path, a cache that survives anything, clear refusals."""

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.errors import DataError, UnsupportedError
from hf_hotspa.rows import scan
from hf_hotspa.rows.read_row import integer_array
from hf_hotspa.rows.scan import cache_path, scan_dataset

ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]},
    {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, -100, 5]},
    {"input_ids": [9], "labels": [9]},
    {"input_ids": [], "labels": []},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},  # only the first is masked, which never counts
    {"input_ids": [1, 2, 3], "labels": [-100, -100, -100]},
    {"input_ids": list(range(20)), "labels": [-100] * 9 + list(range(9, 20))},
]


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {key: torch.tensor(value, dtype=torch.int64) for key, value in self.rows[i].items()}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """Nothing is written to the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def quiet(dataset, **kwargs):
    return scan_dataset(dataset, disable_progress=True, **kwargs)


def expected_labels(row, start, stop):
    labels = row.get("labels") or row["input_ids"]
    return sum(label != -100 for label in labels[start + 1 : stop])


def check(table, rows):
    assert table.lengths.dtype == table.label_counts.dtype == np.int64
    assert table.lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert table.num_tokens == sum(len(row["input_ids"]) for row in rows)
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        assert table.label_counts[i] == expected_labels(row, 0, length)
        for start in range(length):
            for stop in range(start + 1, length + 1):
                assert table.num_labels(i, start, stop) == expected_labels(row, start, stop), (i, start, stop)


@pytest.mark.parametrize("rows", [ROWS, [{"input_ids": row["input_ids"]} for row in ROWS]], ids=["labels", "no labels"])
def test_all_kinds_of_datasets_give_the_same_exact_table(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "_ROWS_PER_READ", 3)  # several chunks
    check(quiet(rows), rows)
    check(quiet(Rows(rows)), rows)
    arrow = datasets.Dataset.from_list(rows)
    check(quiet(arrow, cache_dir=tmp_path), rows)
    check(quiet(arrow, cache_dir=tmp_path), rows)  # from the cache
    check(quiet(arrow.select([6, 1, 3]), cache_dir=tmp_path), [rows[6], rows[1], rows[3]])
    check(quiet(arrow.with_format("torch"), cache_dir=tmp_path), rows)


@given(st.lists(st.lists(st.booleans(), max_size=30), min_size=1, max_size=12), st.data())
@settings(deadline=None, max_examples=60)
def test_label_counts_of_any_slice_of_any_mask(masks, data):
    rows = [
        {"input_ids": list(range(len(mask))), "labels": [i if keep else -100 for i, keep in enumerate(mask)]}
        for mask in masks
    ]
    table = quiet(rows)
    i = data.draw(st.integers(0, len(rows) - 1))
    length = len(masks[i])
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    assert table.num_labels(i, start, stop) == sum(masks[i][start + 1 : stop])
    assert table.label_counts.tolist() == [sum(mask[1:]) for mask in masks]


def test_rows_that_mask_nothing_take_no_memory():
    table = quiet([{"input_ids": [1] * 1000, "labels": [1] * 1000}, {"input_ids": [1] * 64, "labels": [-100] * 64}])
    assert len(table.mask_bits) == 8
    assert table.mask_offsets.tolist() == [-1, 0]


def test_other_list_types(tmp_path):
    fixed = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=3)})
    large = datasets.Features({"input_ids": datasets.LargeList(datasets.Value("uint16"))})
    for features in (fixed, large):
        dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6]]}, features=features)
        assert quiet(dataset, cache_dir=tmp_path).lengths.tolist() == [3, 3]


def test_the_cache_is_used_and_keyed_by_fingerprint(tmp_path, monkeypatch):
    dataset = datasets.Dataset.from_list(ROWS)
    first = quiet(dataset, cache_dir=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [cache_path(dataset, tmp_path).name]  # and nothing temporary

    def forbidden(*args):
        raise AssertionError("scanned again")

    monkeypatch.setattr(scan, "scan_arrow", forbidden)
    again = quiet(dataset, cache_dir=tmp_path)
    for name in ("lengths", "label_counts", "mask_offsets", "mask_bits"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    with pytest.raises(AssertionError, match="scanned again"):
        quiet(dataset.select([2, 1]), cache_dir=tmp_path)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 not a zip", "truncated", "other rows"])
def test_a_broken_cache_file_is_rebuilt(tmp_path, damage, caplog):
    dataset = datasets.Dataset.from_list(ROWS)
    quiet(dataset, cache_dir=tmp_path)
    path = cache_path(dataset, tmp_path)
    good = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(good[: len(good) // 2])
    elif damage == "other rows":
        quiet(dataset.select([0]), cache_dir=tmp_path)
        cache_path(dataset.select([0]), tmp_path).replace(path)
    else:
        path.write_bytes(damage)
    check(quiet(dataset, cache_dir=tmp_path), ROWS)
    assert "cannot be used" in caplog.text
    caplog.clear()
    check(quiet(dataset, cache_dir=tmp_path), ROWS)
    assert not caplog.text


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    check(quiet(datasets.Dataset.from_list(ROWS), cache_dir=blocked / "sub"), ROWS)
    assert "could not be kept" in caplog.text


def test_transforms_on_reading_are_seen_and_not_cached(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS).with_transform(
        lambda batch: {"input_ids": [[1, 2]] * len(batch["labels"])}
    )
    assert quiet(dataset, cache_dir=tmp_path).lengths.tolist() == [2] * len(ROWS)
    assert list(tmp_path.iterdir()) == []
    hidden = datasets.Dataset.from_list(ROWS).with_format("numpy", columns=["input_ids"])
    assert quiet(hidden, cache_dir=tmp_path).label_counts.tolist() == [3, 4, 0, 0, 2, 2, 19]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)

    def __len__(self):
        return len(ROWS)


class Unsized(torch.utils.data.Dataset):
    def __getitem__(self, i):
        return ROWS[i]


@pytest.mark.parametrize(
    "stream", [Stream(), Unsized(), datasets.Dataset.from_list(ROWS).to_iterable_dataset(), iter(ROWS)], ids=type
)
def test_streams_are_refused_by_name(stream):
    with pytest.raises(UnsupportedError, match=f"stream cannot be scanned: {type(stream).__name__}"):
        quiet(stream)


@pytest.mark.parametrize("dataset", [[], datasets.Dataset.from_dict({"input_ids": []})], ids=["list", "datasets"])
def test_an_empty_dataset_is_refused(dataset):
    with pytest.raises(DataError, match="HSP-301.*the dataset is empty"):
        quiet(dataset)


def test_a_dictionary_of_splits_is_refused():
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))
    with pytest.raises(DataError, match=r"\['train'\].*pass one of the splits"):
        quiet(splits)


GOOD = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"input_ids": [1, 2, 3], "labels": [1, 2]}, "3 input_ids and 2 labels.*row 1"),
        ({"input_ids": None, "labels": [1, 2, 3]}, "input_ids is missing.*row 1"),
        ({"input_ids": [1, None, 3], "labels": [1, 2, 3]}, "input_ids.*row"),
    ],
)
def test_bad_rows_are_named_on_both_paths(bad, message):
    for dataset in ([GOOD, bad], datasets.Dataset.from_list([GOOD, bad])):
        with pytest.raises(DataError, match=message):
            quiet(dataset)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"text": ["a"]}, "no.*'input_ids', only.*text.*prepare_dataset"),
        ({"input_ids": ["a b"]}, "input_ids"),
        ({"input_ids": [[0.5, 1.0]]}, "input_ids.*(double|float64)"),
        ({"input_ids": [[[1], [2]]]}, "input_ids"),
        ({"input_ids": [3]}, "input_ids"),
        ({"input_ids": [[1]], "labels": [["a"]]}, "labels"),
    ],
)
def test_bad_columns_are_named_on_both_paths(column, message):
    arrow = datasets.Dataset.from_dict(column)
    for dataset in (arrow, arrow.to_list()):
        with pytest.raises(DataError, match=message):
            quiet(dataset)


@pytest.mark.parametrize("value", [[[1, 2], [3]], [[1], [2]], [1.0], ["a"], [True], "abc", 7, [2**70], {"a": 1}])
def test_everything_else_is_refused(value):
    with pytest.raises(DataError, match=r"row 12, column 'labels'"):
        integer_array(value, "labels", 12)
