"""What an uncaught error shows: once on a node, short where the user can repair it, with a traceback where not."""

import os
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hf_hotspa import uncaught
from hf_hotspa.errors import LaunchError, PeerError, PlanError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

WRONG = LaunchError("the strategies need 4 processes and 2 are running", fix="start 4")


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Ends ranks of one node with an error each, in this order; gives what torch's launcher would print."""
    monkeypatch.setattr(uncaught.time, "sleep", lambda seconds: None)
    monkeypatch.delenv(uncaught.TRACEBACKS, raising=False)

    def end(*errors, of_ranks=None, restarts="0"):
        failures = {}
        for rank, error in zip(of_ranks or range(len(errors)), errors, strict=True):
            path = tmp_path / "attempt_0" / str(rank) / "error.json"
            path.parent.mkdir(parents=True)
            environment = {uncaught.ERROR_FILE: str(path), "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"}
            for name, value in {**environment, "TORCHELASTIC_MAX_RESTARTS": restarts}.items():
                monkeypatch.setenv(name, value)
            raised(error)
            failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(path))
        return ChildFailedError("script.py", failures).format_msg()

    return end


def raised(error):
    hook = uncaught._Hook()
    try:
        raise error
    except BaseException as caught:
        hook(type(caught), caught, caught.__traceback__)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_launcher_ends_with_the_error_and_says_it_once(ranks, order):
    shown = ranks(WRONG, WRONG, WRONG, of_ranks=order)
    assert shown.count(WRONG.what) == 1
    assert shown.count("the same error as another rank") == 2
    *_, what, fix, _ = shown.strip().splitlines()
    assert what.strip() == f"HSP-001 Launch: {WRONG.what}"
    assert fix.strip() == "Fix: start 4"
    assert "Traceback" not in shown


def test_a_fault_keeps_its_traceback_once_and_its_echo_is_not_the_cause(ranks):
    echo = PeerError("KeyError: 'x'", where="rank 1, training after step 3")
    shown = ranks(echo, KeyError("x"), KeyError("x"))
    assert shown.count("Traceback (most recent call last)") == 1
    cause = shown.partition("Root Cause")[2]
    assert "rank      : 1" in cause
    assert "in raised" in cause
    assert "HSP-112" in shown.partition("Root Cause")[0]


def test_who_prints(ranks, capfd, monkeypatch):
    """This process where the launcher does not, or to somewhere else."""
    monkeypatch.setattr(uncaught, "_launcher_shows_it", lambda: True)
    ranks(WRONG)
    assert capfd.readouterr().err == ""
    monkeypatch.undo()
    monkeypatch.delenv(uncaught.ERROR_FILE, raising=False)
    raised(WRONG)
    assert capfd.readouterr().err == WRONG.lines() + "\n"
    raised(PlanError("a bug"))
    assert "Traceback" in capfd.readouterr().err
    monkeypatch.setenv(uncaught.TRACEBACKS, "1")
    raised(WRONG)
    assert "in raised" in capfd.readouterr().err


def test_a_launcher_that_was_told_to_end_shows_nothing(ranks, capfd, monkeypatch):
    monkeypatch.setattr(uncaught, "_launcher_shows_it", lambda: True)
    monkeypatch.setattr(uncaught, "_signal_came", False)
    uncaught.signal_came()
    ranks(WRONG, WRONG, PeerError("rank 0 failed"))
    assert capfd.readouterr().err == WRONG.lines() + "\n"


def test_the_launcher_says_nothing_of_an_attempt_that_is_not_the_last(ranks, capfd):
    ranks(WRONG, restarts="3")
    assert WRONG.what in capfd.readouterr().err


def test_standard_error_of_the_launcher(monkeypatch, tmp_path):
    def stat(path):
        return os.stat(tmp_path) if str(path).startswith("/proc") else os.fstat(2)

    monkeypatch.setattr(uncaught, "os", type("os", (), {**vars(os), "stat": staticmethod(stat)}))
    assert not uncaught._launcher_shows_it()


def test_a_folder_that_cannot_be_written_to_costs_nothing(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv(uncaught.ERROR_FILE, str(tmp_path / "gone" / "0" / "error.json"))
    raised(WRONG)
    assert capfd.readouterr().err == WRONG.lines() + "\n"


def test_ctrl_c_is_one_line(capfd, monkeypatch):
    monkeypatch.setattr(uncaught.signal, "signal", lambda *_: None)
    monkeypatch.delenv("RANK", raising=False)
    raised(KeyboardInterrupt())
    assert capfd.readouterr().err == "Stopped by Ctrl-C.\n"
    monkeypatch.setenv("RANK", "1")
    raised(KeyboardInterrupt())
    monkeypatch.setattr(uncaught, "_interrupt_is_announced", False)
    uncaught.interrupt_is_announced()
    monkeypatch.setenv("RANK", "0")
    raised(KeyboardInterrupt())
    assert capfd.readouterr().err == ""


def test_the_arguments_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    HotSPaTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    hook = sys.excepthook
    assert isinstance(hook, uncaught._Hook)
    uncaught.show_errors_once()
    assert sys.excepthook is hook
