"""DataLoader workers: deaf to the SIGTERM of others, obedient to their rank, gone when it is."""

import os
import signal
import subprocess
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from hf_hotspa.data.worker_processes import worker_context
from hf_hotspa.errors import HotspaConfigError
from tests.training_runs import make_trainer

METHODS = ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]


class Numbers(torch.utils.data.Dataset):
    """Each row is its number."""

    def __len__(self):
        return 23

    def __getitem__(self, row):
        return row


def loader(num_workers=0, method=None, **options):
    context = worker_context(num_workers, method)
    return DataLoader(Numbers(), batch_size=5, num_workers=num_workers, multiprocessing_context=context, **options)


def rows_of(batches):
    return [batch.tolist() for batch in batches]


def tell_from_outside(*pids):
    """SIGTERM from a process that is nobody's parent here."""
    subprocess.run(["kill", "-TERM", *map(str, pids)], check=True)


def is_running(pid):
    """Whether a process is there, and not as a zombie only."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_end(*pids):
    """Waits until they are gone; the test's own clock ends a wait in vain."""
    while any(map(is_running, pids)):
        time.sleep(0.01)


@pytest.mark.parametrize("method", METHODS)
def test_only_their_rank_ends_them(method):
    expected = rows_of(loader())
    made = loader(num_workers=2, method=method, prefetch_factor=1)
    batches = iter(made)
    workers = list(batches._workers)
    pids = [worker.pid for worker in workers]
    tell_from_outside(*pids)  # perhaps before they have begun
    first = next(batches)
    tell_from_outside(*pids)
    tell_from_outside(*pids)
    assert rows_of([first, *batches]) == expected
    await_end(*pids)

    again = iter(made)
    [one, other] = again._workers
    one.terminate()
    one.join()
    assert one.exitcode == 0
    assert other.is_alive()
    del again


class Sleeper(torch.utils.data.Dataset):
    """Says its process, and hangs at the second row."""

    def __len__(self):
        return 4

    def __getitem__(self, row):
        if row:
            time.sleep(3600)
        return os.getpid()


def hang(pipe):
    """A rank of which a worker hangs when it leaves."""
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # how long torch waits before it terminates one
    rows = DataLoader(Sleeper(), num_workers=1, multiprocessing_context=worker_context(1, "fork"), prefetch_factor=2)
    pipe.send(int(next(iter(rows))))


def test_a_worker_that_hangs_does_not_keep_its_rank_from_leaving():
    here, there = get_context("fork").Pipe()
    rank = get_context("fork").Process(target=hang, args=(there,))
    rank.start()
    pid = here.recv()
    rank.join()
    assert rank.exitcode == 0
    await_end(pid)


def killed(pipe):
    made = loader(num_workers=2)
    batches = iter(made)
    next(batches)
    pipe.send([worker.pid for worker in batches._workers])
    signal.pause()


def test_they_end_with_their_rank_at_once():
    from torch.utils.data._utils import worker

    before, worker.MP_STATUS_CHECK_INTERVAL = worker.MP_STATUS_CHECK_INTERVAL, 3600  # torch's own way would not show
    try:
        here, there = get_context("fork").Pipe()
        rank = get_context("fork").Process(target=killed, args=(there,))
        rank.start()
        pids = here.recv()
        assert all(map(is_running, pids))
        rank.kill()
        await_end(*pids)
    finally:
        worker.MP_STATUS_CHECK_INTERVAL = before


def test_the_loaders_of_a_trainer_have_such_workers(tmp_path):
    def batches(loader):
        return [batch["input_ids"].tolist() for batch in loader]

    expected = batches(make_trainer(str(tmp_path), 1).get_train_dataloader())
    trainer = make_trainer(str(tmp_path), 1, dataloader_num_workers=1)
    loader = trainer.get_train_dataloader()
    for made, skipped in (
        (loader, 0),
        (skip_first_batches(loader, 2), 2),
    ):  # the second is what a resumed run trains on
        trainer._hotspa.rows.sampler.set_epoch(0)  # else the order is that of another pass
        iterator = iter(made.base_dataloader)
        tell_from_outside(*(worker.pid for worker in iterator._workers))
        assert batches(iterator) == expected[skipped:]
    trainer.train()
    if not hasattr(TrainingArguments, name := "dataloader_multiprocessing_context"):  # as with an older release
        return
    assert getattr(trainer.args, name) is None  # the user's is left alone
    wrong = make_trainer(str(tmp_path), 1, dataloader_num_workers=1, **{name: "thread"})
    with pytest.raises(HotspaConfigError, match="'thread'"):
        wrong.get_train_dataloader()
