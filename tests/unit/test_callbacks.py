"""The trace, report and progress callbacks, and how callbacks are called, without training."""

import ast
import contextlib
import io
import json
import multiprocessing
import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback

from hf_hotspa.callbacks import (
    PhaseProgressCallback,
    ReportCallback,
    SettingsCallback,
    SwitchOverheadCallback,
    TraceCallback,
    step_reports,
)
from hf_hotspa.callbacks import progress as progress_module
from hf_hotspa.errors import CallbackError, HotspaConfigError, HotspaError
from hf_hotspa.process_lock import LOCK_NAME
from hf_hotspa.report import PhaseEvent
from hf_hotspa.reporting.measured import MeasuredGain
from hf_hotspa.reporting.run_log import read_run_log
from hf_hotspa.reporting.summary import verdict
from hf_hotspa.trainer import run as run_module
from hf_hotspa.trainer import trainer as trainer_module
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.events import CallbackEvents, LogLine
from tests.families import tiny_model
from tests.run_logs import LONG, SHORT, made_facts, made_phase, made_report


def run_callback(callback, folder, steps, *, first=1, main=True, end=True):
    """Calls the callback as a run of some steps does."""
    args = SimpleNamespace(output_dir=str(folder))
    state = TrainerState(is_world_process_zero=main)
    state.global_step = first - 1
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.25}])
    callback.on_run_begin(args, state, None, run=made_facts(), callback_seconds=lambda: {"X": 0.5})
    callback.on_train_begin(args, state, None)
    for step in range(first, first + steps):
        callback.on_step_begin(args, state, None)
        callback.on_step_report(args, state, None, report=made_report(step, single_s=2.64))
        callback.on_pre_optimizer_step(args, state, None, optimizer=optimizer)
        state.global_step = step
        callback.on_step_end(args, state, None)
    if end:
        callback.on_train_end(args, state, None)


def traced_steps(folder):
    data = json.loads((folder / "perfetto_trace.json").read_text())
    return sorted({e["name"] for e in data["traceEvents"] if e.get("cat") == "mini-batch"})


@pytest.mark.parametrize(
    ("steps", "wanted", "traced"),
    [(6, 3, ["step 2", "step 3", "step 4"]), (1, 3, ["step 1"]), (3, 5, ["step 2", "step 3"])],
)
def test_the_trace_leaves_out_the_first_step_where_it_can(tmp_path, steps, wanted, traced):
    run_callback(TraceCallback(tmp_path, steps=wanted), tmp_path, steps)
    assert traced_steps(tmp_path) == traced
    run = read_run_log(tmp_path)
    assert len(run.steps) == steps
    assert run.ended
    assert run.steps[0].lr == 0.25
    assert run.callback_s == {"X": 0.5}
    assert not (tmp_path / "report.html").exists()


def test_no_trace_and_other_ranks_write_nothing(tmp_path):
    run_callback(TraceCallback(tmp_path / "a", steps=0), tmp_path, 3)
    assert [p.name for p in (tmp_path / "a").iterdir() if p.name != LOCK_NAME] == ["hotspa_trace.jsonl"]
    run_callback(ReportCallback(tmp_path / "b"), tmp_path, 3, main=False)
    assert not (tmp_path / "b").exists()
    with pytest.raises(HotspaConfigError, match="hotspa_trace_steps"):
        TraceCallback(steps=-1)


def test_nothing_is_claimed_of_switching_before_it_is_measured(tmp_path, capsys):
    for gain_follows in (False, True):
        callback = ReportCallback()
        callback.gain_follows = gain_follows
        run_callback(callback, tmp_path, 3)
        said, page = capsys.readouterr().out, callback.page.read_text()
        claims = ["Switching pays" in text for text in (said, page)]
        assert claims == [not gain_follows] * 2
        assert ("Whether switching paid is measured after training" in said) == gain_follows
    gain = MeasuredGain((1.0, 2.0), {"tp2": (0.5, 1.0)}, 0.0)
    callback.on_gain_measured(None, None, None, gain)
    assert gain.sentence in callback.page.read_text()
    assert verdict(read_run_log(callback.folder))[0] == gain.sentence


def test_a_run_that_was_killed_and_resumed(tmp_path):
    run_callback(ReportCallback(tmp_path), tmp_path, 3, end=False)
    assert len(read_run_log(tmp_path).steps) == 3
    run_callback(ReportCallback(tmp_path), tmp_path, 2, first=4)
    run = read_run_log(tmp_path)
    assert [r.step for r in run.steps] == [1, 2, 3, 4, 5]
    assert run.starts == 2


