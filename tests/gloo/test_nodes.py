"""Two nodes: each way of starting trains what one launcher of four processes does, and plans know the nodes.

What becomes of a job that loses a node: `tests/node_trials.py`.
"""

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hf_hotspa.reporting.run_log import read_run_log
from hf_hotspa.trainer.start import Ranks
from tests.harness import run_ranks
from tests.node_steps import launch, steps
from tests.node_trials import flags, make_inputs, ray_words, script
from tests.nodes import NAMES, ROOT, Nodes, free_port, job
from tests.ray_nodes import ray_job

pytestmark = pytest.mark.gloo

STEPS, SAVED = 5, 3


def test_two_launchers_train_what_one_does():
    """The quick form: torchrun's agents, with processes that need no imports."""
    with Nodes() as nodes:
        holders, environments = nodes.holders, [nodes.environment(node) for node in (0, 1)]
        both = run_ranks(2, launch, holders, environments, f"{nodes.addresses[0]}:{free_port()}", init=False)
        names = NAMES if nodes.real else None
    ranks = [both[rank // 2][rank] for rank in range(4)]
    one = run_ranks(4, steps)
    assert [rank["losses"] for rank in ranks] == [pytest.approx(rank["losses"], abs=1e-6) for rank in one]
    assert {rank["switches"] for rank in ranks} == {one[0]["switches"]}
    for rank in ranks:
        first, second = rank["nodes"][0], rank["nodes"][2]
        assert rank["nodes"] == (first, first, second, second)
        assert (first, second) == names if names else first != second
        assert rank["a_node"] == 2
        # what a node lacks, which is half of the weights, comes once, and is forwarded to the other rank there
        assert rank["between"] == rank["parameters"]
    assert one[0]["a_node"] == 4
    assert one[0]["between"] == 2 * one[0]["parameters"]


def timeout_of_default_group(rank, world):
    Ranks(SimpleNamespace(ddp_timeout=7, process_index=rank, world_size=world)).agreement()
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


def test_collectives_of_the_stock_trainer_end_after_ddp_timeout():
    """Transformers makes the default group without it, on CPU."""
    assert run_ranks(2, timeout_of_default_group) == [timedelta(seconds=7)] * 2


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One launcher of four processes: its folder, and the flags that name model and data."""
    folder = tmp_path_factory.mktemp("one")
    inputs = make_inputs(folder)
    one_launcher(inputs, folder / "out")
    return folder / "out", inputs


def one_launcher(inputs, output, *more):
    line = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes",
            "4", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip
    words = flags(inputs, output, 4, max_steps=STEPS, save_steps=SAVED, ddp_timeout=120)
    done = subprocess.run(
        [*line, *script("accelerate", words), *more],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def two_nodes(way, inputs, folder, *more):
    """The same on two nodes, into `folder / "out"`."""
    words = [*flags(inputs, folder / "out", 4, max_steps=STEPS, save_steps=SAVED, ddp_timeout=120), *more]
    with Nodes() as nodes:
        if way == "ray":
            running = ray_job(nodes, folder, ray_words(words, folder, 4))
        else:
            running = job(nodes, way, folder, script(way, words))
        with running as started:
            code = started.step.wait(300) if way == "ray" else started.code(300)
            assert code == 0, started.said()[-3000:]


def resumed(source, target):
    """A folder from which the run resumes at the step of the first checkpoint."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source / f"checkpoint-{SAVED}", target / f"checkpoint-{SAVED}")
    return "--resume_from_checkpoint", "True"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["accelerate", "torchrun", "slurm", "ray"])
def test_each_way_of_starting_two_nodes(way, one, tmp_path):
    if way == "ray" and find_spec("ray") is None:
        pytest.skip("no Ray here: pip install ray[train]")
    expected, inputs = one
    two_nodes(way, inputs, tmp_path)
    output = tmp_path / ("trainer" if way == "ray" else "out")
    runs = read_run_log(expected), read_run_log(output)
    losses, switches, nodes = zip(*map(figures, runs), strict=True)
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert len(losses[0]) == STEPS
    assert switches[0] == switches[1] > STEPS  # some mini-batches have both strategies
    assert nodes == (1, 2)
    # the checkpoint of one is resumed on the other
    one_launcher(inputs, tmp_path / "back", *resumed(output, tmp_path / "back"))
    assert losses_of(tmp_path / "back") == pytest.approx(losses_of(expected), abs=1e-6)
    if way == "ray":  # where jobs resume from what Ray has: see the trials
        return
    there = tmp_path / "there"
    resume = resumed(expected, there / "out")
    two_nodes(way, inputs, there, *(() if way == "slurm" else resume))  # slurm.sh finds the checkpoint
    assert losses_of(there / "out") == pytest.approx(losses_of(expected), abs=1e-6)


def figures(run):
    reports = [record.report for record in run.steps]
    return (
        [report.loss for report in reports],
        sum(len(report.phases) for report in reports),
        run.facts.machine["nodes"],
    )


def losses_of(output):
    """Those of all steps, with those before a resume."""
    log = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]
