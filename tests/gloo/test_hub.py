"""What `hub_strategy` pushes at checkpoints, to a hub that is a double: no test talks to a network."""

import threading
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import trainer as stock

from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.checkpoint.format.manifest import verify
from tests.checkpoints import memory_folder, warnings_of_ours
from tests.harness import run_ranks
from tests.training_runs import make_trainer, train

pytestmark = pytest.mark.gloo

# Beside other work a process may be slow enough to be named in a warning, and warnings are compared here.
RUN = {
    "max_steps": 3, "push_to_hub": True, "hub_always_push": True, "save_total_limit": 1, "hotspa_stragglers": "off",
}  # fmt: skip


class Hub:
    """Looks at what it is given while it is there; `gate` holds uploads back."""

    def __init__(self, rank, broken=False):
        self.rank, self.broken, self.uploads, self.gate = rank, broken, [], threading.Event()
        self.gate.set()

    def __call__(self):
        return self

    def create_repo(self, name, **kwargs):
        return types.SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, *, folder_path, commit_message, path_in_repo=None, **kwargs):
        assert self.rank == 0
        assert kwargs["repo_id"] == "me/a"
        self.gate.wait(30)
        if self.broken:
            raise ConnectionError("no network here")
        folder = Path(folder_path)
        if path_in_repo is None:
            what = load_file(
                folder / "model.safetensors"
            )  # from_pretrained changes torch's default dtype, and this is a thread
            assert (folder / "config.json").exists()
            assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt")]
        else:
            what = verify(folder).step
        self.uploads.append((commit_message, path_in_repo, what))


def pushing_run(rank, world, folder, case):
    """`(uploads, warnings)` of a run of three steps, of which each is saved, and its weights after the last one."""
    options = {**RUN, **CASES[case]}
    hub = stock.hf_api = Hub(rank, broken=case == "no network")
    trainer = make_trainer(f"{folder}/a", world, **options)
    if case == "a slow network":
        hub.gate.clear()
        finish = trainer._finish_current_push
        # training is over before anything has been uploaded
        trainer._finish_current_push = lambda: (trainer.state.global_step == 3 and hub.gate.set(), finish())
    with warnings_of_ours() as warnings:
        train(trainer)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return hub.uploads, warnings, weights


CASES = {
    "every save": {"hub_strategy": "every_save"},
    "last checkpoint": {"hub_strategy": "checkpoint", "hotspa_async_save": True},
    "a slow network": {"hub_strategy": "all_checkpoints", "hub_always_push": False},
    "no network": {"hub_strategy": "checkpoint"},
    "at the end": {"hub_strategy": "end"},
}


def all_cases(rank, world, folder):
    return {case: pushing_run(rank, world, f"{folder}/{number}", case) for number, case in enumerate(CASES)}


def test_every_strategy_of_the_hub():
    with memory_folder() as folder:
        first, second = run_ranks(2, all_cases, str(folder))
        for number in range(len(CASES)):
            left = {path.name for path in (folder / str(number) / "a").iterdir()}
            assert "checkpoint-3" in left
            assert not left & {".hub", "model.safetensors", "training_args.bin"}
            # the one that was being pushed when the last one came stays until there is another save
            assert len(checkpoints(folder / str(number) / "a")) <= 2
    assert all(uploads == [] for uploads, _, _ in second.values())
    messages = [f"Training in progress, step {step}" for step in (1, 2, 3)]
    models = [(message, None) for message in messages]
    uploads, warnings, weights = first["every save"]
    assert [upload[:2] for upload in uploads] == models
    assert warnings == []
    assert all(torch.equal(p, weights[name]) for name, p in uploads[-1][2].items())
    assert not all(torch.equal(p, weights[name]) for name, p in uploads[0][2].items())
    uploads, warnings, _ = first["last checkpoint"]
    assert [upload[:2] for upload in uploads if upload[1] is None] == models
    assert [upload[1:] for upload in uploads if upload[1] is not None] == [("last-checkpoint", n) for n in (1, 2, 3)]
    assert warnings == []
    # the first one, which the limit of one checkpoint would have removed, was pushed; the others came too early
    uploads, warnings, _ = first["a slow network"]
    assert [(name, what) for _, name, what in uploads if name] == [("checkpoint-1", 1)]
    uploads, warnings, _ = first["no network"]
    assert uploads == []
    assert len(warnings) == 3
    assert all("was not pushed to the hub: ConnectionError: no network here" in text for text in warnings)
    assert first["at the end"][:2] == ([], [])
