"""`make gpu-all`: all that a machine with an NVIDIA GPU can show, in order of value, within 25 minutes.

    python -m tests.gpu_all                # resumes where the last call ended
    python -m tests.gpu_all --minutes 9.5  # where a command may take ten minutes: call until it says that all ended
    python -m tests.gpu_all --fresh        # from the first part on
    python -m tests.gpu_all --rehearse     # without a GPU: starts every part for a moment, in a folder of its own

Each part is one command with a limit of at most ten minutes. What it printed is in `out/gpu-all/NAME.log`, and
`out/gpu-all/state.json` is written after each part. A part that ended, well or not, is not run again by a later call on
the same commit and GPUs; one that was cut by Ctrl-C or by the end of the 25 minutes, and one that was left out, is.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import psutil  # type: ignore[import-untyped]

from hf_hotspa.whole_file import write_whole
from tests.gpu_machine import HOST, LIBRARY, NO_GPU, SHARED_ENVIRONMENT, Machine, best_setup

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "out" / "gpu-all"
MINUTES = 25.0
GRACE_S = 15.0  # between Ctrl-C and the end, for a part that writes down what it has
PASSED, FAILED, TOO_LONG, CUT, LEFT_OUT = "passed", "failed", "ran past its limit", "cut", "left out"
ENDED = (PASSED, FAILED, TOO_LONG)


@dataclass(frozen=True)
class Part:
    """One command.

    Args:
        name: Of its log, too.
        command: As for `subprocess`.
        limit_s: Seconds that it may take.
        environment: Beside this process's; None takes a variable away.
        why_not: Why this machine cannot run it; empty if it can.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str | None] = field(default_factory=dict)
    why_not: str = ""


def parts_of(machine: Machine, environment: Mapping[str, str], folder: Path) -> list[Part]:
    """The parts, in order of value. `folder`: for their results."""
    python, one_thread = sys.executable, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    library = environment.get(LIBRARY, "")
    missing = f"{LIBRARY} names {library}, which is no file" if library and not Path(library).is_file() else ""
    if not missing and not library and machine.gpus and best_setup(machine).kind == HOST:
        missing = f"{LIBRARY} names no file, and the NCCL of torch wants a GPU for every rank"
    before = environment.get("LD_PRELOAD")
    preload = {"LD_PRELOAD": f"{library}:{before}" if before else library} if library else {}
    nccl = {**one_thread, "HOTSPA_TEST_GPU": "1", **(SHARED_ENVIRONMENT if len(machine.gpus) < 2 else {}), **preload}
    torch_nccl = {LIBRARY: None}
    one_gpu = (python, "benchmarks/one_gpu.py", "--rounds", "1", "--json")
    bench: tuple[str, ...] = (python, "-m", "hf_hotspa.cli", "bench", "--quick", "--minutes", "5")
    shares = bool(library) and not missing and len(machine.gpus) == 1
    bench += ("-o", str(folder / "bench"), *(("--processes", "2") if shares else ()))
    return [
        Part("nccl", (python, "-m", "tests.gpu", "-q"), 540, nccl, missing),
        Part("wire", (python, "-m", "tests.wire_proofs", "--on", "gpu", "--ranks", "2", "4", "--quick"), 180, nccl, missing),
        Part("one-gpu", (*one_gpu, str(folder / "one_gpu.json")), 300, torch_nccl),
        *(
            Part(f"one-gpu-{kind}", (*one_gpu, str(folder / f"{kind}.json"), f"--{kind}", "--steps", "4"), 300, torch_nccl)
            for kind in ("lora", "qlora")
        ),
        Part("bench", bench, 400, nccl if shares else torch_nccl),
        Part("gloo", (python, "-m", "tests.gpu", "--on", "host", "-q"), 540, {**one_thread, **torch_nccl}),
    ]  # fmt: skip


