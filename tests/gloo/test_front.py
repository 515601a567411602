"""`hf-hotspa run`: unchanged programs print the same losses, norms and weights under every launcher."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import front_program
from tests.contract.layers import ROOT
from tests.harness import run_ranks

pytestmark = pytest.mark.gloo

HERE = [sys.executable, "-m", "tests.front_program"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node",
    "2",
    "-m",
    "tests.front_program",
]
ACCELERATE = [
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "2", "--mixed_precision",
    "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "tests.front_program",
]  # fmt: skip
DOOR = [sys.executable, "-m", "hf_hotspa.cli", "run", "--strategies", "dp2:16,tp2:512", "--no-report", "--"]
ALONE = [*DOOR[:4], "--strategies", "dp1:512", "--no-report"]
LAUNCHERS = {"torchrun": TORCHRUN, "accelerate": ACCELERATE}


def start(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    env = {**os.environ, "FRONT_FOLDER": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)


def results(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return read(done.stdout)


def read(text: str) -> dict[str, Any]:
    lines = [json.loads(line.removeprefix("RESULT ")) for line in text.splitlines() if line.startswith("RESULT ")]
    return {line["name"]: line for line in lines}


ALL = ["plain", "subclass", "by_class", "sft", "dpo"]


def by_itself(rank: int, world_size: int, folder: str) -> str:
    os.environ["FRONT_FOLDER"] = folder
    with contextlib.redirect_stdout(io.StringIO()) as out:
        front_program.main(ALL)
    return out.getvalue()


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In a process that has imported the libraries already."""
    [text] = run_ranks(1, by_itself, str(tmp_path_factory.mktemp("stock")))
    return read(text.replace("tests.front_program.", "__main__."))


def check(own: dict[str, Any], stock: dict[str, Any], names: list[str]) -> None:
    assert list(own) == names
    for name in names:
        ours, theirs = own[name], stock[name]
        assert len(ours["logs"]) == len(theirs["logs"]) == 3
        for one, other in zip(ours["logs"], theirs["logs"], strict=True):
            assert one.keys() == other.keys()
            for key, value in other.items():  # transformers and TRL cast logits to fp32
                assert one[key] == pytest.approx(value, rel=1e-6, abs=1e-6), (name, key)
        assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-8)
        assert (ours["kind"], ours["saved"]) == (theirs["kind"], theirs["saved"])
        assert "SwitchedMixin" in ours["order"]


@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_an_unchanged_program_under_a_launcher(launcher: str, stock: dict[str, Any], tmp_path: Path) -> None:
    names = [name for name in ALL if launcher == "torchrun" or name not in ("by_class", "dpo")]
    done = start([*DOOR, *LAUNCHERS[launcher], *names, "regression"], tmp_path / "out")
    own = results(done)
    assert "SwitchedMixin" in own.pop("regression")["order"]  # made before its model is known, and left alone
    check(own, stock, names)
    order = own["subclass"]["order"]
    assert order.index("Watching") < order.index("SwitchedMixin") < order.index("Trainer")
    assert {"log", "save_model", "_save"} <= set(own["subclass"]["seen"])
    assert own["subclass"]["seen"].count("save_model") == stock["subclass"]["seen"].count("save_model")
    assert done.stderr.count("__main__.Mine trains over a switched model") == 1
    assert "dp2:16" in done.stdout


@pytest.mark.slow
def test_settings_of_the_environment(stock: dict[str, Any], tmp_path: Path) -> None:
    """FSDP, torch.compile and fp16 of accelerate's environment are taken over."""
    asked = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_MIXED_PRECISION": "fp16",
    }
    settings = [f"{name}={value}" for name, value in asked.items()]
    door = [*DOOR[:4], "--strategies", "dp1:16,dp1+rc:512", "--no-report", "--", "env"]
    done = start([*door, *settings, *HERE, "plain"], tmp_path / "one")
    check(results(done), stock, ["plain"])
    assert "dp1+z3" in done.stdout
    for what in ("FSDP", "torch.compile", "fp16"):
        assert done.stderr.count(f"the environment asks for {what}") == 1


def of_deepspeed(tmp_path: Path, *programs: str) -> subprocess.CompletedProcess[str]:
    config = {
        "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    }  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(config))
    asked = json.dumps({"deepspeed": str(tmp_path / "ds.json")})
    return start([*ALONE, "--", *HERE, *programs], tmp_path / "one", FRONT_ARGUMENTS=asked)


@pytest.mark.slow
def test_a_config_of_deepspeed(stock: dict[str, Any], tmp_path: Path) -> None:
    one = of_deepspeed(tmp_path, "plain", "from_folder")
    check({"plain": results(one)["plain"]}, stock, ["plain"])
    assert "dp1+z3" in one.stdout
    assert "dp1+rc+z3" in one.stdout  # `gradient_checkpointing_enable` of the model


@pytest.mark.slow
def test_a_model_whose_weights_are_read_by_shares(tmp_path: Path) -> None:
    own = results(of_deepspeed(tmp_path, "from_folder"))
    model = f"{tmp_path / 'one'}-model"
    two = start([*ALONE, "--model-path", model, "--", *HERE, "from_folder"], tmp_path / "two", FRONT_MODEL=model)
    assert f"{model}: each process reads its share of the weights" in two.stderr
    assert results(two)["from_folder"]["logs"] == own["from_folder"]["logs"]