def test_a_full_disk_stops_the_record_and_not_the_training(tmp_path, monkeypatch, caplog):
    write = step_reports.RunLogWriter.write

    def full(writer, kind, *args, **kwargs):
        if kind == "step":
            raise OSError(28, "No space left on device")
        write(writer, kind, *args, **kwargs)

    monkeypatch.setattr(step_reports.RunLogWriter, "write", full)
    run_callback(ReportCallback(tmp_path), tmp_path, 4)
    assert [r.message for r in caplog.records].count(
        "the record of the run ends here, training continues: [Errno 28] No space left on device"
    ) == 1
    assert not (tmp_path / "report.html").exists()


# -- progress and tables ----------------------------------------------------------------------------------------------


class Bar:
    """Stands for a tqdm bar."""

    made: list["Bar"] = []

    def __init__(self, total, **kwargs):
        self.total, self.texts, self.n, self.closed = total, [], 0, False
        self.made.append(self)

    def set_description_str(self, text):
        self.texts.append((self.n, text))

    def close(self):
        self.closed = True


@pytest.fixture
def bars(monkeypatch):
    monkeypatch.setattr(progress_module, "tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [])
    return Bar.made


def watched_by(monkeypatch, terminal, notebook=False):
    monkeypatch.setattr(progress_module.sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    monkeypatch.setattr(progress_module, "in_notebook", lambda: notebook)


def _phases(callback, main=True, steps=(1, 2)):
    state = SimpleNamespace(is_world_process_zero=main)
    for step in steps:
        for index, strategy in enumerate((SHORT, LONG)):
            phase = PhaseEvent(step, index, 2, strategy, num_packs=3, num_sequences=5, num_tokens=70)
            callback.on_phase_begin(None, state, None, phase=phase)
            callback.on_phase_end(None, state, None, phase=phase)


def test_progress_shows_a_line_a_phase(monkeypatch, bars):
    watched_by(monkeypatch, terminal=False)
    _phases(PhaseProgressCallback(delay_s=0.0, disable=False))
    assert len(bars) == 2
    for step, bar in enumerate(bars, start=1):
        assert bar.texts == [(n, f"step {step}: {s}, 3 packs, 70 tokens") for n, s in enumerate((SHORT, LONG))]
        assert bar.total == 2
        assert bar.closed


def test_progress_appears_in_the_first_step_and_after_long_ones(monkeypatch, bars):
    now = iter([0.0, 5.0, 10.0, 10.5, 20.0, 23.0, 30.0, 31.0])
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: next(now))
    _phases(PhaseProgressCallback(disable=False), steps=(1, 2, 3, 4))
    # of 5 s, 0.5 s, 3 s and 1 s: the third one follows a short one
    assert [bar.texts[0][1].partition(":")[0] for bar in bars] == ["step 1", "step 2", "step 4"]


def test_a_mini_batch_that_was_abandoned_leaves_no_line(bars):
    callback, state = PhaseProgressCallback(disable=False), SimpleNamespace(is_world_process_zero=True)
    for _ in range(2):
        phase = PhaseEvent(1, 0, 2, SHORT, num_packs=3, num_sequences=5, num_tokens=70)
        callback.on_phase_begin(None, state, None, phase=phase)
    assert [bar.closed for bar in bars] == [True, False]
    callback.on_train_end(None, state, None)
    assert bars[1].closed


def test_progress_is_quiet_in_a_pipe_and_on_other_ranks(monkeypatch, bars):
    watched_by(monkeypatch, terminal=False)
    _phases(PhaseProgressCallback(delay_s=0.0))
    _phases(PhaseProgressCallback(delay_s=0.0, disable=False), main=False)
    assert bars == []
    watched_by(monkeypatch, terminal=True)
    _phases(PhaseProgressCallback(delay_s=0.0))
    assert len(bars) == 2
    _phases(PhaseProgressCallback(delay_s=0.0, disable=True))
    assert len(bars) == 2


@pytest.mark.parametrize("watched", [True, False])
def test_what_a_terminal_and_a_pipe_see(monkeypatch, watched):
    seen = io.StringIO()
    seen.isatty = lambda: watched
    monkeypatch.setattr(progress_module.sys, "stderr", seen)
    monkeypatch.setattr(progress_module, "in_notebook", lambda: False)
    _phases(PhaseProgressCallback(delay_s=0.0))
    texts = [f"step {step}: {s}, 3 packs, 70 tokens" for step in (1, 2) for s in (SHORT, LONG)]
    assert all(text in seen.getvalue() for text in texts) if watched else seen.getvalue() == ""


def test_a_notebook_has_one_line_that_changes(monkeypatch, bars):
    shown, places = [], []

    def display(text, display_id):
        places.append(display_id)
        return SimpleNamespace(update=shown.append)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    watched_by(monkeypatch, terminal=False, notebook=True)
    _phases(PhaseProgressCallback(delay_s=0.0))
    texts = [
        f"step {step}: {s}, 3 packs, 70 tokens (phase {n} of 2)" if s else ""
        for step in (1, 2)
        for n, s in enumerate((SHORT, LONG, ""), start=1)
    ]
    assert [repr(text) for text in shown] == texts
    assert shown[0]._repr_html_() == f"<small>{texts[0]}</small>"
    assert places == [True]  # one place in the output, however many steps
    assert bars == []


@pytest.mark.parametrize(("terminal", "disable_tqdm", "there"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_the_trainer_adds_it_where_somebody_watches(monkeypatch, tmp_path, terminal, disable_tqdm, there):
    monkeypatch.setattr(run_module, "is_watched", lambda: terminal)
    args = HotSPaTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, hotspa_strategies="dp1:64", disable_tqdm=disable_tqdm, report_to="none"
    )
    trainer = trainer_module.HotSPaTrainer(model=tiny_model("llama_gqa_bias"), args=args, train_dataset=[])
    kinds = [type(callback) for callback in trainer.callback_handler.every]
    assert kinds.count(PhaseProgressCallback) == there
    trainer.add_callback(PhaseProgressCallback(delay_s=9.0))  # in its place
    kinds = [type(callback) for callback in trainer.callback_handler.every]
    assert kinds.count(PhaseProgressCallback) == 1


def test_the_list_of_callbacks_is_the_users(tmp_path):
    args = HotSPaTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, hotspa_strategies="dp1:64", disable_tqdm=True, report_to="none"
    )
    stock = Trainer(model=tiny_model("llama_gqa_bias"), args=args)
    trainer = trainer_module.HotSPaTrainer(model=tiny_model("llama_gqa_bias"), args=args, train_dataset=[])
    handler = trainer.callback_handler
    assert [type(c) for c in handler.callbacks] == [type(c) for c in stock.callback_handler.callbacks]
    own = handler.every[len(handler.callbacks) :]
    assert [type(c) for c in own] == [SettingsCallback, SwitchOverheadCallback, ReportCallback]
    # they are taken out, and replaced by one of the user's, as if they were in the list
    assert trainer.pop_callback(ReportCallback) is own[2]
    assert trainer.pop_callback(SettingsCallback) is own[0]
    trainer.add_callback(given := SwitchOverheadCallback(print_table=True))
    assert handler.callbacks[-1] is given
    assert handler.every == handler.callbacks
    trainer.remove_callback(given)
    trainer.remove_callback(SwitchOverheadCallback)  # none is left: as in transformers, no error
    assert trainer.pop_callback(SwitchOverheadCallback) is None
    with pytest.raises(ValueError, match="SwitchOverheadCallback is not among"):
        trainer.remove_callback(given)


def test_much_switching_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(step_reports, "once", _first_time())
    state = SimpleNamespace(is_world_process_zero=True)
    for _ in range(2):
        callback = SwitchOverheadCallback()
        for step in range(1, 15):
            slow = made_phase(SHORT, 1.0, load_s=2.0)
            callback.on_step_report(
                None, state, None, report=made_report(step, slow, made_phase(LONG, 0.5, longest_tokens=100))
            )
    said = [r.message for r in caplog.records if "switching takes" in r.message]
    assert len(said) == 1
    assert "hotspa_mini_batch_size" in said[0]


def _first_time():
    seen = set()
    return lambda key: key not in seen and not seen.add(key)


def test_the_settings_of_a_run_are_one_block_before_its_first_step(capsys, tmp_path):
    args = HotSPaTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, hotspa_strategies="dp1:64", hotspa_overlong="split", learning_rate=3e-4,
        hotspa_trace_steps=0, hotspa_planner="algorithm1",
    )  # fmt: skip
    facts = made_facts(
        machine={"device": "cpu", "threads_a_rank": 2},
        model={"name": "LlamaForCausalLM", "parameters": 12_300_000, "compute_dtype": "bfloat16"},
        settings={"mini_batch_size": 8, "overlong": "split", "optimizer": "adamw_torch", "learning_rate": 3e-4,
                  "lr_scheduler": "cosine"},
    )  # fmt: skip
    for main in (True, False):
        state = SimpleNamespace(is_world_process_zero=main, max_steps=7)
        callback = SettingsCallback()
        callback.on_train_begin(args, state, None)  # nothing was started
        assert capsys.readouterr().out == ""
        callback.on_run_begin(args, state, None, run=facts)
        callback.on_train_begin(args, state, None)
        said = capsys.readouterr().out
        assert bool(said) == main
        if main:
            head, *rows = said.splitlines()
            found = dict(row.split(maxsplit=1) for row in rows)
            assert head == "settings of this run"
            assert found["model"] == "LlamaForCausalLM, 12.3M parameters, computed in bfloat16"
            assert found["machine"] == "2 processes on CPU, 2 threads each"
            assert str(facts.buckets[0]["strategy"]) in found["strategies"]
            assert found["training"] == "7 steps, adamw_torch, learning rate 0.0003 (cosine)"
            assert found["other"] == "flags hotspa_planner=algorithm1, hotspa_trace_steps=0"
            assert found["output"] == str(tmp_path)
            assert len(rows) <= 8