class GpuAll:
    """Runs parts, and keeps what became of them.

    Args:
        folder: For logs and the state.
        machine: Commit and GPUs: a state of others is not resumed.
        say: Prints a line.
    """

    def __init__(self, folder: Path, machine: str, say: Callable[[str], None] = print) -> None:
        self.folder, self.machine, self.say = folder, machine, say
        self.path = folder / "state.json"
        self.results: dict[str, dict[str, object]] = {}
        with contextlib.suppress(OSError, ValueError):  # no state, or one that nothing can be read from
            state = json.loads(self.path.read_text())
            if state["machine"] == machine:
                self.results = state["parts"]

    def run(self, parts: Sequence[Part], total_s: float = 60 * MINUTES, grace_s: float = GRACE_S) -> bool:
        """Runs what has not ended, each part at most `limit_s` and all together `total_s` seconds. Returns whether all
        parts have passed or are left out."""
        end = time.monotonic() + total_s
        for part in parts:
            outcome = self.results.get(part.name, {}).get("outcome")
            if outcome in ENDED:
                self.say(f"{part.name}: {outcome} in an earlier call")
                continue
            left_s = end - time.monotonic()
            if part.why_not:
                self._keep(part, LEFT_OUT, 0.0, part.why_not)
            elif left_s < part.limit_s / 2:
                self._keep(part, CUT, 0.0, "the time of all parts was over; call again")
            elif not self._run(part, min(part.limit_s, left_s), grace_s):
                break
        return all(self.results.get(part.name, {}).get("outcome") in (PASSED, LEFT_OUT) for part in parts)

    def _run(self, part: Part, limit_s: float, grace_s: float) -> bool:
        """One part; False if Ctrl-C ended it."""
        log = self.folder / f"{part.name}.log"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.say(f"{part.name}: at most {limit_s:.0f} s: {' '.join(part.command)}")
        self._keep(part, CUT, 0.0, "did not end; call again", quiet=True)  # what stands if this process is killed
        changes = {name: value for name, value in part.environment.items() if value is not None}
        gone = {name for name, value in part.environment.items() if value is None}
        environment = {name: value for name, value in os.environ.items() if name not in gone} | changes
        began = time.monotonic()
        with log.open("a") as file:
            file.write(f"--- {datetime.now(UTC):%Y-%m-%d %H:%M:%S} {' '.join(part.command)}\n")
            file.flush()
            code, interrupted = _command(part.command, environment, file, limit_s, grace_s)
        seconds, last = time.monotonic() - began, _last_line(log)
        if interrupted:
            self._keep(part, CUT, seconds, "Ctrl-C; call again")
        elif code is None:
            whole = limit_s == part.limit_s
            self._keep(part, TOO_LONG if whole else CUT, seconds, last)
        else:
            self._keep(part, FAILED if code else PASSED, seconds, f"exit code {code}: {last}" if code else last)
        return not interrupted

    def _keep(self, part: Part, outcome: str, seconds: float, note: str, quiet: bool = False) -> None:
        result = {"outcome": outcome, "seconds": round(seconds, 1), "note": note, "command": " ".join(part.command)}
        self.results[part.name] = result
        write_whole(self.path, json.dumps({"machine": self.machine, "parts": self.results}, indent=1) + "\n")
        if not quiet:
            self.say(f"{part.name}: {outcome} after {seconds:.0f} s: {note}")


def _command(
    command: Sequence[str], environment: Mapping[str, str], log: IO[str], limit_s: float, grace_s: float
) -> tuple[int | None, bool]:
    """Runs a command in a process group of its own. Returns its exit code, None if its time was over, and whether Ctrl-C
    ended it. No process of it is left: launchers give their workers groups of their own, so children are looked for."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    found: set[psutil.Process] = set()
    grace_s = min(grace_s, limit_s / 4)
    end, interrupted = time.monotonic() + limit_s - grace_s, False
    try:
        while process.poll() is None and time.monotonic() < end:
            found |= _children(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=min(1.0, max(0.01, end - time.monotonic())))
    except KeyboardInterrupt:
        interrupted = True
    code = process.poll()
    try:
        if code is None:
            found |= _children(process.pid)
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace_s)
    finally:
        _kill(process.pid, found)
        process.wait()
    return code, interrupted


def _children(pid: int) -> set[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def _kill(group: int, found: set[psutil.Process]) -> None:
    """Ends the group, and every process that was seen (`psutil` knows a number that has gone to another process)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[-300:] if lines else ""


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_all", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all parts together")
    parser.add_argument("--fresh", action="store_true", help="run all parts, also those that ended")
    parser.add_argument("--rehearse", action="store_true", help="also without a GPU, each part for a minute and a half")
    options = parser.parse_args(arguments)
    folder = FOLDER / "rehearsal" if options.rehearse else FOLDER
    machine = Machine.found()
    if not machine.gpus and not options.rehearse:
        print(f"nothing was run: {NO_GPU}; --rehearse starts every part")
        return 2
    parts = parts_of(machine, os.environ, folder)
    if options.rehearse:
        parts = [Part(p.name, p.command, 90.0, p.environment, p.why_not) for p in parts]
    if options.fresh:
        (folder / "state.json").unlink(missing_ok=True)
    state = GpuAll(folder, f"{_commit()} on {machine.versions['GPUs']}", lambda text: print(text, flush=True))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a part as Ctrl-C does
    passed = state.run(parts, 60 * options.minutes)
    print(f"logs, results and state: {folder}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
