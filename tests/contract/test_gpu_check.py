"""`make test-gpu` passes when every part that could run did and passed, and fails in each way in which one did not."""

import subprocess
import sys
from typing import Any

import pytest

from tests.contract.layers import ROOT
from tests.gpu_check import GpuCheck, part_name
from tests.gpu_machine import CPU, HOST, NO_GPU, OWN, SHARED, TITLES, Machine, setup_of
from tests.gpu_page import LIMITS, README, STATUS, block, read, status
from tests.gpu_parts import PARTS, held_bytes

NAMES = [part_name(name) for name in PARTS]


class Report:
    """As much of a pytest report as is looked at."""

    def __init__(self, name: str, outcome: str, when: str = "call") -> None:
        self.nodeid = f"tests/gpu/test_parts_on_gpu.py::test_part[{name}]"
        self.passed, self.failed, self.skipped = (outcome == word for word in ("passed", "failed", "skipped"))
        self.when, self.duration, self.user_properties = when, 1.0, list[Any]()


ALL = dict.fromkeys(PARTS, "passed")


def without(part: str) -> dict[str, str]:
    return {name: outcome for name, outcome in ALL.items() if name != part}


@pytest.mark.parametrize(
    ("outcomes", "more", "complaint", "complete"),
    [
        (ALL, None, None, True),
        ({**ALL, "auto": "failed"}, None, "part auto failed", True),
        ({**ALL, "auto": "skipped"}, None, "part auto could have run and did not", False),
        (without("loop"), None, "part loop could have run and did not", False),
        # before and after the test itself
        (without("loop"), Report("loop", "skipped", "setup"), "part loop could have run and did not", False),
        (ALL, Report("loop", "failed", "teardown"), "part loop failed", True),
    ],
)
def test_what_did_not_pass_is_a_failure(
    outcomes: dict[str, str], more: Report | None, complaint: str | None, complete: bool
) -> None:
    check = check_of(outcomes)
    if more is not None:
        check.pytest_runtest_logreport(more)  # type: ignore[arg-type]
    assert check.complaints() == ([complaint] if complaint else [])
    assert check.complete == complete


def check_of(outcomes: dict[str, str]) -> GpuCheck:
    check = GpuCheck(setup_of(Machine(("A GPU",), "1", "13.0", (2, 30, 0), "2.13.0"), 4))
    check.wanted = set(NAMES)
    for name, outcome in outcomes.items():
        check.pytest_runtest_logreport(Report(name, outcome))  # type: ignore[arg-type]
    return check


def test_a_part_that_is_no_longer_there_is_missed_and_what_a_machine_cannot_run_is_not() -> None:
    check = check_of(ALL)
    check.wanted.add("engine_on_gpu: bf16")
    assert check.complaints() == ["engine_on_gpu: bf16 could have run and did not"]
    check.cannot["engine_on_gpu: bf16"] = NO_GPU
    assert check.complaints() == []
    assert "engine_on_gpu: bf16" not in check.results
    check.wanted.discard(part_name("auto"))
    assert check.complaints() == ["part auto was not there"]
    assert not check.complete


def run_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.skipif("__import__('torch').cuda.device_count() > 0")
def test_without_a_gpu_the_command_fails_and_runs_nothing() -> None:
    run = run_gpu()
    assert run.returncode == 2
    assert "nothing was run" in run.stdout
    assert NO_GPU in run.stdout


@pytest.mark.slow
def test_a_library_that_is_not_there_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPA_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    run = run_gpu("--on", "cpu")
    assert run.returncode == 2
    assert "HOTSPA_NCCL_LIBRARY names /nowhere/libnccl.so.2" in run.stdout


@pytest.mark.slow
def test_what_is_left_out_fails_and_leaves_the_log_as_it_is() -> None:
    before = (ROOT / "docs" / "gpu-tests.json").read_bytes()
    run = run_gpu("--on", "cpu", "-q", "-k", "agreement")
    lines = [line for line in run.stdout.splitlines() if line]
    assert run.returncode == 1, run.stdout[-3000:]
    assert lines[0].startswith(TITLES[CPU])
    assert lines[-1].startswith(lines[0])
    assert lines[-1].endswith(" cannot run here")
    assert f"1 passed, {len(PARTS) - 1} failed or left out" in lines[-1]
    assert "FAILED: part exact could have run and did not" in lines
    assert (ROOT / "docs" / "gpu-tests.json").read_bytes() == before


# ------------------------------------------------------------------------------------------------------ log and pages


def test_the_pages_say_what_the_log_says() -> None:
    runs = read()
    assert block(runs) in LIMITS.read_text(), "python -m tests.gpu_page writes it anew"
    assert status(runs) in README.read_text().split("\n"), "python -m tests.gpu_page writes it anew"


def test_the_log_is_of_the_parts_that_there_are() -> None:
    for kind, run in read().items():
        assert run["kind"] == kind
        assert set(NAMES) <= set(run["results"]), (
            f"the parts have changed since the run on {TITLES[kind]}: run it again"
        )


def made_up(kind: str, result: str = "passed", **outcomes: str) -> dict[str, Any]:
    results = {name: {"outcome": outcomes.get(name.split()[1], "passed")} for name in NAMES}
    gpus = "none" if kind == CPU else "1 x A GPU"
    versions = {"GPUs": gpus, "driver": "1", "CUDA": "13.0", "NCCL": "2.30.0", "torch": "2.13.0"}
    return {"kind": kind, "ranks": 4, "date": "2026-01-02", "versions": versions, "result": result, "results": results,
            "cannot run here": {}}  # fmt: skip


def test_the_status_promises_nothing_that_did_not_pass() -> None:
    nothing = status({CPU: made_up(CPU), HOST: made_up(HOST)})
    assert "nothing has run over NCCL yet" in nothing
    assert status({SHARED: made_up(SHARED, "failed", auto="failed")}) == nothing
    shared = status({SHARED: made_up(SHARED)})
    assert "over NCCL on 4 ranks on 1 x A GPU" in shared
    assert "no multi-GPU figures" in shared
    own = status({OWN: made_up(OWN)})
    assert "no multi-GPU figures" not in own
    assert all(line.startswith(STATUS) for line in (nothing, shared, own))


def test_the_loop_would_see_a_leak() -> None:
    import torch

    before = held_bytes()
    leak = torch.zeros(1 << 15)
    assert held_bytes() - before == leak.untyped_storage().nbytes()
