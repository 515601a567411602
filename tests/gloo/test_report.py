"""What a trained run leaves behind: the record, the page, the trace; events, and callbacks that raise."""

import json
from itertools import pairwise

import pytest
from transformers import TrainerCallback

from hf_hotspa.callbacks import ReportCallback, SwitchOverheadCallback
from hf_hotspa.errors import CallbackError
from hf_hotspa.report import MEASURES
from hf_hotspa.reporting.run_log import FILE_NAME, read_run_log
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.training_runs import make_trainer

pytestmark = pytest.mark.gloo

STEPS = 5


def train(folder, callbacks=(), **options):
    rows = random_rows(24, 163, longest=60)
    given = {"family": "llama_gqa_bias", "rows": rows, "eval_dataset": rows[:6], "callbacks": callbacks}
    settings = {"max_steps": STEPS, "hotspa_mini_batch_size": 8, "save_strategy": "no", "hotspa_report": True} | options
    trainer = make_trainer(folder, 2, **given, **settings)
    trainer.train()
    return trainer


class Listener(TrainerCallback):
    """Writes down every event of ours."""

    def __init__(self):
        self.heard = []

    def on_run_begin(self, args, state, control, run, **kwargs):
        self.heard.append(("run", run.world_size, len(run.buckets)))

    def on_phase_begin(self, args, state, control, phase, **kwargs):
        assert phase.seconds is None
        self.heard.append(("begin", phase.step, phase.index, phase.strategy))

    def on_switch(self, args, state, control, switch, **kwargs):
        assert switch.seconds >= 0
        assert switch.sent_bytes >= 0
        self.heard.append((switch.kind, switch.step, switch.strategy))

    def on_phase_end(self, args, state, control, phase, **kwargs):
        assert tuple(phase.seconds) == MEASURES
        self.heard.append(("end", phase.step, phase.index, phase.strategy))

    def on_step_report(self, args, state, control, report, **kwargs):
        self.heard.append(("report", report.step))


def listened_run(rank, world_size, folder):
    listener = Listener()
    trainer = train(folder, [listener], eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=3)
    logged = [log["hotspa/callback_s"] for log in trainer.state.log_history if "hotspa/callback_s" in log]
    rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
    mine = trainer.callback_handler.seconds["ReportCallback"]
    trainer.close_engine()
    return listener.heard, logged, rates, mine


def test_the_record_the_page_the_trace_and_the_events(tmp_path):
    (heard, logged, rates, _), (other, _, _, mine) = run_ranks(2, listened_run, str(tmp_path))
    assert heard == other
    assert heard[0] == ("run", 2, 2)
    phases = [entry for entry in heard if entry[0] == "begin"]
    assert [e[1:] for e in heard if e[0] == "end"] == [e[1:] for e in phases]
    assert {e[3] for e in phases} == {"dp2", "tp2"}
    assert sum(e[0] == "load" for e in heard) == sum(e[0] == "return" for e in heard) == len(phases)
    first = heard.index(("report", 1))
    assert [e[0] for e in heard[1:5]] == ["begin", "load", "return", "end"]
    assert all(e[1] == 1 for e in heard[1:first])
    assert [e for e in heard if e[0] == "report"] == [("report", step) for step in range(1, STEPS + 1)]
    assert len(logged) == STEPS
    assert all(seconds > 0 for seconds in logged)
    assert mine > 0

    folder = tmp_path / "hotspa_report"
    run = read_run_log(tmp_path)
    assert run.path == str(folder / FILE_NAME)
    assert [record.step for record in run.steps] == list(range(1, STEPS + 1))
    assert run.ended
    assert run.facts.world_size == 2
    assert [bucket["longest"] for bucket in run.facts.buckets] == [16, 60]
    assert sum(run.facts.lengths["sequences"]) == 24
    assert [step for step, _ in run.evaluations] == [2, 4, 5]
    assert all(metrics["eval_loss"] > 0 for _, metrics in run.evaluations)
    assert run.saves == [3, 5]
    assert len(run.memory) == 2
    assert min(run.memory) > 1 << 20
    assert [record.lr for record in run.steps] == pytest.approx(rates)
    assert "ReportCallback" in run.callback_s
    for record in run.steps:
        assert record.wall_s >= record.report.total_s
        for phase in record.report.phases:
            assert phase.num_tokens <= phase.capacity_tokens
            assert 0 < phase.longest_tokens <= phase.busiest_tokens <= phase.num_tokens
    assert (folder / "report.html").read_text().count("<svg") >= 6
    check_trace(json.loads((folder / "perfetto_trace.json").read_text()), run)


def check_trace(trace, run):
    """Spans of each rank follow one another, and the first one of a step begins with it."""
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    inside = [e for e in spans if e["cat"] == "inside phases"]
    steps = {(e["pid"], e["name"]): e for e in spans if e["cat"] == "mini-batch"}
    assert sorted({name for _, name in steps}) == ["step 2", "step 3", "step 4"]
    assert len(steps) == 6
    total = {record.step: record.report.total_s * 1e6 for record in run.steps}
    microsecond = 1.0
    for (rank, name), whole in steps.items():
        step = int(name.removeprefix("step "))
        own = [e for e in inside if e["pid"] == rank and e["args"]["step"] == step]
        assert {e["name"] for e in own} >= {"load", "compute", "wait", "return"}
        assert min(e["ts"] for e in own) == pytest.approx(whole["ts"], abs=microsecond)
        if rank == 0:  # whose clock says when the step ended
            last = max(e["ts"] + e["dur"] for e in own)
            assert last == pytest.approx(whole["ts"] + whole["dur"], abs=microsecond)
            assert whole["dur"] == pytest.approx(total[step], abs=microsecond)
    for rank in range(2):
        ordered = sorted((e for e in inside if e["pid"] == rank), key=lambda e: e["ts"])
        for one, following in pairwise(ordered):
            assert one["ts"] + one["dur"] <= following["ts"] + microsecond


class Raiser(TrainerCallback):
    """Raises in one event of one rank."""

    def __init__(self, rank, event, step):
        if rank == 1:
            setattr(self, event, self._raise)
        self.step = step

    def _raise(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            raise ValueError("out of paper")


RAISED = {"on_phase_end": 1, "on_step_report": 2, "on_step_end": STEPS, "on_run_begin": 0}
"""Event -> the step in which it raises."""


def raising_runs(rank, world_size, folder):
    errors = []
    for event, step in RAISED.items():
        with pytest.raises(CallbackError) as caught:
            train(folder, [Raiser(rank, event, step)])
        errors.append(str(caught.value))
    return errors


def test_a_callback_that_raises_is_named_on_all_ranks(tmp_path):
    for errors in run_ranks(2, raising_runs, str(tmp_path)):
        for (event, step), error in zip(RAISED.items(), errors, strict=True):
            assert f"Raiser.{event} raised ValueError: out of paper" in error
            assert f"rank 1, step {step}" in error


def test_no_report_without_the_flag(tmp_path):
    trainer = train(str(tmp_path), hotspa_report=False, hotspa_strategies="dp1:60", max_steps=1)
    kinds = [type(callback) for callback in trainer.callback_handler.every]
    assert SwitchOverheadCallback in kinds
    assert ReportCallback not in kinds
    assert not (tmp_path / "hotspa_report").exists()
