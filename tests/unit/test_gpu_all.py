"""`make gpu-all` keeps what it has: parts in order, limits that end all processes, a state that the next call resumes."""

import json
import sys
from pathlib import Path

import one_gpu  # type: ignore[import-not-found]
import psutil  # type: ignore[import-untyped]

from tests.gpu_all import CUT, FAILED, LEFT_OUT, PASSED, TOO_LONG, GpuAll, Part, parts_of
from tests.gpu_machine import LIBRARY, Machine
from tests.nodes import all_end

ONE_H100 = Machine(("H100",), "1", "13.0", (2, 29, 0), "2.13.0")


def part(name: str, program: str, limit_s: float = 20.0, why_not: str = "") -> Part:
    return Part(name, (sys.executable, "-S", "-c", program), limit_s, {"HOTSPA_MADE_UP": name}, why_not)


def outcomes(folder: Path) -> dict[str, str]:
    return {name: each["outcome"] for name, each in json.loads((folder / "state.json").read_text())["parts"].items()}


def test_parts_run_in_order_and_only_those_that_did_not_end_run_again(tmp_path: Path) -> None:
    parts = [
        part("good", "import os; print('hello from', os.environ['HOTSPA_MADE_UP'])"),
        part("bad", "raise SystemExit('no GPU here')"),
        part("impossible", "print('never')", why_not="no library"),
    ]
    said: list[str] = []
    assert not GpuAll(tmp_path, "a GPU", said.append).run(parts)
    assert outcomes(tmp_path) == {"good": PASSED, "bad": FAILED, "impossible": LEFT_OUT}
    assert "hello from good" in (tmp_path / "good.log").read_text()
    assert "no GPU here" in json.loads((tmp_path / "state.json").read_text())["parts"]["bad"]["note"]
    logs = {name: (tmp_path / f"{name}.log").read_bytes() for name in ("good", "bad")}
    able = [*parts[:2], part("impossible", "print('now')")]  # the reason is gone
    again = GpuAll(tmp_path, "a GPU", said.append)
    assert not again.run(able)  # one had failed
    assert outcomes(tmp_path)["impossible"] == PASSED
    assert {name: (tmp_path / f"{name}.log").read_bytes() for name in logs} == logs
    assert GpuAll(tmp_path, "another GPU", said.append).results == {}


WORKERS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: print("asked to end", flush=True))
own = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
print(own.pid, flush=True)
while True: time.sleep(0.1)
"""


def test_a_limit_ends_all_processes_and_the_next_part_runs(tmp_path: Path) -> None:
    """Also a worker with a process group of its own, and a part that does not heed Ctrl-C."""
    parts = [part("long", WORKERS, limit_s=4.0), part("next", "print('here')")]
    assert not GpuAll(tmp_path, "a GPU", lambda _: None).run(parts, grace_s=2.0)
    assert outcomes(tmp_path) == {"long": TOO_LONG, "next": PASSED}
    lines = (tmp_path / "long.log").read_text().splitlines()
    assert "asked to end" in lines
    assert any(line.isdigit() for line in lines)
    left = [process for process in psutil.process_iter() if process.pid in {int(x) for x in lines if x.isdigit()}]
    assert all_end(left, 2.0)


def test_what_ctrl_c_or_the_end_of_all_time_cut_is_run_by_the_next_call(tmp_path: Path) -> None:
    program = "import os, signal, time; time.sleep(0.3); os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    calls = [part("first", program), part("second", "print('here')")]
    assert not GpuAll(tmp_path, "a GPU", lambda _: None).run(calls)
    assert outcomes(tmp_path) == {"first": CUT}
    calls = [part("first", "print('done')"), part("second", "print('here')", limit_s=100.0)]
    assert not GpuAll(tmp_path, "a GPU", lambda _: None).run(calls, total_s=30.0)
    assert outcomes(tmp_path) == {"first": PASSED, "second": CUT}
    assert GpuAll(tmp_path, "a GPU", lambda _: None).run(calls)
    assert outcomes(tmp_path) == {"first": PASSED, "second": PASSED}


def test_the_parts_of_a_machine(tmp_path: Path) -> None:
    """A library that is no file leaves NCCL's parts out, with the reason; gloo never gets it; no part has over ten minutes."""
    for environment, why in (({}, "names no file"), ({LIBRARY: "/nowhere/nccl.so"}, "names /nowhere/nccl.so")):
        parts = {each.name: each for each in parts_of(ONE_H100, environment, tmp_path)}
        assert [name for name, each in parts.items() if each.why_not] == ["nccl", "wire"]
        assert why in parts["nccl"].why_not
        assert "--processes" not in parts["bench"].command
    library = tmp_path / "libnccl.so.2"
    library.touch()
    parts = {each.name: each for each in parts_of(ONE_H100, {LIBRARY: str(library)}, tmp_path)}
    assert not any(each.why_not for each in parts.values())
    assert parts["nccl"].environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert parts["wire"].environment["LD_PRELOAD"] == str(library)
    assert parts["gloo"].environment[LIBRARY] is None
    assert [name for name in parts if name.startswith("one-gpu")] == ["one-gpu", "one-gpu-lora", "one-gpu-qlora"]
    for name, each in parts.items():
        if name.startswith("one-gpu"):  # the benchmark knows all that it is given
            assert one_gpu.parse_options(each.command[2:]).adapted == (name != "one-gpu")
    assert all(each.limit_s <= 540 for each in parts.values())
