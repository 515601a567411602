"""Predictions of published runs: every configuration is read as what it is, and the errors are those of the page."""

import json
from importlib import import_module
from statistics import median
from typing import Any

import pytest

from hf_hotspa.reporting.gain_words import PREDICTED_ERROR
from tests.contract.commands import ROOT

published: Any = import_module("published")

CONFIGS = json.loads(published.INPUTS.read_text())
RESULTS = json.loads(published.RESULTS.read_text())
KNOWN = {config["id"]: config for config in CONFIGS}


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    found: dict[str, float] = published.errors_of(CONFIGS, RESULTS)
    return found


def test_links_are_those_that_the_configuration_names():
    rates = {
        each["network"]: (machine := published.hardware_of(each)).inter_bandwidth * (machine.nics_per_node or 8)
        for each in CONFIGS
    }
    assert rates["4x100 Gb/s RoCE per node"] == 4 * 12.5e9
    assert rates["NVLink; 400 Gb/s RDMA per GPU"] == 8 * 50e9
    assert rates["1600 Gb/s RoCE per node"] == 200e9
    assert rates["InfiniBand 400 Gb/s"] == 50e9


def test_a_prediction_is_the_sum_of_its_parts_and_is_printed(tmp_path, capsys):
    found = published.main(["--rows", "fp-h100", "--json", str(tmp_path / "found.json")])["predictions"]
    assert json.loads((tmp_path / "found.json").read_text())["predictions"] == found
    text = capsys.readouterr().out
    for name, row in found.items():
        assert abs(sum(row["of which"].values()) - row["seconds"]) < 1e-3
        config = KNOWN[name]
        tokens = row["tokens_per_s_gpu"] * config["num_gpus"] * row["seconds"]
        assert abs(tokens / (config["global_batch"] * config["model"]["seq_len"]) - 1) < 1e-3
        assert f"{row['seconds']:.3f}" in text


def test_every_run_is_predicted() -> None:
    rows = published.predictions([config for config in CONFIGS if config["parallel"]["pp"] <= 2])
    assert len(rows) > 70
    for name, row in rows.items():
        assert row["seconds"] > 0, name
        allocated, reserved, card = (row["memory_gib"][kind] for kind in ("allocated", "reserved", "card"))
        assert 0 < allocated < reserved < card, name


def test_seconds_of_the_runs_with_results(errors: dict[str, float]) -> None:
    """A median error of at most 9 %, a 90th percentile of at most 22 %, and no card is off on one side by more than 6 %."""
    assert len(errors) == len(RESULTS) == 41
    sizes = [abs(error) for error in errors.values()]
    assert median(sizes) <= 0.09
    assert published.percentile(sizes, 0.9) <= 0.22
    # gains below it count as "about the same"
    assert published.percentile(sizes, 0.9) == pytest.approx(PREDICTED_ERROR, abs=0.005)
    for card in published.SHARES:
        own = [error for name, error in errors.items() if published.card_of(KNOWN[name]) == card]
        assert len(own) >= 4
        assert abs(median(own)) <= 0.06, card


def test_memory_of_the_runs_with_results() -> None:
    found = published.memory_errors(CONFIGS, RESULTS)
    sizes = {kind: [abs(error) for error in own.values()] for kind, own in found.items()}
    assert {kind: len(own) for kind, own in sizes.items()} == {"allocated": 17, "reserved": 1, "card": 5}
    assert median(error for own in sizes.values() for error in own) <= 0.12
    assert all(median(own) <= 0.12 for own in sizes.values())
    # packs in flight of an interleaved pipeline: 35 of 8 stages each, not 7 packs
    assert abs(found["allocated"]["mlm-ci-a100-7b-pp4vpp8"]) < 0.05


def test_the_shares_of_cards_are_those_that_the_results_give() -> None:
    assert published.fitted(CONFIGS, RESULTS) == published.SHARES


def test_the_page_has_the_errors_and_the_earlier_predictions_with_their_date() -> None:
    page = (ROOT / "docs" / "predicted.md").read_text()
    lines = published.report(CONFIGS, RESULTS)
    assert "\n".join(lines) in page, "run: python benchmarks/published.py --write"
    assert published.TABLE.read_text() == published.errors_csv(CONFIGS, RESULTS)
    blind = json.loads(published.BLIND.read_text())
    assert blind["date"] == "2026-11-25"
    assert blind["cost model of commit"].startswith("607bf632")
    assert any("2026-11-25" in line and "607bf632" in line for line in lines)
    assert blind["predictions"].keys() == KNOWN.keys()
    for card, share in published.SHARES.items():
        assert f"| {card}" in page
        assert f"{share:.2f}" in page
