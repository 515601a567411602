"""An output directory that cannot be written to, refused by the system itself: before a run, and from some step on.

Where the tests may, every rank mounts the directory read-only in a mount namespace of its own, which ends with the
process; else permissions are taken away from the directory (and, from root, root's rights).
"""

import contextlib
import ctypes
import os
from pathlib import Path

import pytest
from transformers import TrainerCallback

from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.checkpoint.format.manifest import verify
from hf_hotspa.errors import CheckpointError, HotspaError
from tests.checkpoints import memory_folder
from tests.harness import run_ranks
from tests.training_runs import make_trainer, train

pytestmark = pytest.mark.gloo

NOBODY = 65534
CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1, 0x20, 0x1000, 0x4000, 0x40000
REASONS = ("Read-only file system", "Permission denied")


def mounted_read_only(folder):
    """Whether this process now sees the directory read-only."""
    libc = ctypes.CDLL(None)
    path = os.fsencode(folder)
    return (
        hasattr(libc, "unshare")
        and libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None) == 0
        and libc.mount(path, path, None, ctypes.c_ulong(MS_BIND), None) == 0
        and libc.mount(None, path, None, ctypes.c_ulong(MS_BIND | MS_REMOUNT | MS_RDONLY), None) == 0
    )


def protect(folder):
    """Nothing can be written into the directory any more, until the returned function is called."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0 and mounted_read_only(folder):
        return lambda: None
    folder.chmod(0o555)
    for parent in folder.parents[:2]:
        parent.chmod(0o755)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        return lambda: os.seteuid(0)
    return lambda: folder.chmod(0o755)


@contextlib.contextmanager
def read_only(folder):
    undo = protect(folder)
    try:
        with pytest.raises(OSError, match="|".join(REASONS)):
            (folder / "try").write_text("")
        yield
    finally:
        undo()


class ProtectAt(TrainerCallback):
    """The directory can no longer be written to after a step."""

    def __init__(self, stack, step):
        self.stack, self.step = stack, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.stack.enter_context(read_only(Path(args.output_dir)))


def cases(rank, world, folder):
    """What became of each run: `(code, text, steps)`."""
    found = {}

    def run(name, output, protected=None, step=None, resume=None, **options):
        steps = 0
        with contextlib.ExitStack() as stack:
            if protected is not None:
                stack.enter_context(read_only(protected))
            callbacks = [ProtectAt(stack, step)] if step is not None else []
            try:
                trainer = make_trainer(str(output), world, callbacks=callbacks, **{"max_steps": 6, **options})
                losses = train(trainer, resume)
                steps = trainer.state.global_step
                if name == "nothing is written":
                    trainer.evaluate(trainer.train_dataset)
                    trainer.close_engine()
                found[name] = None, list(losses), steps
            except HotspaError as error:
                steps = trainer.state.global_step if "trainer" in locals() else -1
                found[name] = type(error), str(error), steps

    run("at the start", folder / "a", folder / "a")
    run("not there", folder / "b" / "out", folder / "b")
    run("later", folder / "c", step=2, hotspa_max_failed_saves=1)
    run("later, and borne", folder / "d", step=4, hotspa_max_failed_saves=2)
    # without the mount the process would not get at the file by which its ranks have met, either
    read = folder / "d" if os.geteuid() != 0 or os.statvfs(folder / "d").f_flag & os.ST_RDONLY else None
    run("nothing is written", folder / "d", read, resume=str(folder / "d" / "checkpoint-4"), save_strategy="no")
    return found


def test_a_directory_that_cannot_be_written_to():
    with memory_folder() as folder:
        per_rank = run_ranks(2, cases, folder)
        for found in per_rank:
            for name, steps in (("at the start", 0), ("not there", -1), ("later", 4)):
                kind, text, at = found[name]
                assert kind is CheckpointError, (name, text)
                assert at == steps, (name, text)
                assert "HSP-210" in text
                assert "rank 0" in text
                assert any(reason in text for reason in REASONS), text
                assert "make output_dir a writable directory" in text
            assert found["later, and borne"] == (None, [1, 2, 3, 4, 5, 6], 6)
            assert found["nothing is written"] == (None, [5, 6], 6)
        assert [path.name for path in checkpoints(folder / "c")] == ["checkpoint-2", "checkpoint-1"]
        assert checkpoints(folder / "d")[0].name == "checkpoint-4"
        for path in (*checkpoints(folder / "c"), *checkpoints(folder / "d")):
            verify(path)
