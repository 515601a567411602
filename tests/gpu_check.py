"""What became of every part of `make test-gpu`: a part that could have run must have run, and passed.

A plugin of pytest. A part that was skipped or left out is a failure, never a success; what this machine cannot run at
all is named, with the reason, and counted as nothing. With `--on cpu` the parts run on CPU processes over gloo, and the
tests that need a GPU are such.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_machine import CPU, NO_GPU, Setup
from tests.gpu_parts import PARTS

FOLDER = Path(__file__).parent / "gpu"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


class GpuCheck:
    """Counts what became of the tests in `tests/gpu`.

    Args:
        setup: How ranks run here.

    Attributes:
        cannot: Name -> why this machine cannot run it.
        results: Name -> outcome, seconds and figures of what ran.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.wanted: set[str] = set()
        self.cannot: dict[str, str] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.left_out: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        here = [item for item in items if FOLDER in item.path.parents]
        self.wanted = {name_of(item) for item in here}
        if self.setup.kind != CPU:
            return
        impossible = [item for item in here if not is_part(item)]
        self.cannot = {name_of(item): NO_GPU for item in impossible}
        items[:] = [item for item in items if item not in impossible]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.left_out |= {name_of(item) for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = short_name(report.nodeid)
        if report.when != "call" and not report.failed and not report.skipped:
            return
        result = self.results.setdefault(name, {"outcome": PASSED, "seconds": 0.0})
        result["seconds"] = round(result["seconds"] + report.duration, 1)
        if report.failed:
            result["outcome"] = FAILED
        elif report.skipped:
            result["outcome"] = NOT_RUN
        elif report.user_properties:
            result["figures"] = dict(report.user_properties)

    @property
    def complete(self) -> bool:
        """Whether every part that could run has been run, whatever came of it."""
        ran = {name for name, result in self.results.items() if result["outcome"] != NOT_RUN}
        return {part_name(name) for name in PARTS} <= self.wanted and self.wanted - set(self.cannot) <= ran

    def complaints(self) -> list[str]:
        """Why the run does not count as one in which everything passed that could run."""
        found = [f"{name} was not there" for name in sorted({part_name(n) for n in PARTS} - self.wanted)]
        for name in sorted(self.wanted - set(self.cannot)):
            outcome = self.results.get(name, {}).get("outcome")
            if outcome == FAILED:
                found.append(f"{name} failed")
            elif outcome != PASSED:
                found.append(f"{name} could have run and did not")
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly and self.complaints():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def short_name(nodeid: str) -> str:
    """`test_parts_on_gpu.py::test_part[exact]` -> `part exact`; of the others file and test."""
    file, _, test = nodeid.partition("::")
    if test.startswith("test_part["):
        return part_name(test.removeprefix("test_part[").removesuffix("]"))
    return f"{Path(file).stem.removeprefix('test_')}: {test.removeprefix('test_')}"


def part_name(part: str) -> str:
    return f"part {part}"


def name_of(item: pytest.Item) -> str:
    return short_name(item.nodeid)


def is_part(item: pytest.Item) -> bool:
    return name_of(item).startswith("part ")
