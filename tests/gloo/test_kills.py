"""Runs that lose a rank again and again: no acknowledged checkpoint is lost, none is broken, and the end is the same.

A job is started, loses a rank at some moment (`kill -9`, at a change of the disk or at any time), is started again from
its newest checkpoint, and so on until it is through. After every death each checkpoint on disk verifies and holds the
bits of the run that nobody killed, and none is older than what was acknowledged; the last one is that run's, with its
optimizer, random states and log. A rank of the world forks a process for each start, which saves the imports.
"""

import contextlib
import gc
import json
import os
import random
import shutil
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import TrainerCallback

from hf_hotspa.checkpoint.format.disk import Disk
from hf_hotspa.checkpoint.format.folder import check_step, checkpoints
from hf_hotspa.checkpoint.format.manifest import read_manifest, verify
from hf_hotspa.errors import HotspaError
from tests.checkpoints import FaultyDisk, die, memory_folder
from tests.harness import run_ranks
from tests.training_runs import contents, contents_of_shares, one_run

pytestmark = pytest.mark.gloo

TIMED, BACKGROUND = 0.3, 0.3
"""Shares of the kills that come at any time rather than at a change of the disk, and of the runs that save in the background."""
PATIENCE_S = 120.0


class Acknowledged(TrainerCallback):
    """Notes every save that the trainer says is done."""

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            with Path(args.output_dir, "acknowledged").open("a") as file:
                file.write(f"{state.global_step}\n")


class Armed(TrainerCallback):
    """Kills this process a while after its first step."""

    def __init__(self, after_s):
        self.after_s = after_s

    def on_step_end(self, args, state, control, **kwargs):
        if self.after_s is not None:
            threading.Timer(self.after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            self.after_s = None


class Rehearsal(NamedTuple):
    """Of one rank in a whole run: its changes of the disk, those ahead of the last save, and seconds after the first step."""

    changes: int
    before_last: int
    seconds: float


def rehearse(rank, world, folder, options):
    counter, ends = FaultyDisk(), []
    Disk.before = lambda self, change, path: counter.before(change, path)

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ends.append((len(counter.changes), time.perf_counter()))

    one_run(rank, world, folder, None, {**options, "callbacks": [Clock()]})
    return Rehearsal(len(counter.changes), ends[-1][0], time.perf_counter() - ends[0][1])


def life(rank, world, folder, meeting, plan, options):
    """One start of the job on this rank, in a process of its own; never returns."""
    import torch.distributed as dist

    from hf_hotspa.parallel import agreement

    code = 1
    signal.alarm(int(PATIENCE_S))  # should it hang; faulthandler's clock does not survive a fork
    try:
        agreement._GRACE_S = 0.02  # nobody hangs here
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)
        callbacks = [] if plan["background"] else [Acknowledged()]
        if rank == plan["victim"]:
            counter = FaultyDisk(plan["fatal"], die)
            Disk.before = lambda self, change, path: counter.before(change, path)
            callbacks.append(Armed(plan["after_s"]))
        options = {**options, "hotspa_async_save": plan["background"], "callbacks": callbacks}
        one_run(rank, world, plan["output"], plan["resumes"], options)
        code = 0
        with contextlib.suppress(RuntimeError):  # the other one may die even now
            dist.barrier()
            dist.destroy_process_group()
    except HotspaError:
        code = 3
    except BaseException as error:  # told through a file: a parent sees a number only
        Path(folder, f"error-{rank}").write_text("".join(traceback.format_exception(error)))
    finally:
        os._exit(code)


def await_file(path):
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} does not come"
        time.sleep(0.002)
    return path


