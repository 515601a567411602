"""The files of weights of a checkpoint: those that `save_pretrained` writes, by however many ranks they are written."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from hf_hotspa.checkpoint.format.disk import Disk
from hf_hotspa.checkpoint.model_files import ModelWeights
from tests.families import tiny_model
from tests.tiny_families import tiny_model_of


def vector_of(model):
    """The parameters of a model as a vector has them: each once, with its further names."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    specs = [SimpleNamespace(name=first, tied_names=tuple(rest)) for first, *rest in names.values()]
    return SimpleNamespace(specs=specs)


def weights_of(model):
    """As they are gathered: in fp32, every name of a tied one."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter.detach().double()


def read(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


FAMILIES = ["qwen3_qk_norm_tied", "phi3_fused", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt2"]


@pytest.mark.parametrize(("family", "held"), [*((name, False) for name in FAMILIES), ("mixtral", True)])
def test_files_are_those_of_save_pretrained(family, held, tmp_path):
    small = family in ("qwen3_qk_norm_tied", "phi3_fused")
    model = tiny_model(family, torch.bfloat16) if small else tiny_model_of(family, torch.bfloat16)
    model.save_pretrained(tmp_path / "stock")
    expected, parts, records = read(tmp_path / "stock"), 3, []
    (tmp_path / "ours").mkdir()
    for part in range(parts):
        files = ModelWeights(model, vector_of(model).specs, False, 60_000)
        weights = weights_of(model)
        if held:
            weights = files.hold(weights, part, parts)
            assert sum(tensor.nbytes for tensor in weights.values()) < sum(t.nbytes for t in expected.values())
        records += files.write(Disk(), tmp_path / "ours", weights, part, parts)
    found = read(tmp_path / "ours")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert {record.name for record in records} == {path.name for path in (tmp_path / "ours").iterdir()}
