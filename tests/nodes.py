"""Two nodes on one machine: what starts jobs on them, and what takes a node away from a job.

Where the machine allows it, a node is a set of namespaces: its own network (one cable joins the two), its own host name and
`/etc/hosts`. Else it is an address of the loopback interface, with the host name of the machine; then no cable can be cut.
`tests/node_trials.py` takes nodes away from jobs.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
NAMES = ("node-a", "node-b")
_ENTER = ("nsenter", "-U", "-n", "-u", "-m", "--preserve-credentials", "-t")
_SUBNET = "10.77.0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Nodes:
    """Two nodes; a context manager.

    Args:
        namespaces: Whether to make namespaces; None for where the machine allows it.

    Attributes:
        real: Whether they are namespaces.
        addresses: Of the nodes.
    """

    def __init__(self, namespaces: bool | None = None) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="nodes-"))
        self.addresses, self.real = ("127.0.0.2", "127.0.0.3"), False
        if namespaces is not False:
            try:
                self._make()
                self.addresses, self.real = (f"{_SUBNET}.1", f"{_SUBNET}.2"), True
            except (OSError, subprocess.SubprocessError):
                self._end_holders()
                if namespaces:
                    raise

    @property
    def holders(self) -> list[int]:
        """A process in the namespaces of each node; none without namespaces."""
        return [holder.pid for holder in self._holders]

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        self._end_holders()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make(self) -> None:
        hosts = self._folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{_SUBNET}.{n + 1} {name}" for n, name in enumerate(NAMES))]
        hosts.write_text("\n".join([*lines, ""]))
        for name in NAMES:
            # the second one lives in the user namespace of the first, whose root may join their networks
            enter = [*_ENTER[:2], *_ENTER[5:], str(self._holders[0].pid)] if self._holders else []
            user = [] if self._holders else ["-r"]
            ready = (
                f"hostname {name} && mount --bind {hosts} /etc/hosts && ip link set lo up && echo && exec sleep 100000"
            )
            holder = subprocess.Popen(
                [*enter, "unshare", *user, "-n", "-u", "-m", "sh", "-c", ready],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self._holders.append(holder)
            assert holder.stdout is not None
            if holder.stdout.readline() != b"\n":
                raise OSError("no namespaces here")
        self._ip(0, f"link add eth-a type veth peer name eth-b netns {self._holders[1].pid}")
        for node, end in enumerate("ab"):
            self._ip(node, f"addr add {_SUBNET}.{node + 1}/24 dev eth-{end}")
            self._ip(node, f"link set eth-{end} up")

    def _ip(self, node: int, words: str) -> None:
        subprocess.run(self.on(node, ["ip", *words.split()]), check=True, capture_output=True, timeout=20)

    def _end_holders(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
        self._holders.clear()

    def on(self, node: int, words: Sequence[str]) -> list[str]:
        """The command that runs a command on a node; it becomes that command, with the same process id."""
        if not self._holders:
            return list(words)
        # who enters a mount namespace stands in its root
        return [*_ENTER, str(self._holders[node].pid), "env", "-C", str(ROOT), *words]

    def environment(self, node: int) -> dict[str, str]:
        """What the processes of a node need."""
        interface = f"eth-{'ab'[node]}" if self.real else "lo"
        return {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
                "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1", "HOTSPA_TEST_NODE": str(node)}  # fmt: skip

    def cut(self, node: int) -> None:
        """Pulls the cable out of a node."""
        self._ip(node, f"link set eth-{'ab'[node]} down")

    def mend(self, node: int) -> None:
        self._ip(node, f"link set eth-{'ab'[node]} up")


def all_end(processes: Sequence[psutil.Process], seconds: float) -> bool:
    """Whether all end in time. One that has ended counts, too, where its launcher hangs and does not ask for its exit code."""
    deadline = time.monotonic() + seconds
    while any(map(_runs, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


# -- ways of starting a job -------------------------------------------------------------------------------------------

PROCESSES = 2
"""Of each node."""


def accelerate(nodes: Nodes, port: int, script: Sequence[str], alive: Sequence[int]) -> list[list[str]]:
    """`accelerate launch` on each node."""
    count = len(alive)
    line = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", str(count),
            "--num_processes", str(PROCESSES * count), "--mixed_precision", "no", "--dynamo_backend", "no",
            "--main_process_ip", nodes.addresses[alive[0]], "--main_process_port", str(port)]  # fmt: skip
    return [[*line, "--machine_rank", str(rank), *script] for rank in range(count)]


def torchrun(
    nodes: Nodes, port: int, script: Sequence[str], alive: Sequence[int], nnodes: str | None = None
) -> list[list[str]]:
    """`torchrun` on each node, which meet at a port of the first one."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nnodes or str(len(alive)), "--nproc_per_node",
            str(PROCESSES), "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{nodes.addresses[alive[0]]}:{port}",
            "--rdzv_id", str(port)]  # fmt: skip
    return [[*line, "--local_addr", nodes.addresses[node], *script] for node in alive]


def restarting(nodes: Nodes, port: int, script: Sequence[str], alive: Sequence[int]) -> list[list[str]]:
    """`torchrun` that goes on with one node where the other is gone."""
    lines = torchrun(nodes, port, script, alive, "1:2")
    more = ["--max-restarts", "2", "--rdzv_conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"]
    return [[*line[:3], *more, *line[3:]] for line in lines]


