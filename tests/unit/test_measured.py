"""What measured seconds say about switching, and their line in the record of a run."""

import json

import pytest

from hf_hotspa.errors import RunLogError
from hf_hotspa.reporting.measured import MeasuredGain
from hf_hotspa.reporting.page import report_page
from hf_hotspa.reporting.run_log import FILE_NAME, RunLogWriter, read_run_log
from hf_hotspa.reporting.summary import verdict
from tests.run_logs import made_facts, write_run


def made(*alone, **others):
    return MeasuredGain((1.0, 2.0, 1.0), {"tp4": alone, **others}, 2e-7)


def test_it_paid():
    gain = made(1.5, 2.4, 1.4, pp4=(9.0, 9.0, 9.0))
    assert gain.best == "tp4"
    assert gain.sentence == "Switching paid: 1.40x as fast as tp4 alone (measured, 1.20x to 1.50x)"
    lines = str(gain).splitlines()
    assert "on 3 mini-batches of the run, each under every side in turn" in lines[0]
    assert "without the update. Their losses agree to 2e-07." in lines[0]
    assert [line.split() for line in lines[2:5]] == [
        ["switching", "1.000"], ["tp4", "alone", "1.500", "1.40x"], ["pp4", "alone", "9.000", "9.00x"],
    ]  # fmt: skip
    assert lines[-1] == gain.sentence


def test_it_did_not_pay():
    said = made(0.8, 1.0, 0.5).sentence
    assert said == "Switching did not pay: tp4 alone is 2.00x as fast (measured, 1.25x to 2.00x)"


def test_it_made_no_difference():
    assert made(1.0, 2.04, 0.9).sentence == (
        "One strategy is as fast: tp4 alone took 1.00 times as long (measured, 0.90x to 1.02x)"
    )
    one = MeasuredGain((1.0,), {"tp4": (1.5,)}, 0.0)
    assert one.sentence == "Switching paid: 1.50x as fast as tp4 alone (measured, one mini-batch only)"
    assert "on 1 mini-batch of" in one.basis


def test_it_is_compared_with_the_fastest_of_those_measured():
    gain = made(1.5, 2.4, 1.4, pp4=(0.9, 1.8, 0.9))
    assert gain.best == "pp4"
    assert gain.sentence.startswith("Switching did not pay: pp4 alone is 1.11x")


def with_gain(folder, gain):
    write_run(folder)
    writer = RunLogWriter(folder, goes_on=True)
    writer.gain(gain)
    writer.close()


def test_the_record_and_the_report_have_it(tmp_path):
    gain = made(1.5, 2.4, 1.4)
    with_gain(tmp_path, gain)
    run = read_run_log(tmp_path)
    assert run.gain == gain
    assert run.ended
    assert verdict(run)[:2] == [gain.sentence, gain.basis]
    assert gain.sentence in report_page(run)
    writer = RunLogWriter(tmp_path, goes_on=True)
    writer.header(made_facts())  # training went on: what was measured before says nothing of it
    writer.close()
    assert read_run_log(tmp_path).gain is None


@pytest.mark.parametrize("change", [{"switching": [1.0]}, {"singles": {}}, {"switching": [0, 0, 0]}, {"singles": None}])
def test_a_line_that_is_none_is_named(tmp_path, change):
    with_gain(tmp_path, made(1.5, 2.4, 1.4))
    path = tmp_path / FILE_NAME
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps({**json.loads(last), **change})]) + "\n")
    with pytest.raises(RunLogError, match="this line is not one"):
        read_run_log(path)
