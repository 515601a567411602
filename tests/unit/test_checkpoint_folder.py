"""The directory of a run: commits that survive a death at any point, the lock, rotation, what the disk refuses."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hotspa.checkpoint.format import folder as folder_module
from hf_hotspa.checkpoint.format.folder import LOCK, RunFolder, check_step, checkpoints
from hf_hotspa.checkpoint.format.manifest import read_manifest, verify
from hf_hotspa.errors import CheckpointError, CheckpointLockError, DamagedCheckpointError
from hf_hotspa.process_lock import ProcessLock
from tests.checkpoints import FaultyDisk, die, memory_folder, memory_path, write_checkpoint  # noqa: F401


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """A process that dies loses nothing that it has written; what must be synced and when is a test of its own."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def new_run(tmp_path):
    """Makes the `RunFolder` of a new run in the same directory; its lock is gone afterwards."""
    made = []

    def make(disk=None, path=tmp_path / "run"):
        made.append(RunFolder(path, disk))
        return made[-1]

    yield make
    for run in made:
        run.unlock()


def names(path):
    return sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)


def in_child(action):
    """Runs something in a forked process; its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_and_rotate(disk, path, step):
    run = RunFolder(path, disk)
    run.rotate(write_checkpoint(run, step), 2)
    run.unlock()


def refuse(code):
    def action(change, path):
        raise OSError(code, os.strerror(code))

    return action


def prepare(path, steps):
    run = RunFolder(path)
    for step in steps:
        write_checkpoint(run, step)
    run.unlock()


@pytest.mark.parametrize("step", [30, 20], ids=["new step", "a step that exists"])
def test_a_kill_at_any_point_loses_nothing(tmp_path, new_run, step):
    template = tmp_path / "template"
    prepare(template, [10, 20])
    rehearsal = tmp_path / "rehearsal"
    shutil.copytree(template, rehearsal)
    disk = FaultyDisk()
    save_and_rotate(disk, rehearsal, step)
    changes = disk.changes
    assert Counter(change for change, _ in changes)["rename"] >= 2
    for point in range(len(changes)):
        path = tmp_path / f"point-{point}"
        shutil.copytree(template, path)
        assert in_child(partial(save_and_rotate, FaultyDisk(point, die), path, step)) == -signal.SIGKILL
        # what carries the name of a checkpoint is one, whatever happened
        for found in checkpoints(path):
            check_step(found, verify(found))
        run = new_run(path=path)
        run.lock()  # the next run: clears away, or puts back, what is left
        assert all(name.startswith("checkpoint-") for name in names(path)), changes[point]
        left = [found.name for found in checkpoints(path)]
        assert all(run.verified(found) for found in checkpoints(path))
        committed = any(change == "rename" and name.startswith(".tmp") for change, name in changes[:point])
        assert "checkpoint-20" in left, changes[point]
        if step == 30 and committed:
            assert left[0] == "checkpoint-30"
        if not committed:
            assert left == ["checkpoint-20", "checkpoint-10"]
        run.unlock()
        shutil.rmtree(path)


def test_everything_is_synced_before_the_commit(tmp_path, new_run):
    disk = FaultyDisk()
    write_checkpoint(new_run(disk), 7)
    changes = disk.changes
    commit = next(i for i, (change, name) in enumerate(changes) if change == "rename" and name.startswith(".tmp"))
    created = {name for change, name in changes if change == "create"}
    synced = [name for change, name in changes[:commit] if change == "sync"]
    assert created <= set(synced)
    assert len(created) == 7
    # the manifest after all other files, then the directory, and after the rename the directory of the run
    assert synced[-2] == "MANIFEST.json"
    assert synced[-3] == "hotspa"
    assert synced[-1].startswith(".tmp-checkpoint-7-")
    assert changes[commit + 1] == ("sync", "run")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_whatever_the_disk_refuses_leaves_the_older_ones(tmp_path, new_run, code):
    path, disk = tmp_path / "run", FaultyDisk()
    prepare(path, [10])
    write_checkpoint(new_run(disk, tmp_path / "rehearsal"), 20)
    changes = disk.changes
    for point in range(len(changes)):
        run = new_run(FaultyDisk(point, refuse(code)))
        committed = save_or_abandon(run, os.strerror(code))
        run.unlock()
        if committed is None and (path / "checkpoint-20").exists():
            # only the sync after the rename can fail then: what is there is whole
            assert point == len(changes) - 1
        for found in checkpoints(path):
            verify(found)
        assert (path / "checkpoint-10").is_dir()
        assert names(path) in (["checkpoint-10"], ["checkpoint-10", "checkpoint-20"])
        if (path / "checkpoint-20").exists():
            shutil.rmtree(path / "checkpoint-20")


def save_or_abandon(run, text):
    """What a rank does; None when the disk refused, with a message that says why."""
    made = []
    try:
        return write_checkpoint(run, 20, prepare=made.append)
    except CheckpointError as error:
        refused = str(error)
    except OSError as error:  # of a rank's own files, which the collective save turns into a `CheckpointError`
        refused = f"{error} Fix: "
    for temporary in made:
        run.abandon(temporary)
    assert text in refused
    assert "Fix: " in refused
    return None


def test_a_directory_that_cannot_be_made(tmp_path, new_run):
    (tmp_path / "file").write_text("")
    run = new_run(path=tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="Not a directory"):
        run.lock()


# ------------------------------------------------------------------------------------------------ the lock

HOLD = """
import sys, time
from pathlib import Path
from hf_hotspa.checkpoint.format.folder import RunFolder
RunFolder(Path(sys.argv[1])).lock()
print("held", flush=True)
time.sleep(60)
"""


def test_two_jobs_in_one_directory(tmp_path, new_run, monkeypatch):
    monkeypatch.setattr(folder_module, "_LOCK_PATIENCE_S", 0.2)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointLockError) as caught:
            new_run().lock()
        assert str(other.pid) in str(caught.value)
        assert "Fix: " in str(caught.value)
        with pytest.raises(CheckpointLockError):
            new_run().begin(3)
        other.kill()
        other.wait()
    # a lock dies with its process
    run = new_run()
    run.lock()
    assert run.is_locked
    run.lock()
    run.unlock()
    assert not run.is_locked
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_lock_whose_file_the_one_before_removed_is_taken_again(tmp_path, monkeypatch):
    lock, waits = ProcessLock(tmp_path / LOCK), []

    def removed_meanwhile(self, descriptor, deadline):
        if not waits:  # it was opened while another process held it, and locked when that one had given it back
            (tmp_path / LOCK).unlink()
        waits.append(descriptor)
        return True

    monkeypatch.setattr(ProcessLock, "_wait", removed_meanwhile)
    assert lock.take(owner="me")
    assert len(waits) == 2
    assert lock.owner() == "me"  # what others find is the file that is locked
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_forked_workers_do_not_keep_the_lock(tmp_path, new_run, monkeypatch):
    monkeypatch.setattr(folder_module, "_LOCK_PATIENCE_S", 0.2)
    run = new_run()
    run.lock()
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:  # a data loader worker that outlives its parent for a moment
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    run.unlock()
    assert in_child(lambda: RunFolder(tmp_path / "run").lock()) == 0
    os.write(done[1], b"x")
    os.waitpid(pid, 0)


# ------------------------------------------------------------------------------------------------ rotation


def damage(path):
    file = next(path.rglob("master*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@settings(max_examples=60)
@given(
    steps=st.lists(st.integers(1, 30), min_size=1, max_size=7, unique=True),
    damaged=st.sets(st.integers(0, 6)),
    best=st.none() | st.integers(0, 6),
    limit=st.none() | st.integers(-1, 5),
    touched=st.randoms(use_true_random=False),
    earlier_run=st.booleans(),
)
def test_rotation_keeps_what_it_should(steps, damaged, best, limit, touched, earlier_run):
    with memory_folder() as path:
        check_rotation(path, steps, damaged, best, limit, touched, earlier_run)


def check_rotation(path, steps, damaged, best, limit, touched, earlier_run):
    run = RunFolder(path)
    for step in steps:
        write_checkpoint(run, step)
    hurt = {steps[i] for i in damaged if i < len(steps) - 1}
    for step in hurt:
        damage(path / f"checkpoint-{step}")
    times = {step: touched.choice([touched.randint(0, 10**9), 10**6]) for step in steps}  # some of them equal
    for step, time in times.items():
        os.utime(path / f"checkpoint-{step}", (0, time))
    (path / "checkpoint-99").mkdir()  # of some other program
    if earlier_run:
        run.unlock()
        run = RunFolder(path)
        run.lock()
    newest = path / f"checkpoint-{steps[-1]}"
    keep = [path / f"checkpoint-{steps[best]}"] if best is not None and best < len(steps) else []
    run.rotate(newest, limit, keep)
    left = {int(found.name.split("-")[1]) for found in checkpoints(path)}
    good = {step for step in left - {99} if step not in hurt}
    run.unlock()
    assert 99 in left
    assert {newest, *keep} <= {path / f"checkpoint-{step}" for step in left}
    if limit is None or limit < 1:
        assert left - {99} == set(steps)
        return
    protected = {steps[-1]} | {steps[best] for _ in keep if steps[best] not in hurt}
    whole = [step for step in sorted(steps, key=lambda step: (times[step], step), reverse=True) if step not in hurt]
    others = [step for step in whole if step not in protected]
    assert good == protected | set(others[: max(limit - len(protected), 0)])


def test_the_last_one_is_read_back_before_the_others_go(tmp_path, new_run):
    run = new_run()
    write_checkpoint(run, 1)
    newest = write_checkpoint(run, 2)
    damage(newest)  # the disk returns something else than was written: size and times say nothing
    run._verified[newest] = folder_module._signature(newest, read_manifest(newest))
    run.rotate(newest, 1)
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
    run.rotate(newest, 0)
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]


def test_rotation_never_fails_a_save(tmp_path, new_run):
    prepare(tmp_path / "run", [1, 2, 3])
    for point in range(4):
        run = new_run()
        run.lock()
        run.disk = FaultyDisk(point, refuse(errno.EBUSY))
        run.rotate(tmp_path / "run" / "checkpoint-3", 1)
        assert run.verified(tmp_path / "run" / "checkpoint-3")
        run.unlock()


def test_an_old_run_is_read_once(tmp_path, new_run, monkeypatch):
    prepare(tmp_path / "run", [1, 2])
    run, reads = new_run(), []
    monkeypatch.setattr(folder_module, "verify", lambda path: reads.append(path.name) or verify(path))
    for step in (3, 4, 5):
        run.rotate(write_checkpoint(run, step), 3)
    assert reads == ["checkpoint-2", "checkpoint-1"]


def test_a_renamed_checkpoint_does_not_count(tmp_path, new_run):
    run = new_run()
    path = write_checkpoint(run, 4)
    moved = path.rename(path.parent / "checkpoint-40")
    assert not run.verified(moved)
    with pytest.raises(DamagedCheckpointError, match="holds step 4"):
        check_step(moved, verify(moved))
    check_step(moved.rename(path.parent / "the_best"), verify(path.parent / "the_best"))


def test_other_names_are_left_alone(tmp_path, new_run):
    path = tmp_path / "run"
    path.mkdir()
    for name in (".tmp-checkpoint-1-abc", ".del-checkpoint-2-abc", ".tmp-mine", "checkpoint-x", "checkpoint-3.bak"):
        (path / name).mkdir()
        (path / name / "file").write_text(str(random.random()))
    (path / "checkpoint-5").symlink_to(tmp_path)
    new_run().lock()
    assert names(path) == [".tmp-mine", "checkpoint-3.bak", "checkpoint-5", "checkpoint-x"]
    assert checkpoints(path) == []