def test_no_setting_acts_on_the_terminal(capsys, tmp_path):
    evil = str(tmp_path / "run\x1b[2J\x9b5m\u202e")
    args = HotSPaTrainingArguments(output_dir=evil, use_cpu=True, hotspa_strategies="dp1:64")
    state, callback = SimpleNamespace(is_world_process_zero=True, max_steps=7), SettingsCallback()
    facts = made_facts(
        machine={"device": "cpu", "threads_a_rank": 1},
        model={"name": "Llama\x1b[2J", "parameters": 1, "compute_dtype": "bfloat16"},
        settings={"mini_batch_size": 8, "overlong": "split", "optimizer": "adamw_torch", "learning_rate": 1, "lr_scheduler": "cosine"},
    )  # fmt: skip
    callback.on_run_begin(args, state, None, run=facts)
    callback.on_train_begin(args, state, None)
    said = capsys.readouterr().out
    assert r"run\x1b[2J\x9b5m\u202e" in said
    assert r"Llama\x1b[2J" in said
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said)


def test_buckets_are_printed_with_the_tables(capsys):
    state = SimpleNamespace(is_world_process_zero=True)
    SwitchOverheadCallback(print_table=True).on_run_begin(None, state, None, run=made_facts())
    assert capsys.readouterr().out.splitlines() == [
        "buckets on 2 ranks",
        "tokens    strategy  pack tokens",
        "1 - 16    dp2                64",
        "17 - 100  tp2               100",
    ]


