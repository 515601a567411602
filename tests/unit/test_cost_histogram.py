"""Length histograms: named distributions and JSON files."""

import json
from collections import Counter
from pathlib import Path

import pytest

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.search.histogram import DISTRIBUTIONS, KIND, Counts, load_counts, synthetic_lengths


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_seeded_and_bounded(name: str) -> None:
    lengths = synthetic_lengths(name, 512, 8192, seed=3)
    assert lengths == synthetic_lengths(name, 512, 8192, seed=3)
    assert lengths != synthetic_lengths(name, 512, 8192, seed=4)
    assert len(lengths) == 512
    assert all(16 <= length <= 8192 for length in lengths)
    assert synthetic_lengths(name, 3, 5) == [5, 5, 5]


def test_unknown_distribution() -> None:
    with pytest.raises(HotspaConfigError, match="commoncrawl, github, uniform, chat"):
        synthetic_lengths("zipf", 10)
    with pytest.raises(HotspaConfigError, match="at least 1"):
        synthetic_lengths("chat", 0)


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    lengths = synthetic_lengths("github", 300)
    Counts.of(lengths, "a test").save(path)
    assert Counter(load_counts(path).drawn()) == Counter(lengths)
    assert json.loads(path.read_text())["source"] == "a test"
    few = load_counts(path).drawn(50, seed=1)
    assert len(few) == 50
    assert max(few) == max(lengths)
    assert set(few) <= set(lengths)


HEAD = f'{{"kind": "{KIND}", "schema_version": 1'


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (HEAD + ', "counts": {"5": 2}', "not valid JSON"),
        ("[1, 2]", "holds 'list'"),
        (HEAD.replace("1", "7") + "}", "schema version 7"),
        (HEAD + "}", "no counts"),
        (HEAD + ', "counts": {"x": 2}}', "'x' is not a length"),
        (HEAD + ', "counts": {"0": 2}}', "'0' is not a length"),
        (HEAD + ', "counts": {"5": -2}}', "count of length 5"),
        (HEAD + ', "counts": {"5": 1.5}}', "count of length 5"),
        (HEAD + ', "counts": {"5": 0}}', "all counts"),
    ],
)
def test_corrupt_files(tmp_path: Path, contents: str, says: str) -> None:
    path = tmp_path / "lengths.json"
    with pytest.raises(HotspaConfigError, match="cannot be read"):
        load_counts(path).drawn()
    path.write_text(contents)
    with pytest.raises(HotspaConfigError, match=f"{says}.*lengths.json"):
        load_counts(path).drawn()
