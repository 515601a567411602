"""`hf-hotspa run` without a run: its command line, what it takes out of environments and configs, and when it does nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hf_hotspa.commands import run_program as run
from hf_hotspa.commands.front import launch
from hf_hotspa.commands.front.programs import HOOKS, adapt_axolotl, restore_forwards
from hf_hotspa.errors import HotspaError
from hf_hotspa.run_flags import VARIABLE, given_flags
from tests.contract.layers import ROOT


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_asked", {})


def test_flags_with_and_without_their_prefix() -> None:
    words = [
        "--strategies",
        "dp2:64,tp2:512",
        "--hotspa-offload=master",
        "--mini_batch_size",
        "12",
        "--no-report",
        "--overlong",
        "split",
    ]
    assert run.parse_flags(words) == {
        "hotspa_strategies": "dp2:64,tp2:512", "hotspa_offload": "master", "hotspa_mini_batch_size": 12, "hotspa_report": False,
        "hotspa_overlong": "split",
    }  # fmt: skip
    assert run.parse_flags(["--overlong", "error"]) == {}  # the default


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--strategis", "dp2:64"], "did you mean --strategies"),
        (["--mini-batch-size", "many"], "many"),
        (["--strategies", "dp2"], "dp2"),
        (["--overlong", "cut"], "cut"),
        (["train.py"], "behind --"),
        (["--learning_rate", "1e-4"], "learning_rate"),
    ],
)
def test_wrong_flags_are_named_before_anything_starts(words: list[str], named: str) -> None:
    with pytest.raises(HotspaError, match=named):
        run.parse_flags(words)


def hotspa(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    more = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])), **env}
    return subprocess.run(
        [sys.executable, "-m", "hf_hotspa.cli", "run", *words],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_what_trains_nothing_stays_as_it_is(tmp_path: Path) -> None:
    """Nothing is imported, the environment's own sitecustomize runs, and the exit code is the command's."""
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.theirs = 1\n")
    program = (
        "import sys, json, os; heavy = [m for m in ('torch', 'transformers', 'hf_hotspa.trainer') if m in sys.modules];"
        "print(theirs, heavy, sys.argv[1:]); sys.exit(int(sys.argv[1]))"
    )
    path = os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = hotspa("--", sys.executable, "-c", program, "0", "--", "x", PYTHONPATH=path)
    assert (done.returncode, done.stdout.strip()) == (0, "1 [] ['0', '--', 'x']"), done.stderr
    assert "no Trainer was made" in done.stderr
    done = hotspa("--", sys.executable, "-c", program, "7", PYTHONPATH=path)
    assert done.returncode == 7
    assert "no Trainer" not in done.stderr


def test_without_a_command_or_with_an_unknown_one() -> None:
    done = hotspa("--")
    assert done.returncode == 2
    assert "hf-hotspa run -- python train.py" in done.stderr
    done = hotspa("--", "no-such-program-here")
    assert done.returncode == 127
    assert "no-such-program-here" in done.stderr
    assert "usage: hf-hotspa run" in hotspa("--help").stdout


def test_a_signal_reaches_the_command(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = f"import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); open({str(ready)!r}, 'w'); time.sleep(100)"
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_hotspa.cli", "run", "--", sys.executable, "-c", program], cwd=ROOT
    )
    end = time.monotonic() + 100
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 3


def test_flags_travel_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_flags() == {}
    monkeypatch.setenv(VARIABLE, json.dumps({"flags": {"hotspa_overlong": "drop"}, "trained": "x"}))
    assert given_flags() == {"hotspa_overlong": "drop"}


# -- environments -----------------------------------------------------------------------------------------------------


def asked_by(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Any:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launch.take()
    args = SimpleNamespace(fsdp=None, fsdp_config=None, deepspeed=None)
    launch.give_to(args)
    return args


def test_fsdp_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    args = asked_by(
        monkeypatch, ACCELERATE_USE_FSDP="true", FSDP_RESHARD_AFTER_FORWARD="true", FSDP_OFFLOAD_PARAMS="true"
    )
    assert "ACCELERATE_USE_FSDP" not in os.environ
    assert (args.fsdp, args.fsdp_config) == (True, {"reshard_after_forward": "true", "offload_params": True})


def test_fsdp_that_shards_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    args = asked_by(monkeypatch, ACCELERATE_USE_FSDP="1", FSDP_SHARDING_STRATEGY="SHARD_GRAD_OP")
    assert args.fsdp_config["reshard_after_forward"] == "shard_grad_op"


@pytest.mark.parametrize("file", ["ds.json", None])
def test_deepspeed_of_the_environment(file: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": file} if file else {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    args = asked_by(monkeypatch, ACCELERATE_USE_DEEPSPEED="true", **more)
    assert args.deepspeed == (file or {"zero_optimization": {"stage": 3}})
    assert args.fsdp is None


def test_what_is_off_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    args = asked_by(
        monkeypatch, ACCELERATE_USE_FSDP="false", ACCELERATE_DYNAMO_BACKEND="NO", ACCELERATE_USE_DEEPSPEED="0"
    )
    assert vars(args) == {"fsdp": None, "fsdp_config": None, "deepspeed": None}


def test_what_the_arguments_say_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    launch.take()
    args = SimpleNamespace(fsdp=None, fsdp_config=None, deepspeed="mine.json")
    launch.give_to(args)
    assert args.fsdp is None


def test_arguments_of_front_ends(capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "use_liger_kernel": True,
        "fp16": True,
        "bf16": False,
        "activation_offloading": True,
        "torch_compile": False,
    }
    launch.replace(values)
    assert values == {
        "use_liger_kernel": False, "fp16": False, "bf16": False, "activation_offloading": False, "torch_compile": False,
        "gradient_checkpointing": True,
    }  # fmt: skip
    said = capsys.readouterr().err
    assert all(name in said for name in ("use_liger_kernel", "fp16", "activation_offloading"))
    of_axolotl: dict[str, Any] = {"activation_offloading": None}  # its no
    launch.replace(of_axolotl)
    assert of_axolotl == {"activation_offloading": False}


# -- programs ---------------------------------------------------------------------------------------------------------


def test_a_config_of_axolotl() -> None:
    cfg = {
        "plugins": ["axolotl.integrations.liger.LigerPlugin", "mine.Plugin"], "liger_rope": True, "cut_cross_entropy": True,
        "chunked_cross_entropy": True, "adapter": "lora", "lora_mlp_kernel": True, "gradient_checkpointing": "offload",
        "tensor_parallel_size": 2, "context_parallel_size": 1, "fsdp_version": 2, "learning_rate": 1e-4, "torch_compile": True,
        "fsdp_config": {"reshard_after_forward": True, "activation_checkpointing": True}, "deepspeed": None,
    }  # fmt: skip
    adapt_axolotl(cfg)
    assert cfg == {
        "plugins": ["mine.Plugin"], "adapter": "lora", "lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False, "lora_embedding_kernel": False,
        "gradient_checkpointing": True, "learning_rate": 1e-4, "experimental_skip_move_to_device": True,
    }  # fmt: skip
    args = SimpleNamespace(fsdp=None, fsdp_config=None, deepspeed=None)
    launch.give_to(args)
    assert (args.fsdp, args.fsdp_config, args.deepspeed) == (True, {"reshard_after_forward": True}, None)


def test_a_config_of_axolotl_with_deepspeed() -> None:
    cfg: dict[str, Any] = {"deepspeed": "deepspeed_configs/zero3.json"}
    adapt_axolotl(cfg)
    assert "deepspeed" not in cfg
    assert cfg["experimental_skip_move_to_device"] is True
    args = SimpleNamespace(fsdp=None, fsdp_config=None, deepspeed=None)
    launch.give_to(args)
    assert args.deepspeed == "deepspeed_configs/zero3.json"


def test_forwards_that_move_their_input_are_taken_back() -> None:
    def keep_device_forward(self: Any, x: Any) -> Any:
        return self.forward_origin(x)

    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    moving, other = layers
    moving.forward_origin = moving.forward
    moving.forward = MethodType(keep_device_forward, moving)
    other.forward = lambda x: x  # somebody else's stays
    restore_forwards(layers)
    restore_forwards("model")
    assert not {"forward", "forward_origin"} & vars(moving).keys()
    assert "forward" in vars(other)


def test_functions_that_patch_models_do_nothing() -> None:
    module: Any = ModuleType("liger_kernel.transformers.monkey_patch")

    def apply_liger_kernel_to_llama(model: Any = None) -> None:
        raise AssertionError

    def other() -> int:
        return 3

    module.apply_liger_kernel_to_llama, module.other = apply_liger_kernel_to_llama, other
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_liger_kernel_to_llama}
    HOOKS[module.__name__](module)
    assert module.apply_liger_kernel_to_llama(5) == 5
    assert module.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"](model=6) == 6
    assert module.other() == 3


def test_none_means_no(tmp_path: Path) -> None:
    """Front ends pass on every field of theirs, also those that a config leaves out."""
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.given_arguments import refuse_arguments

    args = HotSPaTrainingArguments(str(tmp_path), use_cpu=True, hotspa_strategies="dp1:64")
    for name in ("fp16", "torch_compile", "use_liger_kernel", "save_on_each_node"):
        setattr(args, name, None)
    refuse_arguments(args)
    args.fp16 = True
    with pytest.raises(HotspaError, match="fp16=True"):
        refuse_arguments(args)
