"""Predictions of published runs: every configuration is read as what it is."""

import json
from importlib import import_module
from typing import Any

published: Any = import_module("published")

CONFIGS = json.loads(published.INPUTS.read_text())
FILE = published.INPUTS.with_name("published_predictions.json")


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
        config = next(each for each in CONFIGS if each["id"] == name)
        tokens = row["tokens_per_s_gpu"] * config["num_gpus"] * row["seconds"]
        assert abs(tokens / (config["global_batch"] * config["model"]["seq_len"]) - 1) < 1e-3
        assert f"{row['seconds']:.3f}" in text


def test_all_runs_were_predicted():
    kept = json.loads(FILE.read_text())
    assert kept["predictions"].keys() == {config["id"] for config in CONFIGS}
    assert all("refused" in row or row["seconds"] > 0 for row in kept["predictions"].values())
