"""Nobody waits for a compilation that was killed; everybody waits for one that is under way."""

import multiprocessing
import os
import signal
import threading
import time

from torch.utils.file_baton import FileBaton

from hf_hotspa.trainer import cpu_adam
from hf_hotspa.trainer.cpu_adam import load_cpu_adam

FORK = multiprocessing.get_context("fork")


def compile_in(folder):
    """What torch does, but for the compilation. Waiting here would be for ever."""
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    return baton


def compile_as_we_do(folder, ends=True):
    with cpu_adam.sole_compiler(folder):
        baton = compile_in(folder)
        if not ends:
            os.kill(os.getpid(), signal.SIGKILL)
        baton.release()


def test_one_of_ours_was_killed(tmp_path):
    killed = FORK.Process(target=compile_as_we_do, args=(tmp_path, False))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert (tmp_path / "lock").exists()
    compile_as_we_do(tmp_path)
    compile_as_we_do(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_the_file_of_somebody_else_is_left_over_when_it_is_old(tmp_path, monkeypatch, caplog):
    compile_as_we_do(tmp_path)
    (tmp_path / "lock").touch()
    os.utime(tmp_path / "lock", (0, 0))
    compile_as_we_do(tmp_path)
    assert "was killed" in caplog.text
    monkeypatch.setattr(cpu_adam, "_STALE_S", 0.3)
    (tmp_path / "lock").touch()
    compile_as_we_do(tmp_path)  # after a while
    assert "may be another machine's" in caplog.text


def test_a_living_one_is_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cpu_adam, "_STALE_S", -1.0)
    theirs = compile_in(tmp_path)
    ours = threading.Thread(target=compile_as_we_do, args=(tmp_path,))
    ours.start()
    while "waiting" not in caplog.text:
        time.sleep(0.01)
    assert (tmp_path / "lock").exists()
    theirs.release()
    ours.join()
    assert f"process {os.getpid()} holds" in caplog.text


def test_not_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_adam, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(cpu_adam, "_get_build_directory", lambda name, verbose: str(tmp_path))
    theirs = compile_in(tmp_path)
    reason = load_cpu_adam()
    assert f"process {os.getpid()} holds {tmp_path / 'lock'}" in reason
    theirs.release()