WAYS = {"accelerate": accelerate, "torchrun": torchrun, "restarting": restarting}

_SRUN = """#!/usr/bin/env bash
# Stands in for srun: runs the step on every node at once; one that fails ends all (--kill-on-bad-exit).
shift
IFS=';' read -ra enter <<< "$HOTSPA_TEST_ENTER"
pids=()
for n in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$n ${enter[$n]} "$@" & pids+=($!)
done
code=0
for _ in "${pids[@]}"; do
    wait -n || { code=$?; kill "${pids[@]}" 2>/dev/null; (sleep 10; kill -9 "${pids[@]}" 2>/dev/null) & break; }
done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""


@dataclass
class Job:
    """A job that runs on nodes.

    Attributes:
        launchers: The process that starts the others, of each node; with Slurm they are children of one process.
        log: What all of them print.
    """

    nodes: Nodes
    log: Path
    launchers: list[psutil.Process] = field(default_factory=list)
    step: subprocess.Popen[bytes] | None = None

    def processes(self, node: int) -> list[psutil.Process]:
        """All processes of a node, the launcher first."""
        launcher = self.launchers[node]
        with contextlib.suppress(psutil.NoSuchProcess):
            return [launcher, *launcher.children(recursive=True)]
        return []

    def send(self, node: int, number: int) -> list[psutil.Process]:
        """Sends a signal to all processes of a node, which it returns."""
        found = self.processes(node)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return found

    def wait(self, node: int, seconds: float) -> bool:
        """Waits for the processes of a node; whether all have ended."""
        found = self.processes(node)
        return not psutil.wait_procs(found, seconds)[1] if found else True

    def code(self, seconds: float) -> int:
        """The first exit code of a launcher that is not 0, once all have ended."""
        codes = [int(launcher.wait(seconds) or 0) for launcher in self.launchers]
        if self.step is not None:
            codes.append(self.step.wait(seconds))
        return next((code for code in codes if code), 0)

    def said(self) -> str:
        """What all of them have printed."""
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        left = [process for node in range(len(self.launchers)) for process in self.processes(node)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, 10)
        if self.step is not None:
            self.step.kill()
            self.step.wait()


@contextlib.contextmanager
def job(nodes: Nodes, way: str, folder: Path, script: Sequence[str], alive: Sequence[int] = (0, 1)) -> Iterator[Job]:
    """Starts a job; nothing of it is left afterwards.

    Args:
        way: A key of `WAYS`, or `slurm`, which runs `examples/slurm.sh`; its script is `examples/finetune.py`.
        folder: For the log, and the output under Slurm.
        script: The script and its arguments; the arguments alone for Slurm.
        alive: The nodes to use, the first one with rank 0.
    """
    port, log = free_port(), folder / f"log-{way}-{time.time_ns()}.txt"
    running = Job(nodes, log)
    try:
        with log.open("wb") as out:
            if way == "slurm":
                _start_slurm(running, folder, script, alive, out)
            else:
                for node, line in zip(alive, WAYS[way](nodes, port, script, alive), strict=True):
                    environment = {**os.environ, **nodes.environment(node)}
                    words = nodes.on(node, line)
                    started = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, stderr=out)
                    running.launchers.append(psutil.Process(started.pid))
        yield running
    finally:
        running.end()


def _start_slurm(running: Job, folder: Path, words: Sequence[str], alive: Sequence[int], out: BinaryIO) -> None:
    nodes, stubs = running.nodes, folder / "stubs"
    stubs.mkdir(exist_ok=True)
    names = [NAMES[node] if nodes.real else nodes.addresses[node] for node in alive]
    enter = ["env " + " ".join(f"{k}={v}" for k, v in nodes.environment(node).items()) for node in alive]
    enter = [" ".join(nodes.on(node, words.split())) for node, words in zip(alive, enter, strict=True)]
    for name, body in {"scontrol": "#!/bin/sh\n" + "".join(f"echo {n}\n" for n in names), "srun": _SRUN}.items():
        (stubs / name).write_text(body)
        (stubs / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NUM_NODES": str(len(alive)),
        "SLURM_CPUS_PER_TASK": str(PROCESSES), "SLURM_GPUS_ON_NODE": str(PROCESSES), "HOTSPA_TEST_ENTER": ";".join(enter),
        "OUTPUT_DIR": str(folder / "out"), "HF_HOTSPA_CACHE": str(folder / "cache"),
    }  # fmt: skip
    running.step = subprocess.Popen(
        ["bash", "examples/slurm.sh", *words], cwd=ROOT, env=environment, stdout=out, stderr=out
    )
    parent, deadline = psutil.Process(running.step.pid), time.monotonic() + 60
    while len(running.launchers) < len(alive):
        assert running.step.poll() is None, running.said()
        assert time.monotonic() < deadline
        found = {_machine_rank(p): p for p in reversed(parent.children(recursive=True))}  # parents last
        found.pop(None, None)
        if len(found) == len(alive):
            running.launchers = [found[rank] for rank in map(str, range(len(alive)))]
        time.sleep(0.1)


def _machine_rank(process: psutil.Process) -> str | None:
    """Which node's `accelerate launch` a process is; None for others."""
    with contextlib.suppress(psutil.Error):
        line = process.cmdline()
        if line[1:2] and line[1].endswith("/accelerate") and "--machine_rank" in line:
            return line[line.index("--machine_rank") + 1]
    return None
