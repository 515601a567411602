"""2,000 damaged checkpoints: each is refused with an error of our own, and none is loaded in silence."""

import json
import os
import random
import shutil
import time

import pytest

from hf_hotspa.checkpoint.format.folder import RunFolder, check_step
from hf_hotspa.checkpoint.format.manifest import MANIFEST, verify
from hf_hotspa.errors import DamagedCheckpointError
from tests.checkpoints import memory_path, write_checkpoint  # noqa: F401

MUTATIONS = 2000


def flip_bit(rng, path, other):
    file = rng.choice(files_of(path))
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(rng, path, other):
    file = rng.choice(files_of(path))
    os.truncate(file, rng.randrange(file.stat().st_size))


def extend(rng, path, other):
    with rng.choice(files_of(path)).open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 9)))


def remove(rng, path, other):
    rng.choice(files_of(path)).unlink()


def stale(rng, path, other):
    file = rng.choice(files_of(path))
    shutil.copy(other / file.relative_to(path), file)


def link(rng, path, other):
    file = rng.choice(files_of(path))
    target = path.parent / "elsewhere"
    shutil.copy(file, target)
    file.unlink()
    file.symlink_to(target)


def folder(rng, path, other):
    file = rng.choice(files_of(path))
    file.unlink()
    file.mkdir()


def pipe(rng, path, other):
    """Whoever opens it to read waits for a writer."""
    file = rng.choice(files_of(path))
    file.unlink()
    os.mkfifo(file)


def other_directory(rng, path, other):
    shutil.rmtree(path)
    shutil.copytree(other, path)


def fuzz_json(rng, path, other):
    """A value or a key of the manifest becomes something else; its hash stays."""
    data = json.loads((path / MANIFEST).read_text())
    nodes = list(nodes_of(data))
    parent, key = rng.choice(nodes)
    values = [None, -1, 1e300, float("nan"), "", "x" * 1000, [], {}, True, 2**63, [[[[]]]], "../../etc/passwd", 0.5]
    value = rng.choice(values)
    if parent[key] == value:
        value = "something else"
    if rng.random() < 0.2 and isinstance(parent, dict):
        del parent[key]
    else:
        parent[key] = value
    (path / MANIFEST).write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


def nodes_of(data):
    for key in data if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], dict | list):
            yield from nodes_of(data[key])


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


KINDS = [flip_bit, truncate, extend, remove, stale, link, folder, pipe, other_directory, fuzz_json]


def test_no_damage_goes_unnoticed(tmp_path):
    run = RunFolder(tmp_path / "run")
    good, other = write_checkpoint(run, 10), write_checkpoint(run, 20)
    run.unlock()
    verify(good)
    check_step(good, verify(good))
    contents = {file.relative_to(good): file.read_bytes() for file in files_of(good)}
    seed = time.time_ns()
    messages = set()
    for number in range(MUTATIONS):
        rng = random.Random(seed + number)
        kind = rng.choice(KINDS)
        path = tmp_path / "damaged" / "checkpoint-10"
        path.mkdir(parents=True)
        for name, data in contents.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(data)
        kind(rng, path, other)
        with pytest.raises(DamagedCheckpointError) as caught:  # noqa: PT012
            check_step(path, verify(path))
            pytest.fail(f"{kind.__name__} with seed {seed + number} was not noticed")
        assert str(path) in str(caught.value)
        assert "Fix: " in str(caught.value), kind.__name__
        messages.add(kind.__name__)
        shutil.rmtree(path.parent)
    assert messages == {kind.__name__ for kind in KINDS}


def test_a_file_that_is_not_listed_does_no_harm(tmp_path):
    run = RunFolder(tmp_path)
    path = write_checkpoint(run, 1)
    (path / "notes.txt").write_text("the good one")
    verify(path)
    run.unlock()