def publish(path, text):
    """Others see the file when it is whole."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    beside.rename(path)


class Killer:
    """The side of rank 0: plans each start, and judges what is left of it. These deaths come at random.

    Args:
        folder: With the checkpoints of the run that nobody kills, in `reference`.
        rehearsals: Of that run, rank by rank.
        number: Kills.
        seed: Of the choices.
    """

    def __init__(self, folder, rehearsals, number, seed):
        self.folder, self.rehearsals, self.world = folder, rehearsals, len(rehearsals)
        self.number, self.seed, self.rng = number, seed, random.Random(seed)
        self.reference = {path.name: path for path in checkpoints(folder / "reference")}
        self.shares = {name: contents_of_shares(path) for name, path in self.reference.items()}
        self.last = next(iter(self.reference))
        self.kills = self.ends = self.timed = self.jobs = 0

    def plan(self):
        """What the next start does; None when there were enough."""
        output = self.folder / f"job-{self.jobs}"
        if self.kills >= self.number:
            return self._start(output) if output.exists() else None
        found, rng = checkpoints(output), self.rng
        left = 1 - (read_manifest(found[0]).step if found else 0) / len(self.reference)
        victim, background = rng.randrange(self.world), rng.random() < BACKGROUND
        if rng.random() < TIMED:
            seconds = max(rehearsal.seconds for rehearsal in self.rehearsals)
            return self._start(output, victim, after_s=rng.random() * seconds * left, background=background)
        # now and then beyond the end: else hardly a job would come to it
        changes = int(1.3 * self.rehearsals[victim].changes * left) + 1
        return self._start(output, victim, fatal=rng.randrange(changes), background=background)

    def _start(self, output, victim=None, fatal=None, after_s=None, background=False):
        return {"output": str(output), "resumes": bool(checkpoints(output)), "victim": victim, "fatal": fatal,
                "after_s": after_s, "background": background}  # fmt: skip

    def judge(self, plan, codes):
        """What must hold whenever a start is over."""
        what = (self.seed, self.kills, plan, codes)
        output, victim = Path(plan["output"]), plan["victim"]
        killed = victim is not None and codes[victim] == -signal.SIGKILL
        assert killed or codes == [0] * self.world, what
        assert all(code in (0, 3) for rank, code in enumerate(codes) if rank != victim), what
        found = checkpoints(output)
        for checkpoint in found:
            check_step(checkpoint, verify(checkpoint))
            assert contents_of_shares(checkpoint) == self.shares[checkpoint.name], what
        newest = read_manifest(found[0]).step if found else 0
        acknowledged = output / "acknowledged"
        lines = acknowledged.read_text().split() if acknowledged.exists() else []
        assert newest >= max(map(int, lines), default=0), what
        self.kills += killed
        self.timed += killed and plan["after_s"] is not None
        if not killed:
            assert contents(output / self.last) == contents(self.reference[self.last]), what
            self.ends += 1
            self.next_job(output)

    def next_job(self, output):
        shutil.rmtree(output)
        self.jobs += 1


class Enumerator(Killer):
    """A death of each rank at each change of the disk in the last save; then the job goes on to its end."""

    def __init__(self, folder, rehearsals):
        self.points = [(rank, at) for rank, r in enumerate(rehearsals) for at in range(r.before_last, r.changes)]
        super().__init__(folder, rehearsals, len(self.points), None)

    def plan(self):
        output = self.folder / f"job-{self.jobs}"
        if self.kills > self.ends:
            return self._start(output)
        return self._start(output, *self.points[self.kills]) if self.kills < self.number else None


def supervised(rank, world, folder, kind, arguments, options):
    """Starts the job again and again; returns how many kills it survived, and how many jobs came to their end."""
    from hf_hotspa.trainer.trainer import HotSPaTrainer  # noqa: F401  # once, not in every start

    gc.freeze()
    killer = kind(folder, *arguments) if rank == 0 else None
    start = 0
    while True:
        if killer is not None:
            publish(folder / f"plan-{start}", json.dumps(killer.plan()))
        plan = json.loads(await_file(folder / f"plan-{start}").read_text())
        if plan is None:
            break
        child = os.fork()
        if child == 0:
            life(rank, world, folder, folder / f"meet-{start}", plan, options)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        error = Path(folder, f"error-{rank}")
        assert code != 1, error.read_text() if error.exists() else "hangs"
        if killer is None:
            publish(folder / f"code-{start}-{rank}", str(code))
        else:
            codes = [code, *(int(await_file(folder / f"code-{start}-{r}").read_text()) for r in range(1, world))]
            killer.judge(plan, codes)
            for name in (f"meet-{start}", *(f"code-{start}-{r}" for r in range(1, world))):
                (folder / name).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (folder / f"plan-{start - 1}").unlink()
        start += 1
    return None if killer is None else (killer.kills, killer.timed, killer.ends)


def kill(world, kind, *arguments, **options):
    """What `supervised` says of the deaths of one kind."""
    with memory_folder() as folder:
        options = {"hotspa_strategies": f"dp{world}:60@64", **options}
        rehearsals = run_ranks(world, rehearse, str(folder / "reference"), {**options, "save_total_limit": None})
        if kind is Enumerator:  # to whom rotation is a part of it
            rehearsals = run_ranks(world, rehearse, str(folder / "rehearsal"), options)
        arguments = (rehearsals, *arguments)
        found = run_ranks(world, supervised, folder, kind, arguments, options, init=False, timeout=4 * 3600)
    kills, timed, ends = found[0]
    print(f"{world} ranks: {kills} kills, {timed} of them at any time; {ends} jobs came to their end; {arguments[1:]}")
    return found[0]


def test_random_kills():
    kills, _, ends = kill(2, Killer, 3, time.time_ns(), save_total_limit=3)
    assert kills == 3
    assert ends > 0


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(("world", "number"), [(2, 800), (3, 100), (4, 100)])
def test_a_thousand_random_kills(world, number):
    kills, timed, ends = kill(world, Killer, number, time.time_ns(), save_total_limit=3)
    assert kills == number
    assert 0 < timed < number
    assert ends > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [2, 4])
def test_a_kill_at_every_write_of_every_rank_of_a_training_run(world):
    """The last of three saves, with rotation."""
    kills, _, ends = kill(world, Enumerator, save_total_limit=2, max_steps=3)
    assert kills == ends >= 8 * world
