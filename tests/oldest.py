"""The oldest releases that setup.cfg allows, all together: `python -m tests.oldest` (`make test-oldest`).

Makes an environment in `.cache/oldest` with the lower end of every range, installs the package as a user would
(`pip install .`), asks `pip check`, and runs there what must hold on every release: results equal those of the plain model
and of the stock Trainer, runs resume bit for bit, users' moves are equal or refused. What belongs to the pinned release
alone (signatures, families, plans of the pages) is not run. Nothing is left out in silence: a release that the
registry does not have, and a multi-process test that does not run, end it with an error.

    python -m tests.oldest --list                  # says what it would install and run, and does nothing
    python -m tests.oldest --environment FOLDER    # somewhere else; kept, so that the next run only tests
"""

import argparse
import configparser
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "scipy", "tensorboard", "setuptools")
"""What the tests themselves need, in the versions of constraints.txt."""
TESTS = (
    "tests/gloo/test_exact.py",
    "tests/gloo/test_switch_options.py::test_every_way_to_switch_is_exact",
    "tests/gloo/test_engine.py::test_pipeline_schedules_are_exact",
    "tests/gloo/test_engine.py::test_bf16_weights_are_the_rounded_masters_and_gradients_are_fp32",
    "tests/gloo/test_trainer.py",
    "tests/gloo/test_resume.py",
    "tests/gloo/test_evaluate.py",
    "tests/gloo/test_lora_trainer.py",
    "tests/gloo/test_gradient_dtypes.py",
    "tests/gloo/test_moves.py",
    "tests/gloo/test_streaming.py",
    "tests/unit/test_batches.py",
    "tests/unit/test_older_transformers.py",
    "tests/unit/test_wide_gradients.py",
    "tests/unit/test_worker_processes.py",
)


def oldest() -> list[str]:
    """`name==version`, the lower end of every range of setup.cfg that a user who trains installs, and of PEFT's."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    extras = parser["options.extras_require"]
    lines = extras["train"] + parser["options"]["install_requires"] + extras["peft"]
    found = []
    for line in filter(None, map(str.strip, lines.splitlines())):
        requirement = Requirement(line)
        (lowest,) = (part.version for part in requirement.specifier if part.operator == ">=")
        found.append(f"{requirement.name}=={lowest}")
    return found


def tools() -> list[str]:
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    return [f"{name}=={pins[name]}" for name in TOOLS]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs contract and exactness tests with the oldest releases allowed.")
    parser.add_argument("--environment", type=Path, default=ROOT / ".cache" / "oldest")
    parser.add_argument("--list", action="store_true", help="say what would be installed and run")
    parser.add_argument("tests", nargs="*", default=TESTS, help="in place of the usual ones")
    options = parser.parse_args(argv)
    if options.list:
        print(
            "\n".join(["installs:", *(f"  {line}" for line in oldest()), "runs:", *(f"  {t}" for t in options.tests)])
        )
        return 0
    python = options.environment / "bin" / "python"
    if not python.exists():
        _run(sys.executable, "-m", "venv", options.environment)
    pip = (python, "-m", "pip")
    print(f"installing into {options.environment}: {' '.join(oldest())}", flush=True)
    if _run(*pip, "install", "-q", "--disable-pip-version-check", *oldest(), *tools()):
        print(
            "not run: pip could not install these releases; its words above say which (a registry that is set up here may lack them)"
        )
        return 1
    if _run(*pip, "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", ROOT):
        return 1
    if _run(*pip, "check", "--disable-pip-version-check"):
        return 1
    _run(
        python,
        "-c",
        "import torch, transformers as t; print('running with torch', torch.__version__, 'transformers', t.__version__)",
    )
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HOTSPA_REQUIRE_GLOO": "1", "HOTSPA_OLDEST": "1"}
    return _run(python, "-m", "pytest", "-q", "-m", "not slow and not gpu", *options.tests, **env)


def _run(*command: object, **env: str) -> int:
    words = [str(word) for word in command]
    code = subprocess.run(words, cwd=ROOT, env={**os.environ, **env}).returncode
    if code:
        print(f"failed ({code}): {shlex.join(words)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
