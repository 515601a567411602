"""Saving on several ranks: what the disk refuses, the background, and what is exported.

Whole runs that are killed again and again are in test_kills.py.
"""

import contextlib
import errno
import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_hotspa.checkpoint.format import folder as folder_module
from hf_hotspa.checkpoint.format.disk import Disk
from hf_hotspa.checkpoint.format.folder import LOCK, RunFolder, checkpoints
from hf_hotspa.checkpoint.format.manifest import verify
from hf_hotspa.errors import CheckpointError, CheckpointLockError, HotspaConfigError, HotspaError, UnsavableError
from tests.checkpoints import FaultyDisk, memory_path, tiny_manifest, warnings_of_ours, write_rank  # noqa: F401
from tests.families import FAMILIES, tiny_model
from tests.harness import run_ranks
from tests.training_runs import STEPS, contents_of_shares, make_trainer, one_run, train
from tests.unit.test_checkpoint_commands import command

pytestmark = pytest.mark.gloo


def refuse(change, path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def writer_of(rank, folder, disk):
    import torch.distributed as dist

    from hf_hotspa.parallel.agreement import Agreement
    from hf_hotspa.trainer.checkpoints import CheckpointWriter

    return CheckpointWriter(RunFolder(Path(folder), disk), Agreement(dist.group.WORLD, rank))


def save_step(writer, rank, step, **options):
    writer.save(
        step,
        lambda temporary: write_rank(writer.folder.disk, temporary, step, rank),
        lambda files: tiny_manifest(step, files, writer.folder.run),
        limit=2,
        **options,
    )


# ------------------------------------------------------------------------------------------------ what the disk refuses


POINTS = ((0, 0), (0, 1), (0, 4), (1, 0), (1, 3), (0, 12), (0, 13))
"""A rank, and the change of the disk in its save that is refused."""


def refused_at(rank, world, folder):
    """At each point: the error, what is left; then the next save works."""
    os.fsync = lambda descriptor: None
    found = []
    for number, (victim, fatal) in enumerate(POINTS):
        disk = FaultyDisk()
        writer = writer_of(rank, folder / str(number), disk)
        save_step(writer, rank, 1)
        if rank == victim:
            disk.fatal, disk.action = len(disk.changes) + fatal, refuse
        with pytest.raises(CheckpointError) as caught:
            save_step(writer, rank, 2)
        writer.agreement.barrier()  # rank 0 clears up after all have been told
        found.append((str(caught.value), sorted(os.listdir(folder / str(number)))))
        writer.agreement.barrier()
        save_step(writer, rank, 3)
        writer.close()
    return found


def test_a_full_disk_on_one_rank(tmp_path):
    one, other = run_ranks(2, refused_at, tmp_path)
    assert one == other
    for number, ((victim, _), (error, left)) in enumerate(zip(POINTS, one, strict=True)):
        assert "No space left on device" in error
        assert f"rank {victim}" in error
        assert left == [LOCK, "checkpoint-1"]
        assert [path.name for path in checkpoints(tmp_path / str(number))] == ["checkpoint-3", "checkpoint-1"]


def leftovers(path):
    return [entry.name for entry in path.iterdir() if entry.name.startswith(".") and entry.name != LOCK]


def refuse_steps(trainer, steps):
    """From now on the disk is full whenever one of these steps is saved."""

    class Full(Disk):
        def before(self, change, path):
            if change == "create" and any(f".tmp-checkpoint-{step}-" in str(path) for step in steps):
                refuse(change, path)

    original = trainer._hotspa.checkpoints.into

    def writer(*args):
        found = original(*args)
        found.folder.disk = Full()
        return found

    trainer._hotspa.checkpoints.into = writer


def test_training_goes_on_when_some_saves_fail(tmp_path, caplog):
    reference = train(make_trainer(str(tmp_path / "a"), 1))
    for background in (False, True):
        output = tmp_path / f"{background}"
        trainer = make_trainer(str(output), 1, hotspa_max_failed_saves=2, hotspa_async_save=background)
        refuse_steps(trainer, {2, 3, 5, 6})
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hf_hotspa"):
            assert train(trainer) == reference
        assert caplog.text.count("HSP-210") == 4
        assert [p.name for p in checkpoints(output)] == ["checkpoint-7", "checkpoint-4", "checkpoint-1"]
        assert leftovers(output) == []


class NoJson(TrainerCallback, ExportableState):
    def state(self):
        return {"args": {}, "attributes": {"handle": object()}}


class Raises:
    """A processing class whose files cannot be written."""

    def save_pretrained(self, folder):
        raise RuntimeError("the vocabulary is not there")


def odd_generation_config(trainer):
    trainer.model.generation_config.do_sample, trainer.model.generation_config.temperature = False, 0.6


UNSAVABLE = {
    "generation_config.json": odd_generation_config,
    "config.json": lambda trainer: setattr(trainer.model.config, "note", {1}),
    "Raises (processing_class)": lambda trainer: setattr(trainer, "processing_class", Raises()),
    "the state of the callback NoJson": lambda trainer: trainer.add_callback(NoJson()),
    "the state of the scheduler Odd": lambda trainer: setattr(trainer, "lr_scheduler", Odd(trainer.create_optimizer())),
}


class Odd(torch.optim.lr_scheduler.LambdaLR):
    """A schedule whose state is no JSON."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1.0)

    def state_dict(self):
        return {"handle": object()}


class OddAtStep2(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            model.generation_config.do_sample, model.generation_config.temperature = False, 0.6


def unsavable_runs(rank, world, folder):
    """What became of runs that save what cannot be saved, of one where it comes later, and of those that save at the end alone."""
    found = {}
    for number, (name, change) in enumerate(UNSAVABLE.items()):
        trainer = make_trainer(f"{folder}/{number}", world, max_steps=2)
        change(trainer)
        with pytest.raises(UnsavableError) as caught:
            train(trainer)
        found[name] = str(caught.value), trainer.state.global_step
    trainer = make_trainer(f"{folder}/later", world, max_steps=4, callbacks=[OddAtStep2()])
    with pytest.raises(UnsavableError) as caught:
        train(trainer)
    found["later"] = str(caught.value), trainer.state.global_step
    with warnings_of_ours() as warnings:
        for number, name in enumerate(list(UNSAVABLE)[:3]):
            trainer = make_trainer(f"{folder}/at the end", world, max_steps=2, save_strategy="no")
            UNSAVABLE[name](trainer)
            train(trainer)
            trainer.save_model(f"{folder}/model-{number}")
            said = [text for text in warnings if f"but not {name}: " in text]
            found[f"{name} at the end"] = len(said), trainer.state.global_step
    folder_module._LOCK_PATIENCE_S = 0.2
    with pytest.raises(CheckpointLockError) as caught:
        one_run(rank, world, f"{folder}/taken", None, {})
    found["taken"] = str(caught.value)
    return found


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_no_disk_could_take_is_named_before_the_first_step(tmp_path, world):
    """And that another job has the directory."""
    other = RunFolder(tmp_path / "taken")
    other.lock()
    for rank, found in enumerate(run_ranks(world, unsavable_runs, str(tmp_path))):
        assert "HSP-212" in found["taken"]
        assert f"process {os.getpid()} on " in found["taken"]
        for name in UNSAVABLE:
            text, steps = found[name]
            assert f"HSP-213 Unsavable: {name} cannot be written" in text
            assert steps == 0
        text, steps = found["later"]
        assert "generation_config.json cannot be written: ValueError" in text
        assert steps == 2  # at once
        for name in list(UNSAVABLE)[:3]:
            assert found[f"{name} at the end"] == (1 if rank == 0 else 0, 2)
    other.unlock()
    assert checkpoints(tmp_path / "taken") == []
    assert [path.name for path in checkpoints(tmp_path / "later")] == ["checkpoint-1"]
    for number, there in enumerate(
        ({"config.json"}, {"generation_config.json"}, {"config.json", "generation_config.json"})
    ):
        left = {path.name for path in (tmp_path / f"model-{number}").iterdir()}
        assert {"model.safetensors", "training_args.json", *there} <= left


def limited_file_size(rank, world, folder):
    """The system, not a double, refuses: files may not grow beyond 50 kB."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    # standard output may be a file, too
    with warnings_of_ours() as warnings, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        short = make_trainer(folder, world, max_steps=2)
        with pytest.raises(CheckpointError, match="none of its 2 saves succeeded; .*File too large"):
            train(short)
        said = [message for message in warnings if "HSP-210" in message]
        trainer = make_trainer(folder, world, hotspa_max_failed_saves=2)
        with pytest.raises(CheckpointError, match=r"HSP-210.*File too large") as caught:
            train(trainer)
    return short.state.global_step, said, (type(caught.value), trainer.state.global_step)


def test_a_limit_of_the_system(tmp_path):
    for rank, (steps, messages, ended) in enumerate(run_ranks(2, limited_file_size, str(tmp_path))):
        assert ended == (CheckpointError, 3)
        assert steps == 2
        assert len(messages) == (2 if rank == 0 else 0)
        assert all("File too large" in message for message in messages)
    assert leftovers(tmp_path) == []
    assert checkpoints(tmp_path) == []


# ------------------------------------------------------------------------------------------------ in the background


def overlapping_saves(rank, world, folder):
    """A save comes while the one before is still being written: it waits; no more than one is under way."""
    events = []
    gate = threading.Event()

    class Slow(Disk):
        def before(self, change, path):
            if change == "create" and threading.current_thread().name == "hotspa-checkpoint":
                events.append(("begin", str(path).split(".tmp-checkpoint-")[1].split("-")[0]))
                gate.wait(10)

    writer = writer_of(rank, folder, Slow())
    save_step(writer, rank, 1, background=True)
    writer.poll()
    pending = writer.pending_step
    exists = Path(folder, "checkpoint-1").exists()
    threading.Timer(0.3, gate.set).start()
    save_step(writer, rank, 2, background=True)
    committed = writer.committed_step
    while writer.pending_step is not None:
        writer.poll()
        time.sleep(0.01)
    writer.close()
    return pending, exists, committed, events


def test_a_save_waits_for_the_one_before(tmp_path):
    for pending, exists, committed, events in run_ranks(2, overlapping_saves, str(tmp_path)):
        assert (pending, exists, committed) == (1, False, 1)
        steps = [step for _, step in events]
        assert steps == sorted(steps)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-1"]
    for path in checkpoints(tmp_path):
        verify(path)


def test_a_save_in_the_background_holds_the_state_of_its_step(tmp_path):
    train(make_trainer(str(tmp_path / "a"), 1))
    train(make_trainer(str(tmp_path / "b"), 1, hotspa_async_save=True))
    for step in range(1, STEPS + 1):
        name = f"checkpoint-{step}"
        assert contents_of_shares(tmp_path / "a" / name) == contents_of_shares(tmp_path / "b" / name)


# ------------------------------------------------------------------------------------------------ rotation and the best


class Scores(TrainerCallback):
    """Says after each step how good the model is, in place of an evaluation."""

    def __init__(self, scores):
        self.scores = scores

    def on_step_end(self, args, state, control, **kwargs):
        score = self.scores.get(state.global_step)
        if score is not None and (state.best_metric is None or score > state.best_metric):
            state.best_metric, state.best_global_step = score, state.global_step


@pytest.mark.parametrize("limit", [2, 1])
def test_the_best_checkpoint_stays(tmp_path, limit):
    options = {"save_total_limit": limit, "metric_for_best_model": "loss"}
    trainer = make_trainer(str(tmp_path), 1, callbacks=[Scores({2: 0.5, 3: 0.9, 5: 0.7})], **options)
    assert len(train(trainer)) == STEPS
    found = [path.name for path in checkpoints(tmp_path)]
    assert len(found) == limit
    assert "checkpoint-3" in found
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    trainer = make_trainer(str(tmp_path / "a"), 1, callbacks=[Scores({3: 0.9})])
    trainer.args.load_best_model_at_end = True  # which the arguments take only together with an evaluation
    train(trainer)
    for step, equal in ((3, True), (STEPS, False)):
        other = make_trainer(str(tmp_path / f"at-{step}"), 1, max_steps=step, model_seed=4)
        train(other, str(tmp_path / "a" / f"checkpoint-{step}"))
        weights = dict(other.model.named_parameters())
        assert all(torch.equal(p, weights[n]) for n, p in trainer.model.named_parameters()) == equal


# ------------------------------------------------------------------------------------------------ export


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "def": 2, "return": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>")


def train_families(rank, world, folder, families):
    found = {}
    for family in families:
        trainer = make_trainer(f"{folder}/{family}", world, family=family, max_steps=1)
        trainer.processing_class = tokenizer()
        train(trainer)
        trainer.save_model(f"{folder}/{family}-saved")
        found[family] = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return found


EXPORTED = ("qwen3_qk_norm_tied", "phi3_fused")


@pytest.mark.parametrize(
    "families",
    [EXPORTED, pytest.param([family for family in FAMILIES if family not in EXPORTED], marks=pytest.mark.slow)],
    ids=["quick", "others"],
)
def test_exported_models_load_bit_for_bit(tmp_path, capsys, families):
    weights, _ = run_ranks(2, train_families, str(tmp_path), families)
    for family in families:
        out, saved = tmp_path / f"{family}-exported", tmp_path / f"{family}-saved"
        assert command("export", tmp_path / family / "checkpoint-1", out, "--max-shard-size", "30kB") == 0
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 2
        stock = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        loaded = AutoModelForCausalLM.from_pretrained(out)
        assert type(loaded) is type(tiny_model(family))
        assert loaded.dtype == torch.float32
        assert {name for name, _ in loaded.named_parameters()} == weights[family].keys()
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, weights[family][name]), name
            assert torch.equal(parameter, stock.get_parameter(name)), name
        assert loaded.config.to_dict() == {**stock.config.to_dict(), "_name_or_path": str(out)}
        # the same names as transformers writes: of tied weights one
        from safetensors import safe_open

        with safe_open(saved / "model.safetensors", framework="pt") as file:
            assert set(file.keys()) == set(index["weight_map"])
        assert loaded.generation_config.to_dict() == stock.generation_config.to_dict()
        assert AutoTokenizer.from_pretrained(out)("def return")["input_ids"] == [2, 3]
        assert "trained with hf_hotspa" in (out / "README.md").read_text()
        # nothing is pickled, neither in checkpoints nor beside a saved model
        assert not [f for f in tmp_path.rglob("*") if f.suffix in (".bin", ".pt", ".pth", ".pkl")]
    assert "files of weights" in capsys.readouterr().out


def test_export_in_another_dtype_and_in_one_file(tmp_path):
    trainer = make_trainer(str(tmp_path / "a"), 1, max_steps=1)
    train(trainer)
    checkpoint, out = tmp_path / "a" / "checkpoint-1", tmp_path / "out"
    assert command("export", checkpoint, out, "--dtype", "bfloat16") == 0
    assert sorted(p.name for p in out.glob("*.safetensors*")) == ["model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.to(torch.bfloat16))
    with pytest.raises(HotspaConfigError, match="exists"):
        command("export", checkpoint, out)
    with pytest.raises(HotspaConfigError, match="int4"):
        command("export", checkpoint, tmp_path / "other", "--dtype", "int4")
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(HotspaError, match="config.json"):
        command("export", checkpoint, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".other")]
