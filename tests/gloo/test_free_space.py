"""Saves that cannot succeed: no room for a checkpoint, before the first step and later, and runs that saved nothing."""

import logging
import shutil
from collections import namedtuple

import pytest

from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.checkpoint.format.manifest import read_manifest
from hf_hotspa.errors import CheckpointError
from hf_hotspa.trainer import checkpoints as free_space
from tests.harness import run_ranks
from tests.training_runs import STEPS, make_trainer, train

pytestmark = pytest.mark.gloo
Usage = namedtuple("Usage", "total used free")


def free(*numbers):
    """Disks with so many free bytes, one after the other; the last stays."""
    left = list(numbers)
    return lambda folder: Usage(1 << 40, 0, left.pop(0) if len(left) > 1 else left[0])


def without_room(rank, world, folder):
    free_space.shutil.disk_usage = free(1000)
    trainer = make_trainer(folder, world)
    with pytest.raises(CheckpointError) as caught:
        train(trainer)
    saving_nothing = make_trainer(folder + "/none", world, save_strategy="no", max_steps=1)
    train(saving_nothing)
    return str(caught.value), trainer.state.global_step, saving_nothing.state.global_step


def test_no_room_for_one_checkpoint_is_an_error_before_the_first_step(tmp_path):
    first, second = run_ranks(2, without_room, str(tmp_path))
    assert first == second
    said, steps, others = first
    assert said.startswith("HSP-210 Checkpoint: no checkpoint of this run has room on the disk: it needs ")
    assert "(1,000 bytes) are free" in said
    assert (steps, others) == (0, 1)
    assert checkpoints(tmp_path) == []


OPTIONS = [{"lora": {"r": 4}}, {"optim": "sgd"}, {"hotspa_async_save": True}]


@pytest.mark.parametrize(
    "options", [{}, {"save_only_model": True}, *(pytest.param(o, marks=pytest.mark.slow) for o in OPTIONS)], ids=str
)
def test_the_bytes_are_known_before_the_first_step(options, tmp_path, monkeypatch):
    needed = []

    def check_room(folder, num_bytes, when):
        needed.append(num_bytes)
        return 0

    monkeypatch.setattr(free_space, "check_room", check_room)
    train(make_trainer(str(tmp_path), 1, max_steps=2, save_steps=2, **options))
    before, at_the_save = needed
    tensors = sum(f.size for f in read_manifest(tmp_path / "checkpoint-2").files if f.name.endswith(".safetensors"))
    assert before == at_the_save
    assert 0.5 * tensors < before <= tensors


def test_later_saves_fail_and_are_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", free(1 << 30, 1 << 30, 1000))
    trainer = make_trainer(str(tmp_path), 1, hotspa_max_failed_saves=2)
    with pytest.raises(
        CheckpointError, match=r"the checkpoint of step 4 has no room on the disk: .* \(1,000 bytes\) are free"
    ):
        train(trainer)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1"]
    assert caplog.text.count("training continues; failed saves in a row") == 2


def test_a_run_that_saved_nothing_ends_with_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", free(1 << 30, 1000))
    trainer = make_trainer(str(tmp_path), 1, hotspa_max_failed_saves=99)
    with pytest.raises(CheckpointError, match=f"training has ended, and none of its {STEPS} saves succeeded"):
        train(trainer)
    assert trainer.state.global_step == STEPS
    trainer.save_model(str(tmp_path / "model"))  # the weights are the trained ones
    monkeypatch.setattr(shutil, "disk_usage", free(1 << 30))
    train(trainer)  # the same trainer again
    assert checkpoints(tmp_path)


def test_room_for_some_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", free(350))
    args = make_trainer(str(tmp_path), 1, save_steps=2).args
    with caplog.at_level(logging.WARNING):
        free_space.check_run(args, 100, 6)  # three
        args.save_total_limit = 2
        free_space.check_run(args, 100, 60)  # two, and one more while it is written
        assert caplog.text == ""
        args.save_total_limit = 3
        free_space.check_run(args, 100, 60)
    assert "has room for 3 checkpoints of 0.0 MiB, and this run will have up to 4" in caplog.text
    with pytest.raises(CheckpointError, match=r"\(351 bytes\), and 0.0 MiB \(350 bytes\) are free"):
        free_space.check_run(args, 351, 60)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 0))  # a file system that does not say
    free_space.check_run(args, 351, 60)
