"""The launch files of examples/: Accelerate reads them as they are meant, and slurm.sh starts the right processes."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CONFIGS = EXAMPLES / "accelerate_configs"
WORLDS = {"cpu_4": (1, 4), "one_node_8_gpus": (1, 8), "two_nodes_16_gpus": (2, 16)}


def parsed(words):
    """What `accelerate launch` makes of its arguments, configuration file included, when it starts processes."""
    args = launch_command_parser().parse_args(words)
    args, defaults, _ = _validate_launch_command(args)
    return args, defaults


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS.iterdir()])
def test_the_world_of_a_configuration(name):
    path = CONFIGS / f"{name}.yaml"
    head = path.read_text().partition("compute_environment")[0]
    assert f"accelerate launch --config_file examples/accelerate_configs/{name}.yaml" in head
    assert ("--use_cpu" in head) == (name == "cpu_4")
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    assert config.distributed_type == DistributedType.MULTI_GPU
    assert (config.num_machines, config.num_processes) == WORLDS[name]
    where = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1"] if config.num_machines > 1 else []
    args, _ = parsed(["--config_file", str(path), *where, "script.py", "--use_cpu"])
    assert args.multi_gpu  # else accelerate starts one process, whatever num_processes says
    assert not args.cpu
    environment = prepare_multi_gpu_env(args)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
    machines, processes = WORLDS[name]
    assert int(args.nproc_per_node) == processes // machines
    if machines > 1:
        assert (args.nnodes, args.node_rank) == ("2", 1)
        assert (args.rdzv_backend, args.rdzv_endpoint) == ("static", "10.0.0.1:29500")
    assert args.training_script_args == ["--use_cpu"]


# ---- slurm.sh, with stand-ins for what only a cluster has

STUBS = {
    "scontrol": 'printf "node-a\\nnode-b\\n"',
    # runs the step on every node, as srun does, one after the other
    "srun": 'shift; for n in 0 1; do SLURM_NODEID=$n "$@"; done',
    "accelerate": f'{sys.executable} -c "import json, os, sys; '
    'print(json.dumps([sys.argv[1:], dict(os.environ)]))" "$@"',
}


def run_slurm(tmp_path, *words, **environment):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in STUBS.items():
        stub = folder / name
        stub.write_text(f"#!/usr/bin/env bash\n{body}\n")
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sh"), *words],
        cwd=EXAMPLES.parent,
        env={
            "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "64", "SLURM_GPUS_ON_NODE": "8", **environment,
        },
        capture_output=True,
        text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_slurm_starts_one_launcher_a_node(tmp_path):
    assert subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sh")], check=False).returncode == 0
    nodes = run_slurm(tmp_path, "--model", "a model", "--max_steps", "7", OUTPUT_DIR=str(tmp_path / "out"))
    assert len(nodes) == 2
    for rank, (words, environment) in enumerate(nodes):
        assert words[0] == "launch"
        args, _ = parsed(words[1:])
        assert args.multi_gpu
        assert (args.num_machines, args.num_processes, args.machine_rank) == (2, 16, rank)
        assert (args.main_process_ip, args.main_process_port) == ("node-a", 20000 + 123456 % 20000)
        assert args.training_script == "examples/finetune.py"
        script = args.training_script_args
        assert script == ["--bf16", "--output_dir", str(tmp_path / "out"), "--model", "a model", "--max_steps", "7"]
        assert all(
            word[2:] in {*HotSPaTrainingArguments.__dataclass_fields__, "model"}
            for word in script
            if word.startswith("--")
        )
        assert environment["OMP_NUM_THREADS"] == "8"
        assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < 120  # before Slurm kills
        prepare_multi_gpu_env(args)
        assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("8", "2", rank)
        assert args.rdzv_endpoint == f"node-a:{20000 + 123456 % 20000}"


def test_slurm_goes_on_where_there_is_a_checkpoint(tmp_path):
    (tmp_path / "out" / "checkpoint-20").mkdir(parents=True)
    for words, _ in run_slurm(tmp_path, "--max_steps", "7", OUTPUT_DIR=str(tmp_path / "out")):
        assert words[-2:] == ["--resume_from_checkpoint", "True"]
