"""Power loss: whatever of the changes that were not yet synced is lost, an acknowledged checkpoint is there.

A save is recorded as a list of changes. A state of the disk after a power loss at any point is made from it: every
change that a sync had made last is there, of the others any subset, and files that were not synced hold anything.
"""

import os
import random
import shutil
import time

import pytest

from hf_hotspa.checkpoint.format.disk import Disk
from hf_hotspa.checkpoint.format.folder import LOCK, RunFolder, checkpoints
from hf_hotspa.checkpoint.format.manifest import verify
from hf_hotspa.errors import DamagedCheckpointError
from tests.checkpoints import memory_path, write_checkpoint  # noqa: F401


class Recorder(Disk):
    """Notes what each change does, and which directory entries and contents a sync makes last."""

    def __init__(self):
        self.events = []

    def make_directory(self, path):
        super().make_directory(path)
        self.events.append(("mkdir", path))

    def write(self, folder, name, chunks):
        record = super().write(folder, name, chunks)
        path = folder / name
        self.events += [("create", path), ("data", path, path.read_bytes()), ("fsync", path)]
        return record

    def sync_directory(self, path):
        super().sync_directory(path)
        self.events.append(("dirsync", path))

    def rename(self, path, target):
        super().rename(path, target)
        self.events.append(("rename", path, target))

    def remove(self, path):
        for entry in sorted(path.iterdir()):
            if entry.is_dir():
                self.remove(entry)
            else:
                entry.unlink()
                self.events.append(("unlink", entry))
        path.rmdir()
        self.events.append(("rmdir", path))


def survivors(events, rng):
    """The changes that are on the disk after a power loss: what was synced, and any subset of the rest."""
    kept = []
    for index, event in enumerate(events):
        later = events[index + 1 :]
        if event[0] == "data":
            durable = ("fsync", event[1]) in later
            choice = event[2] if durable else rng.choice([event[2], b"", event[2][: rng.randrange(len(event[2]) + 1)]])
            kept.append(("data", event[1], choice))
        elif event[0] in ("mkdir", "create", "rename", "unlink", "rmdir"):
            durable = ("dirsync", event[1].parent) in later
            if durable or rng.random() < 0.5:
                kept.append(event)
    return kept


def replay(events, recorded, folder):
    """Makes the state on a real disk; what rests on a change that was lost does not happen."""
    moved = lambda path: folder / path.relative_to(recorded)  # noqa: E731
    for event in events:
        path = moved(event[1])
        if event[0] == "mkdir" and path.parent.is_dir():
            path.mkdir(exist_ok=True)
        elif event[0] == "create" and path.parent.is_dir():
            path.touch()
        elif event[0] == "data" and path.is_file():
            path.write_bytes(event[2])
        elif event[0] == "rename" and path.is_dir() and not moved(event[2]).exists():
            path.rename(moved(event[2]))
        elif event[0] == "unlink":
            path.unlink(missing_ok=True)
        elif event[0] == "rmdir" and path.is_dir() and not any(path.iterdir()):
            path.rmdir()


@pytest.mark.parametrize("states", [500, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("step", [30, 20], ids=["new step", "a step that exists"])
def test_a_power_loss_loses_no_acknowledged_checkpoint(tmp_path, step, states, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what it does is what is modelled
    start = tmp_path / "start"
    run = RunFolder(start)
    write_checkpoint(run, 10)
    write_checkpoint(run, 20)
    run.unlock()
    recorded = tmp_path / "recorded"
    shutil.copytree(start, recorded)
    disk = Recorder()
    run = RunFolder(recorded, disk)
    run.rotate(write_checkpoint(run, step), 2)
    run.unlock()
    events = disk.events
    commit = next(i for i, e in enumerate(events) if e[0] == "rename" and e[1].name.startswith(".tmp"))
    acknowledged_at = next(i for i in range(commit, len(events)) if events[i] == ("dirsync", recorded))
    seed = time.time_ns()
    for number in range(states):
        rng = random.Random(seed + number)
        point = rng.randrange(len(events) + 1)
        folder = tmp_path / "after"
        shutil.copytree(start, folder)
        replay(survivors(events[:point], rng), recorded, folder)
        check_after(folder, step if point > acknowledged_at else 20, (seed + number, point))
        shutil.rmtree(folder)


def check_after(folder, acknowledged, what):
    (folder / LOCK).unlink(missing_ok=True)
    run = RunFolder(folder)
    run.lock()
    good = []
    for path in checkpoints(folder):
        try:
            good.append(verify(path).step)
        except DamagedCheckpointError:
            continue  # half removed, or half written: refused, never loaded
    run.unlock()
    assert good, what
    assert max(good) >= acknowledged, what