# -- how callbacks are called -----------------------------------------------------------------------------------------


class Failing(TrainerCallback):
    """Raises in every event that it has."""

    def on_step_end(self, args, state, control, **kwargs):
        raise KeyError("lost")

    def on_phase_end(self, args, state, control, phase, **kwargs):
        raise RuntimeError("broken")


class Counting(TrainerCallback):
    """Counts."""

    def __init__(self):
        self.events = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.events.append(("step", model))
        control.should_log = True
        return control

    def on_phase_end(self, args, state, control, phase, **kwargs):
        self.events.append(("phase", phase))

    def pop_metrics(self):
        return {"mine": 1.0}


@pytest.fixture
def events(tmp_path):
    handler = CallbackHandler([DefaultFlowCallback, Failing(), Counting()], "the model", None, None, None)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    state = TrainerState(max_steps=10, logging_steps=500, save_steps=500, eval_steps=500)
    state.global_step = 4
    return CallbackEvents(handler), args, state


def test_an_error_waits_is_named_and_others_are_called(events):
    handler, args, state = events
    with handler.deferring_errors():
        control = handler.on_step_end(args, state, TrainerControl())
        handler.dispatch("on_phase_end", args, state, control, phase="p")
        error = handler.error
    assert type(error) is CallbackError
    assert str(error).startswith("HSP-320 Callback: Failing.on_step_end raised KeyError: 'lost' | Where: step 4")
    assert control.should_log
    assert handler.callbacks[-1].events == [("step", "the model"), ("phase", "p")]


