"""The switch overhead callback: means since the last log, exposed and hidden seconds apart, and the table."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hf_hotspa.callbacks import step_reports
from hf_hotspa.callbacks.step_reports import SwitchOverheadCallback
from hf_hotspa.report import ModelFlops, PhaseReport, StepReport
from tests.run_logs import made_facts


def phase(strategy, load_s, hidden_load_s, longest=10):
    return PhaseReport(
        strategy=strategy,
        num_packs=4,
        num_sequences=9,
        num_tokens=100,
        load_s=load_s,
        compute_s=1.0,
        wait_s=0.25,
        return_s=0.5,
        load_bytes=2_000_000,
        return_bytes=4_000_000,
        hidden_load_s=hidden_load_s,
        hidden_return_s=0.125,
        longest_tokens=longest,
    )


def report(*phases, total_s=8.0):
    return StepReport(
        step=1, loss=2.0, grad_norm=1.0, num_labels=90, num_rows=9, num_truncated=0, num_split=0, num_dropped=2,
        num_empty=0, phases=phases, total_s=total_s,
    )  # fmt: skip


def test_reports_add_exposed_and_hidden_seconds_apart():
    step = report(phase("dp2", 0.5, 0.25), phase("tp2", 1.5, 0.0, longest=60))
    assert step.moved_s == 3.0
    assert step.hidden_s == 0.5
    assert step.to_dict()["phases"][0]["hidden_load_s"] == 0.25
    assert "switch_s" not in step.to_dict()  # it follows from the phases


def test_switching_is_what_one_strategy_would_not_have():
    """Whatever the order: the strategy of the longest sequences could have trained all, with one load and one return."""
    short, long = phase("dp2", 0.5, 0.25), phase("tp2", 1.5, 0.0, longest=60)
    for step in (report(short, long), report(long, short)):
        assert (step.load_return_s, step.switch_s) == (2.0, 1.0)
        assert (step.load_return_share, step.switch_share) == (2.0 / 8.0, 1.0 / 8.0)
        assert (step.moved_bytes, step.switch_bytes) == (12_000_000, 6_000_000)
    alone = report(long)
    assert (alone.load_return_s, alone.switch_s, alone.switch_share, alone.switch_bytes) == (2.0, 0.0, 0.0, 0)
    assert report().load_return_s == report().switch_s == 0.0


def test_mfu_is_the_models_operations_by_what_the_devices_could_do():
    callback = SwitchOverheadCallback()
    callback.on_step_report(None, None, None, report(phase("dp2", 0.5, 0.25)))
    assert "hotspa/mfu" not in callback.pop_metrics()  # the devices' speed is not known
    callback.on_run_begin(None, None, None, made_facts(flops=ModelFlops(token=6.0, square=0.25, peak=400.0)))
    squares = replace(phase("tp2", 0.5, 0.0), squared_tokens=3200)
    callback.on_step_report(None, None, None, report(squares, phase("dp2", 0.5, 0.25)))
    assert callback.pop_metrics()["hotspa/mfu"] == (6.0 * 200 + 0.25 * 3200) / (400.0 * 8.0)


def test_what_ranks_of_cp_sent_is_apart_from_what_was_moved():
    callback = SwitchOverheadCallback()
    divided = replace(phase("cp2", 0.5, 0.0, longest=60), context="ulysses", context_bytes=3_000_000)
    for step in (report(divided), report(divided, phase("dp2", 0.5, 0.25))):
        callback.on_step_report(None, None, None, step)
    metrics = callback.pop_metrics()
    assert metrics["hotspa/context_mb"] == 3.0
    assert metrics["hotspa/switch_mb"] + metrics["hotspa/load_return_mb"] == 9.0
    callback.on_step_report(None, None, None, report(phase("dp2", 0.5, 0.25)))
    assert callback.pop_metrics()["hotspa/context_mb"] == 0.0


def test_what_features_count_is_in_the_log_as_they_say():
    callback, counted = SwitchOverheadCallback(), {"expert_tokens": 400, "busiest_expert_tokens": 300}
    callback.on_step_report(None, None, None, report(replace(phase("dp2ep2", 0.5, 0.25), counted=counted)))
    metrics = callback.pop_metrics()
    assert metrics["hotspa/expert_load"] == 1.5  # the busiest rank of two, relative to the mean
    assert "hotspa/dropped_expert_tokens" not in metrics
    for dropped in (6, 0):
        of_experts = replace(phase("dp2ep2", 0.5, 0.25), counted=counted | {"dropped_expert_tokens": dropped})
        callback.on_step_report(None, None, None, report(of_experts))
    assert callback.pop_metrics()["hotspa/dropped_expert_tokens"] == 3.0
    callback.on_step_report(None, None, None, report(phase("dp2", 0.5, 0.25)))
    assert callback.pop_metrics()["hotspa/dropped_expert_tokens"] == 0.0


def test_metrics_are_means_since_the_last_log():
    callback = SwitchOverheadCallback()
    for load_s in (0.5, 1.5):
        step = report(phase("dp2", load_s, 0.25), phase("tp2", 2.5, 0.0, longest=60))
        callback.on_step_report(None, None, None, step)
    metrics = callback.pop_metrics()
    assert metrics["hotspa/switch_s"] == 1.5
    assert metrics["hotspa/load_return_s"] == 3.0
    assert metrics["hotspa/hidden_s"] == 0.5
    assert metrics["hotspa/switch_mb"] == metrics["hotspa/load_return_mb"] == 6.0
    assert metrics["hotspa/switch_share"] == 3.0 / 16.0
    assert metrics["hotspa/dropped"] == 4.0
    assert "hotspa/predicted_gain" not in metrics
    assert callback.pop_metrics() == {}


def test_the_gain_is_over_one_strategy_for_the_same_rows():
    callback = SwitchOverheadCallback()
    first = replace(phase("dp2", 0.5, 0.25), predicted_s=2.0)
    for single_s in (3.0, 1.8, None):  # one whose rows do not fit the single strategy says nothing
        callback.on_step_report(None, None, None, replace(report(first), single_s=single_s))
    assert callback.pop_metrics()["hotspa/predicted_gain"] == pytest.approx(4.8 / 4.0)


@pytest.mark.parametrize("whole_run", [False, True])
def test_the_table_has_a_column_for_each(monkeypatch, whole_run):
    printed = []
    monkeypatch.setattr(step_reports.tqdm, "write", printed.append)
    callback, state = (
        SwitchOverheadCallback(print_table=True),
        SimpleNamespace(is_world_process_zero=True, global_step=1),
    )
    callback.on_step_report(None, None, None, report(phase("dp2", 0.5, 0.25), phase("tp2", 1.5, 0.0)))
    (callback.on_train_end if whole_run else callback.on_log)(None, state, None)
    title, header, *rows = printed[0].splitlines()
    assert ("0.5 s more hidden" in title) == whole_run
    expected = "strategy packs sequences tokens compute s wait s load+return s hidden s MB moved share"
    assert " ".join(header.split()) == expected
    assert [row.split()[5:8] for row in rows] == [["0.250", "1.000", "0.375"], ["0.250", "2.000", "0.125"]]
    assert {len(line) for line in (header, *rows)} == {len(header)}


def test_predictions_stand_beside_what_was_measured(monkeypatch):
    callback = SwitchOverheadCallback(print_table=True)
    right, wrong = phase("dp2", 0.5, 0.25), phase("tp2", 1.5, 0.0)
    assert wrong.seconds == 3.0
    step = report(replace(right, predicted_s=2.0), replace(wrong, predicted_s=1.5))
    callback.on_step_report(None, None, None, step)
    metrics = callback.pop_metrics()
    assert metrics["hotspa/predicted_s"] == 3.5
    assert metrics["hotspa/prediction_error"] == 1.5 / 5.0  # errors do not cancel
    printed = []
    monkeypatch.setattr(step_reports.tqdm, "write", printed.append)
    callback.on_log(None, SimpleNamespace(is_world_process_zero=True, global_step=1), None)
    [text] = printed
    _, header, *lines = text.splitlines()
    assert header.endswith("predicted s")
    assert [line.split()[-1] for line in lines] == ["2.000", "1.500"]
    # nothing of it without a time model
    callback.on_step_report(None, None, None, report(right))
    assert "hotspa/predicted_s" not in callback.pop_metrics()


def test_no_report_is_kept():
    """A run has no bound: only the last mini-batch, for the table."""

    def kept():
        gc.collect()
        return sum(type(found) is PhaseReport for found in gc.get_objects())

    callback, before = SwitchOverheadCallback(), kept()
    for _ in range(50):
        callback.on_step_report(None, None, None, report(phase("dp2", 0.5, 0.25), phase("tp2", 1.5, 0.0)))
    assert kept() - before <= 2
    assert callback.pop_metrics()["hotspa/phases"] == 2.0
