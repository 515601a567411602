"""8-bit and 4-bit optimizers on shares of the master store: the bits of the library's own step on whole parameters, whatever the
number of ranks, and after a resume with another number of them."""

import contextlib
import json
from configparser import ConfigParser
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.training_args import OptimizerNames

from hf_hotspa.checkpoint.format.disk import Disk
from hf_hotspa.checkpoint.format.manifest import (
    STATE_FOLDER,
    Manifest,
    format_of,
    rank_tensors,
    read_manifest,
    verify,
)
from hf_hotspa.checkpoint.tensors import (
    ShareReader,
    check_model,
    optimizer_to_json,
    restore,
    saved_parameters,
    saved_segments,
    share_of,
)
from hf_hotspa.engine.engine import adopt_before_steps
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.errors import DamagedCheckpointError, HotspaConfigError, ResumeError, UnsupportedError
from hf_hotspa.features.low_bit_optimizers.adoption import RELEASES, adopt, cut_state, disown, overrides_of
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, ParameterVector, Part, build_vector
from hf_hotspa.model.replica import to_storage
from hf_hotspa.trainer.optimizers import check_optimizer, check_optimizer_name

bnb = pytest.importorskip("bitsandbytes").optim
ao = pytest.importorskip("torchao.optim")

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (163, 32), "0.cut": (3 * 256, 8), "0.transposed": (24, 257), "0.norm": (61,), "0.prime": (10_007,),
    "0.below": (4093,), "0.least": (4096,), "1.odd": (5000,), "1.even": (32, 256), "head": (41, 128),
}  # fmt: skip
EMBEDDED, TRANSPOSED = "embed", "0.transposed"
STEPS, CLIPPING = 20, 0.37
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bitsandbytes AdamW": (bnb.AdamW8bit, {}),
    "bitsandbytes Lion": (bnb.Lion8bit, {}),
    "bitsandbytes AdEMAMix": (bnb.AdEMAMix8bit, {"t_alpha": 10, "t_beta3": 10}),
    "bitsandbytes RMSprop": (bnb.RMSprop, {"optim_bits": 8}),
    "bitsandbytes paged": (bnb.PagedAdamW8bit, {}),
    "bitsandbytes 32 bits": (bnb.AdamW, {"optim_bits": 32}),
    "torchao 8 bits": (ao.AdamW8bit, {}),
    "torchao 4 bits": (ao.AdamW4bit, {}),
}


def vector() -> ParameterVector:
    units = {"embed": EMBEDDING, "head": HEAD}
    specs = []
    for name, shape in SHAPES.items():
        dim = 1 if name == TRANSPOSED else 0 if len(shape) > 1 else None
        parts = () if dim is None else (Part(shape[dim], shape[dim], shape[dim]),)
        unit = units[name] if name in units else int(name[0])
        specs.append(ParameterSpec(name, shape, "float32", unit, dim, parts))
    return build_vector(specs, [1, 1], 0)


def recorded(step: int, name: str) -> torch.Tensor:
    """The clipped gradient of a parameter at a step, in its own shape; step -1 is its weight."""
    generator = torch.Generator().manual_seed(1000 * step + sorted(SHAPES).index(name) + 5000)
    return torch.randn(SHAPES[name], generator=generator) * (1 if step < 0 else 0.1 * (1 + step % 3)) * CLIPPING


def groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    flat = [name for name, shape in SHAPES.items() if len(shape) == 1]
    return [
        {"params": [p for n, p in parameters.items() if n not in flat], "weight_decay": 0.1},
        {"params": [p for n, p in parameters.items() if n in flat], "weight_decay": 0.0},
    ]


def of_rank(kind: str, rank: int, world: int) -> tuple[MasterStore, Any]:
    master = MasterStore(vector(), rank, world, torch.device("cpu"))
    master.fill({name: recorded(-1, name) for name in SHAPES})
    cls, options = KINDS[kind]
    optimizer = cls(groups(master.parameters), lr=1e-2, **options)
    overrides = {id(master.parameters[EMBEDDED]): {"optim_bits": 32}} if "bitsandbytes" in kind else {}
    adopt(optimizer, master, overrides)
    return master, optimizer


