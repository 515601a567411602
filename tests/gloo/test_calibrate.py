"""Measuring a tiny model on several ranks: one result on all of them, kept in the cache, errors on all ranks."""

import contextlib
import copy
import io
import json
import math
import os
import subprocess
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hotspa.calibrate import model_calibration as measured
from hf_hotspa.calibrate.model_calibration import Procedure, calibrate
from hf_hotspa.calibrate.probe import layer_counts, small_copy
from hf_hotspa.cli import main
from hf_hotspa.costs.calibration import Calibration
from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.memory import MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.errors import HotspaError
from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import Strategy, legal_strategies
from tests.families import FAMILIES, tiny_config
from tests.harness import run_ranks
from tests.oracle import relative_error
from tests.tiny_families import tiny_model_of

pytestmark = pytest.mark.gloo

QUICK, ON_TWO = Procedure(1, 64), Procedure(1, 64, devices_per_node=2)
LEAST = Procedure(1, 64, seconds=0.01)


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )


def test_the_dtype_of_a_model_that_was_saved(tmp_path: Path):
    assert measured.config_dtype(config()) == torch.float32
    model = LlamaForCausalLM(config()).bfloat16()
    model.save_pretrained(tmp_path)
    assert measured.config_dtype(model.config) == torch.bfloat16
    model.config.dtype = "bfloat16"
    assert measured.config_dtype(model.config) == torch.bfloat16


def measure_twice(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], int]:
    """The calibration as data, and how many tensor-parallel degrees it has; later calls read the cache."""
    cache, random_state = Path(folder), torch.get_rng_state()
    first = calibrate(config(), cache=cache, procedure=ON_TWO)
    assert torch.equal(torch.get_rng_state(), random_state)
    with unittest.mock.patch.object(measured._Session, "_measure", side_effect=HotspaError("measured again")):
        again = calibrate(config(), cache=cache, procedure=ON_TWO)
        strategies = legal_strategies(world_size, description().shape)[:1]
        assert calibrate(config(), cache=cache, procedure=ON_TWO, strategies=strategies) == first
        with pytest.raises(HotspaError, match="measured again"):  # another case is another file
            calibrate(config(), cache=cache, procedure=ON_TWO, compute_dtype=torch.bfloat16)
    assert again == first
    # for a run that races its plans: packs no longer than the data, and no more rounds than there is time for
    short = calibrate(
        config(), cache=cache / "short", procedure=Procedure(longest=40, seconds=0.01, devices_per_node=2)
    )
    assert max(sum(sample.lengths) for sample in short.samples) <= 40
    assert (short.phases, short.exchanges) == ((), ())
    assert set(short.degrees) == set(first.degrees)
    return first.to_dict(), len(first.degrees)


def description() -> Any:
    return describe_model(small_copy(config(), 4, torch.float32, torch.device("meta")))


