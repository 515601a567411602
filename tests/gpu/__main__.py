"""`make test-gpu`: every part on what this machine has, one line about it first and last, and a log that docs are made of.

    python -m tests.gpu                 # on GPUs: over NCCL where it can be
    python -m tests.gpu --on host       # on GPUs, messages through the host
    python -m tests.gpu --on cpu        # the same parts on CPU processes over gloo
    python -m tests.gpu --no-log -k exact

It fails where a part failed, and where one that could have run did not. `HOTSPA_NCCL_LIBRARY=/path/libnccl.so.2` runs
everything with that library in the place of torch's.
"""

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_check import FOLDER, GpuCheck
from tests.gpu_machine import CPU, LIBRARY, NO_GPU, ON, Machine, announcement, best_setup, preloading
from tests.gpu_page import LOG, rewrite, with_run


def entry(machine: Machine, check: GpuCheck, complaints: list[str]) -> dict[str, Any]:
    """What the log keeps of a run."""
    return {
        "kind": check.setup.kind,
        "ranks": check.setup.ranks,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "versions": machine.versions,
        "result": "failed" if complaints else "passed",
        "results": dict(sorted(check.results.items())),
        "cannot run here": dict(sorted(check.cannot.items())),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--on", choices=("gpu", "host", "cpu"), default="gpu", help="host: on GPUs, without NCCL")
    parser.add_argument("--no-log", action="store_true", help=f"leave {LOG.name} as it is")
    options, for_pytest = parser.parse_known_args(arguments)
    if options.on == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ[ON] = options.on
    machine = Machine.found(driver=True)
    if options.on != "cpu" and not machine.gpus:
        print(f"nothing was run: {NO_GPU}; the same parts run on CPU processes with --on cpu", flush=True)
        return 2
    library = os.environ.get(LIBRARY)
    if library and not Path(library).is_file():  # the loader would warn, and go on with torch's
        print(f"nothing was run: {LIBRARY} names {library}, which is no file", flush=True)
        return 2
    changes = preloading(machine, os.environ)
    if changes is not None:  # a library is preloaded when a process starts, and inherited
        command = [sys.executable, "-m", "tests.gpu", *(sys.argv[1:] if arguments is None else arguments)]
        os.execve(sys.executable, command, {**os.environ, **changes})
    setup = best_setup(machine)
    os.environ["HOTSPA_TEST_GPU"] = "0" if setup.kind == CPU else "1"
    print(announcement(machine, setup), flush=True)
    check = GpuCheck(setup)
    code = int(pytest.main([str(FOLDER), *for_pytest], plugins=[check]))
    complaints = check.complaints()
    if not options.no_log and check.complete:
        rewrite(with_run(entry(machine, check, complaints)))
        print(f"written to {LOG}, and to the pages that quote it")
    for text in complaints:
        print(f"FAILED: {text}")
    for name, why in check.cannot.items():
        print(f"not run, counted as nothing: {name}: {why}")
    passed = sum(result["outcome"] == "passed" for result in check.results.values())
    verdict = f"{passed} passed, {len(complaints)} failed or left out, {len(check.cannot)} cannot run here"
    print(f"{announcement(machine, setup)}; {verdict}", flush=True)
    return code or bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
