"""The replay of measured operation times: eight replicas and three steps of a real job (ByteDance-Seed/StragglerAnalysis,
Apache-2.0; tests/data/straggler_trace.parquet)."""

import importlib
from pathlib import Path

import pytest

trace = importlib.import_module("straggler_trace")
TRACE = Path(__file__).parents[1] / "data" / "straggler_trace.parquet"


def test_slow_replicas_are_told_from_long_micro_batches():
    usual, slow = ([1.0], [2.0]), ([3.0], [6.0])
    steps = [[[usual] * 8, [slow] * 8]] * 3
    seconds = trace.replay(steps)
    assert seconds["as it ran"] == 72.0
    # by speed the slow replica takes four of sixteen; in the first step nothing is known yet
    assert seconds["by cost and speed"] < seconds["as it ran"]
    assert trace.replay(steps[:1])["by cost and speed"] == trace.replay(steps[:1])["by cost"]


def test_a_real_job_is_faster_when_divided_by_cost(tmp_path, capsys):
    steps = trace.read_trace(TRACE)
    assert [len(steps), len(steps[0]), len(steps[0][0]), len(steps[0][0][0][0])] == [3, 8, 8, 2]
    found = trace.main([str(TRACE), "--json", str(tmp_path / "out.json")])["straggler_trace"]["seconds"]
    assert tuple(found) == trace.SIDES
    assert found["bound"] < found["by cost"] < found["as it ran"]
    assert found["as it ran"] / found["by cost"] == pytest.approx(1.14, abs=0.15)
    assert "as it ran" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "steps"), [("ST", 32), ("SE", 43)])
def test_the_simulated_schedule_is_that_of_real_jobs_within_a_hundredth(name, steps):
    path = TRACE.with_name(f"straggler_trace_{name}.parquet")
    measured = trace.measured_seconds(path)
    simulated = [max(map(trace.replica_seconds, replicas)) for replicas in trace.read_trace(path)]
    assert len(measured) == len(simulated) == steps
    errors = [ours / real - 1 for ours, real in zip(simulated, measured, strict=True)]
    assert max(map(abs, errors)) <= 0.01, errors
    assert trace.measured_seconds(TRACE) == []