def steps(master: MasterStore, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        master.bind_gradients()
        for name, (spec, start, stop, *_) in master.shares.items():
            master.parameters[name].grad.copy_(to_storage(recorded(step, name), spec.shard_dim)[start:stop])
        optimizer.step()


def save(folder: Path, kind: str, world: int, last: int, resumed: Path | None = None, first: int = 0) -> Path:
    """A checkpoint after some steps on so many ranks, one after the other. What rank 0 writes beside the files of ranks, any of
    them could, as all know the same."""
    (folder / STATE_FOLDER).mkdir(parents=True)
    records, known = [], []
    for rank in range(world):
        master, optimizer = of_rank(kind, rank, world)
        if resumed is not None:
            manifest = verify(resumed)
            check_model(manifest, master.vector, str(resumed))
            restore(resumed, manifest, master, optimizer, json.loads((resumed / "optimizer.json").read_text()))
        steps(master, optimizer, first, last)
        share = share_of(master, optimizer, master.vector)
        records.append(Disk().write(folder, rank_tensors(rank, world), share.file()))
        known.append((share.states, optimizer_to_json(optimizer, share)))
    assert all(of == known[0] for of in known)
    (folder / "optimizer.json").write_text(json.dumps(known[0][1]))
    parameters = saved_parameters(master.vector, known[0][0], dict.fromkeys(SHAPES, "float32"), set(SHAPES))
    segments, schema = saved_segments(master.vector, master), format_of(parameters)
    manifest = Manifest(last, world, "", True, "r", {}, tuple(records), segments, parameters, schema)
    assert schema == (2 if "32" in kind else 3)  # which older releases refuse by name
    (folder / "MANIFEST.json").write_text(manifest.text())
    return folder


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Weights, codes and scales of a checkpoint, whatever the number of its ranks was."""
    manifest = read_manifest(folder)
    reader = ShareReader(folder, manifest)
    return {f"{s}/{p.name}": reader.read(p, s, 0, p.numel) for p in manifest.parameters for s in p.states}


def by_library(kind: str) -> dict[str, torch.Tensor]:
    """The same made by the library alone, on whole parameters in the order of the master store."""
    dims = {spec.name: spec.shard_dim for spec in vector().specs}
    flat = {name: nn.Parameter(to_storage(recorded(-1, name), dims[name]).clone()) for name in SHAPES}
    cls, options = KINDS[kind]
    optimizer = cls(groups(flat), lr=1e-2, **options)
    if "bitsandbytes" in kind:
        optimizer.mng.override_config(flat[EMBEDDED], "optim_bits", 32)
    for step in range(STEPS):
        for name, parameter in flat.items():
            parameter.grad = to_storage(recorded(step, name), dims[name]).clone()
        optimizer.step()
    found = {f"weight/{name}": parameter.detach() for name, parameter in flat.items()}
    for name, parameter in flat.items():
        for key, value in optimizer.state[parameter].items():
            if hasattr(value, "codes"):
                found |= {f"{key}.codes/{name}": value.codes, f"{key}.scale/{name}": value.scale}
            elif isinstance(value, torch.Tensor) and value.dim() == 2:
                found |= {f"{key}.{i}/{name}": value[i] for i in range(2)}
            elif isinstance(value, torch.Tensor) and value.dim() and "qmap" not in key:
                found[f"{key}/{name}"] = value
    optimizer.mng.pid2config.clear() if "bitsandbytes" in kind else None
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.flatten().view(torch.uint8)), name


@pytest.fixture(autouse=True)
def eager(request):
    """torchao compiles its step for every size of a share: the slow tests have it do so."""
    compiled = "compiled" in request.node.name
    with contextlib.nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        yield


MORE_RANKS = ("bitsandbytes AdamW", "torchao 4 bits", "bitsandbytes AdEMAMix")


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_the_library_s_on_any_number_of_ranks_and_on_another_after_a_resume(kind, tmp_path):
    expected = by_library(kind)
    codes = {name for name, tensor in expected.items() if tensor.dtype == torch.uint8}
    assert bool(codes) == ("32" not in kind)
    assert not any(EMBEDDED in name for name in codes) or "torchao" in kind
    for before, after in ((3, 2), (1, 4)) if kind in MORE_RANKS else ((2, 1),):
        saved = save(tmp_path / f"{before}", kind, before, STEPS // 2)
        resumed = save(tmp_path / f"{before}to{after}", kind, after, STEPS, saved, STEPS // 2)
        same(whole(resumed), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchao 8 bits", "torchao 4 bits"])
def test_the_compiled_steps_of_torchao_give_the_same_bits_compiled(kind, tmp_path):
    expected = by_library(kind)
    for world in (1, 2, 3, 4):
        same(whole(save(tmp_path / str(world), kind, world, STEPS)), expected)


def test_another_optimizer_or_other_codes_are_refused_on_resuming(tmp_path):
    saved = save(tmp_path / "a", "bitsandbytes AdamW", 1, 1)
    described = json.loads((saved / "optimizer.json").read_text())
    for kind in ("bitsandbytes 32 bits", "bitsandbytes Lion", "torchao 8 bits"):
        master, optimizer = of_rank(kind, 0, 1)
        with pytest.raises(ResumeError, match=r"holds the state of bitsandbytes.AdamW8bit of 8 bits"):
            restore(saved, read_manifest(saved), master, optimizer, described)
    master, optimizer = of_rank("bitsandbytes AdamW", 0, 1)
    with pytest.raises(ResumeError, match="stood for other values"):
        restore(saved, read_manifest(saved), master, optimizer, {**described, "codes": "0" * 16})


def test_blocks_on_two_ranks_and_unknown_forms_are_no_manifest(tmp_path):
    manifest = read_manifest(save(tmp_path / "a", "bitsandbytes AdamW", 2, 1))
    even = next(parameter for parameter in manifest.parameters if parameter.name == "1.even")
    for old, new in (
        ("uint8", "uint8/512"),
        ("float32/256", "float32/0"),
        ("float32/256", "float32/x"),
        ("uint8", "u8"),
    ):
        states = {k: new if v == old and k != "weight" else v for k, v in even.states.items()}
        with pytest.raises(ValueError, match="the states of parameter"):
            replace(even, states=states)
    moved = [replace(s, cuts=(0, s.cuts[1] + (s.start > 0), s.cuts[2])) for s in manifest.segments]
    with pytest.raises(DamagedCheckpointError, match="are on two ranks"):
        Manifest.parse(replace(manifest, segments=tuple(moved)).text(), "here")


OwnAdamW: Any = type("OwnAdamW", (bnb.AdamW8bit,), {})


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(64, 64))]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: OwnAdamW(weights()), "OwnAdamW"),
        (lambda: bnb.LAMB8bit(weights()), "norm of whole tensors"),
        (lambda: ao.AdamWFp8(weights()), "have been tried"),
        (lambda: ao.AdamW8bit(weights(), block_size=96), "block_size=96"),
    ],
)
def test_what_would_change_with_the_layout_is_refused(make, match):
    with pytest.raises(UnsupportedError, match=match):
        check_optimizer(make())


@pytest.mark.parametrize(
    ("installed", "said"), [(None, "which is not installed"), ("0.1", "of which 0.1 is installed")]
)
def test_a_library_that_is_not_there_is_named_with_the_line_that_installs_it(monkeypatch, installed, said):
    check_optimizer_name(OptimizerNames.ADAMW_8BIT)
    monkeypatch.setattr("hf_hotspa.features.low_bit_optimizers.adoption.version_of", lambda name: installed)
    for optim, library in ((OptimizerNames.ADAMW_8BIT, "bitsandbytes"), (OptimizerNames.ADAMW_TORCH_4BIT, "torchao")):
        with pytest.raises(HotspaConfigError, match=rf'{said}.*pip install "{library}>=') as caught:
            check_optimizer_name(optim)
        assert not isinstance(caught.value, UnsupportedError)  # which may leave a run to the stock Trainer


def test_the_releases_are_those_of_the_extras():
    config = ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    for library, releases in RELEASES.items():
        assert f"{library} {releases}" == config["options.extras_require"][library].strip().replace(", ", ",")


def test_what_bitsandbytes_was_told_of_modules_and_parameters_is_found():
    embedding, other = nn.Embedding(8, 8), nn.Parameter(torch.ones(4))
    optimizer = bnb.AdamW8bit([embedding.weight, other])
    optimizer.mng.register_module_override(embedding, "weight", {"optim_bits": 32})
    optimizer.mng.override_config(other, "min_8bit_size", 1)
    try:
        found = overrides_of(optimizer)
        assert found[id(embedding.weight)] == {"optim_bits": 32}
        assert found[id(other)] == {"min_8bit_size": 1}
    finally:
        optimizer.mng.initialize()


@pytest.mark.parametrize("kind", ["bitsandbytes AdamW", "bitsandbytes AdEMAMix", "torchao 8 bits", "torchao 4 bits"])
def test_a_state_of_whole_parameters_is_cut_where_blocks_keep_their_order(kind):
    cls, options = KINDS[kind]
    parameters = {name: nn.Parameter(recorded(-1, name)) for name in SHAPES}
    optimizer = cls(groups(parameters), lr=1e-2, **options)
    for name, parameter in parameters.items():
        parameter.grad = recorded(0, name)
    optimizer.step()
    for world in (1, 2, 3):
        for rank in range(world):
            master, expected = of_rank(kind, rank, world)
            expected.overrides = {}
            steps(master, expected, 0, 1)
            for name, share in master.shares.items():
                state, wanted = optimizer.state[parameters[name]], expected.state[master.parameters[name]]
                same_state(cut_state(expected, wanted, share), wanted)  # which is cut already
                if name == TRANSPOSED and ("bitsandbytes" in kind or SHAPES[name][0] * SHAPES[name][1] % 256 == 0):
                    with pytest.raises(UnsupportedError, match="transposed"):
                        cut_state(optimizer, state, share)
                    continue
                same_state(cut_state(optimizer, state, share), wanted)


def same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    def tensors(value: Any) -> list[torch.Tensor]:
        return [value.codes, value.scale] if hasattr(value, "codes") else [torch.as_tensor(value)]

    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert all(map(torch.equal, tensors(found[key]), tensors(value))), key


def test_the_seconds_of_compiling_are_said_once(caplog):
    master, optimizer = of_rank("torchao 8 bits", 0, 2)
    steps(master, optimizer, 0, 3)
    sizes = len({share.numel() for share in master.parameters.values()})
    assert [
        f"compiled for {sizes} sizes" in r.getMessage() for r in caplog.records if "first step" in r.getMessage()
    ] == [True]


def test_paged_states_in_host_memory_are_said_in_one_line(caplog):
    for rank in range(2):
        _, optimizer = of_rank("bitsandbytes paged", rank, 2)
        assert not optimizer.is_paged
    assert [r.getMessage() for r in caplog.records if "paged" in r.getMessage()] == [
        "the states of PagedAdamW8bit are not paged: the master store is in host memory"
    ]


def test_an_optimizer_of_a_loop_is_adopted_before_its_first_step_and_given_back():
    master = MasterStore(vector(), 0, 2, torch.device("cpu"))
    master.fill({name: recorded(-1, name) for name in SHAPES})
    adopt_before_steps(master)
    optimizer = bnb.AdamW8bit(groups(master.parameters), lr=1e-2)
    other = bnb.AdamW8bit(weights(), lr=1e-2)
    derived = OwnAdamW(groups(master.parameters), lr=1e-2)
    steps(master, optimizer, 0, 1)
    other.step()
    with pytest.raises(UnsupportedError, match="OwnAdamW"):
        derived.step()
    assert type(optimizer) is not bnb.AdamW8bit
    assert type(other) is bnb.AdamW8bit
    for name, share in master.parameters.items():  # the whole decides: a share of a large parameter may be small
        numel = master.shares[name].spec.numel
        assert optimizer.state[share]["state1"].dtype == (torch.uint8 if numel >= 4096 else torch.float32), name
    assert any(0 < share.numel() < 4096 <= master.shares[name].spec.numel for name, share in master.parameters.items())
    disown(optimizer)
    assert type(optimizer) is bnb.AdamW8bit
    assert "wholes" not in vars(optimizer)
