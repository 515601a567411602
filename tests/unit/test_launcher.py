"""What launchers say in the environment: processes that were meant and not started, layouts and dtypes of others."""

import psutil  # type: ignore[import-untyped]
import pytest

from hf_hotspa.errors import LaunchError, UnsupportedError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.given_arguments import check_processes

ONE_PROCESS = {
    "ACCELERATE_USE_CPU": "True",
    "ACCELERATE_MIXED_PRECISION": "no",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
"""What `accelerate launch --cpu --num_processes 2` sets, which starts one process."""


class Parent:
    def __init__(self, line, folder="/"):
        self._words, self._folder = line.split(), folder

    def cmdline(self):
        return self._words

    def cwd(self):
        return str(self._folder)


class Denied:
    def cmdline(self):
        raise psutil.AccessDenied(1)


def arguments(tmp_path, **changes):
    return HotSPaTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **changes)


@pytest.fixture
def launched(monkeypatch):
    """Sets the environment, and the command lines of the parents."""

    def launch(environment, *parents):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(psutil.Process, "parents", lambda self: list(parents))

    return launch


@pytest.mark.parametrize("strategies", ["auto", "dp1:64"])
@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("/bin/python /bin/accelerate launch --cpu --num_processes 2 script.py", "2"),
        ("python -m accelerate.commands.launch --num-processes=4 script.py", "4"),
        ("accelerate launch --config_file cpu.yaml script.py", "3"),
        ("accelerate launch --num_machines 2 --main_process_ip 10.0.0.1 script.py", "several"),
        ("python start.py", "several"),  # which called accelerate's launcher itself
    ],
)
def test_one_process_where_more_were_meant(line, number, strategies, launched, tmp_path):
    (tmp_path / "cpu.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_machines: 1\nnum_processes: 3\n"
        "use_cpu: true\nmain_training_function: main\nmixed_precision: 'no'\n"
    )
    launched(ONE_PROCESS, Denied(), Parent("sh -c x"), Parent(line, tmp_path))
    with pytest.raises(LaunchError, match=f"told to start {number} processes, and has started one") as caught:
        arguments(tmp_path, hotspa_strategies=strategies)
    wanted = "N" if number == "several" else number
    assert f"accelerate launch --multi_gpu --num_processes {wanted} SCRIPT" in str(caught.value)


def test_one_process_where_one_was_meant(launched, tmp_path):
    # an address that a job script has exported says nothing of how many processes accelerate was to start
    launched(ONE_PROCESS, Parent("accelerate launch --cpu --num_processes 1 script.py", tmp_path))
    assert arguments(tmp_path).world_size == 1
    launched(ONE_PROCESS, Parent("accelerate launch --cpu script.py", tmp_path))
    assert arguments(tmp_path).world_size == 1


def test_processes_that_would_train_alone(monkeypatch):
    """What transformers makes of torchrun's processes without use_cpu, where there is no accelerator."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_processes(2)
    with pytest.raises(LaunchError, match="2 processes were started, and each of them would train alone") as caught:
        check_processes(1)
    assert "torchrun --nproc_per_node 2 SCRIPT --use_cpu" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ACCELERATE_USE_FSDP", "true", "FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "a parallelism_config"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend INDUCTOR"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed precision fp16"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed precision fp8"),
    ],
)
def test_what_another_would_lay_out_is_refused(variable, value, words, monkeypatch, tmp_path):
    monkeypatch.setenv(variable, value)
    with pytest.raises(UnsupportedError, match=words):
        arguments(tmp_path)


def test_bf16_of_the_launcher_is_that_of_the_arguments(monkeypatch, tmp_path):
    """As in the stock Trainer, whose Accelerator takes it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert arguments(tmp_path).bf16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    assert not arguments(tmp_path).bf16
