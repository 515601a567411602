"""Files of a checkpoint: safe names, strict manifests, safetensors that the library reads, reading plans."""

import ast
import hashlib
import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from hf_hotspa.checkpoint.format import disk as disk_module
from hf_hotspa.checkpoint.format.disk import (
    Disk,
    FileRecord,
    TensorRecord,
    check_name,
    open_inside,
    read_text,
    tensor_file,
)
from hf_hotspa.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest, verify
from hf_hotspa.checkpoint.tensors import check_model
from hf_hotspa.errors import DamagedCheckpointError, ResumeError
from hf_hotspa.layout.vector import ParameterSpec, build_vector
from tests.checkpoints import tiny_manifest
from tests.contract.layers import PACKAGE_FOLDERS, ROOT, source_files

FILES = (
    FileRecord("hotspa/master-rank-00000-of-00002.safetensors", 100, "0" * 64),
    FileRecord("hotspa/master-rank-00001-of-00002.safetensors", 100, "1" * 64),
)
GOOD = tiny_manifest(3, FILES)

BAD_NAMES = ["", ".", "..", "a/..", "../a", "/etc/passwd", "a//b", "a/", "a\0b", "a b", "ä", "a\\b", "x" * 201, "a/b/c/d/e", "~"]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_could_lead_elsewhere_are_refused(name, tmp_path):
    with pytest.raises(DamagedCheckpointError, match="not allowed"):
        check_name(name, "here")
    with pytest.raises(DamagedCheckpointError), open_inside(tmp_path, name):
        pass
    with pytest.raises(DamagedCheckpointError):
        Disk().write(tmp_path, name, [b""])


def test_links_are_not_followed(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "secret").write_text("x")
    (inside / "file").symlink_to(outside / "secret")
    (inside / "folder").symlink_to(outside)
    os.mkfifo(inside / "pipe")
    (inside / "directory").mkdir()
    for name in ("file", "folder/secret", "directory", "missing"):
        with pytest.raises(DamagedCheckpointError, match="cannot be read"), open_inside(inside, name):
            pass
    with pytest.raises(FileExistsError):
        Disk().write(inside, "file", [b"overwritten"])
    assert (outside / "secret").read_text() == "x"


def test_large_json_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "big.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(DamagedCheckpointError, match="more than"):
        read_text(tmp_path, "big.json")
    (tmp_path / MANIFEST).symlink_to(tmp_path / "big.json")
    with pytest.raises(DamagedCheckpointError):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "nul", "[" * 100_000, '{"kind": 1}', "{", "\ud800".encode("utf-8", "surrogatepass")]
)
def test_what_is_no_manifest(text, tmp_path):
    (tmp_path / MANIFEST).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DamagedCheckpointError):
        read_manifest(tmp_path)


