"""Launches from a command line end with exit code 0, again and again; one process that is told to end saves all."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.checkpoint.format.manifest import verify
from tests.gloo.test_trainer_world import ROOT, SMALL, launch, make_tokenizer

pytestmark = pytest.mark.gloo


def make_data(folder):
    data = folder / "texts.jsonl"
    data.write_text("".join(f'{{"text": "{"def f(x): return x + 1 " * (1 + n % 17)}"}}\n' for n in range(24)))
    return data


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_launches_in_a_row(tmp_path):
    data, tokenizer = make_data(tmp_path), make_tokenizer(tmp_path)
    small = SMALL.replace("--max_steps 3", "--max_steps 2")
    for number in range(100):
        done = launch(
            f"{small} --use_cpu --dataset {data} --tokenizer {tokenizer} --output_dir {tmp_path / 'out'} "
            "--save_strategy no --hotspa_strategies dp4:64@128,dp2tp2:256 --hotspa_overlong split",
            processes=4,
        )
        assert done.returncode == 0, (number, done.returncode, done.stderr[-3000:])


FAILS = """
from hf_hotspa.errors import LaunchError
from hf_hotspa.uncaught import show_errors_once
show_errors_once()
raise LaunchError("the strategies need 4 processes and 2 are running", fix="start 4")
"""
SAID = "HSP-001 Launch: the strategies need 4 processes and 2 are running"


@pytest.mark.parametrize("launcher", ["torch.distributed.run", "hf_hotspa.commands.own_launcher"])
def test_a_failed_launch_ends_with_our_error_once(launcher, tmp_path):
    """`accelerate launch` starts processes by the first of them, `hf-hotspa train` by the second."""
    (tmp_path / "script.py").write_text(FAILS)  # imports no torch: what raises is in tests/unit/test_uncaught.py
    line = [sys.executable, "-m", launcher, "--standalone", "--nproc_per_node", "2", "script.py"]
    done = subprocess.run(
        line, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count(SAID) == 1
    assert "hf_hotspa/uncaught" not in done.stderr  # no traceback of ours
    if launcher == "hf_hotspa.commands.own_launcher":
        assert done.stderr == f"{SAID}\n  Fix: start 4\n"
        return
    *_, what, fix, end = done.stderr.strip().splitlines()
    assert (what.strip(), fix.strip()) == (SAID, "Fix: start 4")
    assert set(end) == {"="}
    assert "error.json" in done.stderr


SCRIPT = """
import sys
from hf_hotspa.trainer import HotSPaTrainingArguments
args = HotSPaTrainingArguments(output_dir="out", use_cpu="--use_cpu" in sys.argv)
print("it would train on", args.world_size)
"""
WRONG_LINES = {
    "accelerate launch --cpu --num_processes 2": ["HSP-001", "2 processes", "--multi_gpu --num_processes 2"],
    "accelerate launch --config_file cpu.yaml": ["HSP-001", "3 processes", "--multi_gpu --num_processes 3"],
    "torchrun --standalone --nproc_per_node 2": ["HSP-001", "2 processes", "--nproc_per_node 2 SCRIPT --use_cpu"],
    "accelerate launch --multi_gpu --num_processes 2": ["HSP-001", "2 processes", "SCRIPT --use_cpu"],
    "accelerate launch --config_file fsdp.yaml": ["HSP-030", "FSDP"],
}
CONFIG = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: {}\nnum_machines: 1\nnum_processes: {}\nuse_cpu: {}\n"
    "main_training_function: main\nmixed_precision: 'no'\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("line", WRONG_LINES)
def test_a_wrong_line_is_told_the_right_one(line, tmp_path):
    """Under auto, the default. What the environment says then is in tests/unit/test_launcher.py."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "cpu.yaml").write_text(CONFIG.format("MULTI_CPU", 3, "true"))
    (tmp_path / "fsdp.yaml").write_text(CONFIG.format("FSDP", 2, "false") + "fsdp_config:\n  fsdp_version: 2\n")
    command, *words = line.split()
    module = {"accelerate": "accelerate.commands.accelerate_cli", "torchrun": "torch.distributed.run"}[command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(
        [sys.executable, "-m", module, *words, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.returncode != 0
    assert "it would train" not in found.stdout
    for fragment in WRONG_LINES[line]:
        assert fragment in found.stderr, found.stderr[-3000:]


def ranks_of(launcher):
    """The processes that a launcher has started."""
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@contextmanager
def running(folder, line, is_ready):
    """A job of `python -m`, as soon as it is ready; what it says goes to `log`."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", *line.split()], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while not is_ready():
                assert job.poll() is None, (folder / "log").read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield job
        finally:
            job.kill()


def running_job(tmp_path):
    """A job of two processes that has saved its first checkpoint."""
    data, tokenizer = make_data(tmp_path), make_tokenizer(tmp_path)
    line = (
        "accelerate.commands.launch --multi_gpu --num_machines 1 --num_processes 2 --mixed_precision no --dynamo_backend no "
        f"--main_process_port 0 {ROOT / 'examples' / 'demo.py'} {SMALL.replace('--max_steps 3', '--max_steps 2000')} --use_cpu "
        f"--dataset {data} --tokenizer {tokenizer} --output_dir {tmp_path / 'out'} --hotspa_strategies dp2:64@128,tp2:256 "
        "--hotspa_overlong split --save_steps 5"
    )
    return running(tmp_path, line, lambda: checkpoints(tmp_path / "out"))


@pytest.mark.slow
def test_one_process_is_told_to_end_and_the_job_saves_and_ends_in_order(tmp_path):
    with running_job(tmp_path) as job:
        os.kill(ranks_of(job.pid)[-1], signal.SIGTERM)
        assert job.wait(120) == 0, (tmp_path / "log").read_text()[-3000:]
    said = (tmp_path / "log").read_text()
    assert "training stops after step" in said
    assert f"the run in one page: {tmp_path / 'out' / 'hotspa_report' / 'report.html'}" in said
    newest = checkpoints(tmp_path / "out")[0]
    verify(newest)
    assert int(newest.name.split("-")[1]) < 2000


@pytest.mark.slow
def test_ctrl_c_saves_and_says_in_one_line_how_to_resume(tmp_path):
    with running_job(tmp_path) as job:
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does: the launcher's processes have groups of their own
        assert job.wait(120) == 1
    text = (tmp_path / "log").read_text()
    assert text.count("Ctrl-C: training stops after this step and saves; press again to stop at once") == 1
    [said] = [line for line in text.splitlines() if "training stops after step" in line]
    newest = checkpoints(tmp_path / "out")[0]
    assert "Ctrl-C on rank" in said
    assert f": training stops after step {verify(newest).step}; train(resume_from" in said
    assert str(tmp_path / "out" / "hotspa_report" / "report.html") in said


LONG_STEP = """
import time
from pathlib import Path
from transformers import TrainerCallback
from tests.training_runs import make_trainer

class Long(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            Path("ready").touch()
            for _ in range(600):
                time.sleep(0.1)

make_trainer("out", 1, save_steps=100, callbacks=[Long()]).train()
"""


@pytest.mark.slow
def test_the_second_press_in_a_long_step_ends_the_job_at_once(tmp_path):
    (tmp_path / "script.py").write_text(LONG_STEP)
    line = "torch.distributed.run --standalone --nproc_per_node 1 script.py"
    with running(tmp_path, line, (tmp_path / "ready").exists) as job:
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(1.5)
        os.killpg(job.pid, signal.SIGINT)  # which torch's launcher passes on as SIGTERM
        assert job.wait(120) == 1
    said = (tmp_path / "log").read_text()
    assert said.count("Ctrl-C: training stops after this step and saves; press again to stop at once") == 1
    assert "closing signal SIGTERM" in said
    assert "forcefully exiting" not in said
    assert "training stops after step" not in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_is_told_to_end_as_a_whole_leaves_a_checkpoint():
    script = [sys.executable, str(ROOT / "benchmarks" / "sigterm_trials.py")]
    done = subprocess.run([*script, "--rounds", "1", "--victims", "agent", "tree", "--workers", "2"], cwd=ROOT,
                          capture_output=True, text=True, timeout=800)  # fmt: skip
    assert "4 of 4 left a checkpoint" in done.stdout, done.stdout + done.stderr
