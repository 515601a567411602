"""Marks, one compute thread, and the check that the multi-process tests really ran.

With `HOTSPA_REQUIRE_GLOO=1` in the environment a session fails when no test marked `gloo` passed, when one was skipped,
or when one that is neither `slow` nor `gpu` was deselected. Nothing here imports torch: sessions of pure unit tests
start at once.
"""

import atexit
import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Examples are drawn anew on a desk and are always the same in continuous integration; a busy machine is no failure.
settings.register_profile("hf_hotspa", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("hf_hotspa")

# Before any import of torch, and inherited by every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A GPU of this machine is for the tests marked `gpu` only, which `make test-gpu` runs.
if os.environ.get("HOTSPA_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Tests make their own models and data; none may depend on a network, or on what was measured here before.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOTSPA_CACHE"] = _cache = tempfile.mkdtemp(prefix="hotspa-cache-")
atexit.register(shutil.rmtree, _cache, ignore_errors=True)

# A shell that starts the tests in the background lets them ignore Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

_GLOO_FOLDER = Path(__file__).parent / "gloo"


class GlooCheck:
    """Counts what became of the tests marked `gloo`; where pytest-xdist spreads them, in its controller.

    Worker processes run the tests and know what was deselected; the controller hears of each report, and of the rest when
    a worker ends.
    """

    def __init__(self, required: bool) -> None:
        self.required = required
        self.collected = False
        self.passed: set[str] = set()
        self.skipped: set[str] = set()
        self.deselected: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if _GLOO_FOLDER in item.path.parents:
                item.add_marker(pytest.mark.gloo)
            self.collected |= item.get_closest_marker("gloo") is not None

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            marks = {mark.name for mark in item.iter_markers()}
            if "gloo" in marks and not marks & {"slow", "gpu"}:
                self.deselected.add(item.nodeid)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        chosen = any(item.get_closest_marker("gloo") for item in session.items)
        if chosen and not session.config.option.collectonly:
            from tests.harness import warm_up

            warm_up()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and "gloo" in Path(report.nodeid.partition("::")[0]).parts:
            self.skipped.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gloo" not in report.keywords:
            return
        self.collected = True
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.add(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """In the controller: a worker has ended."""
        seen = getattr(node, "workeroutput", {}).get("gloo_check", {})
        self.collected |= seen.get("collected", False)
        self.deselected |= set(seen.get("deselected", ()))

    def complaints(self) -> list[str]:
        """Why the session does not count as one that ran the multi-process tests."""
        if not self.required:
            return []
        found = [] if self.passed else ["no test marked gloo passed"]
        for word, ids in (("skipped", self.skipped), ("deselected", self.deselected)):
            if ids:
                found.append(f"{len(ids)} tests marked gloo were {word}, such as {min(ids)}")
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:  # this is a worker: the controller judges
            output["gloo_check"] = {"collected": self.collected, "deselected": sorted(self.deselected)}
        elif session.exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly and self.complaints():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.config.option.collectonly:
            return
        for text in self.complaints():
            terminalreporter.write_line(f"FAILED gloo check (HOTSPA_REQUIRE_GLOO=1): {text}", red=True)
        if self.collected:
            terminalreporter.write_line(f"gloo tests: {len(self.passed)} passed, {len(self.skipped)} skipped")


def _leave_out_of_collections() -> None:
    """What is alive now, the imported libraries above all, is looked at by no later collection. The Trainer asks for one in every
    training, and with torch and transformers imported it takes longer than the training of a tiny model."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _leave_out_of_collections()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        _leave_out_of_collections()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GlooCheck(os.environ.get("HOTSPA_REQUIRE_GLOO") == "1"), "hotspa-gloo-check")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if os.environ.get("HOTSPA_GPU_ON") == "cpu":  # `python -m tests.gpu --on cpu` leaves out what needs one
            return
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU, and torch sees none")