@pytest.mark.parametrize("held_back", ["alone", "outside of training", "an interrupt"])
def test_what_is_raised_where_it_is(events, held_back):
    """On one process, but for events inside of a mini-batch; outside of training; an interrupt."""
    handler, args, state = events
    raised = KeyboardInterrupt if held_back == "an interrupt" else KeyError
    if raised is KeyboardInterrupt:
        handler.callbacks[-1].on_step_end = Mock(side_effect=raised)
    around = (
        contextlib.nullcontext() if "outside" in held_back else handler.deferring_errors(alone=held_back == "alone")
    )
    with pytest.raises(raised), around:
        handler.on_step_end(args, state, TrainerControl())
    assert raised is KeyboardInterrupt or handler.error is None


def test_an_error_that_was_agreed_on_has_that_of_the_callback_as_its_cause(events):
    handler, args, state = events

    def trains():
        with handler.deferring_errors():
            handler.on_step_end(args, state, TrainerControl())
            raise HotspaError.from_dict(handler.error.to_dict())  # as the agreement does

    with pytest.raises(CallbackError) as caught:
        trains()
    assert type(caught.value.__cause__) is KeyError


def test_an_error_of_a_training_before_is_forgotten(events):
    handler, args, state = events
    with handler.deferring_errors():
        handler.dispatch("on_phase_end", args, state, TrainerControl(), phase="p")
    with handler.deferring_errors():
        assert handler.error is None


def test_seconds_inside_callbacks(events):
    handler, args, state = events
    assert handler.pop_metrics(1) == {"mine": 1.0}
    for _ in range(4):
        handler.dispatch("on_step_report", args, state, TrainerControl(), report=None)
    handler.seconds["Counting"] += 2.0
    assert handler.pop_metrics(5)["hotspa/callback_s"] == pytest.approx(0.5, abs=0.05)
    assert handler.pop_metrics(6) == {"mine": 1.0}
    assert set(handler.seconds) == {"Counting"}


def other_run(folder, pipe):
    """A run in a process of its own that is under way until it is told to go on."""
    callback = ReportCallback()
    run_callback(callback, folder, 2, end=False)
    pipe.send(str(callback.folder))
    pipe.recv()
    run_callback(callback, folder, 0)


def test_a_second_job_in_the_folder_leaves_the_record_of_the_first_alone(tmp_path):
    here, there = multiprocessing.get_context("fork").Pipe()
    first = multiprocessing.get_context("fork").Process(target=other_run, args=(tmp_path, there))
    first.start()
    assert here.recv() == str(tmp_path / "hotspa_report")
    before = (tmp_path / "hotspa_report" / "hotspa_trace.jsonl").read_bytes()
    second = ReportCallback()
    run_callback(second, tmp_path, 3)
    assert second.folder == tmp_path / "hotspa_report-2"
    assert len(read_run_log(second.folder).steps) == 3
    assert (second.folder / "report.html").exists()
    assert (tmp_path / "hotspa_report" / "hotspa_trace.jsonl").read_bytes() == before
    assert not (tmp_path / "hotspa_report" / "hotspa_trace.previous.jsonl").exists()
    first.kill()
    first.join()
    third = ReportCallback()
    run_callback(third, tmp_path, 4)  # a run that is over, however it ended, is followed as before
    assert third.folder == tmp_path / "hotspa_report"
    assert (tmp_path / "hotspa_report" / "hotspa_trace.previous.jsonl").read_bytes() == before