@pytest.mark.slow
def test_all_ranks_have_one_calibration(tmp_path: Path) -> None:
    found = run_ranks(4, measure_twice, str(tmp_path))
    assert all(other == found[0] for other in found)
    data, degrees = found[0]
    model = description()
    sizes = ModelSizes(model.shape, "float32", vector=model.vector)
    assert degrees == 3
    (path,) = tmp_path.glob("*.json")
    kept = Calibration.load(path)
    assert json.loads(json.dumps(kept.to_dict())) == json.loads(json.dumps(data))
    assert path.stem == kept.key.digest()
    # three tensor-parallel degrees, one layer and all four, five packs, and for one copy a sixth
    assert len(kept.samples) == 3 * (5 + 6)
    assert len(kept.switches) == 6
    assert len(kept.memory) in (0, 18)
    assert bool(kept.memory) != bool(kept.notes)
    assert kept.slots == (kept.key.slots if kept.key.slots < 4 else math.inf)
    assert 1.0 <= kept.pipeline_factor <= 1.5
    assert kept.layers == ()  # all alike, so none was timed by itself
    assert [(s.cp, s.tp, s.name) for s in kept.exchanges] == [
        (cp, tp, name) for cp, tp in ((2, 1), (4, 1), (2, 2)) for _ in range(2) for name in ("all_to_all", "gather")
    ]
    assert set(kept.context_exchanges) == {(2, 1), (4, 1), (2, 2)}
    # each rank sends all but its own part
    for sample in kept.exchanges:
        assert sample.num_bytes in {size * (sample.cp - 1) // sample.cp for size in (64 << 10, 4 << 20)}
    # every strategy of four ranks, with a long sequence among short ones and without
    whole = [*legal_strategies(4, description().shape), *map(Strategy.parse, ("dp2cp2", "cp4", "cp2tp2"))]
    assert [sample.strategy for sample in kept.phases] == [str(s) for s in sorted(whole) for _ in range(2)]
    assert set(kept.time_model(sizes).phase_factors) == {(s.tp, s.cp, s.pp) for s in whole}
    assert all(len(sample.replicas) == Strategy.parse(sample.strategy).dp for sample in kept.phases)
    assert {max(n for packs in sample.replicas for pack in packs for n in pack) for sample in kept.phases} == {64, 8}
    assert kept.inter is not None
    assert kept.hop_inter is not None
    time = kept.time_model(sizes)
    for strategy in legal_strategies(4, model.shape):
        assert 0 < time.phase_seconds(strategy, [[(64,)]] * strategy.dp) < math.inf
        assert kept.memory_model(sizes).breakdown(strategy, 64).total > 0
    cost = CostModel.of_calibration(kept, sizes, MemoryOptions())
    assert all(seconds > 0 for seconds in cost.switch_seconds(legal_strategies(4, model.shape)).values())


def measure_kinds(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A model whose first layer is dense and whose others have experts."""
    given = tiny_model_of("deepseek_v3").config
    return calibrate(given, cache=Path(folder), compute_dtype=torch.float32, procedure=QUICK).to_dict()


@pytest.mark.slow
def test_layers_of_several_kinds_are_timed_one_by_one(tmp_path: Path) -> None:
    first, second = run_ranks(2, measure_kinds, str(tmp_path))
    assert first == second
    (path,) = tmp_path.iterdir()
    kept = Calibration.load(path)
    assert [sample.layers for sample in kept.layers] == [(0,), (1, 2, 3)]
    assert {sample.lengths for sample in kept.layers} == {(64,)}
    costs = kept.stage_costs((1, 1, 1, 1)).layers
    dense, sparse = (sample.seconds for sample in kept.layers)
    assert costs[0] / costs[1] == pytest.approx(dense / sparse, rel=1e-2)


def fail_on_rank_1(rank: int, world_size: int, folder: str) -> list[str]:
    """What each kind of trouble says on this rank."""
    said = []

    def tell(given: LlamaConfig, **options: Any) -> None:
        try:
            calibrate(given, cache=Path(folder), procedure=LEAST, **options)
        except HotspaError as error:
            said.append(str(error))

    def failing(given: Any, num_layers: int, *rest: Any) -> Any:
        if rank == 1 and num_layers > 1:
            raise RuntimeError("no room for so many layers")
        return small_copy(given, num_layers, *rest)

    with unittest.mock.patch.object(measured, "small_copy", failing):
        tell(config())
    other = config()
    other.rms_norm_eps = 1e-4
    tell(other if rank == 1 else config())
    strategies = legal_strategies(world_size, description().shape)
    tell(config(), strategies=strategies[: 1 + rank])
    tell("llama" if rank == 1 else config())  # type: ignore[arg-type]
    tell(config())  # all is well, and the cache is filled
    if rank == 0:
        (path,) = Path(folder).glob("*.json")
        path.write_text(path.read_text()[:100])
    torch.distributed.barrier()
    tell(config())
    tell(config(), force=True)  # measures again instead
    return said


def test_an_error_of_one_rank_is_raised_by_all(tmp_path: Path) -> None:
    found = run_ranks(2, fail_on_rank_1, str(tmp_path / "cache"))
    assert found[0][0] == found[1][0]
    # a mismatch names the rank that reports it
    assert [len(said) for said in found] == [5, 5]
    for said in found:
        room, differ, degrees, type_, torn = said
        assert "RuntimeError: no room for so many layers" in room
        assert "rank 1" in room
        assert "ranks differ in the model config" in differ
        assert "calibration's degrees" in degrees
        assert "needs a transformers config, but got a str" in type_
        assert "not valid JSON" in torn
        assert "delete the file and calibrate again" in torn


# ------------------------------------------------------------------------------------------------------- small copies


@pytest.mark.parametrize("family", FAMILIES)
def test_small_copies_are_what_the_family_builds(family: str) -> None:
    given = tiny_config(family)
    before = copy.deepcopy(given.to_dict())
    for count in layer_counts(given):
        first, second = (small_copy(given, count, torch.float32) for _ in range(2))
        assert first.config.get_text_config().num_hidden_layers == count
        found = describe_model(first)
        assert len(found.vector.layer_costs) == count
        ids = torch.arange(12)[None] % found.shape.vocab_size
        loss = first(input_ids=ids, labels=ids).loss
        loss.backward()
        assert torch.isfinite(loss)
        assert all(p.grad is not None for p in first.parameters() if p.requires_grad)
        assert relative_error(loss.detach(), second(input_ids=ids, labels=ids).loss.detach()) == 0
    assert given.to_dict() == before


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    config().save_pretrained(folder)
    cache, output = tmp_path / "cache", tmp_path / "out.json"
    environment = {**os.environ, "HF_HOTSPA_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hf_hotspa.cli", "calibrate", "--model", str(folder), "--processes", "2"]
    done = subprocess.run(
        [*command, "--output", str(output)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "one layer, forward and backward" in done.stdout
    assert "exchanges  all-to-all us" in done.stdout
    assert "measuring tp 1, 2 on 2 x" in done.stderr
    found = Calibration.load(output)
    assert found.key.world_size == 2
    assert found.key.devices_per_node == 2
    (kept,) = (cache / "calibration").iterdir()
    assert Calibration.load(kept) == found

    # what it wrote is what the planner reads, without measuring and without torch
    plan = ["plan", "--model", str(folder), "--nodes", "1x2", "--calibration", str(output), "--lengths", "commoncrawl"]
    assert main([*plan, "--longest", "128", "--mini-batch", "16", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["calibrated"] == found.measured_at
    assert data["dtype"] == "float32"
    assert main([*plan, "--longest", "128", "--mini-batch", "16"]) == 0
    assert "Times are from a calibration" in capsys.readouterr().out
    assert main([*plan, "--longest", "128", "--mini-batch", "16", "--recompute", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert all(bucket["strategy"].endswith("+rc") for bucket in again["buckets"])
    assert again["seconds"] > data["seconds"]
    for wrong, message in (
        (["--nodes", "1x4"], "processes a node 2 instead of 4"),
        (["--nodes", "2x2"], "no links between nodes"),
        (["--dtype", "bfloat16"], "dtype float32 instead of bfloat16"),
        (["--model", "llama2-7b"], "hidden size 32 instead of 4096"),
    ):
        assert main([*plan, *wrong]) == 2
        assert message in capsys.readouterr().err

    # under a launcher every process is a rank, and the first one prints
    first, second = run_ranks(2, launched, str(folder), env={"HF_HOTSPA_CACHE": str(cache)})
    assert json.loads(first) == json.loads(json.dumps(found.to_dict()))
    assert second == ""


def launched(rank: int, world_size: int, model: str) -> str:
    """What a rank of a launcher prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["calibrate", "--model", model, "--json"]) == 0
    return out.getvalue()


def test_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOTSPA_CACHE", str(tmp_path))
    config().save_pretrained(tmp_path / "model")
    for arguments, message in (
        (["--model", "nowhere"], "no model preset"),
        (["--model", str(tmp_path / "model"), "--dtype", "float7"], "float7"),
    ):
        assert main(["calibrate", *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["calibrate", "--model", str(tmp_path / "model"), "--processes", "0"])
    assert "argument --processes: '0' is not a whole number of at least 1" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["calibrate", "--model", str(tmp_path / "model"), "--processes", "2"]) == 2
    assert "the launcher started 3" in capsys.readouterr().err
