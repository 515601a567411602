"""The check that the multi-process tests ran: it passes when they did, and fails in each way in which they did not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.layers import ROOT

RAN = "def test_ran(): pass\n"
CASES = {
    "they ran": (RAN, [], 0, "1 passed"),
    "one is skipped": (
        RAN + "import pytest\ndef test_b(): pytest.skip('no')\n",
        [],
        1,
        "1 tests marked gloo were skipped",
    ),
    "one is deselected": (RAN + "def test_b(): pass\n", ["-k", "ran"], 1, "1 tests marked gloo were deselected"),
    "all are deselected": (RAN, ["-m", "not gloo"], 1, "no test marked gloo passed"),
    "there are none": ("", [], 1, "no test marked gloo passed"),
    "a module is skipped": ("import pytest\npytest.skip('no', allow_module_level=True)\n", [], 1, "were skipped"),
    "a slow one is deselected": (
        RAN + "import pytest\n@pytest.mark.slow\ndef test_b(): pass\n",
        ["-m", "not slow and not gpu"],
        0,
        "1 passed",
    ),
    "an expected failure counts as run": (
        RAN + "import pytest\n@pytest.mark.xfail(strict=True)\ndef test_b(): raise KeyError\n",
        [],
        0,
        "1 xfailed",
    ),
}


def _session(folder: Path, gloo_tests: str, arguments: list[str], required: str) -> subprocess.CompletedProcess[str]:
    tests = folder / "tests"
    (tests / "gloo").mkdir(parents=True)
    (tests / "unit").mkdir()
    for package in (tests, tests / "gloo", tests / "unit"):
        (package / "__init__.py").touch()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (tests / "harness.py").write_text("def warm_up(): pass\n")
    (tests / "gloo" / "test_gloo.py").write_text(gloo_tests)
    (tests / "unit" / "test_unit.py").write_text("import sys\ndef test_ran(): assert 'torch' not in sys.modules\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    env = {**os.environ, "HOTSPA_REQUIRE_GLOO": required}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


SPREAD = ("they ran", "a module is skipped")
"""What workers tell their controller each in its own way; the others are slow where they are spread."""


@pytest.mark.parametrize(
    ("case", "spread"),
    [
        *((case, []) for case in CASES),
        *(pytest.param(case, ["-n", "2"], marks=() if case in SPREAD else pytest.mark.slow) for case in CASES),
    ],
)
def test_gloo_check(tmp_path: Path, case: str, spread: list[str]) -> None:
    gloo_tests, arguments, code, says = CASES[case]
    done = _session(tmp_path, gloo_tests, [*arguments, *spread], required="1")
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout


def test_the_check_is_only_made_on_demand(tmp_path: Path) -> None:
    done = _session(tmp_path, "import pytest\ndef test_b(): pytest.skip('no')\n", [], required="0")
    assert done.returncode == 0, done.stdout + done.stderr