class Reading(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs = dict(logs)


@pytest.mark.parametrize("everything", [False, True])
def test_a_printed_line_has_a_few_numbers_and_every_other_reader_all(events, capsys, everything):
    reader = Reading()
    handler, args, state = events
    handler.callbacks = [PrinterCallback(), reader]
    args.hotspa_log_all = everything
    totals = SwitchOverheadCallback()
    totals.on_step_report(args, state, None, made_report(1, single_s=2.0))
    logs = {"loss": 2.5, **totals.pop_metrics(), "hotspa/skipped_mini_batches": 1.0}
    handler.on_log(args, state, TrainerControl(), logs)
    assert reader.logs == logs
    assert len(logs) > 14
    printed = capsys.readouterr().out
    if everything:
        assert ast.literal_eval(printed).keys() == logs.keys()
        return
    numbers = dict(part.rsplit(" ", 1) for part in printed.strip().split("  "))
    assert numbers.keys() == {"step", "loss", "tokens/s", "switching", "skipped_mini_batches"}
    assert numbers["loss"] == "2.5000"
    handler.on_log(args, state, TrainerControl(), {"eval_loss": 1.5, "hotspa/wait_s": 2.0})
    assert ast.literal_eval(capsys.readouterr().out) == {"eval_loss": "1.5"}


def test_a_line_says_what_a_person_asks_for(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("hf_hotspa.trainer.events.time.perf_counter", lambda: now[0])
    lines, state = LogLine(), TrainerState(max_steps=1000)
    logs = {"loss": 3.25, "grad_norm": 1.234, "learning_rate": 2e-5, "hotspa/tokens_per_s": 12345.6}
    logs |= {"hotspa/memory_share": 0.81, "hotspa/switch_share": 0.0123, "hotspa/truncated": 3.0, "epoch": 0.1}
    logs |= {"hotspa/mfu": 0.4321}
    state.global_step = 10
    first = (
        "step 10/1000  loss 3.2500  grad_norm 1.23  lr 2.00e-05  tokens/s 12,346  memory 81%  switching 1.2%  MFU 43.2%"
    )
    first += "  truncated 3"
    assert lines.text(logs, state) == first
    state.global_step, now[0] = 20, 150.0  # 5 s a step
    assert lines.text(logs, state) == first.replace("step 10/", "step 20/") + "  left 1:21:40"


def test_a_line_shows_what_the_trainer_logs():
    lines, state = LogLine(), TrainerState(max_steps=9)
    state.global_step = 1
    usual = {
        "grad_norm": 1.0,
        "learning_rate": 1e-5,
        "hotspa/switch_share": 0.0,
        "hotspa/tokens_per_s": 12.0,
        "epoch": 0.1,
    }
    grpo = {"num_tokens": 99.0, "completions/mean_length": 24.5, "completions/max_length": 64.0, "rewards/f/mean": 0.5}
    grpo |= {"reward": 0.0, "reward_std": 0.25, "frac_reward_zero_std": 0.1, "kl": 0.0, "entropy": 1.25}
    head, rest = "step {}/9  loss {}  grad_norm 1  lr 1.00e-05  ", "  tokens/s 12"
    assert lines.text({"loss": -1.5e-9, **usual, **grpo}, state) == (
        head.format(1, "-1.50e-09") + "reward 0  reward_std 0.25  completions/mean_length 24.5  entropy 1.25" + rest
    )
    for kl in (0.0012, 0.0):  # a column stays
        assert f"reward_std 0.25  kl {kl:.4g}  comp" in lines.text({"loss": 0.0, **usual, **grpo, "kl": kl}, state)
    dpo = {"rewards/chosen": 0.5, "rewards/margins": -0.123456, "rewards/accuracies": 0.75, "logps/chosen": -3.0}
    assert lines.text({"loss": 0.69, **usual, **dpo}, state) == (
        head.format(1, "0.6900") + "rewards/margins -0.1235  rewards/accuracies 0.75" + rest
    )
    own = {f"metric_{n}": float(n) for n in range(20)} | {"text": "a"}
    assert lines.text({"loss": 0.69, **usual, **own}, state) == (
        head.format(1, "0.6900") + "  ".join(f"metric_{n} {n}" for n in range(1, 7)) + rest
    )


class TrackerCallback(Reading):
    __module__ = "transformers.integrations.integration_utils"


def test_trackers_get_six_numbers_and_the_rest_apart(events):
    handler, args, state = events
    tracker = TrackerCallback()
    handler.callbacks = [tracker]
    ours = {
        f"hotspa/{name}": 1.0 for name in ("tokens_per_s", "switch_share", "memory_share", "wait_s", "dp2/compute_s")
    }
    logs = {"loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-5, **ours, "hotspa/split": 2.0}
    handler.on_log(args, state, TrainerControl(), logs)
    apart = {name for name in tracker.logs if name.startswith("hotspa_debug/")}
    assert apart == {"hotspa_debug/wait_s", "hotspa_debug/dp2/compute_s"}
    six = ["loss", "grad_norm", "learning_rate", "hotspa/tokens_per_s", "hotspa/switch_share", "hotspa/memory_share"]
    assert sorted(tracker.logs.keys() - apart) == sorted([*six, "hotspa/split"])


def test_ctrl_c_leaves_a_page_and_a_record_without_an_end(tmp_path):
    callback = ReportCallback()
    run_callback(callback, tmp_path, 3, end=False)
    callback.on_train_interrupted(None, None, None)
    assert callback.page == tmp_path / "hotspa_report" / "report.html"
    assert "the run has not finished, or was stopped" in callback.page.read_text()
    callback.page.unlink()
    callback.on_train_interrupted(None, None, None)  # the record is closed
    assert not callback.page.exists()
