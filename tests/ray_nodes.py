"""A Ray cluster of two nodes (`tests/nodes.py`), and jobs of `examples/ray_train.py` on it."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.nodes import PROCESSES, ROOT, Job, Nodes, free_port

# the default `ray.data` task takes a core, and a process that trains two: one is left on each node
CORES, OF_A_PROCESS = 2 * PROCESSES + 1, 2
_LIMIT_S = 60.0


@contextlib.contextmanager
def ray_job(nodes: Nodes, folder: Path, words: Sequence[str]) -> Iterator[Job]:
    """A job on a cluster of its own; nothing of it is left afterwards. The first node has the head of Ray and what starts the job.

    Args:
        words: The arguments of `examples/ray_train.py`.
    """
    session = Path(tempfile.mkdtemp(prefix="ray-"))  # paths of sockets may not be long
    running = Job(nodes, folder / "log-ray.txt")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environments = [{
        **os.environ, **nodes.environment(node), "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1", "RAY_DEDUP_LOGS": "0", "RAY_TRAIN_V2_ENABLED": "1",
    } for node in (0, 1)]  # fmt: skip
    address = f"{nodes.addresses[0]}:{free_port()}"
    first = ["--head", "--port", address.rpartition(":")[2], "--include-dashboard=false", "--temp-dir", str(session)]
    try:
        with running.log.open("wb") as out:
            for node, which in enumerate([first, ["--address", address]]):
                line = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", str(CORES),
                        "--node-ip-address", nodes.addresses[node], "--object-store-memory", "100000000", *which]  # fmt: skip
                started = subprocess.Popen(
                    nodes.on(node, line), cwd=ROOT, env=environments[node], stdout=out, stderr=out
                )
                running.launchers.append(psutil.Process(started.pid))
                _await_raylet(running, node)
            job = [sys.executable, "examples/ray_train.py", "--cpus", str(OF_A_PROCESS), *words]
            environment = {**environments[0], "RAY_ADDRESS": address}
            running.step = subprocess.Popen(nodes.on(0, job), cwd=ROOT, env=environment, stdout=out, stderr=out)
        yield running
    finally:
        running.end()
        shutil.rmtree(session, ignore_errors=True)


def workers(running: Job, node: int) -> list[psutil.Process]:
    """The processes of a node that train."""
    return [p for p in running.processes(node) if _name(p).startswith("ray::RayTrainWorker")]


def _await_raylet(running: Job, node: int) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not any("raylet" in _name(p) for p in running.processes(node)):
        assert time.monotonic() < deadline, running.said()
        time.sleep(0.2)
    time.sleep(2)


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()[:1])
    return ""
