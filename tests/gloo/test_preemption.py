"""SIGTERM and Ctrl-C: whoever gets it, all ranks save and stop at the same step, and a resumed run ends with the same bits."""

import multiprocessing
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.checkpoint.format.manifest import verify
from hf_hotspa.errors import HotspaError
from hf_hotspa.trainer import preemption
from tests.checkpoints import memory_folder
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.training_runs import STEPS, contents, make_trainer, one_run, train

pytestmark = pytest.mark.gloo

RARELY = {"save_steps": 100, "ddp_timeout": 30}
# ranks of the harness come from a fork server, so that would be their choice, with a server and imports of its own
WORKERS = {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "fork"}


@pytest.fixture
def folder():
    with memory_folder() as path:
        yield path


class Terminate(TrainerCallback):
    """Sends signals to this process in an event of a step, the first time that it happens."""

    def __init__(self, event, step, signals=(signal.SIGTERM,)):
        self.step, self.signals = step, signals
        setattr(self, event, self.send)

    def send(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.step = None
            for number in self.signals:
                os.kill(os.getpid(), number)


def evaluate_every(trainer, steps):
    trainer.eval_dataset = random_rows(3, 150, longest=30, seed=5)
    trainer.args.eval_strategy, trainer.args.eval_steps = IntervalStrategy.STEPS, steps


def terminated_run(rank, world, folder, victims, event, options):
    """A run in which some ranks are told to end; the last step, whether it was preempted, and what came after."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    callbacks = [Terminate(event, 2, options.pop("signals", (signal.SIGTERM,)))] if rank in victims else []
    evaluates = options.pop("evaluates", None)
    trainer = make_trainer(folder, world, **{**RARELY, "callbacks": callbacks, **options})
    if evaluates is not None:
        evaluate_every(trainer, evaluates)
    losses = train(trainer)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    evaluated = [log["step"] for log in trainer.state.log_history if "eval_loss" in log]
    return max(losses), trainer.state.global_step, trainer.preempted, evaluated


CASES = {
    "first": ((0,), "on_step_begin", {}),
    "last, in a phase": ((1,), "on_phase_begin", {"evaluates": 3}),  # that evaluation is left out
    "all, each by the scheduler and by the launcher": ((0, 1), "on_step_end", {"signals": (signal.SIGTERM,) * 2}),
    "Ctrl-C, passed on by two launchers": (
        (0, 1),
        "on_step_begin",
        {"signals": (signal.SIGINT, signal.SIGTERM, signal.SIGINT)},
    ),
    "in a save": ((1,), "on_save", {"save_steps": 2, "hotspa_async_save": True, "enable_jit_checkpoint": True}),
    "in an evaluation": ((0,), "on_prediction_step", {"evaluates": 2}),
    "saves by epoch": ((1,), "on_step_begin", {"save_strategy": "epoch"}),
}


def terminated_runs(rank, world, folder, cases):
    return [terminated_run(rank, world, f"{folder}/{case}", *CASES[case]) for case in cases]


def terminate(folder, *cases):
    """The cases one after the other, each in a folder of its name."""
    for results in run_ranks(2, terminated_runs, str(folder), cases):
        for case, found in zip(cases, results, strict=True):
            assert found == (3, 3, True, [2] if case == "in an evaluation" else []), case
    for case in cases:
        newest = checkpoints(folder / case)[0]
        assert newest.name == "checkpoint-3"
        verify(newest)


SLOW = ("first", "all, each by the scheduler and by the launcher", "in a save", "saves by epoch")
"""The third one is among those that are resumed."""


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_ranks_save_and_stop_at_the_same_step(folder, slow):
    terminate(folder, *(case for case in CASES if (case in SLOW) == slow))


class LeaveOut(TrainerCallback):
    """No evaluation after that step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_evaluate = False


def evaluated_run(rank, world, folder, resume, evaluates, left_out=None):
    trainer = make_trainer(folder, world, save_steps=STEPS, callbacks=[LeaveOut(left_out)])
    if evaluates is not None:
        evaluate_every(trainer, evaluates)
    train(trainer, resume)


@pytest.mark.parametrize(
    "case", [case if case == "in a save" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(folder, case):
    terminate(folder, case)
    evaluates = CASES[case][2].get("evaluates")  # which draws from the generators
    run_ranks(2, evaluated_run, str(folder / case), True, evaluates)
    left_out = 3 if evaluates == 3 else None  # there the run ended before it
    run_ranks(2, evaluated_run, str(folder / "b"), None, evaluates, left_out)
    resumed, whole = (contents(folder / name / f"checkpoint-{STEPS}") for name in (case, "b"))
    for found in (resumed, whole):
        del found["trainer_state"]  # the logs of evaluations
    assert resumed == whole


def test_without_checkpoints_it_only_stops(folder):
    options = {"save_strategy": "no"}
    for found in run_ranks(2, terminated_run, str(folder), (1,), "on_step_begin", options):
        assert found == (3, 3, True, [])
    assert checkpoints(folder) == []


def test_a_signal_after_the_last_mini_batch_changes_nothing(folder):
    options = {"max_steps": 2, "save_steps": 2}
    for found in run_ranks(2, terminated_run, str(folder), (0,), "on_step_end", options):
        assert found == (2, 2, False, [])
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-2"]


def twice(rank, world, folder):
    preemption.REPEAT_S = -1.0
    callbacks = [Terminate("on_step_begin", 2, (signal.SIGTERM,) * 2)] if rank == 1 else []
    one_run(rank, world, folder, None, {"ddp_timeout": 30, "callbacks": callbacks})


def test_a_signal_long_after_the_first_ends_the_process_at_once(folder):
    survivor, victim = run_ranks(2, twice, str(folder), expect_failure=True)
    assert victim.exitcode == -signal.SIGTERM
    assert isinstance(survivor.exception, HotspaError), survivor.describe()
    assert checkpoints(folder)[0].name == "checkpoint-2"


def alone(folder, signals, **options):
    callbacks = [Terminate("on_step_begin", 2, signals)]
    return make_trainer(str(folder), 1, **{"save_steps": 100, "callbacks": callbacks, **options})


@pytest.fixture
def interruptible():
    """A background job of a shell ignores SIGINT, and so do its tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_saves_and_says_so_at_once(folder, capfd):
    trainer = alone(folder, (signal.SIGINT,))
    train(trainer)
    assert (trainer.state.global_step, trainer.preempted) == (3, True)
    verify(folder / "checkpoint-3")
    said = capfd.readouterr().err
    assert said.count("Ctrl-C: training stops after this step and saves; press again to stop at once\n") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    trainer = alone(folder / "none", (signal.SIGINT,), save_strategy="no")
    train(trainer)
    assert (trainer.state.global_step, trainer.preempted, checkpoints(folder / "none")) == (3, True, [])
    assert "training stops after this step; press again" in capfd.readouterr().err


@pytest.mark.usefixtures("interruptible")
def test_the_second_press_of_ctrl_c_ends_training_at_once(folder, monkeypatch, caplog):
    monkeypatch.setattr(preemption, "FORWARD_S", -1.0)
    trainer = alone(folder, (signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(trainer)
    assert (trainer.state.global_step, trainer.preempted, checkpoints(folder)) == (2, False, [])
    assert "Ctrl-C: training stopped after step 2; no checkpoint was saved" in caplog.text
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_script_keeps_ctrl_c(folder):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        trainer = alone(folder, (signal.SIGINT,))
        train(trainer)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (seen, trainer.preempted, trainer.state.global_step) == ([1], False, STEPS)


class TerminateAll(TrainerCallback):
    """SIGTERM as from a scheduler, SIGINT as from a terminal: to this rank and its DataLoader workers, at step 2."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.workers = [worker.pid for worker in multiprocessing.active_children()]
            for name in ("-TERM", "-INT"):
                subprocess.run(["kill", name, *map(str, [*self.workers, os.getpid()])], check=True)


def terminated_with_workers(rank, world, folder):
    options = {**RARELY, **WORKERS, "dataloader_prefetch_factor": 1}
    everybody = TerminateAll()
    trainer = make_trainer(folder, world, callbacks=[everybody], **options)
    evaluate_every(trainer, 2)
    train(trainer)
    return len(everybody.workers), trainer.state.global_step, trainer.preempted


def test_the_workers_of_the_data_loader_are_told_too(folder):
    assert run_ranks(2, terminated_with_workers, str(folder)) == [(2, 3, True)] * 2
    [checkpoint] = checkpoints(folder)
    assert verify(checkpoint).step == 3


class Die(TrainerCallback):
    """The end of a rank that nobody can prevent, while it has workers."""

    def on_phase_begin(self, args, state, control, phase):
        if state.global_step == 2:
            assert len(multiprocessing.active_children()) == 2
            os.kill(os.getpid(), signal.SIGKILL)


def dies_with_workers(rank, world, folder):
    from torch.utils.data._utils import worker

    worker.MP_STATUS_CHECK_INTERVAL = 3600  # torch's own way to end the workers of a dead rank comes too late here
    options = {**RARELY, **WORKERS}
    train(make_trainer(folder, world, callbacks=[Die()] if rank == 1 else [], **options))


def test_the_workers_of_a_dead_rank_do_not_hide_its_death(folder):
    survivor, victim = run_ranks(2, dies_with_workers, str(folder), expect_failure=True)
    assert victim.exitcode == -signal.SIGKILL
    assert isinstance(survivor.exception, HotspaError), survivor.describe()
    assert re.search("[Cc]onnection (closed|reset)", str(survivor.exception)), survivor.describe()
    assert "imed out" not in str(survivor.exception)


def test_the_handler_of_before_is_back_after_an_error(tmp_path):
    def mine(number, frame):
        raise AssertionError

    class Broken(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            assert signal.getsignal(signal.SIGTERM) is not mine
            raise ValueError("broken")

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(ValueError, match="broken"):  # one process: the callback's own error
            train(make_trainer(str(tmp_path), 1, callbacks=[Broken()]))
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_handler_outside_the_main_thread(tmp_path):
    found = []

    def run():
        found.append(train(make_trainer(str(tmp_path), 1, max_steps=2)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert list(found[0]) == [1, 2]
    assert Path(tmp_path, "checkpoint-2").is_dir()
