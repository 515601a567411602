"""The record of a run: written line by line, read back whole, robust where a run was killed, strict elsewhere."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from hf_hotspa.callbacks import step_reports
from hf_hotspa.callbacks.step_reports import RunLogWriter
from hf_hotspa.errors import RunLogError
from hf_hotspa.reporting import run_log
from hf_hotspa.reporting.measured import MeasuredGain
from hf_hotspa.reporting.page import report_page
from hf_hotspa.reporting.run_log import (
    FILE_NAME,
    Histogram,
    find_run_log,
    length_histogram,
    plain,
    read_run_log,
)
from hf_hotspa.reporting.summary import summarize
from hf_hotspa.typed import typed
from tests.run_logs import made_facts, made_report, of_earlier_releases, write_run


def test_a_record_comes_back_as_it_was_written(tmp_path):
    run = read_run_log(write_run(tmp_path))
    assert run.facts == made_facts()
    assert run.ended
    assert [r.step for r in run.steps] == [1, 2, 3, 4, 5, 6]
    written = made_report(3, loss=3.0 - 0.1 * 3, single_s=2.64)
    assert run.steps[2].report.to_dict() == written.to_dict()
    assert run.steps[2].report.ranks is None
    assert run.steps[2].lr == 1e-3 / 3
    assert run.steps[2].wall_s == written.total_s + 0.05
    assert run.memory == [5 << 20, 6 << 20]
    assert run.evaluations[0] == (2, {"eval_loss": 3.1 - 0.2, "eval_runtime": 0.5})
    assert run.saves == [6]
    assert run.callback_s == {"ReportCallback": 0.002, "ProgressCallback": 0.001}
    assert (run.starts, len(run.steps)) == (1, 6)


def test_a_record_of_an_earlier_version_reads_with_nothing_of_what_it_does_not_know(tmp_path):
    path = write_run(tmp_path) / FILE_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for phase in line.get("report", {}).get("phases", ()):
            later = [name for name in phase if name.startswith(("unit_", "hidden_unit_", "context", "frozen"))]
            later += [name for name in phase if "expert" in name]
            assert len(later) == 12
            for name in later:
                del phase[name]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run_log(path).steps[2].report.to_dict() == made_report(3, loss=2.7, single_s=2.64).to_dict()


def test_strategies_of_an_earlier_version_have_the_names_of_today(tmp_path):
    path = write_run(tmp_path, end=False) / FILE_NAME
    writer = RunLogWriter(tmp_path, goes_on=True)
    writer.write("gain", **MeasuredGain((1.0, 2.0), {"tp2": (1.5, 2.5), "cp2+z2": (2.5, 3.5)}, 0.0).to_dict())
    writer.close()
    now = read_run_log(path)
    then = of_earlier_releases(path.read_text())
    assert "dp1tp2pp1" in then
    assert "dp1cp2tp1pp1+z2" in then
    assert '"tp2"' not in then
    path.write_text(then)
    assert read_run_log(path) == now


def test_memory_is_written_when_it_grows(tmp_path):
    write_run(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert ["memory" in line for line in lines if line["kind"] == "step"] == [True] + [False] * 5


def test_it_is_found(tmp_path):
    folder = write_run(tmp_path / "hotspa_report")
    for given in (folder / FILE_NAME, folder, tmp_path):  # the file, its folder, the output directory
        assert find_run_log(given) == folder / FILE_NAME


@pytest.mark.parametrize("cut", [1, 20])
def test_a_torn_last_line_is_left_out_and_a_resumed_run_replaces_what_it_trains_again(tmp_path, cut):
    path = write_run(tmp_path, end=False) / FILE_NAME
    path.write_bytes(path.read_bytes()[:-cut])
    run = read_run_log(path)
    assert (len(run.steps), run.saves, run.ended) == (6, [], False)
    write_run(tmp_path, steps=4, begin=5, faster=2.0)
    run = read_run_log(tmp_path)
    assert [r.step for r in run.steps] == list(range(1, 9))
    assert run.starts == 2
    seconds = [round(r.report.total_s, 6) for r in run.steps]
    assert seconds == [seconds[0]] * 4 + [seconds[-1]] * 4
    assert seconds[0] > seconds[-1]


def test_a_new_run_keeps_the_record_before(tmp_path):
    write_run(tmp_path, steps=2)
    write_run(tmp_path, steps=3)
    assert len(read_run_log(tmp_path).steps) == 3
    assert len(read_run_log(tmp_path / "hotspa_trace.previous.jsonl").steps) == 2


def _changed(line, **changes):
    data = json.loads(line)
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = data
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[name] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (1, lambda line: _changed(line, format=99)),
        (1, lambda line: _changed(line, lengths__edges=[3, 2])),
        (1, lambda line: _changed(line, buckets=[{"strategy": "dp2"}])),
        (1, lambda line: _changed(line, kind="step")),
        (2, lambda line: "not json"),
        (2, lambda line: "[1]"),
        (2, lambda line: _changed(line, report__phases__0__num_tokens=-1)),
        (2, lambda line: line.replace('"loss":', '"los":')),
        (4, lambda line: _changed(line, metrics={"eval_loss": "low"})),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path, number, change):
    path = write_run(tmp_path) / FILE_NAME
    lines = path.read_text().splitlines()
    lines[number - 1] = change(lines[number - 1])
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RunLogError, match=rf"{FILE_NAME}:{number}\b"):
        read_run_log(path)


def test_no_record_at_all(tmp_path):
    with pytest.raises(RunLogError, match="there is no hotspa_trace.jsonl"):
        read_run_log(tmp_path)
    for text in ("", '{"kind":"hea'):
        (tmp_path / FILE_NAME).write_text(text)
        with pytest.raises(RunLogError, match="the record"):
            read_run_log(tmp_path)


def test_numbers_that_json_has_not(tmp_path):
    assert plain({"a": [math.nan, 1.5, np.float32(2.5), np.int64(3)], 4: (math.inf, True, None)}) == {
        "a": [None, 1.5, 2.5, 3],
        "4": [None, True, None],
    }
    writer = RunLogWriter(tmp_path)
    writer.header(made_facts())
    writer.metrics("eval", 1, {"eval_loss": math.nan})
    writer.close()
    assert read_run_log(tmp_path).evaluations == [(1, {"eval_loss": None})]


# -- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1], [0, 0], [7, 7, 7], [0, 1, 2, 3, 4, 5, 1000], list(range(1, 300))])
def test_every_length_is_counted_once(lengths):
    found = length_histogram(lengths)
    assert typed(found, Histogram).tokens == tuple(found["tokens"])
    assert sum(found["sequences"]) == sum(n > 0 for n in lengths)
    assert sum(found["tokens"]) == sum(lengths)
    for low, high, count in zip(found["edges"], found["edges"][1:], found["sequences"], strict=False):
        assert count == sum(low < n <= high for n in lengths)


def numbers_of(totals):
    data = asdict(totals)
    return [*(data | data.pop("counted")).values()][1:]


def test_a_long_record_is_thinned_out_and_its_sums_stay(tmp_path, monkeypatch):
    write_run(tmp_path / "whole", steps=300)
    whole = read_run_log(tmp_path / "whole")
    lines = find_run_log(tmp_path / "whole").read_text().splitlines()
    monkeypatch.setattr(run_log, "_LAST", 10)
    monkeypatch.setattr(step_reports, "MOST_BYTES", most := 60_000)
    assert find_run_log(tmp_path / "whole").stat().st_size > 3 * most
    records, folder = {r.step: r for r in whole.steps}, tmp_path / "thin"
    writer, largest = RunLogWriter(folder), 0
    writer.header(whole.facts)

    def steps(begin, end):
        for step in range(begin, end):
            record = records[step]
            writer.write("step", record.report, step=step, wall_s=record.wall_s, lr=record.lr)
            if step == 120:
                writer.write("save", step=step)
                writer.metrics("eval", step, {"eval_loss": 1.0})
            nonlocal largest
            largest = max(largest, writer.path.stat().st_size)

    steps(1, 181)
    writer.close()
    writer = RunLogWriter(folder, goes_on=True)  # resumed from the save: what was trained beyond it is trained again
    writer.header(whole.facts)
    steps(121, 301)
    writer.close()
    assert largest <= most
    thin = read_run_log(folder)
    numbers = [r.step for r in thin.steps]
    assert len(numbers) < 100
    assert {1, 120, *range(291, 301)} <= set(numbers)
    assert numbers == sorted(numbers)
    assert (thin.starts, thin.saves, thin.evaluations) == (2, [120], [(120, {"eval_loss": 1.0})])
    ours, theirs = summarize(thin), summarize(whole)
    assert theirs.rows == {"truncated": 120, "dropped": 60}
    for name in ("num_steps", "num_tokens", "first_loss", "rows"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("seconds", "wall_s", "switch_s", "load_return_s", "hidden_s", "wait_s"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-12)
    for found, expected in zip(ours.strategies, theirs.strategies, strict=True):
        assert found.strategy == expected.strategy
        assert numbers_of(found) == pytest.approx(numbers_of(expected), rel=1e-12)
    assert "<html" in report_page(thin)
    assert len(lines) > 300  # the old form: without sums of what was left out
    assert all(record.before is None for record in whole.steps)


def test_a_record_that_cannot_be_thinned_out_ends(tmp_path, monkeypatch):
    path = find_run_log(write_run(tmp_path / "a", steps=3))
    path.write_text(path.read_text() + "[]\n")
    monkeypatch.setattr(step_reports, "MOST_BYTES", 10)
    run = read_run_log(write_run(tmp_path / "b", steps=1))
    writer = RunLogWriter(path.parent, goes_on=True)
    with pytest.raises(OSError, match="cannot be thinned out"):  # which ends the record, not the training
        writer.write("step", run.steps[0].report, step=4, wall_s=1.0, lr=None)
    writer.close()