def forged(**changes):
    """A manifest whose hash fits, with other contents."""
    data = json.loads(GOOD.text())
    del data["sha256"]
    for path, value in changes.items():
        *parents, last = (int(p) if p.isdigit() else p for p in path.split("__"))
        target = data
        for key in parents:
            target = target[key]
        if value is None and last != "shard_dim":
            del target[last]
        else:
            target[last] = value
    body = json.dumps(data, indent=1, sort_keys=True) + "\n"
    return json.dumps({**data, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1, sort_keys=True) + "\n"


FORGED = [
    {"step": -1}, {"step": "3"}, {"step": 3.0}, {"step": True}, {"step": None}, {"step": 10**400}, {"world_size": 0},
    {"world_size": 3}, {"world_size": 1 << 40}, {"kind": "x"}, {"schema_version": 4}, {"extra": 1}, {"files": []},
    {"files": {}}, {"files__0__name": "../x"}, {"files__0__name": "x"}, {"files__1__name": FILES[0].name},
    {"files__0__name": MANIFEST}, {"files__0__size": -1}, {"files__0__size": 4}, {"segments__0__start": 1},
    {"segments__0__stop": 9}, {"segments__0__cuts": [0, 8]}, {"segments__0__cuts": [0, 9, 8]},
    {"segments__0__cuts": [4, 0, 8]}, {"segments": []}, {"parameters__0__shape": [1 << 40, 1 << 40]},
    {"parameters__0__shape": [-2, -3]}, {"parameters__0__shape": [2, 4]}, {"parameters__0__shape": "23"},
    {"parameters__0__shard_dim": 2}, {"parameters__0__segment": 5}, {"parameters__0__segment": 1},
    {"parameters__0__offset": 1}, {"parameters__1__name": "a.weight"}, {"parameters__1__name": "b.weight"},
    {"parameters__0__exported_name": "c"}, {"parameters__0__states": {}}, {"parameters__0__states": {"weight": "object"}},
    {"parameters__0__model_dtype": "int4"}, {"parameters__0__states": {"weight": "float32", "a/b": "float32"}},
    {"parameters": []}, {"versions": []}, {"parameters__0__trainable": 1},
]  # fmt: skip


@pytest.mark.parametrize("changes", FORGED, ids=lambda c: "-".join(f"{k}={str(v)[:20]}" for k, v in c.items()))
def test_impossible_manifests_are_refused_even_when_their_hash_fits(changes):
    assert Manifest.parse(forged(), "here") == GOOD
    with pytest.raises(DamagedCheckpointError):
        Manifest.parse(forged(**changes), "here")


def test_the_library_reads_what_is_written(tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.random((3, 5), np.float32),
        "b/c.d": rng.integers(0, 9, (7,)),
        "empty": np.zeros((0, 2), np.float64),
    }
    entries = [(TensorRecord(name, str(array.dtype), array.shape), array) for name, array in arrays.items()]
    record = Disk().write(tmp_path, "x.safetensors", tensor_file(entries, lambda array: array.tobytes()))
    data = (tmp_path / "x.safetensors").read_bytes()
    assert (record.size, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    with safe_open(tmp_path / "x.safetensors", framework="np") as file:
        assert set(file.keys()) == set(arrays)
        for name, array in arrays.items():
            assert np.array_equal(file.get_tensor(name), array)
    Disk().write(tmp_path, "none.safetensors", tensor_file([], lambda array: array.tobytes()))
    with safe_open(tmp_path / "none.safetensors", framework="np") as file:
        assert list(file.keys()) == []


def test_a_header_that_no_reader_takes_is_not_written(monkeypatch):
    monkeypatch.setattr(disk_module, "MAX_HEADER_BYTES", 100)
    entries = [(TensorRecord("x" * 100, "float32", (1,)), b"0000")]
    with pytest.raises(ValueError, match="too many"):
        list(tensor_file(entries, lambda data: data))


@given(st.data())
def test_what_ranks_hold_covers_a_range_once(data):
    manifest = GOOD
    parameter = data.draw(st.sampled_from(manifest.parameters))
    start = data.draw(st.integers(0, parameter.numel))
    stop = data.draw(st.integers(start, parameter.numel))
    covered = []
    for rank, first, last in manifest.holders(parameter, start, stop):
        low, high = manifest.share(parameter, rank)
        assert low <= first < last <= high
        covered += range(first, last)
    assert covered == list(range(start, stop))


EXPECTED = {
    "a.weight": ParameterSpec("a.weight", (2, 3), "float32", 0, tied_names=("b.weight",)),
    "a.bias": ParameterSpec("a.bias", (2,), "float32", 0),
    "norm": ParameterSpec("norm", (2,), "bfloat16", 0, trainable=False),
}


def compared(**changed):
    """Checks the manifest against a model in which some parameters are others, or None."""
    specs = {**EXPECTED, **changed}
    check_model(GOOD, build_vector([spec for spec in specs.values() if spec], (1,), 1), "here")


@pytest.mark.parametrize(
    ("name", "change", "fragments"),
    [
        ("a.weight", {"shape": (3, 2)}, ("'a.weight'", "[2, 3]", "[3, 2]")),
        ("a.bias", {"dtype": "float64"}, ("'a.bias'", "float32", "float64")),
        ("norm", {"trainable": True}, ("'norm'", "frozen")),
        ("a.weight", {"tied_names": ()}, ("tied to b.weight",)),
    ],
)
def test_a_changed_model_is_named(name, change, fragments):
    compared()
    with pytest.raises(ResumeError) as caught:
        compared(**{name: replace(EXPECTED[name], **change)})
    assert all(fragment in str(caught.value) for fragment in fragments)


def test_missing_and_added_parameters_are_named():
    with pytest.raises(ResumeError, match="'norm' is bfloat16 .* in the checkpoint and missing in the model"):
        compared(norm=None)
    with pytest.raises(ResumeError, match="'new' is missing in the checkpoint"):
        compared(new=replace(EXPECTED["norm"], name="new"))


STOCK_PICKLES = "hf_hotspa/checkpoint/stock.py"


def test_the_package_reads_and_writes_no_pickles():
    """And runs no text: whoever can write a file must not be able to run code. One file reads those of a stock Trainer's
    checkpoint, as tensors and plain values only, and writes what only a stock Trainer reads."""
    forbidden = {"pickle", "eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "__import__"}
    found, loads = [], []
    for file in source_files(*PACKAGE_FOLDERS):
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            names += [ast.unparse(node.func)] if isinstance(node, ast.Call) else []
            if file == STOCK_PICKLES and names == ["torch.load"]:
                loads.append({keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords})
                continue
            if file == STOCK_PICKLES and names == ["torch.save"]:
                continue
            found += [f"{file}:{node.lineno} {name}" for name in names if name in forbidden]
            # saying in so many words that nothing is trusted is fine
            trusts = {"trust_remote_code": "False", "weights_only": "True" if file == STOCK_PICKLES else None}
            if isinstance(node, ast.keyword) and node.arg in trusts and ast.unparse(node.value) != trusts[node.arg]:
                found.append(f"{file}: {node.arg}")
    assert not found
    assert [load["weights_only"] for load in loads] == ["True"]


def test_verify_needs_a_manifest(tmp_path):
    with pytest.raises(DamagedCheckpointError, match="there is no MANIFEST.json") as caught:
        verify(tmp_path)
    assert "take another checkpoint" in str(caught.value.fix)
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-old"):
        (tmp_path / name).mkdir()
    with pytest.raises(DamagedCheckpointError) as caught:  # the folder of the run instead of a checkpoint
        verify(tmp_path)
    assert caught.value.fix == f"name a checkpoint in it, such as {tmp_path / 'checkpoint-10'}"
    with pytest.raises(DamagedCheckpointError):
        verify(tmp_path / "nothing")
